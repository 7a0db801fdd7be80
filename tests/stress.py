"""One writer and many readers, each a Python process, under everything that happens to them.

    python -m tests.stress --messages 1e7                as many processes as CPUs
    python -m tests.stress --messages 1e7 --over         four times as many
    python -m tests.stress --seconds 60 --over --large-every 16

Messages of all kinds (tuples, bytes, arrays, text; sizes log-uniform up to several chunks), calls
that poll, that wait a little and that wait for ever, one message at a time or many, signals, slow
readers, cyclic garbage and its collection, forked children. Message i is known from its number
alone, and each of its bytes is checked, its number, and that none is missing or comes twice; at the
end writer and readers compare a checksum over all numbers and lengths. Prints what was counted;
the exit code is 0 when every reader got every message and made progress in each window of time.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

import fastipc
from fastipc import MessageQueue

CHUNK = 256 << 10
LARGEST = 5 * CHUNK + 999
SMALL = 512  # bytes, of a message that is not large
STALL_SECONDS = 0.1  # without a message: longer than a time slice or two
STEP = 256  # messages between looks at the clock, and at most in one dequeue_many
FORK_SECONDS = 0.5
SIGNAL_SECONDS = 0.0137
MASK = (1 << 64) - 1
# 16 steps per power of two of microseconds
BUCKETS = 640


# ---- messages ----------------------------------------------------------------------------------


class Messages:
    """Message i: (i, time or 0.0, payload). Every 64th has the time at which it was sent."""

    def __init__(self, seed: int, large_every: int) -> None:
        rng = np.random.default_rng(seed)
        self._noise = rng.integers(0, 256, LARGEST + 4096, dtype=np.uint8)
        self._bytes = self._noise.tobytes()
        self._small = np.exp(rng.uniform(0, np.log(SMALL), 1009)).astype(int).tolist()
        self._large = np.exp(rng.uniform(0, np.log(LARGEST), 1013)).astype(int).tolist()
        self._every = large_every

    def payload(self, i: int) -> Any:
        start = i * 7919 & 4095
        if i % self._every == 0:
            stretch = self._noise[start : start + self._large[i % 1013]]
            return [stretch, stretch[::2]] if i & self._every else stretch
        kind = i & 7
        if kind < 4:
            return i * 2654435761
        if kind < 6:
            return self._bytes[start : start + self._small[i % 1009]]
        if kind == 6:
            return {"n": i, "text": f"message {i}"}
        return self._noise[start : start + self._small[i % 1009]]

    @staticmethod
    def size(payload: Any) -> int:
        """Of the data, in bytes."""
        if type(payload) is list:
            return sum(part.nbytes for part in payload)
        return len(payload) if type(payload) in (bytes, np.ndarray) else 8

    def check(self, i: int, message: Any) -> None:
        """Raises unless it is message i."""
        number, _, got = message
        if number != i:
            raise AssertionError(f"message {i} was expected, {number} came")
        want = self.payload(i)
        if type(want) is np.ndarray:
            right = type(got) is np.ndarray and np.array_equal(got, want)
        elif type(want) is list:
            right = len(got) == 2 and all(map(np.array_equal, got, want))
        else:
            right = got == want
        if not right:
            raise AssertionError(f"message {i} has wrong contents: {got!r:.200}")


# ---- trouble -----------------------------------------------------------------------------------


class Trouble:
    """What happens to a process besides its messages, and the count of it."""

    def __init__(self, seed: int, slow: bool, quiet: bool, connection: Connection) -> None:
        self.random = random.Random(seed)
        self._slow, self._quiet = slow, quiet
        self._connection = connection
        self._next_fork = time.monotonic() + self.random.random() * FORK_SECONDS
        self._next_report = 0.0
        self._children: set[int] = set()
        self.counts = dict.fromkeys(
            ("polls", "timeouts", "signals", "naps", "collections", "forks"), 0
        )
        if not quiet:
            signal.signal(signal.SIGALRM, self._on_signal)
            signal.setitimer(signal.ITIMER_REAL, SIGNAL_SECONDS, SIGNAL_SECONDS)

    def _on_signal(self, *_: object) -> None:
        self.counts["signals"] += 1

    def timeout(self) -> float | None:
        kind = self.random.randrange(4)
        if kind == 0:
            self.counts["polls"] += 1
            return 0
        return (None, 0.0001, 0.02)[kind - 1]

    def report(self, done: int) -> None:
        """Tells the supervisor how far it is, about five times a second."""
        now = time.monotonic()
        if now >= self._next_report:
            self._next_report = now + 0.2
            self._connection.send(("done", done))

    def now_and_then(self, queue: MessageQueue) -> None:
        if self._quiet:
            return
        choice = self.random.randrange(64)
        if choice == 0 and self._slow:
            self.counts["naps"] += 1
            time.sleep(self.random.uniform(0, 0.005))
        elif choice < 4:
            self.counts["collections"] += 1
            cycle: list[Any] = [np.empty(1000)]
            cycle.append(cycle)
            del cycle
            gc.collect(self.random.choice((0, 0, 0, 1, 2)))
        elif choice == 4 and time.monotonic() > self._next_fork:
            self._next_fork = time.monotonic() + FORK_SECONDS
            self.counts["forks"] += 1
            self._fork(queue)
        self.reap()

    def _fork(self, queue: MessageQueue) -> None:
        """A child may not use its parent's end, and ends without harm to it."""
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)
                try:
                    queue.get_nowait() if queue.rank is not None else queue.put_nowait(0)
                except fastipc.IPCError as error:
                    gc.collect()
                    queue.close()
                    # (anything else would be a message, or a false alarm)
                    code = 0 if "fork" in str(error) else 2
            finally:
                os._exit(code)
        self._children.add(pid)

    def reap(self, options: int = os.WNOHANG) -> None:
        """Takes notice of children that have ended."""
        for pid in list(self._children):
            done, status = os.waitpid(pid, options)
            if done:
                self._children.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                assert code == 0, f"a forked child's use of its parent's queue ended with {code}"


