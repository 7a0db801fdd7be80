"""What the writer's and a reader's end over TCP share: how a call begins, waits and ends.

Locks: `_turn` orders the calls of an end and is held while one waits; `_lock` guards the socket
and all state, and is held for moments only. `_turn` comes first.

A signal handler of the user's may raise between any two lines that the main thread runs here. So
every change that counts is made by one operation (an append, an assignment), from which the rest
is derived; no lock is taken or given back by Python code; and what ZMQ can lose in that way (pyzmq
looks for signals after it has taken a message from a socket) is either asked for again, or
received by the keeper's thread, where no handlers run: what readers say, and what becomes of
connections.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from . import _core, keeper
from .errors import Closed, IPCError

__all__ = ["SHUT", "SLICE", "STATS", "Notice", "RemoteEnd", "curve_key_pair"]

logger = logging.getLogger("fastipc")

# How long a wait sleeps at most before it looks again: nothing depends on it being short.
SLICE = 0.25

# notice(end, kind, rank, pid, host, seconds, sequence number), as for _core.Endpoint
Notice = Callable[[Any, str, "int | None", int, str, float, int], None]

_numbers = itertools.count()
_EVENT = struct.Struct("=hi")  # of a socket's monitor: which, and a value

_FORKED = (
    "this end of the queue belongs to the parent process: after fork, use "
    "MessageQueue.create_from_handle(handle, rank) in the child, with what export_handle() gave "
    "the parent"
)
SHUT = "this end of the queue was shut down or closed"

# what Endpoint.stats has
STATS = (
    "messages",
    "bytes",
    "bytes_copied",
    "fragments",
    "waits",
    "sleeps",
    "wakes",
    "spin_ns",
    "segment_bytes",
    "resident_bytes",
)


def until(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def within(timeout: float | None) -> str:
    return "" if not timeout else f" within {timeout} s"


def curve_key_pair() -> tuple[bytes, bytes]:
    """(public, secret). Raises IPCError where ZMQ has no CURVE."""
    if not zmq.has("curve"):
        raise IPCError(
            "this pyzmq was built without CURVE, so it can't encrypt: install one that was, or "
            "pass secure=False to let anyone who reaches the port read the queue"
        )
    return zmq.curve_keypair()


class RemoteEnd:
    """What both ends share: calls, waiting, threads, fork, the monitor, the end."""

    is_writer: bool

    def __init__(self, notice: Notice) -> None:
        self._notice = notice
        self._forks = keeper.forks()
        self._turn = _core.Turn()
        self._lock = threading.RLock()
        self._stopped = False
        self._closing = False
        self._dump: Callable[[Any], tuple[list[Any], int]]
        self._load_one: Callable[[bytes], Any]
        self._load_many: Callable[[list[_core.Block]], Any]
        self._gone = False  # the socket has been given back
        self._wake: keeper.Wake
        self._socket: zmq.Socket[bytes]
        self._monitor: zmq.Socket[bytes]
        self._fd = self._monitor_fd = -1

    def _open_socket(self, kind: int, linger_ms: int) -> None:
        try:
            self._wake = keeper.Wake()
            self._socket = keeper.open_socket(kind)
            self._socket.linger = linger_ms
            self._socket.tcp_keepalive = 1
            self._socket.tcp_keepalive_idle = 10
            self._socket.tcp_keepalive_intvl = 5
            self._socket.tcp_keepalive_cnt = 4
            # a number of its own: ZMQ forgets a name some time after its socket was closed
            name = f"inproc://fastipc-monitor-{next(_numbers)}"
            self._socket.monitor(name, zmq.EVENT_ALL)
            self._monitor = keeper.open_socket(zmq.PAIR)
            # Unbounded: ZMQ's own thread would wait for room, and all connections with it.
            self._monitor.rcvhwm = 0
            self._monitor.connect(name)
        except BaseException:
            self._give_back()
            raise
        self._fd = int_option(self._socket, zmq.FD)
        self._monitor_fd = int_option(self._monitor, zmq.FD)

    def _give_back(self, linger_ms: int = 0) -> None:
        """Locked."""
        if self._gone:
            return
        self._gone = True
        # (what the constructor has come to make)
        if hasattr(self, "_monitor"):
            self._socket.disable_monitor()
            keeper.close_socket(self._monitor, 0)
        if hasattr(self, "_socket"):
            keeper.close_socket(self._socket, linger_ms)
        if hasattr(self, "_wake"):
            self._wake.close()

    # -- how a call begins and waits

    def _check_process(self) -> None:
        # Another thread may have had the lock at the fork: here it stays locked.
        if self._forks != keeper.forks():
            raise IPCError(_FORKED)

    def _check(self, timeout: float | None = None) -> None:
        self._check_process()
        if timeout is not None and not timeout >= 0:
            raise ValueError(
                f"timeout must be None or a number of seconds of at least 0, not {timeout!r}"
            )
        if self._stopped:
            raise Closed(SHUT)

    def _sleep(self, deadline: float | None, most: float, *descriptors: int) -> None:
        """Until a descriptor is readable, somebody wakes us, or a little time has passed. The
        caller has the turn, and has just found nothing under the lock."""
        left = keeper.remaining(deadline)
        poller = select.poll()
        for fd in (*descriptors, self._wake.fd):
            poller.register(fd, select.POLLIN)
        poller.poll((most if left is None else min(left, most)) * 1000)
        if not self._stopped:
            self._wake.clear()

    def _monitored(self) -> Iterator[tuple[int, int]]:
        """Locked: what ZMQ's thread reports of connections: (event, value)."""
        while has_events(self._monitor):
            frame = self._monitor.recv(zmq.NOBLOCK, copy=False)
            # The second frame, an address, is of no use here.
            if frame.more:
                yield _EVENT.unpack(frame.bytes)

    def use_serializer(
        self,
        dump: Callable[[Any], tuple[list[Any], int]],
        load_one: Callable[[bytes], Any],
        load_many: Callable[[list[_core.Block]], Any],
        bytes_as_they_are: bool = False,
    ) -> None:
        """As Endpoint.use_serializer; but all go through the serializer."""
        self._dump = dump
        self._load_one = load_one
        self._load_many = load_many

    def put(self, obj: Any, timeout: float | None = None) -> None:
        """As Endpoint.put, for the writer."""
        self._check(timeout)
        raise IPCError("only the writer sends; this end of the queue is a reader's")

    def get(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """As Endpoint.get, for readers."""
        self._check(timeout)
        raise IPCError("only readers receive; this end of the queue is the writer's")

    def send(self, items: list[Any], joined: int, timeout: float | None = None) -> None:
        """As Endpoint.send, for the writer."""
        self.put(None, timeout)

    def poll(self) -> Any:
        """As Endpoint.poll, for readers."""
        return self.get(0)

    def wait_readable(self, timeout: float | None = None) -> None:
        """As Endpoint.wait_readable, for readers."""
        self.get(timeout)

    # -- the end

    @property
    def busy(self) -> bool:
        """As Endpoint.busy."""
        return self._turn.taken

    @property
    def closed(self) -> bool:
        """True after close."""
        return self._closing

    def shutdown(self) -> None:
        """Ends every wait on this end, now and later, with Closed. Any thread, any time."""
        if self._forks == keeper.forks() and not self._stopped:
            self._stopped = True
            self._wake.set()

    def close(self) -> None:
        """Leaves the queue. Never waits: the keeper delivers what is on its way."""
        if self._forks != keeper.forks() or self._closing:
            return
        self._closing = True
        self.shutdown()
        keeper.nudge()

    def discard(self) -> bool:
        """For the keeper. Gives the socket back unless a call is still inside."""
        with self._turn.within(0) as mine:
            if not mine:
                self._wake.set()
                return False
            with self._lock:
                self._give_back()
            return True

    def service(self) -> bool:
        """For the keeper."""
        try:
            with self._lock:
                if not self._gone:
                    self._look_after(time.monotonic())
        except Exception:
            # It would take the keeper from all other ends.
            logger.exception("looking after an end of a queue failed")
        try:
            if self._closing and not self._gone and self._delivered():
                self.discard()
        except Exception:
            logger.exception("giving an end of a queue back failed")
        return not self._gone

    def _look_after(self, now: float) -> None:
        raise NotImplementedError

    def _delivered(self) -> bool:
        raise NotImplementedError

    def address(self) -> tuple[bytes, int, int, int, str]:
        """As Endpoint.address: where local readers find the segment; there is none."""
        return b"", os.getpid(), _core.process_start(os.getpid()), -1, ""


def int_option(made: zmq.Socket[bytes], option: int) -> int:
    value = made.getsockopt(option)
    assert isinstance(value, int)
    return value


def has_events(made: zmq.Socket[bytes]) -> bool:
    """Whether there is something to receive. Also has the socket take notice of what its thread
    has done, and resets its descriptor."""
    return bool(int_option(made, zmq.EVENTS) & zmq.POLLIN)
