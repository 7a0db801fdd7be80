"""What is measured: the cases, how a round of each is played, and the targets.

A round of a case gives a participant a few figures by name (`Figure`), the first of which decides
who is the best rival. A `Target` compares one of fastipc's with another participant's, or with a
bound of its own.
"""

import os
import time
from dataclasses import dataclass, field

from . import objects, peers

MIB = objects.MIB


@dataclass(frozen=True)
class Figure:
    name: str
    unit: str
    lower_is_better: bool


@dataclass(frozen=True)
class Target:
    figure: str
    against: str  # a participant's name, BEST_RIVAL, or "" for an absolute bound
    bound: float
    at_the_worst: float | None = None  # a second bound, for which the profile has to answer


BEST_RIVAL = "best rival"
BARE = "bare"  # floor.py's spin ping-pong that pickles and unpickles in place
PICKLE = "pickle alone"  # what dumps and loads allow when nothing else costs anything
SMALLER = "fastipc 8 MiB"

LATENCY = Figure("p50", "us", True)
TAIL = Figure("p99", "us", True)
RATE = Figure("rate", "msg/s", False)
THROUGHPUT = Figure("rate", "GB/s", False)
READER_CPU = Figure("reader CPU", "%", True)
WRITER_CPU = Figure("writer CPU", "%", True)


@dataclass(frozen=True)
class Case:
    name: str
    what: str
    payload: str
    play: object  # play(team, case, options) -> {figure name: value}
    figures: tuple
    targets: tuple = ()
    readers: int = 1
    replies: bool = False
    references: tuple = ()  # participants that are not rivals: BARE, PICKLE, SMALLER
    slow: bool = False  # a round takes seconds whatever the channel
    rounds: int = 0  # where it differs from the usual number
    floor: str = "pingpong_ns"  # what beside the ping-pong bounds this case
    extra: dict = field(default_factory=dict)

    @property
    def arrays(self):
        return self.payload.startswith("array")

    @property
    def largest(self):
        return {"array8m": 8 * MIB, "array32m": 32 * MIB}.get(self.payload, 1 << 16)


@dataclass
class Options:
    """How long to measure."""

    seconds: float = 0.3  # a round of a quick case
    idle_seconds: float = 10.0
    rate_seconds: float = 3.0
    wake_gap_s: float = 2.0
    wakes: int = 3  # in a round


# -- how a round is played -----------------------------------------------------------------------

# A round may be that much slower than the last one foretold before it counts as hung.
_PATIENCE_S = 30


def _limit(seconds):
    return _PATIENCE_S + 10 * seconds


def _percent(cpu_ns, seconds):
    return 100.0 * cpu_ns / (seconds * 1e9)


def _counted(team, options, first, play):
    """Plays a round whose length is a number of messages, so that it takes about the wanted time.

    The number is learnt in rounds that do not count, and adjusted after each that does: reading a
    clock for each message would cost as much as the message."""
    if not hasattr(team, "count"):
        team.count = first
        for _ in range(8):
            seconds = play(team.count)[1]
            if seconds > options.seconds / 2:
                break
            team.count = _next_count(team.count, seconds, options.seconds)
    figures, seconds = play(team.count)
    team.count = _next_count(team.count, seconds, options.seconds)
    return figures


def _next_count(count, seconds, wanted):
    # At most 16 times more: the first rounds are slowed by imports, pages and schedulers.
    return max(2, int(count * min(16.0, wanted / max(seconds, 1e-6))))


def round_trip(team, case, options):
    def play(count):
        written, read, _ = team.round("echo", "ping", _limit(options.seconds), {"count": count})
        seconds = written["seconds"]
        return {
            "p50": written["p50_ns"] / 1e3,
            "p99": written["p99_ns"] / 1e3,
            "writer CPU": _percent(written["cpu_ns"], seconds),
            "reader CPU": _percent(read[0]["cpu_ns"], seconds),
        }, seconds

    return _counted(team, options, 50, play)


def one_way(team, case, options):
    """From the writer's first send to the last reader's last message."""
    job = "receive_arrays" if case.arrays else "receive"

    def play(count):
        written, read, _ = team.round(job, "stream", _limit(options.seconds), {"count": count})
        seconds = (max(r["end"] for r in read) - written["begin"]) / 1e9
        rate = count / seconds
        if case.arrays:
            rate *= case.largest / 1e9
        return {
            "rate": rate,
            "writer CPU": _percent(written["cpu_ns"], seconds),
            "reader CPU": _percent(sum(r["cpu_ns"] for r in read), seconds),
        }, seconds

    if case.arrays and not hasattr(team, "kept"):
        # More arrays than any channel here has chunks or samples by default, but 32 MiB only a few.
        team.kept = 12 if case.largest <= 8 * MIB else 6
        team.round("keep_arrays", "distinct_arrays", _limit(2), {"count": team.kept})
    return _counted(team, options, 2 if case.arrays else 200, play)


def paced(team, case, options):
    """Messages at long intervals: how old they are on arrival, what it costs the reader."""
    if "per_second" in case.extra:
        period = 1 / case.extra["per_second"]
        count = max(5, int(options.rate_seconds / period))
    else:
        period, count = options.wake_gap_s, options.wakes
    written, read, _ = team.round(
        "receive_stamped",
        "paced",
        _limit(period * count),
        {"count": count, "period": period},
        {"count": count},
    )
    ages = sorted(read[0]["ages_ns"])
    seconds = read[0]["seconds"]
    return {
        "p50": peers.quantile(ages, 0.5) / 1e3,
        "p99": peers.quantile(ages, 0.99) / 1e3,
        "writer CPU": _percent(written["cpu_ns"], seconds),
        "reader CPU": _percent(read[0]["cpu_ns"], seconds),
    }


