"""The processes of ``fastipc serve``.

With one API server the process that was started is it, and launches the engines. With several it
launches the engines and the API servers, which listen on one port (SO_REUSEPORT: the kernel spreads
connections over them), and passes on what one API server asks of all others for /metrics.

Whoever dies is named. Without --restart all end then, as far as they can: running answers of other
engines are finished. Nobody outlives the process that was started. SIGTERM and Ctrl-C end it in
good order at any moment, also while it starts and while it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from types import FrameType
from typing import Any, NamedTuple

import uvicorn

from fastipc import ChildDied, EngineDeadError, IPCError, processes
from fastipc.demo.core import DemoConfig, DemoCore
from fastipc.engine import AsyncEngineClient, ClientSpec, EngineGroup, launch
from fastipc.engine.group import clean_up_when_orphaned
from fastipc.server import metrics
from fastipc.server.api import Service, application

__all__ = ["Options", "serve"]

logger = logging.getLogger("fastipc.server")

READY_SECONDS = 120.0
# How often an API server looks whether its engines live; and for how long /health goes on to say
# which doesn't, before it stops listening.
LOOK_SECONDS = 0.1
DEAD_SECONDS = 1.0
# After a death, what running answers of others get; after SIGTERM they get all the time they need.
DEAD_DRAIN_SECONDS = 30.0
# After SIGTERM or a death a client that takes nothing of its answer for so long is given up: longer
# than a bad line needs to come back with what it lost, several times.
STALL_SECONDS = 15.0
# How long an API server that is asked for its numbers may take.
ASK_SECONDS = 1.0
# An API server that dies more often than this in a minute is not started again.
RESTARTS = 5
BACKLOG = 2048
# The exit code of an API server that has reported an engine's death. (1 is Python's for whatever is
# not caught.)
ENGINE_DEAD_EXIT = 3


class Options(NamedTuple):
    """What the command line says; see there."""

    host: str
    port: int
    engines: int
    workers: int
    api_servers: int
    restart: bool
    path: str


class CannotListen(Exception):
    """The address can't be had; the text says why."""


class _Told(KeyboardInterrupt):
    """SIGTERM or Ctrl-C, when there is nothing to finish yet."""


class _Signals:
    """SIGTERM and SIGINT of the process that was started, from its first step to its last.

    Until an event loop takes them the first one is raised in the main thread, as Python does with
    Ctrl-C. After the loop, and after the first, they change nothing: all is ending, and within
    bounds of time. Only the main thread can make one.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self._call: Callable[[int], object] = self._raise
        # One that whoever started this process has it ignore stays so: nohup, a shell's "&".
        self._before = {
            number: handler
            for number in (signal.SIGTERM, signal.SIGINT)
            if (handler := signal.getsignal(number)) is not signal.SIG_IGN
        }

    def __enter__(self) -> _Signals:
        for number in self._before:
            signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exitcode(self) -> int:
        return 130 if self.first == signal.SIGINT else 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        call = self._call
        if self.first is None:
            self.first = number
        elif call == self._raise:
            return
        call(number)

    def _raise(self, number: int) -> None:
        raise _Told

    @contextlib.contextmanager
    def taken(self, function: Callable[[int], object]) -> Iterator[None]:
        """The running event loop calls function(number) for each signal."""
        loop = asyncio.get_running_loop()
        self._call = lambda number: loop.call_soon_threadsafe(function, number)
        # A signal may come to another thread, or when this one is just about to fall asleep: what
        # the interpreter writes at once wakes the loop, and so has its handler called.
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            loop.add_reader(ours, ours.recv, 4096)
            before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
            try:
                if self.first is not None:  # what was raised may have been lost, in a __del__ say
                    function(self.first)
                yield
            finally:
                self._call = lambda number: None
                signal.set_wakeup_fd(before)
                loop.remove_reader(ours)


def serve(options: Options) -> int:
    """Serves until told to end; returns the exit code."""
    _log_to_stderr()
    with _Signals() as told:
        try:
            return _serve(options, told) or told.exitcode
        except (_Told, asyncio.CancelledError):
            return told.exitcode
        except (IPCError, RuntimeError, OSError) as error:
            print(f"fastipc serve: {error}", file=sys.stderr)
            return 1


def _serve(options: Options, told: _Signals) -> int:
    try:
        listener, address = _bind(options)
    except CannotListen as error:
        print(f"fastipc serve: {error}", file=sys.stderr)
        return 1
    config = DemoConfig(path=options.path, workers=options.workers, in_process=options.workers == 1)
    with (
        listener,
        launch(
            DemoCore,
            config,
            engines=options.engines,
            clients=options.api_servers,
            # Spawned, they don't have the listening socket, nor an event loop.
            start_method="spawn",
            restart=options.restart,
            # A service manager sends it to all processes; running answers need theirs.
            ends_at_sigterm=False,
        ) as group,
    ):
        group.wait_until_ready(READY_SECONDS)
        if options.api_servers == 1:
            return asyncio.run(_alone(group.clients[0], listener, address, told))
        return asyncio.run(_Parent(options, group, listener, address).run(told))


def _log_to_stderr() -> None:
    logging.basicConfig(
        level=logging.WARNING, format="fastipc serve: %(message)s", stream=sys.stderr
    )


def _say(text: str) -> None:
    print(f"fastipc serve: {text}", file=sys.stderr, flush=True)


# -- the port --------------------------------------------------------------------------------------


def _bind(options: Options) -> tuple[socket.socket, str]:
    """A socket that is bound to the port, and the address as a URL has it.

    With several API servers it only keeps the port for them, and doesn't listen.
    """
    try:
        found = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, where = found[0]
        # First one that shares with nobody: another server's port would be shared in silence. (Any
        # that is free is nobody's.)
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if options.api_servers > 1 and options.port == 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(where)
            where = sock.getsockname()
            if options.api_servers == 1:
                sock.listen(BACKLOG)
            elif options.port != 0:
                sock.close()
                sock = socket.socket(family, kind, protocol)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                sock.bind(where)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise CannotListen(
            f"can't listen on {options.host} port {options.port}: {error.strerror or error}"
        ) from None
    host = f"[{where[0]}]" if family == socket.AF_INET6 else where[0]
    return sock, f"http://{host}:{where[1]}"


def _sharing(family: int, where: Any) -> socket.socket:
    """A socket that listens on a port together with others."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(where)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


