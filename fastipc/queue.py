"""MessageQueue: one writer, many readers, every message to each of them, in order, once.

A message's way: ``enqueue`` here -> ``Endpoint.send`` in _core.pyx -> fipc_queue_send in
fipc_queue_io.c -> fipc_ring_publish in fipc_ring.c -> a futex in fipc_wait_linux.c; and back up
the same files on the other side.
"""

from __future__ import annotations

import atexit
import errno
import itertools
import logging
import operator
import os
import secrets
import sys
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from . import _core
from .addresses import advertised
from .errors import Closed, HandleMismatch, IPCError, NotReady
from .handle import Handle
from .hostinfo import available_cpus, boot_id, host_name, memory_headroom
from .serializers import Serializer, coding_of, name_of, serializer_for
from .settings import settings

__all__ = ["MessageQueue", "ShmRingBuffer", "wait"]

if TYPE_CHECKING:
    from .aio import Senders, Waiter
    from .pickling import Coding

logger = logging.getLogger("fastipc")

MIB = 1 << 20

# An orderly end of the process is a close, not a death, for its peers.
_live: weakref.WeakSet[_End] = weakref.WeakSet()


# How long the end of the process waits for threads to leave their calls, seconds: they are woken,
# and need the GIL once. A thread that is still inside then leaves its end to look dead.
_EXIT_PATIENCE = 0.3


@atexit.register
def _close_all() -> None:
    ends = list(_live)
    for end in ends:
        end.close()
    patience = time.monotonic() + _EXIT_PATIENCE
    while any(end._end.busy for end in ends) and time.monotonic() < patience:
        time.sleep(0.001)


_exit_hook_of: int | None = None


def _hook_exit() -> None:
    """Lets a child that multiprocessing started close at its end, too: it skips atexit."""
    global _exit_hook_of
    util = sys.modules.get("multiprocessing.util")
    if util is not None and _exit_hook_of != os.getpid():
        _exit_hook_of = os.getpid()
        util.Finalize(None, _close_all, exitpriority=0)


# A forked child has no end of a queue: what its parent had is forgotten, not closed.
os.register_at_fork(after_in_child=_live.clear)


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _report(
    end: Any,
    kind: str,
    rank: int | None,
    pid: int,
    host: str,
    seconds: float,
    seq: int,
) -> None:
    """Logs what the C core found out while a call of the user's was waiting."""
    if kind == "evicted":
        logger.warning(
            "reader rank %s (pid %d on %s) died and was evicted; the others go on", rank, pid, host
        )
        return
    missing = end.missing()
    if missing:
        logger.warning("waited %.0f s for %s to attach to the queue", seconds, _ranks(missing))
    elif rank is None:
        logger.warning(
            "a reader has waited %.0f s for the rest of a message (sequence %d): the writer "
            "(pid %d on %s) lives, but is stuck or stopped in the middle of it",
            seconds, seq, pid, host,
        )  # fmt: skip
    else:
        logger.warning(
            "the writer has waited %.0f s for room: reader rank %s (pid %d on %s) lives, but has "
            "not read sequence %d",
            seconds, rank, pid, host, seq,
        )  # fmt: skip


def _check_handle(handle: Any) -> None:
    if not isinstance(handle, Handle):
        raise TypeError(
            f"a Handle is needed (export_handle() makes one), not {type(handle).__name__}"
        )


def _start_of(pid: int) -> int:
    """As _core.process_start; but OSError where only this process is the reason not to know."""
    start = _core.process_start(pid)
    if not start:
        try:
            os.close(os.open(f"/proc/{pid}/stat", os.O_RDONLY))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
    return start


def _directory(shm_dir: str | os.PathLike[str]) -> str:
    path = os.path.abspath(os.fsdecode(shm_dir))
    if "\0" in path:
        raise ValueError(f"shm_dir={path!r} can't be the name of a directory")
    return path


