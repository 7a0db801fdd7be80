"""Readers on other hosts: everything arrives, once, in order, whatever becomes of the line."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import remote_workers as jobs
from network import BadLine, Hosts, Network, bad_line, made_or_skipped, many
from support import NIGHTLY, Member, Team, drain, eventually, in_fork
from workers import check_all

import fastipc
from fastipc import (
    Closed,
    Empty,
    Full,
    HandleMismatch,
    IPCError,
    MessageQueue,
    NotReady,
    PeerDied,
    keeper,
)
from fastipc.addresses import split_endpoint
from fastipc.remote_writer import RemoteWriter

MIB = 1 << 20
LOOPBACK = "127.0.0.1"
MESSAGES = int(os.environ.get("FASTIPC_REMOTE_MESSAGES", "20000" if NIGHTLY else "150"))
LARGEST = 32 * MIB
FRESH_QUEUES = 1000 if NIGHTLY else 100
CREATIONS = 100 if NIGHTLY else 10


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    yield from made_or_skipped()


def heard(member: Member) -> object:
    """The next thing that a child reports."""
    got = member._connection.recv()
    if isinstance(got, tuple) and len(got) == 2 and got[0] == "error":
        raise got[1]
    return got


def send_for_ever(writer: MessageQueue, obj: object) -> None:
    while True:
        writer.enqueue(obj, timeout=30)
        time.sleep(0.01)


class Ends:
    """A writer with remote readers only, and the readers, in this process."""

    def __init__(self, n: int = 1, **options: object) -> None:
        options.setdefault("connect_ip", LOOPBACK)
        self.writer = MessageQueue(n, 0, **options)
        self.readers: list[MessageQueue] = []
        handle = self.writer.export_handle()
        try:
            for rank in handle.remote_reader_ranks:
                self.readers.append(MessageQueue.create_from_handle(handle, rank))
            self.writer.wait_until_ready(30)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.writer.close()
        for reader in self.readers:
            reader.close()

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- several hosts -----------------------------------------------------------------------------


@pytest.mark.timeout(7200 if NIGHTLY else 120)
@pytest.mark.parametrize("address", ["10.77.0.1", "fd77::1"])
def test_two_local_and_two_remote_readers_get_the_same(network: Network, address: str) -> None:
    options = {"n_reader": 4, "n_local_reader": 2, "connect_ip": address}
    with Hosts(network) as team:
        writer = team.on("w", jobs.send_pattern, 7, LARGEST, MESSAGES, options)
        handle = heard(writer)
        readers = [
            team.on(host, check_all, handle, rank, 7, LARGEST)
            for rank, host in enumerate(["w", "w", "a", "b"])
        ]
        assert [reader.result() for reader in readers] == [MESSAGES] * 4
        assert writer.result()["remote_messages"] == MESSAGES


@pytest.mark.timeout(7200 if NIGHTLY else 180)
@pytest.mark.parametrize("address", ["10.77.0.1", "fd77::1"])
def test_a_bad_line_costs_time_and_nothing_else(network: Network, address: str) -> None:
    n = MESSAGES if NIGHTLY else MESSAGES // 2
    line = {
        "host": address,
        "delay": 0.1,
        "tear_bytes": 400e6 if NIGHTLY else 25e6,
        "stall_every": 60.0 if NIGHTLY else 4.0,
        "stall_seconds": 3.0,
    }
    options = {"n_reader": 4, "n_local_reader": 2, "connect_ip": address}
    with Hosts(network) as team:
        writer = team.on("w", jobs.send_pattern, 7, LARGEST, n, options)
        handle = heard(writer)
        target = split_endpoint(handle.address)
        proxies = [team.on("w", bad_line, target, {**line, "seed": seed}) for seed in range(2)]
        ways = [handle, handle]
        for proxy in proxies:
            host, port = heard(proxy)
            shown = f"[{host}]" if ":" in host else host
            ways.append(fastipc.Handle.from_str(handle.to_str()))
            ways[-1] = _at(handle, f"tcp://{shown}:{port}")
        readers = [
            team.on(host, check_all, ways[rank], rank, 7, LARGEST)
            for rank, host in enumerate(["w", "w", "a", "b"])
        ]
        assert [reader.result() for reader in readers] == [n] * 4
        writer.result()
        tears = stalls = 0
        for proxy in proxies:
            proxy.tell("end")
            torn, stalled = proxy.result()
            tears += torn
            stalls += stalled
        assert tears
        assert stalls


def _at(handle: fastipc.Handle, address: str) -> fastipc.Handle:
    import msgspec

    return msgspec.structs.replace(handle, address=address)


@pytest.mark.parametrize(
    "address",
    [
        "10.77.0.1",
        "fd77::1",
        "[fd77::1]",
        "tcp://[fd77::1]",
        "fe80::1%br0",
        "[fe80::1%br0]",
        "tcp://[::]",
        "0.0.0.0",
    ],
)
def test_every_form_of_an_address(network: Network, address: str) -> None:
    wildcard = address in ("tcp://[::]", "0.0.0.0")
    options = {"n_reader": 1, "n_local_reader": 0, "connect_ip": address}
    with Hosts(network) as team:
        if wildcard:
            # what is told is the default route's address
            family = "-6" if ":" in address else "-4"
            network._in("w", family, "route", "replace", "default", "dev", "br0")
        writer = team.on("w", jobs.send_pattern, 3, 10_000, 100, options)
        handle = heard(writer)
        assert "0.0.0.0" not in handle.address
        assert "[::]" not in handle.address
        reader = team.on("a", check_all, handle, 0, 3, 10_000)
        assert reader.result() == 100
        writer.result()


def test_an_address_that_is_not_ours_is_told_and_all_are_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "fastipc"):
        with MessageQueue(1, 0, connect_ip="203.0.113.7") as queue:
            handle = queue.export_handle()
            assert handle.address.startswith("tcp://203.0.113.7:")
            _, port = split_endpoint(handle.address)
            with MessageQueue.create_from_handle(_at(handle, f"tcp://127.0.0.1:{port}"), 0) as r:
                queue.wait_until_ready(30)
                queue.enqueue("through")
                assert r.dequeue(30) == "through"
    assert "every address" in caplog.text


@pytest.mark.parametrize("address", ["1.2.3.4:80", "[::1", "no such host.", "[::1]:5"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="connect_ip"):
        MessageQueue(1, 0, connect_ip=address)


def test_the_environment_names_the_address(run_child) -> None:
    out = run_child(
        """
        from fastipc import MessageQueue
        with MessageQueue(1, 0) as queue:
            print(queue.export_handle().address)
        with MessageQueue(1, 0, connect_ip="127.0.0.1") as queue:
            print(queue.export_handle().address)
        """,
        env={"FASTIPC_HOST_IP": "[::1]"},
    )
    first, second = out.split()
    assert first.startswith("tcp://[::1]:")
    assert second.startswith("tcp://127.0.0.1:")


# ---- the handshake -----------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_the_first_message_of_fresh_queues_arrives() -> None:
    with Team("spawn") as team:
        reader = team.start(jobs_first, 0)
        for _ in range(FRESH_QUEUES):
            with MessageQueue(1, 0, connect_ip=LOOPBACK) as queue:
                reader.tell(queue.export_handle())
                queue.wait_until_ready(30)
                queue.enqueue(("first of", queue.export_handle().queue_id))
        reader.tell(None)
        assert reader.result() == FRESH_QUEUES


def jobs_first(connection, rank: int) -> int:
    from workers import first_message_of_each

    return first_message_of_each(connection, rank)


@pytest.mark.timeout(900)
def test_many_processes_create_queues_at_once() -> None:
    with many(32, jobs.create_many, CREATIONS) as members:
        for member in members:
            member.said("here")
        for member in members:
            member.tell("go")
        assert [member.result() for member in members] == [CREATIONS] * 32


def test_who_is_missing_is_named() -> None:
    with MessageQueue(3, 1, connect_ip=LOOPBACK) as writer:
        handle = writer.export_handle()
        with (
            MessageQueue.create_from_handle(handle, 0),
            MessageQueue.create_from_handle(handle, 2) as reader,
        ):
            eventually(lambda: writer.stats()["peers"][3]["state"] == "active")
            with pytest.raises(NotReady, match="rank 1") as caught:
                writer.wait_until_ready(0.3)
            assert caught.value.missing == (1,)
            with pytest.raises(NotReady, match="wait_until_ready") as caught:
                writer.enqueue("too early")
            assert caught.value.missing == (1,)
            with pytest.raises(NotReady):
                reader.wait_until_ready(0.1)
            with MessageQueue.create_from_handle(handle, 1) as late:
                writer.wait_until_ready(30)
                reader.wait_until_ready(30)
                late.wait_until_ready(30)
                writer.enqueue("now")
                assert reader.dequeue(30) == late.dequeue(30) == "now"


def test_a_rank_that_is_taken_is_refused() -> None:
    with Ends(1) as ends:
        with MessageQueue.create_from_handle(ends.writer.export_handle(), 0) as second:
            with pytest.raises(HandleMismatch, match="taken"):
                second.wait_until_ready(30)
            with pytest.raises(HandleMismatch, match="taken"):
                second.dequeue(30)
        ends.writer.enqueue("goes on")
        assert ends.readers[0].dequeue(30) == "goes on"


def test_ranks_are_checked() -> None:
    with pytest.raises(ValueError, match="remote_reader_ranks"):
        MessageQueue(2, 1, remote_reader_ranks=[0])
    with MessageQueue(3, 1, [5], connect_ip=LOOPBACK, remote_reader_ranks=[2, 9]) as queue:
        handle = queue.export_handle()
        assert handle.remote_reader_ranks == [2, 9]
        with pytest.raises(ValueError, match="rank 1"):
            MessageQueue.create_from_handle(handle, 1)


@pytest.mark.parametrize("secure", [True, False])
def test_a_stale_reader_is_refused_by_the_queue_that_has_the_port_now(secure: bool) -> None:
    with MessageQueue(1, 0, connect_ip=LOOPBACK, secure=secure) as now:
        other = MessageQueue(1, 0, connect_ip=LOOPBACK, secure=secure)
        stale = _at(other.export_handle(), now.export_handle().address)
        other.close()
        with MessageQueue.create_from_handle(stale, 0) as reader:
            with pytest.raises(HandleMismatch):
                reader.wait_until_ready(30)
        with MessageQueue.create_from_handle(now.export_handle(), 0) as reader:
            now.wait_until_ready(30)
            now.enqueue("mine")
            assert reader.dequeue(30) == "mine"


def test_a_handle_whose_writer_has_ended_leads_nowhere() -> None:
    with MessageQueue(1, 0, connect_ip=LOOPBACK) as queue:
        handle = queue.export_handle()
    eventually(lambda: queue._end._gone)
    with MessageQueue.create_from_handle(handle, 0) as reader:
        with pytest.raises(HandleMismatch, match="ended"):
            reader.wait_until_ready(30)


def test_a_handle_hides_its_key_and_survives_every_way() -> None:
    import pickle

    with MessageQueue(1, 0, connect_ip=LOOPBACK) as queue:
        handle = queue.export_handle()
        assert len(handle.server_key) == 40
        assert handle.server_key not in repr(handle)
        assert fastipc.Handle.from_str(handle.to_str()) == handle
        assert pickle.loads(pickle.dumps(handle)) == handle


# ---- what is sent is what was there --------------------------------------------------------------


def test_the_caller_may_overwrite_at_once(network: Network) -> None:
    n = 40
    options = {"n_reader": 2, "n_local_reader": 1, "connect_ip": "10.77.0.1"}
    with Hosts(network) as team:
        writer = team.on("w", jobs.overwrite_at_once, n, options)
        handle = heard(writer)
        local = team.on("w", jobs.read_slowly, handle, 0, 0.0)
        slow = team.on("a", jobs.read_slowly, handle, 1, 0.03)
        writer.said("sent")
        writer.tell("close")
        assert local.result() == slow.result() == n
        writer.result()


def test_kinds_and_sizes() -> None:
    objects = [
        None,
        b"",
        b"x",
        b"y" * 70_000,
        np.arange(10),
        np.zeros((3, 0, 2)),
        np.arange(1_000_000)[::3],
        {"a": np.ones(5, np.float16), "b": [np.arange(100_000), "text"]},
        [np.full(7, i) for i in range(300)],
        np.zeros(40 * MIB, np.uint8),  # larger than all the credit
    ]
    with Ends(1, max_chunk_bytes=4 * MIB, max_chunks=2, slots=8) as ends:
        (reader,) = ends.readers
        for sent in objects:
            ends.writer.enqueue(sent, timeout=30)
            got = reader.dequeue(30)
            assert repr(got) == repr(sent)
            if isinstance(got, np.ndarray):
                assert got.dtype == sent.dtype
                assert np.array_equal(got, sent)
                assert got.flags.writeable
                assert got.flags.owndata or got.base is not None
        assert ends.writer.stats()["remote_messages"] == len(objects)


def test_received_memory_is_given_back() -> None:
    from support import resident_bytes

    with Ends(1) as ends:
        (reader,) = ends.readers
        array = np.ones(4 * MIB, np.uint8)

        def pass_on(n: int) -> None:
            for _ in range(n):
                ends.writer.enqueue(array)
                assert reader.dequeue(30)[0] == 1

        pass_on(20)
        before = resident_bytes()
        pass_on(100)
        gc.collect()
        # a hundred messages are 400 MiB
        assert resident_bytes() - before < 100 * MIB


def test_a_frame_that_cannot_be_right_is_skipped() -> None:
    with Ends(1) as ends:
        (reader,) = ends.readers
        end = ends.writer._end
        from fastipc import _core

        block, _ = _core.join([b"\xff" * 100], 1, 32)
        end._publish(block, False, len(block))
        ends.writer.enqueue("after")
        with pytest.raises(fastipc.DecodeError):
            reader.dequeue(30)
        assert reader.dequeue(30) == "after"


# ---- credit ------------------------------------------------------------------------------------


@pytest.mark.parametrize("secure", [True, False])
def test_a_stopped_reader_bounds_the_writer_and_misses_nothing(
    network: Network, secure: bool
) -> None:
    credit = 32
    options = {
        "n_reader": 2,
        "n_local_reader": 1,
        "connect_ip": "10.77.0.1",
        "max_chunk_bytes": MIB,
        "max_chunks": credit,
        "secure": secure,
    }
    with Hosts(network) as team:
        writer = team.on("w", jobs.bounded_writer, options)
        handle = heard(writer)
        local = team.on("w", jobs.numbers, handle, 0)
        remote = team.on("a", jobs.numbers, handle, 1)
        local.said("attached")
        remote.said("attached")
        for _ in range(50):
            writer.tell("one")
            writer.said("sent")
        before = _peak(writer.pid)
        remote.stop()
        writer.tell("fill")
        n, text = heard(writer)
        assert 50 < n <= 50 + 2 * credit
        assert "rank 1" in text
        # what may be unread, once more for chance, and nothing like all that was offered
        assert _peak(writer.pid) - before < 2 * credit * MIB
        remote.resume()
        for _ in range(20):
            writer.tell("one")
            writer.said("sent")
        writer.tell(None)
        assert local.result() == remote.result() == writer.result() == n + 20


def _peak(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def test_messages_and_bytes_are_credit() -> None:
    with Ends(1, max_chunk_bytes=MIB, max_chunks=2, slots=4) as ends:
        (reader,) = ends.readers
        writer = ends.writer
        for i in range(4):
            writer.enqueue(i, timeout=0)
        with pytest.raises(Full, match="rank 0"):
            writer.enqueue(4, timeout=0)
        assert writer.full()
        assert writer.qsize() == 4
        with pytest.raises(Full):
            writer.enqueue("x", timeout=0.05)
        assert [reader.dequeue(30) for _ in range(4)] == [0, 1, 2, 3]
        eventually(lambda: not writer.full())
        half = np.zeros(MIB - 4096, np.uint8)
        writer.enqueue(half)
        writer.enqueue(half)
        with pytest.raises(Full):
            writer.enqueue(half, timeout=0)
        got = reader.dequeue(30)
        writer.enqueue(half, timeout=30)
        assert got.nbytes == half.nbytes
        assert reader.dequeue_many(10, timeout=30)


def test_a_blocked_enqueue_ends_with_shutdown() -> None:
    with Ends(1, slots=2) as ends:
        writer = ends.writer
        writer.enqueue(1)
        writer.enqueue(2)
        failed: list[BaseException] = []

        def block() -> None:
            try:
                writer.enqueue(3)
            except Closed as error:
                failed.append(error)

        thread = threading.Thread(target=block)
        thread.start()
        eventually(lambda: writer._end._waits)
        writer.shutdown()
        thread.join()
        assert len(failed) == 1
        with pytest.raises(Closed):
            writer.enqueue(4)


def test_a_long_wait_is_reported(run_child) -> None:
    out = run_child(
        """
        import logging, sys
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        from fastipc import Full, MessageQueue
        with MessageQueue(1, 0, connect_ip="127.0.0.1", slots=2) as writer:
            with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
                writer.wait_until_ready(30)
                writer.enqueue(1)
                writer.enqueue(2)
                try:
                    writer.enqueue(3, timeout=1)
                except Full:
                    pass
        """,
        env={"FASTIPC_RINGBUFFER_WARNING_INTERVAL": "0.3"},
    )
    assert "has waited" in out
    assert "reader rank 0" in out
    assert "has not read sequence 0" in out


def test_an_end_that_could_not_be_made_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with MessageQueue(1, 0, connect_ip=LOOPBACK) as writer:
        handle = writer.export_handle()
        with MessageQueue.create_from_handle(handle, 0):  # the process's context is there now
            writer.wait_until_ready(30)
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(5):
                with pytest.raises(fastipc.HandleMismatch, match="address"):
                    MessageQueue.create_from_handle(_at(handle, "tcp://nowhere"), 0)
            with monkeypatch.context() as patch:
                # as if this process had no keeper yet, and could not have one
                patch.setattr(keeper, "_keeper", None)
                patch.setattr(threading.Thread, "start", refuse)
                for _ in range(5):
                    with pytest.raises(RuntimeError):
                        MessageQueue(1, 0, connect_ip=LOOPBACK)
                    with pytest.raises(RuntimeError):
                        MessageQueue.create_from_handle(handle, 0)
            # (ZMQ's own thread closes what it has of them)
            eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_wait_after_one_for_which_there_was_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def waiting() -> bool:
        return any(thread.name == "fastipc-wait" for thread in threading.enumerate())

    eventually(lambda: not waiting())  # what other tests had
    with (
        MessageQueue(1, 0, connect_ip=LOOPBACK) as far,
        MessageQueue.create_from_handle(far.export_handle(), 0) as one,
        MessageQueue(1, 1) as near,
        MessageQueue.create_from_handle(near.export_handle(), 0) as two,
    ):
        far.wait_until_ready(30)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError):
                fastipc.wait([one, two], 30)
        assert fastipc.wait([one, two], 0.01) == []
        assert waiting()  # and not one that never began


def test_a_reader_without_descriptors_notices_the_writers_death(run_child) -> None:
    run_child(
        """
        import logging, os, resource, subprocess, sys
        import pytest
        from fastipc import Handle, MessageQueue, PeerDied

        taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
        complaints = []
        logging.getLogger("fastipc").addFilter(lambda record: complaints.append(record))
        source = '''if True:
            import sys
            from fastipc import MessageQueue
            writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
            print(writer.export_handle().to_str(), flush=True)
            writer.wait_until_ready(30)
            writer.enqueue("hello")
            sys.stdin.read()
            os._exit(1)
        '''
        child = subprocess.Popen(
            [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        handle = Handle.from_str(child.stdout.readline().strip())
        with MessageQueue.create_from_handle(handle, 0) as reader:
            assert reader.dequeue(30) == "hello"
            resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))  # from now on there are no more
            child.kill()
            child.wait()
            with pytest.raises(PeerDied):
                reader.dequeue(30)
        assert complaints == []
        """,
        env={"FASTIPC_REMOTE_GRACE": "0.5"},
    )


def test_the_keeper_outlives_what_it_could_not_do(run_child) -> None:
    run_child(
        """
        import logging, resource, time
        import pytest
        from fastipc import Closed, MessageQueue

        complaints = []
        logging.getLogger("fastipc").addFilter(lambda record: complaints.append(record))
        writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
        with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            writer.wait_until_ready(30)
            few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (1, most))  # poll refuses more than one
            while not complaints:
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
            writer.enqueue(1)
            writer.close()  # the keeper tells the reader
            assert reader.dequeue(30) == 1
            with pytest.raises(Closed):
                reader.dequeue(30)
        """
    )


# ---- lost connections, in one process ------------------------------------------------------------


def test_torn_connections_lose_and_double_nothing() -> None:
    with MessageQueue(1, 0, connect_ip=LOOPBACK) as writer:
        handle = writer.export_handle()
        with (
            BadLine(split_endpoint(handle.address)) as line,
            MessageQueue.create_from_handle(line.handle(handle), 0) as reader,
        ):
            writer.wait_until_ready(30)
            sent = 0
            for _ in range(20):
                for _ in range(10):
                    writer.enqueue(sent)
                    sent += 1
                line.tear()
                for i in range(sent - 10, sent):
                    assert reader.dequeue(30) == i
            with pytest.raises(Empty):
                reader.dequeue(0.1)


def test_a_connection_without_a_handshake_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastipc.remote_reader.STUCK_SECONDS", 0.2)
    with MessageQueue(1, 0, connect_ip=LOOPBACK) as writer:
        handle = writer.export_handle()
        with BadLine(split_endpoint(handle.address)) as line:
            line.paused.set()
            with MessageQueue.create_from_handle(line.handle(handle), 0) as reader:
                eventually(lambda: line.accepted >= 4)
                line.paused.clear()
                writer.wait_until_ready(60)
                writer.enqueue("through")
                assert reader.dequeue(60) == "through"


def test_lost_reports_of_a_connection_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    with MessageQueue(1, 0, connect_ip=LOOPBACK) as writer:
        handle = writer.export_handle()
        with (
            BadLine(split_endpoint(handle.address)) as line,
            MessageQueue.create_from_handle(line.handle(handle), 0) as reader,
        ):
            writer.wait_until_ready(60)
            reader.wait_until_ready(60)
            monkeypatch.setattr(reader._end, "_monitored", lambda: iter(()))
            for i in range(5):
                line.tear()
                writer.enqueue(i)
                assert reader.dequeue(60) == i


@pytest.mark.parametrize("which", [2, 5])
def test_what_zmq_drops_is_sent_again(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    """One in the middle, and the last one, of which nothing tells but a question of the writer."""
    with Ends(1) as ends:
        (reader,) = ends.readers
        end = ends.writer._end
        say = end._say
        dropped = 0

        def drop_one(*frames: object) -> None:
            nonlocal dropped
            if end._head == which and not dropped:
                dropped += 1
                return
            say(*frames)

        monkeypatch.setattr(end, "_say", drop_one)
        for i in range(which):
            ends.writer.enqueue(i)
        assert dropped == 1
        for i in range(which, 5):
            ends.writer.enqueue(i)
        assert [reader.dequeue(30) for _ in range(5)] == list(range(5))
        assert ends.writer.stats()["remote_resent"] >= 1


def test_what_is_sent_twice_is_delivered_once() -> None:
    with Ends(1) as ends:
        (reader,) = ends.readers
        end = ends.writer._end
        for i in range(5):
            ends.writer.enqueue(i)
            with end._lock:
                end._resend(end._members[0].nonce, end._base)
        ends.writer.enqueue("last")
        got = []
        while not got or got[-1] != "last":
            got.append(reader.dequeue(30))
        assert got == [0, 1, 2, 3, 4, "last"]
        assert end._resent >= 5


def test_an_acknowledgement_that_is_lost_is_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with Ends(1, slots=2) as ends:
        (reader,) = ends.readers
        end = reader._end
        tell = end._tell
        lost: list[int] = []

        def lose_first(kind: int, body: bytes) -> None:
            if len(lost) < 2:
                lost.append(kind)
            else:
                tell(kind, body)

        monkeypatch.setattr(end, "_tell", lose_first)
        for i in range(6):
            ends.writer.enqueue(i, timeout=30)
            assert reader.dequeue(30) == i
        assert len(lost) == 2


# ---- the end -----------------------------------------------------------------------------------


def test_a_writers_close_is_an_end_and_a_kill_is_a_death() -> None:
    options = {"n_reader": 1, "n_local_reader": 0, "connect_ip": LOOPBACK}
    for killed in (False, True):
        with Team("spawn") as team:
            writer = team.start(jobs.echo_writer, options)
            handle = heard(writer)
            with MessageQueue.create_from_handle(handle, 0) as reader:
                writer.said("ready")
                for i in range(3):
                    writer.tell(i)
                    writer.said("sent")
                if killed:
                    eventually(lambda r=reader: r.qsize() == 3)
                    writer.kill()
                else:
                    writer.tell(None)
                    writer.result()
                assert [reader.dequeue(30) for _ in range(3)] == [0, 1, 2]
                for _ in range(2):
                    if killed:
                        with pytest.raises(PeerDied) as caught:
                            reader.dequeue()
                        assert caught.value.pid == handle.pid
                        assert caught.value.host == handle.host
                        assert caught.value.rank is None
                    else:
                        with pytest.raises(Closed):
                            reader.dequeue()


def test_a_dead_reader_is_named_and_can_be_replaced() -> None:
    with Team("spawn") as team, MessageQueue(2, 0, connect_ip=LOOPBACK) as writer:
        handle = writer.export_handle()
        first = team.start(jobs.echo_reader, handle, 0)
        with MessageQueue.create_from_handle(handle, 1) as other:
            writer.wait_until_ready(60)
            first.said("attached")
            writer.enqueue("a")
            first.said("a")
            with pytest.raises(ValueError, match="not dead"):
                writer.evict(0)
            first.kill()
            got = []
            died = send_until_dead(writer, "b", other, got)
            assert (died.rank, died.pid) == (0, first.pid)
            with pytest.raises(PeerDied):
                writer.enqueue("still")
            second = team.start(jobs.echo_reader, handle, 0)
            second.said("attached")
            writer.enqueue("c")
            second.said("c")
            second.kill()
            send_until_dead(writer, "to whom?", other, got)
            writer.evict(0)
            writer.enqueue("d")
            while not got or got[-1] != "d":
                got.append(other.dequeue(30))
            assert got[0] == "a"
            assert "c" in got


def send_until_dead(
    writer: MessageQueue, obj: object, other: MessageQueue, got: list[object]
) -> PeerDied:
    """Send until a reader is found dead. The other one takes all that comes meanwhile: the writer
    waits for nobody but the dead one."""
    while True:
        try:
            writer.enqueue(obj, timeout=30)
        except PeerDied as error:
            return error
        got += drain(other)
        time.sleep(0.01)


def test_a_dead_reader_is_evicted_if_so_asked(caplog: pytest.LogCaptureFixture) -> None:
    with (
        Team("spawn") as team,
        MessageQueue(2, 1, connect_ip=LOOPBACK, on_reader_death="evict", slots=4) as writer,
    ):
        handle = writer.export_handle()
        remote = team.start(jobs.echo_reader, handle, 1)
        with MessageQueue.create_from_handle(handle, 0) as local:
            writer.wait_until_ready(60)
            remote.said("attached")
            remote.kill()
            with caplog.at_level(logging.WARNING, "fastipc"):
                for i in range(20):
                    writer.enqueue(i, timeout=30)
                    assert local.dequeue(30) == i
                eventually(lambda: "evicted" in caplog.text)
            assert "rank 1" in caplog.text


@pytest.mark.parametrize("what", ["evicted", "waited"])
def test_a_log_handler_may_send_over_the_queue_that_it_hears_of(what: str) -> None:
    class Sender(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if what in record.getMessage() and not sent:
                sent.append(None)
                writer.enqueue("told", timeout=60)

    sent: list[None] = []
    handler = Sender()
    logger = logging.getLogger("fastipc")
    with (
        Team("spawn") as team,
        MessageQueue(2, 0, connect_ip=LOOPBACK, on_reader_death="evict", slots=4) as writer,
    ):
        handle = writer.export_handle()
        other = team.start(jobs.echo_reader, handle, 1)
        with MessageQueue.create_from_handle(handle, 0) as reader:
            writer.wait_until_ready(60)
            other.said("attached")
            logger.addHandler(handler)
            try:
                blocked = threading.Thread(target=lambda: [writer.enqueue(i) for i in range(40)])
                if what == "waited":
                    writer._end._warn_after = 0.1
                blocked.start()
                eventually(lambda: writer._end._waits and writer._end.busy)
                if what == "evicted":
                    other.kill()
                eventually(lambda: sent)
                got = [reader.dequeue(60) for _ in range(41)]
                blocked.join()
            finally:
                logger.removeHandler(handler)
            assert sorted(got, key=str) == sorted([*range(40), "told"], key=str)


def test_a_stopped_reader_is_not_dead() -> None:
    with Team("spawn") as team, MessageQueue(1, 0, connect_ip=LOOPBACK) as writer:
        reader = team.start(jobs.echo_reader, writer.export_handle(), 0)
        writer.wait_until_ready(60)
        reader.said("attached")
        reader.stop()
        until = time.monotonic() + 3
        n = 0
        while time.monotonic() < until:
            writer.enqueue(n)
            n += 1
            time.sleep(0.05)
        reader.resume()
        for i in range(n):
            reader.said(i)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_reader_whose_connection_is_torn_is_not_dead_either(run_child, stopped: bool) -> None:
    """Far longer than the grace, since the writer can see that its process is there."""
    run_child(
        f"""
        import os, signal, sys, time
        import network
        import remote_workers as jobs
        from support import Team, eventually
        from fastipc import MessageQueue
        from fastipc.addresses import split_endpoint
        if __name__ == "__main__":
            with (
                Team("spawn") as team,
                MessageQueue(1, 0, connect_ip="127.0.0.1") as writer,
                network.BadLine(split_endpoint(writer.export_handle().address)) as line,
            ):
                handle = line.handle(writer.export_handle())
                reader = team.start(jobs.echo_reader, handle, 0)
                writer.wait_until_ready(60)
                reader.said("attached")
                member = writer._end._members[0]
                eventually(lambda: member.believed)
                if {stopped}:
                    reader.stop()
                line.paused.set()
                line.tear()
                eventually(lambda: member.lost is not None)
                until = time.monotonic() + 4
                n = 0
                while time.monotonic() < until:
                    writer.enqueue(n)
                    n += 1
                    time.sleep(0.05)
                reader.resume()
                line.paused.clear()
                for i in range(n):
                    reader.said(i)
                reader.kill()
        """,
        env={"FASTIPC_REMOTE_GRACE": "0.5", "PYTHONPATH": os.path.dirname(__file__)},
    )


def test_a_reader_that_cannot_be_knocked_at_has_a_time_of_grace(run_child) -> None:
    run_child(
        """
        import threading, time
        import network
        from fastipc import MessageQueue, PeerDied, liveness
        from fastipc.addresses import split_endpoint
        made = liveness.Sign.__init__
        def without(self, *args):
            made(self, *args)
            self.text = ""
        liveness.Sign.__init__ = without
        with (
            MessageQueue(1, 0, connect_ip="127.0.0.1") as writer,
            network.BadLine(split_endpoint(writer.export_handle().address)) as line,
        ):
            handle = line.handle(writer.export_handle())
            with MessageQueue.create_from_handle(handle, 0) as reader:
                writer.wait_until_ready(60)
                line.tear()
                for i in range(20):
                    writer.enqueue(i)
                    assert reader.dequeue(30) == i
                grace, writer._end._grace = writer._end._grace, 1.5
                line.paused.set()
                line.tear()
                try:
                    while True:
                        writer.enqueue("?", timeout=60)
                        time.sleep(0.01)
                except PeerDied as error:
                    assert error.rank == 0
                writer._end._grace = grace
                line.paused.clear()
                # it was not dead, and says so
                while True:
                    try:
                        writer.enqueue("here again", timeout=60)
                        break
                    except PeerDied:
                        time.sleep(0.01)
                while reader.dequeue(60) != "here again":
                    pass
        """,
        env={"FASTIPC_REMOTE_GRACE": "10", "PYTHONPATH": os.path.dirname(__file__)},
    )


def test_readers_may_leave_and_the_last_one_closes() -> None:
    with MessageQueue(3, 1, connect_ip=LOOPBACK, slots=4) as writer:
        handle = writer.export_handle()
        readers = [MessageQueue.create_from_handle(handle, rank) for rank in range(3)]
        writer.wait_until_ready(30)
        writer.enqueue("to three")
        for reader in readers:
            assert reader.dequeue(30) == "to three"
        readers[0].close()  # the only local one
        readers[1].close()
        eventually(lambda: writer.stats()["peers"][2]["state"] == "left")
        for i in range(10):
            writer.enqueue(i, timeout=30)
            assert readers[2].dequeue(30) == i
        readers[2].close()
        with pytest.raises(Closed, match="every reader"):
            send_for_ever(writer, "x")


def test_exit_with_a_reader_that_is_gone_does_not_linger(start_child) -> None:
    for how in ("", "raise RuntimeError('unhandled')", "os.kill(os.getpid(), signal.SIGTERM)"):
        child = start_child(
            f"""
            import os, signal, sys
            from fastipc import MessageQueue
            writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
            pid = os.fork()
            if pid == 0:
                reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
                reader.wait_until_ready(30)
                os.kill(os.getpid(), signal.SIGKILL)
            writer.wait_until_ready(30)
            os.waitpid(pid, 0)
            for i in range(100):
                writer._end._ready and writer.enqueue(b"x" * 1000)
            {how}
            """
        )
        code = child.wait()
        assert code in (0, 1, -15)
        assert not child.timed_out


def test_what_was_sent_arrives_though_the_writer_exits_at_once() -> None:
    options = {"n_reader": 1, "n_local_reader": 0, "connect_ip": LOOPBACK}
    with Team("spawn") as team:
        writer = team.start(jobs.send_pattern, 5, MIB, 100, options)
        handle = heard(writer)
        reader = team.start(check_all, handle, 0, 5, MIB, True)
        writer.result()
        assert reader.result() == 100


# ---- threads, signals, fork ----------------------------------------------------------------------


def test_threads_share_both_ends() -> None:
    n = 400
    with Ends(1, slots=32) as ends:
        (reader,) = ends.readers
        got: list[tuple[int, int]] = []

        def send(who: int) -> None:
            for i in range(n):
                ends.writer.enqueue((who, i), timeout=60)

        def receive() -> None:
            while True:
                try:
                    got.append(reader.dequeue(60))
                except Closed:
                    return

        senders = [threading.Thread(target=send, args=(who,)) for who in range(3)]
        receivers = [threading.Thread(target=receive) for _ in range(3)]
        for thread in senders + receivers:
            thread.start()
        for thread in senders:
            thread.join()
        eventually(lambda: len(got) == 3 * n)
        ends.writer.close()
        for thread in receivers:
            thread.join()
        assert sorted(got) == [(who, i) for who in range(3) for i in range(n)]


def test_a_signal_ends_a_wait_and_leaves_the_queue_working(run_child) -> None:
    run_child(
        """
        import os, signal, threading, time
        import pytest
        from fastipc import MessageQueue
        class Stop(Exception):
            pass
        def stop(*_):
            raise Stop
        signal.signal(signal.SIGUSR1, stop)
        with MessageQueue(1, 0, connect_ip="127.0.0.1", slots=4) as writer:
            with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
                writer.wait_until_ready(30)
                for i in range(30):
                    inside = threading.Event()
                    def interrupt():
                        inside.wait()
                        while not reader._end._turn.taken:
                            time.sleep(0.001)
                        time.sleep(0.01 + i / 1000)
                        os.kill(os.getpid(), signal.SIGUSR1)
                    thread = threading.Thread(target=interrupt)
                    thread.start()
                    with pytest.raises(Stop):
                        inside.set()
                        reader.dequeue()
                    thread.join()
                    writer.enqueue(i)
                    assert reader.dequeue(30) == i
        """
    )


def test_signals_at_random_lose_nothing(run_child) -> None:
    run_child(
        """
        import os, signal, threading, time
        from fastipc import MessageQueue
        class Stop(Exception):
            pass
        armed = False
        def stop(*_):
            global armed
            if armed:
                armed = False
                raise Stop
        signal.signal(signal.SIGALRM, stop)
        with MessageQueue(2, 1, connect_ip="127.0.0.1", slots=16) as writer:
            handle = writer.export_handle()
            readers = [MessageQueue.create_from_handle(handle, r) for r in range(2)]
            writer.wait_until_ready(30)
            got = [[], []]
            def receive(which):
                for message in readers[which]:
                    got[which].append(message)
            threads = [threading.Thread(target=receive, args=(r,)) for r in range(2)]
            for thread in threads:
                thread.start()
            signal.setitimer(signal.ITIMER_REAL, 0.0007, 0.0007)
            until = time.monotonic() + 4
            n = stopped = 0
            while time.monotonic() < until:
                try:
                    armed = True
                    writer.enqueue(n, timeout=60)
                    armed = False
                except Stop:
                    armed = False
                    stopped += 1
                n += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            writer.enqueue("last")
        for thread in threads:
            thread.join()
        for reader in readers:
            reader.close()
        assert stopped
        assert got[0] == got[1], "not the same messages here and there"
        assert len(set(got[0])) == len(got[0])
        numbers = [m for m in got[0] if m != "last"]
        assert numbers == sorted(numbers)
        assert len(numbers) >= n - stopped
        """
    )


def test_an_end_that_fails_does_not_take_the_keeper_from_the_others(monkeypatch, caplog) -> None:
    def delivered(end: RemoteWriter) -> bool:
        monkeypatch.undo()
        raise ZeroDivisionError("nobody foresaw this")

    ends, others = Ends(), Ends()
    try:
        monkeypatch.setattr(RemoteWriter, "_delivered", delivered)
        ends.close()
        eventually(lambda: "nobody foresaw this" in caplog.text)
        assert keeper._keeper is not None
        assert keeper._keeper._thread.is_alive()
        others.writer.enqueue("a")
        assert others.readers[0].dequeue(timeout=30) == "a"
    finally:
        others.close()


def test_a_forked_child_cannot_use_its_parents_ends() -> None:
    with Ends(1) as ends:
        (reader,) = ends.readers

        def use() -> list[str]:
            errors = []
            for call in (lambda: ends.writer.enqueue(1), lambda: reader.dequeue(0)):
                try:
                    call()
                except IPCError as error:
                    errors.append(str(error))
            gc.collect()
            ends.close()
            return errors

        for i in range(5):
            assert all("parent" in error for error in in_fork(use))
            ends.writer.enqueue(i)
            assert reader.dequeue(30) == i


def test_a_forked_child_does_not_wait_for_what_another_thread_had_at_the_fork() -> None:
    with Ends(1) as ends, ThreadPoolExecutor(1) as pool:
        lock = ends.writer._end._lock
        pool.submit(lock.acquire).result()
        try:
            for call in (ends.writer.stats, ends.writer.qsize, lambda: ends.writer.enqueue(1, 0)):
                with pytest.raises(IPCError, match="parent"):
                    in_fork(call)
        finally:
            pool.submit(lock.release).result()


def test_a_forked_child_does_not_keep_its_parents_connections() -> None:
    with MessageQueue(1, 0, connect_ip=LOOPBACK) as outer:
        receiving, sending = os.pipe()
        # A writer process whose child outlives it.
        pid = os.fork()
        if pid == 0:
            try:
                writer = MessageQueue(1, 0, connect_ip=LOOPBACK)
                grandchild = 0
                os.write(sending, writer.export_handle().to_str().encode())
                writer.wait_until_ready(30)
                grandchild = os.fork()
                if grandchild == 0:
                    os.read(0, 1)
                    time.sleep(600)
                os.write(sending, f" {grandchild}".encode())
                writer.enqueue("last words")
                time.sleep(600)
            finally:
                os._exit(1)
        os.close(sending)
        handle = fastipc.Handle.from_str(os.read(receiving, 4096).decode())
        grandchild = 0
        try:
            with MessageQueue.create_from_handle(handle, 0) as reader:
                assert reader.dequeue(30) == "last words"
                grandchild = int(os.read(receiving, 100))
                os.kill(pid, 9)
                with pytest.raises(PeerDied):
                    reader.dequeue(60)
        finally:
            os.waitpid(pid, 0)
            os.close(receiving)
            if grandchild:
                os.kill(grandchild, 9)
        assert outer.rank is None


def test_remote_and_local_queues_are_waited_for_together() -> None:
    with Ends(1) as far, Ends(1) as farther, MessageQueue(1, 1) as near:
        with MessageQueue.create_from_handle(near.export_handle(), 0) as local:
            (remote,), (other,) = far.readers, farther.readers
            queues = [remote, local, other]
            assert fastipc.wait(queues, 0) == []
            assert fastipc.wait(queues, 0.05) == []
            for i in range(20):
                for writer, reader in ((far.writer, remote), (near, local)):
                    timer = threading.Timer(0.002 * (i % 5), writer.enqueue, (i,))
                    timer.start()
                    assert fastipc.wait(queues, 30) == [reader]
                    assert reader.dequeue(0) == i
                    timer.join()
            far.writer.close()
            assert fastipc.wait(queues, 30) == [remote]
            with pytest.raises(Closed):
                remote.dequeue(0)


def wait_late(
    monkeypatch: pytest.MonkeyPatch, reader: MessageQueue, happen: Callable[[], object]
) -> None:
    """Waits for the reader. Between the wait's first look and its sleep something happens, and the
    keeper takes it in, and with it what the descriptor would have told."""
    end = reader._end
    look = end.readable
    looks = 0

    def look_and_be_late() -> bool:
        nonlocal looks
        looks += 1
        found: bool = look()
        if looks == 1:
            assert not found
            happen()
            eventually(lambda: end._inbox or end._closed_at is not None or end._failure)
        return found

    monkeypatch.setattr("fastipc.remote.SLICE", 3600.0)  # a later look would find it, too
    monkeypatch.setattr(end, "readable", look_and_be_late)
    assert fastipc.wait([reader]) == [reader]
    assert looks == 2


@pytest.mark.parametrize("what", ["message", "close"])
def test_a_wait_is_woken_by_what_the_keeper_takes_in(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with Ends(1) as ends:
        (reader,) = ends.readers
        # What it asks now and then would wake the reader, too.
        monkeypatch.setattr(ends.writer._end, "_ask", lambda now: None)
        if what == "message":
            wait_late(monkeypatch, reader, lambda: ends.writer.enqueue(1))
            assert reader.dequeue(0) == 1
        else:
            wait_late(monkeypatch, reader, ends.writer.close)
            with pytest.raises(Closed):
                reader.dequeue(0)


def test_a_wait_is_woken_when_the_keeper_finds_a_writer_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"n_reader": 1, "n_local_reader": 0, "connect_ip": LOOPBACK}
    with Team("spawn") as team:
        writer = team.start(jobs.echo_writer, options)
        with MessageQueue.create_from_handle(heard(writer), 0) as reader:
            writer.said("ready")
            reader.wait_until_ready(60)  # to it, the other has been there from now on
            wait_late(monkeypatch, reader, writer.kill)
            with pytest.raises(PeerDied):
                reader.dequeue(0)


def test_a_local_queue_has_no_socket() -> None:
    with Team("spawn") as team:
        ports, sockets = team.start(jobs.sockets_of_local_queue).result()
    assert ports == []
    assert sockets == []
