"""One worker, in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import Closed
from ..histogram import Histogram
from . import worker as workers
from .base import Executor, Stages

__all__ = ["InProcessExecutor"]


class _Settled:
    """A ReplyFuture of a call that is over."""

    def __init__(self, value: Any, error: BaseException | None) -> None:
        self._value = value
        self._error = error

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._error


class InProcessExecutor(Executor):
    """An executor of one worker, which it calls directly, without queues and processes.

    Args:
        worker_class, args, kwargs: as of MultiprocExecutor.

    What differs: arguments and results are not copied; an exception comes with its own traceback
    and no RemoteError; a timeout can't interrupt the method and is not looked at; with non_block
    the call is made at once, and the future is done. Thread safe: one call at a time.
    """

    def __init__(
        self,
        worker_class: Any,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.world_size = 1
        self._lock = threading.RLock()
        self._stages = Stages()
        self._closed = False
        self._worker = workers.make(worker_class, args, kwargs or {}, 0, 0, 1)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
        non_block: bool = False,
    ) -> Any:
        """See Executor.collective_rpc, and the class for what differs."""
        if unique_reply_rank not in (None, 0):
            raise ValueError(f"unique_reply_rank={unique_reply_rank}: the only rank is 0")
        value, error = None, None
        with self._lock:
            self.check_health()
            began = time.monotonic_ns()
            try:
                if isinstance(method, str):
                    value = getattr(self._worker, method)(*args, **(kwargs or {}))
                else:
                    value = method(self._worker, *args, **(kwargs or {}))
            except Exception as raised:
                if not non_block:
                    raise
                error = raised
            finally:
                took = time.monotonic_ns() - began
                stages = self._stages
                for stage, ns in (
                    (stages.ring_wait, 0),
                    (stages.execute, took),
                    (stages.reply, 0),
                    (stages.step, took),
                ):
                    stage.record(ns)
        if unique_reply_rank is None:
            value = [value]
        return _Settled(value, error) if non_block else value

    def check_health(self) -> None:
        if self._closed:
            raise Closed("the executor was shut down")

    def stats(self) -> dict[str, Histogram]:
        with self._lock:
            return self._stages.copies()

    def shutdown(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                workers.end(self._worker)
                self._worker = None
