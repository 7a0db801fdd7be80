"""A reader's end over TCP; remote.py tells the whole."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from . import _core, addresses, keeper, wire
from .errors import Closed, DecodeError, Empty, HandleMismatch, IPCError, NotReady, PeerDied
from .hostinfo import host_name
from .liveness import Sign
from .remote_end import (
    SHUT,
    SLICE,
    STATS,
    Notice,
    RemoteEnd,
    curve_key_pair,
    has_events,
    until,
    within,
)
from .settings import settings

__all__ = ["RemoteReader"]

# The first attempt to come back, in milliseconds; then longer and longer ones.
RECONNECT_IVL_MS = 20
RECONNECT_IVL_MOST_MS = 1000
# A question to the writer that was not answered is put again after this time.
ASK_AGAIN_SECONDS = 1.0
# A connection that stands for so long without a handshake is given up, and another one made: what
# took it may have been a proxy that is stuck. (A writer that is stopped takes that one, too.)
STUCK_SECONDS = 30.0
# Handshakes that fail in a row, before a reader that was never let in believes it.
REFUSALS = 5
REFUSALS_SECONDS = 1.0


class RemoteReader(RemoteEnd):
    """A reader's end over TCP.

    Args:
        queue_id, endpoint, server_key: from the handle.
        rank: this reader's.
        writer_pid, writer_host: the writer, for errors.
    """

    is_writer = False

    def __init__(
        self,
        *,
        queue_id: bytes,
        endpoint: str,
        server_key: str,
        rank: int,
        writer_pid: int,
        writer_host: str,
        notice: Notice,
    ) -> None:
        super().__init__(notice)
        config = settings()
        self._grace = config.remote_grace
        self._topics = wire.Topics(queue_id)
        self._rank = rank
        self._writer_pid, self._writer_host = writer_pid, writer_host
        self._nonce = wire.new_nonce()
        self._own = self._topics.own(self._nonce)

        # What has arrived: (sequence number, frame, its size, bare); see _next and _consumed.
        self._inbox: deque[tuple[int, zmq.Frame, int, bool]] = deque()
        self._welcomed = False
        self._ready = False
        self._consumed = 0  # all sequence numbers below have been taken by the user
        self._acked = 0
        self._unacked_bytes = 0
        self._ack_messages = 1
        self._ack_bytes = 1
        self._asking = 0.0  # when a HELLO went out that has not been answered, or 0
        self._calls = self._calls_seen = 0  # the keeper receives when nobody calls
        self._closed_at: int | None = None  # the writer's last sequence number, once it has closed
        self._failure: Callable[[], IPCError] | None = None
        self._deferred: BaseException | None = None

        self._linked = False  # a handshake has succeeded, and the connection stands
        self._connected = False  # the TCP connection stands
        self._greeted = True  # a HELLO is on its way with the connection that is being made
        self._lost: float = time.monotonic()  # since when it isn't linked
        self._begun = self._lost  # when the connection was made that has no handshake yet
        self._failed_handshakes = 0
        self._prober: socket.socket | None = None
        self._probe_next = 0.0
        self._refused = False
        self._taken_messages = self._taken_bytes = self._waits = 0

        try:
            host, self._port = addresses.split_endpoint(endpoint)
            self._host = addresses.reachable_form(host)
        except ValueError as error:
            raise HandleMismatch(f"the handle's address can't be used here: {error}") from None
        self.endpoint = addresses.endpoint(self._host, self._port)
        self._sign = Sign((self._host, self._port), self._nonce)
        # Upstream there are only a few words; when connected they leave at once.
        self._open_socket(zmq.XSUB, 500)
        try:
            s = self._socket
            s.rcvhwm = 1024
            s.sndhwm = 1024
            s.reconnect_ivl = RECONNECT_IVL_MS
            s.reconnect_ivl_max = RECONNECT_IVL_MOST_MS
            s.connect_timeout = 3000
            # A writer that is stopped doesn't answer, and isn't dead.
            s.handshake_ivl = 0
            s.ipv6 = addresses.is_ipv6(self._host)
            if server_key:
                public, secret = curve_key_pair()
                try:
                    s.curve_serverkey = server_key.encode("ascii")
                except (ValueError, zmq.ZMQError):
                    raise HandleMismatch("the handle's server key is damaged") from None
                s.curve_publickey = public
                s.curve_secretkey = secret
            s.send(b"\1" + self._topics.all)
            s.send(b"\1" + self._own)
            s.connect(self.endpoint)
            self._hello()
            keeper.add(self)
        except BaseException:
            self._give_back()
            raise

    def tcp(self) -> tuple[int, tuple[str, int] | None]:
        """For the keeper."""
        return self._sign.port, (self._host.partition("%")[0], self._port)

    @property
    def _next(self) -> int:
        """The next sequence number to receive."""
        return self._inbox[-1][0] + 1 if self._inbox else self._consumed

    # -- what is said to the writer. All of it under the lock.

    def _hello(self) -> None:
        wanted = self._next if self._welcomed else wire.ANY
        hello = wire.Hello(
            self._nonce, self._rank, wanted, os.getpid(), host_name(), self._sign.text
        )
        # A new connection's way out is only known after this look.
        self._socket.get(zmq.EVENTS)
        self._tell(wire.HELLO, hello.pack())
        self._asking = time.monotonic()

    def _acknowledge(self, kind: int = wire.ACK) -> None:
        self._acked = self._consumed
        self._unacked_bytes = 0
        has_closed = self._closed_at is not None and self._next >= self._closed_at
        ack = wire.Ack(self._nonce, self._consumed, self._next, has_closed)
        self._tell(kind, ack.pack())

    def _tell(self, kind: int, body: bytes) -> None:
        try:
            self._socket.send(self._topics.to_writer(kind, body), zmq.NOBLOCK)
        except zmq.Again:
            pass  # said again when the writer asks

    # -- receiving. All of it under the lock.

    def _pump(self, want: int) -> None:
        """Takes in what has arrived, until `want` messages are there."""
        if self._gone:
            raise Closed(SHUT)
        s = self._socket
        while len(self._inbox) < want and self._failure is None:
            try:
                frame = s.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._on_frame(frame)

    def _on_event(self, event: int, now: float) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._connected = True
            self._begun = now
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._linked = self._connected = True
            self._refused = False
            self._failed_handshakes = 0
            self._end_probe()
            if not self._greeted:
                self._hello()
            self._greeted = False
        elif event == zmq.EVENT_DISCONNECTED:
            if self._linked:
                self._lost = now
            else:
                self._failed_handshakes += 1
            self._linked = self._connected = self._greeted = False
            self._probe_next = now
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH):
            self._failed_handshakes = REFUSALS  # ZMQ doesn't try again
        elif event in (zmq.EVENT_CLOSED, zmq.EVENT_CONNECT_RETRIED):
            self._connected = self._linked

    def _connect_anew(self, now: float) -> None:
        try:
            self._socket.disconnect(self.endpoint)
        except zmq.ZMQError:
            pass
        self._socket.connect(self.endpoint)
        self._lost = self._begun = now
        self._connected = self._greeted = False

    def _judge(self, now: float) -> None:
        """The connection is lost, or was never made: is there still a writer?"""
        if self._failure is not None:
            return
        self._probe(now)
        if self._refused:
            self._fail_gone("nothing listens at its address any more")
        elif (
            not self._welcomed
            and self._failed_handshakes >= REFUSALS
            and now - self._lost >= REFUSALS_SECONDS
        ):
            text = (
                f"what listens at {self.endpoint} is not this queue's writer, or doesn't accept "
                "this handle's key: the writer has ended, or the handle is another queue's"
            )
            self._failure = lambda: HandleMismatch(text)
        elif not self._connected and now - self._lost >= self._grace * (1 if self._welcomed else 3):
            self._fail_gone(f"it can't be reached at {self.endpoint} for {now - self._lost:.0f} s")

    def _fail_gone(self, why: str) -> None:
        pid, host = self._writer_pid, self._writer_host
        if self._welcomed:
            text = f"the writer (pid {pid} on {host}) died without closing the queue: {why}"
            self._failure = lambda: PeerDied(text, None, pid, host)
        else:
            text = f"the queue's writer (pid {pid} on {host}) has ended, or was never there: {why}"
            self._failure = lambda: HandleMismatch(text)

    def _probe(self, now: float) -> None:
        """Knocks at the writer's port: ZMQ doesn't tell a refused connection from a slow one, and
        only a kernel that knows of no listener refuses."""
        if self._prober is None:
            if now < self._probe_next:
                return
            self._probe_next = now + 0.2
            family = socket.AF_INET6 if addresses.is_ipv6(self._host) else socket.AF_INET
            prober: socket.socket | None = None
            try:
                prober = socket.socket(family, socket.SOCK_STREAM)
                prober.setblocking(False)
                where = socket.getaddrinfo(self._host, self._port, family, socket.SOCK_STREAM)
                code = prober.connect_ex(where[0][4])
            except OSError as error:  # no descriptor for it, too: then only time can tell
                code = error.errno or 0
            if code == errno.EINPROGRESS:
                self._prober = prober
                self._probe_next = now + 3.0
                return
            if prober is not None:
                prober.close()
        else:
            poller = select.poll()
            poller.register(self._prober, select.POLLOUT)
            if not poller.poll(0):
                if now >= self._probe_next:
                    self._end_probe()
                return
            code = self._prober.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self._probe_next = now + 0.2
            self._end_probe()
        self._refused = code == errno.ECONNREFUSED

    def _end_probe(self) -> None:
        if self._prober is not None:
            self._prober.close()
            self._prober = None

    def _on_frame(self, frame: zmq.Frame) -> None:
        """One frame from the writer. (Without CURVE it may be anybody's.)"""
        if not self._linked:
            # Whatever was reported of the connection: a moment ago it stood.
            self._lost = time.monotonic()
        buffer = frame.buffer
        size = buffer.nbytes
        if size >= wire.FRAME.size and buffer[: wire.KIND_AT] == self._topics.all:
            _, kind, flags, number = wire.FRAME.unpack_from(buffer)
            if kind == wire.DATA:
                if self._welcomed:
                    self._on_data(frame, size, number, bool(flags & wire.BARE))
            elif kind == wire.READY:
                self._ready = True
            elif kind in (wire.STATUS, wire.CLOSED):
                self._on_head(kind, number)
            return
        n = self._topics.one_bytes
        if size <= n or buffer[:n] != self._own:
            return
        kind, body = buffer[n], bytes(buffer[n + 1 :])
        if kind == wire.WELCOME:
            try:
                self._on_welcome(wire.Welcome.unpack(body))
            except struct.error:
                return
        elif kind == wire.REFUSED:
            text = f"the queue refuses rank {self._rank}: {wire.unpack_text(body)}"
            pid, host = self._writer_pid, self._writer_host
            if self._welcomed:
                self._failure = lambda: PeerDied(text, None, pid, host)
            else:
                self._failure = lambda: HandleMismatch(text)
        elif kind in (wire.STATUS, wire.CLOSED):
            self._asking = 0.0  # it comes after all that was asked for
            self._on_head(kind, wire.number(body))

    def _on_welcome(self, welcome: wire.Welcome) -> None:
        self._ready |= welcome.ready
        self._ack_messages = max(1, min(16, welcome.credit_messages // 4))
        self._ack_bytes = welcome.credit_bytes // 8
        if not self._welcomed:
            self._welcomed = True
            self._consumed = self._acked = welcome.start

    def _on_data(self, frame: zmq.Frame, size: int, seq: int, bare: bool) -> None:
        wanted = self._next
        if seq == wanted:
            self._inbox.append((seq, frame, size, bare))
            if seq + 1 == self._closed_at:
                self._acknowledge()
        elif seq > wanted and not self._asking:
            self._hello()

    def _on_head(self, kind: int, head: int) -> None:
        if not self._welcomed:
            return
        if kind == wire.CLOSED:
            self._closed_at = head
        if head > self._next and not self._asking:
            self._hello()
        self._acknowledge()

    # -- what the user calls

    def _over(self) -> None:
        """Locked: raises if nothing more will come. What has come is taken first."""
        if self._stopped:
            raise Closed(SHUT)
        if self._closed_at is not None and self._next >= self._closed_at:
            raise Closed("the writer has closed the queue and all its messages are read")
        if self._failure is not None:
            raise self._failure()

    def _wait(self, deadline: float | None, done: Callable[[], bool]) -> bool:
        """Until done() (called under the lock, with what has arrived taken in) or the deadline.
        Raises what is over; the turn is held."""
        waited = False
        while True:
            with self._lock:
                self._pump(1)
                if done():
                    return True
                self._over()
                pending = has_events(self._socket)
            if deadline is not None and time.monotonic() >= deadline:
                return False
            if not pending:
                if not waited:
                    waited = True
                    self._waits += 1
                self._sleep(deadline, SLICE, self._fd)

    def _has_message(self) -> bool:
        # (what was taken is dropped here if a signal kept _take from it)
        while self._inbox and self._inbox[0][0] < self._consumed:
            self._inbox.popleft()
        return bool(self._inbox)

    def defer(self, error: BaseException) -> None:
        """As Endpoint.defer."""
        self._deferred = error

    def get(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """As Endpoint.get."""
        if self._deferred is not None:
            error, self._deferred = self._deferred, None
            raise error
        return self._load(self.recv(timeout))

    def poll(self) -> Any:
        """As Endpoint.poll."""
        try:
            message = self.recv(0)
        except Empty:
            return _core.NOTHING
        return self._load(message)

    def _load(self, message: bytes | list[_core.Block]) -> Any:
        if isinstance(message, bytes):
            return self._load_one(message)
        return self._load_many(message)

    def recv(self, timeout: float | None = None) -> bytes | list[_core.Block]:
        """As Endpoint.recv."""
        self._check(timeout)
        deadline = until(timeout)
        self._calls += 1
        with self._turn.within(timeout) as mine:
            if not mine:
                raise Empty("another thread is receiving" + within(timeout))
            if not self._has_message() and not self._wait(deadline, self._has_message):
                raise Empty("no message in the queue" + within(timeout))
            seq, frame, size, bare = self._inbox[0]
            try:
                message = _core.split(frame.buffer, wire.FRAME.size, bare)
            except DecodeError:
                self._take(seq, size)
                raise
            self._take(seq, size)
            return message

    def _take(self, seq: int, size: int) -> None:
        with self._lock:
            self._consumed = seq + 1
            self._inbox.popleft()
            self._unacked_bytes += size
            self._taken_messages += 1
            self._taken_bytes += size - wire.FRAME.size
            if (
                self._consumed - self._acked >= self._ack_messages
                or self._unacked_bytes >= self._ack_bytes
            ):
                self._acknowledge()

    def wait_readable(self, timeout: float | None = None) -> None:
        """As Endpoint.wait_readable."""
        self._check(timeout)
        if self._deferred is not None:
            return
        deadline = until(timeout)
        with self._turn.within(timeout) as mine:
            if not mine or not self._wait(deadline, self._has_message):
                raise Empty("no message in the queue" + within(timeout))

    def readable(self) -> bool:
        """As Endpoint.readable: get would return or raise."""
        self._check()
        if self._deferred is not None:
            return True
        with self._lock:
            self._pump(1)
            if self._has_message():
                return True
            try:
                self._over()
            except IPCError:
                return True
            return False

    def wait_ready(self, timeout: float | None = None) -> bool:
        """As Endpoint.wait_ready: the writer's wait_ready has seen everyone."""
        self._check(timeout)
        deadline = until(timeout)
        with self._turn.within(timeout) as mine:
            if mine and self._wait(deadline, lambda: self._ready):
                return True
        if not self._welcomed:
            how = "is not connected" if not self._connected else "has not answered"
            raise NotReady(
                f"after {timeout} s the writer (pid {self._writer_pid} on {self._writer_host}, "
                f"{self.endpoint}) {how}",
                (self._rank,),
            )
        return False

    def missing(self) -> list[int]:
        """As Endpoint.missing; a remote reader doesn't know."""
        return []

    def peer(self, reader: int | None) -> tuple[str, int, str, int]:
        """As Endpoint.peer; reader 0 is this one."""
        self._check()
        lag = len(self._inbox)
        if reader is not None:
            return ("active" if self._welcomed else "joining"), os.getpid(), host_name(), lag
        state = "active"
        if self._closed_at is not None:
            state = "left"
        elif self._failure is not None:
            state = "dead"
        return state, self._writer_pid, self._writer_host, 0

    def stats(self) -> dict[str, int]:
        """As Endpoint.stats."""
        stats = dict.fromkeys(STATS, 0)
        stats["messages"], stats["bytes"] = self._taken_messages, self._taken_bytes
        stats["bytes_copied"], stats["waits"] = self._taken_bytes, self._waits
        return stats

    def size(self) -> int:
        """Messages that have arrived and are unread."""
        self._check()
        with self._lock:
            self._pump(1 << 30)
        return len(self._inbox)

    def has_room(self) -> bool:
        """False: a reader has nothing to send."""
        return False

    # -- the end

    def descriptors(self) -> tuple[int, ...]:
        """For the keeper."""
        if self._gone:
            return ()
        always = [self._monitor_fd]
        if self._sign.fileno() >= 0:
            always.append(self._sign.fileno())
        return (*always, self._fd) if self._idle() else tuple(always)

    def _idle(self) -> bool:
        """Whether no call is at work, or has been since the keeper's last look."""
        return not self._turn.taken and self._calls == self._calls_seen

    def patience(self) -> float:
        """For the keeper."""
        return keeper.TICK if self._linked else keeper.SOON

    def _look_after(self, now: float) -> None:
        self._sign.answer()
        idle = self._idle()
        self._calls_seen = self._calls
        before = self._news()
        for event, _ in self._monitored():
            self._on_event(event, now)
        if self._closing:
            return
        if not self._linked:
            self._judge(now)
            if not self._linked and self._connected and now - self._begun >= STUCK_SECONDS:
                self._connect_anew(now)
        if self._asking and now - self._asking >= ASK_AGAIN_SECONDS:
            self._hello()
        if idle:
            received = self._next
            # Bounded by the writer's credit. It makes room on the way, and lets a writer end that
            # waits for nothing but this.
            self._pump(1 << 30)
            if self._consumed != self._acked or self._next != received:
                self._acknowledge()
        # wait_any takes no turn: it may be about to sleep on the descriptor that was just reset.
        # So may a call that isn't idle.
        if before != self._news() or (not idle and has_events(self._socket)):
            self._wake.set()

    def _news(self) -> tuple[object, ...]:
        """What those who sleep want to hear of when it changes."""
        return self._linked, self._failure, self._next, self._closed_at

    def _delivered(self) -> bool:
        return True

    def hopeless(self) -> bool:
        """For the keeper."""
        return True

    def _give_back(self, linger_ms: int = 0) -> None:
        self._end_probe()
        if hasattr(self, "_sign"):
            self._sign.close()
        if not self._gone and self._linked:
            self._acknowledge(wire.LEFT)
            linger_ms = 500
        super()._give_back(linger_ms)
