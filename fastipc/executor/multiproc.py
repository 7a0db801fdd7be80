"""Workers in processes of their own on this host.

Calls go to all workers through one broadcast MessageQueue, replies come back through a queue per
worker. Nobody but the callers reads these: a reply goes from the ring to the thread that wants it,
without a thread in between that would have to be woken, and again for the GIL. Where several
threads wait, one reads for all; who is not reading waits to be told (``_turn``).

A worker's replies come in the order of the calls. A reply to a call that nobody waits for any more
(a timeout, an error of another worker) is dropped when it comes up; ``_expected`` knows to which
call the next reply of a worker belongs, also if it can't be unpickled.

Death is noticed by the queues and by a monitor of the processes. What was published before it is
still delivered; then every call raises WorkerDied.
"""

from __future__ import annotations

import itertools
import operator
import os
import pickle
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from .. import failures, processes
from .._core import Turn
from ..errors import Closed, DecodeError, Empty, Full, IPCError, PeerDied, ReplyTimeout, WorkerDied
from ..failures import Failure
from ..histogram import Histogram
from ..hostinfo import available_cpus, host_name
from ..processes import ChildProcess
from ..queue import MIB, MessageQueue, logger
from ..settings import settings
from . import worker as workers
from .base import Executor, Stages

__all__ = ["MultiprocExecutor"]

# A wait for a reply looks this often, in seconds, at what it isn't waiting for: other workers'
# failures, deaths. As long as a sleep on the ring, so it adds no wake-up.
SLICE = 0.25
# A call that finds the queue full takes replies meanwhile, lest workers wait for room for these;
# the first time after this many seconds, then after twice as long each time.
FULL_SLICE = 0.02
# So many calls on their way are a reason to look for replies before the next one is sent.
MANY = 32
# Seconds from a worker's leaving its queues to the end of its process, at most.
LEAVE_PATIENCE = 5.0

_NO_REPLY: Any = object()

# The executors of this process. What a fork copies of them is of no use there.
_live: weakref.WeakSet[MultiprocExecutor] = weakref.WeakSet()


def _disown_all() -> None:
    for executor in _live:
        executor._disown()
    _live.clear()


os.register_at_fork(after_in_child=_disown_all)


def _dumps(obj: Any) -> bytes:
    """By reference where the child can follow it, since its classes are the same then; else by
    value (a class in a function; a main program that isn't a file)."""
    main = sys.modules.get("__main__")
    if getattr(main, "__file__", None) is not None or getattr(main, "__spec__", None) is not None:
        try:
            return pickle.dumps(obj, 5)
        except (pickle.PicklingError, AttributeError, TypeError):
            pass
    data: bytes = cloudpickle.dumps(obj, 5)
    return data


def chunk_bytes(asked_for: int | None = None) -> int:
    """Bytes of a chunk of every queue: as asked for, else as FASTIPC_MQ_MAX_CHUNK_BYTES_MB says,
    else 24 MiB."""
    if asked_for is not None:
        return asked_for
    return settings().mq_max_chunk_bytes or 24 * MIB


class _Call:
    """A call on its way. Only whoever reads replies changes it."""

    __slots__ = ("began", "deadline", "error", "method", "number", "place", "rank", "timeout",
                 "values")  # fmt: skip

    def __init__(
        self, method: str | bytes, rank: int | None, world_size: int, timeout: float | None
    ) -> None:
        self.began = time.monotonic_ns()
        self.method = method
        self.number = 0
        self.rank = rank
        self.timeout = timeout
        self.deadline = None if timeout is None else self.began * 1e-9 + timeout
        self.error: tuple[int, Failure | BaseException] | None = None
        # the worker whose reply is waited for
        self.place = 0 if rank is None else rank
        self.values: list[Any] = [_NO_REPLY] * world_size

    def settled(self) -> bool:
        """Looked up each time, from what is stored in one step: a signal handler may raise between
        any two."""
        if self.error is not None:
            return True
        values = self.values
        if self.rank is not None:
            return values[self.rank] is not _NO_REPLY
        for place in range(self.place, len(values)):
            if values[place] is _NO_REPLY:
                self.place = place
                return False
        return True

    def lacks(self) -> tuple[int, ...]:
        """The ranks that have not replied."""
        ranks = range(len(self.values)) if self.rank is None else (self.rank,)
        return tuple(rank for rank in ranks if self.values[rank] is _NO_REPLY)

    def named(self) -> str:
        return repr(self.method) if isinstance(self.method, str) else "a function"