def _index(name: str, value: SupportsIndex, low: int, high: int) -> int:
    number = operator.index(value)
    if not low <= number <= high:
        raise ValueError(f"{name} must be between {low} and {high}, not {number}")
    return number


class _End:
    """What MessageQueue and ShmRingBuffer share: making, finding, ending, telling."""

    # An _core.Endpoint; or, for a queue with readers on other hosts, a RemoteWriter or
    # RemoteReader, which have its methods. Those are imported when needed, and ZMQ with them.
    _end: Any
    _ranks: tuple[int, ...]
    _handle: Handle | None
    _rank: int | None
    _pid: int

    # -- making and finding

    def _create(
        self,
        ranks: tuple[int, ...],
        max_chunk_bytes: int,
        max_chunks: int,
        slots: int,
        inline_bytes: int,
        spin_us: float | None,
        shm_dir: str | os.PathLike[str] | None,
        on_reader_death: str,
        serializer: str,
        remote_ranks: tuple[int, ...] = (),
        connect_ip: str | None = None,
        secure: bool = True,
    ) -> None:
        if on_reader_death not in ("raise", "evict"):
            raise ValueError(f"on_reader_death must be 'raise' or 'evict', not {on_reader_death!r}")
        config = settings()
        max_chunk_bytes = _index("max_chunk_bytes", max_chunk_bytes, 64, 1 << 40)
        max_chunks = _index("max_chunks", max_chunks, 1, 1 << 16)
        self._rank = None
        self._ranks = (*ranks, *remote_ranks)
        queue_id = secrets.token_bytes(16)
        slots = _index("slots", slots, 2, 1 << 20)
        inline_bytes = _index("inline_bytes", inline_bytes, 0, 1 << 24)
        evict = on_reader_death == "evict"
        # While there is a descriptor to look it up with: without it no reader would believe the
        # handle.
        start_time = _start_of(os.getpid())
        local = None
        if ranks:
            local = _core.create_writer(
                queue_id=queue_id,
                ranks=ranks,
                max_chunk_bytes=max_chunk_bytes,
                max_chunks=max_chunks,
                slots=slots,
                inline_bytes=inline_bytes,
                shm_dir=None if shm_dir is None else _directory(shm_dir),
                host=host_name(),
                n_cpus=available_cpus(),
                spin_us=config.spin_us if spin_us is None else spin_us,
                warning_interval=config.warning_interval,
                evict=evict,
                notice=_report,
            )
        address = server_key = ""
        if remote_ranks:
            from .remote import RemoteWriter

            try:
                told, wildcard = advertised(connect_ip, config.host_ip)
                remote = RemoteWriter(
                    queue_id=queue_id,
                    local=local,
                    local_ranks=ranks,
                    remote_ranks=remote_ranks,
                    host=told,
                    wildcard=wildcard,
                    credit_messages=slots,
                    credit_bytes=max_chunk_bytes * max_chunks,
                    secure=secure,
                    evict=evict,
                    notice=_report,
                )
            except BaseException:
                if local is not None:
                    local.close()
                raise
            address, server_key = remote.endpoint, remote.server_key
            self._end = remote
        else:
            assert local is not None
            self._end = local
        _, pid, _, fd, path = self._end.address()
        self._handle = Handle(
            queue_id=queue_id.hex(),
            n_reader=len(self._ranks),
            local_reader_ranks=list(ranks),
            host=host_name(),
            boot_id=boot_id(),
            pid=pid,
            start_time=start_time,
            fd=fd,
            path=path,
            serializer=serializer,
            max_chunk_bytes=max_chunk_bytes,
            remote_reader_ranks=list(remote_ranks),
            address=address,
            server_key=server_key,
        )
        self._opened()
        headroom = memory_headroom()
        if headroom is not None and headroom < max_chunk_bytes * max_chunks:
            logger.warning(
                "this process's memory limit leaves %d MiB, and the queue may come to use %d MiB: "
                "at the limit the kernel kills; use smaller max_chunk_bytes or max_chunks",
                headroom // MIB,
                max_chunk_bytes * max_chunks // MIB,
            )

    def _attach(self, handle: Handle, rank: int, spin_us: float | None) -> None:
        _check_handle(handle)
        handle.check_version()
        rank = operator.index(rank)
        if rank in handle.remote_reader_ranks:
            self._attach_remote(handle, rank)
            return
        if rank not in handle.local_reader_ranks:
            raise ValueError(
                f"rank {rank} is not a reader of this queue: its readers are "
                f"{_ranks([*handle.local_reader_ranks, *handle.remote_reader_ranks])}"
            )
        if handle.boot_id != boot_id():
            raise HandleMismatch(
                f"the queue is on host {handle.host}, and this process on {host_name()} is not "
                "(or the host was restarted since)"
            )
        if abs(handle.fd) >> 31 or abs(handle.pid) >> 63:
            raise HandleMismatch("the handle is damaged: its pid or descriptor is impossible")
        if not handle.path and _start_of(handle.pid) != handle.start_time:
            raise HandleMismatch(
                f"the queue's writer (pid {handle.pid}) has ended, or runs in another PID "
                "namespace; there it must be made with shm_dir=",
                gone=True,
            )
        config = settings()
        self._rank = rank
        self._ranks = tuple(handle.local_reader_ranks)
        self._handle = handle
        self._end = _core.attach_reader(
            queue_id=handle.id_bytes(),
            ranks=self._ranks,
            reader=self._ranks.index(rank),
            pid=handle.pid,
            fd=handle.fd,
            path=handle.path,
            host=host_name(),
            n_cpus=available_cpus(),
            spin_us=config.spin_us if spin_us is None else spin_us,
            warning_interval=config.warning_interval,
            notice=_report,
        )
        self._opened()

    def _attach_remote(self, handle: Handle, rank: int) -> None:
        from .remote import RemoteReader

        self._rank = rank
        self._ranks = (rank,)
        self._handle = handle
        self._end = RemoteReader(
            queue_id=handle.id_bytes(),
            endpoint=handle.address,
            server_key=handle.server_key,
            rank=rank,
            writer_pid=handle.pid,
            writer_host=handle.host,
            notice=_report,
        )
        self._opened()

    def _opened(self) -> None:
        self._pid = os.getpid()
        _live.add(self)
        _hook_exit()

    # -- what the user sees

    @property
    def rank(self) -> int | None:
        """This end's rank as a reader; None for the writer."""
        return self._rank

    @property
    def closed(self) -> bool:
        """True after close()."""
        return bool(self._end.closed)

    def export_handle(self) -> Handle:
        """What a reader needs to attach; see :class:`fastipc.Handle`."""
        assert self._handle is not None
        return self._handle

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Waits until every rank has attached. Collective: the writer calls it, and readers may.

        Args:
            timeout: seconds; None waits for ever.

        Raises:
            NotReady: the timeout passed; it names the ranks that are missing (``.missing``).
            PeerDied: somebody who had attached has died.
            Closed: this end was shut down, or the other side has closed.
        """
        if not self._end.wait_ready(timeout):
            missing = tuple(self._end.missing())
            raise NotReady(
                f"after {timeout} s "
                + (
                    f"{_ranks(missing)} had not attached"
                    if missing
                    else "the writer had not noticed that all ranks attached: it must call "
                    "wait_until_ready, too"
                ),
                missing,
            )

    def evict(self, rank: int) -> None:
        """Writer: stops waiting for a reader that has died.

        Raises:
            ValueError: no such rank, or it is not dead.
        """
        if rank not in self._ranks:
            raise ValueError(f"there is no reader of rank {rank}")
        self._end.evict(self._ranks.index(rank))

    def stats(self) -> dict[str, Any]:
        """Counters of this end, and what is known of the others.

        ``messages``, ``bytes`` (of frames), ``bytes_copied`` (into or out of shared memory by
        this end), ``fragments`` (slots used), ``waits``, ``sleeps`` (waits that went to the
        kernel), ``wakes`` (of the other side), ``spin_ns`` (how long a wait would spin now),
        ``segment_bytes`` (address space), ``resident_bytes`` (allocated; writer only), and
        ``peers``: a list of ``{rank, state, pid, host, lag}`` with state one of free, joining,
        active, left, dead, and lag in messages; rank None is the writer.
        """
        stats: dict[str, Any] = dict(self._end.stats())
        peers = []
        if not self._end.closed:
            for i, rank in [(None, None), *enumerate(self._ranks)]:
                state, pid, host, lag = self._end.peer(i)
                peers.append({"rank": rank, "state": state, "pid": pid, "host": host, "lag": lag})
        stats["peers"] = peers
        return stats

    def shutdown(self) -> None:
        """Ends every call that waits on this end, now and later, with Closed. From any thread,
        any number of times; the peers notice nothing until close()."""
        self._end.shutdown()

    def close(self) -> None:
        """Leaves the queue; never waits, may be called again.

        After the writer's close its readers get what was sent, then Closed. After a reader's, the
        writer no longer waits for it; when the last reader has left, sending is Closed.
        """
        _live.discard(self)
        self._end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        end = getattr(self, "_end", None)
        if end is None or end.closed:
            return
        if not hasattr(self, "_pid"):
            end.close()  # the constructor was interrupted: nobody had this to close
        elif self._pid == os.getpid():
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)
            self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} can't be passed to another process: pass export_handle(), "
            "and attach there with create_from_handle(handle, rank)"
        )

    def __repr__(self) -> str:
        end = getattr(self, "_end", None)
        role = "writer" if getattr(self, "_rank", None) is None else f"reader rank {self._rank}"
        state = "closed" if end is None or end.closed else f"{len(self._ranks)} readers"
        return f"<{type(self).__name__} {role}, {state}>"


class MessageQueue(_End):
    """A broadcast queue of Python objects between the processes of one host or several.

    Constructing one makes the writer; readers attach with :meth:`create_from_handle`. Several
    threads may share either end: each message is sent, or delivered, once. After fork the child
    must attach anew; its parent's end raises IPCError there.

    Objects travel by pickle protocol 5; CPU tensors and numpy arrays out of band, copied once
    into shared memory and once out, and they come back owned by the receiver and writable. After
    ``enqueue`` returns the caller may change its object.

    Args:
        n_reader: number of readers.
        n_local_reader: how many of them are on this host; the others get everything over TCP.
        local_reader_ranks: their ranks, default ``range(n_local_reader)``.
        max_chunk_bytes: bytes of a chunk. A message that doesn't fit inline takes one chunk, or
            several if it is larger; it may be larger than all chunks together.
        max_chunks: number of chunks. Their pages are allocated when they are first used.
        connect_ip: the IPv4 or IPv6 address of this host that readers on other hosts are told,
            else FASTIPC_HOST_IP, else the one that the default route uses; the port is chosen by
            the system. Where all readers are local nothing listens anywhere.
        slots: how many messages (or parts of large ones) may be unread before enqueue waits.
        inline_bytes: messages up to this size travel in their slot; at most max_chunk_bytes.
        serializer: "pickle" (any object); "msgpack" (what :mod:`fastipc.codec` carries: numbers,
            text, containers, msgspec Structs, tensors, arrays; no pickle is ever loaded); "raw"
            (bytes-like objects in, bytes out); or an object with dumps and loads (see
            :mod:`fastipc.serializers`), which readers must be given, too.
        type: with "msgpack": the type of the messages. The writer names it for its readers' eyes;
            what is checked against a type is what arrives, so readers give it, too.
        spin_us: longest spin before a wait sleeps, in microseconds. None (or the variable
            FASTIPC_SPIN_US): learns from the recent waits, up to 300; 0 never spins.
        shm_dir: None puts the ring into a memfd, which has no name, no size limit but memory, and
            can't be left behind. A directory on tmpfs makes a named file there: for readers in
            other PID namespaces.
        on_reader_death: "raise" PeerDied in enqueue, or "evict" the reader and go on.
        secure: encrypt and authenticate (CURVE) what goes to other hosts: only who has the handle
            can read. False lets anyone read who reaches the port, and is logged.
        remote_reader_ranks: the ranks of the readers elsewhere, default the lowest that no local
            reader has.

    With readers elsewhere, wait_until_ready comes before the first message (NotReady otherwise),
    and at most max_chunks * max_chunk_bytes bytes, or `slots` messages, may be on their way to
    the slowest of them before enqueue waits: the writer keeps these until they have been read, so
    a torn connection loses nothing.

    Raises:
        SharedMemoryFull: no room for the ring.
        OSError: the address can't be bound.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: Sequence[int] | None = None,
        max_chunk_bytes: int = 24 * MIB,
        max_chunks: int = 10,
        connect_ip: str | None = None,
        *,
        slots: int = 256,
        inline_bytes: int = 8192,
        serializer: str | Serializer = "pickle",
        type: Any = None,
        spin_us: float | None = None,
        shm_dir: str | os.PathLike[str] | None = None,
        on_reader_death: str = "raise",
        secure: bool = True,
        remote_reader_ranks: Sequence[int] | None = None,
    ) -> None:
        n_reader = _index("n_reader", n_reader, 1, 1024)
        n_local_reader = _index("n_local_reader", n_local_reader, 0, n_reader)
        if local_reader_ranks is None:
            local_reader_ranks = range(n_local_reader)
        ranks = tuple(operator.index(rank) for rank in local_reader_ranks)
        if len(ranks) != n_local_reader or len(set(ranks)) != n_local_reader:
            raise ValueError(
                f"local_reader_ranks must be {n_local_reader} different ranks, not {list(ranks)}"
            )
        n_remote = n_reader - n_local_reader
        if remote_reader_ranks is None:
            others = (rank for rank in range(2 * n_reader) if rank not in ranks)
            remote_reader_ranks = list(itertools.islice(others, n_remote))
        remote_ranks = tuple(operator.index(rank) for rank in remote_reader_ranks)
        if len(remote_ranks) != n_remote or len({*ranks, *remote_ranks}) != n_reader:
            raise ValueError(
                f"remote_reader_ranks must be {n_remote} different ranks of no local reader, not "
                f"{list(remote_ranks)}"
            )
        name = name_of(serializer, type)
        # before there is anything that would have to be given back
        coding = coding_of(serializer, type)
        self._create(
            ranks,
            max_chunk_bytes,
            max_chunks,
            slots,
            inline_bytes,
            spin_us,
            shm_dir,
            on_reader_death,
            name,
            remote_ranks,
            connect_ip,
            secure,
        )
        self._use(coding)

    @classmethod
    def create_from_handle(
        cls,
        handle: Handle,
        rank: int,
        *,
        type: Any = None,
        spin_us: float | None = None,
        serializer: str | Serializer | None = None,
    ) -> MessageQueue:
        """Attaches to the queue as the reader of the given rank.

        Args:
            handle: what export_handle() gave the writer's side.
            rank: one of the queue's ranks.
            type: for a queue with serializer="msgpack": the type that messages must have; None
                takes plain values. What isn't of the type is a DecodeError.
            spin_us: as in the constructor.

        The first process of a rank gets every message from the first one on; one that replaces a
        reader that has left or died gets those after the writer took notice of it.

        A reader on another host connects in the background: wait_until_ready, or the first
        dequeue, raises what is wrong.

        Args:
            serializer: the writer's, if it isn't one that fastipc has; by default the handle's.
            type: with "msgpack": what messages are checked against.

        Raises:
            HandleMismatch: the handle leads nowhere, or to another queue, or the rank is taken,
                or the serializer is another one.
            OSError: this process can't open it: it has no descriptor left, say.
            ValueError: the queue has no reader of this rank.
        """
        _check_handle(handle)
        # First: to join, and to leave because of this, would be the end of the rank's first reader.
        coding = coding_of(serializer_for(handle.serializer, serializer, type), type)
        self = cls.__new__(cls)
        self._attach(handle, rank, spin_us)
        self._use(coding)
        return self

    @staticmethod
    def create_from_process_group(
        pg: Any,
        max_chunk_bytes: int,
        max_chunks: int,
        writer_rank: int = 0,
        external_writer_handle: Handle | None = None,
        blocking: bool = True,
    ) -> MessageQueue:
        """A queue among the members of a process group. Collective: every member calls it.

        Who is on the writer's host is found by trying to open its shared memory; the others read
        over TCP. Ranks are ranks of the group.

        Args:
            pg: a torch.distributed ProcessGroup, or any object with ``rank``, ``world_size`` and
                ``broadcast_obj(obj, src)``.
            max_chunk_bytes, max_chunks: as in MessageQueue.
            writer_rank: who gets the writer's end; all others get a reader's.
            external_writer_handle: given by the member writer_rank only: the handle of a queue
                that somebody else writes. Then every member, that one too, reads it, as the
                reader of its own rank.
            blocking: wait until everyone is ready; otherwise wait_until_ready is the caller's.

        Raises:
            Whatever making the queue or attaching to it raised at any member: at every member.
            ValueError: writer_rank is no rank of the group, or the group has one member.
            TypeError: pg is no process group.
        """
        from .groups import create_from_process_group

        return create_from_process_group(
            pg, max_chunk_bytes, max_chunks, writer_rank, external_writer_handle, blocking
        )

    @staticmethod
    def create_from_process_group_single_reader(
        pg: Any,
        max_chunk_bytes: int,
        max_chunks: int,
        reader_rank: int = 0,
        blocking: bool = False,
    ) -> tuple[MessageQueue, list[Handle]]:
        """A queue from each member of a process group to one of them. Collective.

        Every member, the reader too, gets the writer's end of a queue of its own with one reader.
        The member reader_rank also gets the handles of all, by rank, and attaches to each:
        ``MessageQueue.create_from_handle(handle, 0)``. The others get an empty list.

        Args:
            blocking: each writer waits until the reader has attached; the reader itself doesn't
                wait, since it attaches later.

        Raises as create_from_process_group.
        """
        from .groups import create_from_process_group_single_reader

        return create_from_process_group_single_reader(
            pg, max_chunk_bytes, max_chunks, reader_rank, blocking
        )

    def _use(self, coding: Coding) -> None:
        self._end.use_serializer(*coding)
        # bound once: these are the calls that every message makes
        self._dump = coding.dump
        self._put = self._end.put
        self._waiter: Waiter | None = None
        self._senders: Senders | None = None
        self._get = self._end.get
        # These two are called for every message. Where no subclass has its own, the end's methods
        # take their place: a Python frame less is a third less for a small message.
        if self.__class__.enqueue is MessageQueue.enqueue:
            self.enqueue = self._put  # type: ignore[method-assign, assignment]
        if self.__class__.dequeue is MessageQueue.dequeue:
            self.dequeue = self._get  # type: ignore[method-assign, assignment]

    # -- the writer

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Sends obj to every reader.

        Args:
            timeout: seconds to wait for room; None waits for ever, 0 polls.

        Raises:
            Full: the timeout passed. A message larger than all free chunks together is sent bit
                by bit as readers read, so it can't be sent with timeout 0.
            PeerDied: a reader died (``.rank``, ``.pid``, ``.host``), and so at each call until it
                is replaced, or evicted.
            Closed: all readers have left, or this end was shut down.
            SharedMemoryFull: no room for the message's pages.
            Whatever pickling raises: nothing was sent, and the queue is as before.
        """
        self._put(obj, timeout)

    # -- the reader

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """The next message.

        Args:
            timeout: seconds to wait; None waits for ever, 0 polls.
            indefinite: accepted for callers that know it from elsewhere: an idle reader never
                logs anything here, so it changes nothing.

        Raises:
            Empty: the timeout passed. What had arrived of a large message is kept.
            PeerDied: the writer died, and everything it had sent has been read.
            Closed: the same after it closed; or this end was shut down.
            DecodeError: the message could not be right; it was skipped.
            Whatever unpickling raises: the message has been taken.
        """
        return self._get(timeout)

    def dequeue_many(self, limit: int, timeout: float | None = None) -> list[Any]:
        """Up to limit messages: waits for the first as dequeue does, then takes what is there.

        If a later one can't be taken or unpickled, those before it are returned and the next call
        raises. Until then the queue is readable, for :func:`fastipc.wait` too.
        """
        limit = _index("limit", limit, 1, 1 << 30)
        objects = [self.dequeue(timeout)]
        while len(objects) < limit:
            try:
                message = self._end.poll()
            except BaseException as error:
                self._end.defer(error)
                break
            if message is _core.NOTHING:
                break
            objects.append(message)
        return objects

    def __iter__(self) -> Iterator[Any]:
        """Messages until the writer has closed."""
        while True:
            try:
                yield self.dequeue()
            except Closed:
                return

    # -- both

    def broadcast_object(self, obj: Any = None) -> Any:
        """The writer sends obj and gets it back; a reader gets what was sent."""
        if self._rank is None:
            self.enqueue(obj)
            return obj
        return self.dequeue()

    # -- asyncio (aio.py is imported with the first call)

    async def enqueue_async(self, obj: Any, timeout: float | None = None) -> None:
        """enqueue for coroutines: the event loop goes on while this waits for room.

        Cancelled, it has sent nothing; except that a message larger than a chunk, once it is
        waiting for room, may still be sent. obj must not be changed before this has returned.
        Raises as enqueue.
        """
        from . import aio

        items, joined = self._dump(obj)
        send = self._end.send
        senders = None
        if _core.frame_bytes(items, joined) > self.export_handle().max_chunk_bytes:
            senders = self._senders = self._senders or aio.Senders()
        await aio.enqueue(lambda seconds: send(items, joined, seconds), senders, timeout)

    async def dequeue_async(self, timeout: float | None = None) -> Any:
        """dequeue for coroutines: the event loop goes on while this waits.

        Cancelled, it has taken no message. Any number of coroutines may wait at once. Raises as
        dequeue.
        """
        from . import aio

        if self._waiter is None:
            self._waiter = aio.Waiter(self._end.wait_readable)
        return await aio.dequeue(self._get, self._waiter, timeout)

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Messages until the writer has closed."""
        while True:
            try:
                message = await self.dequeue_async()
            except Closed:
                return
            yield message

    # -- the verbs of queue.Queue

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """enqueue, as queue.Queue spells it."""
        self.enqueue(item, timeout if block else 0)

    def put_nowait(self, item: Any) -> None:
        """enqueue(item, timeout=0)."""
        self.enqueue(item, 0)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """dequeue, as queue.Queue spells it."""
        return self.dequeue(timeout if block else 0)

    def get_nowait(self) -> Any:
        """dequeue(timeout=0)."""
        return self.dequeue(0)

    def qsize(self) -> int:
        """Messages that this reader (or the writer's slowest reader) has not read; a moment's
        view."""
        return int(self._end.size())

    def empty(self) -> bool:
        """True if nothing is unread (here, or by the writer's slowest reader)."""
        if self._rank is None:
            return bool(self._end.size() == 0)
        return not self._end.readable()

    def full(self) -> bool:
        """Writer: True if a small message would have to wait for a slot. Reader: False."""
        return self._rank is None and not self._end.has_room()


