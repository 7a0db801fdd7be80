"""What all executors have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from ..histogram import Histogram

__all__ = ["STAGES", "Executor", "ReplyFuture", "Stages"]

# Of a call, in order; "step" is all of it.
STAGES = ("ring_wait", "execute", "reply", "step")


class Stages:
    """How long the stages of calls took."""

    def __init__(self) -> None:
        self.ring_wait = Histogram()
        self.execute = Histogram()
        self.reply = Histogram()
        self.step = Histogram()

    def copies(self) -> dict[str, Histogram]:
        return {name: Histogram.merged([getattr(self, name)]) for name in STAGES}


class ReplyFuture(Protocol):
    """The replies of a call that may not have come yet. Thread safe.

    Nothing happens behind its back: replies are taken from the queues by whoever asks for one, so
    done() and result() are also what moves other calls on. Calls' replies come in the order of the
    calls.
    """

    def done(self) -> bool:
        """Whether result() has something to return or to raise. Never waits."""

    def result(self, timeout: float | None = None) -> Any:
        """What collective_rpc would have returned, or raised.

        Args:
            timeout: seconds; None waits for as long as the call's own timeout says.

        Raises ReplyTimeout, also when only this wait's timeout has passed: then another result()
        may still succeed.
        """

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What result() raises, or None. Raises ReplyTimeout as result does."""


class Executor(ABC):
    """Makes workers work. See :class:`MultiprocExecutor` and :class:`InProcessExecutor`.

    Attributes:
        world_size: the number of workers.
    """

    world_size: int

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
        non_block: bool = False,
    ) -> Any:
        """Has every worker call a method, and returns what it returned.

        Args:
            method: its name; or a function, which is called with the worker as first argument
                (and sent with cloudpickle, so a lambda will do).
            args, kwargs: for the method.
            timeout: seconds for the whole call; None waits for ever, or until a worker dies.
            unique_reply_rank: only this worker's reply is wanted. What another worker raises is
                raised if it is there in time, and else logged.
            non_block: return a ReplyFuture; several calls may be on their way.

        Returns:
            the replies in the order of ranks; or the one reply of unique_reply_rank.

        Raises:
            What a worker raised: as it is, with a RemoteError that has the traceback there as
                ``__cause__``; or the RemoteError itself if it can't be unpickled here. With
                several, that of the lowest rank, as a rule. The others' replies are dropped.
            ReplyTimeout: a TimeoutError; it names the ranks that had not replied.
            Full: a TimeoutError, too: the call could not even be sent.
            WorkerDied: a worker died, now or earlier.
            Closed: the executor was shut down.
            ValueError: no such rank.
            Whatever pickling the arguments raises: no worker has seen the call.
        """

    @abstractmethod
    def check_health(self) -> None:
        """Raises WorkerDied if a worker has died, and Closed after shutdown."""

    @abstractmethod
    def stats(self) -> dict[str, Histogram]:
        """How long calls took, a :class:`fastipc.histogram.Histogram` per stage:

        - ``ring_wait``: from collective_rpc to the worker's dequeue: pickling, the wait for the
          worker to be done with the call before, the ring, unpickling;
        - ``execute``: the method, in the worker;
        - ``reply``: from its end to the executor's dequeue, pickling and unpickling included. A
          reply that waits for the caller to ask for it (non_block) is waiting here;
        - ``step``: the whole call, to the last reply.

        The first three are counted for each reply. Since the executor was made; copies.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the workers. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()
