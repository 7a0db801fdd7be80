"""Several threads share an end: each message is sent, or delivered, once, and nobody hangs."""

from __future__ import annotations

import queue
import sys
import threading
import time
import warnings

import numpy as np
import pytest
from support import NIGHTLY, asleep, ends, eventually, pair

import fastipc
from fastipc import Closed, Empty, Full, MessageQueue

ROUNDS = 20 if NIGHTLY else 1


def _start(*targets) -> list[threading.Thread]:
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    return threads


def _join(threads) -> None:
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("slots", [2, 256])
@pytest.mark.parametrize("nbytes", [0, 3000, 40_000])
def test_threads_share_a_writer(nbytes, slots):
    """Every reader sees each thread's messages in that thread's order."""
    n, per_thread = 4, 150 * ROUNDS
    options = {"max_chunk_bytes": 8192, "max_chunks": 4, "slots": slots}
    with ends(2, **options) as (writer, readers):
        wrong = []

        def write(number):
            for i in range(per_thread):
                writer.enqueue((number, i, np.full(nbytes, number * 31 + i & 0xFF, np.uint8)))

        def read(reader):
            nexts = [0] * n
            for number, i, array in reader:
                if i != nexts[number] or (array != number * 31 + i & 0xFF).any():
                    wrong.append((number, i))
                nexts[number] += 1
            if nexts != [per_thread] * n:
                wrong.append(nexts)

        reading = _start(*(lambda r=r: read(r) for r in readers))
        _join(_start(*(lambda k=k: write(k) for k in range(n))))
        writer.close()
        _join(reading)
        assert not wrong


@pytest.mark.parametrize("slots", [2, 256])
@pytest.mark.parametrize("nbytes", [0, 3000, 40_000])
def test_threads_share_a_reader(nbytes, slots):
    total = 500 * ROUNDS
    options = {"max_chunk_bytes": 8192, "max_chunks": 4, "slots": slots}
    with ends(1, **options) as (writer, (reader,)):
        got = queue.SimpleQueue()

        def read():
            last = -1
            for i, array in reader:
                assert i > last  # one thread gets what it gets in order
                assert (array == i % 251).all()
                last = i
                got.put(i)

        reading = _start(*[read] * 4)
        for i in range(total):
            writer.enqueue((i, np.full(nbytes, i % 251, np.uint8)))
        writer.close()
        _join(reading)
        taken = [got.get() for _ in range(got.qsize())]
        assert sorted(taken) == list(range(total))


def test_threads_share_a_reader_with_timeouts():
    with pair(slots=4) as (writer, reader):
        total = 300 * ROUNDS
        got = []

        def read():
            while len(got) < total:
                try:
                    got.append(reader.dequeue(timeout=0.001))
                except Empty:
                    pass

        reading = _start(*[read] * 4)
        for i in range(total):
            writer.enqueue(i)
            if i % 50 == 0:
                time.sleep(0.003)
        _join(reading)
        assert sorted(got) == list(range(total))


def test_a_blocked_thread_does_not_hold_up_the_others_timeouts():
    with pair(slots=2) as (writer, reader):
        blocked = _start(lambda: reader.dequeue())
        eventually(asleep(reader))
        for timeout in (0, 0.02):
            with pytest.raises(Empty):
                reader.dequeue(timeout=timeout)
        assert reader.empty()
        writer.enqueue("for the one that waits")
        _join(blocked)
        writer.enqueue(1)
        writer.enqueue(2)
        blocked = _start(lambda: writer.enqueue(3))
        eventually(asleep(writer))
        for timeout in (0, 0.02):
            with pytest.raises(Full):
                writer.enqueue(4, timeout=timeout)
        assert [reader.dequeue() for _ in range(3)] == [1, 2, 3]
        _join(blocked)


