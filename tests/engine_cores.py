"""Engine cores for the tests: importable by engines however they are started."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, ClassVar

import msgspec
import numpy as np

from fastipc import codec
from fastipc.engine import EngineCore
from fastipc.engine.intake import Intake
from fastipc.engine.outbox import Outbox


class Request(msgspec.Struct):
    request_id: str
    tokens: int = 1
    image: np.ndarray | None = None
    payload: bytes = b""


class Output(msgspec.Struct):
    request_id: str
    token: int
    finished: bool
    array: np.ndarray | None = None


class Sealed:
    """Can be encoded, and never decoded."""

    def __init__(self, value: int) -> None:
        self.value = value


def _unseal(value: Any, frames: Any) -> Any:
    raise ValueError("it is sealed")


codec.register(Sealed, lambda sealed, frames: [sealed.value], _unseal)


class CountingCore(EngineCore):
    """Each step makes one more number for every request: the sum of its image, then one more each.

    Its configuration: ``step_seconds``, ``fail_init``, ``fail_step_at``, ``reply_bytes``,
    ``pausable``, ``start_seconds``, ``die_at`` (a step at which the process exits with code 7),
    ``hold_at`` (how many outputs a request gets until `let_go` is called).
    """

    request_type = Request
    output_type = Output

    def __init__(self, config: Any = None, *, index: int = 0) -> None:
        super().__init__(config or {}, index=index)
        self.options = dict(self.config)
        time.sleep(self.options.get("start_seconds", 0))
        if self.options.get("fail_init") in (index, "all"):
            raise LookupError("the model is not there")
        self.live: dict[str, list[int]] = {}
        self.paused: set[str] = set()
        self.steps = 0
        self.dummy_steps = 0
        self.added: list[str] = []
        self.aborted: list[str] = []

    def info(self) -> Any:
        return {"index": self.index, "limit": 17}

    def add_request(self, request: Request) -> None:
        if request.tokens < 1:
            raise ValueError(f"tokens={request.tokens} is not a count")
        base = 0 if request.image is None else int(request.image.sum())
        self.live[request.request_id] = [base, request.tokens]
        self.added.append(request.request_id)

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self.live[request_id]
        self.aborted += request_ids

    def has_work(self) -> bool:
        return bool(self.live.keys() - self.paused)

    def step(self) -> list[Output]:
        self.steps += 1
        if self.steps == self.options.get("fail_step_at"):
            raise ArithmeticError("the step went wrong")
        if self.steps == self.options.get("die_at"):
            os._exit(7)
        time.sleep(self.options.get("step_seconds", 0))
        size = self.options.get("reply_bytes", 0)
        outputs = []
        for request_id, state in list(self.live.items()):
            if request_id in self.paused or state[0] == self.options.get("hold_at"):
                continue
            state[0] += 1
            state[1] -= 1
            if state[1] == 0:
                del self.live[request_id]
            array = np.full(size, state[0] % 251, np.uint8) if size else None
            outputs.append(Output(request_id, state[0], state[1] == 0, array))
        return outputs

    def dummy_step(self) -> None:
        self.dummy_steps += 1
        time.sleep(0.001)

    def pause(self, request_ids: list[str]) -> bool:
        if self.options.get("pausable"):
            self.paused.update(request_ids)
            return True
        return False

    def resume(self, request_ids: list[str]) -> None:
        self.paused.difference_update(request_ids)

    # utilities

    def state(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "live": sorted(self.live),
            "added": len(self.added),
            "aborted": len(self.aborted),
            "steps": self.steps,
            "dummy_steps": self.dummy_steps,
            "pid": os.getpid(),
        }

    def add(self, a: Any, b: Any = 1) -> Any:
        return a + b

    def let_go(self) -> None:
        del self.options["hold_at"]

    def refuse(self, text: str) -> None:
        raise KeyError(text)

    def exit(self, code: int) -> None:
        os._exit(code)

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    def rss(self) -> int:
        """Bytes of this process that are in memory."""
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    def break_thread(self, owner: str, method: str) -> None:
        """The engine's next call of that method, in whichever thread, raises."""

        def broken(*args: Any) -> Any:
            raise ZeroDivisionError("nobody foresaw this")

        setattr({"Intake": Intake, "Outbox": Outbox}[owner], method, broken)

    def fork(self) -> int:
        """Fork a child that lives until it is killed, and return its pid."""
        pid = os.fork()
        if pid == 0:
            signal.pause()
        return pid

    def unsendable(self) -> Any:
        return object()

    def sealed(self) -> Any:
        return Sealed(1)


class LendingCore(CountingCore):
    copy_outputs = False


class LockstepCore(CountingCore):
    lockstep = True


class OddOutputCore(CountingCore):
    """Its outputs for requests named "odd..." can't be encoded."""

    def step(self) -> list[Output]:
        outputs = super().step()
        for output in outputs:
            if output.request_id.startswith("odd"):
                output.array = object()
        return outputs


class Wordless(Exception):
    def __str__(self) -> str:
        raise LookupError("there are no words for it")


class WordlessCore(CountingCore):
    """What it raises has no text, or one that UTF-8 doesn't have. Its configuration: ``raises``,
    when it is made."""

    def __init__(self, config: Any = None, *, index: int = 0) -> None:
        super().__init__(config, index=index)
        if what := self.options.get("raises"):
            self.complain(what)

    def add_request(self, request: Request) -> None:
        if request.payload:
            self.complain(request.payload.decode())
        super().add_request(request)

    def complain(self, what: str) -> None:
        raise Wordless if what == "wordless" else ValueError("there is no model at /caf\udce9")


