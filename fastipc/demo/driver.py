"""The writer of the demo: starts the workers, sends, checks what comes back, and cleans up."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

import fastipc
from fastipc import Closed, Handle, MessageQueue, PeerDied
from fastipc.demo.corpus import CHUNK_BYTES, SMALL_BYTES, Corpus, Piece
from fastipc.demo.worker import Digest, Done, serve

# Messages sent and not yet answered by all. Fewer than the slots of a reply queue, so that a
# worker never waits for room there while the writer waits for room here.
WINDOW = 32
# The share of the time, and at most how long, one message at a time is sent to measure round trips.
ALONE_SHARE = 0.2
ALONE_SECONDS = 1.0
# How long a worker may take to import and attach: a loaded machine needs seconds.
START_SECONDS = 60.0
# How long a worker may take to see that its queue is closed, before it is killed.
STOP_SECONDS = 5.0
# How often a wait for replies is left, to draw the progress.
TICK_SECONDS = 0.1


class DemoFailed(Exception):
    """The run did not end with every digest verified."""

    def as_dict(self) -> dict[str, Any]:
        return {"type": type(self).__name__, "message": str(self), **vars(self)}


class WrongDigest(DemoFailed):
    """A worker answered with what is not the digest of what was sent."""

    def __init__(self, rank: int, pid: int | None, sequence: int, nbytes: int) -> None:
        super().__init__(
            f"worker {rank} (pid {pid}) answered message {sequence} ({nbytes:,} bytes) "
            "with a wrong digest"
        )
        self.rank, self.pid, self.sequence, self.nbytes = rank, pid, sequence, nbytes


class WrongOrder(DemoFailed):
    """A worker's answers are not one for each message, in order."""

    def __init__(self, rank: int, pid: int | None, expected: int, got: object) -> None:
        super().__init__(
            f"worker {rank} (pid {pid}) answered {got!r} when message {expected} was next"
        )
        self.rank, self.pid = rank, pid


class WorkerDied(DemoFailed):
    """A worker ended, or was ended, before its work was done."""

    def __init__(self, rank: int | None, pid: int | None, how: str) -> None:
        super().__init__(f"worker {rank} (pid {pid}) died: {how}")
        self.rank, self.pid = rank, pid


class ProcessUse(NamedTuple):
    name: str
    pid: int
    messages: int
    cpu_seconds: float


class Result(NamedTuple):
    """What a run that verified everything measured."""

    corpus: Corpus
    workers: int
    messages: int
    round_trip_us: Any  # float64, one for each worker's answer to each message sent alone
    stream_messages: int
    stream_bytes: int
    stream_seconds: float
    seconds: float
    processes: list[ProcessUse]

    def as_dict(self) -> dict[str, Any]:
        p50, p99 = np.percentile(self.round_trip_us, [50, 99])
        return {
            "verified": True,
            "workers": self.workers,
            "seconds": self.seconds,
            "messages": self.messages,
            "digests": self.messages * self.workers,
            "messages_per_second": self.stream_messages / self.stream_seconds,
            "gb_per_second": self.stream_bytes / self.stream_seconds / 1e9,
            "round_trip_us": {
                "p50": float(p50),
                "p99": float(p99),
                "samples": len(self.round_trip_us),
                "max_bytes": SMALL_BYTES,
            },
            "corpus": {
                "path": os.fspath(self.corpus.path),
                "files": self.corpus.files,
                "bytes": self.corpus.bytes_read,
                "pieces": len(self.corpus.pieces),
                "larger_than_chunk": self.corpus.larger_than_chunk,
                "max_chunk_bytes": CHUNK_BYTES,
            },
            "processes": [
                {**use._asdict(), "cpu_percent": 100 * use.cpu_seconds / self.seconds}
                for use in self.processes
            ],
        }


class Watcher:
    """What a run tells about itself while it goes on."""

    def started(self, pids: list[int | None]) -> None: ...

    def moved(self, elapsed: float, messages: int, nbytes: int) -> None: ...


