"""An engine's process: the busy loop between the input and the output thread."""

from __future__ import annotations

import gc
import logging
import operator
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from .. import failures
from ..codec import registry as codec_registry
from ..errors import ChildDied
from ..histogram import Histogram
from .core import EngineCore, check_core_class, utility
from .intake import Intake
from .outbox import Batch, Outbox, Taken
from .protocol import Failure, Report, Wave

__all__ = ["run_engine"]

logger = logging.getLogger("fastipc")

WINDOW_BYTES = 32 << 20
"""Outputs on the way to one front end, and as many again that wait for it: what a front end takes
in a few hundredths of a second, and a stopped one can cost."""

REPORT_SECONDS = 1.0
"""How often histograms travel with the outputs."""

_SWITCH_SECONDS = 0.0005
"""For how long a thread of the engine may keep the others from the interpreter: the default of 5 ms
is what a request would wait for a step that computes in Python."""


LINGER_MS = 1000
"""For how long an engine that ends waits for front ends to take its last outputs."""

orphaned = threading.Event()
"""Whether the process that launched this engine has ended."""


class _Active:
    """A request under way."""

    __slots__ = ("begun", "client", "received", "scheduled")

    def __init__(self, client: int, received: int, scheduled: int) -> None:
        self.client = client
        self.received = received
        self.scheduled = scheduled
        self.begun = False


def run_engine(
    core_class: type[EngineCore],
    config: Any = None,
    *,
    index: int = 0,
    control: str,
    control_key: str = "",
    ready: Any = None,
    window: int = WINDOW_BYTES,
) -> None:
    """Run one engine in this process until it is told to end, or fails.

    ``launch`` does this in processes of its own; call it yourself to run an engine elsewhere, on
    another host for example, for front ends of a group that was launched with ``external=True``.

    Args:
        core_class: a subclass of EngineCore.
        config: handed to it.
        index: of the engine.
        control, control_key: `ClientSpec.control`, `.control_key` of the group.
        ready: called without arguments when the core is there.
        window: bytes of outputs on the way to one front end.

    Raises what the core raised, after front ends were told.
    """
    check_core_class(core_class)
    codec_registry.allow(core_class.request_type, core_class.output_type)
    core = core_class(config, index=index)
    engine = _Engine(core, index, control, control_key, window)
    if ready is not None:
        ready()
    engine.run()


def _info(core: EngineCore) -> Any:
    """What the core tells front ends, which get it with the first word on each connection."""
    info = core.info()
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(info))
    except Exception as error:
        raise TypeError(
            f"{type(core).__name__}.info() must return plain values, which msgpack has: "
            f"{failures.text(error)}"
        ) from error
    return info


