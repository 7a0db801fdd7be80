"""AsyncEngineClient: a front end for an asyncio event loop. It has no thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Any, Generic, TypeVar

from ..aio import settle
from ..errors import Closed, Empty, EngineDeadError, IPCError, NotReady
from ..sockets import PendingSend
from .client import MAX_BUFFERED, TICK_SECONDS, checked_limit
from .core import EngineCore
from .frontend import EngineState, FrontEndCore
from .group import EngineGroup, launch
from .protocol import ClientSpec

__all__ = ["AsyncEngineClient", "AsyncOutputStream"]

OutputT = TypeVar("OutputT")


class AsyncOutputStream(Generic[OutputT]):
    """The outputs of one request: ``async for``, or ``await get()``. It ends after the last one.

    For one task at a time. A ``get`` that is cancelled has taken nothing.

    Attributes:
        request_id, engine, sent: see OutputStream.
    """

    def __init__(self, client: AsyncEngineClient, request_id: str, limit: int) -> None:
        self.request_id = request_id
        self.engine = -1
        self.sent: PendingSend | None = None
        self._client = client
        self._outputs: deque[tuple[Any, int]] = deque()
        self._limit = limit
        self._ended = False
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._delivered = client._core.stages.delivered

    # -- Sink --------------------------------------------------------------------------------------

    def put(self, output: Any) -> bool:
        """Called by the client."""
        self._outputs.append((output, time.monotonic_ns()))
        if self._waiter is not None:
            self._wake()
        return len(self._outputs) <= self._limit

    def end(self, error: BaseException | None) -> None:
        """Called by the client."""
        self._ended = True
        self._error = error
        if self._waiter is not None:
            self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            settle(waiter, None)

    # -- for the user ------------------------------------------------------------------------------

    async def get(self) -> OutputT:
        """The next output.

        Raises Closed after the last one, or when the request was aborted; EngineDeadError,
        RequestFailed, SlowConsumer when it is lost; again at each call.
        """
        while not self._outputs:
            if self._ended:
                raise self._error or Closed(f"request {self.request_id!r} has no more outputs")
            if self._waiter is not None:
                raise RuntimeError(f"two tasks wait for the outputs of {self.request_id!r}")
            self._client._check_process()
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            finally:
                if self._waiter is waiter:
                    self._waiter = None
        output, at = self._outputs.popleft()
        self._delivered(time.monotonic_ns() - at)
        result: OutputT = output
        return result

    def __aiter__(self) -> AsyncOutputStream[OutputT]:
        return self

    async def __anext__(self) -> OutputT:
        if not self._outputs and self._ended and self._error is None:
            raise StopAsyncIteration
        try:
            return await self.get()
        except Closed:
            if self._error is not None:
                raise
            raise StopAsyncIteration from None

    def abort(self) -> None:
        """Give the request up: the engine forgets it, and the stream ends. Idempotent."""
        self._client._abort((self.request_id,), self)

    async def __aenter__(self) -> AsyncOutputStream[OutputT]:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()


class _Launching:
    """``launch`` in a thread, whose caller may give up waiting for it. Then nobody else would end
    the engines."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._lock = threading.Lock()
        self._abandoned = False
        self._group: EngineGroup | None = None

    def run(self) -> EngineGroup:
        arguments = dict(self._arguments)
        group = launch(arguments.pop("core_class"), arguments.pop("config"), **arguments)
        with self._lock:
            self._group = group
            abandoned = self._abandoned
        if abandoned:
            group.shutdown(timeout=0.0)
        return group

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            group = self._group
        if group is not None:
            # Not in the loop, which it would hold up; not a daemon, as engines must end.
            threading.Thread(target=group.shutdown, args=(0.0,), name="fastipc-abandoned").start()


