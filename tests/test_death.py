"""A peer that dies is named, soon, and leaves nothing; one that is slow or stopped is not dead.

Children from the hooked build die at a point of the test's choice: FIPC_TEST_POINT is
`name:count:action`, and the process kills itself the count-th time it gets to the name.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import numpy as np
import psutil
import pytest
import workers
from conftest import ROOT
from support import (
    DEATH_WATCHDOG,
    NIGHTLY,
    Team,
    asleep,
    descriptors,
    drain,
    drain_until_dead,
    ends,
    eventually,
    forever,
    mapped,
)

import fastipc
from fastipc import Closed, Empty, Full, Handle, HandleMismatch, MessageQueue, PeerDied
from fastipc.hostinfo import host_name


@pytest.fixture(autouse=True)
def nothing_stays_open():
    """Not a descriptor, not a mapping, whoever died."""
    before, maps = descriptors(), mapped()
    yield
    after = descriptors()
    assert mapped() == maps
    assert len(after) <= len(before), after - before


def _is_named(error: PeerDied, rank: int | None, pid: int) -> None:
    assert error.rank == rank
    assert error.pid == pid
    assert error.host == host_name()
    assert str(pid) in str(error)
    assert ("writer" if rank is None else f"rank {rank}") in str(error)


def _until_died(call, *args) -> tuple[PeerDied, int]:
    """Calls again and again until the death is noticed: (how, how many calls went well)."""
    n = 0
    while True:
        try:
            call(*args)
        except PeerDied as error:
            return error, n
        n += 1


# ---- a reader dies -----------------------------------------------------------------------------


def test_a_reader_is_killed_while_the_writer_is_blocked():
    with Team() as team, MessageQueue(2, 2, local_reader_ranks=[3, 8], slots=2) as writer:
        handle = writer.export_handle()
        member = team.start(workers.obedient_reader, handle, 8)
        with MessageQueue.create_from_handle(handle, 3) as other:
            writer.wait_until_ready()
            writer.enqueue(0)
            writer.enqueue(1)
            assert drain(other) == [0, 1]
            caught = []
            times = []

            def blocked():
                try:
                    writer.enqueue(2)
                except PeerDied as error:
                    times.append(time.monotonic())
                    caught.append(error)

            thread = threading.Thread(target=blocked)
            thread.start()
            eventually(asleep(writer))
            member.kill()
            died = time.monotonic()
            thread.join()
            print(f"a blocked writer knew after {times[0] - died:.3f} s")
            assert times[0] - died < DEATH_WATCHDOG
            _is_named(caught[0], 8, member.pid)
            # It stays so, and the message that was refused goes to nobody.
            for timeout in (0, 0.01, None):
                with pytest.raises(PeerDied):
                    writer.enqueue(3, timeout=timeout)
            assert drain(other) == []
            assert writer.stats()["peers"][2]["state"] == "dead"


def test_a_reader_is_killed_while_the_writer_sends_now_and_then():
    with Team() as team, MessageQueue(1, 1) as writer:
        member = team.start(workers.endless_reader, writer.export_handle(), 0)
        writer.wait_until_ready()
        writer.enqueue("before")
        member.kill()
        died = time.monotonic()

        def slowly():
            writer.enqueue("x")
            time.sleep(0.2)

        error, n = _until_died(slowly)
        took = time.monotonic() - died
        print(f"a writer of five messages a second knew after {took:.3f} s, {n} messages")
        assert took < DEATH_WATCHDOG
        _is_named(error, 0, member.pid)


def test_a_reader_is_killed_while_the_writer_waits_for_others_to_attach():
    with Team() as team, MessageQueue(2, 2) as writer:
        member = team.start(workers.endless_reader, writer.export_handle(), 1)
        member.said("attached")
        member.kill()
        with pytest.raises(PeerDied) as caught:
            writer.wait_until_ready()
        _is_named(caught.value, 1, member.pid)


def test_evict_and_go_on_and_replace():
    with Team() as team, MessageQueue(2, 2) as writer:
        handle = writer.export_handle()
        member = team.start(workers.endless_reader, handle, 0)
        with MessageQueue.create_from_handle(handle, 1) as other:
            writer.wait_until_ready()
            with pytest.raises(ValueError, match="not dead"):
                writer.evict(0)
            with pytest.raises(ValueError, match="rank 5"):
                writer.evict(5)
            member.kill()
            _, n = _until_died(writer.enqueue, "x")
            assert drain(other) == ["x"] * n
            writer.evict(0)
            for i in range(1000):
                writer.enqueue(i)
                assert other.dequeue(timeout=0) == i
            writer.evict(0)  # a second time changes nothing
            # A replacement at the same rank gets what is sent after the writer noticed it.
            with MessageQueue.create_from_handle(handle, 0) as replacement:
                writer.wait_until_ready(timeout=0)
                writer.enqueue("for both")
                assert replacement.dequeue(timeout=0) == "for both"
                assert other.dequeue(timeout=0) == "for both"
                assert replacement.empty()


def test_a_replacement_without_eviction_ends_the_error():
    with Team() as team, MessageQueue(2, 2, slots=4) as writer:
        handle = writer.export_handle()
        member = team.start(workers.endless_reader, handle, 0)
        with MessageQueue.create_from_handle(handle, 1) as other:
            writer.wait_until_ready()
            with pytest.raises(HandleMismatch, match=f"pid {member.pid} "):
                MessageQueue.create_from_handle(handle, 0)  # it is alive
            member.kill()
            _until_died(writer.enqueue, "x")
            drain(other)
            second = team.start(workers.endless_reader, handle, 0)
            second.said("attached")
            for i in range(100):
                writer.enqueue(i)
                assert other.dequeue() == i
            writer.close()
            assert second.result() == 100


def test_on_reader_death_evict(caplog):
    with Team() as team, MessageQueue(3, 3, slots=2, on_reader_death="evict") as writer:
        handle = writer.export_handle()
        members = [team.start(workers.obedient_reader, handle, rank) for rank in (0, 1)]
        with MessageQueue.create_from_handle(handle, 2) as other:
            writer.wait_until_ready()
            writer.enqueue(0)
            writer.enqueue(1)
            assert drain(other) == [0, 1]
            for member in members:
                member.kill()
            # Both are in the way; the writer goes on without them.
            for i in range(2, 100):
                writer.enqueue(i)
                assert other.dequeue(timeout=0) == i
            states = {p["rank"]: p["state"] for p in writer.stats()["peers"]}
            assert states == {None: "active", 0: "dead", 1: "dead", 2: "active"}
        logged = [record.getMessage() for record in caplog.records if "evicted" in record.msg]
        assert len(logged) == 2
        for member, rank in zip(members, (0, 1), strict=True):
            assert any(f"rank {rank} (pid {member.pid} on" in text for text in logged)
        # The last one has left in an orderly way: nobody is there to send to.
        with pytest.raises(Closed):
            writer.enqueue("to nobody")


def test_evict_when_all_readers_die():
    with Team() as team, MessageQueue(1, 1, slots=2, on_reader_death="evict") as writer:
        member = team.start(workers.obedient_reader, writer.export_handle(), 0)
        writer.wait_until_ready()
        member.kill()
        with pytest.raises(Closed):
            forever(lambda: writer.enqueue("x"))


def test_death_in_the_middle_of_a_large_message():
    """The writer is blocked between the fragments when its reader dies; the other reader gets
    neither half a message nor a mixed one."""
    with Team() as team:
        options = {"max_chunk_bytes": 4096, "max_chunks": 2, "slots": 4}
        with MessageQueue(2, 2, **options) as writer:
            handle = writer.export_handle()
            member = team.start(workers.obedient_reader, handle, 0)
            with MessageQueue.create_from_handle(handle, 1) as other:
                writer.wait_until_ready()
                errors = []

                def send():
                    try:
                        writer.enqueue(np.full(50_000, 1, np.uint8))
                    except PeerDied as error:
                        errors.append(error)

                thread = threading.Thread(target=send)
                thread.start()
                eventually(asleep(writer))
                member.kill()
                thread.join()
                _is_named(errors[0], 0, member.pid)
                writer.evict(0)
                with pytest.raises(Empty):
                    other.dequeue(timeout=0)
                thread = threading.Thread(
                    target=writer.enqueue, args=(np.full(50_000, 2, np.uint8),)
                )
                thread.start()
                assert (other.dequeue() == 2).all()
                thread.join()


# ---- the writer dies ---------------------------------------------------------------------------


def test_the_writer_is_killed_while_readers_wait():
    with Team() as team:
        writer = team.start(workers.obedient_writer, {"n_reader": 2})
        handle = writer._connection.recv()
        with (
            MessageQueue.create_from_handle(handle, 0) as one,
            MessageQueue.create_from_handle(handle, 1) as two,
        ):
            writer.tell("first")
            writer.said("sent")
            assert one.dequeue() == two.dequeue() == "first"
            caught = {}

            def wait(reader, rank):
                try:
                    reader.dequeue()
                except PeerDied as error:
                    caught[rank] = error, time.monotonic()

            threads = [threading.Thread(target=wait, args=a) for a in ((one, 0), (two, 1))]
            for thread in threads:
                thread.start()
            for reader in (one, two):
                eventually(asleep(reader))
            writer.kill()
            died = time.monotonic()
            for thread in threads:
                thread.join()
            for error, when in caught.values():
                assert when - died < DEATH_WATCHDOG
                _is_named(error, None, writer.pid)
            # It stays so, with any timeout and any verb.
            for timeout in (None, 0, 1):
                with pytest.raises(PeerDied):
                    one.dequeue(timeout=timeout)
            with pytest.raises(PeerDied):
                two.dequeue_many(5)
            with pytest.raises(PeerDied):
                next(iter(two))


def test_the_writer_is_killed_before_everyone_has_attached():
    with Team() as team:
        writer = team.start(workers.obedient_writer, {"n_reader": 2})
        handle = writer._connection.recv()
        with MessageQueue.create_from_handle(handle, 0) as reader:
            writer.kill()
            with pytest.raises(PeerDied) as caught:
                reader.wait_until_ready()
            _is_named(caught.value, None, writer.pid)


def test_readers_drain_what_a_dead_writer_had_published():
    with Team() as team:
        writer = team.start(workers.obedient_writer, {"n_reader": 2})
        handle = writer._connection.recv()
        for i in range(100):
            writer.tell(i)
            writer.said("sent")
        with MessageQueue.create_from_handle(handle, 0) as reader:
            late = MessageQueue.create_from_handle(handle, 1)
            writer.kill()
            got, error = drain_until_dead(reader)
            assert got == list(range(100))
            _is_named(error, None, writer.pid)
            with late:
                assert late.dequeue_many(1000) == list(range(100))
                with pytest.raises(PeerDied):
                    late.dequeue()
        # The segment went with its writer: whoever comes later is told.
        with pytest.raises(HandleMismatch):
            MessageQueue.create_from_handle(handle, 0)


def test_an_idle_poller_learns_of_the_death_too():
    with Team() as team:
        writer = team.start(workers.obedient_writer, {})
        handle = writer._connection.recv()
        with MessageQueue.create_from_handle(handle, 0) as reader:
            with pytest.raises(Empty):
                reader.dequeue(timeout=0)
            writer.kill()
            died = time.monotonic()

            def poll():
                try:
                    reader.dequeue(timeout=0)
                except Empty:
                    time.sleep(0.01)

            with pytest.raises(PeerDied):
                forever(poll)
            assert time.monotonic() - died < DEATH_WATCHDOG


# ---- not dead ----------------------------------------------------------------------------------


def test_a_stopped_reader_is_not_dead():
    with Team() as team, MessageQueue(1, 1, slots=4) as writer:
        member = team.start(workers.endless_reader, writer.export_handle(), 0)
        member.said("attached")
        writer.wait_until_ready()
        writer.enqueue(0)
        eventually(writer.empty)
        member.stop()
        n = 1
        while not writer.full():
            writer.enqueue(n, timeout=0)
            n += 1
        with pytest.raises(Full):
            writer.enqueue("no room", timeout=1.5)
        assert writer.stats()["peers"][1]["state"] == "active"
        with pytest.raises(ValueError, match="not dead"):
            writer.evict(0)
        member.resume()
        writer.enqueue("last")
        writer.close()
        assert member.result() == n + 1


def test_a_stopped_writer_is_not_dead():
    with Team() as team:
        writer = team.start(workers.obedient_writer, {})
        handle = writer._connection.recv()
        with MessageQueue.create_from_handle(handle, 0) as reader:
            writer.stop()
            with pytest.raises(Empty):
                reader.dequeue(timeout=1.5)
            writer.resume()
            writer.tell("after it")
            assert reader.dequeue() == "after it"
            writer.said("sent")
            writer.tell(None)
            with pytest.raises(Closed):
                reader.dequeue()
            writer.result()


# ---- at every point ----------------------------------------------------------------------------

READER = """
    import sys
    from fastipc import Handle, MessageQueue

    reader = MessageQueue.create_from_handle(Handle.from_str(sys.argv[1]), 0)
    print("attached", flush=True)
    while True:
        reader.dequeue()
        print("read", flush=True)
