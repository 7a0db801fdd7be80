"""MessageQueue's contract for one host: its verbs, closing, shutting down, telling."""

from __future__ import annotations

import gc
import os
import queue
import threading
import warnings

import numpy as np
import pytest
import workers
from support import Team, asleep, drain, ends, eventually, pair

import fastipc
from fastipc import Closed, Empty, Full, HandleMismatch, IPCError, MessageQueue

# ---- making ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"n_reader": 0, "n_local_reader": 0}, "n_reader"),
        ({"n_reader": -1}, "n_reader"),
        ({"n_reader": 1025, "n_local_reader": 1025}, "n_reader"),
        ({"n_reader": 2, "n_local_reader": 3}, "n_local_reader"),
        ({"n_reader": 2, "n_local_reader": 1, "remote_reader_ranks": [0]}, "remote_reader_ranks"),
        ({"local_reader_ranks": [1, 1]}, "local_reader_ranks"),
        ({"local_reader_ranks": [1]}, "local_reader_ranks"),
        ({"max_chunk_bytes": 63}, "max_chunk_bytes"),
        ({"max_chunk_bytes": -1}, "max_chunk_bytes"),
        ({"max_chunk_bytes": 1 << 50}, "max_chunk_bytes"),
        ({"max_chunks": 0}, "max_chunks"),
        ({"slots": 1}, "slots"),
        ({"slots": 0}, "slots"),
        ({"inline_bytes": -1}, "inline_bytes"),
        ({"serializer": "json"}, "json"),
        ({"spin_us": -1}, "spin_us"),
        ({"spin_us": float("nan")}, "spin_us"),
        ({"on_reader_death": "ignore"}, "on_reader_death"),
        ({"shm_dir": "/dev/shm\0/elsewhere"}, "shm_dir"),
    ],
)
def test_wrong_arguments_are_named(arguments, text):
    arguments = {"n_reader": 2, "n_local_reader": 2, **arguments}
    with pytest.raises(ValueError, match=text) as caught:
        MessageQueue(**arguments)
    assert not isinstance(caught.value, IPCError)


@pytest.mark.parametrize(
    "arguments", [{"n_reader": 1.5}, {"max_chunks": "10"}, {"slots": None}, {"shm_dir": 5}]
)
def test_arguments_of_a_wrong_type(arguments):
    with pytest.raises(TypeError):
        MessageQueue(**{"n_reader": 2, "n_local_reader": 2, **arguments})


def test_a_directory_may_be_bytes(tmp_path):
    with pair(shm_dir=os.fsencode(tmp_path)) as (writer, reader):
        assert reader.export_handle().path.startswith(str(tmp_path))
        writer.enqueue(1)
        assert reader.dequeue() == 1


def test_sizes_that_fit_no_address_space():
    with pytest.raises((ValueError, OSError, MemoryError)):
        MessageQueue(1, 1, max_chunk_bytes=1 << 40, max_chunks=1 << 16)


def test_integers_of_numpy_are_integers():
    queue_ = MessageQueue(np.int64(1), np.int32(1), [np.int8(4)], max_chunks=np.uint8(2))
    with queue_ as writer, MessageQueue.create_from_handle(writer.export_handle(), np.int64(4)):
        writer.wait_until_ready()


def test_ranks_need_not_be_consecutive():
    with ends(3, local_reader_ranks=[100, 7, 55]) as (writer, readers):
        assert [reader.rank for reader in readers] == [100, 7, 55]
        assert writer.rank is None
        writer.enqueue("x")
        assert [reader.dequeue() for reader in readers] == ["x"] * 3


def test_as_many_readers_as_there_may_be():
    with MessageQueue(1024, 1024, slots=2, max_chunks=1, max_chunk_bytes=64) as writer:
        handle = writer.export_handle()
        with MessageQueue.create_from_handle(handle, 1023) as last:
            writer.enqueue("x")
            assert last.dequeue() == "x"
        with pytest.raises(fastipc.NotReady) as caught:
            writer.wait_until_ready(timeout=0)
        assert len(caught.value.missing) == 1023


def test_seventy_readers():
    with ends(70, slots=2, max_chunks=1, max_chunk_bytes=4096) as (writer, readers):
        writer.wait_until_ready(timeout=0)
        for i in range(20):
            writer.enqueue(np.full(1000, i, np.uint8), timeout=5)
            for reader in readers:
                assert (reader.dequeue(timeout=0) == i).all()


# ---- sending and receiving ---------------------------------------------------------------------