def run(corpus: Corpus, workers: int, seconds: float, watcher: Watcher, digest: Digest) -> Result:
    """Send the pieces of ``corpus`` round and round for ``seconds``, and check every answer.

    Raises DemoFailed, or KeyboardInterrupt; either way no worker is left.
    """
    with Team(workers, digest) as team:
        watcher.started([process.pid for process in team.processes])
        return _measure(team, corpus, seconds, watcher)


def _measure(team: Team, corpus: Corpus, seconds: float, watcher: Watcher) -> Result:
    cpu_at_start = time.process_time()
    start = time.monotonic()

    def watch() -> None:
        watcher.moved(time.monotonic() - start, team.messages, team.nbytes)

    alone = min(ALONE_SHARE * seconds, ALONE_SECONDS)
    team.send_all(itertools.cycle(corpus.small), 1, start + alone, watch)
    round_trips = np.array(team.round_trips) * 1e6
    alone_messages, alone_bytes = team.messages, team.nbytes

    stream_start = time.monotonic()
    team.send_all(itertools.cycle(corpus.pieces), WINDOW, start + seconds, watch)
    end = time.monotonic()
    own_cpu = time.process_time() - cpu_at_start

    use = [ProcessUse("writer", os.getpid(), team.messages, own_cpu)]
    for rank, done in enumerate(team.finish()):
        pid = team.processes[rank].pid
        assert pid is not None
        if done.messages != team.messages:
            raise WrongOrder(rank, pid, team.messages, done)
        use.append(ProcessUse(f"worker {rank}", pid, done.messages, done.cpu_seconds))
    return Result(
        corpus=corpus,
        workers=len(team.processes),
        messages=team.messages,
        round_trip_us=round_trips,
        stream_messages=team.messages - alone_messages,
        stream_bytes=team.nbytes - alone_bytes,
        stream_seconds=end - stream_start,
        seconds=end - start,
        processes=use,
    )


class Sent(NamedTuple):
    piece: Piece
    at: float


