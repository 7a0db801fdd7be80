"""A long run under load, in which nothing may grow and nobody may be called dead.

    python -m tests.soak --minutes 30 --plot soak.png
    python -m tests.soak --hours 24 --plot soak.png --data soak.jsonl

Every part below runs in processes of its own until the time is over, and checks every message:

    local    a writer and two readers, sizes from nothing to several chunks
    remote   a writer and a reader over TCP, encrypted
    codec    a client and a server over ZMQ sockets, messages with arrays, by the msgpack codec
    engine   an engine core in its process and its client, several requests at a time, some of which
             are aborted, with utility calls between
    churn    queues that are made, attached to, used and closed, with and without a name, and
             children that are forked meanwhile

From outside, /proc tells of each process: resident memory (all of it, what only it has, and its
share of what it shares), memory of segments, descriptors, threads, segments held open; and of all
together: files in the directory of named segments, temporary files, names that are new in /dev/shm.

The rule. The first third of the samples is left out: caches fill, buffers find their sizes.
    memory   by how much it rises in the rest: the slope of a robust line (Theil and Sen's) through
             the medians of STRETCHES stretches. At most ALLOWED_KIB in the whole of the rest,
             however long; more is a failure when it is certain, three standard errors more.
    counts   the least value in the last third must not be above the least in the second third:
             what comes and goes returns to its floor, a leak raises the floor
A PeerDied is a false alarm, since everyone is alive; a part without progress between two samples
stands still; a wrong message is an error. Each of these fails the run as well. The exit code is 0
when nothing failed. `--leak KIND` leaks on purpose: such a run must fail.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also when run as tests.soak

import msgspec
import numpy as np
from workers import Pattern

import fastipc
from fastipc import MessageQueue
from fastipc.codec import MsgpackDecoder, MsgpackEncoder
from fastipc.engine import EngineClient, EngineCore

# Growth of one process's memory in the judged part of the run. A page now and then is the
# allocator's; a leak of one small object per message is a hundred times as much in 20 minutes.
ALLOWED_KIB = 512
# In a run too short to have left its beginning behind: who holds messages of several MiB is still
# getting room for the first ones of their size (8 MiB in 6 s were seen). A leak per message or per
# round is more than this all the same.
ALLOWED_KIB_SHORT = 12288
SHORT_SECONDS = 600
SAMPLES = 1800  # in a run: the more, the smaller a growth is found under what goes up and down
STRETCHES = 20  # of the judged part; each of at least three samples
STANDSTILL_SECONDS = 20.0  # a loaded machine may keep a process waiting for a second or two
MEMORY = ("rss", "private", "pss", "segments")
COUNTS = ("descriptors", "threads", "memfds")
SHARED = ("named segments", "temporary files", "new names in /dev/shm")
LEAKS = ("memory", "descriptor", "thread", "segment", "file")
LARGEST = 3 << 20
CHUNK = 1 << 20


# ---- the parts ---------------------------------------------------------------------------------


class Job:
    """What a process of the run has: a way to say how far it is, and to hear that time is over."""

    def __init__(self, connection: Connection, pause: float) -> None:
        self._connection = connection
        self._next = 0.0
        self.pause = pause
        self.done = 0

    def count(self, n: int = 1) -> None:
        """Tells the supervisor once a second."""
        self.done += n
        now = time.monotonic()
        if now >= self._next:
            self._next = now + 1.0
            self._connection.send(("done", self.done))

    def over(self) -> bool:
        return self._connection.poll()

    def give(self, value: Any) -> None:
        self._connection.send(("value", value))

    def also(self, pids: dict[str, int]) -> None:
        """Processes of this one's own, which are to be looked at too."""
        self._connection.send(("also", pids))

    def take(self) -> Any:
        return self._connection.recv()


def queue_writer(job: Job, options: dict[str, Any]) -> None:
    pattern = Pattern(1, LARGEST)
    with MessageQueue(max_chunk_bytes=CHUNK, **options) as queue:
        job.give(queue.export_handle())
        queue.wait_until_ready(120)
        i = 0
        while not job.over():
            for _ in range(200):
                queue.enqueue(pattern.make(i))
                i += 1
            job.count(200)
            time.sleep(job.pause)


