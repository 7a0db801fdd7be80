"""Readers on other hosts: the writer's and a reader's end over TCP.

Both stand where :class:`fastipc._core.Endpoint` stands for local queues, with the same methods, so
that MessageQueue need not know which it has. The writer's end includes the local ring, if the
queue has local readers too, and keeps one order for all.

What is said on the wire, and how a lost connection costs nothing, is in wire.py. ZMQ carries it:
an XPUB that binds, an XSUB per reader, CURVE to let in only who knows the server's key. The queue
of each connection is finite (SNDHWM), and XPUB_NODROP makes a full one an error. Since the writer
gives out less credit than that queue is long, a full one is never a reader's that is waited for,
but that of a dead connection or a stranger: then, and only then, it is sent past it.

Locks: `_turn` orders the calls of an end and is held while one waits; `_lock` guards the socket
and all state, and is held for moments only. Both are RLocks, because only those know their owner
at every moment: an exception out of a signal handler can't lose one. `_turn` comes first.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from . import _core, addresses, keeper, wire
from .errors import Closed, DecodeError, Empty, Full, HandleMismatch, IPCError, NotReady, PeerDied
from .hostinfo import host_name
from .settings import settings

__all__ = ["RemoteReader", "RemoteWriter", "wait_any"]

logger = logging.getLogger("fastipc")

# A lost reader that doesn't connect within this time is dead: it costs a living one 20 ms, a
# round trip, and no help from Python. Below the second in which death is to be reported.
RECONNECT_SECONDS = 0.75
RECONNECT_IVL_MS = 20
# How long a wait sleeps at most before it looks again: nothing depends on it being short.
SLICE = 0.25
# The same while the connection is lost, when the writer's port is asked now and then.
LOST_SLICE = 0.05
# A writer that waits for acknowledgements asks for them after 1 s, 2 s, 4 s, ... 30 s.
STATUS_SECONDS = 1.0
STATUS_SECONDS_MOST = 30.0
# Nothing that a reader says is as long as this, so nobody can make the writer allocate more.
UPSTREAM_BYTES = 4096
# Handshakes that fail in a row, before a reader that was never let in believes it.
REFUSALS = 5
REFUSALS_SECONDS = 1.0
# ZMQ copies what is shorter faster than it can keep track of it.
ZERO_COPY_BYTES = 65536

Notice = Callable[[Any, str, "int | None", int, str, float, int], None]

_FORKED = (
    "this end of the queue belongs to the parent process: after fork, use "
    "MessageQueue.create_from_handle(handle, rank) in the child, with what export_handle() gave "
    "the parent"
)
_SHUT = "this end of the queue was shut down or closed"


def _until(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _within(timeout: float | None) -> str:
    return "" if not timeout else f" within {timeout} s"


def curve_key_pair() -> tuple[bytes, bytes]:
    """(public, secret). Raises IPCError where ZMQ has no CURVE."""
    if not zmq.has("curve"):
        raise IPCError(
            "this pyzmq was built without CURVE, so it can't encrypt: install one that was, or "
            "pass secure=False to let anyone who reaches the port read the queue"
        )
    return zmq.curve_keypair()


class _RemoteEnd:
    """What both ends share: calls, waiting, threads, fork, the monitor, the end."""

    is_writer: bool

    def __init__(self, notice: Notice) -> None:
        self._notice = notice
        self._forks = keeper.forks()
        self._turn = threading.RLock()
        self._lock = threading.RLock()
        self._calls = 0  # begun; the keeper leaves busy ends alone
        self._calls_seen = -1
        self._watching = 0  # calls that sleep on the descriptors; the keeper must not drain them
        self._stopped = False
        self._closing = False
        self._gone = False  # the socket has been given back
        self._wake = keeper.Wake()
        self._socket: zmq.Socket[bytes]
        self._monitor: zmq.Socket[bytes]
        self._fds: tuple[int, int]

    def _open_socket(self, kind: int, linger_ms: int) -> None:
        self._socket = keeper.open_socket(kind)
        try:
            self._socket.linger = linger_ms
            self._socket.tcp_keepalive = 1
            self._socket.tcp_keepalive_idle = 10
            self._socket.tcp_keepalive_intvl = 5
            self._socket.tcp_keepalive_cnt = 4
            name = f"inproc://fastipc-monitor-{id(self):x}"
            self._socket.monitor(name, zmq.EVENT_ALL)
            self._monitor = keeper.open_socket(zmq.PAIR)
            # Unbounded: ZMQ's own thread would wait for room, and all connections with it.
            self._monitor.rcvhwm = 0
            self._monitor.connect(name)
        except BaseException:
            self._give_back()
            raise
        self._fds = (_int(self._socket, zmq.FD), _int(self._monitor, zmq.FD))

    def _give_back(self, linger_ms: int = 0) -> None:
        """Locked."""
        if self._gone:
            return
        self._gone = True
        if hasattr(self, "_monitor"):
            self._socket.disable_monitor()
            keeper.close_socket(self._monitor, 0)
        keeper.close_socket(self._socket, linger_ms)
        self._wake.close()

    # -- how a call begins, waits and ends

    def _check(self, timeout: float | None = None) -> None:
        if self._forks != keeper.forks():
            raise IPCError(_FORKED)
        if timeout is not None and not timeout >= 0:
            raise ValueError(
                f"timeout must be None or a number of seconds of at least 0, not {timeout!r}"
            )
        if self._stopped:
            raise Closed(_SHUT)

    @contextmanager
    def _my_turn(self, deadline: float | None) -> Iterator[bool]:
        """One call at a time; False when the deadline passed first."""
        self._calls += 1
        if _owned(self._turn):
            raise IPCError(
                "this thread is inside a call on the same end of the queue already (a signal "
                "handler, a finalizer, a log handler or a with-block came back)"
            )
        try:
            left = keeper.remaining(deadline)
            yield self._turn.acquire(timeout=-1 if left is None else left)
        finally:
            if _owned(self._turn):
                self._turn.release()

    def _sleep(self, deadline: float | None, most: float) -> None:
        """Until something arrives, somebody wakes us, or a little time has passed. The caller has
        just found nothing under the lock, and holds the turn."""
        left = keeper.remaining(deadline)
        seconds = most if left is None else min(left, most)
        poller = select.poll()
        for fd in (*self._fds, self._wake.fd):
            poller.register(fd, select.POLLIN)
        poller.poll(seconds * 1000)
        if not self._stopped:
            self._wake.clear()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """For the time of a wait: the descriptors' edges are this call's, not the keeper's."""
        watching = False
        try:
            with self._lock:
                self._watching += 1
                watching = True
            yield
        finally:
            if watching:
                with self._lock:
                    self._watching -= 1

    def _pending(self) -> bool:
        """Locked: whether there is something to receive, after the descriptors were reset."""
        return bool(_events(self._socket) or _events(self._monitor))

    def _monitored(self) -> Iterator[tuple[int, int]]:
        """Locked: what ZMQ's thread reports of connections: (event, value)."""
        while _events(self._monitor):
            message = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            yield int(message["event"]), int(message["value"])

    # -- the end

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
        if not self._turn.acquire(blocking=False):
            self._wake.set()
            return False
        try:
            with self._lock:
                self._give_back()
        finally:
            self._turn.release()
        return True

    def idle_descriptors(self) -> tuple[int, ...]:
        """For the keeper."""
        calls, self._calls_seen = self._calls_seen, self._calls
        if self._gone or self._watching or (calls != self._calls and not self._closing):
            return ()
        return self._fds

    def service(self) -> bool:
        """For the keeper."""
        if self._watching or self._gone or not self._lock.acquire(blocking=False):
            return not self._gone
        try:
            if not self._gone:
                self._look_after(time.monotonic())
        except Exception:
            # It would take the keeper from all other ends.
            logger.exception("looking after an end of a queue failed")
        finally:
            self._lock.release()
        if self._closing and not self._gone and self._delivered():
            self.discard()
        return not self._gone

    def _look_after(self, now: float) -> None:
        raise NotImplementedError

    def _delivered(self) -> bool:
        raise NotImplementedError

    def address(self) -> tuple[bytes, int, int, int, str]:
        """As Endpoint.address: where local readers find the segment; there is none."""
        return b"", os.getpid(), _core.process_start(os.getpid()), -1, ""


