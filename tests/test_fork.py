"""fork: the child has no end of a queue, and what it does or how it ends changes nothing for its
parent."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import warnings

import numpy as np
import pytest
import workers
from support import Team, asleep, descriptors, ends, eventually, in_fork, pair

import fastipc
from fastipc import IPCError, MessageQueue


def _outcome(call) -> str:
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("which", [0, 1])
def test_a_childs_use_of_its_parents_end_is_an_error_that_says_what_to_do(which):
    with pair() as both:
        writer, reader = both
        writer.enqueue("before")
        end = both[which]
        verbs = {
            0: [lambda: writer.enqueue(1), lambda: writer.enqueue(np.zeros(1 << 20)),
                lambda: writer.put_nowait(1), lambda: writer.evict(0)],
            1: [lambda: reader.dequeue(), lambda: reader.dequeue(timeout=0),
                lambda: reader.get_nowait(), lambda: reader.dequeue_many(3)],
        }[which]  # fmt: skip
        verbs.append(lambda: end.wait_until_ready(timeout=0))
        for text in in_fork(lambda: [_outcome(call) for call in verbs]):
            assert text.startswith("IPCError"), text
            assert "export_handle" in text
            assert "fork" in text
        # The parent noticed nothing.
        assert reader.dequeue(timeout=0) == "before"
        for i in range(1000):
            writer.enqueue(i)
            assert reader.dequeue(timeout=0) == i


@pytest.mark.parametrize("spin_us", [None, 0])
def test_the_parent_goes_on_after_a_child_has_closed_collected_and_ended(spin_us):
    with ends(2, slots=4, spin_us=spin_us) as (writer, readers):
        writer.wait_until_ready()
        writer.enqueue("kept")

        def child():
            for end in (writer, *readers):
                end.shutdown()
                end.close()
                assert end.closed
            gc.collect()

        in_fork(child)
        assert [reader.dequeue(timeout=0) for reader in readers] == ["kept"] * 2
        for i in range(10_000):
            writer.enqueue(i, timeout=10)
            for reader in readers:
                assert reader.dequeue(timeout=10) == i


def test_a_child_that_drops_its_references_warns_of_nothing():
    holder = [MessageQueue(1, 1)]
    with MessageQueue.create_from_handle(holder[0].export_handle(), 0) as reader:

        def child():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                holder.clear()
                gc.collect()
            return [str(w.message) for w in caught]

        assert in_fork(child) == []
        holder[0].enqueue("still here")
        assert reader.dequeue(timeout=0) == "still here"
        holder[0].close()


def test_a_child_that_ends_through_the_interpreters_exit(start_child):
    """Its atexit handlers and finalizers run; the parent's queue works on."""
    child = start_child(
        """
        import os, sys
        from fastipc import MessageQueue

        writer = MessageQueue(1, 1)
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        writer.wait_until_ready()
        for how in ("exit", "exception", "del"):
            pid = os.fork()
            if pid == 0:
                if how == "del":
                    del writer, reader
                if how == "exception":
                    sys.stderr = open(os.devnull, "w")
                    raise RuntimeError
                sys.exit(0)
            os.waitpid(pid, 0)
            for i in range(10_000):
                writer.enqueue(i)
                assert reader.dequeue(timeout=0) == i
            print(how, flush=True)
        writer.close()
        reader.close()
        """
    )
    assert child.check().split() == ["exit", "exception", "del"]
    assert child.stderr == ""


def test_a_child_holds_nothing_of_its_parents_queues():
    """Else the segment would outlive the parent, and the parent seem alive."""
    with pair(), pair(shm_dir="/dev/shm"):
        assert len(descriptors()) == 8
        assert in_fork(lambda: len(descriptors())) == 0


