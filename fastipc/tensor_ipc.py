"""Tensors of a message through shared memory instead of frames.

The sender puts each large tensor into shared memory of torch and a handle to it into a
`torch.multiprocessing` queue; in the message stands a small map that names it. The receiver takes
handles from the queue until the one it needs is there. Worth it when tensors are large and both
ends are on one machine: the bytes are copied once, into shared memory, and CUDA tensors not at all.

The two halves plug into the codec:

    sender = TensorIpcSender(queue)         MsgpackEncoder(oob_tensor_consumer=sender)
    receiver = TensorIpcReceiver(queue)     MsgpackDecoder(type, oob_tensor_provider=receiver)

The queue is made by the common parent (`torch.multiprocessing.get_context("spawn").Queue()`) and
passed to its children. It carries pickles: it is for processes that trust each other, and no other
can reach it.

Importing this module imports torch.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import queue as _queue
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing

from .codec import OOBTensorConsumer
from .errors import DecodeError, IPCError
from .private_dirs import mark_temp_dir

__all__ = ["TensorIpcError", "TensorIpcReceiver", "TensorIpcSender", "TensorIpcTimeout"]

logger = logging.getLogger("fastipc")


class TensorIpcError(IPCError):
    """A tensor that was sent through shared memory cannot be had any more."""


class TensorIpcTimeout(TensorIpcError, TimeoutError):
    """A tensor that a message refers to did not come in time."""


def _into_shared_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in shared memory, contiguous. Raises OSError (ENOSPC) rather than dying on the first
    touch."""
    size = tensor.numel() * tensor.element_size()
    storage = torch.UntypedStorage._new_shared(size, device="cpu")
    if size and torch.multiprocessing.get_sharing_strategy() == "file_descriptor":
        # torch makes a file of this size without any memory behind it; where /dev/shm is small,
        # writing to it would be a SIGBUS. Reserving it first is an error that can be handled.
        os.posix_fallocate(storage._share_fd_cpu_()[0], 0, size)  # type: ignore[no-untyped-call]
    shared = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape)
    shared.copy_(tensor.detach())
    return shared  # type: ignore[no-any-return]


class TensorIpcSender(OOBTensorConsumer):
    """Sends the tensors of messages through `queue`, or through one of several queues, one per
    receiver.

    Args:
        queue: a queue, or a list of them, of which `set_target_engine` picks one.
        timeout: seconds to wait for room in a bounded queue before a tensor travels in a frame
            after all.

    A CPU tensor is copied into shared memory while it is encoded: the caller may change it as soon
    as `encode` returns, and a slice of a large tensor takes what the slice needs. A CUDA tensor is
    shared where it is: keep it unchanged until the receiver is done with it. What cannot be sent
    this way (no shared memory left, a queue that is full or closed, a dtype torch does not copy)
    travels in a frame, and the first such case is logged.

    Threads may share a sender. After a fork parent and child are different senders.
    """

    def __init__(self, queue: Any, *, timeout: float = 1.0) -> None:
        self._queues: list[Any] = list(queue) if isinstance(queue, Sequence) else [queue]
        if not self._queues:
            raise ValueError("a sender needs a queue")
        self._timeout = timeout
        self._messages = itertools.count()
        self._warned = False
        self._local = threading.local()  # the message that this thread encodes, and for whom
        self._pid = -1
        self._sender_id = ""

    def set_target_engine(self, target_engine: int) -> None:
        """Send what this thread encodes from now on to receiver number `target_engine`.

        Raises:
            IndexError: there is no such queue.
        """
        if not 0 <= target_engine < len(self._queues):
            raise IndexError(
                f"there is no queue for engine {target_engine}: there are {len(self._queues)}"
            )
        self._local.target = target_engine

    def new_message(self) -> None:
        """Begin a message; the encoder calls this."""
        self._local.message = next(self._messages)
        self._local.tensors = itertools.count()

    def __call__(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        """Send `tensor` off, and return the map that names it; None if that is not possible."""
        if os.getpid() != self._pid:
            with contextlib.suppress(OSError):  # without it, a directory may be left
                mark_temp_dir()
            # In this order: another thread that finds the pid right goes on with the name.
            self._sender_id, self._pid = uuid.uuid4().hex[:16], os.getpid()
        local = self._local
        if not hasattr(local, "message"):
            self.new_message()
        names = {
            "sender_id": self._sender_id,
            "message_id": local.message,
            "tensor_id": next(local.tensors),
        }
        try:
            shared = _into_shared_memory(tensor) if tensor.device.type == "cpu" else tensor.detach()
            # Pickled here and not by the queue's thread, so that a failure is seen while frames are
            # still a way out.
            packed = io.BytesIO()
            ForkingPickler(packed).dump(shared)
            item = (*names.values(), packed.getvalue())
            self._queues[getattr(local, "target", 0)].put(item, timeout=self._timeout)
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "tensors travel in frames because shared memory failed: %r (reported once)",
                    error,
                )
            return None
        return names


_Key = tuple[str, int, int]