def test_each_end_refuses_the_others_verbs():
    with pair() as (writer, reader):
        for call in (writer.dequeue, writer.get, writer.get_nowait, lambda: writer.dequeue_many(3),
                     lambda: next(iter(writer))):  # fmt: skip
            with pytest.raises(IPCError, match="reader"):
                call()
        for call in (reader.enqueue, reader.put, reader.put_nowait):
            with pytest.raises(IPCError, match="writer"):
                call(1)
        writer.enqueue("works")
        assert reader.dequeue() == "works"


def test_a_full_ring_is_full_until_the_slowest_has_read():
    with ends(2, slots=4) as (writer, (fast, slow)):
        for i in range(4):
            assert not writer.full()
            writer.enqueue(i, timeout=0)
        assert writer.full()
        assert drain(fast) == [0, 1, 2, 3]
        with pytest.raises(Full):
            writer.enqueue(4, timeout=0)
        assert slow.dequeue() == 0
        writer.enqueue(4, timeout=0)
        with pytest.raises(Full):
            writer.enqueue(5, timeout=0.01)
        assert drain(fast) == [4]
        assert drain(slow) == [1, 2, 3, 4]
        assert not writer.full()


def test_what_was_refused_is_never_delivered():
    with ends(2, slots=2, max_chunk_bytes=4096, max_chunks=2) as (writer, readers):
        for large in (False, True):
            wrong = np.zeros(50_000, np.uint8) if large else "wrong"
            for i in range(5):
                writer.enqueue(i)
                writer.enqueue(-i)
                with pytest.raises(Full):
                    writer.enqueue(wrong, timeout=0.005)
                for reader in readers:
                    assert drain(reader) == [i, -i]


def test_a_large_message_that_was_given_up_half_way_is_skipped():
    with ends(2, max_chunk_bytes=4096, max_chunks=3, slots=8) as (writer, readers):
        for i in range(5):
            with pytest.raises(Full):
                writer.enqueue(np.zeros(100_000, np.uint8), timeout=0.01)
            # What was sent of it occupies the ring until it is read past.
            for reader in readers:
                assert drain(reader) == []
            writer.enqueue(["next", i], timeout=5)
            for reader in readers:
                assert reader.dequeue(timeout=0) == ["next", i]


def test_the_verbs_of_queue_queue():
    with pair(slots=2) as (writer, reader):
        assert reader.empty()
        assert writer.empty()
        assert reader.qsize() == writer.qsize() == 0
        writer.put("a")
        writer.put_nowait("b")
        assert writer.full()
        assert not reader.full()
        assert reader.qsize() == writer.qsize() == 2
        assert not reader.empty()
        assert not writer.empty()
        with pytest.raises(queue.Full):
            writer.put_nowait("c")
        with pytest.raises(queue.Full):
            writer.put("c", block=False)
        with pytest.raises(queue.Full):
            writer.put("c", True, 0.01)
        with pytest.raises(queue.Full):
            writer.put("c", timeout=0.01)
        assert reader.get() == "a"
        assert reader.get_nowait() == "b"
        with pytest.raises(queue.Empty):
            reader.get_nowait()
        with pytest.raises(queue.Empty):
            reader.get(block=False)
        with pytest.raises(queue.Empty):
            reader.get(True, 0.01)
        assert reader.qsize() == writer.qsize() == 0
        assert not writer.full()


def test_dequeue_many():
    with pair() as (writer, reader):
        with pytest.raises(Empty):
            reader.dequeue_many(3, timeout=0)
        for i in range(10):
            writer.enqueue(i)
        assert reader.dequeue_many(3) == [0, 1, 2]
        assert reader.dequeue_many(1) == [3]
        assert reader.dequeue_many(100, timeout=0) == [4, 5, 6, 7, 8, 9]
        for wrong in (0, -1):
            with pytest.raises(ValueError, match="limit"):
                reader.dequeue_many(wrong)
        # It waits for the first only.
        got = []
        thread = threading.Thread(target=lambda: got.extend(reader.dequeue_many(5)))
        thread.start()
        eventually(asleep(reader))
        writer.enqueue("one")
        thread.join()
        assert got[0] == "one"


def _fails():
    raise ZeroDivisionError("on loading")


class FailsToLoad:
    def __reduce__(self):
        return _fails, ()