def wait(queues: Sequence[MessageQueue], timeout: float | None = None) -> list[MessageQueue]:
    """Waits until at least one of the queues is readable; those that are, in the given order.

    Readable means that dequeue has something to return, or to raise (Closed, PeerDied). A large
    message counts from its first part on: dequeue may then wait for the rest.

    Args:
        queues: reading ends.
        timeout: seconds; None waits for ever, 0 polls.

    Returns:
        The readable ones; an empty list at the timeout, or of no queues.

    Thread safe. Raises IPCError for a writer's end.
    """
    queues = list(queues)
    ends: list[Any] = [queue._end for queue in queues]
    if all(type(end) is _core.Endpoint for end in ends):
        return [queues[i] for i in _core.wait_any(ends, timeout)]
    from .remote import wait_any

    return [queues[i] for i in wait_any(ends, timeout)]


class ShmRingBuffer(_End):
    """The ring without a serializer: bytes in place, for those who bring their own framing.

    Constructing one makes the writer; readers attach with :meth:`create_from_handle`. A message is
    at most max_chunk_bytes long. The arguments are those of :class:`MessageQueue`.
    """

    def __init__(
        self,
        n_reader: int,
        max_chunk_bytes: int,
        max_chunks: int,
        *,
        slots: int = 256,
        inline_bytes: int = 8192,
        spin_us: float | None = None,
        shm_dir: str | os.PathLike[str] | None = None,
        on_reader_death: str = "raise",
    ) -> None:
        self._create(
            tuple(range(_index("n_reader", n_reader, 1, 1024))),
            max_chunk_bytes,
            max_chunks,
            slots,
            inline_bytes,
            spin_us,
            shm_dir,
            on_reader_death,
            "",
        )

    @classmethod
    def create_from_handle(
        cls, handle: Handle, rank: int, *, spin_us: float | None = None
    ) -> ShmRingBuffer:
        """Attaches as the reader of the given rank. Raises as MessageQueue's does."""
        self = cls.__new__(cls)
        self._attach(handle, rank, spin_us)
        return self

    @contextmanager
    def acquire_write(
        self, nbytes: int | None = None, timeout: float | None = None
    ) -> Iterator[memoryview]:
        """A writable view of nbytes (default: max_chunk_bytes) of shared memory, published when
        the with-block ends, or not at all if it ends with an exception.

        What the memory holds at first is undefined. Other threads wait for the end of the block.

        Raises:
            ValueError: nbytes is more than max_chunk_bytes.
            BufferError: at the end, a view of the memory (an array made from it) is still in use;
                nothing was published.
            Full, PeerDied, Closed, SharedMemoryFull: as MessageQueue.enqueue.
        """
        if self._rank is not None:
            raise IPCError(f"acquire_write is for the writer; this is reader rank {self._rank}")
        limit = self.export_handle().max_chunk_bytes
        nbytes = limit if nbytes is None else _index("nbytes", nbytes, 0, limit)
        loan = self._end.loan(nbytes, timeout)
        with _lent(loan) as view:
            yield view

    @contextmanager
    def acquire_read(self, timeout: float | None = None) -> Iterator[memoryview]:
        """A read-only view of the next message in place, acknowledged when the with-block ends.

        If it ends with an exception the message stays and is given out again.

        Raises:
            BufferError: at the end, a view of the memory is still in use; the message stays.
            Empty, PeerDied, Closed: as MessageQueue.dequeue.
        """
        if self._rank is None:
            raise IPCError("acquire_read is for readers; this is the writer")
        loan = self._end.peek(timeout)
        with _lent(loan) as view:
            yield view


@contextmanager
def _lent(loan: _core.Loan) -> Iterator[memoryview]:
    view = memoryview(loan)
    try:
        yield view
        try:
            view.release()
        except BufferError:
            pass  # commit says it better
        loan.commit()
    except BaseException:
        # a view that is still in use keeps its memory mapped, not its contents
        loan.abort()
        raise
