"""What several test modules share: both ends in one process, child processes, conditions."""

from __future__ import annotations

import linecache
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import CodeType, FrameType
from typing import Any

import psutil

import fastipc
from fastipc import MessageQueue

NIGHTLY = os.environ.get("FASTIPC_NIGHTLY") == "1"
# Messages in a cell of the large tables.
MESSAGES = int(os.environ.get("FASTIPC_TEST_MESSAGES", "20000" if NIGHTLY else "400"))

# The promises in real time (a dead peer is reported within 1 s, a lost wake-up costs at most
# 0.3 s) are watched with five times the room: what is late by more is wrong, not merely slow.
DEATH_WATCHDOG = 5 * 1.0
WAKE_WATCHDOG = 5 * 0.3


@contextmanager
def ends(
    n_reader: int = 1, kind: type = MessageQueue, **options: Any
) -> Iterator[tuple[Any, list[Any]]]:
    """A writer and all its readers, in this process."""
    if kind is MessageQueue:
        writer = MessageQueue(n_reader, n_reader, **options)
    else:
        writer = kind(n_reader, **options)
    readers: list[Any] = []
    try:
        handle = writer.export_handle()
        for rank in handle.local_reader_ranks:
            readers.append(kind.create_from_handle(handle, rank))
        yield writer, readers
    finally:
        writer.close()
        for reader in readers:
            reader.close()


@contextmanager
def pair(**options: Any) -> Iterator[tuple[Any, Any]]:
    """A writer and its only reader, in this process."""
    with ends(1, **options) as (writer, (reader,)):
        yield writer, reader


def eventually(condition: Callable[[], Any], pause: float = 0.005) -> Any:
    """Waits until the condition holds and returns its value; pytest-timeout is the watchdog."""
    while not (value := condition()):
        time.sleep(pause)
    return value


class Interrupted(BaseException):
    """What a signal handler raises."""


def within(*files: str) -> Callable[[CodeType], bool]:
    """Whether code is in a file whose path ends so."""
    return lambda code: code.co_filename.endswith(files)


def interrupted_at(
    point: int, where: Callable[[CodeType], bool], call: Callable[[], object]
) -> bool:
    """Calls, and has Interrupted raised at that line of those that it comes to where `where` says
    yes, as a signal handler would. Returns whether it came so far.

    (Not at the lines that begin `with` and `try`: no signal handler is called there, nor would the
    with-statement around it end.)"""
    left = point

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not where(frame.f_code):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith(("with ", "try:")):
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False


def asleep(end: Any, more_than: int = 0) -> Callable[[], bool]:
    """A condition: a wait on this end has gone to the kernel more than so many times."""
    return lambda: end.stats()["sleeps"] > more_than


def forever(call: Callable[[], Any]) -> None:
    """Calls until it raises."""
    while True:
        call()


def drain(reader: MessageQueue) -> list[Any]:
    """What can be read without waiting."""
    got = []
    while True:
        try:
            got.append(reader.dequeue(timeout=0))
        except fastipc.Empty:
            return got


def drain_until_dead(reader: MessageQueue) -> tuple[list[Any], fastipc.PeerDied]:
    """Everything that was published, and then how the reader learns of the writer's death."""
    got = []
    while True:
        try:
            got.append(reader.dequeue())
        except fastipc.PeerDied as error:
            return got, error


def descriptors() -> set[str]:
    """This process's descriptors of segments, by number and target."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if "fastipc" in target:
            found.add(f"{name} {target}")
    return found


def mapped() -> int:
    """How many mappings of segments this process has."""
    with open("/proc/self/maps") as maps:
        return sum("fastipc" in line for line in maps)


def resident_bytes() -> int:
    """Memory of this process that is not shared with others."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


# ---- child processes ---------------------------------------------------------------------------


def _run(target: Callable[..., Any], connection: Connection, args: Sequence[Any]) -> None:
    try:
        value = target(connection, *args)
    except BaseException as error:
        try:
            pickle.dumps(error)
        except Exception:
            error = RuntimeError(repr(error))
        connection.send(("error", error))
    else:
        connection.send(("value", value))


class Member:
    """A child process that runs a function of workers.py."""

    def __init__(self, method: str, target: Callable[..., Any], args: Sequence[Any]) -> None:
        context = multiprocessing.get_context(method)
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(target, theirs, args), daemon=True)
        self.process.start()
        theirs.close()
        self.pid = self.process.pid

    def said(self, expected: str) -> None:
        """Waits for the next thing that the child reports."""
        got = self._connection.recv()
        if isinstance(got, tuple) and got[0] == "error":
            raise got[1]
        assert got == expected

    def tell(self, what: Any) -> None:
        self._connection.send(what)

    def result(self) -> Any:
        """What the function returned, or raised; the process has ended then."""
        kind, value = self._connection.recv()
        self.process.join()
        if kind == "error":
            raise value
        assert kind == "value", f"the child said {kind!r} instead of returning"
        return value

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        """SIGSTOP, and waits until it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        eventually(lambda: process_state(self.pid) == "T")

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()
        self._connection.close()


def process_state(pid: int) -> str:
    """One letter, as ps shows it: T is stopped, Z has ended, S sleeps."""
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0]


def has_ended(process: psutil.Process) -> bool:
    """Whether at most its exit code is left of it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # between the two
        return True


class Team:
    """Child processes of one test; those that still run at its end are killed."""

    def __init__(self, method: str = "spawn") -> None:
        self.method = method
        self.members: list[Member] = []

    def start(self, target: Callable[..., Any], *args: Any) -> Member:
        member = Member(self.method, target, args)
        self.members.append(member)
        return member

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.close()


def in_fork(function: Callable[[], Any]) -> Any:
    """Runs the function in a forked child; returns its value, or raises what it raised."""
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(receiving)
            try:
                outcome = ("value", function())
            except BaseException as error:
                outcome = ("error", error)
            with os.fdopen(sending, "wb") as stream:
                pickle.dump(outcome, stream)
            code = 0
        finally:
            os._exit(code)
    os.close(sending)
    with os.fdopen(receiving, "rb") as stream:
        data = stream.read()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"the child ended with status {status}"
    kind, value = pickle.loads(data)
    if kind == "error":
        raise value
    return value
