"""What the remote ends of a process share: the ZMQ context, a thread that looks after ends while
nobody is calling them, and what happens at fork and at exit.

A call sends on its end's socket itself, and receives itself as a reader, under the end's lock: so
a message goes from the caller to ZMQ's own thread without waiting for another Python thread to get
the GIL, which can take 5 ms when the caller goes on computing. Everything else (what readers say
to a writer, connections that come and go, acknowledgements that are due, a close that is still
being delivered) is done by the one keeper thread, which sleeps on the descriptors of all ends.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import socket
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import zmq
import zmq.utils.garbage  # has an exit hook, which must run after ours

__all__ = [
    "Ends",
    "Wake",
    "add",
    "close_socket",
    "context",
    "finish",
    "forks",
    "nudge",
    "open_socket",
    "remaining",
    "stream_sockets",
]

logger = logging.getLogger("fastipc")

# An idle end is looked at this often, in seconds, whatever its descriptors say: what a lost
# wake-up costs. As long as a sleep on the ring.
TICK = 0.25
# The same while a connection is lost or being made.
SOON = 0.05
# At exit, how long a call in another thread may take to notice that its end was closed.
EXIT_SECONDS = 1.0


class Ends(Protocol):
    """What the keeper needs of an end. No method may wait or raise."""

    def descriptors(self) -> tuple[int, ...]:
        """What to be woken by. Service resets them."""

    def patience(self) -> float:
        """When to look again though nothing happens, in seconds."""

    def service(self) -> bool:
        """Does what is due; False: closed, and nothing will be due again."""

    def close(self) -> None: ...

    def hopeless(self) -> bool:
        """At exit: whether a closed end has nothing left that it waits for."""

    def discard(self) -> bool:
        """Gives the socket back, delivered or not; False if a call is still using it."""

    def tcp(self) -> tuple[int, tuple[str, int] | None]:
        """(the local port of its sockets or 0, their address at the other end or None)"""


class Wake:
    """A descriptor to sleep on beside others, and to be woken by from any thread or handler."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self.fd = self._write = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        else:
            self.fd, self._write = os.pipe()
            os.set_blocking(self.fd, False)
            os.set_blocking(self._write, False)

    def set(self) -> None:
        try:
            os.write(self._write, b"\1\0\0\0\0\0\0\0")
        except OSError:
            pass  # full, so it is set; or closed, so nobody sleeps

    def clear(self) -> None:
        try:
            os.read(self.fd, 4096)
        except OSError:
            pass

    def close(self) -> None:
        fd, write = self.fd, self._write
        self.fd = self._write = -1
        if fd >= 0:
            os.close(fd)
        if write not in (fd, -1):
            os.close(write)


class _Keeper:
    def __init__(self) -> None:
        self.ends: set[Ends] = set()
        # New ends come in here: append is atomic, so a finalizer may run anywhere.
        self._new: deque[Ends] = deque()
        self._wake = Wake()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="fastipc-keeper", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._wake.close()
            raise

    def add(self, end: Ends) -> None:
        self._new.append(end)
        self._wake.set()

    def nudge(self) -> None:
        self._wake.set()

    def admit(self) -> None:
        while self._new:
            self.ends.add(self._new.popleft())

    def everyone(self) -> list[Ends]:
        return [*self.ends, *self._new]

    def stop(self) -> None:
        self._stop = True
        self._wake.set()
        self._thread.join()
        self._wake.close()
        self.admit()

    def _run(self) -> None:
        while not self._stop:
            try:
                self.admit()
                self.sleep(min((end.patience() for end in self.ends), default=TICK))
                self._wake.clear()
                self.admit()
                self.service()
            except Exception:
                # No memory for a moment, say. Without this thread every remote end would hang.
                logger.exception("looking after the remote ends of queues failed")
                time.sleep(TICK)

    def sleep(self, seconds: float) -> None:
        poller = select.poll()
        if not self._stop:
            poller.register(self._wake.fd, select.POLLIN)
        for end in self.ends:
            for fd in end.descriptors():
                poller.register(fd, select.POLLIN)
        poller.poll(seconds * 1000)

    def service(self) -> None:
        for end in list(self.ends):
            if not end.service():
                self.ends.discard(end)


_lock = threading.Lock()
_keeper: _Keeper | None = None
_context: zmq.Context[zmq.Socket[bytes]] | None = None
_open_sockets: set[zmq.Socket[bytes]] = set()
_forks = 0
_exit_hook_of = 0


def forks() -> int:
    """Changes in a forked child: an end that was made under another value is the parent's."""
    return _forks


