"""Engine cores for the tests: importable by engines however they are started."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import msgspec
import numpy as np

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


class CountingCore(EngineCore):
    """Each step makes one more number for every request: the sum of its image, then one more each.

    Its configuration: ``step_seconds``, ``fail_init``, ``fail_step_at``, ``reply_bytes``,
    ``pausable``, ``start_seconds``, ``die_at`` (a step at which the process exits with code 7).
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
            if request_id in self.paused:
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
        self.paused.clear()

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