@pytest.mark.parametrize("where", [{"n_local_reader": 1}, {"n_local_reader": 0}], ids=str)
def test_what_dequeue_many_has_yet_to_raise_is_waited_for_in_vain_by_nobody(where):
    with (
        MessageQueue(1, **where, connect_ip="127.0.0.1") as writer,
        MessageQueue.create_from_handle(writer.export_handle(), 0) as reader,
    ):
        writer.wait_until_ready(30)
        writer.enqueue(1)
        writer.enqueue(FailsToLoad())
        eventually(lambda: reader.qsize() == 2)
        assert reader.dequeue_many(10) == [1]
        assert fastipc.wait([reader], 0) == [reader]
        assert not reader.empty()
        reader._end.wait_readable(0)  # what coroutines wait with
        with pytest.raises(ZeroDivisionError):
            reader.dequeue(0)
        assert fastipc.wait([reader], 0) == []
        assert reader.empty()
        writer.enqueue(2)
        assert reader.dequeue(30) == 2


def test_dequeue_many_loses_nothing_to_a_message_that_fails():
    with pair() as (writer, reader):
        for message in (1, 2, FailsToLoad(), 3, np.arange(5)):
            writer.enqueue(message)
        assert reader.dequeue_many(10) == [1, 2]
        with pytest.raises(ZeroDivisionError):
            reader.dequeue_many(10)
        got = reader.dequeue_many(10)
        assert got[0] == 3
        assert got[1].tolist() == [0, 1, 2, 3, 4]
        writer.enqueue(FailsToLoad())
        with pytest.raises(ZeroDivisionError):
            reader.dequeue_many(10)
        writer.enqueue(4)
        writer.close()
        assert reader.dequeue_many(10) == [4]
        with pytest.raises(Closed):
            reader.dequeue_many(10)


def test_iteration_ends_when_the_writer_closes():
    with pair() as (writer, reader):
        for i in range(5):
            writer.enqueue(i)
        writer.close()
        assert list(reader) == [0, 1, 2, 3, 4]
        assert list(reader) == []


def test_broadcast_object():
    with ends(2) as (writer, readers):
        obj = {"a": [1]}
        assert writer.broadcast_object(obj) is obj
        assert [reader.broadcast_object() for reader in readers] == [obj, obj]
        assert writer.broadcast_object() is None
        assert [reader.broadcast_object(obj) for reader in readers] == [None, None]


# ---- attaching ---------------------------------------------------------------------------------


def test_a_rank_is_taken_while_its_reader_lives():
    with MessageQueue(2, 2) as writer:
        handle = writer.export_handle()
        with Team() as team:
            member = team.start(workers.obedient_reader, handle, 0)
            member.said("attached")
            with pytest.raises(HandleMismatch, match=f"pid {member.pid} "):
                MessageQueue.create_from_handle(handle, 0)
            with MessageQueue.create_from_handle(handle, 1):
                with pytest.raises(HandleMismatch, match="taken"):
                    MessageQueue.create_from_handle(handle, 1)
                writer.wait_until_ready()


def test_a_rank_that_there_is_not():
    with MessageQueue(2, 2, local_reader_ranks=[3, 4]) as writer:
        for wrong in (0, 2, 5, -1):
            with pytest.raises(ValueError, match="ranks 3, 4"):
                MessageQueue.create_from_handle(writer.export_handle(), wrong)
        with pytest.raises(TypeError):
            MessageQueue.create_from_handle(writer.export_handle(), "3")
        with pytest.raises(TypeError, match="export_handle"):
            MessageQueue.create_from_handle(writer, 3)


@pytest.mark.parametrize("shm_dir", [None, "/dev/shm"])
def test_a_handle_of_a_closed_queue_leads_nowhere(shm_dir):
    writer = MessageQueue(1, 1, shm_dir=shm_dir)
    handle = writer.export_handle()
    writer.close()
    with pytest.raises(HandleMismatch):
        MessageQueue.create_from_handle(handle, 0)
    # Nor to another queue that has come to the same descriptor since.
    with MessageQueue(1, 1), pytest.raises(HandleMismatch):
        MessageQueue.create_from_handle(handle, 0)


def test_readers_that_attach_late_and_a_handle_used_more_than_once():
    with Team() as team, MessageQueue(2, 2) as one, MessageQueue(2, 2) as two:
        handles = [one.export_handle(), two.export_handle()]
        one.enqueue("early one")
        two.enqueue("early two")
        members = [team.start(workers.read_twice, handles, rank, 0.1 * rank) for rank in (0, 1)]
        for member in members:
            assert member.result() == ["early one", "early two"]