# -- one API server --------------------------------------------------------------------------------


class _HttpServer(uvicorn.Server):
    """uvicorn's, without its signal handlers."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


class _ApiServer:
    """One API server, in this process's event loop.

    ``gather`` returns the snapshots of all of them.
    """

    def __init__(
        self,
        client: AsyncEngineClient,
        listener: socket.socket,
        gather: Callable[[], Awaitable[list[dict[str, Any]]]] | None,
    ) -> None:
        self._listener = listener
        self._client = client
        self._gather = gather
        self.service = Service(client, self._metrics)
        self._engine_died = False
        self._signals = 0
        self._stalls: asyncio.Task[None] | None = None
        self._server = _HttpServer(
            uvicorn.Config(
                application(self.service),
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                backlog=BACKLOG,
            )
        )

    def snapshot(self) -> dict[str, Any]:
        return metrics.snapshot(self._client, self.service.open)

    async def _metrics(self) -> bytes | None:
        if not metrics.available():
            return None
        snapshots = [] if self._gather is None else await self._gather()
        return metrics.text(snapshots or [self.snapshot()])  # (nobody's came in time)

    def on_signal(self, number: int) -> None:
        """The first lets running answers finish, the second does not."""
        self._signals += 1
        self._drain()
        if self._signals > 1:
            self._force()

    def _drain(self) -> None:
        self.service.drain()
        self._server.should_exit = True
        if self._stalls is None:
            self._stalls = asyncio.create_task(self._see_off())

    def _force(self) -> None:
        self._server.force_exit = True
        # Each answer ends as when its client goes away.
        for connection in list(self._server.server_state.connections):
            if connection.transport.get_write_buffer_size():
                connection.transport.abort()  # close would wait until the client has read
            else:
                connection.transport.close()

    async def _see_off(self) -> None:
        """Ends connections that would keep the server: that were made after uvicorn has ended those
        that are idle, and have no request; and whose clients don't read. (Not all is sent when an
        answer is complete.)"""
        loop = asyncio.get_running_loop()
        seen: dict[asyncio.Transport, tuple[int, float]] = {}
        while True:
            now = loop.time()
            before, seen = seen, {}
            for connection in list(self._server.server_state.connections):
                transport = connection.transport
                if not transport.is_closing():
                    connection.shutdown()
                size = transport.get_write_buffer_size()
                last, since = before.get(transport, (0, now))
                if not size or size < last:
                    since = now
                elif now - since >= STALL_SECONDS:
                    transport.abort()
                seen[transport] = size, since
            await asyncio.sleep(LOOK_SECONDS)

    async def run(self) -> bool:
        """Serves until told to end, or an engine is dead for good. Whether it was that."""
        watch = asyncio.create_task(self._watch())
        try:
            await self._server.serve([self._listener])
        finally:
            watch.cancel()
            if self._stalls is not None:
                self._stalls.cancel()
        return self._engine_died

    async def _watch(self) -> None:
        dead: set[int] = set()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for index, engine in self._client.engines.items():
                if engine.alive:
                    if index in dead:
                        dead.discard(index)
                        _say(f"engine {index} is back, as pid {engine.pid}")
                elif index not in dead:
                    dead.add(index)
                    _say(f"engine {index} (pid {engine.pid}) is dead: {engine.reason}")
                if engine.final and not engine.alive:
                    self._engine_died = True
                    await asyncio.sleep(DEAD_SECONDS)
                    self._drain()
                    await asyncio.sleep(DEAD_DRAIN_SECONDS)
                    self._force()
                    return


def _pids(client: AsyncEngineClient) -> str:
    named = []
    for index, engine in sorted(client.engines.items()):
        named.append(f"engine {index} is pid {engine.pid}")
        if not engine.info["in_process"]:
            named += (
                f"worker {rank} of engine {index} is pid {pid}"
                for rank, pid in enumerate(engine.info["workers"])
            )
    return ", ".join(named)


async def _alone(spec: ClientSpec, listener: socket.socket, address: str, told: _Signals) -> int:
    task = asyncio.current_task()
    server: _ApiServer | None = None

    def on_signal(number: int) -> None:
        if server is not None:
            server.on_signal(number)
        elif task is not None:
            task.cancel()

    with told.taken(on_signal):
        async with AsyncEngineClient(spec, timeout=READY_SECONDS) as client:
            server = _ApiServer(client, listener, None)
            _say(f"API server 0 is pid {os.getpid()}, {_pids(client)}")
            _say(f"listening on {address}")
            return 1 if await server.run() else 0


# -- several API servers ---------------------------------------------------------------------------


def _api_server_main(spec: ClientSpec, family: int, where: Any, pipe: Connection) -> None:
    """The main function of an API server's process."""
    _log_to_stderr()
    try:
        code = asyncio.run(_one_of_several(spec, family, where, pipe))
    except asyncio.CancelledError:  # told to end before there was anything to finish
        code = 0
    except IPCError as error:
        _say(f"API server {spec.client_index} (pid {os.getpid()}) ends: {error}")
        code = ENGINE_DEAD_EXIT if isinstance(error, EngineDeadError) else 1
    sys.exit(code)


