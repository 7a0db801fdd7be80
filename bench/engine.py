"""fastipc's engine beside a plain server of the same shape (bench/plain), turn by turn.

    python -m bench.engine [--rounds 5] [--requests 20000] [--in-flight 1000] [--json FILE]

Three figures, each measured in one run with both in turn (A B, B A, ...), because machines drift:

- step: a step of the engine-to-workers loop, with one worker and with two: what a scheduler sends
  to all workers, and the answer of each. The process that steps does nothing else. Once as a
  tuple of tuples and lists, whose pickling bounds both sides; once with the same content as
  columns (an array for each field), whose pickling is cheap.
- round trip: a request from the front end to the engine, one step, and its output back, one at a
  time.
- rate: requests a second with many in flight, from one asyncio front end to one engine.

The engines do nothing with a request but answer it in the next step, so that what is measured is
the channels. Compare ratios, never times of different runs.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable

import msgspec

import fastipc

from . import executor, objects
from .plain.client import AsyncClient
from .report import number, table


class Ask(msgspec.Struct):
    request_id: str
    prompt_token_ids: list[int]


class Answer(msgspec.Struct):
    request_id: str
    token_ids: list[int]
    finished: bool


class Echo(fastipc.EngineCore):
    """Answers each request in the step after it came. Serves both servers."""

    request_type = Ask
    output_type = Answer

    def __init__(self, config=None, *, index=0):
        super().__init__(config, index=index)
        self._asked = []

    def add_request(self, request):
        self._asked.append(request)

    def abort(self, request_ids):
        gone = set(request_ids)
        self._asked = [r for r in self._asked if r.request_id not in gone]

    def has_work(self):
        return bool(self._asked)

    def step(self):
        asked, self._asked = self._asked, []
        return [Answer(r.request_id, r.prompt_token_ids[:1], True) for r in asked]


# -- what takes turns ------------------------------------------------------------------------------


class Steps:
    """One loop of an engine and its workers (see bench/executor.py), stepped by this process."""

    def __init__(self, which, workers, payload):
        self.which = which
        self._output = objects.make(payload)
        loop = executor.Ours(workers) if which == "fastipc" else executor.Plain(workers)
        self._step, self.close = loop.step, loop.close

    def round(self, seconds):
        """The median time of a step, in microseconds."""
        output, step, clock = self._output, self._step, time.perf_counter_ns
        took = []
        until = clock() + int(seconds * 1e9)
        while (begin := clock()) < until:
            step(output, None)
            took.append(clock() - begin)
        return statistics.median(took) / 1e3


def ask(i):
    return Ask(f"request-{i}", list(range(16)))


class Requests:
    """A front end and an engine."""

    def __init__(self, which):
        self.which = which
        self._next = 0

    async def start(self):
        if self.which == "fastipc":
            self._client = fastipc.AsyncEngineClient.launch(Echo, start_method="spawn")
            await self._client.open()
        else:
            self._client = AsyncClient(Echo)
            await self._client.ready()

    async def _one(self):
        self._next += 1
        async for _ in self._client.generate(ask(self._next)):
            pass

    async def round_trip(self, seconds):
        """The median time of a request alone, in microseconds."""
        took, clock = [], time.perf_counter_ns
        until = clock() + int(seconds * 1e9)
        while (begin := clock()) < until:
            await self._one()
            took.append(clock() - begin)
        return statistics.median(took) / 1e3

    async def rate(self, requests, in_flight):
        """Requests a second."""
        left = requests

        async def keep_asking():
            nonlocal left
            while left > 0:
                left -= 1
                await self._one()

        begin = time.perf_counter()
        await asyncio.gather(*(keep_asking() for _ in range(in_flight)))
        return requests / (time.perf_counter() - begin)

    async def close(self):
        await self._client.close()


# -- rounds ----------------------------------------------------------------------------------------


class Figure:
    """One row of the table: fastipc's and the plain server's rounds."""

    def __init__(self, name: str, unit: str, bound: float, lower_is_better: bool = True) -> None:
        self.name, self.unit, self.bound = name, unit, bound
        self.lower_is_better = lower_is_better
        self.rounds: dict[str, list[float]] = {"fastipc": [], "plain": []}

    def play(self, both: list, measure: Callable, rounds: int) -> None:
        for i in range(rounds):
            for one in both if i % 2 == 0 else reversed(both):
                self.rounds[one.which].append(measure(one))

    async def play_async(self, both: list, measure: Callable, rounds: int) -> None:
        for i in range(rounds):
            for one in both if i % 2 == 0 else reversed(both):
                self.rounds[one.which].append(await measure(one))

    @property
    def ratio(self) -> float:
        """fastipc's divided by the plain server's, round by round, the median of those."""
        pairs = zip(self.rounds["fastipc"], self.rounds["plain"], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    def as_dict(self) -> dict:
        met = self.ratio <= self.bound if self.lower_is_better else self.ratio >= self.bound
        return {
            "figure": self.name,
            "unit": self.unit,
            "fastipc": statistics.median(self.rounds["fastipc"]),
            "plain": statistics.median(self.rounds["plain"]),
            "ratio": self.ratio,
            "bound": self.bound,
            "lower_is_better": self.lower_is_better,
            "met": met,
            "rounds": self.rounds,
        }

    def row(self) -> list[str]:
        line = self.as_dict()
        return [
            f"{self.name}, {self.unit}",
            number(line["fastipc"]),
            number(line["plain"]),
            f"{self.ratio:.2f}",
            f"{'<=' if self.lower_is_better else '>='} {self.bound:.2f}",
            "met" if line["met"] else "missed",
        ]


def steps(workers, bound, rounds, seconds, payload="scheduler_output"):
    laid_out = ", as columns" if payload == "scheduler_columns" else ""
    figure = Figure(f"step, {workers} worker{'s' if workers > 1 else ''}{laid_out}", "us", bound)
    both = []
    try:
        both += [Steps("fastipc", workers, payload), Steps("plain", workers, payload)]
        for one in both:
            one.round(seconds / 2)  # warm
        figure.play(both, lambda one: one.round(seconds), rounds)
    finally:
        for one in both:
            one.close()
    return figure


async def requests(rounds, seconds, count, in_flight):
    round_trip = Figure("round trip, one request", "us", 1.0)
    rate = Figure(f"requests, {in_flight:,} in flight", "1/s", 1.0, lower_is_better=False)
    both = [Requests("fastipc"), Requests("plain")]
    started = []
    try:
        for one in both:
            await one.start()
            started.append(one)
            await one.round_trip(seconds / 2)  # warm
        await round_trip.play_async(both, lambda one: one.round_trip(seconds), rounds)
        await rate.play_async(both, lambda one: one.rate(count, in_flight), rounds)
    finally:
        for one in started:
            await one.close()
    return [round_trip, rate]


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a timed round")
    parser.add_argument("--requests", type=int, default=20_000, help="of a round of the rate")
    parser.add_argument("--in-flight", type=int, default=1000)
    parser.add_argument("--json", help="file for every round")
    arguments = parser.parse_args()

    figures = [
        steps(1, 1 / 3, arguments.rounds, arguments.seconds),
        steps(2, 0.6, arguments.rounds, arguments.seconds),
        steps(1, 1 / 3, arguments.rounds, arguments.seconds, "scheduler_columns"),
        steps(2, 0.6, arguments.rounds, arguments.seconds, "scheduler_columns"),
        *asyncio.run(
            requests(arguments.rounds, arguments.seconds, arguments.requests, arguments.in_flight)
        ),
    ]
    head = ["", "fastipc", "plain", "ratio", "target", ""]
    print(table(head, [figure.row() for figure in figures]))
    print("\nratio: fastipc's divided by the plain server's, round by round, the median of those.")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([figure.as_dict() for figure in figures], file)
    return 0 if all(figure.as_dict()["met"] for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
