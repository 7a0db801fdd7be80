"""ZMQ sockets as an inference server needs them, and sending without copying what is sent.

Factories (`make_zmq_socket`, `zmq_socket_ctx`), names (`make_zmq_path`, `get_open_zmq_ipc_path`,
...), and `send_frames`, which knows when ZMQ has let go of every frame.

Fork: sockets and contexts belong to the process that made them, as with pyzmq. The directory of ipc
sockets does too: a forked child leaves its parent's alone, and makes its own when it asks for a
path.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import zmq

from .private_dirs import MAX_IPC_PATH, SocketDirectory, base_directory, sweep_sockets

__all__ = [
    "BufferPool",
    "PendingSend",
    "close_sockets",
    "get_open_zmq_inproc_path",
    "get_open_zmq_ipc_path",
    "get_tcp_uri",
    "make_zmq_path",
    "make_zmq_socket",
    "pending_sends",
    "remove_orphaned_directories",
    "remove_own_directory",
    "send_frames",
    "send_frames_async",
    "split_zmq_path",
    "zmq_socket_ctx",
]

# How long unsent messages are kept for an absent peer when a socket is closed and nobody asked for
# a linger: long enough for a peer that is there, short enough for a process to end (ZMQ's own
# default is for ever).
DEFAULT_LINGER_MS = 500

GIB = 1 << 30
_BIG_BUFFER = GIB // 2
_SNDMORE, _NOBLOCK = int(zmq.SNDMORE), int(zmq.NOBLOCK)
_CONNECTING = (zmq.PUSH, zmq.SUB, zmq.XSUB)


# -- names -----------------------------------------------------------------------------------------


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).version == 6
    except ValueError:
        return False


def split_zmq_path(path: str) -> tuple[str, str, str]:
    """The scheme, host and port of a ZMQ path; an IPv6 host without its brackets.

    For ipc and inproc the host is all that follows the scheme, and the port is "".

    Raises:
        ValueError: not a tcp, ipc or inproc path, or one that lacks a part.
    """
    scheme, separator, rest = path.partition("://")
    if not separator or scheme not in ("tcp", "ipc", "inproc") or not rest:
        raise ValueError(f"invalid ZMQ path: {path!r}")
    if scheme != "tcp":
        return scheme, rest, ""
    host, separator, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if not _is_ipv6(host) and host != "::":
            raise ValueError(f"invalid ZMQ path: {path!r}: {host!r} is not an IPv6 address")
    elif ":" in host:
        raise ValueError(f"invalid ZMQ path: {path!r}: an IPv6 address needs brackets")
    if (
        not separator
        or not host
        or not (port == "*" or (port.isascii() and port.isdigit() and int(port) < 65536))
    ):
        raise ValueError(f"invalid ZMQ path: {path!r}: expected tcp://host:port")
    return scheme, host, port


def make_zmq_path(scheme: str, host: str, port: int | str | None = None) -> str:
    """A ZMQ path out of its parts; the inverse of `split_zmq_path`. An IPv6 host gets brackets."""
    if port is None or port == "":
        return f"{scheme}://{host}"
    return f"{scheme}://[{host}]:{port}" if _is_ipv6(host) else f"{scheme}://{host}:{port}"


def get_tcp_uri(ip: str, port: int) -> str:
    """The tcp path of an address; an IPv6 one gets brackets."""
    return make_zmq_path("tcp", ip, port)


def get_open_zmq_inproc_path() -> str:
    """An inproc path that nothing else uses."""
    return f"inproc://{uuid.uuid4()}"


def get_open_zmq_ipc_path() -> str:
    """An ipc path that nothing else uses, in a directory that only this user may enter.

    The directory is made on first use under FASTIPC_RPC_BASE_PATH, else the temporary directory (if
    that is too deep for a socket address, /tmp). It goes when this process ends; that of a process
    that was killed goes when the next one makes its own.

    Raises:
        OSError: ENAMETOOLONG, before anything is created, when FASTIPC_RPC_BASE_PATH is too deep.
    """
    return f"ipc://{_directory.socket_path()}"


def remove_own_directory(*, wait: bool = True) -> None:
    """Remove the directory of this process's ipc sockets now: it is about to be ended, and may not
    come to do so later. (A path that is asked for afterwards is in another directory.) With
    ``wait=False`` nothing is waited for, and nothing removed while another thread of this process
    makes the directory, a path in it, or removes it."""
    _directory.remove(wait=wait)


def remove_orphaned_directories() -> None:
    """Remove the directories of this user's processes that ended without removing theirs. Those of
    living processes are told by locks that the kernel holds, and stay."""
    with contextlib.suppress(OSError):
        sweep_sockets(base_directory())


_directory = SocketDirectory()


# -- sockets ---------------------------------------------------------------------------------------


def _wants_big_buffers() -> bool:
    """Whether 0.5 GiB of kernel memory per direction is nothing to this machine: 32 GiB total, 16
    GiB free."""
    total = free = 0
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as lines:
        for line in lines:
            name, _, amount = line.partition(":")
            if name == "MemTotal":
                total = int(amount.split()[0]) * 1024
            elif name == "MemAvailable":
                free = int(amount.split()[0]) * 1024
    return total > 32 * GIB and free > 16 * GIB


def make_zmq_socket(
    ctx: Any,
    path: str,
    socket_type: int,
    bind: bool | None = None,
    identity: bytes | None = None,
    linger: int | None = None,
    router_handover: bool = False,
    *,
    configure: Callable[[Any], None] | None = None,
) -> Any:
    """A socket of `ctx` (of pyzmq, or its asyncio one) that is bound or connected to `path`.

    Args:
        ctx: a `zmq.Context` or `zmq.asyncio.Context`.
        path: `tcp://host:port`, `ipc://file` or `inproc://name`.
        socket_type: `zmq.ROUTER`, `zmq.DEALER`, ...
        bind: whether to bind; None: unless it is a PUSH, SUB or XSUB.
        identity: what a ROUTER at the other end calls this socket.
        linger: milliseconds to keep unsent messages for after close, -1 for ever; None: 500.
        router_handover: let a peer that comes back with its old identity take it over from its dead
            connection.
        configure: called with the socket before it is bound or connected, for further options
            (CURVE keys, keep-alive).

    ROUTER, DEALER, PUSH and PULL queue without limit, and get 0.5 GiB of kernel buffer each way on
    machines with over 32 GiB of memory and 16 GiB free. A ROUTER raises (EHOSTUNREACH) on a send to
    an identity it does not know, an XPUB passes every subscription on, and IPv6 is on when the
    address is one.

    Raises:
        ValueError: the path is malformed.
        OSError: ENAMETOOLONG, before anything is created, for an ipc path of over 107 bytes.
        zmq.ZMQError: the address is in use, or not ours. The socket is closed.
    """
    scheme, host, _ = split_zmq_path(path)
    if scheme == "ipc":
        length = len(os.fsencode(host))
        if length > MAX_IPC_PATH:
            raise OSError(
                errno.ENAMETOOLONG,
                f"an ipc path has at most {MAX_IPC_PATH} bytes, this has {length}",
                host,
            )
    socket = ctx.socket(socket_type)
    try:
        big = _wants_big_buffers()
        if socket_type in (zmq.PULL, zmq.DEALER, zmq.ROUTER):
            socket.setsockopt(zmq.RCVHWM, 0)
            if big:
                socket.setsockopt(zmq.RCVBUF, _BIG_BUFFER)
        if socket_type in (zmq.PUSH, zmq.DEALER, zmq.ROUTER):
            socket.setsockopt(zmq.SNDHWM, 0)
            if big:
                socket.setsockopt(zmq.SNDBUF, _BIG_BUFFER)
        if identity is not None:
            socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.LINGER, DEFAULT_LINGER_MS if linger is None else linger)
        if socket_type == zmq.XPUB:
            socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        if socket_type == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if router_handover:
                socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if scheme == "tcp" and _is_ipv6(host):
            socket.setsockopt(zmq.IPV6, 1)
        if configure is not None:
            configure(socket)
        if socket_type not in _CONNECTING if bind is None else bind:
            socket.bind(path)
        else:
            socket.connect(path)
    except BaseException:
        socket.close(linger=0)
        raise
    return socket


@contextlib.contextmanager
def zmq_socket_ctx(
    path: str,
    socket_type: int,
    bind: bool | None = None,
    linger: int = 0,
    identity: bytes | None = None,
    router_handover: bool = False,
) -> Iterator[zmq.Socket[bytes]]:
    """A socket with a context of its own, both closed at the end of the with-statement.

    Leaving it takes at most `linger` milliseconds.
    """
    ctx: zmq.Context[Any] = zmq.Context()
    try:
        yield make_zmq_socket(
            ctx,
            path,
            socket_type,
            bind,
            identity=identity,
            linger=linger,
            router_handover=router_handover,
        )
    finally:
        ctx.destroy(linger=linger)


def close_sockets(sockets: Iterable[Any]) -> None:
    """Close these sockets (None is skipped) and drop what they have not sent."""
    for socket in sockets:
        if socket is not None:
            socket.close(linger=0)


# -- sending without copies ------------------------------------------------------------------------


class PendingSend:
    """One message on its way: what it borrows, and whether ZMQ has let go of all of it.

    Thread safe. Dropping it changes nothing: what is borrowed is held until it is free.
    """

    __slots__ = ("_keep", "_trackers", "nbytes")

    def __init__(self, trackers: list[Any], keep: Any, nbytes: int) -> None:
        self._trackers = trackers
        self._keep = keep
        self.nbytes = nbytes
        """Bytes that are borrowed (frames that ZMQ copied at once don't count)."""

    @property
    def done(self) -> bool:
        """Whether every frame may be overwritten."""
        if not all(tracker.done for tracker in self._trackers):
            return False
        self._trackers = []
        self._keep = None
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every frame may be overwritten.

        Raises:
            TimeoutError: `timeout` seconds were not enough.
        """
        end = None if timeout is None else time.monotonic() + timeout
        for tracker in list(self._trackers):
            try:
                tracker.wait(-1 if end is None else max(0.0, end - time.monotonic()))
            except zmq.NotDone:
                raise TimeoutError(
                    f"a message of {self.nbytes} borrowed bytes is still being sent"
                ) from None
        assert self.done


class _Pending:
    """The sends of one socket that are not known to be done."""

    def __init__(self) -> None:
        self.sends: list[PendingSend] = []
        self.look_at = 16

    def add(self, send: PendingSend) -> None:
        # Looking at all of them each time would make a slow peer slow its sender down more and
        # more; looking when they have doubled costs the same per message however many there are.
        if len(self.sends) >= self.look_at:
            self.clean()
        self.sends.append(send)

    def clean(self) -> None:
        self.sends = [send for send in self.sends if not send.done]
        self.look_at = max(16, 2 * len(self.sends))


_pending: weakref.WeakKeyDictionary[Any, _Pending] = weakref.WeakKeyDictionary()
_orphans = _Pending()  # of sockets that are gone: ZMQ may still be sending what they were given


def _adopt(pending: _Pending) -> None:
    for send in pending.sends:
        _orphans.add(send)


def pending_sends(socket: Any) -> int:
    """How many messages of `send_frames` on this socket still borrow from the caller."""
    pending = _pending.get(socket)
    if pending is None:
        return 0
    pending.clean()
    return len(pending.sends)


def _wrap(socket: Any, frames: Sequence[Any]) -> tuple[list[Any], list[Any], int]:
    """The frames as ZMQ is to get them, the trackers of those that borrow, and how much that is."""
    messages: list[Any] = []
    trackers: list[Any] = []
    borrowed = 0
    threshold = socket.copy_threshold
    for frame in frames:
        if type(frame) is bytes:
            size = len(frame)
        else:
            view = memoryview(frame)
            if not view.contiguous:
                raise BufferError("a frame must be a contiguous buffer")
            size = view.nbytes
        if size < threshold:
            # ZMQ copies these at once: there is nothing to track. That is also why a tracker of one
            # frame, the last one say, tells nothing about the others.
            messages.append(frame)
            continue
        # The memoryview stays until ZMQ is done, and with it the export: a bytearray cannot be
        # resized, nor encoded into, while it is being sent. (A Frame by itself keeps the object
        # alive but does not hold its memory.)
        message = zmq.Frame(
            frame if type(frame) is bytes else memoryview(frame), track=True, copy=False
        )
        messages.append(message)
        trackers.append(message.tracker)
        borrowed += size
    return messages, trackers, borrowed


def _pend(socket: Any, trackers: list[Any], keep: Any, borrowed: int) -> PendingSend:
    send = PendingSend(trackers, keep if trackers else None, borrowed)
    if trackers:
        pending = _pending.get(socket)
        if pending is None:
            _orphans.clean()
            pending = _pending[socket] = _Pending()
            weakref.finalize(socket, _adopt, pending).atexit = False
        pending.add(send)
    return send


def send_frames(
    socket: Any, frames: Sequence[Any], flags: int = 0, *, keep: Any = None
) -> PendingSend:
    """Send `frames` as one message without copying the large ones.

    Args:
        socket: a plain (not asyncio) ZMQ socket of this thread.
        frames: buffers: bytes, bytearrays, memoryviews. Those of `socket.copy_threshold` bytes (64
            KiB) and more are borrowed, smaller ones copied.
        flags: `zmq.NOBLOCK` and the like.
        keep: any object to hold until ZMQ has let go of every frame, even if the socket is closed
            before.

    Returns:
        What tells when the frames may be overwritten; `pending_sends(socket)` counts those that may
        not yet.

    Raises:
        zmq.ZMQError: EAGAIN with NOBLOCK and a full queue, EHOSTUNREACH for an identity that a
            ROUTER doesn't know. Then nothing was sent and nothing is borrowed.
        TypeError, BufferError: a frame is no buffer, or not a contiguous one. Nothing was sent.

    What a signal handler raises meanwhile (KeyboardInterrupt, say) leaves a socket that works. How
    much was sent then nobody can tell: the peer gets all frames, or none, or the first of them and
    an empty one, which it must expect; unless the socket is a ROUTER, perhaps an empty message.
    """
    messages, trackers, borrowed = _wrap(socket, frames)
    # Frame by frame: send_multipart looks at each frame twice, and adds up flags of an enum type,
    # which takes longer than sending. As ints they are quick, and so is the send beneath the one
    # that knows of groups and routing ids.
    send_one = super(zmq.Socket, socket).send
    plain = int(flags)
    more = plain | _SNDMORE
    last = messages.pop()
    try:
        for message in messages:
            send_one(message, more, False)
        send_one(last, plain, False)
    except zmq.ZMQError:
        raise  # ZMQ takes all of a message or nothing
    except BaseException:
        # A signal handler's. A message that has no end would swallow the next one. (pyzmq asks for
        # signals after a frame was sent as well as before: which it was can't be told. A ROUTER
        # drops a frame that is neither in a message nor the beginning of one.)
        with contextlib.suppress(zmq.ZMQError):
            send_one(b"", plain | _NOBLOCK)
        _pend(socket, trackers, keep, borrowed)
        raise
    del (
        messages,
        last,
    )  # a zmq.Frame is a reference to its message: while it lives, ZMQ has not let go
    return _pend(socket, trackers, keep, borrowed)


async def send_frames_async(
    socket: Any, frames: Sequence[Any], flags: int = 0, *, keep: Any = None
) -> PendingSend:
    """`send_frames` on a socket of a `zmq.asyncio.Context`. When cancelled, the message may still
    be sent."""
    messages, trackers, borrowed = _wrap(socket, frames)
    send = _pend(socket, trackers, keep, borrowed)
    await socket.send_multipart(messages, flags, copy=False)
    del messages
    return send


class BufferPool:
    """Bytearrays for `encode_into` that come back when no message uses them any more.

    Thread safe. At most `limit` idle buffers are kept; more in use than that is fine.

    >>> pool = BufferPool()
    >>> buffer = pool.get()
    >>> buffer += b"message"
    >>> pool.give(buffer)
    >>> pool.get() is buffer
    True
    """

    def __init__(self, limit: int = 8) -> None:
        self._limit = limit
        self._free: list[bytearray] = []
        self._busy: deque[tuple[bytearray, PendingSend]] = deque()
        self._lock = threading.Lock()

    @property
    def pending(self) -> int:
        """Buffers that a message in flight still uses."""
        with self._lock:
            self._reclaim()
            return len(self._busy)

    def get(self) -> bytearray:
        """A buffer that nothing uses: one given back, or a new one."""
        with self._lock:
            self._reclaim()
            return self._free.pop() if self._free else bytearray()

    def give(self, buffer: bytearray, send: PendingSend | None = None) -> None:
        """Give a buffer back; it is handed out again when `send`, the message it was sent in, is
        done."""
        with self._lock:
            if send is None or send.done:
                self._keep(buffer)
            else:
                self._busy.append((buffer, send))

    def _reclaim(self) -> None:
        for _ in range(len(self._busy)):
            buffer, send = self._busy.popleft()
            if send.done:
                self._keep(buffer)
            else:
                self._busy.append((buffer, send))

    def _keep(self, buffer: bytearray) -> None:
        if len(self._free) < self._limit:
            self._free.append(buffer)