async def _one_of_several(spec: ClientSpec, family: int, where: Any, pipe: Connection) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    server: _ApiServer | None = None
    questions = itertools.count()
    asked: dict[int, asyncio.Future[list[dict[str, Any]]]] = {}

    async def gather() -> list[dict[str, Any]]:
        number = next(questions)
        future = asked[number] = loop.create_future()
        try:
            pipe.send(("metrics", number, None))
            return await asyncio.wait_for(future, 2 * ASK_SECONDS)
        except (OSError, TimeoutError):
            assert server is not None
            return [server.snapshot()]
        finally:
            del asked[number]

    def on_pipe() -> None:
        try:
            while pipe.poll():
                kind, number, value = pipe.recv()
                if kind == "signal":
                    if server is None:
                        task.cancel()
                    else:
                        server.on_signal(number)
                elif kind == "snapshot":
                    pipe.send(("snapshot", number, None if server is None else server.snapshot()))
                elif number in asked and not asked[number].done():
                    asked[number].set_result(value)
        except (EOFError, OSError):
            loop.remove_reader(pipe.fileno())  # the parent is gone, and so is this process soon

    loop.add_reader(pipe.fileno(), on_pipe)
    try:
        async with AsyncEngineClient(spec, timeout=READY_SECONDS) as client:
            server = _ApiServer(client, _sharing(family, where), gather)
            processes.ready(_pids(client))
            return ENGINE_DEAD_EXIT if await server.run() else 0
    finally:
        loop.remove_reader(pipe.fileno())


class _Question:
    """What an API server asks of all, while the answers come in."""

    def __init__(self, missing: set[int]) -> None:
        self.missing = missing
        self.snapshots: list[dict[str, Any]] = []


