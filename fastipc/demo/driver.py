"""The demo's topology: starts engines and front ends, lets them work, and counts what they did."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine
from typing import Any, NamedTuple

from fastipc import processes
from fastipc.demo import front_end
from fastipc.demo.core import DemoConfig, DemoCore
from fastipc.demo.front_end import Orders, Report
from fastipc.engine import AsyncEngineClient, EngineGroup, launch
from fastipc.engine.group import clean_up_when_orphaned

__all__ = ["Options", "ProcessUse", "Result", "Watcher", "run"]

SEED = 0
# How much longer than it sends a front end may take for its last requests and for checking.
END_SECONDS = 120.0


class Options(NamedTuple):
    """What the command line says; see there."""

    path: str
    engines: int
    workers: int
    clients: int
    requests: int | None
    seconds: float


class ProcessUse(NamedTuple):
    name: str
    pid: int
    cpu_seconds: float


class Watcher:
    """What a run tells about itself while it goes on."""

    def started(self, topology: list[tuple[str, int]]) -> None:
        """Everybody is ready: (name, pid) of every process."""

    def moved(self, report: Report) -> None:
        """How far this process's front end is."""

    def checking(self) -> None:
        """The tokens are there, and are compared now."""


class Result(NamedTuple):
    """What a run measured in which every token was right."""

    options: Options
    reports: list[Report]
    counts: list[dict[str, int]]  # by engine
    info: list[dict[str, Any]]  # by engine
    processes: list[ProcessUse]
    seconds: float


def run(options: Options, watcher: Watcher, core_class: type[DemoCore] = DemoCore) -> Result:
    """Runs the demo. Whatever it raises, no process is left.

    Raises:
        front_end.WrongTokens: something was not what the model says.
        fastipc.EngineDeadError, ChildDied, RemoteError: a process died, or failed.
    """
    config = DemoConfig(path=options.path, seed=SEED, workers=options.workers)
    with launch(core_class, config, engines=options.engines, clients=options.clients) as group:
        group.wait_until_ready(front_end.READY_SECONDS)
        result, orders, said = asyncio.run(_work(options, group, watcher))
    # In the main thread, and not in an event loop: so Ctrl-C ends it.
    result.reports[0].sample = front_end.check(orders, said)
    return result


async def _work(
    options: Options, group: EngineGroup, watcher: Watcher
) -> tuple[Result, Orders, dict[int, bytes]]:
    """Also returns what this process's front end was to do, and what was said to it, unchecked."""
    orders = [
        Orders(
            index=index,
            of=options.clients,
            path=options.path,
            seed=SEED,
            requests=options.requests,
            seconds=options.seconds,
        )
        for index in range(options.clients)
    ]
    others: list[processes.ChildProcess] = []
    said: dict[int, bytes] = {}
    async with AsyncEngineClient(group.clients[0]) as client:
        try:
            await client.wait_until_ready(front_end.READY_SECONDS)
            for spec, own in zip(group.clients[1:], orders[1:], strict=True):
                others.append(
                    processes.start(
                        front_end.main,
                        (spec, own),
                        name=f"front end {own.index}",
                        prepare=clean_up_when_orphaned,
                    )
                )
            named = _topology(client, group, others)
            coordinator = group.coordinator
            watcher.started(
                named if coordinator is None else [*named, ("coordinator", coordinator.pid)]
            )
            before = await _usage(client, options)
            start = time.monotonic()

            async def moved(report: Report) -> None:
                watcher.moved(report)

            async def first() -> list[Report]:
                report, tokens = await front_end.run(client, orders[0], moved)
                said.update(tokens)
                watcher.checking()
                return [report]

            timeout = options.seconds + END_SECONDS
            reports = await _all_of(
                first(), asyncio.to_thread(processes.wait_all_ready, others, timeout)
            )
            seconds = time.monotonic() - start
            after = await _usage(client, options)
            counts = [await client.call("counts", engine=i) for i in range(options.engines)]
            info = [client.engines[i].info for i in range(options.engines)]
        finally:
            processes.stop(others, graceful=2.0)
    used = [report.cpu_seconds for report in reports]
    used += [b - a for a, b in zip(before, after, strict=True)]
    result = Result(
        options,
        reports,
        counts,
        info,
        [ProcessUse(*who, cpu) for who, cpu in zip(named, used, strict=True)],
        seconds,
    )
    return result, orders[0], said


async def _all_of(*parts: Coroutine[Any, Any, list[Report]]) -> list[Report]:
    """What all return, in order; or what the first raises that fails, and then at once."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        return [report for reports in await asyncio.gather(*tasks) for report in reports]
    finally:
        for task in tasks:
            task.cancel()


def _topology(
    client: AsyncEngineClient, group: EngineGroup, others: list[processes.ChildProcess]
) -> list[tuple[str, int]]:
    """(name, pid) of every process: front ends, engines, and each engine's workers after it."""
    named = [("front end 0", os.getpid()), *((child.name, child.pid) for child in others)]
    for index, child in sorted(group.processes.items()):
        named.append((f"engine {index}", child.pid))
        workers = client.engines[index].info["workers"]
        named += ((f"worker {rank} of engine {index}", pid) for rank, pid in enumerate(workers))
    return named


async def _usage(client: AsyncEngineClient, options: Options) -> list[float]:
    """Seconds of CPU time, engine by engine, with its workers."""
    used = await asyncio.gather(*(client.call("usage", engine=i) for i in range(options.engines)))
    return [seconds for one in used for seconds in one]