class AsyncEngineClient:
    """A front end for one event loop: EngineClient's arguments, methods and errors.

    ::

        async with AsyncEngineClient(spec) as client:
            async for output in client.generate(request):
                ...

    Entering it waits for the engines (``timeout`` seconds at most). Every method is called from the
    event loop's thread. A task that is cancelled in ``generate`` aborts the request in the engine.
    """

    def __init__(
        self,
        spec: ClientSpec | str | None,
        *,
        request_type: type | None = None,
        output_type: type | None = None,
        timeout: float | None = None,
        max_buffered: int = MAX_BUFFERED,
        max_in_flight_bytes: int = 1 << 30,
    ) -> None:
        self._spec = ClientSpec.from_str(spec) if isinstance(spec, str) else spec
        self._types = request_type, output_type
        self._timeout = timeout
        self._max_buffered = checked_limit("max_buffered", max_buffered)
        self._max_bytes = checked_limit("max_in_flight_bytes", max_in_flight_bytes)
        self._launch: dict[str, Any] | None = None
        self._group: EngineGroup | None = None
        self._opened: FrontEndCore | None = None
        self._opening = False
        self._closed = False
        self._pid = os.getpid()
        self._fds: set[int] = set()
        self._changed: asyncio.Event | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._pumping = False
        self._asking = False

    @classmethod
    def launch(
        cls,
        core_class: type[EngineCore],
        config: Any = None,
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> AsyncEngineClient:
        """A client that launches engines of its own when it is entered, and ends them when it is
        left. `options` as of ``launch``."""
        client = cls(
            None,
            request_type=core_class.request_type,
            output_type=core_class.output_type,
            timeout=timeout,
        )
        client._launch = {"core_class": core_class, "config": config, **options}
        return client

    # -- opening and closing -----------------------------------------------------------------------

    async def open(self) -> None:
        """What entering does: launch the engines if this client is to, and wait for them."""
        if self._opened is not None or self._closed or self._opening:
            raise RuntimeError("the client was opened before")
        self._opening = True  # by this task: another would launch engines of its own
        try:
            await self._open()
        finally:
            self._opening = False

    async def _open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        if self._launch is not None:
            launching = _Launching(self._launch)
            try:
                # In a thread: starting processes takes a while, and the loop has others to serve.
                self._group = await asyncio.to_thread(launching.run)
            except asyncio.CancelledError:
                launching.abandon()
                raise
            await self._unless_closed(self._group)
            self._spec = self._group.clients[0]
        assert self._spec is not None
        try:
            self._opened = core = FrontEndCore(self._spec, *self._types)
            core.max_bytes = self._max_bytes
            core.on_change = self._on_change
            self._on_change()
            self._on_tick()
            self._pump()
            await self.wait_until_ready(self._timeout)
        except BaseException as error:
            try:
                if isinstance(error, EngineDeadError) and self._group is not None:
                    # An exception in a core's __init__ is more to the point.
                    with contextlib.suppress(NotReady):
                        await asyncio.to_thread(self._group.wait_until_ready, 0.0)
                raise
            finally:
                await self.close()

    async def _unless_closed(self, group: EngineGroup) -> None:
        if self._closed:  # while the engines were started, by another task
            await asyncio.to_thread(group.shutdown, 0.0)
            raise Closed("the engine client was closed while it was opened")

    async def close(self) -> None:
        """Abort what is under way, and end the engines if this client launched them. Idempotent."""
        if os.getpid() != self._pid or self._closed:
            return
        self._closed = True
        if self._tick is not None:
            self._tick.cancel()
        self._drop_readers()
        if self._opened is not None:
            self._opened.close()
        if self._changed is not None:
            self._changed.set()  # who waits until the engines are ready waits no more
        if self._group is not None:
            await asyncio.to_thread(self._group.shutdown)

    async def __aenter__(self) -> AsyncEngineClient:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        if (
            getattr(self, "_opened", None) is not None
            and not self._closed
            and os.getpid() == self._pid
        ):
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
            assert self._opened is not None
            self._opened.close()
            if self._group is not None:
                self._group.shutdown(timeout=0.0)

    def __repr__(self) -> str:
        index = "-" if self._spec is None else self._spec.client_index
        return f"<AsyncEngineClient {index}>"

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until every engine is ready; again after one was restarted, for example."""
        core, changed = self._core, self._changed
        assert changed is not None
        try:
            async with asyncio.timeout(timeout):
                while not core.ready():
                    changed.clear()
                    await changed.wait()
        except TimeoutError as error:
            if isinstance(error, IPCError):
                raise
            raise core.not_ready(timeout or 0.0) from None

    # -- for the user ------------------------------------------------------------------------------

    @property
    def engines(self) -> dict[int, EngineState]:
        """What is known of each engine, by index."""
        return dict(self._core.engines)

    @property
    def group(self) -> EngineGroup | None:
        """The engines that this client launched."""
        return self._group

    def add_request(
        self, request: Any, *, engine: int | None = None, copy: bool = True
    ) -> AsyncOutputStream[Any]:
        """See EngineClient.add_request. Doesn't wait."""
        created = time.monotonic_ns()
        stream: AsyncOutputStream[Any] = AsyncOutputStream(
            self, getattr(request, "request_id", ""), self._max_buffered
        )
        core = self._core
        try:
            chosen, stream.sent = core.add(request, stream, engine, copy, created)
            stream.engine = chosen.index
            self._after_sending()
            return stream
        except BaseException:
            core.undo(stream.request_id, stream)
            raise

    async def generate(self, request: Any, *, engine: int | None = None) -> AsyncIterator[Any]:
        """The outputs of a request, as they come. Leaving the loop early, in whatever way, aborts
        the request."""
        stream = self.add_request(request, engine=engine)
        try:
            async for output in stream:
                yield output
        finally:
            if not stream._ended:
                stream.abort()

    def abort(self, *request_ids: str) -> None:
        """See EngineClient.abort. Doesn't wait."""
        self._abort(request_ids)

    def _abort(self, request_ids: Iterable[str], of: AsyncOutputStream[Any] | None = None) -> None:
        core = self._core
        if core.closed is not None:
            return
        sinks = core.abort(request_ids, of)
        if sinks:
            for sink in sinks:
                sink.end(None)
            self._after_sending()

    async def call(
        self,
        method: str,
        *args: Any,
        engine: int | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """See EngineClient.call."""
        core = self._core
        core.check_open()
        futures = []
        indices = list(core.engines) if engine is None else [engine]
        for chosen in [core.choose(index) for index in indices]:
            future: asyncio.Future[Any] = self._loop.create_future()
            core.call(chosen, method, args, kwargs, _finisher(future))
            futures.append(future)
        self._after_sending()
        gathered = asyncio.gather(*futures)
        try:
            results = await asyncio.wait_for(gathered, timeout)
        except TimeoutError as error:
            if isinstance(error, IPCError):
                raise
            raise Empty(f"{method}() has not returned within {timeout:g} s") from None
        return results[0] if len(results) == 1 else list(results)

    def stats(self) -> dict[str, Any]:
        """See EngineClient.stats."""
        return self._core.stats()

    def histograms(self) -> dict[str, Any]:
        """See EngineClient.histograms."""
        return self._core.histograms()

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _core(self) -> FrontEndCore:
        if self._opened is None:
            raise RuntimeError("the client is not open: use `async with client:`")
        self._check_process()
        return self._opened

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise IPCError("this client is of the process that forked this one: make another")

    def _after_sending(self) -> None:
        # Once for all that is sent in one turn of the loop: asking costs as much as sending.
        if not self._asking:
            self._asking = True
            self._loop.call_soon(self._ask_for_news)

    def _ask_for_news(self) -> None:
        self._asking = False
        core = self._opened
        if core is not None and core.closed is None and self._attempt(core, core.has_news):
            self._pump()

    def _on_change(self) -> None:
        assert self._changed is not None
        self._changed.set()
        if self._opened is None or self._closed:
            return
        if self._opened.closed is not None:
            # The loop must not take a descriptor that is opened next for one of them.
            self._drop_readers()
        for socket, reader in self._opened.sockets.items():
            fd = socket.FD
            if fd not in self._fds:
                self._fds.add(fd)
                self._loop.add_reader(fd, self._pump_one, reader)

    def _drop_readers(self) -> None:
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._fds.clear()

    def _attempt(self, core: FrontEndCore, what: Callable[[], Any]) -> Any:
        """For callbacks of the loop: it would log an exception and go on, and so would everybody
        wait on who waits for what it was about to bring."""
        try:
            return what()
        except BaseException as error:
            self._drop_readers()
            core.fail(error)
            if not isinstance(error, Exception):
                raise  # which ends the loop
            return False

    def _on_tick(self) -> None:
        core = self._opened
        if not self._closed and core is not None and core.closed is None:
            self._attempt(core, core.tick)
            # (whose signal the tick's sending may have taken up)
            if core.closed is None and self._attempt(core, core.has_news):
                self._pump()
            self._tick = self._loop.call_later(TICK_SECONDS, self._on_tick)

    def _pump_one(self, reader: Callable[[], bool]) -> None:
        """The descriptor of one socket has become readable."""
        core = self._opened
        if core is None or core.closed is not None:
            return
        if self._attempt(core, reader) and not self._pumping:
            # There is more: after the tasks that have something to do now.
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        core = self._opened
        if core is None or core.closed is not None:
            return
        if self._attempt(core, core.pump):
            # There is more: after the tasks that have something to do now.
            self._pumping = True
            self._loop.call_soon(self._pump)


def _finisher(future: asyncio.Future[Any]) -> Any:
    def finish(result: Any, error: BaseException | None) -> None:
        settle(future, result, error)

    return finish
