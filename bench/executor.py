"""A step of the loop between an engine and its workers: a scheduler's output (about 5 KB pickled)
to every worker, replies back. fastipc's MultiprocExecutor beside a plain loop of pickle over
multiprocessing.Queue, in turn.

    python -m bench.executor [--workers 1,2] [--rounds N] [--steps N]
"""

import argparse
import multiprocessing
import pickle
import statistics
import sys
import time
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench import objects
from fastipc.executor import MultiprocExecutor, Worker

WARM_UP = 100
TIMEOUT = 60.0
# (workers, replies) -> the largest share of the plain loop's time that is accepted
TARGETS = {1: 1 / 3, 2: 0.6}


class Model(Worker):
    """Does no work: what a step costs beside it is what is measured."""

    def step(self, output):
        return self.rank, len(output)


def plain_worker(rank, calls, replies):
    """The same by hand."""
    model = Model(rank, rank, 0)
    while (call := calls.get()) is not None:
        name, args, replying = call
        value = getattr(model, name)(*args)
        if replying is None or replying == rank:
            replies.put(value)


class Plain:
    """A queue to each worker, and one back from each."""

    name = "mp.Queue"

    def __init__(self, workers):
        context = multiprocessing.get_context("spawn")
        self._calls = [context.Queue() for _ in range(workers)]
        self._replies = [context.Queue() for _ in range(workers)]
        self._processes = [
            context.Process(target=plain_worker, args=(rank, calls, replies), daemon=True)
            for rank, (calls, replies) in enumerate(zip(self._calls, self._replies, strict=True))
        ]
        for process in self._processes:
            process.start()

    def step(self, output, replying):
        for calls in self._calls:
            calls.put(("step", (output,), replying))
        if replying is not None:
            return self._replies[replying].get(timeout=TIMEOUT)
        return [replies.get(timeout=TIMEOUT) for replies in self._replies]

    def close(self):
        for calls in self._calls:
            calls.put(None)
        for process in self._processes:
            process.join()
        for queue in (*self._calls, *self._replies):
            queue.close()


class Ours:
    name = "fastipc"

    def __init__(self, workers):
        self.executor = MultiprocExecutor(Model, workers, start_method="spawn")

    def step(self, output, replying):
        return self.executor.collective_rpc(
            "step", (output,), timeout=TIMEOUT, unique_reply_rank=replying
        )

    def close(self):
        self.executor.shutdown()


def round_of(side, output, replying, steps):
    """(median, 99th percentile) of a step in microseconds."""
    times = []
    clock = time.perf_counter_ns
    for i in range(steps + WARM_UP):
        begin = clock()
        side.step(output, replying)
        if i >= WARM_UP:
            times.append(clock() - begin)
    times.sort()
    return statistics.median(times) / 1e3, times[len(times) * 99 // 100] / 1e3


def pickle_alone(output, steps):
    """Median microseconds to pickle a step and to load it, which both sides do."""
    times = []
    for _ in range(steps):
        begin = time.perf_counter_ns()
        pickle.loads(pickle.dumps(output, 5))
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e3


def compare(workers, rounds, steps):
    """Prints a line per kind of reply; True if the target was met."""
    output = objects.make("scheduler_output")
    alone = []
    sides = [Ours(workers), Plain(workers)]
    good = True
    try:
        for replying in (0, None):
            medians = {side.name: [] for side in sides}
            tails = {side.name: [] for side in sides}
            for k in range(rounds):
                alone.append(pickle_alone(output, steps))
                for side in sides if k % 2 == 0 else sides[::-1]:
                    median, tail = round_of(side, output, replying, steps)
                    medians[side.name].append(median)
                    tails[side.name].append(tail)
            pairs = zip(medians["fastipc"], medians["mp.Queue"], strict=True)
            share = statistics.median(ours / theirs for ours, theirs in pairs)
            good = good and share <= TARGETS.get(workers, 1)
            print(
                f"{workers} worker{'s' * (workers > 1)}, "
                f"{'all reply' if replying is None else 'one replies'}: "
                + ", ".join(
                    f"{name} {statistics.median(medians[name]):.1f} us "
                    f"(p99 {statistics.median(tails[name]):.0f})"
                    for name in medians
                )
                + f"; ratio {share:.2f}, target <= {TARGETS.get(workers, 1):.2f}",
                flush=True,
            )
        stages = sides[0].executor.stats()
        print(
            f"  pickle.dumps and loads alone {statistics.median(alone):.1f} us; fastipc's medians: "
            + ", ".join(
                f"{name} {1e6 * stage.percentile(50):.1f} us" for name, stage in stages.items()
            ),
            flush=True,
        )
    finally:
        for side in sides:
            side.close()
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    data = pickle.dumps(objects.make("scheduler_output"), 5)
    print(f"{len(data)} bytes pickled; medians of rounds")
    good = [
        compare(int(n), arguments.rounds, arguments.steps) for n in arguments.workers.split(",")
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
