"""A queue among the members of a process group, one of whom writes, or reads, to all others.

A group is a ``torch.distributed`` ProcessGroup (any backend that broadcasts objects, such as gloo),
or any object with ``rank``, ``world_size`` and ``broadcast_obj(obj, src)``, which returns src's obj
to everyone; src is a rank of the group. Everything here is collective: all members make the same
calls in the same order.

Who is on whose host decides nothing by name: the one who will write makes a small queue of shared
memory, everyone else tries to attach to it, and reports. Who could is local, and who couldn't gets
everything over TCP.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import IPCError
from .handle import Handle
from .queue import MessageQueue

__all__ = ["create_from_process_group", "create_from_process_group_single_reader"]

# The probe is as small as a queue can be: its pages are real memory for a moment.
_PROBE = {"max_chunk_bytes": 64, "max_chunks": 1, "slots": 2, "inline_bytes": 0}

T = TypeVar("T")


class Group:
    """Any kind of group, by one set of verbs."""

    def __init__(self, group: Any) -> None:
        torch_distributed = sys.modules.get("torch.distributed")
        kind = getattr(torch_distributed, "ProcessGroup", None)
        if kind is not None and isinstance(group, kind):
            self.rank, self.world_size, self._broadcast = _of_torch(torch_distributed, group)
            return
        if not hasattr(group, "broadcast_obj"):
            raise TypeError(
                "a process group is a torch.distributed ProcessGroup, or has rank, world_size and "
                f"broadcast_obj(obj, src); this is {type(group).__name__}"
            )
        self.rank = int(_value(group.rank))
        self.world_size = int(_value(group.world_size))
        self._broadcast = lambda obj, src: group.broadcast_obj(obj, src)

    def broadcast(self, obj: Any, src: int) -> Any:
        """src's obj, for everyone. Raises, everywhere, what src sent instead if it failed."""
        got = self._broadcast(obj, src)
        if isinstance(got, _Failed):
            raise got.error
        return got

    def gather(self, obj: Any) -> list[Any]:
        """Everyone's obj, by rank, for everyone."""
        found = [
            self._broadcast(obj if self.rank == src else None, src)
            for src in range(self.world_size)
        ]
        for got in found:
            if isinstance(got, _Failed):
                raise got.error
        return found

    def check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"{name} must be a rank of the group, 0 to {self.world_size - 1}")


def _value(attribute: Any) -> Any:
    """rank and world_size may be methods, as torch's are."""
    return attribute() if callable(attribute) else attribute


def _of_torch(distributed: Any, group: Any) -> tuple[int, int, Callable[[Any, int], Any]]:
    ranks = distributed.get_process_group_ranks(group)

    def broadcast(obj: Any, src: int) -> Any:
        box = [obj]
        distributed.broadcast_object_list(box, src=ranks[src], group=group)
        return box[0]

    return distributed.get_rank(group), len(ranks), broadcast


class _Failed:
    """What a member sends when it can't go on, so that no other waits for it."""

    def __init__(self, error: BaseException) -> None:
        self.error = error if isinstance(error, Exception) else IPCError(repr(error))


def _attempt(action: Callable[[], T]) -> T | _Failed:
    try:
        return action()
    except Exception as error:
        return _Failed(error)


def _raise(made: T | _Failed) -> T:
    if isinstance(made, _Failed):
        raise made.error
    return made


def _local_ranks(group: Group, writer_rank: int) -> list[int]:
    """The ranks, other than the writer's, that can open the writer's shared memory."""
    probe: MessageQueue | None = None
    mine: Any = None
    if group.rank == writer_rank and group.world_size > 1:

        def make() -> MessageQueue:
            others = group.world_size - 1
            ranks = [rank for rank in range(group.world_size) if rank != writer_rank]
            return MessageQueue(others, others, ranks, **_PROBE)  # type: ignore[arg-type]

        made = _attempt(make)
        if isinstance(made, _Failed):
            # Where there can be no shared memory (no /proc, say) nobody is local; where there is
            # just no room for it, that is an error.
            unable = isinstance(made.error, OSError) and not isinstance(made.error, IPCError)
            mine = None if unable else made
        else:
            probe = made
            mine = probe.export_handle()
    try:
        handle = group.broadcast(mine, writer_rank)
        # What else is wrong with a member is everyone's error, too: they would wait for it.
        opened = group.gather(
            handle is not None and _attempt(lambda: _opens(handle, group.rank, writer_rank))
        )
    finally:
        if probe is not None:
            probe.close()
    return [rank for rank, could in enumerate(opened) if could]