def again(trouble: Trouble, call: Callable[..., Any], *args: Any) -> Any:
    """Calls until it doesn't time out."""
    while True:
        try:
            return call(*args, timeout=trouble.timeout())
        except (fastipc.Empty, fastipc.Full):
            trouble.counts["timeouts"] += 1


# ---- the processes -----------------------------------------------------------------------------


def digest_of(digest: int, i: int, size: int) -> int:
    return (digest * 6364136223846793005 + (i ^ size << 40) + 1) & MASK


def write(connection: Connection, n_reader: int, options: argparse.Namespace) -> dict[str, Any]:
    messages = Messages(options.seed, options.large_every)
    trouble = Trouble(options.seed, False, options.quiet, connection)
    total = nbytes = digest = 0
    with MessageQueue(n_reader, n_reader, max_chunk_bytes=CHUNK, max_chunks=6) as queue:
        connection.send(("value", queue.export_handle()))
        queue.wait_until_ready(120)
        end = time.monotonic() + options.seconds if options.seconds else None
        while not options.messages or total < options.messages:
            i = total
            payload = messages.payload(i)
            if type(payload) is np.ndarray and len(payload) > SMALL:
                payload = payload.copy()
            stamp = 0.0 if i & 63 else time.monotonic()
            again(trouble, queue.enqueue, (i, stamp, payload))
            if type(payload) is np.ndarray and len(payload) > SMALL:
                payload.fill(0)  # what was sent is changed at once: that must not reach anybody
            size = messages.size(payload)
            digest = digest_of(digest, i, size)
            nbytes += size
            total += 1
            if total % STEP == 0:
                trouble.report(total)
                trouble.now_and_then(queue)
                if end is not None and time.monotonic() > end:
                    break
        connection.send(("over", total))
    trouble.reap(0)
    return {"messages": total, "bytes": nbytes, "digest": digest, "counts": trouble.counts}


def bucket_of(microseconds: float) -> int:
    n = int(microseconds)
    if n < 16:
        return n
    power = n.bit_length() - 1
    return min(BUCKETS - 1, (power - 3) * 16 + (n >> (power - 4) & 15))