class PickyRequest(Request):
    in_engine: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.in_engine and self.payload:
            raise LookupError(f"no tokenizer for {self.payload!r}")


class PickyOutput(Output):
    def __post_init__(self) -> None:
        if not PickyRequest.in_engine and self.request_id.startswith("odd") and self.token == 2:
            raise LookupError("no word for 2")


class PickyCore(CountingCore):
    """Its types' own methods raise: where a request with a payload arrives, and where the second
    output of one named "odd..." does."""

    request_type = PickyRequest
    output_type = PickyOutput

    def __init__(self, config: Any = None, *, index: int = 0) -> None:
        super().__init__(config, index=index)
        PickyRequest.in_engine = True


class WrongStepCore(CountingCore):
    """Its steps make what ``wrong`` of its configuration says, once there is a request."""

    def step(self) -> Any:
        first, *_ = super().step()
        wrong: dict[str, Any] = {
            "nothing": None,
            "one": first,
            "none": [None],
            "yields none": iter([None]),
            "dict": [{"request_id": first.request_id}],
            "number": [Output(7, 1, True)],  # type: ignore[arg-type]
            "yields number": iter([Output(7, 1, True)]),  # type: ignore[arg-type]
            "list": [Output([7], 1, True)],  # type: ignore[arg-type]
        }
        return wrong[self.options["wrong"]]


class TellingCore(CountingCore):
    """What it says of itself is what its configuration has for ``info``, ``stats`` and, while there
    are requests, ``load``."""

    def info(self) -> Any:
        return self.options.get("info")

    def load(self) -> Any:
        return self.options.get("load") if self.live else None

    def stats(self) -> Any:
        return self.options.get("stats", {})


class OddStepCore(CountingCore):
    """Of requests named "odd..." the second output can't be encoded, and with "odd, then..." a good
    one that is the last comes in the same step. Its configuration: ``yields``, too."""

    def step(self) -> Any:
        outputs = []
        for output in super().step():
            outputs.append(output)
            if output.request_id.startswith("odd") and output.token == 2:
                output.array = object()
                if output.request_id.startswith("odd, then"):
                    del self.live[output.request_id]
                    outputs.append(Output(output.request_id, 3, True))
        return iter(outputs) if self.options.get("yields") else outputs


class MistypedCore(CountingCore):
    """Of requests named "odd..." the second output is none of the type that outputs have; of those
    named "nobody..." it doesn't tell either whose it is."""

    def step(self) -> list[Any]:
        outputs: list[Any] = super().step()
        for at, output in enumerate(outputs):
            if output.request_id.startswith("odd") and output.token == 2:
                output.token = "two"
            elif output.request_id.startswith("nobody") and output.token == 2:
                outputs[at] = NamelessOutput(output.request_id, output.finished)
        return outputs


class NamelessOutput(msgspec.Struct):
    request_id: str = msgspec.field(name="id")
    finished: bool


class Snapshot(msgspec.Struct):
    request_id: str
    step: int
    tokens: list[int]
    table: dict[str, int]
    array: np.ndarray
    finished: bool


class ReusingCore(EngineCore):
    """Makes its outputs of the arrays, lists and dicts that it goes on with.

    Its configuration: ``size`` of the array; ``seconds`` that a step takes; ``odd``: whether the
    outputs of requests named "odd..." can't be encoded.
    """

    request_type = Request
    output_type = Snapshot

    def __init__(self, config: Any = None, *, index: int = 0) -> None:
        super().__init__(config, index=index)
        self.live: dict[str, list[Any]] = {}
        self.table = {"0": 0}
        self.array = np.zeros(config["size"], np.int64)
        self.arrays: dict[str, np.ndarray] = {}
        self.steps = 0

    def add_request(self, request: Request) -> None:
        self.live[request.request_id] = [request.tokens, [], {}]

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self.live[request_id]

    def has_work(self) -> bool:
        return bool(self.live)

    def one(self, request_id: str, array: np.ndarray) -> Snapshot:
        count, tokens, table = self.live[request_id]
        tokens.append(len(tokens) + 1)
        table.clear()
        table[str(len(tokens))] = len(tokens)
        array[:] = len(tokens)
        finished = len(tokens) == count
        if finished:
            del self.live[request_id]
        odd: Any = object() if self.config.get("odd") and request_id.startswith("odd") else array
        return Snapshot(request_id, len(tokens), tokens, table, odd, finished)

    def step(self) -> Any:
        self.steps += 1
        self.table.clear()
        self.table[str(self.steps)] = self.steps
        self.array[:] = self.steps
        for request_id in self.live:
            self.arrays.setdefault(request_id, np.empty_like(self.array))
        return [self.one(request_id, self.arrays[request_id]) for request_id in list(self.live)]

    def mine(self) -> Any:
        return self.steps, self.table, self.array


class YieldingCore(ReusingCore):
    """Yields its outputs, all of one array, and spoils each when it goes on."""

    def step(self) -> Any:
        time.sleep(self.config.get("seconds", 0))
        for request_id in list(self.live):
            output = self.one(request_id, self.array)
            yield output
            self.array[:] = -1
            output.step = -1


class First(msgspec.Struct, array_like=True):
    kind: str
    request_id: str
    sealed: Sealed


class Tagged(msgspec.Struct, array_like=True, tag="tagged"):
    kind: str
    request_id: str
    sealed: Sealed


class Renamed(msgspec.Struct, rename="camel"):
    kind: str
    request_id: str
    sealed: Sealed


class RefusingFirst(CountingCore):
    request_type = First


class RefusingTagged(CountingCore):
    request_type = Tagged


class RefusingRenamed(CountingCore):
    request_type = Renamed


REFUSING = [RefusingFirst, RefusingTagged, RefusingRenamed]
