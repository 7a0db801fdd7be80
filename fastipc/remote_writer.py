"""The writer's end of a queue that has readers on other hosts; remote.py tells the whole."""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from . import _core, addresses, keeper, wire
from .errors import Closed, Full, NotReady, PeerDied
from .hostinfo import host_name
from .liveness import Probe
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

__all__ = ["RemoteWriter"]

logger = logging.getLogger("fastipc")

# How often a lost reader is knocked at.
KNOCK_SECONDS = 0.2
# How long the first answer may take.
ANSWER_SECONDS = 2.0
# How many unanswered knocks it takes to give up on one whose port nobody has answered at yet.
KNOCKS_MOST = 5
# A writer that waits for acknowledgements asks for them after 1 s, 2 s, 4 s, ... 30 s.
STATUS_SECONDS = 1.0
STATUS_SECONDS_MOST = 30.0
# Nothing that a reader says is as long as this, so nobody can make the writer allocate more.
UPSTREAM_BYTES = 4096
# ZMQ copies what is shorter faster than it can keep track of it.
ZERO_COPY_BYTES = 65536
# How many times FASTIPC_REMOTE_LINGER a closed writer waits for a message to arrive of which some
# bytes do.
LINGERS_MOST = 12

# At exit, how long a reader that is not connected, and can't be knocked at, is waited for.
EXIT_SECONDS = 0.5

# where tcpi_bytes_acked is in Linux's struct tcp_info
_ACKED_AT = 120


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
    sign: str = ""
    probe: Probe | None = field(default=None, repr=False)
    knocks: int = 0
    believed: bool = False  # a knock at its sign has been answered, so a refusal means death

    def __str__(self) -> str:
        return f"reader rank {self.rank} (pid {self.pid} on {self.host})"


@dataclass
class _Sent:
    """A message that some reader may still ask for."""

    seq: int
    frame: zmq.Frame | _core.Block  # what to hand to ZMQ
    size: int  # bytes
    total: int  # bytes, of all messages up to this one
    block: _core.Block = field(repr=False)