class _Parent:
    """Starts API servers, and ends with them."""

    def __init__(
        self, options: Options, group: EngineGroup, listener: socket.socket, address: str
    ) -> None:
        self._options = options
        self._group = group
        self._family = listener.family
        self._where = listener.getsockname()
        self._address = address
        self._servers: dict[int, processes.ChildProcess] = {}
        self._pipes: dict[int, Connection] = {}
        self._starts: dict[int, list[float]] = {}
        self._questions: dict[tuple[int, int], _Question] = {}
        self._ended = asyncio.Event()
        self._monitor: processes.Monitor | None = None
        self._stopping = False
        self.exitcode = 0

    async def run(self, told: _Signals) -> int:
        """Returns 0 or 1 when all API servers have ended."""
        with told.taken(self._stop):
            return await self._run()

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        try:
            for index in range(self._options.api_servers):
                self._start(index)
            everybody = list(self._servers.values())
            told = await asyncio.to_thread(processes.wait_all_ready, everybody, READY_SECONDS)
            self._monitor = processes.Monitor(
                everybody,
                lambda child: loop.call_soon_threadsafe(self._server_ended, child),
            )
            pids = ", ".join(f"{child.name} is pid {child.pid}" for child in everybody)
            _say(f"parent is pid {os.getpid()}, {pids}, {told[0]}")
            _say(f"listening on {self._address}")
            await self._ended.wait()
        except ChildDied:
            if not self._stopping:
                raise
        finally:
            if self._monitor is not None:
                await asyncio.to_thread(self._monitor.stop)
            self._stop(signal.SIGTERM)
            await asyncio.to_thread(processes.stop, list(self._servers.values()), graceful=2.0)
            for pipe in self._pipes.values():
                loop.remove_reader(pipe.fileno())
                pipe.close()
        return self.exitcode

    def _start(self, index: int) -> None:
        ours, theirs = Pipe()
        try:
            with theirs:
                self._servers[index] = processes.start(
                    _api_server_main,
                    (self._group.clients[index], self._family, self._where, theirs),
                    name=f"API server {index}",
                    api_server=True,
                    # A terminal or a service manager sends signals to all processes. This one
                    # passes them on through the pipe, so that each counts once.
                    ends_at_sigterm=False,
                    prepare=clean_up_when_orphaned,
                )
        except BaseException:
            ours.close()
            raise
        self._pipes[index] = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._on_pipe, index)

    # -- ends

    def _stop(self, number: int) -> None:
        """API servers are told of the signal; when all have finished their answers, the engines
        end."""
        self._stopping = True
        for pipe in self._pipes.values():
            try:
                pipe.send(("signal", number, None))
            except OSError:
                pass  # it has ended
        if not any(server.is_alive() for server in self._servers.values()):
            self._ended.set()

    def _server_ended(self, child: processes.ChildProcess) -> None:
        index = next(i for i, server in self._servers.items() if server is child)
        pipe = self._pipes.pop(index)
        loop = asyncio.get_running_loop()
        loop.remove_reader(pipe.fileno())
        pipe.close()
        for key in list(self._questions):
            self._answered(index, key, None)
        if not self._stopping:
            how = f"{child.name} (pid {child.pid}) {child.describe_exit()}"
            if (
                self._options.restart
                and child.exitcode != ENGINE_DEAD_EXIT
                and self._may_restart(index)
            ):
                _say(f"{how}; it is started again")
                try:
                    self._start(index)
                except (OSError, RuntimeError) as error:  # there are no more processes, say
                    how = f"{child.name} can't be started again: {error}"
                else:
                    assert self._monitor is not None
                    self._monitor.add(self._servers[index])
                    return
            _say(f"{how}; the server ends")
            self.exitcode = 1
            self._stop(signal.SIGTERM)
        if not any(server.is_alive() for server in self._servers.values()):
            self._ended.set()

    def _may_restart(self, index: int) -> bool:
        now = asyncio.get_running_loop().time()
        recent = [at for at in self._starts.get(index, []) if now - at < 60.0]
        self._starts[index] = [*recent, now]
        return len(recent) < RESTARTS

    # -- numbers of all API servers

    def _on_pipe(self, index: int) -> None:
        pipe = self._pipes[index]
        try:
            while pipe.poll():
                kind, number, value = pipe.recv()
                if kind == "metrics":
                    self._ask((index, number))
                else:
                    self._answered(index, number, value)
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(pipe.fileno())

    def _ask(self, key: tuple[int, int]) -> None:
        """Asks every API server for its numbers, on behalf of one of them."""
        question = _Question(set(self._pipes))
        self._questions[key] = question
        asyncio.get_running_loop().call_later(ASK_SECONDS, self._answer, key)
        for index, pipe in list(self._pipes.items()):
            try:
                pipe.send(("snapshot", key, None))
            except OSError:
                self._answered(index, key, None)

    def _answered(self, index: int, key: tuple[int, int], value: dict[str, Any] | None) -> None:
        question = self._questions.get(key)
        if question is None:
            return  # too late
        question.missing.discard(index)
        if value is not None:
            question.snapshots.append(value)
        if not question.missing:
            self._answer(key)

    def _answer(self, key: tuple[int, int]) -> None:
        question = self._questions.pop(key, None)
        pipe = self._pipes.get(key[0])
        if question is not None and pipe is not None:
            try:
                pipe.send(("metrics", key[1], question.snapshots))
            except OSError:
                pass  # it has ended