def context() -> zmq.Context[zmq.Socket[bytes]]:
    """This process's ZMQ context for remote ends, made when first needed."""
    global _context
    with _lock:
        if _context is None:
            _context = zmq.Context()
            # three sockets an end; the default of 1,023 would do for 300 queues
            _context.set(zmq.MAX_SOCKETS, min(65535, _context.get(zmq.SOCKET_LIMIT)))
        return _context


def add(end: Ends) -> None:
    """Has the keeper look after an end until its service says that it is done."""
    global _keeper
    with _lock:
        if _keeper is None:
            _keeper = _Keeper()
        _keeper.add(end)
    _hook_exit()


def nudge() -> None:
    """Something is due. From any thread, and from finalizers: takes no lock."""
    keeper = _keeper
    if keeper is not None:
        keeper.nudge()


def _hook_exit() -> None:
    """A child that multiprocessing started skips atexit."""
    global _exit_hook_of
    util = sys.modules.get("multiprocessing.util")
    if util is not None and _exit_hook_of != os.getpid():
        _exit_hook_of = os.getpid()
        util.Finalize(None, finish, exitpriority=0)


@atexit.register
def finish() -> None:
    """Closes every end, waits (bounded by the ends) until what was sent has been delivered, and
    gives everything back. Registered after zmq's own exit hooks, so it runs before them."""
    global _keeper, _context
    with _lock:
        keeper, _keeper = _keeper, None
    if keeper is None:
        return
    for end in keeper.everyone():
        end.close()
    keeper.stop()
    patience = time.monotonic() + EXIT_SECONDS
    while True:
        keeper.service()
        for end in [end for end in keeper.ends if end.hopeless()]:
            if end.discard() or time.monotonic() > patience:
                keeper.ends.discard(end)
        if not keeper.ends:
            break
        keeper.sleep(0.02)
    with _lock:
        context, _context = _context, None
    # A thread that is stuck inside a call may have kept its socket: term would wait for it.
    if context is not None and not _open_sockets:
        # What a socket was closed with is sent now, or given up at the end of its linger.
        context.term()


def open_socket(kind: int) -> zmq.Socket[bytes]:
    """A socket of this process's context, to be given back with close_socket."""
    made: zmq.Socket[bytes] = context().socket(kind)
    _open_sockets.add(made)
    return made


def close_socket(made: zmq.Socket[bytes], linger_ms: int) -> None:
    made.close(linger=linger_ms)
    _open_sockets.discard(made)


def _before_fork() -> None:
    # The child gets these locks as they are now: nobody may be half-way through them.
    _lock.acquire()


def _after_fork_in_parent() -> None:
    _lock.release()


def _after_fork_in_child() -> None:
    """The child has no ends. It must not keep its copies of their TCP sockets either: while one
    is open anywhere the kernel doesn't tell the peer that the parent has died."""
    global _forks, _keeper, _context
    _lock.release()
    _forks += 1
    keeper, _keeper = _keeper, None
    # Never terminated: its threads are the parent's.
    _abandoned.append((_context, set(_open_sockets)))
    _context = None
    _open_sockets.clear()
    if keeper is None:
        return
    _abandoned.append(keeper)
    ports, peers = set(), set()
    for end in keeper.everyone():
        port, peer = end.tcp()
        if port:
            ports.add(port)
        if peer is not None:
            peers.add(peer)
    for fd in _tcp_sockets(ports, peers):
        try:
            os.close(fd)
        except OSError:
            pass


# What a forked child must never touch, not even to finalize it.
_abandoned: list[object] = []

os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)


def stream_sockets() -> Iterator[socket.socket]:
    """Each stream socket among this process's descriptors, to be looked at until the next comes."""
    try:
        names = os.listdir("/dev/fd")
    except OSError:
        return
    for name in names:
        fd = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            view = socket.socket(fileno=fd)
        except OSError:
            continue
        try:
            if view.type == socket.SOCK_STREAM:
                yield view
        finally:
            view.detach()


def _tcp_sockets(ports: set[int], peers: set[tuple[str, int]]) -> list[int]:
    """This process's TCP sockets with one of these ports here, or of these addresses there."""
    found: list[int] = []
    for view in stream_sockets():
        try:
            if view.family in (socket.AF_INET, socket.AF_INET6):
                here = view.getsockname()[1] in ports
                if here or (peers and view.getpeername()[:2] in peers):
                    found.append(view.fileno())
        except OSError:
            pass  # not connected
    return found


def remaining(deadline: float | None) -> float | None:
    """Seconds until a monotonic time, at least 0; None for never."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
