"""A worker, and the loop that it works in."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .. import failures, processes
from ..errors import Closed, PeerDied
from ..handle import Handle
from ..queue import MessageQueue, logger

__all__ = ["Worker", "main", "make"]


class Worker:
    """Base class of workers; any class whose constructor takes these arguments will do.

    In its process the executor calls the constructor, init_device, load, then methods as
    collective_rpc says, and in the end shutdown, all from the main thread.

    Attributes:
        rank: 0 up to world_size - 1.
        local_rank: the place among the workers on this host.
        world_size: the number of workers.
    """

    def __init__(self, rank: int, local_rank: int, world_size: int) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size

    def init_device(self) -> None:
        """Before load: takes the device of local_rank."""

    def load(self) -> None:
        """Before the first call: whatever takes time. The executor waits for it."""

    def shutdown(self) -> None:
        """After the last call; also at SIGTERM, when init_device or load fails, and when the
        executor's process has died (then there is half a second)."""


def make(
    worker_class: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rank: int,
    local_rank: int,
    world_size: int,
) -> Any:
    """A worker that is ready for its first call. If it can't be, it has had its last one."""
    worker = worker_class(*args, rank=rank, local_rank=local_rank, world_size=world_size, **kwargs)
    try:
        for name in ("init_device", "load"):
            method = getattr(worker, name, None)
            if method is not None:
                method()
    except BaseException:
        try:
            end(worker)
        except Exception:  # it may well need what could not be loaded
            logger.exception("the shutdown of worker %d, which could not start, failed too", rank)
        raise
    return worker


def end(worker: Any) -> None:
    """The worker's last call."""
    method = getattr(worker, "shutdown", None)
    if method is not None:
        method()


def main(
    made_of: Any,
    rank: int,
    world_size: int,
    calls_handle: Handle,
    queue_options: Mapping[str, Any],
) -> None:
    """The worker's process. made_of: (class, args, kwargs), or a pickle of it."""
    worker_class, args, kwargs = pickle.loads(made_of) if type(made_of) is bytes else made_of
    spin_us = queue_options["spin_us"]
    with (
        MessageQueue.create_from_handle(calls_handle, rank, spin_us=spin_us) as calls,
        MessageQueue(1, 1, **queue_options) as replies,
    ):
        worker = make(worker_class, args, kwargs, rank, rank, world_size)
        try:
            processes.ready(replies.export_handle())
            serve(worker, rank, calls, replies)
        finally:
            end(worker)


def serve(worker: Any, rank: int, calls: MessageQueue, replies: MessageQueue) -> None:
    """Answers calls until their queue is closed, or its writer dead.

    A call is (method, args, kwargs, the rank that replies or None for all). Its number is its
    place in the queue: so also a call that doesn't unpickle has one. A reply is (number, value,
    failure or None, when it was dequeued, when it was done), times in ns of the monotonic clock,
    which all processes of a host share. A failure is sent by a worker whose reply isn't wanted,
    too.
    """
    now = time.monotonic_ns
    dequeue = calls.dequeue
    enqueue = replies.enqueue
    number = 0
    while True:
        number += 1
        # (what is waited for may take long, and what these hold may be large)
        method = args = kwargs = value = None
        wanted = failure = None
        try:
            method, args, kwargs, wanted = dequeue()
        except (Closed, PeerDied):
            return
        except Exception as error:
            began = now()
            failure = failures.pack(error)
        else:
            began = now()
            try:
                if isinstance(method, str):
                    value = getattr(worker, method)(*args, **kwargs)
                else:
                    value = pickle.loads(method)(worker, *args, **kwargs)
            except Exception as error:
                failure = failures.pack(error)
        if failure is None and wanted is not None and wanted != rank:
            continue
        try:
            try:
                enqueue((number, value, failure, began, now()))
            except (Closed, PeerDied):
                raise
            except Exception as error:  # it doesn't pickle
                enqueue((number, None, failures.pack(error), began, now()))
        except Closed:
            continue  # nobody wants replies any more, but the calls that were sent are served
        except PeerDied:
            return