def idle(team, case, options):
    """The processor time of a reader that waits and gets nothing, seen from outside."""
    used = []

    def watch(pids):
        time.sleep(0.5)  # it may spin for a moment before it sleeps; that is another case's figure
        before, begin = cpu_ns(pids[0]), time.monotonic_ns()
        time.sleep(options.idle_seconds)
        used.append(_percent(cpu_ns(pids[0]) - before, (time.monotonic_ns() - begin) / 1e9))

    limit = _limit(options.idle_seconds)
    team.round("receive", "stream", limit, {"count": 1}, pause=watch)
    return {"reader CPU": used[0]}


def cpu_ns(pid):
    """Processor time of another process, to the nanosecond where the kernel offers its clock."""
    try:
        # clock_getcpuclockid(3), as the kernel spells it.
        return time.clock_gettime_ns((~pid << 3) | 2)
    except (AttributeError, OSError):
        import psutil

        times = psutil.Process(pid).cpu_times()
        return int((times.user + times.system) * 1e9)


def pickle_costs(team, case, options):
    """The rate that pickling alone allows."""
    costs = team.round_alone(
        "pickle_alone", _limit(options.seconds), {"seconds": min(options.seconds, 0.2)}
    )
    dumps, loads = costs["dumps_ns"], costs["loads_ns"]
    # At least what one side cannot do without, and all of it shared among the processors.
    per_message = max(dumps, loads, (dumps + case.readers * loads) / processors())
    return {"rate": 1e9 / per_message, "dumps_us": dumps / 1e3, "loads_us": loads / 1e3}


def processors():
    """How many processors this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


# -- the cases -----------------------------------------------------------------------------------

_FLOW = (RATE, WRITER_CPU, READER_CPU)
_ARRAY_FLOW = (THROUGHPUT, WRITER_CPU, READER_CPU)
_TRIP = (LATENCY, TAIL, WRITER_CPU, READER_CPU)
_PACED = (LATENCY, TAIL, READER_CPU, WRITER_CPU)
_LIKE_A_PIPE = (Target("p50", "mp.Pipe", 1.15), Target("reader CPU", "mp.Pipe", 1.25))

CASES = {
    case.name: case
    for case in (
        Case(
            "rtt64",
            "64-byte object, there and back",
            "small",
            round_trip,
            _TRIP,
            (Target("p50", BEST_RIVAL, 1 / 8, at_the_worst=1 / 6),),
            replies=True,
            references=(BARE,),
        ),
        Case(
            "rtt5k",
            "5 KB scheduler output, there and back",
            "scheduler_output",
            round_trip,
            _TRIP,
            (Target("p50", BARE, 1.15),),
            replies=True,
            references=(BARE,),
        ),
        Case(
            "stream64",
            "64-byte objects, one way",
            "small",
            one_way,
            _FLOW,
            (Target("rate", BEST_RIVAL, 8),),
            references=(PICKLE,),
        ),
        Case(
            "stream5k",
            "5 KB scheduler outputs, one way",
            "scheduler_output",
            one_way,
            _FLOW,
            (Target("rate", PICKLE, 0.9),),
            references=(PICKLE,),
        ),
        Case(
            "array8m",
            "float32 arrays of 8 MiB, one way, owned and writable",
            "array8m",
            one_way,
            _ARRAY_FLOW,
            (Target("rate", BEST_RIVAL, 1.3),),
            floor="memcpy_gbs",
        ),
        Case(
            "array32m",
            "float32 arrays of 32 MiB, one way, owned and writable",
            "array32m",
            one_way,
            _ARRAY_FLOW,
            (Target("rate", SMALLER, 0.7),),
            references=(SMALLER,),
            floor="memcpy_gbs",
        ),
        Case(
            "fan2_5k",
            "5 KB scheduler outputs to 2 readers",
            "scheduler_output",
            one_way,
            _FLOW,
            readers=2,
            references=(PICKLE,),
        ),
        Case(
            "fan4_5k",
            "5 KB scheduler outputs to 4 readers",
            "scheduler_output",
            one_way,
            _FLOW,
            (Target("rate", PICKLE, 0.75),),
            readers=4,
            references=(PICKLE,),
        ),
        Case(
            "wake2s",
            "wake-up of a reader that was idle for 2 s",
            "small",
            paced,
            (LATENCY, TAIL),
            (Target("p50", "mp.Pipe", 1.15),),
            slow=True,
            floor="futex_us",
        ),
        Case(
            "rate30",
            "30 messages of 64 bytes a second",
            "small",
            paced,
            _PACED,
            _LIKE_A_PIPE,
            slow=True,
            floor="futex_us",
            extra={"per_second": 30},
        ),
        Case(
            "rate200",
            "200 messages of 64 bytes a second",
            "small",
            paced,
            _PACED,
            _LIKE_A_PIPE,
            slow=True,
            floor="futex_us",
            extra={"per_second": 200},
        ),
        Case(
            "idle",
            "a reader that waits",
            "small",
            idle,
            (READER_CPU,),
            (Target("reader CPU", "", 0.1),),
            slow=True,
            rounds=2,
            floor="futex_us",
        ),
    )
}