def _int(made: zmq.Socket[bytes], option: int) -> int:
    value = made.getsockopt(option)
    assert isinstance(value, int)
    return value


def _events(made: zmq.Socket[bytes]) -> bool:
    """Whether there is something to receive. Also has the socket take notice of what its thread
    has done, and resets its descriptor."""
    return bool(_int(made, zmq.EVENTS) & zmq.POLLIN)


def _owned(lock: Any) -> bool:
    owned: bool = lock._is_owned()
    return owned


# ---- the writer ---------------------------------------------------------------------------------


@dataclass
class _Member:
    """A reader as the writer knows it. `lost` is when its last connection ended, None while it
    has one."""

    rank: int
    nonce: bytes
    pid: int
    host: str
    acked: int
    received: int
    state: str = "active"  # active, left, dead, evicted
    lost: float | None = None
    has_closed: bool = False
    silenced: bool = False  # its death has been logged

    def __str__(self) -> str:
        return f"reader rank {self.rank} (pid {self.pid} on {self.host})"


@dataclass
class _Sent:
    """A message that some reader may still ask for."""

    frame: Any  # zmq.Frame, or what becomes one at each send
    size: int
    block: _core.Block = field(repr=False)


class RemoteWriter(_RemoteEnd):
    """The writer's end of a queue that has readers on other hosts, and perhaps local ones.

    Args:
        local: the ring's end for the local readers, or None; this end closes it.
        local_ranks, remote_ranks: of the readers.
        host: what to bind, and what the readers connect to unless `wildcard`.
        wildcard: bind every address instead.
        credit_messages, credit_bytes: what may be sent and not yet consumed by the slowest remote
            reader, before send waits; one message larger than this may go alone.
        secure: encrypt, and let in only who has the key.
        evict: go on without readers that died.

    Attributes:
        endpoint: what readers connect to, tcp://host:port.
        server_key: the capability; "" when not secure.
    """

    is_writer = True

    def __init__(
        self,
        *,
        queue_id: bytes,
        local: _core.Endpoint | None,
        local_ranks: Sequence[int],
        remote_ranks: Sequence[int],
        host: str,
        wildcard: bool,
        credit_messages: int,
        credit_bytes: int,
        secure: bool,
        evict: bool,
        notice: Notice,
    ) -> None:
        super().__init__(notice)
        config = settings()
        self._warn_after = config.warning_interval
        self._grace = config.remote_grace
        self._linger = config.remote_linger
        self._topics = wire.Topics(queue_id)
        self._local = local
        self._local_gone = False
        self._local_ranks = tuple(local_ranks)
        self._ranks = (*local_ranks, *remote_ranks)
        self._remote_ranks = tuple(remote_ranks)
        self._credit_messages = credit_messages
        self._credit_bytes = credit_bytes
        self._evict_dead = evict
        self._ready = False

        self._members: dict[int, _Member] = {}
        self._connections: Counter[bytes] = Counter()  # by nonce; from subscriptions
        self._accepted: set[int] = set()  # descriptors, from the monitor
        self._retained: deque[_Sent] = deque()
        self._retained_bytes = 0
        self._base = 0  # the sequence number of the first retained message
        self._progress = time.monotonic()
        self._received_least = 0
        self._next_status = 0.0
        self._status_seconds = STATUS_SECONDS
        self._closed_said = 0.0
        self._sent_messages = self._sent_bytes = self._copied = self._resent = self._waits = 0

        self.server_key = ""
        self._open_socket(zmq.XPUB, 0)
        try:
            s = self._socket
            s.setsockopt(zmq.XPUB_VERBOSER, 1)
            s.setsockopt(zmq.XPUB_NODROP, 1)
            # All that may be unread, once as it is sent and once again, and some words beside it.
            s.sndhwm = 2 * credit_messages + 256
            s.rcvhwm = 1024
            s.maxmsgsize = UPSTREAM_BYTES
            s.ipv6 = addresses.is_ipv6(host)
            if secure:
                public, secret = curve_key_pair()
                s.curve_server = True
                s.curve_secretkey = secret
                s.curve_publickey = public
                self.server_key = public.decode("ascii")
            else:
                logger.warning(
                    "the queue is neither encrypted nor authenticated (secure=False): anyone who "
                    "reaches its port can read it"
                )
            self._bind(host, wildcard)
        except BaseException:
            self._give_back()
            raise
        keeper.add(self)

    def _bind(self, host: str, wildcard: bool) -> None:
        s = self._socket
        if not wildcard:
            try:
                s.bind(addresses.endpoint(host, "*"))
            except zmq.ZMQError as error:
                if not addresses.is_foreign(error.errno or 0):
                    raise OSError(error.errno, f"can't bind {host}: {error.strerror}") from None
                wildcard = True
        if wildcard:
            s.bind("tcp://[::]:*" if addresses.is_ipv6(host) else "tcp://0.0.0.0:*")
            logger.warning(
                "the queue listens on every address of this host, and tells its readers %s", host
            )
        _, self._port = addresses.split_endpoint(s.getsockopt_string(zmq.LAST_ENDPOINT))
        self.endpoint = addresses.endpoint(host, self._port)

    def tcp(self) -> tuple[int, tuple[str, int] | None]:
        """For the keeper."""
        return self._port, None

    # -- receiving, and keeping account of readers. All of it under the lock.

    @property
    def _head(self) -> int:
        return self._base + len(self._retained)

    def _pump(self, now: float) -> None:
        if self._gone:
            raise Closed(_SHUT)
        for event, value in self._monitored():
            if event == zmq.EVENT_ACCEPTED:
                self._accepted.add(value)
            elif event == zmq.EVENT_DISCONNECTED:
                self._accepted.discard(value)
        s = self._socket
        while _events(s):
            try:
                frames = s.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) == 1 and frames[0]:
                self._on_frame(frames[0], now)

    def _on_frame(self, data: bytes, now: float) -> None:
        """Something from a peer, who may be anybody."""
        if data[0] <= 1:
            topic = data[1:]
            if len(topic) == self._topics.one_bytes and topic.startswith(self._topics.one):
                self._on_connection(topic[len(self._topics.one) :], data[0] == 1, now)
            return
        try:
            if data.startswith(self._topics.writer):
                kind, body = data[wire.KIND_AT], data[wire.KIND_AT + 1 :]
                if kind == wire.HELLO:
                    self._on_hello(wire.Hello.unpack(body), now)
                elif kind in (wire.ACK, wire.LEFT):
                    self._on_ack(wire.Ack.unpack(body), kind == wire.LEFT, now)
            elif data.startswith(wire.MAGIC) and data[wire.KIND_AT] == wire.HELLO:
                self._refuse_stranger(data)
        except (struct.error, IndexError):
            logger.debug("the queue at %s ignored a frame that can't be right", self.endpoint)

    def _on_connection(self, nonce: bytes, begins: bool, now: float) -> None:
        if begins:
            self._connections[nonce] += 1
        else:
            self._connections[nonce] -= 1
            if self._connections[nonce] <= 0:
                del self._connections[nonce]
        for member in self._members.values():
            if member.nonce == nonce:
                if nonce in self._connections:
                    member.lost = None
                elif member.lost is None:
                    member.lost = now

    def _refuse_stranger(self, data: bytes) -> None:
        """The reader of another queue, or of another version, found this port."""
        nonce = wire.Hello.unpack(data[wire.KIND_AT + 1 :]).nonce
        topic = data[: wire.KIND_AT - 1] + b"R" + nonce
        why = "another queue uses this port now, or one of another version of fastipc"
        self._say(topic + bytes([wire.REFUSED]) + wire.pack_text(why))

    def _on_hello(self, hello: wire.Hello, now: float) -> None:
        if hello.rank not in self._remote_ranks:
            return self._refuse(hello, f"rank {hello.rank} is not one of its remote readers")
        if hello.nonce not in self._connections:
            return None  # it has gone again
        member = self._members.get(hello.rank)
        if member is not None and member.nonce == hello.nonce:
            if member.state == "evicted":
                return self._refuse(hello, "the writer took this reader for dead and evicted it")
            if member.state == "left":
                return None
            member.state, member.lost = "active", None
        elif hello.wanted != wire.ANY:
            return self._refuse(
                hello, "the writer took this reader for dead, and another one has its rank now"
            )
        elif member is not None and member.state == "active" and member.lost is None:
            return self._refuse(
                hello, f"the rank is taken: pid {member.pid} on {member.host} is attached as it"
            )
        else:
            member = _Member(hello.rank, hello.nonce, hello.pid, hello.host, self._head, self._head)
            self._members[hello.rank] = member
            self._trim(now)
        if hello.wanted == wire.ANY:
            start = member.acked
        elif self._base <= hello.wanted <= self._head:
            start = hello.wanted
        else:
            return self._refuse(
                hello,
                f"sequence {hello.wanted} was asked for, and the writer has {self._base} to "
                f"{self._head}",
            )
        welcome = wire.Welcome(self._ready, start, self._credit_messages, self._credit_bytes)
        self._say(self._topics.to_one(hello.nonce, wire.WELCOME, welcome.pack()))
        self._resend(hello.nonce, start)
        kind = wire.CLOSED if self._closed_said else wire.STATUS
        self._say(self._topics.to_one(hello.nonce, kind, wire.pack_number(self._head)))
        return None

    def _refuse(self, hello: wire.Hello, why: str) -> None:
        self._say(self._topics.to_one(hello.nonce, wire.REFUSED, wire.pack_text(why)))

    def _resend(self, nonce: bytes, start: int) -> None:
        prefix = self._topics.to_one(nonce, wire.RESEND)
        for i in range(start - self._base, len(self._retained)):
            self._resent += 1
            self._say(prefix, self._retained[i].frame)

    def _on_ack(self, ack: wire.Ack, left: bool, now: float) -> None:
        for member in self._members.values():
            if member.nonce == ack.nonce:
                break
        else:
            return
        if not member.acked <= ack.consumed <= ack.received <= self._head:
            return  # overtaken by a later one, or made up
        if ack.received > member.received:
            self._progress = now
        member.acked, member.received = ack.consumed, max(ack.received, member.received)
        member.has_closed |= ack.has_closed
        if left and member.state in ("active", "dead"):
            member.state = "left"
        self._trim(now)

    def _counted(self) -> list[_Member]:
        """The readers that messages are kept for."""
        return [m for m in self._members.values() if m.state in ("active", "dead")]

    def _trim(self, now: float) -> None:
        """Forgets what every counted reader has consumed."""
        least = min((m.acked for m in self._counted()), default=self._head)
        if least > self._base:
            self._progress = now
            self._status_seconds = STATUS_SECONDS
            self._next_status = now + STATUS_SECONDS
        while self._base < least:
            self._retained_bytes -= self._retained.popleft().size
            self._base += 1

    def _judge(self, now: float) -> None:
        """Who has been lost for too long is dead: soon if nobody is connecting, and later if
        somebody is, who may be the one."""
        lost = [m for m in self._members.values() if m.state == "active" and m.lost is not None]
        if not lost:
            return
        connecting = len(self._accepted) > sum(self._connections.values())
        for member in lost:
            assert member.lost is not None
            limit = self._grace if connecting else min(RECONNECT_SECONDS, self._grace)
            if now - member.lost < limit:
                continue
            if self._evict_dead:
                member.state = "evicted"
                self._notice(
                    self, "evicted", member.rank, member.pid, member.host, now - member.lost, 0
                )
                self._trim(now)
            else:
                member.state = "dead"

    # -- sending. All of it under the lock.

    def _say(self, *frames: Any) -> None:
        """Sends past queues that are full: see the module's docstring."""
        s = self._socket
        for i, frame in enumerate(frames):
            more = zmq.SNDMORE if i + 1 < len(frames) else 0
            # At exit pyzmq's own thread may be gone, which zero-copy needs.
            try:
                s.send(frame, zmq.NOBLOCK | more, copy=False)
            except zmq.Again:
                s.setsockopt(zmq.XPUB_NODROP, 0)
                try:
                    s.send(frame, zmq.NOBLOCK | more, copy=False)
                finally:
                    s.setsockopt(zmq.XPUB_NODROP, 1)

    def _ask(self, now: float) -> None:
        """Has readers acknowledge what they have if that is overdue: should the last messages be
        lost, nothing else would tell them."""
        if not self._retained or now < self._next_status:
            return
        self._next_status = now + self._status_seconds
        self._status_seconds = min(2 * self._status_seconds, STATUS_SECONDS_MOST)
        self._say(self._topics.to_all(wire.STATUS, self._head))

    def _publish(self, block: _core.Block, bare: bool, size: int) -> None:
        """Gives the message its number, and sends it. Once it is retained it will be delivered,
        whatever becomes of the rest of this."""
        with self._lock:
            flags = wire.BARE if bare else 0
            wire.FRAME.pack_into(block, 0, self._topics.all, wire.DATA, flags, self._head)
            now = time.monotonic()
            frame = zmq.Frame(block, copy=size < ZERO_COPY_BYTES)
            if self._counted():
                if not self._retained:
                    self._progress = now
                    self._status_seconds = STATUS_SECONDS
                    self._next_status = now + STATUS_SECONDS
                self._retained_bytes += size
                self._retained.append(_Sent(frame, size, block))
            else:
                self._base += 1
            self._sent_messages += 1
            self._sent_bytes += size - wire.FRAME.size
            self._copied += size - wire.FRAME.size
            self._say(frame)

    def send(
        self, items: list[Any], joined: int, timeout: float | None = None, tag: int = 0
    ) -> None:
        """As Endpoint.send, to every reader here and elsewhere."""
        self._check(timeout)
        if not self._ready:
            raise NotReady(
                "readers on other hosts get only what is sent after they have joined: call "
                "wait_until_ready() before the first message",
                tuple(self.missing()),
            )
        deadline = _until(timeout)
        # The one copy, made before anybody is kept waiting.
        block, bare = _core.join(items, joined, wire.FRAME.size)
        size = len(block)
        with self._my_turn(deadline) as mine:
            if not mine:
                raise Full("another thread is sending" + _within(timeout))
            self._reserve(size, deadline, timeout)
            seq = self._head
            before = self._local_messages()
            try:
                self._send_local(items, joined, deadline, tag)
                self._publish(block, bare, size)
            except BaseException:
                # A signal handler may raise just after the ring took the message: then the
                # others get it, too.
                if self._head == seq and (
                    self._local_gone or self._local_messages() > before or self._local is None
                ):
                    self._publish(block, bare, size)
                raise

    def _local_messages(self) -> int:
        if self._local is None or self._local.closed:
            return 0
        return self._local.stats()["messages"]

    def _send_local(self, items: list[Any], joined: int, deadline: float | None, tag: int) -> None:
        if self._local is None or self._local_gone:
            return
        try:
            self._local.send(items, joined, keeper.remaining(deadline), tag)
        except Closed:
            if self._stopped:
                raise
            # All local readers have left; there are others.
            self._local_gone = True
            with self._lock:
                self._raise_if_gone()

    def _raise_if_gone(self) -> None:
        """Locked: a reason why nothing can be sent."""
        if self._stopped:
            raise Closed(_SHUT)
        for member in self._members.values():
            if member.state == "dead":
                raise PeerDied(
                    f"{member} died without closing the queue, or its host can't be reached",
                    member.rank,
                    member.pid,
                    member.host,
                )
        if (self._local is None or self._local_gone) and not self._counted():
            raise Closed("every reader has left the queue")

    def _room(self, size: int) -> bool:
        """Locked: whether that much may be sent to the remote readers."""
        return not self._retained or (
            len(self._retained) < self._credit_messages
            and self._retained_bytes + size <= self._credit_bytes
        )

    def _slowest(self) -> _Member | None:
        return min(self._counted(), key=lambda m: m.acked, default=None)

    def _may_send(self, size: int) -> bool:
        """Locked: takes notice of what has arrived. Raises when nothing can be sent."""
        now = time.monotonic()
        self._pump(now)
        self._judge(now)
        self._raise_if_gone()
        if self._room(size):
            return True
        self._ask(now)
        return False

    def _reserve(self, size: int, deadline: float | None, timeout: float | None) -> None:
        """Waits for credit. Only the holder of the turn uses it up, so it stays."""
        with self._lock:
            if self._may_send(size):
                return
        begun = time.monotonic()
        warned = begun
        self._waits += 1
        with self._watched():
            while True:
                with self._lock:
                    if self._may_send(size):
                        return
                    pending = self._pending()
                    slowest = self._slowest()
                    base = self._base
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    raise Full(
                        "no room in the queue"
                        + _within(timeout)
                        + (f": {slowest} has not read enough of it" if slowest else "")
                    )
                if slowest is not None and 0 < self._warn_after <= now - warned:
                    warned = now
                    self._notice(
                        self,
                        "waiting",
                        slowest.rank,
                        slowest.pid,
                        slowest.host,
                        now - begun,
                        base,
                    )
                if not pending:
                    self._sleep(deadline, SLICE)

    # -- readiness, and what is known of readers

    def wait_ready(self, timeout: float | None = None) -> bool:
        """As Endpoint.wait_ready: every rank here and elsewhere has attached."""
        self._check(timeout)
        deadline = _until(timeout)
        with self._my_turn(deadline) as mine:
            if not mine:
                return False
            local = None if self._local_gone else self._local
            if local is not None and not local.wait_ready(timeout):
                return False
            return self._wait_members(deadline)

    def _wait_members(self, deadline: float | None) -> bool:
        begun = time.monotonic()
        warned = begun
        with self._watched():
            while True:
                with self._lock:
                    now = time.monotonic()
                    self._pump(now)
                    self._judge(now)
                    self._raise_if_gone_early()
                    if len(self._members) == len(self._remote_ranks):
                        if not self._ready:
                            self._ready = True
                            self._say(self._topics.to_all(wire.READY))
                        return True
                    pending = self._pending()
                if deadline is not None and now >= deadline:
                    return False
                if 0 < self._warn_after <= now - warned:
                    warned = now
                    self._notice(self, "waiting", self.missing()[0], 0, "", now - begun, 0)
                if not pending:
                    self._sleep(deadline, SLICE)

    def _raise_if_gone_early(self) -> None:
        if self._stopped or any(m.state == "dead" for m in self._members.values()):
            self._raise_if_gone()

    def missing(self) -> list[int]:
        """The ranks that have never attached, as far as the writer has noticed."""
        local = [] if self._local is None or self._local.closed else self._local.missing()
        return [*local, *(rank for rank in self._remote_ranks if rank not in self._members)]

    def peer(self, reader: int | None) -> tuple[str, int, str, int]:
        """As Endpoint.peer."""
        self._check()
        if reader is None:
            return "active", os.getpid(), host_name(), 0
        if reader < len(self._local_ranks):
            assert self._local is not None
            return self._local.peer(reader)
        with self._lock:
            member = self._members.get(self._ranks[reader])
            if member is None:
                return "free", 0, "", 0
            state = "left" if member.state == "evicted" else member.state
            return state, member.pid, member.host, self._head - member.acked

    def evict(self, reader: int) -> None:
        """As Endpoint.evict."""
        self._check()
        if reader < len(self._local_ranks):
            assert self._local is not None
            self._local.evict(reader)
            return
        with self._lock:
            now = time.monotonic()
            self._pump(now)
            self._judge(now)
            member = self._members.get(self._ranks[reader])
            if member is None or member.state != "dead":
                raise ValueError(f"reader rank {self._ranks[reader]} is not dead")
            member.state = "evicted"
            self._trim(now)

    def stats(self) -> dict[str, int]:
        """As Endpoint.stats, and of the remote part: ``remote_messages`` and ``remote_bytes``
        (sent), ``remote_unread`` and ``remote_unread_bytes`` (kept for readers), and
        ``remote_resent``."""
        stats: dict[str, int] = (
            dict.fromkeys(_STATS, 0) if self._local is None else dict(self._local.stats())
        )
        with self._lock:
            if self._local is None:
                stats["messages"], stats["bytes"] = self._sent_messages, self._sent_bytes
            stats["bytes_copied"] += self._copied
            stats["waits"] += self._waits
            stats["remote_messages"] = self._sent_messages
            stats["remote_bytes"] = self._sent_bytes
            stats["remote_unread"] = len(self._retained)
            stats["remote_unread_bytes"] = self._retained_bytes
            stats["remote_resent"] = self._resent
        return stats

    def size(self) -> int:
        """Messages that the slowest reader, here or elsewhere, has not read."""
        self._check()
        local = 0 if self._local is None or self._local_gone else self._local.size()
        with self._lock:
            self._pump(time.monotonic())
            return max(local, len(self._retained))

    def has_room(self) -> bool:
        """Whether a small message would go at once."""
        self._check()
        if self._local is not None and not self._local_gone and not self._local.has_room():
            return False
        with self._lock:
            self._pump(time.monotonic())
            return self._room(wire.FRAME.size + 64)

    def address(self) -> tuple[bytes, int, int, int, str]:
        """As Endpoint.address."""
        return super().address() if self._local is None else self._local.address()

    # -- the end

    def shutdown(self) -> None:
        """As Endpoint.shutdown."""
        super().shutdown()
        if self._local is not None:
            self._local.shutdown()

    def close(self) -> None:
        """As Endpoint.close. What remote readers have not received yet is sent to them by the
        keeper, for as long as some of it arrives every few seconds."""
        if self._closing or self._forks != keeper.forks():
            return
        super().shutdown()  # first: what then ends the ring's calls isn't that everyone left
        if self._local is not None:
            self._local.close()
        super().close()

    def _look_after(self, now: float) -> None:
        self._pump(now)
        self._judge(now)
        self._ask(now)
        if self._closing and not self._closed_said:
            self._closed_said = self._progress = now
            self._say(self._topics.to_all(wire.CLOSED, self._head))

    def _undelivered(self) -> list[_Member]:
        return [
            m
            for m in self._members.values()
            if m.state == "active" and not (m.has_closed and m.received == self._head)
        ]

    def _delivered(self) -> bool:
        if not self._closed_said:
            return False
        return not self._undelivered() or time.monotonic() - self._progress > self._linger

    def hopeless(self) -> bool:
        """For the keeper: nobody who has not got everything is connected."""
        now = time.monotonic()
        with self._lock:
            return self._closed_said > 0 and all(
                m.lost is not None and now - m.lost > RECONNECT_SECONDS for m in self._undelivered()
            )

    # -- what only readers do

    def recv(self, timeout: float | None = None) -> bytes | list[_core.Block]:
        raise IPCError("this is the writer's end")

    wait_readable = recv

    def readable(self) -> bool:
        raise IPCError("this is the writer's end")