class TensorIpcReceiver:
    """Gives the decoder the tensors that senders put into `queue`.

    Args:
        queue: the receiving end; one receiver per queue.
        timeout: seconds to wait for a tensor; None: for ever, 0: only for what is there.
        window: how many messages a sender's tensors may come late or be asked for late, counted
            from its newest message that was asked for. Older ones belong to messages that were
            never decoded, and are dropped.
        stale_after: seconds after which a tensor that nobody asked for is dropped.

    A received tensor lies in shared memory that is this process's alone from then on (it is
    writable, and the sender has forgotten it); it holds a file descriptor while it lives.

    Several senders may use a queue, and tensors may come in any order. Threads may share a
    receiver: one of them reads the queue for all.
    """

    def __init__(
        self,
        queue: Any,
        *,
        timeout: float | None = 60.0,
        window: int = 8,
        stale_after: float = 300.0,
    ) -> None:
        if timeout is not None and not timeout >= 0:
            raise ValueError("timeout must be None or not negative")
        self._queue = queue
        self._timeout = timeout
        self._window = window
        self._stale_after = stale_after
        self._arrived = threading.Condition()
        self._reading = False
        self._waiting: dict[_Key, tuple[float, Any]] = {}  # key -> (when it came, tensor or error)
        self._newest: OrderedDict[str, int] = (
            OrderedDict()
        )  # sender -> its newest message that was asked for
        self.dropped = 0
        """Tensors that came but were never asked for, and dropped."""

    @property
    def pending(self) -> int:
        """Tensors that have come and were not asked for yet."""
        return len(self._waiting)

    def __call__(
        self, dtype: str, shape: tuple[int, ...], placeholder: dict[str, Any]
    ) -> torch.Tensor:
        """The tensor that `placeholder` names.

        Raises:
            DecodeError: the placeholder is malformed, or the tensor is not of this dtype and shape.
            TensorIpcTimeout: it has not come within the timeout; the message says for whom was
                waited.
            TensorIpcError: it was dropped as stale, or its sender ended before it could be opened.
        """
        key = self._key(placeholder)
        end = None if self._timeout is None else time.monotonic() + self._timeout
        found = self._wait_for(key, end)
        if isinstance(found, Exception):
            raise TensorIpcError(
                f"tensor {key[2]} of message {key[1]} cannot be opened; has its sender ended? "
                f"{found!r}"
            )
        if str(found.dtype) != f"torch.{dtype}" or tuple(found.shape) != tuple(shape):
            raise DecodeError(
                f"a message names a {dtype} tensor of shape {tuple(shape)}, but a {found.dtype} "
                f"one of shape {tuple(found.shape)} came"
            )
        return found  # type: ignore[no-any-return]

    @staticmethod
    def _key(placeholder: dict[str, Any]) -> _Key:
        sender, message, tensor = (
            placeholder.get(k) for k in ("sender_id", "message_id", "tensor_id")
        )
        if (
            type(sender) is not str
            or type(message) is not int
            or type(tensor) is not int
            or len(placeholder) != 3
        ):
            raise DecodeError("malformed name of an out-of-band tensor")
        return sender, message, tensor

    def _wait_for(self, key: _Key, end: float | None) -> Any:
        with self._arrived:
            while True:
                if key in self._waiting:
                    self._ask(key)
                    return self._waiting.pop(key)[1]
                if self._is_stale(key):
                    raise TensorIpcError(
                        f"tensor {key[2]} of message {key[1]} is stale: newer messages were decoded"
                    )
                left = None if end is None else end - time.monotonic()
                if self._reading:
                    if left is not None and left <= 0:
                        raise self._late(key)
                    # Another thread reads the queue. It may leave without having read this one:
                    # look again.
                    self._arrived.wait(left)
                    continue
                self._reading = True
                self._arrived.release()
                try:
                    # With no time left, what is there is still read.
                    item = self._queue.get(
                        left is None or left > 0, left if left is None or left > 0 else None
                    )
                except _queue.Empty:
                    item = None
                finally:
                    self._arrived.acquire()
                    self._reading = False
                    self._arrived.notify_all()
                if item is not None:
                    self._store(item)
                elif key not in self._waiting:
                    raise self._late(key)

    def _late(self, key: _Key) -> TensorIpcTimeout:
        return TensorIpcTimeout(
            f"tensor {key[2]} of message {key[1]} from sender {key[0]} did not come within "
            f"{self._timeout} s"
        )

    def _store(self, item: Any) -> None:
        sender, message, tensor, packed = item
        content: Any
        try:
            # Opened at once, wanted or not: the sender holds its end of it open until then.
            content = ForkingPickler.loads(packed)
        except Exception as error:  # the sender is gone, or there is no descriptor left
            content = error
        now = time.monotonic()
        if self._is_stale((sender, message, tensor)):
            self.dropped += 1
        else:
            self._waiting[sender, message, tensor] = (now, content)
        old = [key for key, (came, _) in self._waiting.items() if came < now - self._stale_after]
        self._drop(old)

    def _is_stale(self, key: _Key) -> bool:
        return key[1] < self._newest.get(key[0], -1) - self._window

    def _ask(self, key: _Key) -> None:
        sender, message, _ = key
        if message > self._newest.get(sender, -1):
            self._newest[sender] = message
            self._newest.move_to_end(sender)
            if len(self._newest) > 1024:  # senders come and go
                self._newest.popitem(last=False)
            self._drop(
                [other for other in self._waiting if other[0] == sender and self._is_stale(other)]
            )

    def _drop(self, keys: list[_Key]) -> None:
        for key in keys:
            del self._waiting[key]
            self.dropped += 1
