"""A front end's half of the channels: its sockets, its table of requests, and who is alive.

`FrontEndCore` neither waits nor has threads: client.py drives it from a thread, aio.py from an
event loop. They call `pump` when a descriptor of `sockets` is readable, and `tick` once a second.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import msgspec
import zmq

from .. import addresses, failures
from ..codec import MsgpackDecoder, MsgpackEncoder, UtilityResult
from ..codec import registry as codec_registry
from ..errors import (
    Closed,
    DecodeError,
    EngineDeadError,
    HandleMismatch,
    IPCError,
    NotReady,
    RemoteError,
    RequestFailed,
    SlowConsumer,
    TooManyRequests,
)
from ..histogram import Histogram
from ..hostinfo import boot_id
from ..remote_end import curve_key_pair
from ..sockets import PendingSend, get_open_zmq_ipc_path, send_frames
from .channels import open_channel
from .coordinator import endpoint_of_any_port
from .intake import EVENTS, NOBLOCK, POLLIN, RCVMORE, as_curve_client, keep_alive
from .protocol import (
    ABORT,
    ADD,
    CREDIT,
    ENGINE_CORE_DEAD,
    MESSAGE_COST,
    PING,
    PROTOCOL,
    START_DP_WAVE,
    UTILITY,
    Aborts,
    Call,
    ClientSpec,
    CoordinatorAddress,
    Credit,
    Dead,
    Ended,
    Exited,
    Failure,
    FrontEnd,
    Hello,
    Joined,
    Loads,
    Outputs,
    Ready,
    Request,
    Result,
    StartWave,
    Uncoordinated,
    Welcome,
    decode_control,
    encode_control,
    identity,
    request_id_in,
)
from .stages import Stages

logger = logging.getLogger("fastipc")

_AT_ONCE = 64
"""Messages that are taken before others get their turn."""

UNREACHABLE_SECONDS = 10.0
"""For how long an engine may be unreachable, and nobody know why, until it counts as dead."""

EXIT_SECONDS = 2.0
"""For how long its parent's word is waited for when an engine has said that it ends."""

_WAITING_COST = 4
"""How many running requests one that waits counts for: it says that there is no room."""


class Sink(Protocol):
    """Where a request's outputs go. Called by the thread that drives the front end."""

    def put(self, output: Any) -> bool:
        """Takes an output; False says that there is no room."""

    def end(self, error: BaseException | None) -> None:
        """There will be no more, because of this error if there is one."""


class EngineState:
    """What is known of one engine.

    Attributes:
        index: 0 to the number of engines - 1.
        info: what `EngineCore.info` returned.
        pid, host: its process; None before it is ready.
        alive: it is ready, and has not ended.
        reason: why it is not alive.
        in_flight: requests of this front end.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.identity = identity(index)
        self.info: Any = None
        self.pid: int | None = None
        self.host: str | None = None
        self.alive = False
        self.reason = ""
        self.exitcode: int | None = None
        self.final = False
        self.ends_at: float | None = None
        self.in_flight = 0
        self.lockstep = False
        self.same_clock = False
        self.window = 0
        self.epoch = 0
        self.number = 0
        self.uncredited = 0
        self.unreachable_since: float | None = None
        self.load = 0
        self.since_load = 0
        self.report: dict[str, Any] | None = None
        # Processes that were this engine: what tells of their ends may come before their last
        # messages, or after the first of the next one.
        self.ended: deque[int] = deque(maxlen=4)

    def __repr__(self) -> str:
        state = "alive" if self.alive else self.reason or "not ready yet"
        return f"<engine {self.index}, pid {self.pid} on {self.host}: {state}>"

    def dead_error(self, what: str) -> EngineDeadError:
        where = "" if self.pid is None else f" (pid {self.pid} on {self.host})"
        return EngineDeadError(
            f"{what}: engine {self.index}{where} is dead: {self.reason}",
            self.index,
            self.exitcode,
        )


class _NoConnection(EngineDeadError):
    """There is none to the engine: it has ended, or its host is gone, or makes another."""


class _Entry:
    """A request under way. It is kept after an abort until the engine has seen that."""

    __slots__ = ("begun", "created", "engine", "nbytes", "sent", "sink", "stale")

    def __init__(self, engine: EngineState, sink: Sink | None, created: int, nbytes: int) -> None:
        self.engine = engine
        self.sink = sink
        self.created = created
        self.sent = created
        self.nbytes = nbytes
        self.begun = False
        self.stale = 0  # aborts of earlier requests with its id that the engine has not seen yet


def types_of(
    spec: ClientSpec, request_type: type | None, output_type: type | None
) -> tuple[type, type]:
    """The engine's types: those given, else those that the spec names. Raises HandleMismatch."""

    def find(name: str) -> type:
        module, _, path = name.partition(":")
        try:
            found: Any = sys.modules.get(module) or importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError, ValueError) as error:
            raise HandleMismatch(
                f"the engine's type {name!r} can't be imported here ({error}): pass request_type= "
                "and output_type="
            ) from None
        assert isinstance(found, type)
        return found

    return request_type or find(spec.request_type), output_type or find(spec.output_type)


