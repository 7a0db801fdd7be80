"""Engine cores and their front ends: the loops of an inference server, ready to subclass.

Subclass :class:`EngineCore`, ``launch`` it in processes of its own, and send it requests through an
:class:`EngineClient` (threads) or :class:`AsyncEngineClient` (asyncio), from this process or from
others. Read on in core.py (what to subclass), process.py (the loop that runs it), frontend.py (the
other end), protocol.py (what they say to each other).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .core import EngineCore

if TYPE_CHECKING:
    from .aio import AsyncEngineClient, AsyncOutputStream
    from .client import EngineClient, OutputStream, PendingCall
    from .group import EngineGroup, launch
    from .process import run_engine
    from .protocol import ClientSpec

__all__ = [
    "AsyncEngineClient",
    "AsyncOutputStream",
    "ClientSpec",
    "EngineClient",
    "EngineCore",
    "EngineGroup",
    "OutputStream",
    "PendingCall",
    "launch",
    "run_engine",
]

# What needs asyncio or ZMQ is imported when it is first asked for.
_WHERE = {
    "AsyncEngineClient": "aio",
    "AsyncOutputStream": "aio",
    "ClientSpec": "protocol",
    "EngineClient": "client",
    "EngineGroup": "group",
    "OutputStream": "client",
    "PendingCall": "client",
    "launch": "group",
    "run_engine": "process",
}


def __getattr__(name: str) -> Any:
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return value
