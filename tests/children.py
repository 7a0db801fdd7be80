"""What the child processes of test_processes.py and the workers of test_executor.py run."""

from __future__ import annotations

import ast
import ctypes
import enum
import os
import signal
import stat
import sys
import time

import numpy as np

from fastipc import processes
from fastipc.executor import Worker


def pipe_ends() -> list[tuple[int, bool]]:
    """(inode, for writing?) of every pipe that this process has open."""
    ends = []
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            with open(f"/proc/self/fdinfo/{name}") as info:
                flags = next(int(line.split()[1], 8) for line in info if line.startswith("flags"))
        except (OSError, StopIteration):
            continue
        if stat.S_ISFIFO(status.st_mode):
            ends.append((status.st_ino, flags & os.O_ACCMODE != os.O_RDONLY))
    return ends


# ---- for processes -----------------------------------------------------------------------------


def tell(*values):
    """Ready with what it was given, and some of its surroundings; then waits to be ended."""
    surroundings = {
        "values": values,
        "pid": os.getpid(),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "extra": os.environ.get("FASTIPC_TEST_EXTRA"),
        "seen": SEEN_AT_IMPORT,
        "sigint": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }
    processes.ready(surroundings)
    time.sleep(1000)


# what a library would have seen that looks at its variables when it is imported
SEEN_AT_IMPORT = os.environ.get("FASTIPC_TEST_EXTRA")


def tell_pipes():
    processes.ready(pipe_ends())
    time.sleep(1000)


def tell_pipes_of_a_fork():
    """What a process has that somebody else's fork makes in the child."""
    receiving, sending = os.pipe()
    if os.fork() == 0:
        os.write(sending, repr(pipe_ends()).encode())
        os._exit(0)
    os.wait()
    processes.ready(ast.literal_eval(os.read(receiving, 65536).decode()))
    time.sleep(1000)


def two_below():
    """Ready with the pids of a child that it has started, and of one that it has forked."""
    child = processes.start(tell, name="child")
    begun, begins = os.pipe()
    forked = os.fork()
    if forked == 0:
        os.write(begins, b"x")  # a signal that came amidst the fork could get lost
        time.sleep(1000)
    os.read(begun, 1)
    processes.ready((child.wait_ready(60)["pid"], forked))
    time.sleep(1000)


def ready_then(code):
    processes.ready()
    sys.exit(code)


def leave(code):
    sys.exit(code)


def fail(error):
    raise error


class Stubborn(Exception):
    """Pickles, and can't be made again."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def fail_stubbornly():
    raise Stubborn(1, 2)


def never_ready():
    time.sleep(1000)


def deaf():
    """Doesn't hear SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    processes.ready()
    time.sleep(1000)


def stuck():
    """Its main thread is in a call that no signal gets out of."""
    processes.ready()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    while True:
        ctypes.CDLL(None).sleep(1000)


def graceful(path):
    """Says in a file that it has come to its end in order."""
    processes.on_parent_death(lambda: path.with_suffix(".called").touch())
    processes.ready()
    try:
        path.with_suffix(".inside").touch()
        time.sleep(1000)
    finally:
        path.with_suffix(".ended").touch()


def family(generations, method, path):
    """A child with children of its own; each writes its pid into a file."""
    below = []
    if generations > 1:
        below = [
            processes.start(
                family, (generations - 1, method, path), name=f"below-{i}", start_method=method
            )
            for i in range(2)
        ]
        processes.wait_all_ready(below, 60)
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    processes.ready()
    time.sleep(1000)


# ---- workers -----------------------------------------------------------------------------------


class Refuses:
    """Pickles, and raises where it is unpickled."""

    def __init__(self, text="not here"):
        self.text = text

    def __reduce__(self):
        return _refuse, (self.text,)


def _refuse(text):
    raise LookupError(text)


class Method(enum.StrEnum):
    ECHO = "echo"


class Probe(Worker):
    def __init__(self, rank, local_rank, world_size, tag=None, trouble=None, log=None):
        super().__init__(rank, local_rank, world_size)
        self.tag = tag
        self.trouble = trouble
        self.log = log
        self.steps = ["made"]
        if trouble == "constructor":
            raise LookupError(f"rank {rank} has trouble")

    def init_device(self):
        self.steps.append("device")
        if self.trouble == "slow" and self.rank == 1:
            time.sleep(1000)
        if self.trouble == "dies" and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def load(self):
        self.steps.append("loaded")
        if self.trouble in ("load", "load and shutdown"):
            if self.rank < self.world_size - 1:
                self.write("loads")
                time.sleep(1000)
            while "loads" not in self.log.read_text() and self.rank > 0:
                time.sleep(0.01)
            raise LookupError(f"rank {self.rank} can't load")

    def shutdown(self):
        if self.log is not None:
            self.write("shutdown")
        if self.trouble == "load and shutdown":
            raise ValueError("there is nothing to shut down")

    def write(self, text):
        with open(self.log, "a") as file:
            file.write(f"{self.rank} {text}\n")

    def echo(self, value=None, *, other=None):
        return self.rank, value, other

    def about(self):
        return {"steps": self.steps, "tag": self.tag, "local": self.local_rank,
                "world": self.world_size, "pid": os.getpid(),
                "omp": os.environ.get("OMP_NUM_THREADS")}  # fmt: skip

    def total(self, array):
        return float(array.sum())

    def zeros(self, nbytes):
        return np.zeros(nbytes, np.uint8)

    def nap(self, seconds, ranks=None):
        if ranks is None or self.rank in ranks:
            time.sleep(seconds)
        return self.rank

    def nap_until(self, path, ranks=None):
        while (ranks is None or self.rank in ranks) and not path.exists():
            time.sleep(0.01)
        return self.rank

    def fail(self, ranks=None):
        if ranks is None or self.rank in ranks:
            raise KeyError(f"rank {self.rank}")
        return self.rank

    def fail_stubbornly(self):
        raise Stubborn(self.rank, "more")

    def unpicklable(self):
        return lambda: 1

    def refuses(self):
        return Refuses()

    def leave(self, rank, code):
        if self.rank == rank:
            sys.exit(code)
        return self.rank

    def stop_itself(self, rank):
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGSTOP)

    def start_child(self, method, path):
        """A grandchild of the executor's process."""
        child = processes.start(family, (1, method, path), name="grandchild", start_method=method)
        child.wait_ready(60)
        return child.pid