class _Future:
    """A ReplyFuture."""

    def __init__(self, executor: MultiprocExecutor, call: _Call) -> None:
        self._executor = executor
        self._call = call
        self._lock = threading.Lock()
        self._outcome: tuple[Any, BaseException | None] | None = None

    def _settle(self, deadline: float | None) -> tuple[Any, BaseException | None]:
        """Its outcome. Raises ReplyTimeout if only this wait's time is over."""
        call = self._call
        if self._outcome is None:
            late = call.deadline
            if deadline is not None and (late is None or deadline < late):
                late = deadline
            value: Any = None
            error: BaseException | None = None
            try:
                self._executor._wait(call, late)
                value, error = self._executor._outcome(call)
            except ReplyTimeout:
                if call.deadline is None or time.monotonic() < call.deadline:
                    raise
                error = self._executor._give_up(call)
            except (WorkerDied, Closed) as raised:
                error = raised
            self._executor._calls.pop(call.number, None)
            with self._lock:
                # (two threads may have got here)
                if self._outcome is None:
                    self._outcome = value, error
        return self._outcome

    def done(self) -> bool:
        try:
            self._settle(0.0)
        except ReplyTimeout:
            return False
        return True

    def result(self, timeout: float | None = None) -> Any:
        value, error = self._settle(_deadline(timeout))
        if error is not None:
            raise error
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._settle(_deadline(timeout))[1]