def _opens(handle: Handle, rank: int, writer_rank: int) -> bool:
    if rank == writer_rank:
        return False
    try:
        MessageQueue.create_from_handle(handle, rank).close()
    except (IPCError, OSError):
        return False
    return True


def create_from_process_group(
    pg: Any,
    max_chunk_bytes: int,
    max_chunks: int,
    writer_rank: int = 0,
    external_writer_handle: Handle | None = None,
    blocking: bool = True,
) -> MessageQueue:
    """See :meth:`fastipc.MessageQueue.create_from_process_group`."""
    group = Group(pg)
    group.check_rank("writer_rank", writer_rank)
    writes = group.rank == writer_rank
    external = group.broadcast(external_writer_handle if writes else None, writer_rank)
    made: MessageQueue | _Failed
    if external is not None:
        # Everyone reads what somebody outside of the group writes.
        made = _attempt(lambda: MessageQueue.create_from_handle(external, group.rank))
    else:
        made = _share(group, max_chunk_bytes, max_chunks, writer_rank)
    # Whoever could not attach says so: the others would wait for it.
    try:
        group.gather(made if isinstance(made, _Failed) else None)
    except BaseException:
        if not isinstance(made, _Failed):
            made.close()
        raise
    queue = _raise(made)
    if blocking:
        _ready(queue)
    return queue


def _share(
    group: Group, max_chunk_bytes: int, max_chunks: int, writer_rank: int
) -> MessageQueue | _Failed:
    """The writer's end for the writer, and the readers' for the others."""
    if group.world_size < 2:
        raise ValueError("a queue needs a reader: the process group has one member only")
    local = _local_ranks(group, writer_rank)
    if group.rank != writer_rank:
        handle = group.broadcast(None, writer_rank)
        return _attempt(lambda: MessageQueue.create_from_handle(handle, group.rank))
    remote = [r for r in range(group.world_size) if r != writer_rank and r not in local]
    made = _attempt(
        lambda: MessageQueue(
            len(local) + len(remote),
            len(local),
            local,
            max_chunk_bytes,
            max_chunks,
            remote_reader_ranks=remote,
        )
    )
    group.broadcast(made if isinstance(made, _Failed) else made.export_handle(), writer_rank)
    return made


def _ready(queue: MessageQueue) -> None:
    try:
        queue.wait_until_ready()
    except BaseException:
        queue.close()
        raise


def create_from_process_group_single_reader(
    pg: Any,
    max_chunk_bytes: int,
    max_chunks: int,
    reader_rank: int = 0,
    blocking: bool = False,
) -> tuple[MessageQueue, list[Handle]]:
    """See :meth:`fastipc.MessageQueue.create_from_process_group_single_reader`."""
    group = Group(pg)
    group.check_rank("reader_rank", reader_rank)
    # Local is who opens the reader's memory: then the reader opens theirs, too.
    local = _local_ranks(group, reader_rank)
    near = group.rank == reader_rank or group.rank in local
    made = _attempt(
        lambda: MessageQueue(1, int(near), [0] if near else [], max_chunk_bytes, max_chunks)
    )
    try:
        handles = group.gather(made if isinstance(made, _Failed) else made.export_handle())
    except BaseException:
        if not isinstance(made, _Failed):
            made.close()
        raise
    queue = _raise(made)
    if blocking and group.rank != reader_rank:
        _ready(queue)
    return queue, handles if group.rank == reader_rank else []