def test_a_rank_is_free_again_when_its_reader_has_left():
    with ends(2) as (writer, (first, other)):
        handle = writer.export_handle()
        writer.enqueue("old")
        first.close()
        with MessageQueue.create_from_handle(handle, 0) as second:
            writer.enqueue("new")
            # It reads from where the writer noticed it: nothing from before.
            assert second.dequeue() == "new"
            assert second.empty()
        assert drain(other) == ["old", "new"]


def test_attaching_and_leaving_over_and_over():
    with MessageQueue(2, 2, slots=4) as writer:
        handle = writer.export_handle()
        with MessageQueue.create_from_handle(handle, 1) as steady:
            for i in range(200):
                with MessageQueue.create_from_handle(handle, 0) as guest:
                    writer.enqueue(i, timeout=5)
                    assert guest.dequeue(timeout=5) == i
                assert steady.dequeue(timeout=0) == i


def test_many_processes_attach_and_leave_at_once():
    with Team() as team, MessageQueue(4, 4) as writer:
        handle = writer.export_handle()
        members = [team.start(workers.attach_many, handle, rank, 100) for rank in range(4)]
        for member in members:
            assert member.result() is None
        with pytest.raises(Closed):
            writer.enqueue("x")


# ---- closing -----------------------------------------------------------------------------------


def test_the_writers_close_lets_readers_drain():
    with ends(2) as (writer, (one, two)):
        for i in range(10):
            writer.enqueue(i)
        writer.close()
        assert writer.closed
        for i in range(10):
            assert one.dequeue(timeout=0) == i
        for timeout in (None, 0, 1):
            with pytest.raises(Closed, match="writer has closed"):
                one.dequeue(timeout=timeout)
        assert len(two.dequeue_many(100)) == 10
        with pytest.raises(Closed):
            two.dequeue()


def test_the_writers_close_wakes_readers():
    with pair() as (writer, reader):
        outcome = []

        def wait():
            try:
                reader.dequeue()
            except Closed as error:
                outcome.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        eventually(asleep(reader))
        writer.close()
        thread.join()
        assert "writer has closed" in str(outcome[0])


def test_a_reader_that_leaves_is_no_longer_waited_for():
    with ends(2, slots=2) as (writer, (stays, leaves)):
        writer.enqueue(0)
        writer.enqueue(1)
        assert drain(stays) == [0, 1]
        thread = threading.Thread(target=writer.enqueue, args=(2,))
        thread.start()
        eventually(asleep(writer))
        leaves.close()
        thread.join()
        assert drain(stays) == [2]
        for i in range(100):
            writer.enqueue(i, timeout=0)
            assert stays.dequeue(timeout=0) == i
        states = {p["rank"]: p["state"] for p in writer.stats()["peers"]}
        assert states == {None: "active", 0: "active", 1: "left"}


def test_when_the_last_reader_has_left_sending_is_closed():
    with ends(2, slots=2) as (writer, (one, two)):
        writer.enqueue(0)
        one.close()
        writer.enqueue(1)
        outcome = []

        def send():
            try:
                writer.enqueue(2)
            except Closed as error:
                outcome.append(error)

        thread = threading.Thread(target=send)
        thread.start()
        eventually(asleep(writer))
        two.close()
        thread.join()
        assert "every reader has left" in str(outcome[0])
        for timeout in (None, 0):
            with pytest.raises(Closed, match="every reader has left"):
                writer.enqueue(3, timeout=timeout)
        # Until somebody attaches anew.
        with MessageQueue.create_from_handle(writer.export_handle(), 0) as again:
            writer.enqueue(4)
            assert again.dequeue() == 4


def test_close_is_idempotent_and_everything_afterwards_says_closed():
    for which in (0, 1):
        with pair() as both:
            end = both[which]
            end.close()
            end.close()
            assert end.closed
            calls = [end.wait_until_ready, end.empty, end.qsize]
            calls += [end.dequeue, lambda end=end: end.dequeue_many(2)] if which else [
                lambda end=end: end.enqueue(1)]  # fmt: skip
            for call in calls:
                with pytest.raises(Closed):
                    call()
            end.shutdown()
            assert "closed" in repr(end)
            assert end.rank == (0 if which else None)
            assert end.export_handle()
            end.stats()


def test_close_never_waits():
    """Not for readers, not for a call that is running in another thread."""
    with pair(slots=2) as (writer, reader):
        writer.enqueue(1)
        writer.enqueue(2)
        outcome = []

        def send():
            try:
                writer.enqueue(3)
            except Closed as error:
                outcome.append(error)

        thread = threading.Thread(target=send)
        thread.start()
        eventually(asleep(writer))
        writer.close()
        thread.join()
        assert "closed" in str(outcome[0])
        assert list(reader) == [1, 2]