def test_a_child_may_have_queues_of_its_own():
    with pair() as (writer, reader):
        handle = writer.export_handle()

        def child():
            with pair() as (mine, my_reader):
                mine.enqueue("in the child")
                assert my_reader.dequeue() == "in the child"
            with MessageQueue(1, 1) as out:
                return out.export_handle().pid

        assert in_fork(child) != os.getpid()
        # And attach to its parent's, by the handle.
        reader.close()

        def attach():
            with MessageQueue.create_from_handle(handle, 0) as again:
                again.wait_until_ready(timeout=30)
                return again.dequeue(timeout=30)

        def serve():
            eventually(lambda: writer.stats()["peers"][1]["pid"] != os.getpid())
            writer.enqueue("for the child")

        thread = threading.Thread(target=serve)
        thread.start()
        assert in_fork(attach) == "for the child"
        thread.join()


def test_a_grandchild_is_told_the_same():
    with pair() as (writer, _):

        def child():
            return in_fork(lambda: _outcome(lambda: writer.enqueue(1)))

        assert in_fork(child).startswith("IPCError")
        writer.enqueue(1)


def test_fork_while_another_thread_waits_or_holds_the_end():
    with pair(slots=2) as (writer, reader):
        thread = threading.Thread(target=reader.dequeue)
        thread.start()
        eventually(asleep(reader))
        for _ in range(20):
            text = in_fork(lambda: _outcome(lambda: reader.dequeue(timeout=1)))
            assert text.startswith("IPCError"), text
            in_fork(reader.close)
        writer.enqueue("x")
        thread.join()


def test_fork_while_a_thread_makes_and_ends_queues():
    """What the child inherits half-made must not lock it up."""
    stop = threading.Event()
    options = {"slots": 2, "max_chunks": 1, "max_chunk_bytes": 4096}

    def churn():
        while not stop.is_set():
            with pair(**options) as (writer, reader):
                writer.enqueue(np.zeros(1000, np.uint8))
                reader.dequeue()

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):

            def child():
                with pair(**options) as (writer, reader):
                    writer.enqueue("works")
                    return reader.dequeue()

            assert in_fork(child) == "works"
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_passing_a_queue_to_a_process(method):
    with pair() as (writer, reader):
        for end in (writer, reader):
            if method == "fork":  # it is not pickled: the error comes when the child uses it
                with Team(method) as team:
                    member = team.start(_use, end)
                    with pytest.raises(IPCError, match="export_handle"):
                        member.result()
            else:
                process = multiprocessing.get_context(method).Process(target=_use, args=(None, end))
                with pytest.raises(TypeError, match="export_handle"):
                    process.start()
        writer.enqueue("works")
        assert reader.dequeue() == "works"


def _use(connection, end):
    end.enqueue(1) if end.rank is None else end.dequeue(timeout=5)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_passing_a_handle_to_a_process(method):
    with Team(method) as team, MessageQueue(1, 1) as writer:
        member = team.start(workers.endless_reader, writer.export_handle(), 0)
        for i in range(10):
            writer.enqueue(i)
        member.said("attached")
        writer.close()
        assert member.result() == 10


def test_passing_a_handle_to_a_process_of_a_fork_server(run_child):
    out = run_child(
        """
        import multiprocessing
        from fastipc import MessageQueue

        def read(handle):
            with MessageQueue.create_from_handle(handle, 0) as reader:
                for message in reader:
                    print(message, flush=True)

        if __name__ == "__main__":
            context = multiprocessing.get_context("forkserver")
            with MessageQueue(1, 1) as writer:
                process = context.Process(target=read, args=(writer.export_handle(),))
                process.start()
                writer.wait_until_ready()
                writer.enqueue("from the parent")
            process.join()
            print(process.exitcode)
        """
    )
    assert out.splitlines() == ["from the parent", "0"]


def test_fastipc_wait_in_a_child():
    with pair() as (_, reader):
        text = in_fork(lambda: _outcome(lambda: fastipc.wait([reader], timeout=0)))
        # Readable means that dequeue would return or raise; that it is the parent's, it raises.
        assert text == "no error" or text.startswith("IPCError")
