"""fastipc: the IPC core of an inference server, as a library.

A shared-memory broadcast queue with one writer and many readers (:class:`MessageQueue`) that is as
quick as a spinning reader under load and as cheap as a sleeping one when idle, names who is stuck
or dead, and leaves nothing behind.
"""

import logging as _logging

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
    Full,
    HandleMismatch,
    IPCError,
    NotReady,
    PeerDied,
    RemoteError,
    ReplyTimeout,
    SharedMemoryFull,
    WorkerDied,
)
from .handle import Handle
from .queue import MessageQueue, ShmRingBuffer, wait

__version__ = "0.1.0"

__all__ = [
    "ChildDied",
    "Closed",
    "DecodeError",
    "Empty",
    "Full",
    "Handle",
    "HandleMismatch",
    "IPCError",
    "MessageQueue",
    "NotReady",
    "PeerDied",
    "RemoteError",
    "ReplyTimeout",
    "SharedMemoryFull",
    "ShmRingBuffer",
    "WorkerDied",
    "wait",
]

_logging.getLogger("fastipc").addHandler(_logging.NullHandler())
