"""Readers on other hosts: the writer's and a reader's end over TCP.

Both stand where :class:`fastipc._core.Endpoint` stands for local queues, with the same methods, so
that MessageQueue need not know which it has. The writer's end includes the local ring, if the
queue has local readers too, and keeps one order for all.

What is said on the wire, and how a lost connection costs nothing, is in wire.py. ZMQ carries it:
an XPUB that binds, an XSUB per reader, CURVE to let in only who knows the server's key. The queue
of each connection is finite (SNDHWM), and XPUB_NODROP makes a full one an error. Since the writer
gives out less credit than that queue is long, a full one is never a reader's that is waited for,
but that of a dead connection or a stranger: then, and only then, it is sent past it.

Read on in remote_end.py (calls, waiting, threads), remote_writer.py, remote_reader.py, keeper.py
(what happens between calls, at fork and at exit) and addresses.py.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence
from typing import Any

from . import _core, keeper
from .errors import Closed, IPCError
from .remote_end import SLICE, until
from .remote_reader import RemoteReader
from .remote_writer import RemoteWriter

__all__ = ["RemoteReader", "RemoteWriter", "wait_any"]


def wait_any(ends: Sequence[Any], timeout: float | None = None) -> list[int]:
    """_core.wait_any for readers of both kinds.

    The remote ones are slept on by their descriptors, the local ones by a thread of this call's,
    which there is only if there are both.
    """
    if timeout is not None and not timeout >= 0:
        raise ValueError(
            f"timeout must be None or a number of seconds of at least 0, not {timeout!r}"
        )
    if any(end.is_writer for end in ends):
        raise IPCError("only readers are waited for; this end of the queue is the writer's")
    deadline = until(timeout)
    local = [end for end in ends if isinstance(end, _core.Endpoint)]
    remote = [end for end in ends if isinstance(end, RemoteReader)]
    watcher: _Watcher | None = None
    try:
        while True:
            found = [i for i, end in enumerate(ends) if end.closed or _readable(end)]
            left = keeper.remaining(deadline)
            if found or left == 0:
                return found
            poller = select.poll()
            if local:
                watcher = _watch(local)
                poller.register(watcher.wake.fd, select.POLLIN)
            for end in remote:
                poller.register(end._fd, select.POLLIN)
                poller.register(end._wake.fd, select.POLLIN)
            poller.poll((SLICE if left is None else min(left, SLICE)) * 1000)
            for end in remote:
                if not end._stopped:
                    end._wake.clear()
    finally:
        if watcher is not None:
            watcher.armed.clear()


class _Watcher(threading.Thread):
    """Sleeps on rings for a thread that sleeps on descriptors. It is kept for the next call, and
    ends when there was none for a while."""

    IDLE_SECONDS = 2.0

    def __init__(self, ends: list[_core.Endpoint]) -> None:
        super().__init__(name="fastipc-wait", daemon=True)
        self.ends = ends
        self.wake = keeper.Wake()
        self.armed = threading.Event()
        self.guard = threading.Lock()
        self.ended = False
        self.pid = os.getpid()

    def run(self) -> None:
        while True:
            if not self.armed.wait(self.IDLE_SECONDS):
                with self.guard:
                    if not self.armed.is_set():
                        self.ended = True
                        self.wake.close()
                        return
            try:
                found = bool(_core.wait_any(self.ends, SLICE))
            except IPCError:
                found = True
            if found:
                self.armed.clear()
                self.wake.set()


_kept = threading.local()


def _watch(ends: list[_core.Endpoint]) -> _Watcher:
    """This thread's watcher, at work on these ends."""
    watcher: _Watcher | None = getattr(_kept, "watcher", None)
    if watcher is not None and watcher.pid == os.getpid() and watcher.ends == ends:
        with watcher.guard:
            if not watcher.ended:
                watcher.wake.clear()
                watcher.armed.set()
                return watcher
    watcher = _Watcher(list(ends))
    watcher.armed.set()
    try:
        watcher.start()
    except BaseException:
        watcher.wake.close()
        raise
    _kept.watcher = watcher  # not before: one that never ran would be waited with in vain
    return watcher


def _readable(end: Any) -> bool:
    try:
        return bool(end.readable())
    except Closed:
        return True
