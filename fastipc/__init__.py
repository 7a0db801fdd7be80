"""fastipc: the IPC core of an inference server, as a library.

A shared-memory broadcast queue with one writer and many readers (:class:`MessageQueue`) that is as
quick as a spinning reader under load and as cheap as a sleeping one when idle, names who is stuck
or dead, and leaves nothing behind.
"""

import logging as _logging
from typing import TYPE_CHECKING as _TYPE_CHECKING

try:
    from . import _core as _core
except ImportError as _error:  # pragma: no cover
    raise ImportError(
        "fastipc's compiled part is missing or of another Python: this is its source tree, not an "
        "installation. Use what `pip install .` installed, from another directory (the command "
        "`fastipc` does)"
    ) from _error

from .errors import (
    ChildDied,
    Closed,
    DecodeError,
    Empty,
    EngineDeadError,
    Full,
    HandleMismatch,
    IPCError,
    NotReady,
    PeerDied,
    RemoteError,
    ReplyTimeout,
    RequestFailed,
    SharedMemoryFull,
    SlowConsumer,
    TooManyRequests,
    WorkerDied,
)
from .handle import Handle
from .queue import MessageQueue, ShmRingBuffer, wait

if _TYPE_CHECKING:
    from .engine import AsyncEngineClient as AsyncEngineClient
    from .engine import EngineClient as EngineClient
    from .engine import EngineCore as EngineCore
    from .executor import MultiprocExecutor as MultiprocExecutor
    from .executor import Worker as Worker

__version__ = "0.1.0"

__all__ = [
    "ChildDied",
    "Closed",
    "DecodeError",
    "Empty",
    "EngineDeadError",
    "Full",
    "Handle",
    "HandleMismatch",
    "IPCError",
    "MessageQueue",
    "NotReady",
    "PeerDied",
    "RemoteError",
    "RequestFailed",
    "ReplyTimeout",
    "SharedMemoryFull",
    "ShmRingBuffer",
    "SlowConsumer",
    "TooManyRequests",
    "WorkerDied",
    "wait",
]

_LAZY = {
    "AsyncEngineClient": "engine",
    "EngineClient": "engine",
    "EngineCore": "engine",
    "MultiprocExecutor": "executor",
    "Worker": "executor",
}


def __getattr__(name: str) -> object:
    """The classes of the loops, whose modules are imported when they are first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value: object = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


_logging.getLogger("fastipc").addHandler(_logging.NullHandler())