def queue_reader(job: Job, rank: int) -> None:
    pattern = Pattern(1, LARGEST)
    with MessageQueue.create_from_handle(job.take(), rank) as queue:
        queue.wait_until_ready(120)
        for i, message in enumerate(queue):
            pattern.check(i, message)
            job.count()


class Request(msgspec.Struct):
    number: int
    text: str
    arrays: list[np.ndarray]


def _request(pattern: Pattern, i: int) -> Request:
    number, payload = pattern.make(4 * i)
    return Request(number, f"request {i}", [payload, payload[::-1]])


def codec_server(job: Job) -> None:
    import zmq

    from fastipc.sockets import get_open_zmq_ipc_path, make_zmq_socket

    context = zmq.Context()
    path = get_open_zmq_ipc_path()
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(Request)
    pattern = Pattern(2, LARGEST)
    with make_zmq_socket(context, path, zmq.ROUTER, bind=True, linger=0) as socket:
        job.give(path)
        i = 0
        # Until the client's last word: it is told of the end a moment earlier or later. But not for
        # ever, should it have failed.
        while socket.poll(100) or not job.over() or socket.poll(30_000):
            if not socket.poll(0):
                continue
            identity, *frames = socket.recv_multipart(copy=False)
            if not frames[0]:
                break
            request = decoder.decode(frames)
            expected = _request(pattern, i)
            assert (request.number, request.text) == (expected.number, expected.text)
            for got, want in zip(request.arrays, expected.arrays, strict=True):
                assert np.array_equal(got, want)
            socket.send_multipart([identity, *encoder.encode((i, request.arrays[1]))], copy=False)
            i += 1
            job.count()
    context.term()


def codec_client(job: Job) -> None:
    import zmq

    from fastipc.sockets import BufferPool, make_zmq_socket, send_frames

    context = zmq.Context()
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(tuple[int, np.ndarray])
    pattern = Pattern(2, LARGEST)
    pool = BufferPool()
    path = job.take()
    with make_zmq_socket(context, path, zmq.DEALER, bind=False, linger=10_000) as socket:
        i = 0
        while not job.over():
            request = _request(pattern, i)
            buffer = pool.get()
            frames = encoder.encode_into(request, buffer)
            pool.give(buffer, send_frames(socket, frames, keep=request))
            assert socket.poll(60_000), "no answer within a minute"
            number, array = decoder.decode(socket.recv_multipart(copy=False))
            assert number == i
            assert np.array_equal(array, request.arrays[1])
            i += 1
            job.count()
            if i % 20 == 0:
                time.sleep(job.pause)
        socket.send(b"")
    context.term()


class Work(msgspec.Struct):
    request_id: str
    number: int
    steps: int
    payload: np.ndarray


class Output(msgspec.Struct):
    request_id: str
    step: int
    payload: np.ndarray
    finished: bool = False


class EchoCore(EngineCore):
    """Sends a request's array back at each of its steps."""

    request_type = Work
    output_type = Output

    def __init__(self, config: Any = None, *, index: int = 0) -> None:
        super().__init__(config, index=index)
        self.running: dict[str, list[Any]] = {}

    def add_request(self, request: Work) -> None:
        self.running[request.request_id] = [request, 0]

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self.running[request_id]

    def has_work(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Output]:
        outputs = []
        for request_id, entry in list(self.running.items()):
            request, step = entry
            entry[1] += 1
            finished = entry[1] == request.steps
            outputs.append(Output(request_id, step, request.payload, finished))
            if finished:
                del self.running[request_id]
        return outputs

    def count(self, numbers: list[int]) -> int:
        return sum(numbers)


def engine_client(job: Job) -> None:
    pattern = Pattern(4, 64 << 10)
    with EngineClient.launch(EchoCore, timeout=120) as client:
        job.also({f"engine {i}": engine.pid for i, engine in client.engines.items()})
        i = 0
        while not job.over():
            works = []
            for _ in range(8):
                number, payload = pattern.make(4 * i)
                works.append(Work(f"r{i}", number, 1 + i % 7, payload))
                i += 1
            streams = [client.add_request(work) for work in works]
            for work, stream in zip(works, streams, strict=True):
                steps = 0
                for output in stream:
                    assert (output.request_id, output.step) == (work.request_id, steps)
                    assert np.array_equal(output.payload, work.payload)
                    steps += 1
                    if work.number % 5 == 4:
                        stream.abort()
                assert steps == work.steps or work.number % 5 == 4
            assert client.call("count", [1, 2, i], timeout=60) == 3 + i
            job.count(len(works))
            time.sleep(job.pause / 2)