def test_a_blocked_large_message_does_not_let_others_in_between():
    with pair(max_chunk_bytes=4096, max_chunks=2, slots=8) as (writer, reader):
        large = np.arange(50_000)
        blocked = _start(lambda: writer.enqueue(large))
        eventually(asleep(writer))
        with pytest.raises(Full):
            writer.enqueue("between", timeout=0.01)
        after = _start(lambda: writer.enqueue("after"))
        assert np.array_equal(reader.dequeue(), large)
        assert reader.dequeue() == "after"
        _join([*blocked, *after])


@pytest.mark.parametrize("verb", ["close", "shutdown"])
def test_closing_under_many_threads(verb):
    """Nobody hangs, nobody crashes, each thread gets Closed."""
    for _ in range(20 * ROUNDS):
        with pair(slots=2) as (writer, reader):
            outcome = []
            started = threading.Barrier(9)

            def run(call, outcome=outcome, started=started):
                started.wait()
                try:
                    while True:
                        call()
                except Closed:
                    outcome.append("closed")

            threads = _start(
                *[lambda w=writer: run(lambda: w.enqueue(np.zeros(10)))] * 3,
                *[lambda r=reader: run(r.dequeue)] * 3,
                lambda r=reader: run(lambda: _look_and_take(r)),
                lambda r=reader: run(lambda: _wait_and_take(r)),
            )
            started.wait()
            getattr(writer, verb)()
            getattr(reader, verb)()
            _join(threads)
            assert len(outcome) == 8


def _look_and_take(reader):
    reader.stats()
    reader.qsize()
    reader.empty()
    try:
        reader.dequeue(timeout=0)
    except Empty:
        pass


def _wait_and_take(reader):
    fastipc.wait([reader], timeout=1)
    try:
        reader.dequeue(timeout=0)
    except Empty:
        pass


def test_shutdown_in_another_thread_ends_a_blocked_writer():
    with pair(slots=2) as (writer, _):
        writer.enqueue(1)
        writer.enqueue(2)
        outcome = []

        def send():
            try:
                writer.enqueue(np.zeros(100_000))
            except Closed as error:
                outcome.append(error)

        threads = _start(send, send, send)
        eventually(asleep(writer))
        writer.shutdown()
        _join(threads)
        assert len(outcome) == 3


def test_the_last_reference_dropped_in_another_thread():
    with MessageQueue(1, 1) as writer:
        holder = [MessageQueue.create_from_handle(writer.export_handle(), 0)]
        caught = []

        def drop():
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                holder.clear()
            caught.extend(found)

        _join(_start(drop))
        assert [w.category for w in caught] == [ResourceWarning]


def test_a_finalizer_that_uses_the_queue():
    """It may run anywhere, also inside a call on the same end: never a dead-lock."""

    class Sends:
        def __init__(self, writer):
            self.writer = writer
            self.me = self  # a cycle: the collector finds it

        def __del__(self):
            try:
                self.writer.enqueue("from a finalizer", timeout=0)
            except (fastipc.IPCError, AttributeError):
                pass

    with pair(slots=1024) as (writer, reader):
        for _ in range(300):
            Sends(writer)
            writer.enqueue([[] for _ in range(20)], timeout=5)
            while not reader.empty():
                reader.dequeue(timeout=0)


def test_copies_run_beside_other_python_threads():
    """A large array is copied without the GIL: another thread counts on meanwhile."""
    array = np.ones(64 << 20, np.uint8)
    with pair(max_chunk_bytes=96 << 20, max_chunks=1) as (writer, reader):
        ticks = []
        done = threading.Event()

        def count():
            while not done.is_set():
                ticks.append(time.perf_counter())
                time.sleep(0)

        thread = threading.Thread(target=count)
        interval = sys.getswitchinterval()
        # Nobody has to give the GIL away: the other thread runs if this one lets it.
        sys.setswitchinterval(1000)
        try:
            thread.start()
            # On a busy machine it may not get a CPU for some time.
            for _ in range(100):
                del ticks[:]
                began = time.perf_counter()
                writer.enqueue(array)
                ended = time.perf_counter()
                reader.dequeue()
                if any(began < t < ended for t in ticks):
                    break
            else:
                pytest.fail("the other thread stood still")
        finally:
            sys.setswitchinterval(interval)
            done.set()
            thread.join()