def _deadline(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if not timeout >= 0:
        raise ValueError(f"timeout={timeout!r} must be a number of seconds of at least 0, or None")
    return time.monotonic() + timeout


class MultiprocExecutor(Executor):
    """An executor whose workers are processes on this host. Thread safe.

    Args:
        worker_class: a subclass of :class:`Worker`, or any callable that makes a worker from
            (*args, rank=, local_rank=, world_size=, **kwargs).
        world_size: the number of workers.
        args, kwargs: for the worker_class; sent to the workers (by pickle, or by cloudpickle what
            pickle can't do), unless they are forked.
        start_method: "fork", "spawn" or "forkserver"; see :mod:`fastipc.processes`.
        env: environment variables for the workers. OMP_NUM_THREADS is each worker's share of the
            CPUs, unless it is set.
        max_chunk_bytes: of every queue to and from the workers, else FASTIPC_MQ_MAX_CHUNK_BYTES_MB,
            else 24 MiB. Larger calls and replies travel in parts.
        max_chunks: of every queue.
        on_failure: called with a WorkerDied (``.rank``, ``.pid``, ``.exitcode``), once, when the
            first worker has died, from a thread of its own. It may call shutdown.
        ready_timeout: seconds for the workers to become ready; None waits until they are, or one
            has failed.
        name: of the workers' processes, followed by "-" and the rank.

    Attributes:
        children: the workers' processes by rank, each a :class:`fastipc.processes.ChildProcess`.

    Raises:
        What a worker's constructor, init_device or load raised; NotReady; ChildDied; RuntimeError
        if the main script has no ``if __name__ == '__main__'``. No worker is left then.

    After fork the child has nothing to do with the workers: calls there raise IPCError.
    """

    def __init__(
        self,
        worker_class: Any,
        world_size: int = 1,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        start_method: str | None = None,
        env: Mapping[str, str] | None = None,
        max_chunk_bytes: int | None = None,
        max_chunks: int = 10,
        on_failure: Callable[[WorkerDied], object] | None = None,
        ready_timeout: float | None = None,
        name: str = "worker",
    ) -> None:
        world_size = operator.index(world_size)
        if not 1 <= world_size <= 1024:
            raise ValueError(f"world_size must be between 1 and 1024, not {world_size}")
        config = settings()
        cpus = available_cpus()
        options: dict[str, Any] = {
            "max_chunk_bytes": chunk_bytes(max_chunk_bytes),
            "max_chunks": max_chunks,
            # A reply queue has two ends, and spins on two CPUs; but the workers need theirs.
            "spin_us": 0 if world_size + 1 > cpus and config.spin_us is None else None,
        }
        self.world_size = world_size
        self._foreign = False
        self._closed = False
        self._failure: WorkerDied | None = None
        self._failed = threading.Event()
        self._on_failure = on_failure
        self._stages = Stages()
        self._ranks = range(world_size)
        self._calls: dict[int, _Call] = {}
        self._expected: list[deque[int]] = [deque() for _ in self._ranks]
        # calls that one worker's failure has ended: the others' are no news
        self._raised: deque[int] = deque(maxlen=256)
        self._next = 1
        # (these are given back also when a signal handler raises)
        self._sending = Turn()
        self._reading = Turn()
        self._turn = threading.Condition()
        self._followers = 0
        # replies that have been taken from a worker's queue, and perhaps not looked at
        self._inboxes: list[deque[Any]] = [deque() for _ in self._ranks]
        self._taken = [0] * world_size
        self._replies: list[MessageQueue] = []
        self.children: list[ChildProcess] = []
        self._monitor: processes.Monitor | None = None
        _live.add(self)

        method, _ = processes.choose_start_method(start_method)
        what = (worker_class, tuple(args), dict(kwargs or {}))
        made_of = what if method == "fork" else _dumps(what)
        variables = dict(env or {})
        if method != "fork" and "OMP_NUM_THREADS" not in os.environ:
            variables.setdefault("OMP_NUM_THREADS", str(max(1, cpus // world_size)))
        self._out = MessageQueue(world_size, world_size, **options)
        try:
            for rank in self._ranks:
                child = processes.start(
                    workers.main,
                    (made_of, rank, world_size, self._out.export_handle(), options),
                    name=f"{name}-{rank}",
                    start_method=start_method,
                    env=variables,
                )
                self.children.append(child)
            deadline = _deadline(ready_timeout)
            for handle in processes.wait_all_ready(self.children, ready_timeout):
                queue = MessageQueue.create_from_handle(handle, 0, spin_us=options["spin_us"])
                self._replies.append(queue)
            # they have attached: this only takes notice of it
            left = None if deadline is None else max(1.0, deadline - time.monotonic())
            self._out.wait_until_ready(left)
            itself = weakref.ref(self)
            self._monitor = processes.Monitor(self.children, lambda child: _died(itself, child))
        except BaseException:
            self.shutdown(graceful=0.0)
            raise
        self._enqueue = self._out.enqueue
        self._dequeues = [queue.dequeue for queue in self._replies]

    def __repr__(self) -> str:
        state = "shut down" if self._closed else f"{self.world_size} workers"
        return f"<MultiprocExecutor, {state}>"

    # -- calls

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
        non_block: bool = False,
    ) -> Any:
        """See Executor.collective_rpc. With non_block the timeout counts from here, too."""
        if timeout is not None and not timeout >= 0:
            _deadline(timeout)  # which says what is wrong
        if unique_reply_rank is not None and unique_reply_rank not in self._ranks:
            raise ValueError(
                f"unique_reply_rank={unique_reply_rank!r}: the ranks are 0 to {self.world_size - 1}"
            )
        what = method if isinstance(method, str) else cloudpickle.dumps(method, 5)
        call = _Call(what, unique_reply_rank, self.world_size, timeout)
        self._send(call, (what, args, kwargs or {}, unique_reply_rank))
        if non_block:
            return _Future(self, call)
        try:
            self._wait(call, call.deadline)
        except ReplyTimeout:
            raise self._give_up(call) from None
        finally:
            # (an interrupt, for one, leaves it there)
            self._calls.pop(call.number, None)
        value, error = self._outcome(call)
        if error is not None:
            raise error
        return value

    def _send(self, call: _Call, message: tuple[Any, ...]) -> None:
        replying = self._ranks if call.rank is None else (call.rank,)
        if len(self._calls) > MANY:
            self._drain_in_turn()
        with self._sending.within(call.timeout) as mine:
            if not mine:
                raise self._behind(call)
            self.check_health()
            number = self._next
            try:
                call.number = number
                # A reply may come before enqueue has returned, to another thread.
                self._calls[number] = call
                for rank in replying:
                    self._expected[rank].append(number)
                patience = FULL_SLICE
                if call.timeout is not None and call.timeout < patience:
                    patience = call.timeout
                try:
                    self._enqueue(message, patience)
                except Full:
                    self._insist(call, message)
            except BaseException as error:
                self._calls.pop(number, None)
                # A signal handler may have raised it, with the call just sent or not quite.
                if self._sent(number):
                    self._next = number + 1
                    raise
                for rank in replying:
                    expected = self._expected[rank]
                    if expected and expected[-1] == number:
                        expected.pop()
                if isinstance(error, (Closed, PeerDied)):
                    self._gone(getattr(error, "rank", None))
                raise
            self._next = number + 1

    def _sent(self, number: int) -> bool:
        """Nothing but calls is sent, so their count is the last one's number."""
        try:
            return not self._out.closed and self._out.stats()["messages"] >= number
        except Closed:  # by another thread's shutdown, between the two
            return False

    def _insist(self, call: _Call, message: tuple[Any, ...]) -> None:
        """There was no room. Workers that wait for room for their replies take no calls: so
        replies are taken meanwhile, wanted or not."""
        patience = FULL_SLICE
        while True:
            self.check_health()
            self._drain_in_turn()
            left = _left(call.deadline)
            try:
                self._enqueue(message, patience if left is None else min(patience, left))
                return
            except Full:
                if left == 0:
                    raise self._behind(call) from None
            patience *= 2

    def _behind(self, call: _Call) -> Full:
        return Full(
            f"after {call.timeout:g} s {call.named()} was not sent: the workers are behind with "
            "earlier calls"
        )

    def _wait(self, call: _Call, deadline: float | None) -> None:
        """Waits for the replies; raises a bare ReplyTimeout at the deadline."""
        while True:
            with self._reading.within(0) as mine:
                if mine:
                    self._read(call, deadline)
            if mine:
                if self._followers:
                    self._tell_followers()
            else:
                with self._turn:
                    self._followers += 1
                    try:
                        if not call.settled() and self._reading.taken:
                            left = _left(deadline)
                            self._turn.wait(SLICE if left is None else min(SLICE, left))
                    finally:
                        self._followers -= 1
            if call.settled():
                return
            if mine and self._over():  # its replies are published: it has them, or never will
                self._gone()
            if deadline is not None and time.monotonic() >= deadline:
                raise ReplyTimeout(f"no reply to {call.named()} yet", call.lacks())

    def _outcome(self, call: _Call) -> tuple[Any, BaseException | None]:
        """(value, error) of a call that is settled."""
        if call.error is None:
            return call.values if call.rank is None else call.values[call.rank], None
        rank, failure = call.error
        error = failure if isinstance(failure, BaseException) else failures.unpack(failure)
        error.add_note(f"in worker {rank} (pid {self.children[rank].pid}), {call.named()}")
        return None, error

    def _give_up(self, call: _Call) -> ReplyTimeout:
        self._calls.pop(call.number, None)
        missing = call.lacks()
        who = ", ".join(f"worker {rank} (pid {self.children[rank].pid})" for rank in missing)
        return ReplyTimeout(
            f"after {call.timeout:g} s no reply to {call.named()} from {who}", missing
        )

    # -- replies; all of this under _reading

    def _drain_in_turn(self) -> None:
        with self._reading.within(0) as mine:
            if mine:
                self._drain()
        self._tell_followers()

    def _tell_followers(self) -> None:
        """A call is settled, or the reader's place free. Followers look again by themselves in
        SLICE seconds, should this be missed."""
        if self._followers:
            with self._turn:
                self._turn.notify_all()

    def _read(self, call: _Call, deadline: float | None) -> None:
        """Takes replies until the call is settled, or its time or the workers' is over."""
        if call.settled():  # by another thread
            return
        while True:
            over = self._over()
            left = 0.0 if over else _left(deadline)
            if self._take(call.place, SLICE if left is None or left > SLICE else left):
                if call.settled():
                    return
                continue
            # another one may have failed, and so keep this one waiting
            self._drain()
            if over or call.settled() or (left is not None and left <= SLICE):
                return

    def _drain(self) -> None:
        for rank in self._ranks:
            while (self._inboxes[rank] or self._has_reply(rank)) and self._take(rank, 0):
                pass

    def _has_reply(self, rank: int) -> bool:
        """Whether a reply lies in the worker's queue. False if it is closed, which another thread's
        shutdown may do at any moment."""
        queue = self._replies[rank]
        try:
            return not queue.closed and not queue.empty()
        except Closed:
            return False

    def _take(self, rank: int, timeout: float) -> bool:
        """One reply of a worker, to whom it may concern. False if there was none.

        A signal handler may raise between any two lines. So the reply goes from the queue to the
        inbox without any Python code in between, and is dropped from there when all is done;
        until then it may be looked at twice.
        """
        inbox, expected = self._inboxes[rank], self._expected[rank]
        if not inbox:
            try:
                inbox.extend(itertools.starmap(self._dequeues[rank], ((timeout,),)))
            except Empty:
                return False
            except (Closed, PeerDied):
                if not self._closed:
                    self._failed.wait(LEAVE_PATIENCE)
                    self._left(rank)
                return False
            except BaseException as error:
                if inbox:
                    self._taken[rank] += 1
                if inbox or not isinstance(error, Exception):
                    raise  # a signal handler's
                taken = self._replies[rank].stats()["messages"]
                if taken == self._taken[rank] and not isinstance(error, DecodeError):
                    raise  # likewise, amidst the wait
                # it doesn't unpickle here
                self._taken[rank] = taken
                if expected:
                    inbox.append((expected[0], None, error, 0, 0))
                return True
            self._taken[rank] += 1
        now = time.monotonic_ns()
        number, value, failure, began, done = inbox[0]
        call = self._calls.get(number)
        if call is None:
            if failure is not None and number not in self._raised:
                self._log(rank, failure)
        elif failure is not None:
            self._raised.append(number)
            call.error = rank, failure
        else:
            stages = self._stages
            stages.ring_wait.record(began - call.began)
            stages.execute.record(done - began)
            stages.reply.record(now - done)
            call.values[rank] = value
        while expected and expected[0] <= number:
            if expected[0] < number and (earlier := self._calls.get(expected[0])) is not None:
                # unpickling ran Python code, in which a handler raised
                earlier.error = rank, RuntimeError("the reply was lost: a signal handler raised")
                self._forget(earlier)
            expected.popleft()
        if call is not None and call.settled():
            if call.error is None:
                stages.step.record(now - call.began)
            self._forget(call)
        inbox.popleft()
        return True

    def _forget(self, call: _Call) -> None:
        self._calls.pop(call.number, None)
        self._tell_followers()

    def _log(self, rank: int, failure: Failure | BaseException) -> None:
        if isinstance(failure, BaseException):
            failure = failures.pack(failure)
        logger.error(
            "worker %d (pid %d) failed in a call whose caller no longer waits, or had another "
            "worker's reply: %s: %s\n%s",
            rank, self.children[rank].pid, failure.type_name, failure.message, failure.traceback,
        )  # fmt: skip

    # -- deaths

    def _over(self) -> bool:
        return self._closed or self._failure is not None

    def _note(self, failure: WorkerDied) -> bool:
        """Whether it is the first."""
        with self._turn:
            if self._closed or self._failure is not None:
                return False
            self._failure = failure
            self._failed.set()
            self._turn.notify_all()
            return True

    def _left(self, rank: int) -> None:
        """A worker has left its queues, and its process has not ended."""
        child = self.children[rank]
        said = f"worker {rank} (pid {child.pid}) has left its queues, but has not ended"
        self._note(WorkerDied(said, rank, child.pid, host_name()))

    def _gone(self, rank: int | None = None) -> None:
        """A queue has ended: says why."""
        if not self._closed and not self._failed.wait(LEAVE_PATIENCE):
            self._left(0 if rank is None else rank)
        self.check_health()

    def _disown(self) -> None:
        """In a forked child: another thread may have had any of the locks."""
        self._foreign = True
        self._sending = Turn()
        self._reading = Turn()
        self._turn = threading.Condition()
        self._followers = 0

    def check_health(self) -> None:
        if self._foreign:
            raise IPCError("this executor belongs to the process that this one was forked from")
        if self._failure is not None:
            failure = self._failure
            raise WorkerDied(
                str(failure), failure.rank, failure.pid, failure.host, failure.exitcode
            )
        if self._closed:
            raise Closed("the executor was shut down")

    # -- the rest

    def stats(self) -> dict[str, Histogram]:
        return self._stages.copies()

    def shutdown(self, *, graceful: float = 5.0, terminate: float = 2.0) -> None:
        """Ends the workers: they serve the calls that were sent, then end. Whoever is still there
        gets SIGTERM, and SIGKILL in the end. Calls that wait, and later ones, raise Closed (or
        WorkerDied, if it was that). May be called again, from any thread: it does what is left,
        also of a call that is under way or was interrupted. Nothing happens in a forked child.

        Args:
            graceful: seconds until SIGTERM.
            terminate: seconds from there to SIGKILL.
        """
        if self._foreign:
            return
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        if self._monitor is not None:
            self._monitor.stop()
        for queue in (self._out, *self._replies):
            queue.shutdown()  # wakes who waits
            queue.close()
        processes.stop(self.children, graceful=graceful, terminate=terminate)

    def __del__(self) -> None:
        if getattr(self, "_out", None) is None or self._closed or self._foreign:
            return
        warnings.warn(f"{self!r} was never shut down", ResourceWarning, source=self, stacklevel=2)
        self.shutdown(graceful=1.0, terminate=1.0)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _died(itself: weakref.ref[MultiprocExecutor], child: ChildProcess) -> None:
    """Of the monitor's thread."""
    executor = itself()
    if executor is None:
        return
    rank = executor.children.index(child)
    said = f"worker {rank} (pid {child.pid}) {child.describe_exit()}"
    failure = WorkerDied(said, rank, child.pid, host_name(), child.exitcode)
    if executor._note(failure):
        logger.error("%s", failure)
        if executor._on_failure is not None:
            executor._on_failure(failure)