_leaked: list[Any] = []


def _leak(kind: str, directory: str) -> None:
    if kind == "memory":
        _leaked.append(b"x" * (16 << 20))  # seen after one turn: a slow machine makes few
    elif kind == "descriptor":
        _leaked.append(os.dup(0))
    elif kind == "thread":
        thread = threading.Thread(target=threading.Event().wait, daemon=True)
        thread.start()
    elif kind == "segment":
        for _ in range(8):
            _leaked.append(MessageQueue(1, 1, max_chunk_bytes=CHUNK, max_chunks=2))
    elif kind == "file":
        Path(directory, f"leaked{time.monotonic_ns()}").touch()


def churn(job: Job, directory: str, leaks: Sequence[str]) -> None:
    pattern = Pattern(3, LARGEST)
    turn = 0
    while not job.over():
        where = directory if turn % 2 else None
        with MessageQueue(2, 2, max_chunk_bytes=CHUNK, max_chunks=4, shm_dir=where) as queue:
            handle = queue.export_handle()
            pid = os.fork()
            if pid == 0:
                os._exit(_forked_reader(queue, handle, pattern))
            with MessageQueue.create_from_handle(handle, 0) as reader:
                queue.wait_until_ready(60)
                for i in range(20):
                    queue.enqueue(pattern.make(i))
                    pattern.check(i, reader.dequeue())
            _, status = os.waitpid(pid, 0)
            assert status == 0, f"a forked reader ended with status {status}"
        for kind in leaks:
            _leak(kind, directory)
        turn += 1
        job.count()
        time.sleep(10 * job.pause)


def _forked_reader(inherited: MessageQueue, handle: fastipc.Handle, pattern: Pattern) -> int:
    try:
        inherited.close()
        with MessageQueue.create_from_handle(handle, 1) as reader:
            for i in range(20):
                pattern.check(i, reader.dequeue())
    except BaseException as error:
        print(f"forked reader: {error!r}", file=sys.stderr, flush=True)
        return 1
    return 0


# Each part: its processes by name, with the arguments of each. The first one gives a value (a
# handle, a path), which the others take.
def parts(directory: str, leaks: Sequence[str]) -> dict[str, list[tuple[str, Any, tuple]]]:
    local = {"n_reader": 2, "n_local_reader": 2}
    # Little credit: what a reader that is behind holds unread is not to look like growth.
    remote = {"n_reader": 1, "n_local_reader": 0, "connect_ip": "127.0.0.1", "max_chunks": 4}
    return {
        "local": [
            ("local writer", queue_writer, (local,)),
            ("local reader 0", queue_reader, (0,)),
            ("local reader 1", queue_reader, (1,)),
        ],
        "remote": [
            ("remote writer", queue_writer, (remote,)),
            ("remote reader", queue_reader, (0,)),
        ],
        "codec": [("codec server", codec_server, ()), ("codec client", codec_client, ())],
        "engine": [("engine client", engine_client, ())],
        "churn": [("churn", churn, (directory, leaks))],
    }