class _Engine:
    def __init__(
        self, core: EngineCore, index: int, control: str, control_key: str, window: int
    ) -> None:
        self.core = core
        self.index = index
        self.inbox: SimpleQueue[tuple[str, int, Any]] = SimpleQueue()
        self.active: dict[str, _Active] = {}
        self.stopping = False
        self.reason = ""
        self.wave = 0
        self.stepping = False
        self.coordinated = False
        self.lockstep = False
        self.last_load: tuple[int, int, int, bool] | None = None
        self.next_report = 0.0
        self.histograms = {name: Histogram() for name in ("step", "engine_queue")}
        core._on_fail = self.end_with
        if core._failure is not None:
            self.end_with(core._failure)
        self.outbox = Outbox(index, window, self.tell, core.copy_outputs)
        try:
            self.intake = Intake(
                index,
                control,
                control_key,
                core.request_type,
                self.inbox,
                self.outbox,
                window,
                core.lockstep,
                _info(core),
            )
        except BaseException:
            core.close()
            raise

    def ended(self) -> bool:
        """Whether the loop is to end."""
        return self.stopping

    def tell(self, what: str, client: int, number: int) -> None:
        """Called by the output thread."""
        self.inbox.put((what, client, number))

    def end_with(self, error: BaseException) -> None:
        """Called by any thread."""
        self.inbox.put(("fail", 0, error))

    def run(self) -> None:
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, _SWITCH_SECONDS))
        # What start-up made stays; collections need not look at it again.
        gc.collect()
        gc.freeze()
        self.outbox.start()
        self.intake.start()
        reason = "it ended"
        try:
            self.loop()
            reason = self.reason or reason
        except SystemExit:
            reason = "it was asked to end"
            raise
        except ChildDied as error:
            # A worker: that it died says it all, and where in a step that was noticed nothing.
            reason = failures.text(error)
            raise
        except BaseException as error:
            reason = failures.lines(error).strip()
            raise
        finally:
            sys.setswitchinterval(before)
            try:
                self.core.close()
            finally:
                # The input thread first: it hands sockets to the other one.
                self.intake.stop()
                self.outbox.dead(reason)
                # What front ends have not got yet. Who launched this engine and ended is most
                # likely the one that won't come for it.
                linger = 0 if orphaned.is_set() else LINGER_MS
                self.outbox.stop(linger)
                self.outbox.join()
                self.intake.context.destroy(linger=linger)
                gc.unfreeze()

    def loop(self) -> None:
        core, inbox, handle = self.core, self.inbox, self.handle
        now = time.monotonic_ns
        while not self.ended():
            working = core.has_work()
            if not working and not self.stepping:
                self.publish_load(False)
                handle(*inbox.get())
            while True:
                try:
                    item = inbox.get_nowait()
                except Empty:
                    break
                handle(*item)
            if self.ended():
                break
            if core.has_work():
                began = now()
                outputs = core.step()
                if not isinstance(outputs, list | tuple):
                    outputs = self.take(outputs)
                ended = now()
                self.histograms["step"].record(ended - began)
                self.deliver(outputs, began, ended)
                self.publish_load(True)
            elif self.stepping:
                self.publish_load(False)
                core.dummy_step()

    def take(self, outputs: Any) -> list[Taken]:
        """Of a generator: here it does its work, and each is what it is when yielded."""
        try:
            made = iter(outputs)
        except TypeError:
            raise TypeError(
                f"{type(self.core).__name__}.step() must return outputs in a list, or yield them: "
                f"it returned a {type(outputs).__name__}"
            ) from None
        taken = []
        for output in made:
            try:
                taken.append(self.outbox.take(output))
            except AttributeError:
                raise self.not_an_output(output) from None
        return taken

    def not_an_output(self, made: Any) -> TypeError:
        """Whose it is nobody knows, and so it can't fail its request alone."""
        step = f"{type(self.core).__name__}.step()"
        if hasattr(made, "request_id") and hasattr(made, "finished"):
            return TypeError(
                f"{step} made an output whose request_id is a {type(made.request_id).__name__}, "
                "not a str"
            )
        return TypeError(
            f"{step} made a {type(made).__name__} where an output should be, a "
            f"{self.core.output_type.__name__}"
        )

    def deliver(self, outputs: Any, began: int, ended: int) -> None:
        """Hand a step's outputs to the output thread, sorted by front end."""
        active = self.active
        batches: dict[int, list[Batch]] = {}
        client, batch = -1, Batch()
        failed: set[str] = set()  # an output of theirs can't be encoded
        for output in outputs:
            try:
                request = active.get(output.request_id)
            except (AttributeError, TypeError):
                raise self.not_an_output(output) from None
            if request is None:
                if not isinstance(output.request_id, str):
                    raise self.not_an_output(output)
                continue  # aborted meanwhile
            if request.client != client:
                client = request.client
                if client not in batches:
                    batches[client] = [Batch()]
                batch = batches[client][-1]
            value = output
            if type(output) is Taken:
                value = output.encoded
                if output.frames:
                    if batch.frames:
                        batch = Batch()
                        batches[client].append(batch)
                    batch.frames = output.frames
                if output.failure is not None and output.request_id not in failed:
                    batch.failures.append(output.failure)
                    failed.add(output.request_id)
            if failed and output.request_id in failed:  # nothing more of it counts but its end
                if output.finished:
                    del active[output.request_id]
                continue
            if not request.begun:
                request.begun = True
                batch.stamps.append(
                    (len(batch.outputs), request.received, request.scheduled, began, ended)
                )
            batch.outputs.append(value)
            if output.finished:
                del active[output.request_id]
        if batches:
            clock = ended * 1e-9
            if clock >= self.next_report:
                self.next_report = clock + REPORT_SECONDS
                report = self.report()
                for of_client in batches.values():
                    of_client[-1].report = report
            # With nothing else to do the output thread need not be woken.
            idle = self.inbox.empty() and not self.core.has_work()
            for client, of_client in batches.items():
                for batch in of_client:
                    failed.update(self.outbox.put(client, batch, now=idle))
            if failed:
                self.give_up(failed)

    def give_up(self, request_ids: Iterable[str]) -> None:
        """Outputs of these can't be encoded, and so they fail: the core forgets those that it has
        not finished."""
        known = [request_id for request_id in request_ids if request_id in self.active]
        for request_id in known:
            del self.active[request_id]
        if known:
            self.core.abort(known)

    def report(self) -> dict[str, Any]:
        stats = self.core.stats()
        if not isinstance(stats, Mapping) or not all(isinstance(name, str) for name in stats):
            raise TypeError(
                f"{type(self.core).__name__}.stats() must return a dict of histograms by name, "
                f"which is a str: not {stats!r:.200}"
            )
        return {
            name: histogram.to_builtins()
            for name, histogram in {**stats, **self.histograms}.items()
            if isinstance(histogram, Histogram)
        }

    # -- what the other threads bring --------------------------------------------------------------

    def handle(self, what: str, client: int, item: Any) -> None:
        if what == "add":
            self.add(client, *item)
        elif what == "abort":
            self.abort(client, item)
        elif what == "call":
            self.call(client, *item)
        elif what == "gone":
            self.abort_all(client)
        elif what == "wave":
            self.take_wave(item)
        elif what == "start_wave":
            self.start_wave(item)
        elif what == "stall":
            logger.warning(
                "engine %d: front end %d doesn't take its outputs; they are kept for now",
                self.index,
                client,
            )
            self.outbox.stalled(client, item, bool(self.core.pause(self.of_client(client))))
        elif what == "resume":
            self.core.resume(self.of_client(client))
        elif what == "overrun":
            self.overrun(client)
        elif what == "refuse":
            request_id, error = item
            self.fail(client, request_id, error)
        elif what == "refuse_call":
            call_id, error = item
            batch = Batch()
            why = failures.text(error)
            batch.fail_call(call_id, error, f"the call's arguments can't be decoded: {why}")
            self.outbox.put(client, batch)
        elif what == "joined":
            self.coordinated = True
            # Without a coordinator nobody would end a wave.
            self.lockstep = self.core.lockstep
            self.last_load = None
        elif what == "stop":
            self.stopping = True
            self.reason = item
        elif what == "fail":
            raise item
        elif what == "failed":
            raise RuntimeError("the engine's output thread failed") from self.outbox.failed
        else:  # pragma: no cover
            raise AssertionError(what)

    def of_client(self, client: int) -> list[str]:
        return [rid for rid, request in self.active.items() if request.client == client]

    def add(self, client: int, received: int, wave: int, request: Any) -> None:
        request_id = request.request_id
        there = self.active.get(request_id)
        if there is not None:
            if there.client != client:
                self.fail(
                    client,
                    request_id,
                    kind="ValueError",
                    message=f"request id {request_id!r} is another front end's that is under way: "
                    "ids must be unique among all front ends",
                )
            return  # sent again: it is under way already
        scheduled = time.monotonic_ns()
        self.histograms["engine_queue"].record(scheduled - received)
        if self.lockstep and not self.stepping:
            self.wave = max(self.wave, wave)
            self.begin_stepping()
        self.active[request_id] = _Active(client, received, scheduled)
        try:
            self.core.add_request(request)
        except Exception as error:
            del self.active[request_id]
            self.fail(client, request_id, error)

    def abort(self, client: int, request_ids: list[str]) -> None:
        known = []
        for request_id in request_ids:
            request = self.active.get(request_id)
            if request is not None and request.client == client:
                del self.active[request_id]
                known.append(request_id)
        if known:
            self.core.abort(known)
        batch = Batch()
        batch.aborted = request_ids
        self.outbox.put(client, batch)

    def abort_all(self, client: int) -> list[str]:
        """Drop what a front end that is gone had under way."""
        known = self.of_client(client)
        for request_id in known:
            del self.active[request_id]
        if known:
            logger.info(
                "engine %d: front end %d is gone; %d requests of it are aborted",
                self.index,
                client,
                len(known),
            )
            self.core.abort(known)
        return known

    def overrun(self, client: int) -> None:
        for request_id in self.abort_all(client):
            self.fail(
                client,
                request_id,
                message="the front end did not take its outputs, and more than the limit gathered",
                kind="SlowConsumer",
            )

    def fail(
        self,
        client: int,
        request_id: str,
        error: BaseException | None = None,
        *,
        message: str = "",
        kind: str = "",
    ) -> None:
        batch = Batch()
        told = Failure(request_id, kind, message)
        if error is not None:
            told = Failure(
                request_id, type(error).__name__, failures.text(error), failures.lines(error)
            )
        batch.failures.append(told)
        self.outbox.put(client, batch)

    def call(self, client: int, call_id: int, name: str, arguments: Any) -> None:
        batch = Batch()
        try:
            method = utility(self.core, name)
            args, kwargs = arguments
            result = method(*args, **kwargs)
        except Exception as error:
            batch.fail_call(call_id, error, failures.text(error))
        else:
            # At once: it may be something of the core's own, which the next step changes.
            batch.add_result(self.outbox.encoder, call_id, result)
        self.outbox.put(client, batch)

    # -- loads and waves ---------------------------------------------------------------------------

    def publish_load(self, working: bool) -> None:
        """Tell the coordinator what has changed."""
        if not self.coordinated:
            return
        waiting, running = self.load()
        busy = working or bool(self.active)
        if self.last_load != (waiting, running, self.wave, busy):
            self.last_load = (waiting, running, self.wave, busy)
            self.outbox.report(Report(self.index, waiting, running, self.wave, busy))

    def load(self) -> tuple[int, int]:
        """(waiting, running), as the core says."""
        load = self.core.load()
        if load is None:
            return 0, len(self.active)
        try:
            waiting, running = map(operator.index, load)
            if max(abs(waiting), abs(running)) < 1 << 63:  # what msgpack has
                return waiting, running
        except (TypeError, ValueError):
            pass
        raise TypeError(
            f"{type(self.core).__name__}.load() must return two numbers of requests, (waiting, "
            f"running), or None: not {load!r:.200}"
        )

    def begin_stepping(self) -> None:
        """This engine begins a wave: the coordinator has the others join it."""
        self.stepping = True
        self.last_load = None
        self.outbox.report(Report(self.index, 0, len(self.active) + 1, self.wave, True, start=True))

    def start_wave(self, wave: int) -> None:
        """A front end begins a wave: it has sent a request to another engine while all rested."""
        if self.lockstep and not self.stepping and wave >= self.wave:
            self.wave = wave
            self.begin_stepping()

    def take_wave(self, wave: Wave) -> None:
        """The coordinator says that a wave begins, or is over."""
        if not self.lockstep or wave.wave < self.wave:
            return
        self.last_load = None
        if wave.begins:
            self.wave = wave.wave
            self.stepping = True
        else:
            self.wave = wave.wave + 1
            self.stepping = False
            if self.active:  # a request came while the wave was being ended
                self.begin_stepping()