def test_with_closes():
    with MessageQueue(1, 1) as writer:
        with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            assert not reader.closed
        assert reader.closed
    assert writer.closed
    with pytest.raises(ZeroDivisionError):
        with MessageQueue(1, 1) as writer:
            raise ZeroDivisionError
    assert writer.closed


def test_shutdown_ends_this_ends_waits_and_says_nothing_to_peers():
    with pair(slots=2) as (writer, reader):
        writer.enqueue(1)
        writer.enqueue(2)
        outcome = []

        def wait(call, *args):
            try:
                call(*args)
            except Closed as error:
                outcome.append(str(error))

        thread = threading.Thread(target=wait, args=(writer.enqueue, 3))
        thread.start()
        eventually(asleep(writer))
        writer.shutdown()
        thread.join()
        assert "shut down" in outcome[0]
        writer.shutdown()
        with pytest.raises(Closed):
            writer.enqueue(4)
        # The reader noticed nothing.
        assert drain(reader) == [1, 2]
        with pytest.raises(Empty):
            reader.dequeue(timeout=0.01)
        assert not writer.closed

        n = reader.stats()["sleeps"]
        threads = [threading.Thread(target=wait, args=(reader.dequeue,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        eventually(asleep(reader, n))
        reader.shutdown()
        for thread in threads:
            thread.join()
        assert len(outcome) == 4
        with pytest.raises(Closed):
            reader.dequeue(timeout=0)


def test_shutdown_ends_wait_until_ready():
    with MessageQueue(1, 1) as writer:
        outcome = []

        def wait():
            try:
                writer.wait_until_ready()
            except Closed as error:
                outcome.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        eventually(asleep(writer))
        writer.shutdown()
        thread.join()
        assert outcome


def test_an_end_that_is_dropped_closes_with_a_warning():
    with MessageQueue(1, 1) as writer:
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        with pytest.warns(ResourceWarning, match="reader rank 0.*never closed"):
            del reader
        with pytest.raises(Closed):
            writer.enqueue(1)
    writer = MessageQueue(1, 1)
    with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
        writer.enqueue("last")
        with pytest.warns(ResourceWarning, match="writer.*never closed"):
            del writer
        assert list(reader) == ["last"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pair() as (writer, reader):
            pass
        del writer, reader
        gc.collect()


def test_an_interpreter_that_ends_without_close_ends_in_an_orderly_way(start_child):
    source = """
        import sys, threading
        from fastipc import Handle, MessageQueue

        writer = MessageQueue(1, 1)
        print(writer.export_handle().to_str(), flush=True)
        reader = MessageQueue.create_from_handle(Handle.from_str(sys.argv[1]), 0)
        writer.enqueue(reader.dequeue())
        writer.wait_until_ready()
        if sys.argv[2] == "raise":
            raise SystemExit(3)
        if sys.argv[2] == "held":  # by a thread that the interpreter's end does not unwind
            def hold(*ends):
                threading.Event().wait()
            threading.Thread(target=hold, args=(writer, reader), daemon=True).start()
            del writer, reader
    """
    for how, code in (("return", 0), ("raise", 3), ("held", 0)):
        with MessageQueue(1, 1) as writer:
            child = start_child(source, writer.export_handle().to_str(), how)
            handle = fastipc.Handle.from_str(child.wait_for("").strip())
            with MessageQueue.create_from_handle(handle, 0) as reader:
                writer.enqueue("to and fro")
                assert reader.dequeue() == "to and fro"
                with pytest.raises(Closed):
                    reader.dequeue()
                assert child.wait() == code
                with pytest.raises(Closed):
                    writer.enqueue("x")
            assert child.stderr == ""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_child_of_multiprocessing_that_ends_without_close_is_orderly_too(method):
    with Team(method) as team, MessageQueue(1, 1) as writer:
        member = team.start(workers.attach_and_exit, writer.export_handle(), 0)
        member.said("attached")
        writer.wait_until_ready()
        member.tell("go")
        member.result()
        with pytest.raises(Closed):
            writer.enqueue("x")


def test_daemon_threads_that_wait_do_not_disturb_the_end_of_the_interpreter(start_child):
    child = start_child(
        """
        import threading, time
        from fastipc import MessageQueue

        writer = MessageQueue(1, 1, slots=2)
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        threads = [threading.Thread(target=reader.dequeue, daemon=True) for _ in range(3)]
        for t in threads:
            t.start()
        while not reader.stats()["sleeps"]:
            time.sleep(0.001)
        print("end", flush=True)
        """
    )
    assert child.check() == "end\n"


# ---- telling -----------------------------------------------------------------------------------


def test_stats():
    with ends(2, local_reader_ranks=[5, 6]) as (writer, (one, two)):
        writer.wait_until_ready()
        writer.enqueue("x" * 100)
        writer.enqueue(np.zeros(100_000, np.uint8))
        one.dequeue()
        stats = writer.stats()
        assert stats["messages"] == 2
        assert stats["fragments"] == 2
        assert 100_100 < stats["bytes"] < 101_000
        assert stats["segment_bytes"] > stats["resident_bytes"] > 100_000
        lags = {p["rank"]: p["lag"] for p in stats["peers"]}
        assert lags == {None: 0, 5: 1, 6: 2}
        for peer in stats["peers"]:
            assert peer["state"] == "active"
            assert peer["pid"] > 0
            assert peer["host"]
        two.dequeue()
        two.dequeue()
        assert two.stats()["messages"] == 2
        assert two.stats()["bytes"] == stats["bytes"]
        assert one.stats()["messages"] == 1
        assert {"waits", "sleeps", "wakes", "spin_ns"} <= set(stats)


def test_repr_says_which_end_it_is():
    with pair() as (writer, reader):
        assert repr(writer) == "<MessageQueue writer, 1 readers>"
        assert repr(reader) == "<MessageQueue reader rank 0, 1 readers>"


def test_chunks_take_no_memory_until_they_are_used():
    with pair(max_chunk_bytes=64 << 20, max_chunks=16) as (writer, reader):
        assert writer.stats()["segment_bytes"] >= 1 << 30
        assert writer.stats()["resident_bytes"] < 8 << 20
        for i in range(10):
            writer.enqueue(np.full(10_000, i))
            assert reader.dequeue()[0] == i
        assert writer.stats()["resident_bytes"] < 8 << 20


def test_many_queues_in_a_process():
    options = {"slots": 2, "max_chunks": 1, "max_chunk_bytes": 64, "inline_bytes": 64}
    queues = [MessageQueue(1, 1, **options) for _ in range(100)]
    readers = [MessageQueue.create_from_handle(q.export_handle(), 0) for q in queues]
    for i, writer in enumerate(queues):
        writer.enqueue(i)
    assert [reader.dequeue(timeout=0) for reader in readers] == list(range(100))
    for end in (*queues, *readers):
        end.close()


def test_few_descriptors_are_enough(run_child):
    """Received arrays are memory, not descriptors."""
    out = run_child(
        """
        import os, resource
        import numpy as np
        from fastipc import MessageQueue

        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        with MessageQueue(1, 1) as writer:
            with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
                kept = []
                for i in range(1000):
                    writer.enqueue(np.full(2000, i))
                    kept.append(reader.dequeue())
                print(all((a == i).all() for i, a in enumerate(kept)))
                # Out of descriptors: an error that says so, and nothing is left.
                held = []
                try:
                    while True:
                        held.append(os.open("/dev/null", os.O_RDONLY))
                except OSError:
                    pass
                try:
                    MessageQueue(1, 1)
                except OSError as error:
                    print("EMFILE" if error.errno == 24 else error)
                writer.enqueue("works")
                print(reader.dequeue())
        """
    )
    assert out.splitlines() == ["True", "EMFILE", "works"]


def test_a_message_takes_no_longer_room_than_it_is_unread():
    """Messages of mixed sizes through a small ring, read one behind."""
    sizes = np.random.default_rng(1).integers(0, 20_000, 500)
    with pair(slots=6, max_chunk_bytes=8192, max_chunks=6) as (writer, reader):
        writer.enqueue(np.zeros(0, np.uint8), timeout=0)
        for i, n in enumerate(sizes):
            writer.enqueue(np.full(n, i % 256, np.uint8), timeout=10)
            got = reader.dequeue(timeout=10)
            assert i == 0 or (got == (i - 1) % 256).all()


def test_a_constructor_that_is_interrupted_leaves_nothing_to_say(monkeypatch):
    """Its half-made object ends in silence: what a finalizer raises is an error here."""

    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(MessageQueue, "_opened", interrupted)
        with pytest.raises(KeyboardInterrupt):
            MessageQueue(1, 1)
    gc.collect()
