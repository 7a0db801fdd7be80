"""EngineClient: a front end for threads."""

from __future__ import annotations

import os
import select
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import Empty as NothingThere
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar

from ..errors import Closed, Empty, EngineDeadError, IPCError, NotReady
from ..keeper import Wake, forks
from ..sockets import PendingSend
from .core import EngineCore
from .frontend import EngineState, FrontEndCore
from .group import EngineGroup, launch
from .protocol import ClientSpec

__all__ = ["EngineClient", "OutputStream", "PendingCall"]

OutputT = TypeVar("OutputT")

MAX_BUFFERED = 65536
"""Outputs of one request that nobody has taken yet; with more the request is aborted."""

TICK_SECONDS = 1.0


def checked_limit(name: str, limit: Any) -> int:
    """The argument of that name. Raises ValueError if it is no limit."""
    if not isinstance(limit, int) or limit < 1:
        raise ValueError(f"{name}={limit!r} must be a whole number of at least 1")
    return limit


class OutputStream(Generic[OutputT]):
    """The outputs of one request: iterate, or ``get``. It ends after the last one.

    For one thread at a time. Leaving the with-statement, or ``abort``, gives the request up.

    Attributes:
        request_id: of the request.
        engine: the index of the engine that has it.
        sent: with ``copy=False``, tells when the request's arrays may be changed
            (`fastipc.sockets.PendingSend`); None with ``copy=True``: at once.
    """

    def __init__(self, client: EngineClient, request_id: str, limit: int) -> None:
        self.request_id = request_id
        self.engine = -1
        self.sent: PendingSend | None = None
        self._client = client
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._limit = limit
        self._ended = False
        self._error: BaseException | None = None
        self._delivered = client._core.stages.delivered

    # -- Sink --------------------------------------------------------------------------------------

    def put(self, output: Any) -> bool:
        """Called by the client."""
        self._queue.put((output, time.monotonic_ns()))
        return self._queue.qsize() <= self._limit

    def end(self, error: BaseException | None) -> None:
        """Called by the client."""
        self._queue.put((_END, error))

    # -- for the user ------------------------------------------------------------------------------

    def get(self, timeout: float | None = None) -> OutputT:
        """The next output.

        Raises:
            Empty: `timeout` seconds passed. The next call works.
            Closed: there was the last one, or the request was aborted.
            EngineDeadError, RequestFailed, SlowConsumer, Closed: the request is lost; again at
                each call. Closed when the client was closed or has failed, with what it failed by
                as ``__cause__``.
        """
        if self._ended:
            raise self._error or Closed(f"request {self.request_id!r} has no more outputs")
        self._client._check_process()
        try:
            output, at = self._queue.get(timeout=timeout)
        except NothingThere:
            raise Empty(f"no output of {self.request_id!r} within {timeout:g} s") from None
        if output is _END:
            self._ended = True
            self._error = at
            return self.get()
        self._delivered(time.monotonic_ns() - at)
        result: OutputT = output
        return result

    def __iter__(self) -> Iterator[OutputT]:
        return self

    def __next__(self) -> OutputT:
        try:
            return self.get()
        except Closed:
            if self._error is not None:
                raise
            raise StopIteration from None

    def abort(self) -> None:
        """Give the request up: the engine forgets it, and the stream ends. Idempotent."""
        self._client._abort((self.request_id,), self)

    def __enter__(self) -> OutputStream[OutputT]:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


_END = object()


class PendingCall:
    """A utility call under way."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._forks = forks()
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def _finish(self, result: Any, error: BaseException | None) -> None:
        self._result, self._error = result, error
        self._done.set()

    def done(self) -> bool:
        """Whether the result is there."""
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result.

        Raises Empty after `timeout` seconds, RequestFailed when the method raised, EngineDeadError,
        Closed when the client was closed or has failed.
        """
        if not self._done.is_set() and self._forks != forks():
            raise IPCError(f"{self._what} is of the process that forked this one")
        if not self._done.wait(timeout):
            raise Empty(f"{self._what} has not returned within {timeout:g} s")
        if self._error is not None:
            raise self._error
        return self._result


