"""What the tests of process groups run in each member."""

from __future__ import annotations

import ctypes
import os
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import fastipc
from fastipc import Handle, MessageQueue

CHUNK = 1 << 20
CHUNKS = 4


class Hub:
    """The least that is a group: every broadcast is a round that the parent process passes on."""

    def __init__(self, connection: Connection, rank: int, world_size: int) -> None:
        self._connection = connection
        self.rank = rank
        self.world_size = world_size

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        self._connection.send(("round", src, obj if src == self.rank else None))
        return self._connection.recv()


class Elsewhere:
    """Makes this process a host of its own, as far as shared memory goes: it sees no /proc."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        new_mounts, recursive, private = 0x00020000, 0x4000, 1 << 18
        for rc in (
            libc.unshare(new_mounts),
            libc.mount(b"none", b"/", None, recursive | private, None),
            libc.mount(b"none", b"/proc", b"tmpfs", 0, None),
        ):
            if rc:
                raise OSError(ctypes.get_errno(), "can't leave /proc")


def arrays(seed: int, n: int) -> Any:
    """n arrays of random sizes, some larger than a chunk."""
    rng = np.random.default_rng(seed)
    for i in range(n):
        size = int(np.exp(rng.uniform(0, np.log(3 * CHUNK if i % 50 == 0 else 50_000))))
        yield rng.integers(0, 256, size, np.uint8)


def _pass_on(queue: MessageQueue, writes: bool, seed: int, n: int) -> int:
    if writes:
        for array in arrays(seed, n):
            queue.enqueue(array)
    else:
        for i, array in enumerate(arrays(seed, n)):
            assert np.array_equal(queue.dequeue(), array), f"array {i} is another one"
    return n


def every_writer(group: Any, rank: int, world_size: int, n: int) -> dict[str, Any]:
    """Each rank writes once to all others, `blocking` and not. Returns who was local to whom."""
    seen: dict[str, Any] = {}
    for writer_rank in range(world_size):
        for blocking in (True, False):
            with MessageQueue.create_from_process_group(
                group, CHUNK, CHUNKS, writer_rank, blocking=blocking
            ) as queue:
                if not blocking:
                    queue.wait_until_ready(120)
                assert queue.rank == (None if rank == writer_rank else rank)
                handle = queue.export_handle()
                seen[f"{writer_rank}"] = (handle.local_reader_ranks, handle.remote_reader_ranks)
                _pass_on(queue, rank == writer_rank, 100 * writer_rank + blocking, n)
                if rank == writer_rank:
                    queue.enqueue("end")
                else:
                    assert queue.dequeue() == "end"
    return seen


def single_reader(group: Any, rank: int, world_size: int, n: int) -> list[bool]:
    """All write to one, who gathers the handles and reads from all."""
    local: list[bool] = []
    for reader_rank in (0, world_size - 1):
        for blocking in (False, True):
            queue, handles = MessageQueue.create_from_process_group_single_reader(
                group, CHUNK, CHUNKS, reader_rank, blocking
            )
            with queue:
                if rank != reader_rank:
                    assert handles == []
                    queue.wait_until_ready(120)
                    for array in arrays(rank, n):
                        queue.enqueue((rank, array))
                    queue.enqueue((rank, None))
                    group_wait(queue)
                    continue
                assert [type(handle) for handle in handles] == [Handle] * world_size
                local = [bool(handle.local_reader_ranks) for handle in handles]
                _read_all(handles, rank, n)
    return local


def group_wait(queue: MessageQueue) -> None:
    """Until the reader has left: it has everything then."""
    try:
        while True:
            queue.enqueue("are you there?", timeout=1)
    except (fastipc.Closed, fastipc.Full):
        return


def _read_all(handles: list[Handle], rank: int, n: int) -> None:
    inboxes = {
        MessageQueue.create_from_handle(handle, 0): writer
        for writer, handle in enumerate(handles)
        if writer != rank
    }
    expected = {writer: arrays(writer, n) for writer in inboxes.values()}
    left = set(inboxes)
    try:
        while left:
            for queue in fastipc.wait(list(left), 120):
                writer, array = queue.dequeue(120)
                assert writer == inboxes[queue]
                if array is None:
                    assert next(expected[writer], None) is None
                    left.discard(queue)
                else:
                    assert np.array_equal(array, next(expected[writer]))
    finally:
        for queue in inboxes:
            queue.close()


def external(group: Any, rank: int, world_size: int, handle: Handle) -> list[Any]:
    """Everyone reads the queue of somebody who is no member."""
    given = handle if rank == 1 else None
    with MessageQueue.create_from_process_group(
        group, CHUNK, CHUNKS, writer_rank=1, external_writer_handle=given
    ) as queue:
        assert queue.rank == rank
        return list(queue)


def failing(group: Any, rank: int, world_size: int) -> str:
    """The writer can't make the queue: everyone is told."""
    try:
        MessageQueue.create_from_process_group(group, 1, 1, writer_rank=2)
    except ValueError as error:
        return str(error)
    return "made"


def misconfigured(group: Any, rank: int, world_size: int) -> list[str]:
    """One member can't make an end of any queue, writing or not: everyone is told."""
    if rank == 1:
        os.environ["FASTIPC_SPIN_US"] = "junk"
    texts = []
    for make in (
        MessageQueue.create_from_process_group,
        MessageQueue.create_from_process_group_single_reader,
    ):
        for one in (0, 1):
            try:
                make(group, CHUNK, CHUNKS, one)
            except ValueError as error:
                texts.append(str(error))
    return texts


def duck_member(
    connection: Connection,
    job: str,
    rank: int,
    world_size: int,
    away: set[int],
    arguments: tuple,
) -> Any:
    os.environ["FASTIPC_HOST_IP"] = "127.0.0.1"
    if rank in away:
        Elsewhere()
    return globals()[job](Hub(connection, rank, world_size), rank, world_size, *arguments)


def gloo_member(
    connection: Connection, job: str, rank: int, world_size: int, store: str, arguments: tuple
) -> Any:
    os.environ["FASTIPC_HOST_IP"] = "127.0.0.1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        return globals()[job](dist.group.WORLD, rank, world_size, *arguments)
    finally:
        dist.destroy_process_group()
