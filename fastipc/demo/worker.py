"""What a worker process of the demo runs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastipc import Closed, Handle, MessageQueue, PeerDied

Bytes: TypeAlias = NDArray[np.uint8]
Digest: TypeAlias = Callable[[Bytes], bytes]


class Done(NamedTuple):
    """A worker's last message."""

    messages: int
    cpu_seconds: float


def sha256(data: Bytes) -> bytes:
    return hashlib.sha256(data.data).digest()


def serve(work_handle: str, rank: int, to_writer: Connection, digest: Digest) -> None:
    """Answer every ``(sequence, bytes)`` with ``(sequence, digest)``, until the writer sends None.

    ``work_handle`` is the work queue's, as a string; the handle of the reply queue, of which this
    process is the writer, goes back through ``to_writer``.
    """
    try:
        with (
            MessageQueue.create_from_handle(Handle.from_str(work_handle), rank) as work,
            MessageQueue(n_reader=1, n_local_reader=1) as replies,
        ):
            with to_writer:
                to_writer.send(replies.export_handle().to_str())
            work.wait_until_ready()
            replies.wait_until_ready()
            _answer(work, replies, digest)
    except (Closed, PeerDied, BrokenPipeError):
        pass  # the writer has given up, and says why itself


def _answer(work: MessageQueue, replies: MessageQueue, digest: Digest) -> None:
    cpu_at_start = time.process_time()
    messages = 0
    item: Any
    while (item := work.dequeue()) is not None:
        sequence, data = item
        replies.enqueue((sequence, digest(data)))
        messages += 1
    replies.enqueue(Done(messages, time.process_time() - cpu_at_start))