class EngineClient:
    """A front end: sends requests to engines, and gets their outputs back. Thread safe.

    Args:
        spec: of the group that was launched, or the word that ``spec.to_str()`` made of it.
        request_type, output_type: of the engine; None: as the spec names them.
        timeout: seconds to wait for the engines to be ready. None waits for ever.
        max_buffered: outputs of one request that may be waiting here for whoever reads them; with
            more the request is aborted, and its stream raises SlowConsumer.
        max_in_flight_bytes: bytes of requests that may be under way.

    Raises:
        NotReady: at the timeout; names the engines that are missing.
        EngineDeadError: an engine ended before it was ready.
        HandleMismatch: the group speaks another version, or has no such front end.
        ValueError: a limit that is none.

    A thread receives. Should it fail, the client is closed: what is under way, and every later
    call, raises Closed with the failure as ``__cause__``. After a fork the client is its parent's:
    the child's copy raises IPCError, and keeps no connection open.
    Closing it aborts what is under way.

    A signal handler, or a finalizer, may find its thread inside a call of the same client. There
    ``add_request``, ``call`` and ``wait_until_ready`` raise IPCError; ``abort`` and ``close``
    return, and it is done as soon as that call is over. Nor may it wait there for what comes.
    """

    def __init__(
        self,
        spec: ClientSpec | str,
        *,
        request_type: type | None = None,
        output_type: type | None = None,
        timeout: float | None = None,
        max_buffered: int = MAX_BUFFERED,
        max_in_flight_bytes: int = 1 << 30,
    ) -> None:
        self._closed = True
        self._group: EngineGroup | None = None
        if isinstance(spec, str):
            spec = ClientSpec.from_str(spec)
        self._max_buffered = checked_limit("max_buffered", max_buffered)
        self._pid = os.getpid()
        self._forks = forks()
        max_bytes = checked_limit("max_in_flight_bytes", max_in_flight_bytes)
        self._core = FrontEndCore(spec, request_type, output_type)
        self._core.max_bytes = max_bytes
        self._lock = threading.RLock()
        # Whether this thread has it.
        self._is_inside: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]
        # What to abort, as for `_abort`; None: to close.
        self._late: deque[tuple[Iterable[str], OutputStream[Any] | None] | None] = deque()
        self._changed = threading.Condition(self._lock)
        self._core.on_change = self._changed.notify_all
        self._wake = Wake()
        self._thread = threading.Thread(
            target=_receive, args=(weakref.ref(self),), name="fastipc-client", daemon=True
        )
        self._closed = False
        self._thread.start()
        try:
            self.wait_until_ready(timeout)
        except BaseException:
            self.close()
            raise

    @classmethod
    def launch(
        cls,
        core_class: type[EngineCore],
        config: Any = None,
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> EngineClient:
        """Launch engines of this client's own, which end with it. `options` as of ``launch``."""
        group = launch(core_class, config, **options)
        try:
            client = cls(
                group.clients[0],
                request_type=core_class.request_type,
                output_type=core_class.output_type,
                timeout=timeout,
            )
        except EngineDeadError:
            # An exception in a core's __init__ is more to the point.
            try:
                group.wait_until_ready(0.0)
            except NotReady:
                pass
            finally:
                group.shutdown(timeout=0.0)
            raise
        except BaseException:
            group.shutdown(timeout=0.0)
            raise
        client._group = group
        return client

    @property
    def engines(self) -> dict[int, EngineState]:
        """What is known of each engine, by index."""
        self._check_process()
        with self._lock:
            return dict(self._core.engines)

    @property
    def group(self) -> EngineGroup | None:
        """The engines that ``launch`` started for this client."""
        return self._group

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until every engine is ready; again after one was restarted, for example."""
        self._check_process()
        self._check_outside()
        began = time.monotonic()
        with self._lock:
            while not self._core.ready():
                left = None if timeout is None else began + timeout - time.monotonic()
                if left is not None and left <= 0:
                    raise self._core.not_ready(timeout or 0.0)
                self._changed.wait(left)

    def add_request(
        self, request: Any, *, engine: int | None = None, copy: bool = True
    ) -> OutputStream[Any]:
        """Send a request, and return the stream of its outputs.

        Args:
            request: of the engine's request_type. Its request_id is unique among those under way.
            engine: the index of the engine to use; None: the one with the least to do.
            copy: whether large arrays and tensors are copied; otherwise they must not be changed
                until ``stream.sent.done``.

        Raises:
            TooManyRequests: the limit of requests under way is reached. Nothing was sent.
            EngineDeadError: that engine, or all of them; or too much is on its way to that engine;
                or, with ``copy=False``, there is no connection to it now. (Else a request that
                finds none is lost: the stream says how, as soon as that is known.)
            TypeError, ValueError: not of the type; the id is in use.

        After what a signal handler raises meanwhile (KeyboardInterrupt, say) there is no such
        request, and its id can be used again.
        """
        created = time.monotonic_ns()
        stream: OutputStream[Any] = OutputStream(
            self, getattr(request, "request_id", ""), self._max_buffered
        )
        self._check_process()
        self._check_outside()
        with self._lock:
            try:
                chosen, stream.sent = self._core.add(request, stream, engine, copy, created)
                stream.engine = chosen.index
                self._after_sending()
                return stream
            except BaseException:
                self._core.undo(stream.request_id, stream)
                raise

    def generate(self, request: Any, *, engine: int | None = None) -> Iterator[Any]:
        """The outputs of a request, as they come. Leaving the loop early aborts the request."""
        stream = self.add_request(request, engine=engine)
        try:
            yield from stream
        finally:
            stream.abort()

    def abort(self, *request_ids: str) -> None:
        """Give requests up: their streams end, and the engine forgets them. Those that have
        finished are ignored."""
        self._abort(request_ids)

    def _abort(self, request_ids: Iterable[str], of: OutputStream[Any] | None = None) -> None:
        self._check_process()
        if self._is_inside():
            self._late.append((request_ids, of))
            self._wake.set()
            return
        with self._lock:
            if self._core.closed is not None:
                return
            for sink in self._core.abort(request_ids, of):
                sink.end(None)
            self._after_sending()

    def call(
        self,
        method: str,
        *args: Any,
        engine: int | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a utility method of the core, between two of its steps.

        Returns its result; of all engines, a list by index, if there are several and `engine` is
        None. Arguments and results are what the codec carries.

        Raises RequestFailed when the method raised, or what was sent can't be decoded at the other
        end; EngineDeadError; Empty after `timeout` seconds; Closed when the client was closed or
        has failed; TypeError when `method` is no str.
        """
        end = None if timeout is None else time.monotonic() + timeout
        calls = self.call_async(method, *args, engine=engine, **kwargs)
        results = [
            call.result(None if end is None else max(0.0, end - time.monotonic())) for call in calls
        ]
        return results[0] if len(results) == 1 else results

    def call_async(
        self, method: str, *args: Any, engine: int | None = None, **kwargs: Any
    ) -> list[PendingCall]:
        """Like ``call``, but returns what to wait for, one for each engine."""
        calls = []
        self._check_process()
        self._check_outside()
        with self._lock:
            self._core.check_open()
            indices = list(self._core.engines) if engine is None else [engine]
            for chosen in [self._core.choose(index) for index in indices]:
                call = PendingCall(f"{method}() of engine {chosen.index}")
                self._core.call(chosen, method, args, kwargs, call._finish)
                calls.append(call)
            self._after_sending()
        return calls

    def stats(self) -> dict[str, Any]:
        """Numbers of requests, and where their time goes.

        ``in_flight``, ``in_flight_bytes``, ``calls``; since the start ``sent``, ``finished``,
        ``failed``, ``aborted``, ``outputs``, ``tensor_frames`` (that requests had beside their
        main frames) and ``output_messages`` (in which outputs came); ``stages``: a summary (count;
        seconds) of each stage that `fastipc.engine.stages` lists; ``engines``: by index, whether
        each is alive, and the summaries of its own histograms, at most a second old while there
        are outputs.
        """
        self._check_process()
        with self._lock:
            return self._core.stats()

    def histograms(self) -> dict[str, Any]:
        """The histograms (`fastipc.histogram.Histogram`, copies) that ``stats`` summarises:
        ``stages`` by name; ``engines`` by index and name."""
        self._check_process()
        with self._lock:
            return self._core.histograms()

    def close(self) -> None:
        """Abort what is under way, and end the engines if ``launch`` started them. Idempotent."""
        if os.getpid() != self._pid:
            return
        if self._is_inside() and self._thread.is_alive():
            self._late.append(None)
            self._wake.set()
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._core.close()
            self._changed.notify_all()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._wake.close()
        if self._group is not None:
            self._group.shutdown()

    shutdown = close

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and os.getpid() == self._pid:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
            self.close()

    def __repr__(self) -> str:
        return f"<EngineClient {self._core.spec.client_index} of {len(self._core.engines)} engines>"

    # -- inside ------------------------------------------------------------------------------------

    def _check_process(self) -> None:
        # (before the lock is taken, which another of the parent's threads may have held)
        if self._forks != forks():
            raise IPCError("this client is of the process that forked this one: make another")

    def _check_outside(self) -> None:
        # What is half sent would become one message with what is sent now.
        if self._is_inside():
            raise IPCError(
                "this thread is inside a call of this client already (a signal handler or a "
                "finalizer came back)"
            )

    def _catch_up(self) -> None:
        """Called by the client's thread: what could not be done at once."""
        while self._late:
            aborts = self._late.popleft()
            if aborts is None:
                self.close()
            else:
                self._abort(*aborts)

    def _after_sending(self) -> None:
        # Sending may swallow the news of something that arrived: have the thread look.
        if self._core.has_news():
            self._wake.set()


def _receive(reference: weakref.ref[EngineClient]) -> None:
    """The thread. It holds the client only while it has something to do."""
    client = reference()
    if client is None:  # pragma: no cover
        return
    wake, lock, core = client._wake, client._lock, client._core
    del client
    try:
        _pump_until_closed(reference, wake, lock, core)
    except BaseException as error:
        with lock:
            core.fail(error)


def _pump_until_closed(
    reference: weakref.ref[EngineClient], wake: Wake, lock: threading.RLock, core: FrontEndCore
) -> None:
    poller = select.poll()
    poller.register(wake.fd, select.POLLIN)
    readers: dict[int, Any] = {}
    next_tick = time.monotonic() + TICK_SECONDS
    ready: list[int] = []
    more = True
    while True:
        with lock:
            if core.closed is not None:
                return
            if more or wake.fd in ready:
                more = core.pump()
            else:
                for fd in ready:
                    more |= core.closed is None and readers[fd]()
            now = time.monotonic()
            if now >= next_tick:
                core.tick()
                more |= core.has_news()  # whose signal the tick's sending may have taken up
                next_tick = now + TICK_SECONDS
            if len(core.sockets) != len(readers):
                for socket, reader in core.sockets.items():
                    if socket.FD not in readers:
                        poller.register(socket.FD, select.POLLIN)
                        readers[socket.FD] = reader
                        more = True
        left = 0.0 if more else max(0.0, next_tick - time.monotonic())
        ready = [fd for fd, _ in poller.poll(left * 1000)]
        if wake.fd in ready:
            wake.clear()
        client = reference()
        if client is None:
            return
        client._catch_up()
        del client