class FrontEndCore:
    """See the module. Not thread safe: whoever drives it locks."""

    def __init__(
        self,
        spec: ClientSpec,
        request_type: type | None,
        output_type: type | None,
        make_call_error: Callable[[Failure], BaseException] | None = None,
    ) -> None:
        if spec.protocol != PROTOCOL:
            raise HandleMismatch(
                f"the engines speak version {spec.protocol}, this fastipc {PROTOCOL}: "
                "use the same version on both sides"
            )
        self.spec = spec
        self.request_type, self.output_type = types_of(spec, request_type, output_type)
        codec_registry.allow(self.request_type, self.output_type)
        self.stages = Stages()
        self.engines: dict[int, EngineState] = {}
        """By index, in their order; never changed in place (see `_known`)."""
        self.requests: dict[str, _Entry] = {}
        self.calls: dict[int, tuple[EngineState, Callable[[Any, BaseException | None], None]]] = {}
        self.undoing: dict[tuple[str, EngineState], int] = {}
        self.nbytes = 0
        self.max_bytes = 1 << 30
        self.next_call = 0
        self.closed: BaseException | None = None
        self.welcome = False
        self.wave = 0
        self.stepping = False
        self.counts = {
            "sent": 0,
            "finished": 0,
            "failed": 0,
            "aborted": 0,
            "outputs": 0,
            "tensor_frames": 0,
            "output_messages": 0,
        }
        self.on_change: Callable[[], None] = lambda: None
        self._turn = 0
        self._encoder = MsgpackEncoder()
        self._outputs_type = Outputs[self.output_type]  # type: ignore[name-defined]
        self._decoder: MsgpackDecoder[Outputs[Any]] = MsgpackDecoder(self._outputs_type)
        # For a message that can't be decoded as a whole.
        self._parts: MsgpackDecoder[Outputs[msgspec.Raw]] = MsgpackDecoder(Outputs[msgspec.Raw])
        self._output: MsgpackDecoder[Any] = MsgpackDecoder(self.output_type)
        self._results: MsgpackDecoder[UtilityResult] = MsgpackDecoder(UtilityResult)
        self._ready_decoder = msgspec.msgpack.Decoder(Ready)
        self._ctx: zmq.Context[Any] = zmq.Context()
        self.sockets: dict[Any, Callable[[], bool]] = {}
        self._loads: Any = None
        self._uncoordinated = False
        try:
            self._open()
        except BaseException:
            self._ctx.destroy(linger=0)
            raise

    def _open(self) -> None:
        key = ""
        serve: Callable[[Any], None] | None = None
        host = wildcard = ""
        if self.spec.host:
            host, everywhere = addresses.advertised(self.spec.host, "")
            wildcard = ("::" if ":" in host else "0.0.0.0") if everywhere else host
            public, secret = curve_key_pair() if self.spec.secure else (b"", b"")
            key = public.decode()

            def serve(socket: Any) -> None:
                keep_alive(socket)
                if key:
                    socket.curve_server = True
                    socket.curve_publickey = public
                    socket.curve_secretkey = secret

        def bind(kind: int, **options: Any) -> tuple[Any, str]:
            path = endpoint_of_any_port(wildcard) if host else get_open_zmq_ipc_path()
            socket = open_channel(self._ctx, path, kind, True, configure=serve, **options)
            end = socket.getsockopt_string(zmq.LAST_ENDPOINT)
            if host:
                end = addresses.endpoint(host, addresses.split_endpoint(end)[1])
            return socket, end

        self._router, requests = bind(zmq.ROUTER, router_handover=True)
        self._pull, outputs = bind(zmq.PULL)
        self._control = open_channel(
            self._ctx,
            self.spec.control,
            zmq.DEALER,
            False,
            configure=as_curve_client(self.spec.control_key),
        )
        self.sockets[self._router] = self._pump_router
        self.sockets[self._pull] = self._pump_outputs
        self.sockets[self._control] = self._pump_control
        where = FrontEnd(self.spec.client_index, requests, outputs, key)
        self._control.send(encode_control(Hello(PROTOCOL, os.getpid(), front_end=where)))

    def close(self, error: BaseException | None = None) -> None:
        """Fail what is under way, tell the engines, and close the sockets. Idempotent."""
        if self.closed is not None:
            return
        self.closed = error or Closed("the engine client is closed")
        try:
            with contextlib.suppress(IPCError, zmq.ZMQError):
                by_engine: dict[int, list[str]] = {}
                for request_id, entry in self.requests.items():
                    if entry.engine.alive:
                        by_engine.setdefault(entry.engine.index, []).append(request_id)
                for engine, ids in by_engine.items():
                    self._send_abort(self.engines[engine], ids)
        finally:
            self._fail_all(lambda entry: self.closed)  # type: ignore[arg-type,return-value]
            # Aborts still go out, if the engine is there to take them.
            for socket in self.sockets:
                socket.close(linger=100)
            self.sockets.clear()
            self._ctx.term()

    def fail(self, error: BaseException) -> None:
        """Close because of an exception that nobody foresaw, in whatever drives this: nothing is
        received any more, so what is under way must not wait for it."""
        logger.error("an engine client has failed", exc_info=error)
        reason = Closed(
            f"the engine client has failed, and is closed: {type(error).__name__}: "
            f"{failures.text(error)}. Close it, and make another"
        )
        reason.__cause__ = error
        self.close(reason)
        self.on_change()

    def check_open(self) -> None:
        if self.closed is not None:
            if isinstance(self.closed, EngineDeadError):
                raise EngineDeadError(str(self.closed), self.closed.engine, self.closed.exitcode)
            raise type(self.closed)(str(self.closed)) from self.closed.__cause__

    # -- being ready -------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether every engine is.

        Raises EngineDeadError when one has ended for good.
        """
        self.check_open()
        for engine in self.engines.values():
            if engine.final and not engine.alive:
                raise engine.dead_error("the engines are not ready")
        return self.welcome and all(engine.alive for engine in self.engines.values())

    def not_ready(self, seconds: float) -> NotReady:
        """The error that names who is missing."""
        if not self.welcome:
            return NotReady(
                f"nobody answered at {self.spec.control} for {seconds:g} s: whoever launched the "
                "engines has ended, or can't be reached"
            )
        missing = tuple(e.index for e in self.engines.values() if not e.alive)
        names = ", ".join(str(index) for index in missing)
        return NotReady(
            f"of {len(self.engines)} engines {names} {'was' if len(missing) == 1 else 'were'} "
            f"not ready within {seconds:g} s",
            missing,
        )

    # -- sending -----------------------------------------------------------------------------------

    def _send(self, engine: EngineState, kind: bytes, frames: Iterable[Any]) -> PendingSend:
        message = [engine.identity, kind, *frames]
        try:
            send = send_frames(self._router, message, NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if engine.unreachable_since is None:
                engine.unreachable_since = time.monotonic()
            kind_of_error = EngineDeadError if error.errno == zmq.EAGAIN else _NoConnection
            raise kind_of_error(
                f"engine {engine.index} can't be reached at the moment", engine.index
            ) from None
        engine.unreachable_since = None
        return send

    def _send_or_lose(
        self, engine: EngineState, kind: bytes, frames: Iterable[Any]
    ) -> PendingSend | None:
        """What is sent where the connection has just gone is as lost as what was on its way there,
        and fails with it: when it is told how the engine ended, or when the connection is made
        again, or when neither comes."""
        try:
            return self._send(engine, kind, frames)
        except _NoConnection:
            return None

    def choose(self, engine: int | None) -> EngineState:
        """The engine of that index, or else the one with the least to do."""
        self.check_open()
        if engine is not None:
            found = self.engines.get(engine)
            if found is None:
                raise ValueError(f"there is no engine {engine}, only {list(self.engines)}")
            if not found.alive:
                raise found.dead_error("the request was not sent")
            return found
        if len(self.engines) == 1:
            (best,) = self.engines.values()
            if best.alive:
                return best
            raise best.dead_error("the request was not sent")
        living = [e for e in self.engines.values() if e.alive]
        if not living:
            reasons = "; ".join(f"engine {e.index}: {e.reason}" for e in self.engines.values())
            raise EngineDeadError(f"no engine is alive: {reasons}")
        # Equals take turns.
        self._turn += 1
        count = len(living)
        order = [living[(self._turn + i) % count] for i in range(count)]
        return min(order, key=lambda e: max(e.load + e.since_load, e.in_flight))

    def add(
        self, request: Any, sink: Sink, engine: int | None, copy: bool, created: int
    ) -> tuple[EngineState, PendingSend | None]:
        """Send a request on its way.

        When a signal handler interrupts it, call `undo`.
        """
        if type(request) is not self.request_type:
            raise TypeError(
                f"a request is a {self.request_type.__qualname__}, not {type(request).__qualname__}"
            )
        request_id: Any = request.request_id  # type: ignore[attr-defined]
        if not isinstance(request_id, str) or not request_id:
            raise TypeError(f"request_id must be a text that is not empty, not {request_id!r}")
        if request_id in self.requests:
            raise ValueError(f"request {request_id!r} is under way already")
        if len(self.requests) >= self.spec.max_in_flight:
            raise TooManyRequests(
                f"{len(self.requests)} requests are under way, which is the limit "
                "(max_in_flight): try again when one has finished",
                len(self.requests),
                self.spec.max_in_flight,
            )
        chosen = self.choose(engine)
        frames = self._encoder.encode(Request(self.wave, request))
        nbytes = MESSAGE_COST + len(frames[0])
        for frame in frames[1:]:
            nbytes += memoryview(frame).nbytes
        if self.requests and self.nbytes + nbytes > self.max_bytes:
            raise TooManyRequests(
                f"requests of {self.nbytes} bytes are under way, and {nbytes} more would pass the "
                f"limit of {self.max_bytes}: try again when one has finished",
                self.nbytes,
                self.max_bytes,
            )
        sent: PendingSend | None = None
        if copy and len(frames) > 1:
            frames[1:] = [_copied(frame, self._router.copy_threshold) for frame in frames[1:]]
        entry = _Entry(chosen, sink, created, nbytes)
        entry.stale = self.undoing.get((request_id, chosen), 0)
        self.requests[request_id] = entry  # before it is sent: `undo` must find it
        try:
            # (without a copy the caller waits for the sending, and so must know that there is none)
            sent = (self._send_or_lose if copy else self._send)(chosen, ADD, frames)
        except (EngineDeadError, zmq.ZMQError):
            del self.requests[request_id]
            raise
        entry.sent = time.monotonic_ns()
        self.nbytes += nbytes
        chosen.in_flight += 1
        chosen.since_load += 1
        self.counts["sent"] += 1
        self.counts["tensor_frames"] += len(frames) - 1
        if chosen.lockstep and not self.stepping and len(self.engines) > 1:
            self._start_wave(chosen)
        return chosen, None if copy else sent

    def undo(self, request_id: str, sink: Sink) -> None:
        """An `add` with this sink was interrupted: whatever has come of it, there is no such
        request, and the id can be used again at once."""
        entry = self.requests.get(request_id)
        if entry is None or entry.sink is not sink:
            return
        del self.requests[request_id]
        self.nbytes = sum(e.nbytes for e in self.requests.values())
        engine = entry.engine
        engine.in_flight = sum(e.engine is engine for e in self.requests.values())
        with contextlib.suppress(EngineDeadError):
            self._send_abort(engine, [request_id])
            # What the engine says of the id until it has seen this is of no other request.
            self.undoing[request_id, engine] = self.undoing.get((request_id, engine), 0) + 1

    def _start_wave(self, chosen: EngineState) -> None:
        """The engines rest, and step together: the others begin when they are told."""
        self.stepping = True
        frame = msgspec.msgpack.encode(StartWave(self.wave))
        for engine in self.engines.values():
            if engine.alive and engine is not chosen:
                with contextlib.suppress(EngineDeadError):
                    self._send(engine, START_DP_WAVE, [frame])

    def abort(self, request_ids: Iterable[str], of: Sink | None = None) -> list[Sink]:
        """Give requests up. Unknown ones are ignored, and those of another sink than `of`, which
        have an id that is used again. Returns the sinks that get nothing more."""
        by_engine: dict[int, list[str]] = {}
        sinks = []
        for request_id in request_ids:
            entry = self.requests.get(request_id)
            if entry is not None and entry.sink is not None and of in (None, entry.sink):
                sinks.append(entry.sink)
                entry.sink = None
                self.counts["aborted"] += 1
                by_engine.setdefault(entry.engine.index, []).append(request_id)
        try:
            for index, ids in by_engine.items():
                with contextlib.suppress(EngineDeadError):
                    self._send_abort(self.engines[index], ids)
        except BaseException:
            for sink in sinks:
                sink.end(None)
            raise
        return sinks

    def _send_abort(self, engine: EngineState, ids: list[str]) -> None:
        frame = msgspec.msgpack.encode(Aborts(ids))
        try:
            self._send(engine, ABORT, [frame])
        except (EngineDeadError, zmq.ZMQError):
            raise
        except BaseException:
            # A signal handler's: perhaps it was not sent, and it may come twice.
            self._send(engine, ABORT, [frame])
            raise

    def call(
        self,
        engine: EngineState,
        method: str,
        args: Any,
        kwargs: Any,
        done: Callable[[Any, BaseException | None], None],
    ) -> int:
        """Call a utility method of the core; `done(result, error)` is called once."""
        if not isinstance(method, str):
            raise TypeError(f"a utility method is called by its name, a str, not by {method!r}")
        self.check_open()
        if not engine.alive:
            raise engine.dead_error(f"{method}() was not called")
        self.next_call += 1
        frames = self._encoder.encode(UtilityResult([list(args), dict(kwargs)]))
        call = Call(self.next_call, method, msgspec.Raw(frames[0]))
        frames[0] = msgspec.msgpack.encode(call)
        frames[1:] = [_copied(frame, self._router.copy_threshold) for frame in frames[1:]]
        self._send_or_lose(engine, UTILITY, frames)
        self.calls[self.next_call] = (engine, done)
        return self.next_call

    def has_news(self) -> bool:
        """Whether something has arrived on the socket that sends: sending takes up the signal that
        its descriptor would give."""
        return bool(self._router.get(EVENTS) & POLLIN)

    # -- receiving ---------------------------------------------------------------------------------

    def pump(self) -> bool:
        """Take what has arrived on any socket. Returns whether there may be more already.

        (The descriptor of a ZMQ socket tells only that something has changed: so each reader goes
        on until there is nothing, or says that it hasn't.)
        """
        more = False
        for reader in list(self.sockets.values()):
            if self.closed is not None:
                return False
            more |= reader()
        return more

    def _pump_outputs(self) -> bool:
        receive, get = self._pull.recv, self._pull.get
        for taken in range(_AT_ONCE):
            if taken == 1 and not get(EVENTS) & POLLIN:
                return False
            try:
                frames = [receive(NOBLOCK)]
            except zmq.Again:
                return False
            while get(RCVMORE):
                frames.append(receive(copy=False))
            try:
                if frames[0] == ENGINE_CORE_DEAD:
                    dead = msgspec.msgpack.decode(frames[1].buffer, type=Dead)
                    self._last_words(dead)
                else:
                    self._take(frames)
            except (DecodeError, msgspec.MsgspecError, IndexError) as error:
                # The number that is missing now makes the next message show the gap.
                logger.error("outputs of an engine can't be decoded: %s", error)
            if self.closed is not None:
                return False
        return True

    def _take(self, frames: list[Any]) -> None:
        unreadable: dict[str | None, Exception] = {}
        try:
            message = self._decoder.decode(frames)
        except Exception:  # of the types' own methods, too
            message, unreadable = self._take_apart(frames)
        engine = self.engines.get(message.engine)
        if engine is None or message.epoch < engine.epoch:
            return  # of a connection that is no more
        if message.epoch > engine.epoch:
            # Ready comes over the other connection, and may come later.
            self._new_epoch(engine, message.epoch)
        if message.number != engine.number + 1:
            self._gap(engine, message.number)
        engine.number = message.number
        decoded = time.monotonic_ns()
        requests = self.requests
        for stamps in message.stamps:
            if stamps[0] < len(message.outputs):
                entry = requests.get(message.outputs[stamps[0]].request_id)
                if entry is not None and not entry.begun and not entry.stale:
                    entry.begun = True
                    self.stages.first(
                        engine.same_clock, entry.created, entry.sent, stamps, message.sent, decoded
                    )
        full = None
        self.counts["outputs"] += len(message.outputs)
        self.counts["output_messages"] += 1
        for output in message.outputs:
            entry = requests.get(output.request_id)
            if entry is None or entry.engine is not engine or entry.stale:
                continue
            sink = entry.sink
            if sink is not None and not sink.put(output):
                full = full or []
                full.append((output.request_id, sink))
            if output.finished:
                self._remove(output.request_id, entry)
                if sink is not None:
                    self.counts["finished"] += 1
                    self.stages.finished(decoded - entry.created)
                    sink.end(None)
        if unreadable:
            self._give_up(engine, unreadable)
        for failure in message.failures:
            if not failure.request_id:
                # One that it could not decode, nor tell which it was.
                self._lose_all(engine, partial(_failure_error, failure, engine))
                continue
            entry = requests.get(failure.request_id)
            if entry is not None and entry.engine is engine and not entry.stale:
                self._remove(failure.request_id, entry)
                if entry.sink is not None:
                    self.counts["failed"] += 1
                    entry.sink.end(_failure_error(failure, engine))
        for request_id in message.aborted:
            entry = requests.get(request_id)
            if self.undoing and (request_id, engine) in self.undoing:
                self._has_undone(request_id, engine, entry)
            elif entry is not None and entry.sink is None and entry.engine is engine:
                self._remove(request_id, entry)
        for result in message.results:
            waiting = self.calls.pop(result.call_id, None)
            if waiting is not None:
                waiting[1](*self._result(result, engine, frames))
        if message.report is not None:
            engine.report = message.report
        if full:
            self._too_slow(full)
        self._give_credit(engine, frames)

    def _take_apart(self, frames: list[Any]) -> tuple[Outputs[Any], dict[str | None, Exception]]:
        """What can be decoded of a message with an output that can't, and of which requests there
        are such (None: it can't be made out). What follows for the same request is left out."""
        message: Outputs[Any] = self._parts.decode(frames)
        unreadable: dict[str | None, Exception] = {}
        outputs: list[Any] = []
        moved: dict[int, int] = {}
        for index, raw in enumerate(message.outputs):
            try:
                output = self._output.decode([raw, *frames[1:]])
            except Exception as error:
                unreadable.setdefault(request_id_in(raw, self.output_type), error)
                continue
            if output.request_id not in unreadable:
                moved[index] = len(outputs)
                outputs.append(output)
        message.stamps = [(moved[s[0]], *s[1:]) for s in message.stamps if s[0] in moved]
        message.outputs = outputs
        return message, unreadable

    def _give_up(self, engine: EngineState, unreadable: dict[str | None, Exception]) -> None:
        """Fail the requests of which an output can't be decoded: the engine has another idea of the
        type, or does not keep to it."""
        for request_id, why in unreadable.items():

            def failed(id: str = request_id or "", why: Exception = why) -> RequestFailed:
                said = failures.text(why)
                message = f"engine {engine.index}: an output can't be decoded here: {said}"
                error = RequestFailed(message, id, type(why).__name__)
                error.__cause__ = why
                return error

            if request_id is None:
                logger.error("%s, and it can't be told of which request it is", failed())
                self._lose_all(engine, failed)
                continue
            entry = self.requests.get(request_id)
            if entry is None or entry.engine is not engine or entry.stale:
                continue
            for sink in self.abort([request_id]):
                self.counts["failed"] += 1
                sink.end(failed())

    def _result(
        self, result: Result, engine: EngineState, frames: list[Any]
    ) -> tuple[Any, BaseException | None]:
        """What a call returned, and why it failed."""
        if result.failure is not None:
            return None, _failure_error(result.failure, engine)
        try:
            return self._results.decode([result.result, *frames[1:]]).result, None
        except Exception as error:
            failed = RequestFailed(
                f"engine {engine.index}: the call returned, but its result can't be decoded here: "
                f"{failures.text(error)}",
                "",
                type(error).__name__,
            )
            failed.__cause__ = error
            return None, failed

    def _has_undone(self, request_id: str, engine: EngineState, entry: _Entry | None) -> None:
        """The engine has seen the abort of one that was undone."""
        self.undoing[request_id, engine] -= 1
        if not self.undoing[request_id, engine]:
            del self.undoing[request_id, engine]
        if entry is not None and entry.engine is engine:
            entry.stale -= 1

    def _remove(self, request_id: str, entry: _Entry) -> None:
        del self.requests[request_id]
        self.nbytes -= entry.nbytes
        entry.engine.in_flight -= 1
        entry.engine.since_load -= 1

    def _too_slow(self, full: list[tuple[str, Sink]]) -> None:
        """Abort requests whose outputs nobody takes."""
        for request_id, sink in full:
            if self.abort([request_id]):
                self.counts["failed"] += 1
                sink.end(
                    SlowConsumer(
                        f"nobody took the outputs of request {request_id!r}, and more than the "
                        "limit gathered (max_buffered): it was aborted",
                        request_id,
                        "SlowConsumer",
                    )
                )

    def _give_credit(self, engine: EngineState, frames: list[Any]) -> None:
        engine.uncredited += MESSAGE_COST * len(frames) + sum(map(len, frames))
        # Seldom enough to cost nothing, and long before the engine has to wait.
        if engine.uncredited > engine.window // 4:
            engine.uncredited = 0
            credit = Credit(engine.epoch, engine.number)
            with contextlib.suppress(EngineDeadError):
                self._send(engine, CREDIT, [msgspec.msgpack.encode(credit)])

    def _pump_router(self) -> bool:
        for _ in range(_AT_ONCE):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            try:
                ready = self._ready_decoder.decode(frames[1])
                if frames[0] != identity(ready.engine):
                    raise DecodeError(f"it says it is engine {ready.engine}, under another's name")
            except (DecodeError, msgspec.MsgspecError, IndexError, OverflowError) as error:
                # (an index that is none doesn't fit into an identity)
                logger.warning("a message that is not of an engine: %s", error)
                continue
            self._take_ready(ready)
        return True

    def _known(self, index: int) -> EngineState:
        """The engine of that index, which may be new. They are kept in the order of the indices: in
        what order they happen to say that they are ready tells nobody anything."""
        engine = self.engines.get(index)
        if engine is None:
            engine = EngineState(index)
            self.engines = dict(sorted([*self.engines.items(), (index, engine)]))
        return engine

    def _take_ready(self, ready: Ready) -> None:
        engine = self._known(ready.engine)
        if ready.pid in engine.ended:
            return
        if ready.protocol != PROTOCOL:
            engine.reason = f"it speaks version {ready.protocol}, this front end {PROTOCOL}"
            engine.final = True
            self.on_change()
            return
        restarted = engine.pid is not None and (engine.pid, engine.host) != (ready.pid, ready.host)
        if restarted:
            # Another process, with epochs of its own.
            engine.reason = engine.reason or "it ended, and another was started in its place"
            self._fail_engine(engine)
            engine.epoch = engine.number = 0
        if ready.epoch != engine.epoch:
            self._new_epoch(engine, ready.epoch)
        engine.pid, engine.host = ready.pid, ready.host
        engine.info = ready.info
        engine.window = ready.window
        engine.lockstep = ready.lockstep
        engine.same_clock = ready.boot_id == boot_id()
        engine.alive = True
        engine.final = False
        engine.exitcode = engine.ends_at = None
        engine.reason = ""
        engine.unreachable_since = None
        self.on_change()

    def _new_epoch(self, engine: EngineState, epoch: int) -> None:
        """The connection to an engine was made again: what was sent before may be lost."""
        lost = engine.epoch != 0
        engine.epoch = epoch
        engine.number = 0
        engine.uncredited = 0
        if lost:
            self._connection_lost(engine)

    def _gap(self, engine: EngineState, number: int) -> None:
        logger.error(
            "engine %d: outputs %d to %d are missing", engine.index, engine.number + 1, number - 1
        )
        self._connection_lost(engine)

    def _connection_lost(self, engine: EngineState) -> None:
        self._abort_all(engine)
        message = f"the connection to engine {engine.index} was lost and made again meanwhile"
        self._fail_engine_with(
            engine, lambda: EngineDeadError(f"{message}: send it again", engine.index)
        )

    def _lose_all(self, engine: EngineState, error: Callable[[], BaseException]) -> None:
        """An output of the engine is lost, or a request to it, and nobody knows which: all requests
        fail. The connection is as it was."""
        ids = self._abort_all(engine)
        self._fail_requests(engine, error)
        # What the engine says of these ids until it has seen this is of no later request.
        self.undoing.update(((request_id, engine), 1) for request_id in ids)

    def _abort_all(self, engine: EngineState) -> list[str]:
        """Have the engine drop all requests. Returns the ids that it is told, if that goes."""
        ids = [i for i, entry in self.requests.items() if entry.engine is engine]
        try:
            if ids:
                self._send_abort(engine, ids)
        except EngineDeadError:
            return []
        return ids

    # -- who is there ------------------------------------------------------------------------------

    def _pump_control(self) -> bool:
        for _ in range(_AT_ONCE):
            try:
                message = decode_control(self._control.recv(zmq.NOBLOCK))
            except zmq.Again:
                return False
            except msgspec.MsgspecError as error:
                logger.warning("bad control message: %s", error)
                continue
            if isinstance(message, Welcome):
                if message.refused:
                    self.close(HandleMismatch(message.refused))
                    self.on_change()
                    return False
                self.welcome = True
                for index in message.engines:
                    self._known(index)
                if message.coordinator is not None and self._loads is None:
                    self._hear_loads(message.coordinator)
            elif isinstance(message, Joined):
                engine = self._known(message.engine)
                engine.final = False
            elif isinstance(message, Exited):
                self._take_what_was_sent()  # what it said before its end counts
                engine = self._known(message.engine)
                engine.ended.append(message.pid)
                if engine.alive and engine.pid != message.pid:
                    continue  # another has been started in its place, and is ready
                engine.final = message.final
                self._engine_ended(message.engine, message.reason, message.exitcode)
            elif isinstance(message, Ended):
                reason = message.reason or "whoever launched it has ended it"
                for engine in self.engines.values():
                    engine.final = True
                    if engine.alive or engine.ends_at is not None or not engine.reason:
                        self._engine_ended(engine.index, reason, None)
            elif isinstance(message, Uncoordinated):
                # What it said last would count for ever; some of it may be on the way still.
                self._uncoordinated = True
                for engine in self.engines.values():
                    engine.load = engine.since_load = 0
            self.on_change()
        return True

    def _take_what_was_sent(self) -> None:
        """Take all outputs that are on the way. No engine has more there than its window; what
        others send meanwhile is not waited for, as that may have no end."""
        most = sum(engine.window for engine in self.engines.values()) // MESSAGE_COST
        for _ in range(most // _AT_ONCE + 1):
            if not self._pump_outputs():
                return

    def _last_words(self, dead: Dead) -> None:
        """An engine says that it ends. With what exit code, its parent is about to say."""
        engine = self.engines.get(dead.engine)
        if engine is not None and engine.alive and engine.pid == dead.pid:
            engine.alive = False
            engine.reason = dead.reason
            engine.ends_at = time.monotonic() + EXIT_SECONDS
            self.on_change()

    def _engine_ended(self, index: int, reason: str, exitcode: int | None) -> None:
        engine = self.engines.get(index)
        if engine is None:
            return
        engine.reason = f"{reason}: {engine.reason}" if engine.ends_at is not None else reason
        engine.exitcode = exitcode
        engine.ends_at = None
        engine.alive = False
        self._fail_engine(engine)
        self.on_change()

    def _fail_engine(self, engine: EngineState) -> None:
        self._fail_engine_with(engine, lambda: engine.dead_error("the request is lost"))

    def _fail_engine_with(self, engine: EngineState, error: Callable[[], BaseException]) -> None:
        self._fail_requests(engine, error)
        self._fail_calls(engine, error)

    def _fail_requests(self, engine: EngineState, error: Callable[[], BaseException]) -> None:
        self.undoing = {at: count for at, count in self.undoing.items() if at[1] is not engine}
        for request_id, entry in list(self.requests.items()):
            if entry.engine is engine:
                self._remove(request_id, entry)
                if entry.sink is not None:
                    self.counts["failed"] += 1
                    entry.sink.end(error())

    def _fail_calls(self, engine: EngineState, error: Callable[[], BaseException]) -> None:
        for call_id, (of, done) in list(self.calls.items()):
            if of is engine:
                del self.calls[call_id]
                done(None, error())

    def _fail_all(self, error: Callable[[Any], BaseException]) -> None:
        for entry in self.requests.values():
            if entry.sink is not None:
                self.counts["failed"] += 1
                entry.sink.end(error(entry))
        self.requests.clear()
        self.nbytes = 0
        for engine in self.engines.values():
            engine.in_flight = engine.since_load = 0
        for _, done in self.calls.values():
            done(None, error(None))
        self.calls.clear()

    def tick(self) -> None:
        """Once a second: whether engines that have something of ours can be reached."""
        if self.closed is not None:
            return
        now = time.monotonic()
        for engine in self.engines.values():
            if engine.ends_at is not None and now >= engine.ends_at:
                self._engine_ended(engine.index, "it has ended", None)
        waited_for = {entry.engine.index for entry in self.requests.values()}
        waited_for |= {engine.index for engine, _ in self.calls.values()}
        for index in waited_for:
            engine = self.engines[index]
            with contextlib.suppress(EngineDeadError):
                self._send(engine, PING, ())
            since = engine.unreachable_since
            if since is not None and now - since > UNREACHABLE_SECONDS:
                self._engine_ended(
                    index, f"it could not be reached for {UNREACHABLE_SECONDS:g} s", None
                )

    def _hear_loads(self, where: CoordinatorAddress) -> None:
        self._loads = open_channel(
            self._ctx, where.front_ends, zmq.XSUB, False, configure=as_curve_client(where.key)
        )
        self._loads.send(b"\x01")
        decode = msgspec.msgpack.Decoder(Loads).decode

        def pump() -> bool:
            for _ in range(_AT_ONCE):
                try:
                    loads = decode(self._loads.recv(zmq.NOBLOCK))
                except zmq.Again:
                    return False
                except msgspec.MsgspecError as error:
                    logger.warning("bad message of loads: %s", error)
                    continue
                if self._uncoordinated:
                    continue
                self.wave, self.stepping = loads.wave, loads.stepping
                for index, waiting, running in loads.loads:
                    engine = self.engines.get(index)
                    if engine is not None:
                        engine.load = _WAITING_COST * waiting + running
                        engine.since_load = 0
            return True

        self.sockets[self._loads] = pump
        self.on_change()

    # -- numbers -----------------------------------------------------------------------------------

    def histograms(self) -> dict[str, Any]:
        """See EngineClient.histograms."""
        return {
            "stages": {name: Histogram.merged([h]) for name, h in self.stages.histograms.items()},
            "engines": {
                index: {
                    name: Histogram.from_builtins(value)
                    for name, value in (engine.report or {}).items()
                }
                for index, engine in self.engines.items()
            },
        }

    def stats(self) -> dict[str, Any]:
        """See EngineClient.stats."""
        stages = {name: h.summary() for name, h in self.stages.histograms.items()}
        engines = {
            index: {
                "alive": engine.alive,
                "pid": engine.pid,
                "host": engine.host,
                "reason": engine.reason,
                "in_flight": engine.in_flight,
                "histograms": {
                    name: Histogram.from_builtins(value).summary()
                    for name, value in (engine.report or {}).items()
                },
            }
            for index, engine in self.engines.items()
        }
        return {
            "in_flight": len(self.requests),
            "in_flight_bytes": self.nbytes,
            "calls": len(self.calls),
            **self.counts,
            "stages": stages,
            "engines": engines,
        }


def _copied(frame: Any, threshold: int) -> Any:
    """A frame that ZMQ would borrow, copied (it copies smaller ones itself)."""
    view = memoryview(frame)
    return bytes(view) if view.nbytes >= threshold else frame


def _failure_error(failure: Failure, engine: EngineState) -> RequestFailed:
    kind = SlowConsumer if failure.kind == "SlowConsumer" else RequestFailed
    error = kind(
        f"engine {engine.index}: {failure.kind}: {failure.message}",
        failure.request_id,
        failure.kind,
    )
    if failure.traceback:
        error.__cause__ = RemoteError(failure.kind, failure.message, failure.traceback)
    return error