"""

# point: (how often it is passed before, when it happens)
READER_POINTS = {
    "attach-begin": 1,
    "attach-locked": 1,
    "attach-counted": 1,
    "attach-joined": 1,
    "attach-done": 1,
    "asleep": 1,
    "mid-read": 3,
    "before-ack": 3,
    "acknowledged": 3,
    "close-begin": 1,
    "close-told": 1,
}
NEVER_A_READER = ("attach-begin", "attach-locked", "attach-counted")
WRITER_POINTS = {
    "create-begin": 1,
    "create-file": 1,
    "create-complete": 1,
    "create-linked": 1,
    "asleep": 1,
    "mid-write": 3,
    "before-publish": 3,
    "published": 3,
    "between-fragments": 3,
    "close-begin": 1,
    "close-told": 1,
    "evict": 1,
}


def test_every_point_in_the_sources_is_in_the_one_list():
    """tests/c/points.h, of which test_matrix.c tries everything, and test_death_pairs.py a choice;
    what follows here has a closer look at some."""
    points = set()
    for path in (ROOT / "csrc").glob("*.c"):
        points |= set(re.findall(r'\bfipc_point\("([^"]+)"\)', path.read_text()))
    listed = re.findall(r'POINT\("([^"]+)", ', (ROOT / "tests/c/points.h").read_text())
    assert points == set(listed)
    assert len(listed) == len(points) > 40
    assert points > set(READER_POINTS) | set(WRITER_POINTS)


@pytest.mark.parametrize(
    ("point", "size"),
    [
        *((point, "small") for point in READER_POINTS),
        *(
            (point, size)
            for point in ("mid-read", "before-ack", "acknowledged")
            for size in ("chunk", "fragments")
        ),
    ],
)
def test_a_reader_dies_at_a_point(point, size, start_child, hooked_core):
    nbytes = {"small": 10, "chunk": 3000, "fragments": 30_000}[size]
    options = {"inline_bytes": 512, "max_chunk_bytes": 4096, "max_chunks": 20, "slots": 64}
    with MessageQueue(2, 2, **options) as writer:
        handle = writer.export_handle()
        with MessageQueue.create_from_handle(handle, 1) as other:
            child = start_child(
                READER,
                handle.to_str(),
                pythonpath=hooked_core,
                env={"FIPC_TEST_POINT": f"{point}:{READER_POINTS[point]}:kill"},
            )
            sent = 0

            def send(timeout=None):
                nonlocal sent
                writer.enqueue(np.full(nbytes, sent, np.uint8), timeout=timeout)
                sent += 1

            def all_there():
                for i in range(received[0], sent):
                    assert (other.dequeue(timeout=0) == i).all()
                received[0] = sent

            received = [0]
            if not point.startswith("attach"):
                child.wait_for("attached")
                try:
                    writer.wait_until_ready()
                    for _ in range(0 if point == "asleep" else 5):
                        send()
                except PeerDied:
                    pass  # already
            if point.startswith("close"):
                for _ in range(5):
                    child.wait_for("read")
                child.send_signal(signal.SIGINT)  # ends its wait; the interpreter then closes
            assert child.wait() == -signal.SIGKILL
            died = time.monotonic()
            all_there()

            if point in NEVER_A_READER:
                # It never was a reader, so nobody died; its rank is free for another process.
                send(timeout=5)
                time.sleep(0.6)  # past the next look at the locks
                send(timeout=5)
            elif point == "close-told":
                # It had left, in time.
                for _ in range(100):
                    send(timeout=5)
                    all_there()
            else:
                error, _ = _until_died(send)
                assert time.monotonic() - died < DEATH_WATCHDOG
                _is_named(error, 0, child.pid)
                with pytest.raises(PeerDied):
                    writer.enqueue("still", timeout=0)
                all_there()
                writer.evict(0)
            # The others go on, and another process takes the rank over.
            for _ in range(70):
                if point in NEVER_A_READER:
                    break
                send(timeout=5)
                all_there()
            with MessageQueue.create_from_handle(handle, 0) as replacement:
                writer.wait_until_ready(timeout=5)
                if point in NEVER_A_READER:
                    for i in range(sent):
                        assert (replacement.dequeue(timeout=0) == i).all()
                for _ in range(70):
                    send(timeout=5)
                    assert (replacement.dequeue(timeout=0) == sent - 1).all()
                    all_there()


WRITER = """
    import os, sys, time
    import numpy as np
    from fastipc import Handle, MessageQueue

    nbytes, with_child, shm_dir = int(sys.argv[1]), sys.argv[2] == "True", sys.argv[3] or None
    writer = MessageQueue(1, 1, inline_bytes=512, max_chunk_bytes=4096, max_chunks=20, slots=64,
                          shm_dir=shm_dir, on_reader_death="evict")
    print(writer.export_handle().to_str(), flush=True)
    if with_child:
        # What it inherits must not keep its parent alive in the eyes of the readers.
        if os.fork() == 0:
            os.close(1); os.close(2)
            time.sleep(1000)
            os._exit(0)
    writer.wait_until_ready()
    limit = int(sys.argv[4])
    for i in range(limit):
        writer.enqueue(np.full(nbytes, i, np.uint8))
        print("sent", i, flush=True)
    writer.close()
    print("closed", flush=True)