class Team:
    """The workers, the queue to them all, and the queue back from each."""

    def __init__(self, workers: int, digest: Digest) -> None:
        self.messages = 0
        self.nbytes = 0
        # Seconds between a message and each worker's answer to it.
        self.round_trips = array("d")
        self.processes: list[SpawnProcess] = []
        self._digest = digest
        self._workers = workers
        self._ready = False
        self._replies: list[MessageQueue] = []
        # By sequence number, from the oldest that somebody has not answered.
        self._in_flight: dict[int, Sent] = {}
        self._answered = [0] * workers
        self._work = MessageQueue(workers, workers, max_chunk_bytes=CHUNK_BYTES)

    def __enter__(self) -> Team:
        try:
            with self._naming_the_dead():
                self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        # Started here, because starting it unblocks SIGINT behind the back of _interrupt_held.
        resource_tracker.ensure_running()
        handle = self._work.export_handle().to_str()
        from_workers: list[Connection] = []
        try:
            for rank in range(self._workers):
                ours, theirs = context.Pipe(duplex=False)
                from_workers.append(ours)
                process = context.Process(
                    target=serve, args=(handle, rank, theirs, self._digest), daemon=True
                )
                with theirs, _interrupt_held():
                    process.start()
                    self.processes.append(process)
            for rank, connection in enumerate(from_workers):
                reply_handle = Handle.from_str(self._first_word(rank, connection))
                self._replies.append(MessageQueue.create_from_handle(reply_handle, 0))
        finally:
            for connection in from_workers:
                connection.close()
        self._work.wait_until_ready(START_SECONDS)
        for replies in self._replies:
            replies.wait_until_ready(START_SECONDS)
        self._ready = True

    def _first_word(self, rank: int, connection: Connection) -> str:
        try:
            if connection.poll(START_SECONDS):
                return str(connection.recv())
            how = f"not ready after {START_SECONDS:g} s"
        except EOFError:  # only the worker has the other end
            how = self._ending(rank)
        raise WorkerDied(rank, self.processes[rank].pid, how)

    def _ending(self, rank: int) -> str:
        process = self.processes[rank]
        process.join(STOP_SECONDS)
        return f"it ended early, with exit code {process.exitcode}"

    def send_all(
        self, pieces: Iterable[Piece], window: int, until: float, watch: Callable[[], None]
    ) -> None:
        """Send until ``until``, with up to ``window`` messages in flight; return when all are back.

        At least one is sent, however short the time.
        """
        with self._naming_the_dead():
            for piece in pieces:
                while len(self._in_flight) >= window:
                    self._collect()
                    watch()
                self._send(piece)
                if time.monotonic() >= until:
                    break
            while self._in_flight:
                self._collect()
                watch()

    def _send(self, piece: Piece) -> None:
        sequence = self.messages
        self._in_flight[sequence] = Sent(piece, time.monotonic())
        self._work.enqueue((sequence, piece.data))
        self.messages += 1
        self.nbytes += piece.data.nbytes

    def _collect(self) -> None:
        """Take every answer that is there, or wait up to one tick for the first."""
        readable = fastipc.wait(self._replies, timeout=TICK_SECONDS)
        for rank, replies in enumerate(self._replies):
            if any(replies is queue for queue in readable):
                self._check(rank, replies.dequeue())
        slowest = min(self._answered)
        for sequence in list(self._in_flight):
            if sequence >= slowest:
                break
            del self._in_flight[sequence]

    def _check(self, rank: int, answer: Any) -> None:
        now = time.monotonic()
        expected = self._answered[rank]
        pid = self.processes[rank].pid
        if not (isinstance(answer, tuple) and len(answer) == 2 and answer[0] == expected):
            raise WrongOrder(rank, pid, expected, answer)
        sent = self._in_flight[expected]
        if answer[1] != sent.piece.digest:
            raise WrongDigest(rank, pid, expected, sent.piece.data.nbytes)
        self.round_trips.append(now - sent.at)
        self._answered[rank] += 1

    def finish(self) -> list[Done]:
        """Tell the workers to end; return each one's last message."""
        with self._naming_the_dead():
            self._work.enqueue(None)
            done = [Done(*replies.dequeue(START_SECONDS)) for replies in self._replies]
            for rank, process in enumerate(self.processes):
                process.join(STOP_SECONDS)
                if process.exitcode != 0:
                    raise WorkerDied(rank, process.pid, self._ending(rank))
        return done

    @contextmanager
    def _naming_the_dead(self) -> Iterator[None]:
        """Turn what the queues say of a dead peer into the worker's rank and pid."""
        try:
            yield
        except PeerDied as exc:
            rank = exc.rank
            if rank is None:  # the writer of a reply queue, which there has no rank
                pids = [process.pid for process in self.processes]
                rank = pids.index(exc.pid) if exc.pid in pids else None
            raise WorkerDied(rank, exc.pid, str(exc)) from exc
        except Closed as exc:
            # A worker closes its queues by itself only when an exception ends it.
            for rank, process in enumerate(self.processes):
                process.join(TICK_SECONDS)
                if process.exitcode is not None:
                    raise WorkerDied(rank, process.pid, self._ending(rank)) from exc
            raise DemoFailed(f"a queue was closed early: {exc}") from exc

    def _stop(self) -> None:
        """Close every queue, which ends the workers, and leave none alive."""
        with _interrupt_held():
            if not self._ready:
                # They may not have attached yet, and cannot tell a closed queue from a bad handle.
                for process in self.processes:
                    process.kill()
                    process.join()
            for queue in (self._work, *self._replies):
                queue.close()
            deadline = time.monotonic() + STOP_SECONDS
            for process in self.processes:
                process.join(max(0.0, deadline - time.monotonic()))
                if process.is_alive():
                    process.kill()
                    process.join()
                process.close()


@contextmanager
def _interrupt_held() -> Iterator[None]:
    """Keep Ctrl-C back until the block is left; a process that is started in it never gets one.

    A terminal sends Ctrl-C to every process of the group. Only the writer should act on it: the
    workers end because their queue closes, without a traceback each.
    """
    caught: list[tuple[int, FrameType | None]] = []
    # The mask is what a new process inherits, but it holds back this thread only; a library's
    # thread would still take the signal, so the handler is replaced as well.
    handler = signal.signal(signal.SIGINT, lambda *arguments: caught.append(arguments))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if caught and callable(handler):
        handler(*caught[0])
