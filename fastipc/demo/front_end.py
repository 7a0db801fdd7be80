"""A front end of the demo: sends requests, takes tokens, and checks every one of them."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fastipc import processes
from fastipc.demo import model
from fastipc.demo.core import Generate, Tokens
from fastipc.engine import AsyncEngineClient, ClientSpec

__all__ = ["READY_SECONDS", "Orders", "Report", "WrongTokens", "check", "job", "main", "run"]

# How long engines may take to start and workers to learn: on a loaded machine much of a minute.
READY_SECONDS = 120.0
# Requests that one front end has under way: enough for every engine to have a full batch.
IN_FLIGHT = 64
# Every so many requests one has an image.
IMAGE_EVERY = 4


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What a front end is to do.

    Attributes:
        index, of: of the front ends.
        path, seed: of the model.
        requests: how many to send, all front ends together; None: as many as go.
        seconds: for how long to send.
    """

    index: int
    of: int
    path: str
    seed: int
    requests: int | None
    seconds: float


class Report(msgspec.Struct, kw_only=True):
    """What a front end saw; times in seconds.

    ``began``, ``ended``: of sending and receiving, on the clock that all processes share.
    ``first`` and ``next``: how long it took to the first token of each request, and from each
    token to the next. ``sample``: the prompt and what the model said, of one request.
    """

    index: int
    pid: int
    requests: int = 0
    images: int = 0
    image_bytes: int = 0
    tokens: int = 0
    began: float = 0.0
    ended: float = 0.0
    cpu_seconds: float = 0.0
    first: list[float] = []
    next: list[float] = []
    sample: tuple[bytes, bytes] = (b"", b"")
    stats: Any = None


class WrongTokens(Exception):
    """The engines answered a request with what the model, run in one process, does not say."""

    def __init__(self, number: int, at: int, expected: bytes, got: bytes) -> None:
        super().__init__(
            f"wrong tokens: for request {number} the engines said {got[at : at + 20]!r} from token "
            f"{at} on, and the model in one process says {expected[at : at + 20]!r}"
        )
        self.number, self.at = number, at
        self._made_of = number, at, expected, got

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._made_of


def job(number: int, text: bytes) -> model.Job:
    """Request number so-and-so: the same in every run over the same text."""
    # (a generator of its own each, so that any front end can make any request)
    dice = random.Random(number)
    start = dice.randrange(len(text))
    prompt = text[start : start + dice.randrange(1, 200)]
    temperature = dice.choice((0, model.TEMPERATURE_ONE // 2, model.TEMPERATURE_ONE))
    seed = dice.getrandbits(63)
    image = None
    if number % IMAGE_EVERY == 0:
        height, width = dice.choice(((32, 48), (64, 64), (224, 224)))
        image = np.random.default_rng(number).integers(0, 256, (3, height, width), np.uint8)
        # An even half: noise alone is grey on average, and would bend nothing.
        image[:, : height // 2] //= 4
    return model.Job(prompt, dice.randrange(8, 49), seed, temperature, image)


class _Front:
    """The requests of one front end."""

    def __init__(self, client: AsyncEngineClient, orders: Orders, text: bytes) -> None:
        self._client = client
        self._orders = orders
        self._text = text
        self._next = orders.index
        self.report = Report(index=orders.index, pid=os.getpid())
        self.said: dict[int, bytes] = {}

    def numbers(self) -> int:
        number = self._next
        self._next += self._orders.of
        return number

    async def keep_going(self, until: float) -> None:
        most = self._orders.requests
        while time.monotonic() < until:
            number = self.numbers()
            if most is not None and number >= most:
                return
            await self._one(number)

    async def _one(self, number: int) -> None:
        wanted = job(number, self._text)
        report = self.report
        said = bytearray()
        # The numbers of requests are unique among front ends, and so are their ids.
        request = Generate(f"demo-{number}", *wanted)
        at = time.monotonic()
        output: Tokens
        async for output in self._client.generate(request):
            now = time.monotonic()
            (report.next if said else report.first).append(now - at)
            at = now
            said += output.tokens
        self.said[number] = bytes(said)
        report.requests += 1
        report.tokens += len(said)
        if wanted.image is not None:
            report.images += 1
            report.image_bytes += wanted.image.nbytes


async def run(
    client: AsyncEngineClient,
    orders: Orders,
    moved: Callable[[Report], Awaitable[None]] | None = None,
) -> tuple[Report, dict[int, bytes]]:
    """Sends requests for as long as the orders say; returns what was said, by request.

    ``moved`` is called now and then, with the report as far as it is.
    """
    text = await asyncio.to_thread(model.read, Path(orders.path))
    front = _Front(client, orders, text)
    cpu = time.process_time()
    start = time.monotonic()
    tasks = [
        asyncio.create_task(front.keep_going(start + orders.seconds)) for _ in range(IN_FLIGHT)
    ]
    if moved is not None:
        tasks.append(asyncio.create_task(_tell(front.report, moved, tasks[:])))
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    report = front.report
    report.began, report.ended = start, time.monotonic()
    report.cpu_seconds = time.process_time() - cpu
    report.stats = client.stats()
    return report, front.said


# How often the progress is told: often enough to look alive.
_TELL_SECONDS = 0.1


async def _tell(
    report: Report, moved: Callable[[Report], Awaitable[None]], tasks: list[asyncio.Task[None]]
) -> None:
    while not all(task.done() for task in tasks):
        await moved(report)
        await asyncio.sleep(_TELL_SECONDS)


def check(orders: Orders, said: dict[int, bytes]) -> tuple[bytes, bytes]:
    """Compares every token with what the model says when this process runs all of it.

    Returns (prompt, tokens) of one request as a sample. Raises WrongTokens.
    """
    text = model.read(Path(orders.path))
    weights = model.train(text, orders.seed)
    shard = model.Shard(weights, 0, 1)
    numbers = sorted(said)
    if not numbers:
        return b"", b""
    jobs = [job(number, text) for number in numbers]
    for number, expected in zip(numbers, model.generate(shard, jobs), strict=True):
        got = said[number]
        if got != expected:
            pairs = zip(got, expected, strict=False)
            same = next(
                (i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(expected))
            )
            raise WrongTokens(number, same, expected, got)
    number = max(numbers, key=lambda n: len(said[n]))
    return job(number, text).prompt, said[number]


def main(spec: ClientSpec, orders: Orders) -> None:
    """A front end in a process of its own. What its parent waits for is the report."""

    async def front_end() -> tuple[Report, dict[int, bytes]]:
        async with AsyncEngineClient(spec) as client:
            await client.wait_until_ready(READY_SECONDS)
            return await run(client, orders)

    report, said = asyncio.run(front_end())
    report.sample = check(orders, said)
    processes.ready(report)