class RemoteWriter(RemoteEnd):
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
        # What some counted reader has not consumed; see _head, _base and _unread_bytes.
        self._retained: deque[_Sent] = deque()
        self._floor = 0  # the next sequence number, when nothing is retained
        self._progress = time.monotonic()
        self._next_status = 0.0
        self._status_seconds = STATUS_SECONDS
        self._closed_said = 0.0
        self._scope = host.partition("%")[2]
        self._moved = 0  # bytes, and when that last changed
        self._moved_at = 0.0
        self._sent_bytes = self._resent = self._waits = 0

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
            keeper.add(self)
        except BaseException:
            self._give_back()
            raise

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

    # -- receiving, and keeping account of readers: done by the keeper, under the lock

    @property
    def _head(self) -> int:
        """The sequence number that the next message will have."""
        return self._retained[-1].seq + 1 if self._retained else self._floor

    @property
    def _base(self) -> int:
        """The sequence number of the first message that is kept."""
        return self._retained[0].seq if self._retained else self._floor

    @property
    def _unread_bytes(self) -> int:
        if not self._retained:
            return 0
        first = self._retained[0]
        return self._retained[-1].total - first.total + first.size

    def _give_back(self, linger_ms: int = 0) -> None:
        for member in getattr(self, "_members", {}).values():
            if member.probe is not None:
                member.probe.close()
        super()._give_back(linger_ms)

    def descriptors(self) -> tuple[int, ...]:
        """For the keeper."""
        return () if self._gone else (self._fd, self._monitor_fd)

    def patience(self) -> float:
        """For the keeper."""
        members = list(self._members.values())
        soon = any(m.state == "active" and (m.lost is not None or m.probe) for m in members)
        return keeper.SOON if soon or self._closing else keeper.TICK

    def _look_after(self, now: float) -> None:
        for event, value in self._monitored():
            if event == zmq.EVENT_ACCEPTED:
                self._accepted.add(value)
            elif event == zmq.EVENT_DISCONNECTED:
                self._accepted.discard(value)
        s = self._socket
        while has_events(s):
            frame = s.recv(zmq.NOBLOCK, copy=False)
            data = frame.bytes
            if data and not frame.more:
                self._on_frame(data, now)
        self._judge(now)
        self._ask(now)
        if self._closing and now - self._closed_said >= STATUS_SECONDS:
            if not self._closed_said:
                self._progress = now
            self._closed_said = now
            self._say(self._topics.to_all(wire.CLOSED, self._head))
        if self._turn.taken:
            self._wake.set()

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
            if logger.isEnabledFor(logging.DEBUG):
                text = "the queue at %s ignored a frame that can't be right"
                self._aside(logger.debug, text, self.endpoint)

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
            if member is not None and member.probe is not None:
                member.probe.close()
            member = _Member(hello.rank, hello.nonce, hello.pid, hello.host, self._head, self._head)
            member.sign = hello.sign
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
        self._floor = max(self._floor, least)
        while self._retained and self._retained[0].seq < least:
            self._retained.popleft()

    def _judge(self, now: float) -> None:
        """Whose connection is lost: is it dead? See liveness.py."""
        for member in list(self._members.values()):
            if member.state != "active":
                continue
            result = self._knock(member, now)
            if member.lost is None:
                continue
            if result in ("alive", "taken") and member.believed:
                member.lost = now  # it will be back
                continue
            refused = member.believed and result == "refused"
            asked = member.believed and member.probe is not None
            if refused or (now - member.lost >= self._grace and not asked):
                self._bury(member, now)

    def _knock(self, member: _Member, now: float) -> str | None:
        """How the last knock at a reader's sign went, if there is news."""
        if member.probe is None:
            if member.sign and (not member.believed or member.lost is not None):
                member.probe = Probe(member.sign, self._scope, member.nonce, now)
            return None
        # Who has answered before needn't answer again: its kernel does.
        result = member.probe.look(now, KNOCK_SECONDS if member.believed else ANSWER_SECONDS)
        if result is None:
            return None
        if result == "alive":
            member.believed = True
        elif not member.believed:
            # It can't be knocked at; or is busy, and may answer another time.
            member.knocks += 1
            if result != "taken" or member.knocks >= KNOCKS_MOST:
                member.sign = ""
        if member.lost is None or now - member.probe.began >= KNOCK_SECONDS:
            member.probe = None
            return result
        return result if result == "refused" else None

    def _bury(self, member: _Member, now: float) -> None:
        if self._evict_dead:
            member.state = "evicted"
            lost = 0.0 if member.lost is None else now - member.lost
            self._tell("evicted", member.rank, member.pid, member.host, lost, 0)
            self._trim(now)
        else:
            member.state = "dead"

    def _tell(self, kind: str, rank: int, pid: int, host: str, seconds: float, seq: int) -> None:
        self._aside(self._notice, self, kind, rank, pid, host, seconds, seq)

    def _aside(self, call: Callable[..., object], *args: object) -> None:
        """Calls what runs code of the user's, a log handler say. This thread has the lock or the
        turn, or is the keeper; and that code may send over this queue, or wait for who does."""
        try:
            threading.Thread(target=call, args=args, daemon=True).start()
        except RuntimeError:
            pass  # the interpreter ends, and nobody is left to be told

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
            seq = self._head
            flags = wire.BARE if bare else 0
            wire.FRAME.pack_into(block, 0, self._topics.all, wire.DATA, flags, seq)
            frame = zmq.Frame(block, copy=False) if size >= ZERO_COPY_BYTES else block
            if self._counted():
                total = size
                if self._retained:
                    total += self._retained[-1].total
                else:
                    self._progress = time.monotonic()
                    self._status_seconds = STATUS_SECONDS
                    self._next_status = self._progress + STATUS_SECONDS
                self._retained.append(_Sent(seq, frame, size, total, block))
            else:
                self._floor = seq + 1
            self._sent_bytes += size - wire.FRAME.size
            self._say(frame)
            # The keeper sleeps on the descriptor, and this may have reset it.
            if has_events(self._socket):
                keeper.nudge()

    def put(self, obj: Any, timeout: float | None = None) -> None:
        """As Endpoint.put."""
        self._check(timeout)
        items, joined = self._dump(obj)
        self.send(items, joined, timeout)

    def send(self, items: list[Any], joined: int, timeout: float | None = None) -> None:
        """As Endpoint.send, to every reader here and elsewhere."""
        self._check(timeout)
        if not self._ready:
            raise NotReady(
                "readers on other hosts get only what is sent after they have joined: call "
                "wait_until_ready() before the first message",
                tuple(self.missing()),
            )
        deadline = until(timeout)
        # The one copy, made before anybody is kept waiting.
        block, bare = _core.join(items, joined, wire.FRAME.size)
        size = len(block)
        with self._turn.within(keeper.remaining(deadline)) as mine:
            if not mine:
                raise Full("another thread is sending" + within(timeout))
            self._reserve(size, deadline, timeout)
            seq = self._head
            before = self._local_messages()
            try:
                self._send_local(items, joined, deadline)
                self._publish(block, bare, size)
            except BaseException:
                # A signal handler may raise just after the ring took the message: then the
                # others get it, too.
                if self._head == seq and (self._local_gone or self._local_messages() > before):
                    self._publish(block, bare, size)
                raise

    def _local_messages(self) -> int:
        if self._local is None or self._local.closed:
            return 0
        return self._local.stats()["messages"]

    def _send_local(self, items: list[Any], joined: int, deadline: float | None) -> None:
        if self._local is None or self._local_gone:
            return
        try:
            self._local.send(items, joined, keeper.remaining(deadline))
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
            raise Closed(SHUT)
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
            and self._unread_bytes + size <= self._credit_bytes
        )

    def _slowest(self) -> _Member | None:
        return min(self._counted(), key=lambda m: m.acked, default=None)

    def _reserve(self, size: int, deadline: float | None, timeout: float | None) -> None:
        """Waits for credit. Only the holder of the turn uses it up, so it stays."""
        begun = warned = 0.0
        while True:
            with self._lock:
                self._raise_if_gone()
                if self._room(size):
                    return
                slowest = self._slowest()
                base = self._base
            now = time.monotonic()
            if not begun:
                begun = warned = now
                self._waits += 1
                # Readers acknowledge when a part of the credit is used up, or when asked: an
                # acknowledgement for each message would cost as much as the message.
                with self._lock:
                    self._say(self._topics.to_all(wire.STATUS, self._head))
            if deadline is not None and now >= deadline:
                raise Full(
                    "no room in the queue"
                    + within(timeout)
                    + (f": {slowest} has not read enough of it" if slowest else "")
                )
            if slowest is not None and 0 < self._warn_after <= now - warned:
                warned = now
                self._tell("waiting", slowest.rank, slowest.pid, slowest.host, now - begun, base)
            self._sleep(deadline, SLICE)

    # -- readiness, and what is known of readers

    def wait_ready(self, timeout: float | None = None) -> bool:
        """As Endpoint.wait_ready: every rank here and elsewhere has attached."""
        self._check(timeout)
        deadline = until(timeout)
        with self._turn.within(timeout) as mine:
            if not mine:
                return False
            local = None if self._local_gone else self._local
            if local is not None and not local.wait_ready(timeout):
                return False
            return self._wait_members(deadline)

    def _wait_members(self, deadline: float | None) -> bool:
        begun = warned = time.monotonic()
        while True:
            with self._lock:
                self._raise_if_gone_early()
                if len(self._members) == len(self._remote_ranks):
                    if not self._ready:
                        self._ready = True
                        self._say(self._topics.to_all(wire.READY))
                    return True
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return False
            if 0 < self._warn_after <= now - warned:
                warned = now
                self._tell("waiting", self.missing()[0], 0, "", now - begun, 0)
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
            member = self._members.get(self._ranks[reader])
            if member is None or member.state != "dead":
                raise ValueError(f"reader rank {self._ranks[reader]} is not dead")
            member.state = "evicted"
            self._trim(time.monotonic())

    def stats(self) -> dict[str, int]:
        """As Endpoint.stats, and of the remote part: ``remote_messages`` and ``remote_bytes``
        (sent), ``remote_unread`` and ``remote_unread_bytes`` (kept for readers), and
        ``remote_resent``."""
        self._check_process()
        stats: dict[str, int] = (
            dict.fromkeys(STATS, 0) if self._local is None else dict(self._local.stats())
        )
        with self._lock:
            if self._local is None:
                stats["messages"], stats["bytes"] = self._head, self._sent_bytes
            stats["bytes_copied"] += self._sent_bytes
            stats["waits"] += self._waits
            stats["remote_messages"] = self._head
            stats["remote_bytes"] = self._sent_bytes
            stats["remote_unread"] = len(self._retained)
            stats["remote_unread_bytes"] = self._unread_bytes
            stats["remote_resent"] = self._resent
        return stats

    def size(self) -> int:
        """Messages that the slowest reader, here or elsewhere, has not read."""
        self._check()
        local = 0 if self._local is None or self._local_gone else self._local.size()
        with self._lock:
            return max(local, len(self._retained))

    def has_room(self) -> bool:
        """Whether a small message would go at once."""
        self._check()
        if self._local is not None and not self._local_gone and not self._local.has_room():
            return False
        with self._lock:
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

    def _undelivered(self) -> list[_Member]:
        return [
            m
            for m in self._members.values()
            if m.state == "active" and not (m.has_closed and m.received == self._head)
        ]

    def _delivered(self) -> bool:
        if not self._closed_said:
            return False
        if not self._undelivered():
            return True
        now = time.monotonic()
        moved = self._bytes_moved()
        if moved != self._moved:
            self._moved, self._moved_at = moved, now
        # A large message over a slow line takes its time; but somebody who only ever reconnects
        # doesn't keep this process from its end.
        return (
            now - max(self._progress, self._moved_at) > self._linger
            or now - self._progress > LINGERS_MOST * self._linger
        )

    def _bytes_moved(self) -> int:
        """How many bytes the kernels at the other ends have confirmed; 0 where ours can't tell."""
        total = 0
        for fd in self._accepted:
            try:
                view = socket.socket(fileno=fd)
            except OSError:
                continue
            try:
                info = view.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_AT + 8)
                total += int.from_bytes(info[_ACKED_AT:], sys.byteorder)
            except (OSError, AttributeError):
                pass
            finally:
                view.detach()
        return total

    def hopeless(self) -> bool:
        """For the keeper: whoever has not got everything is gone, as far as can be told, and
        nobody is connecting who might be the one."""
        if self._delivered():
            return True
        now = time.monotonic()
        with self._lock:
            connecting = len(self._accepted) > sum(self._connections.values())
            return (
                self._closed_said > 0
                and not connecting
                and all(
                    m.lost is not None and now - m.lost > EXIT_SECONDS for m in self._undelivered()
                )
            )