def _run(target: Callable[..., None], connection: Connection, pause: float, args: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor ends the run
    job = Job(connection, pause)
    try:
        target(job, *args)
    except fastipc.PeerDied as error:
        connection.send(("false alarm", f"{error}"))
    except BaseException as error:
        connection.send(("error", repr(error)))
    else:
        connection.send(("ended", job.done))


# ---- looking from outside ----------------------------------------------------------------------


def look_at(pid: int) -> dict[str, float]:
    """Memory in KiB, and counts, of one process."""
    rollup: dict[str, int] = {}
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            if rest.endswith("kB\n"):
                rollup[name] = int(rest.split()[0])
    threads = len(os.listdir(f"/proc/{pid}/task"))
    segments: dict[int, int] = {}
    descriptors = 0
    for entry in os.scandir(f"/proc/{pid}/fd"):
        descriptors += 1
        try:
            if os.readlink(entry.path).startswith("/memfd:"):
                about = os.stat(entry.path)
                segments[about.st_ino] = about.st_blocks // 2
        except FileNotFoundError:
            continue
    return {
        "rss": rollup["Rss"],
        "private": rollup.get("Private_Clean", 0) + rollup.get("Private_Dirty", 0),
        # Without its share of mapped files, which grows whenever another program that has the same
        # libraries mapped comes to its end.
        "pss": rollup["Pss"] - rollup.get("Pss_File", 0),
        "segments": sum(segments.values()),
        "descriptors": descriptors,
        "threads": threads,
        "memfds": len(segments),
    }


def _entries(directory: str) -> int:
    return sum(len(names) for _, _, names in os.walk(directory))


class Watch:
    """Samples of everything, over time."""

    def __init__(self, named: str, temporary: str) -> None:
        self._named, self._temporary = named, temporary
        self._before = self._names()
        self.times: list[float] = []
        self.series: dict[tuple[str, str], list[float]] = {}

    @staticmethod
    def _names() -> set[str]:
        try:
            return {name for name in os.listdir("/dev/shm") if name.startswith("fastipc")}
        except FileNotFoundError:
            return set()

    def look(self, at: float, pids: dict[str, int]) -> dict[str, dict[str, float]]:
        seen = {name: look_at(pid) for name, pid in pids.items()}
        seen["all"] = dict(
            zip(
                SHARED,
                (
                    _entries(self._named),
                    _entries(self._temporary),
                    len(self._names() - self._before),
                ),
                strict=True,
            )
        )
        self.add(at, seen)
        return seen

    def add(self, at: float, seen: dict[str, dict[str, float]]) -> None:
        self.times.append(at)
        for name, values in seen.items():
            for kind, value in values.items():
                self.series.setdefault((name, kind), []).append(value)


# ---- judging -----------------------------------------------------------------------------------


def robust_slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Theil and Sen's: the median of the slopes between all pairs of samples."""
    t, v = np.asarray(times, float), np.asarray(values, float)
    i, j = np.triu_indices(len(t), 1)
    return float(np.median((v[j] - v[i]) / (t[j] - t[i])))


def growth(times: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """By how much the values rise from the first time to the last, and the standard error of that.

    The medians of STRETCHES stretches are compared, so that what goes up and down evens out; the
    error is estimated from how far they lie from the line.
    """
    n = max(3, min(STRETCHES, len(times) // 3))
    stretches = np.array_split(np.arange(len(times)), n)
    t = np.array([np.median(np.asarray(times)[s]) for s in stretches])
    v = np.array([np.median(np.asarray(values)[s]) for s in stretches])
    slope = robust_slope(t, v)
    rest = v - slope * t
    spread = 1.48 * float(np.median(np.abs(rest - np.median(rest))))  # of normal noise: its sigma
    error = spread / float(np.sqrt(np.sum((t - t.mean()) ** 2)))
    length = times[-1] - times[0]
    return slope * length, error * length


def judge(times: Sequence[float], series: dict[tuple[str, str], list[float]]) -> list[str]:
    """What grew, in sentences; empty when all is flat. The rule is in the module's docstring."""
    n = len(times)
    if n < 9:
        return [f"{n} samples are too few to judge: let it run longer"]
    second, last = n // 3, n - n // 3
    allowed = ALLOWED_KIB if times[-1] - times[0] >= SHORT_SECONDS else ALLOWED_KIB_SHORT
    grown = []
    for (name, kind), values in series.items():
        if kind in MEMORY:
            rise, error = growth(times[second:], values[second:])
            if rise - 3 * error > allowed:
                per_minute = rise / (times[-1] - times[second]) * 60
                grown.append(
                    f"{name}: {kind} grew by {rise:.0f} KiB, give or take {error:.0f} "
                    f"({per_minute:.1f} KiB/min; {allowed} KiB are allowed)"
                )
        elif min(values[last:]) > min(values[second:last]):
            grown.append(
                f"{name}: {kind} never came back to {min(values[second:last]):g}: at least "
                f"{min(values[last:]):g}"
            )
    return grown


def plot(path: str, times: Sequence[float], series: dict[tuple[str, str], list[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    minutes = np.asarray(times) / 60
    kinds = [*MEMORY, *COUNTS, "all"]
    figure, axes = pyplot.subplots(4, 2, figsize=(12, 13), sharex=True, layout="constrained")
    names = list(dict.fromkeys(name for name, _ in series if name != "all"))
    colours = {name: f"C{i}" for i, name in enumerate(names)}
    for kind, axis in zip(kinds, axes.flat, strict=True):
        if kind == "all":
            for shared in SHARED:
                axis.plot(minutes, series["all", shared], label=shared, linewidth=1)
            axis.set_title("files")
            axis.legend(fontsize=7)
        else:
            scale = 1024 if kind in MEMORY else 1
            for name in names:
                axis.plot(
                    minutes,
                    np.asarray(series[name, kind]) / scale,
                    label=name,
                    color=colours[name],
                    linewidth=1,
                )
            axis.set_title(f"{kind}, MiB" if kind in MEMORY else kind)
        axis.set_ylim(bottom=0)
        axis.axvspan(minutes[0], minutes[len(minutes) // 3], color="0.93", zorder=0)
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=7, ncols=2)
    for axis in axes[-1]:
        axis.set_xlabel("minutes (grey: not judged)")
    whole = io.BytesIO()
    figure.savefig(whole, dpi=72)
    pyplot.close(figure)
    from PIL import Image  # matplotlib needs it as well

    # with a palette it is a third as large, and looks the same
    Image.open(whole).convert("RGB").quantize(64).save(path, optimize=True)


# ---- the run -----------------------------------------------------------------------------------


class Run:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.seconds = arguments.minutes * 60.0
        self.failures: list[str] = []
        self.false_alarms = 0
        self.context = multiprocessing.get_context("spawn")
        self.processes: dict[str, Any] = {}
        self.connections: dict[str, Connection] = {}
        self.done: dict[str, int] = {}
        self.progress: dict[str, float] = {}
        self.ended: set[str] = set()
        self.values: dict[str, Any] = {}
        self.others: dict[str, int] = {}  # children of the processes, by name

    def _start(self, part: list[tuple[str, Any, tuple]]) -> None:
        first = part[0][0]
        for name, target, args in part:
            ours, theirs = self.context.Pipe()
            process = self.context.Process(
                target=_run, args=(target, theirs, self.arguments.pause, args), name=name
            )
            process.start()
            theirs.close()
            self.processes[name], self.connections[name] = process, ours
            self.done[name], self.progress[name] = 0, time.monotonic()
            if name != first:
                ours.send(self.values[first])
            elif len(part) > 1:
                while first not in self.values and not self.failures:
                    self._hear(1.0)

    def _hear(self, timeout: float) -> None:
        """Takes what the processes say."""
        names = {connection: name for name, connection in self.connections.items()}
        for connection in wait(list(names), timeout):
            name = names[connection]
            try:
                kind, value = connection.recv()
            except (EOFError, ConnectionError):
                if name not in self.ended:
                    self.failures.append(f"{name}: its process ended without a word")
                self.ended.add(name)
                del self.connections[name]
                continue
            if kind == "done":
                self.done[name], self.progress[name] = value, time.monotonic()
            elif kind == "also":
                self.others.update(value)
            elif kind == "value":
                self.values[name] = value
            elif kind == "ended":
                self.done[name] = value
                self.ended.add(name)
            else:
                self.ended.add(name)
                self.false_alarms += kind == "false alarm"
                self.failures.append(f"{name}: {kind}: {value}")

    def _stop(self) -> None:
        """Writers and those without one hear of the end; readers then see that it is."""
        for name, connection in self.connections.items():
            if name not in self.ended and "reader" not in name:
                try:
                    connection.send("over")
                except OSError:
                    pass  # it has ended, and _hear finds out how
        deadline = time.monotonic() + 60
        while len(self.ended) < len(self.processes) and time.monotonic() < deadline:
            self._hear(0.5)
        for name, process in self.processes.items():
            process.join(5)
            if process.is_alive():
                self.failures.append(f"{name}: still running a minute after the end")
                process.kill()
                process.join()

    def _sample(self, watch: Watch, begun: float, data: Any) -> None:
        pids = {name: process.pid for name, process in self.processes.items()} | self.others
        at = time.monotonic() - begun
        try:
            seen = watch.look(at, pids)
        except FileNotFoundError:
            return  # a process ended early: _hear says which
        if data:
            print(json.dumps({"seconds": round(at, 1), "done": self.done, **seen}), file=data)
            data.flush()
        for name, when in self.progress.items():
            if time.monotonic() - when > STANDSTILL_SECONDS:
                self.failures.append(f"{name}: no progress in {STANDSTILL_SECONDS:g} s")

    def __call__(self) -> int:
        a = self.arguments
        leaks = LEAKS if a.leak == "all" else [a.leak] if a.leak else []
        named = tempfile.mkdtemp(prefix="soak-", dir=a.shm_dir)
        temporary = tempfile.mkdtemp(prefix="soak-")
        os.environ["TMPDIR"] = temporary  # for the processes: what they leave is counted
        data = open(a.data, "w") if a.data else None  # noqa: SIM115
        watch = Watch(named, temporary)
        begun = time.monotonic()
        try:
            chosen = parts(named, leaks)
            for part in a.parts.split(",") if a.parts else chosen:
                self._start(chosen[part])
            while not self.failures and any(n == 0 for n in self.done.values()):
                self._hear(1.0)  # all have begun, so every series begins with the first sample
            begun = time.monotonic()
            every = max(0.25, self.seconds / SAMPLES)
            due = begun + every
            while time.monotonic() - begun < self.seconds and not self.failures:
                self._hear(max(0.0, min(1.0, due - time.monotonic())))
                if time.monotonic() >= due:
                    self._sample(watch, begun, data)
                    due += every
        except KeyboardInterrupt:
            print("interrupted: judging what there is", file=sys.stderr)
        finally:
            self._stop()
            if data:
                data.close()
            left = _entries(named) + _entries(temporary)
            shutil.rmtree(named, ignore_errors=True)
            shutil.rmtree(temporary, ignore_errors=True)
        if left and not leaks:
            self.failures.append(f"{left} files were left behind")
        self._report(watch, time.monotonic() - begun)
        if a.plot and watch.times:
            plot(a.plot, watch.times, watch.series)
        return 1 if self.failures else 0

    def _report(self, watch: Watch, seconds: float) -> None:
        self.failures += judge(watch.times, watch.series)
        print(f"seconds {seconds:.0f}")
        print(f"samples {len(watch.times)}")
        for name, done in self.done.items():
            print(f"done {done:>12}  {name}")
        second = len(watch.times) // 3
        for (name, kind), values in watch.series.items():
            judged = values[second:]
            if kind in MEMORY:
                rise, error = growth(watch.times[second:], judged) if len(judged) > 2 else (0, 0)
                print(
                    f"series {name}: {kind} KiB median {statistics.median(judged):.0f} least "
                    f"{min(judged):.0f} most {max(judged):.0f} growth {rise:+.0f} +- {error:.0f}"
                )
            else:
                print(f"series {name}: {kind} least {min(judged):g} most {max(judged):g}")
        print(f"false_alarms {self.false_alarms}")
        for failure in self.failures:
            print(f"FAILED {failure}")
        print("flat" if not self.failures else "not flat")


def replay(path: str, picture: str | None) -> int:
    """Judges, and plots, the samples that another run has stored."""
    watch = Watch("", "")
    with open(path) as lines:
        for line in lines:
            sample = json.loads(line)
            at = sample.pop("seconds")
            del sample["done"]
            watch.add(at, sample)
    grown = judge(watch.times, watch.series)
    for sentence in grown:
        print(f"FAILED {sentence}")
    print("flat" if not grown else "not flat")
    if picture:
        plot(picture, watch.times, watch.series)
    return 1 if grown else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__.split("\n")[0]
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=30.0)
    length.add_argument("--hours", type=float)
    parser.add_argument("--plot", help="a PNG of all series (needs matplotlib: the extra bench)")
    parser.add_argument("--data", help="all samples, a JSON object a line, as they are taken")
    parser.add_argument("--replay", metavar="DATA", help="judge and plot what --data has stored")
    parser.add_argument("--parts", help="only these, with commas between")
    parser.add_argument(
        "--shm-dir",
        default="/dev/shm" if os.path.isdir("/dev/shm") else None,
        help="where the directory of named segments is made",
    )
    parser.add_argument("--leak", choices=[*LEAKS, "all"], help="leak on purpose, in churn")
    parser.add_argument(
        "--pause", type=float, default=0.05, help="seconds between bursts; less is more load"
    )
    arguments = parser.parse_args()
    if arguments.hours is not None:
        arguments.minutes = arguments.hours * 60
    if arguments.replay:
        return replay(arguments.replay, arguments.plot)
    # Ended by kill: the processes are told, and what was made is removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return Run(arguments)()


if __name__ == "__main__":
    sys.exit(main())