_STATS = (
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


# ---- a reader -----------------------------------------------------------------------------------


class RemoteReader(_RemoteEnd):
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

        self._inbox: deque[tuple[Any, int, bool]] = deque()  # frame, its size, bare
        self._welcomed = False
        self._ready = False
        self._next = 0  # the next sequence number to receive
        self._acked = 0
        self._unacked_bytes = 0
        self._ack_messages = 1
        self._ack_bytes = 1
        self._asking = False  # a HELLO is out, and what is missing has not come yet
        self._closed_at: int | None = None  # the writer's last sequence number, once it has closed
        self._failure: Callable[[], IPCError] | None = None

        self._linked = False  # a handshake has succeeded, and the connection stands
        self._connected = False  # the TCP connection stands
        self._greeted = True  # a HELLO is on its way with the connection that is being made
        self._lost: float = time.monotonic()  # since when it isn't linked
        self._failed_handshakes = 0
        self._prober: socket.socket | None = None
        self._probe_next = 0.0
        self._refused = False
        self._taken_messages = self._taken_bytes = self._copied = self._waits = 0

        try:
            host, self._port = addresses.split_endpoint(endpoint)
            self._host = addresses.reachable_form(host)
        except ValueError as error:
            raise HandleMismatch(f"the handle's address can't be used here: {error}") from None
        self.endpoint = addresses.endpoint(self._host, self._port)
        # Upstream there are only a few words; when connected they leave at once.
        self._open_socket(zmq.XSUB, 500)
        try:
            s = self._socket
            s.rcvhwm = 1024
            s.sndhwm = 1024
            s.reconnect_ivl = RECONNECT_IVL_MS
            s.reconnect_ivl_max = 1000
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
        except BaseException:
            self._give_back()
            raise
        keeper.add(self)

    def tcp(self) -> tuple[int, tuple[str, int] | None]:
        """For the keeper."""
        return 0, (self._host.partition("%")[0], self._port)

    @property
    def _consumed(self) -> int:
        """All sequence numbers below this have been taken by the user."""
        return self._next - len(self._inbox)

    # -- what is said to the writer. All of it under the lock.

    def _hello(self) -> None:
        wanted = self._next if self._welcomed else wire.ANY
        hello = wire.Hello(self._nonce, self._rank, wanted, os.getpid(), host_name())
        # A new connection's way out is only known after this look.
        self._socket.get(zmq.EVENTS)
        self._tell(wire.HELLO, hello.pack())
        self._asking = True

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

    def _pump(self, now: float, want: int) -> None:
        """Takes in what has arrived, until `want` messages are there."""
        if self._gone:
            raise Closed(_SHUT)
        if _events(self._monitor):
            for event, _ in self._monitored():
                self._on_event(event, now)
        s = self._socket
        while len(self._inbox) < want and self._failure is None:
            try:
                frame = s.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._on_frame(frame)
        if not self._linked:
            self._judge(now)

    def _on_event(self, event: int, now: float) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._connected = True
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
        elif event in (zmq.EVENT_CLOSED, zmq.EVENT_CONNECT_RETRIED):
            self._connected = self._linked

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
            prober = socket.socket(family, socket.SOCK_STREAM)
            prober.setblocking(False)
            try:
                where = socket.getaddrinfo(self._host, self._port, family, socket.SOCK_STREAM)
                code = prober.connect_ex(where[0][4])
            except OSError as error:
                code = error.errno or 0
            if code == errno.EINPROGRESS:
                self._prober = prober
                self._probe_next = now + 3.0
                return
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
            self._asking = False  # it comes after all that was asked for
            self._on_head(kind, wire.number(body))

    def _on_welcome(self, welcome: wire.Welcome) -> None:
        self._ready |= welcome.ready
        self._ack_messages = max(1, min(16, welcome.credit_messages // 4))
        self._ack_bytes = welcome.credit_bytes // 8
        if not self._welcomed:
            self._welcomed = True
            self._next = self._acked = welcome.start

    def _on_data(self, frame: zmq.Frame, size: int, seq: int, bare: bool) -> None:
        if seq == self._next:
            self._next += 1
            self._inbox.append((frame, size, bare))
            if self._next == self._closed_at:
                self._acknowledge()
        elif seq > self._next and not self._asking:
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
            raise Closed(_SHUT)
        if self._closed_at is not None and self._next >= self._closed_at:
            raise Closed("the writer has closed the queue and all its messages are read")
        if self._failure is not None:
            raise self._failure()

    def _wait(self, deadline: float | None, done: Callable[[], bool]) -> bool:
        """Until done() (called under the lock, with what has arrived taken in) or the deadline.
        Raises what is over; the turn is held."""
        waited = False
        with self._watched():
            while True:
                with self._lock:
                    now = time.monotonic()
                    self._pump(now, 1)
                    if done():
                        return True
                    self._over()
                    if self._consumed != self._acked:
                        self._acknowledge()
                    pending = self._pending()
                    linked = self._linked
                if deadline is not None and now >= deadline:
                    return False
                if not pending:
                    if not waited:
                        waited = True
                        self._waits += 1
                    self._sleep(deadline, SLICE if linked else LOST_SLICE)

    def _has_message(self) -> bool:
        return bool(self._inbox)

    def recv(self, timeout: float | None = None) -> bytes | list[_core.Block]:
        """As Endpoint.recv."""
        self._check(timeout)
        deadline = _until(timeout)
        with self._my_turn(deadline) as mine:
            if not mine:
                raise Empty("another thread is receiving" + _within(timeout))
            if not self._inbox and not self._wait(deadline, self._has_message):
                raise Empty("no message in the queue" + _within(timeout))
            frame, size, bare = self._inbox[0]
            try:
                message = _core.split(frame.buffer, wire.FRAME.size, bare)
            except DecodeError:
                self._take(size)
                raise
            self._take(size)
            return message

    def _take(self, size: int) -> None:
        with self._lock:
            self._inbox.popleft()
            self._unacked_bytes += size
            self._taken_messages += 1
            self._taken_bytes += size - wire.FRAME.size
            self._copied += size - wire.FRAME.size
            if (
                self._consumed - self._acked >= self._ack_messages
                or self._unacked_bytes >= self._ack_bytes
            ) and not self._gone:
                self._acknowledge()

    def wait_readable(self, timeout: float | None = None) -> None:
        """As Endpoint.wait_readable."""
        self._check(timeout)
        deadline = _until(timeout)
        with self._my_turn(deadline) as mine:
            if not mine or not self._wait(deadline, self._has_message):
                raise Empty("no message in the queue" + _within(timeout))

    def readable(self) -> bool:
        """As Endpoint.readable: recv would return or raise."""
        self._check()
        with self._lock:
            self._pump(time.monotonic(), 1)
            if self._inbox:
                return True
            try:
                self._over()
            except IPCError:
                return True
            return False

    def wait_ready(self, timeout: float | None = None) -> bool:
        """As Endpoint.wait_ready: the writer's wait_ready has seen everyone."""
        self._check(timeout)
        deadline = _until(timeout)
        with self._my_turn(deadline) as mine:
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
        stats = dict.fromkeys(_STATS, 0)
        stats["messages"], stats["bytes"] = self._taken_messages, self._taken_bytes
        stats["bytes_copied"], stats["waits"] = self._copied, self._waits
        return stats

    def size(self) -> int:
        """Messages that have arrived and are unread."""
        self._check()
        with self._lock:
            self._pump(time.monotonic(), 1 << 30)
        return len(self._inbox)

    def has_room(self) -> bool:
        return False

    def send(
        self, items: list[Any], joined: int, timeout: float | None = None, tag: int = 0
    ) -> None:
        raise IPCError("this is a reader's end")

    def evict(self, reader: int) -> None:
        raise IPCError("this is a reader's end")

    # -- the end

    def _look_after(self, now: float) -> None:
        if self._closing:
            return
        received = self._next
        # Bounded by the writer's credit. It makes room on the way, and lets a writer end that
        # waits for nothing but this.
        self._pump(now, 1 << 30)
        if self._consumed != self._acked or self._next != received:
            self._acknowledge()

    def _delivered(self) -> bool:
        return True

    def hopeless(self) -> bool:
        """For the keeper."""
        return True

    def _give_back(self, linger_ms: int = 0) -> None:
        self._end_probe()
        if not self._gone and self._linked:
            self._acknowledge(wire.LEFT)
            linger_ms = 500
        super()._give_back(linger_ms)


# ---- several ends -------------------------------------------------------------------------------


def wait_any(ends: Sequence[Any], timeout: float | None = None) -> list[int]:
    """_core.wait_any for readers of both kinds.

    The remote ones are slept on by their descriptors, the local ones by a thread of this call's,
    which there is only if there are both.
    """
    if timeout is not None and not timeout >= 0:
        raise ValueError(
            f"timeout must be None or a number of seconds of at least 0, not {timeout!r}"
        )
    deadline = _until(timeout)
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
            most = SLICE
            for end in remote:
                for fd in (*end._fds, end._wake.fd):
                    poller.register(fd, select.POLLIN)
                if not end._linked:
                    most = LOST_SLICE
            poller.poll((most if left is None else min(left, most)) * 1000)
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
    watcher = _kept.watcher = _Watcher(list(ends))
    watcher.armed.set()
    watcher.start()
    return watcher


def _readable(end: Any) -> bool:
    try:
        return bool(end.readable())
    except Closed:
        return True