def bucket_top(b: int) -> int:
    return b + 1 if b < 16 else (17 + b % 16) << (b // 16 - 1)


def read(connection: Connection, rank: int, options: argparse.Namespace) -> dict[str, Any]:
    messages = Messages(options.seed, options.large_every)
    slow = rank % 2 == 1 or options.processes == 2
    trouble = Trouble(options.seed + 1 + rank, slow, options.quiet, connection)
    handle = connection.recv()
    total = nbytes = digest = stalls = 0
    longest = 0.0
    latency = [0] * BUCKETS
    least, most = float("inf"), 0.0
    with MessageQueue.create_from_handle(handle, rank) as queue:
        before = None
        next_step = STEP
        while True:
            try:
                if total // STEP % 2:
                    got = again(trouble, queue.dequeue_many, 1 + trouble.random.randrange(STEP))
                else:
                    got = [again(trouble, queue.dequeue)]
            except fastipc.Closed:
                break
            for message in got:
                messages.check(total, message)
                size = messages.size(message[2])
                if message[1]:
                    took = (time.monotonic() - message[1]) * 1e6
                    latency[bucket_of(took)] += 1
                    least, most = min(least, took), max(most, took)
                digest = digest_of(digest, total, size)
                nbytes += size
                total += 1
            now = time.monotonic()
            if before is not None:
                longest = max(longest, now - before)
                stalls += now - before > STALL_SECONDS
            before = now
            if total >= next_step:
                next_step = total + STEP
                trouble.report(total)
                trouble.now_and_then(queue)
                before = time.monotonic()
    trouble.reap(0)
    return {
        "messages": total,
        "bytes": nbytes,
        "digest": digest,
        "counts": trouble.counts,
        "latency": latency,
        "least": least,
        "most": most,
        "stalls": stalls,
        "longest": longest,
    }


def _run(target: Callable[..., Any], connection: Connection, *args: Any) -> None:
    try:
        value = target(connection, *args)
    except fastipc.PeerDied as error:
        connection.send(("error", f"false alarm: {error}"))
    except BaseException as error:
        connection.send(("error", repr(error)))
    else:
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(("result", value))


# ---- the supervisor ----------------------------------------------------------------------------


# A reader may get nothing in a window in which all processes of the run together had less than this
# share of the CPUs: then others had them. (Who livelocks has a CPU, and uses it.)
STARVED = 0.1


def scheduled(pid: int) -> tuple[float, float]:
    """Seconds that a process has run, and that it has waited for a CPU; zeros where the kernel
    doesn't tell."""
    try:
        with open(f"/proc/{pid}/schedstat") as line:
            ran, waited, _ = line.read().split()
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(ran) / 1e9, int(waited) / 1e9


def main() -> int:
    cpus = os.cpu_count() or 1
    parser = argparse.ArgumentParser(prog="python -m tests.stress")
    parser.add_argument("--messages", type=lambda text: int(float(text)), default=0)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--processes", type=int, default=max(2, cpus))
    parser.add_argument(
        "--over", action="store_const", const=4 * cpus, dest="processes", help="4 for each CPU"
    )
    parser.add_argument("--large-every", type=int, default=1024, metavar="N")
    parser.add_argument("--window", type=float, default=1.0, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--method", default="spawn", choices=("spawn", "fork", "forkserver"))
    parser.add_argument("--quiet", action="store_true", help="no signals, naps, forks, collections")
    options = parser.parse_args()
    if (options.messages == 0) == (options.seconds == 0):
        parser.error("give --messages or --seconds")
    if options.processes < 2:
        parser.error("--processes must be at least 2")
    return Supervisor(options).run()


class Supervisor:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.context = multiprocessing.get_context(options.method)
        self.processes: list[Any] = []
        self.connections: list[Connection] = []
        self.done: list[int] = []
        self.results: dict[int, dict[str, Any]] = {}
        self.value: Any = None
        self.over = False
        self.still = 0
        self.starved = 0

    def _start(self, target: Callable[..., Any], *args: Any) -> None:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_run, args=(target, theirs, *args), daemon=False)
        process.start()
        theirs.close()
        self.processes.append(process)
        self.connections.append(ours)
        self.done.append(0)

    def _hear(self, timeout: float) -> None:
        open_ends = [c for i, c in enumerate(self.connections) if i not in self.results]
        for connection in wait(open_ends, timeout):
            i = self.connections.index(connection)
            try:
                kind, value = connection.recv()
            except (EOFError, ConnectionError):
                raise SystemExit(f"process {i} ended without a word") from None
            if kind == "done":
                self.done[i] = value
            elif kind == "value":
                self.value = value
            elif kind == "over":
                self.over = True
            elif kind == "result":
                self.results[i] = value
            else:
                raise SystemExit(f"process {i}: {value}")

    def run(self) -> int:
        n = self.options.processes
        begun = time.monotonic()
        try:
            self._start(write, n - 1, self.options)
            while self.value is None:
                self._hear(1.0)
            for rank in range(n - 1):
                self._start(read, rank, self.options)
                self.connections[-1].send(self.value)
            self._watch(n)
        finally:
            for process in self.processes:
                if len(self.results) < n:
                    process.kill()
                process.join()
        return self._report(n, time.monotonic() - begun)

    def _watch(self, n: int) -> None:
        window = self.options.window
        next_look = None
        seen = [0] * n
        times = [(0.0, 0.0)] * n
        while len(self.results) < n:
            self._hear(0.1)
            now = time.monotonic()
            if self.over or not all(self.done):
                next_look = None
            elif next_look is None:
                next_look, seen = now + window, list(self.done)
                times = [scheduled(process.pid) for process in self.processes]
            elif now >= next_look:
                # (a report every 0.2 s: what is new in a window is known at its end)
                before, times = times, [scheduled(process.pid) for process in self.processes]
                still = [i for i in range(1, n) if self.done[i] == seen[i]]
                had = sum(a[0] - b[0] for a, b in zip(times, before, strict=True))
                known = any(a[0] for a in times)
                if still and known and had < STARVED * window * (os.cpu_count() or 1):
                    self.starved += 1
                elif still:
                    self.still += len(still)
                    print(f"nothing new in {window:g} s for readers {[i - 1 for i in still]}:")
                    for i in range(n):
                        ran, waited = (a - b for a, b in zip(times[i], before[i], strict=True))
                        print(f"  process {i} ran for {ran:.3f} s, waited for a CPU {waited:.3f} s")
                next_look, seen = now + window, list(self.done)

    def _report(self, n: int, seconds: float) -> int:
        writer = self.results[0]
        readers = [self.results[i] for i in range(1, n)]
        for rank, result in enumerate(readers):
            for what in ("messages", "bytes", "digest"):
                if result[what] != writer[what]:
                    raise SystemExit(
                        f"reader {rank}: {what} {result[what]}, the writer's {writer[what]}"
                    )
        latency = [sum(column) for column in zip(*(r["latency"] for r in readers), strict=True)]
        most = max(r["most"] for r in readers)

        def percentile(share: float) -> float:
            want = sum(latency) * share
            running = 0
            for b, count in enumerate(latency):
                running += count
                if running > want:
                    return min(bucket_top(b), most)
            return most

        counts = {
            name: sum(r["counts"][name] for r in self.results.values()) for name in writer["counts"]
        }
        print(f"processes {n} (1 writer, {n - 1} readers) on {os.cpu_count()} CPUs")
        print(f"messages {writer['messages']}")
        print(f"verified {sum(r['messages'] for r in readers)}")
        print(f"bytes {writer['bytes']}")
        print(f"seconds {seconds:.1f}")
        print(f"messages_per_second {writer['messages'] / seconds:.0f}")
        print(
            f"latency_us min {min(r['least'] for r in readers):.1f} p50 {percentile(0.5):.1f} "
            f"p99.9 {percentile(0.999):.1f} max {most:.1f} ({sum(latency)} stamped)"
        )
        print(
            f"stalls {sum(r['stalls'] for r in readers)} over {STALL_SECONDS * 1000:.0f} ms, "
            f"longest {max(r['longest'] for r in readers) * 1000:.1f} ms"
        )
        print(" ".join(f"{name} {count}" for name, count in counts.items()))
        print(
            f"windows_without_progress {self.still} of {self.options.window:g} s; in "
            f"{self.starved} more other programs had nearly all of the CPUs"
        )
        return 1 if self.still else 0


if __name__ == "__main__":
    sys.exit(main())