"""


def _handle(child) -> Handle:
    return Handle.from_str(child.wait_for("").strip())


def _end_of(child) -> None:
    """The child is dead; what it had forked lives on, and is ended here."""
    assert child.process.wait() == -signal.SIGKILL


def _kill_orphans(before: set[int]) -> None:
    for process in psutil.Process().children(recursive=True):
        if process.pid not in before:
            process.kill()
            process.wait(10)


@pytest.mark.parametrize(
    ("point", "size", "with_child"),
    [
        ("asleep", "small", False),
        ("mid-write", "small", False),
        ("mid-write", "chunk", True),
        ("mid-write", "fragments", False),
        ("before-publish", "small", True),
        ("before-publish", "chunk", False),
        ("before-publish", "fragments", True),
        ("published", "small", True),
        ("published", "chunk", False),
        ("published", "fragments", False),
        ("between-fragments", "fragments", False),
        ("between-fragments", "fragments", True),
        ("close-begin", "small", True),
        ("close-told", "small", True),
    ],
)
def test_a_writer_dies_at_a_point(point, size, with_child, start_child, hooked_core):
    nbytes = {"small": 10, "chunk": 3000, "fragments": 30_000}[size]
    limit = 5 if point.startswith("close") else 1000
    orphans = {p.pid for p in psutil.Process().children(recursive=True)}
    child = start_child(
        WRITER,
        nbytes,
        with_child,
        "",
        limit,
        pythonpath=hooked_core,
        # The first sleep is the one for readers to attach.
        env={"FIPC_TEST_POINT": f"{point}:{WRITER_POINTS[point]}:kill", "FASTIPC_SPIN_US": "0"},
    )
    handle = _handle(child)
    if point == "asleep":
        # Either it slept already, waiting for the reader, or it will, when the ring is full.
        try:
            reader = MessageQueue.create_from_handle(handle, 0)
        except HandleMismatch:
            _end_of(child)
            _kill_orphans(orphans)
            return
    else:
        reader = MessageQueue.create_from_handle(handle, 0)
    with reader:
        got = []
        if point == "close-told":
            with pytest.raises(Closed):
                forever(lambda: got.append(reader.dequeue()))
        else:
            if point == "asleep":
                _end_of(child)  # nothing is read until it is dead
            got, error = drain_until_dead(reader)
            _is_named(error, None, child.pid)
        _end_of(child)
        _kill_orphans(orphans)
        for i, array in enumerate(got):
            assert array.shape == (nbytes,)
            assert (array == i % 256).all()
        # What was published is there, what was not isn't; of half a message there is nothing.
        if point.startswith("close"):
            assert len(got) == 5
        elif size != "fragments":
            expected = {"mid-write": 2, "before-publish": 2, "published": 3}
            if point in expected:
                assert len(got) == expected[point]
        elif point != "asleep":
            assert len(got) == 0


@pytest.mark.parametrize("shm_dir", ["", "/dev/shm"], ids=["memfd", "named"])
@pytest.mark.parametrize("point", [p for p in WRITER_POINTS if p.startswith("create")])
def test_a_writer_dies_while_it_makes_the_queue(point, shm_dir, start_child, hooked_core):
    before = set(os.listdir("/dev/shm"))
    child = start_child(
        WRITER, 10, False, shm_dir, 5,
        pythonpath=hooked_core, env={"FIPC_TEST_POINT": f"{point}:1:kill"},
    )  # fmt: skip
    if point == "create-linked" and not shm_dir:
        # Without a name there is no such moment; it lives, and ends in its own way.
        with MessageQueue.create_from_handle(_handle(child), 0) as reader:
            assert len(list(reader)) == 5
        assert child.wait() == 0
        return
    assert child.wait() == -signal.SIGKILL
    assert child.stdout == ""
    left = [os.path.join("/dev/shm", n) for n in set(os.listdir("/dev/shm")) - before
            if "fastipc-" in n]  # fmt: skip
    if not shm_dir or point == "create-begin":
        assert not left
        return
    # The next creation there sweeps what the dead left, unfinished or not.
    assert len(left) == 1
    with ends(1, shm_dir="/dev/shm"):
        assert not os.path.exists(left[0])


def test_a_writer_dies_while_it_evicts(start_child, hooked_core):
    source = """
        import sys
        from fastipc import MessageQueue

        with MessageQueue(2, 2, slots=2, on_reader_death="evict") as writer:
            print(writer.export_handle().to_str(), flush=True)
            writer.wait_until_ready()
            i = 0
            while True:
                writer.enqueue(i)
                i += 1
    """
    child = start_child(source, pythonpath=hooked_core, env={"FIPC_TEST_POINT": "evict:1:kill"})
    handle = _handle(child)
    with Team() as team:
        member = team.start(workers.obedient_reader, handle, 1)
        member.said("attached")
        with MessageQueue.create_from_handle(handle, 0) as reader:
            got = []
            reader.wait_until_ready()
            member.kill()
            got, error = drain_until_dead(reader)
            assert got == list(range(len(got)))
            _is_named(error, None, child.pid)
    assert child.wait() == -signal.SIGKILL


# ---- nothing is left ---------------------------------------------------------------------------

RESTARTED = """
    import sys, time
    from fastipc import MessageQueue

    writer = MessageQueue(1, 1, max_chunk_bytes=1 << 20, shm_dir=sys.argv[1] or None)
    reader = [MessageQueue.create_from_handle(writer.export_handle(), 0)]
    if sys.argv[2] == "ready":
        writer.wait_until_ready()
    writer.enqueue(bytes(1 << 19))
    print("up", flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("shm_dir", ["", "/dev/shm"], ids=["memfd", "named"])
def test_starting_and_killing_over_and_over_leaves_nothing(shm_dir, start_child):
    rounds = 250 if NIGHTLY else 4
    before = {n for n in os.listdir("/dev/shm") if "fastipc-" in n}
    for i in range(rounds):
        child = start_child(RESTARTED, shm_dir, ["ready", "never ready"][i % 2])
        child.wait_for("up")
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        if shm_dir:
            # At most the last one's file is there, until somebody makes another.
            now = {n for n in os.listdir("/dev/shm") if "fastipc-" in n} - before
            assert len(now) <= 1
    if shm_dir:
        with ends(1, shm_dir=shm_dir):
            pass
    # (Files of others' queues may have gone meanwhile, and come: the fixture looks closer.)


def test_a_process_that_dies_with_many_queues_is_noticed_on_each(start_child):
    source = """
        import sys, time
        from fastipc import Handle, MessageQueue
        readers = [MessageQueue.create_from_handle(Handle.from_str(h), 0) for h in sys.argv[1:]]
        print("attached", flush=True)
        time.sleep(1000)
    """
    options = {"slots": 2, "max_chunks": 1, "max_chunk_bytes": 4096}
    writers = [MessageQueue(1, 1, **options) for _ in range(10)]
    try:
        child = start_child(source, *(w.export_handle().to_str() for w in writers))
        child.wait_for("attached")
        for writer in writers:
            writer.wait_until_ready(timeout=0)
        child.send_signal(signal.SIGKILL)
        for writer in writers:
            error, _ = _until_died(writer.enqueue, "x")
            _is_named(error, 0, child.pid)
    finally:
        for writer in writers:
            writer.close()
        child.close()


def test_a_pid_that_was_used_again_is_not_taken_for_the_writer():
    with MessageQueue(1, 1) as writer:
        handle = writer.export_handle()
        fields = {f: getattr(handle, f) for f in handle.__struct_fields__}
        reused = Handle(**{**fields, "start_time": handle.start_time - 1})
        with pytest.raises(HandleMismatch, match="has ended"):
            MessageQueue.create_from_handle(reused, 0)
        # A live process of another kind at the same number:
        other = Handle(**{**fields, "pid": os.getppid(), "start_time": _start(os.getppid())})
        with pytest.raises((HandleMismatch, OSError)):
            MessageQueue.create_from_handle(other, 0)
        assert fastipc.Handle(**fields) == handle


def _start(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rsplit(")", 1)[1].split()[19])
