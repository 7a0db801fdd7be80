"""Executors: calls and replies, and what becomes of them when somebody dies."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import threading
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import children
import numpy as np
import psutil
import pytest
from children import Probe
from support import DEATH_WATCHDOG, NIGHTLY, eventually, forever, in_fork, process_state

import fastipc
from fastipc import ChildDied, Closed, NotReady, RemoteError, ReplyTimeout, WorkerDied, processes
from fastipc.executor import InProcessExecutor, MultiprocExecutor, Worker, make_executor
from fastipc.settings import settings

METHODS = ("fork", "spawn", "forkserver")
HERE = Path(__file__).parent
MIB = 1 << 20


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


@contextmanager
def workers(world_size=2, worker=Probe, method="fork", **options):
    executor = MultiprocExecutor(worker, world_size, start_method=method, **options)
    try:
        yield executor
    finally:
        executor.shutdown(graceful=5.0, terminate=1.0)
        assert not any(child.is_alive() for child in executor.children)


@pytest.fixture(params=["in this process", *METHODS])
def one(request):
    """An executor of one worker of any kind."""
    if request.param == "in this process":
        with InProcessExecutor(Probe, kwargs={"tag": "mine"}) as executor:
            yield executor
    else:
        with workers(1, method=request.param, kwargs={"tag": "mine"}) as executor:
            yield executor


def replied(executor, rank):
    """Waits for a reply of the worker that nobody has taken, without taking it."""
    eventually(lambda: not executor._replies[rank].empty(), pause=0.0005)


def of_the_first(executor, *args, **options):
    """Of a call of which worker 1 fails: the outcome when worker 0's reply is there.

    Without it the failure would end the wait after a while.
    """
    future = executor.collective_rpc(*args, non_block=True, **options)
    replied(executor, 0)
    return future.result(60)


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# ---- calls and replies -------------------------------------------------------------------------


def test_one_worker_of_any_kind(one):
    rpc = one.collective_rpc
    assert rpc("echo", (5,)) == [(0, 5, None)]
    assert rpc("echo", (5,), {"other": 6}) == [(0, 5, 6)]
    assert rpc("echo", kwargs={"value": 1}, unique_reply_rank=0) == (0, 1, None)
    assert rpc(children.Method.ECHO, (5,)) == [(0, 5, None)]
    assert rpc(lambda worker, x, y=0: (worker.tag, x + y), (1,), {"y": 2}) == [("mine", 3)]
    about = rpc("about", timeout=60, unique_reply_rank=0)
    assert about["steps"] == ["made", "device", "loaded"]
    assert (about["tag"], about["local"], about["world"]) == ("mine", 0, 1)
    with pytest.raises(KeyError, match="rank 0"):
        rpc("fail")
    with pytest.raises(AttributeError, match="no_such_method"):
        rpc("no_such_method")
    with pytest.raises(TypeError):
        rpc("echo", (1, 2, 3))
    with pytest.raises(ValueError, match="rank"):
        rpc("echo", unique_reply_rank=1)
    futures = [rpc("echo", (i,), non_block=True) for i in range(20)]
    assert [future.result(60) for future in futures] == [[(0, i, None)] for i in range(20)]
    assert all(future.done() for future in futures)
    failed = rpc("fail", non_block=True, unique_reply_rank=0)
    assert isinstance(failed.exception(60), KeyError)
    with pytest.raises(KeyError):
        failed.result()
    assert rpc("total", (np.ones(1000),)) == [1000.0]
    one.check_health()
    one.shutdown()
    one.shutdown()
    for call in (lambda: rpc("echo"), one.check_health):
        with pytest.raises(Closed, match="shut down"):
            call()


def test_replies_are_in_the_order_of_ranks(method):
    with workers(3, method=method) as executor:
        rpc = executor.collective_rpc
        for i in range(50):
            assert rpc("echo", (i,)) == [(0, i, None), (1, i, None), (2, i, None)]
            assert rpc("echo", (i,), unique_reply_rank=i % 3) == (i % 3, i, None)
        assert len({about["pid"] for about in rpc("about")}) == 3
        assert [about["pid"] for about in rpc("about")] == [c.pid for c in executor.children]
    with pytest.raises(Closed):
        executor.collective_rpc("echo")


def test_the_workers_share_the_cpus(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with workers(2, method="spawn") as executor:
        share = str(max(1, len(os.sched_getaffinity(0)) // 2))
        assert [about["omp"] for about in executor.collective_rpc("about")] == [share] * 2


@pytest.mark.parametrize("argument", [None, 2 * MIB])
def test_the_size_of_chunks_reaches_every_queue(argument, monkeypatch):
    monkeypatch.setenv("FASTIPC_MQ_MAX_CHUNK_BYTES_MB", "0.5")
    settings.cache_clear()
    try:
        with workers(2, max_chunk_bytes=argument) as executor:
            handles = [q.export_handle() for q in (executor._out, *executor._replies)]
            assert [h.max_chunk_bytes for h in handles] == [argument or MIB // 2] * 3
            # larger than a chunk, and than all of them: goes in parts, both ways
            assert executor.collective_rpc("total", (np.ones(MIB),)) == [MIB] * 2
            for array in executor.collective_rpc("zeros", (8 * MIB,)):
                assert array.nbytes == 8 * MIB
        monkeypatch.setenv("FASTIPC_MQ_MAX_CHUNK_BYTES_MB", "a lot")
        settings.cache_clear()
        with pytest.raises(ValueError, match="FASTIPC_MQ_MAX_CHUNK_BYTES_MB='a lot'"):
            MultiprocExecutor(Probe, 1)
    finally:
        settings.cache_clear()


def test_make_executor():
    with make_executor(Probe, kwargs={"tag": 7}, max_chunks=3) as executor:
        assert type(executor) is InProcessExecutor
        assert executor.collective_rpc("about", unique_reply_rank=0)["tag"] == 7
    with make_executor(Probe, 2, kwargs={"tag": 7}, start_method="fork") as executor:
        assert type(executor) is MultiprocExecutor
        assert executor.collective_rpc("about", unique_reply_rank=1)["tag"] == 7


def test_a_class_that_only_this_process_has():
    class Local(Worker):
        def hello(self):
            return "hello"

    for method in METHODS[:2]:
        with workers(1, Local, method) as executor:
            assert executor.collective_rpc("hello") == ["hello"]


def test_arguments_out_of_range():
    for bad in (0, -1, 2000):
        with pytest.raises(ValueError, match="world_size"):
            MultiprocExecutor(Probe, bad)
    with pytest.raises(ValueError, match="start_method"):
        MultiprocExecutor(Probe, 1, start_method="thread")
    with workers(1) as executor:
        for bad in (-1, float("nan")):
            with pytest.raises(ValueError, match="timeout"):
                executor.collective_rpc("echo", timeout=bad)
        assert executor.collective_rpc("echo") == [(0, None, None)]


# ---- exceptions --------------------------------------------------------------------------------


def test_exceptions_come_with_their_traceback(method):
    with workers(2, method=method) as executor:
        with pytest.raises(KeyError) as caught:
            of_the_first(executor, "fail")
        assert caught.value.args == ("rank 0",)
        assert isinstance(caught.value.__cause__, RemoteError)
        assert "in fail\n    raise KeyError" in caught.value.__cause__.traceback
        assert f"in worker 0 (pid {executor.children[0].pid}), 'fail'" in caught.value.__notes__
        # one fails, and the other's reply must not be taken for one to the next call
        for rank in (1, 0, 1):
            with pytest.raises(KeyError, match=f"rank {rank}"):
                executor.collective_rpc("fail", ([rank],))
            assert executor.collective_rpc("echo", (1,)) == [(0, 1, None), (1, 1, None)]
        with pytest.raises(RemoteError, match="0 and more") as caught:
            of_the_first(executor, "fail_stubbornly")
        assert caught.value.type_name == "children.Stubborn"


def test_what_can_not_be_sent_or_taken():
    with workers(2) as executor:

        def works():
            assert executor.collective_rpc("echo", (1,)) == [(0, 1, None), (1, 1, None)]

        with pytest.raises((TypeError, AttributeError)):
            executor.collective_rpc("echo", (lambda: 1,))  # no worker has seen it
        works()
        with pytest.raises(LookupError, match="not here"):
            executor.collective_rpc("echo", (children.Refuses(),))  # none could take it
        works()
        with pytest.raises(LookupError, match="not here"):
            executor.collective_rpc("echo", (children.Refuses(),), unique_reply_rank=1)
        works()
        with pytest.raises((TypeError, AttributeError)):
            executor.collective_rpc("unpicklable")
        works()
        futures = [executor.collective_rpc("refuses", non_block=True) for _ in range(2)]
        futures.append(executor.collective_rpc("echo", (2,), unique_reply_rank=1, non_block=True))
        for future in futures[:2]:
            replied(executor, 0)
            with pytest.raises(LookupError, match="not here") as caught:
                future.result(60)
            assert "in worker 0" in caught.value.__notes__[0]
        assert futures[2].result(60) == (1, 2, None)
        works()
        # an exception that nobody asked for comes before a reply that doesn't unpickle
        assert of_the_first(executor, "fail", ([1],), unique_reply_rank=0) == 0
        for call in ("refuses", "refuses"):
            with pytest.raises(LookupError, match="not here"):
                executor.collective_rpc(call, unique_reply_rank=1, timeout=60)
        works()


def test_another_workers_exception_ends_the_wait_for_the_one():
    """In a collective the one would wait for the other for ever."""
    with workers(2) as executor:
        began = time.monotonic()
        with pytest.raises(KeyError, match="rank 1"):
            executor.collective_rpc(
                lambda w: w.fail() if w.rank else w.nap(3), unique_reply_rank=0, timeout=60
            )
        assert time.monotonic() - began < 2.5
        assert executor.collective_rpc("echo", unique_reply_rank=0) == (0, None, None)


def test_another_workers_exception_is_logged_when_nobody_waits(caplog):
    with workers(2) as executor:
        assert of_the_first(executor, "fail", ([1],), unique_reply_rank=0) == 0
        assert executor.collective_rpc("echo", unique_reply_rank=1) == (1, None, None)
        assert "worker 1" in caplog.text
        assert "KeyError: 'rank 1'" in caplog.text


# ---- timeouts and futures ----------------------------------------------------------------------


def test_a_late_reply_is_dropped(method, tmp_path):
    with workers(2, method=method) as executor:
        for ranks, missing in (([0], (0,)), ([1], (1,)), (None, (0, 1))):
            woken = tmp_path / f"{missing}"
            future = executor.collective_rpc(
                "nap_until", (woken, ranks), timeout=0.1, non_block=True
            )
            for rank in {0, 1} - set(missing):
                replied(executor, rank)
            with pytest.raises(
                ReplyTimeout, match=r"after 0\.1 s no reply to 'nap_until'"
            ) as caught:
                future.result()
            woken.touch()
            assert caught.value.missing == missing
            assert all(str(executor.children[rank].pid) in str(caught.value) for rank in missing)
            assert executor.collective_rpc("echo", (7,)) == [(0, 7, None), (1, 7, None)]
        with pytest.raises(ReplyTimeout):
            executor.collective_rpc("nap", (0.2,), timeout=0, unique_reply_rank=1)
        assert executor.collective_rpc("echo", unique_reply_rank=1) == (1, None, None)
        assert not executor._calls


def test_a_call_that_can_not_be_sent_in_time():
    with workers(1) as executor:
        executor.collective_rpc("nap", (3,), non_block=True)
        with pytest.raises(fastipc.Full, match=r"after 0\.05 s 'echo' was not sent: the workers"):
            forever(lambda: executor.collective_rpc("echo", timeout=0.05, non_block=True))
        assert executor.collective_rpc("echo", (1,)) == [(0, 1, None)]


def test_futures(tmp_path):
    with workers(2) as executor:
        rpc = executor.collective_rpc
        slow = rpc("nap_until", (tmp_path / "slow",), non_block=True)
        late = rpc("nap", (0.5,), timeout=0.1, non_block=True)
        last = rpc("echo", (1,), non_block=True)
        assert not slow.done()
        with pytest.raises(ReplyTimeout):
            slow.result(0.05)
        (tmp_path / "slow").touch()
        # a call in between comes after those before it
        assert rpc("echo", (2,)) == [(0, 2, None), (1, 2, None)]
        assert slow.done()
        assert slow.result(0) == [0, 1]
        # what has come is there, also after the call's own time
        assert late.result() == [0, 1]
        late = rpc("nap_until", (tmp_path / "late",), timeout=0.1, non_block=True)
        eventually(late.done)
        (tmp_path / "late").touch()
        with pytest.raises(ReplyTimeout, match=r"after 0\.1 s no reply"):
            late.result()
        assert isinstance(late.exception(), ReplyTimeout)
        assert last.result() == [(0, 1, None), (1, 1, None)]
        with pytest.raises(ValueError, match="timeout"):
            last.result(-1)


def test_more_calls_on_their_way_than_the_queues_hold():
    """Workers that wait for room for replies take no calls; the caller must not wait for that."""
    with workers(2, max_chunk_bytes=64 * 1024, max_chunks=2) as executor:
        futures = [
            executor.collective_rpc("echo", (np.full(50_000, i % 250, np.uint8),), non_block=True)
            for i in range(300)
        ]
        futures += [executor.collective_rpc("echo", (i,), non_block=True) for i in range(1000)]
        for i, future in enumerate(futures[:300]):
            for rank, (got, array, _) in enumerate(future.result(60)):
                assert got == rank
                assert (array == i % 250).all()
        for i, future in enumerate(futures[300:]):
            assert future.result(60) == [(0, i, None), (1, i, None)]


def test_replies_that_nobody_reads_keep_nobody_waiting(caplog):
    """They fill the queue of a worker, which then takes no calls, until there is no room for these
    either."""
    caplog.set_level(logging.CRITICAL, "fastipc")
    with workers(2) as executor:
        for i in range(700):
            with contextlib.suppress(TimeoutError):
                executor.collective_rpc("echo", (i,), timeout=0)
        assert executor.collective_rpc("echo", (1,)) == [(0, 1, None), (1, 1, None)]
        for _ in range(700):
            assert of_the_first(executor, "fail", ([1],), unique_reply_rank=0) == 0
        assert executor.collective_rpc("echo", (2,)) == [(0, 2, None), (1, 2, None)]
        assert not executor._calls


def test_several_threads():
    errors = []
    count = 2000 if NIGHTLY else 150

    def caller(executor, me):
        try:
            for i in range(count):
                rank = (None, 0, 1)[i % 3]
                got = executor.collective_rpc(
                    "echo", ((me, i),), timeout=60, unique_reply_rank=rank, non_block=i % 5 == 0
                )
                if i % 5 == 0:
                    got = got.result()
                want = [(r, (me, i), None) for r in (0, 1)]
                assert got == (want if rank is None else want[rank])
                if i % 10 == 3:
                    with pytest.raises(KeyError):
                        executor.collective_rpc("fail", ([i // 10 % 2],), timeout=60)
        except BaseException as error:
            errors.append(error)

    with workers(2) as executor:
        threads = [threading.Thread(target=caller, args=(executor, me)) for me in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert not executor._calls
        assert not executor._followers


# ---- deaths ------------------------------------------------------------------------------------


@pytest.mark.timeout(3000 if NIGHTLY else 120)
def test_a_worker_is_killed_at_a_random_moment(method):
    """Calls of all kinds are on their way: none hangs, all that fail say who it was."""
    draw = random.Random(os.urandom(8))
    rounds = 70 if NIGHTLY else 4
    for i in range(rounds):
        told = []
        world_size = 1 + i % 3
        with workers(world_size, method=method, on_failure=told.append) as executor:
            rpc = executor.collective_rpc
            victim = draw.randrange(world_size)
            killer = threading.Timer(
                draw.random() * 0.05, os.kill, (executor.children[victim].pid, signal.SIGKILL)
            )
            killer.start()
            futures = []
            payload = np.zeros(draw.choice([10, 10_000, 2_000_000]), np.uint8)

            def work(rpc=rpc, futures=futures, payload=payload, world_size=world_size, i=i):
                futures.append(rpc("total", (payload,), non_block=True))
                rpc("echo", (i,), unique_reply_rank=draw.randrange(world_size))
                if draw.random() < 0.5:
                    assert futures[-1].result() == [0.0] * world_size

            with pytest.raises(WorkerDied) as caught:
                forever(work)
            killer.join()
            pid = executor.children[victim].pid
            for error in (caught.value, *[f.exception(0) for f in futures]):
                if error is not None:
                    assert isinstance(error, WorkerDied)
                    assert (error.rank, error.pid) == (victim, pid)
                    assert error.exitcode == -signal.SIGKILL
                    assert str(error) == f"worker {victim} (pid {pid}) was killed by SIGKILL"
            with pytest.raises(WorkerDied):
                rpc("echo", timeout=1)
            eventually(lambda told=told: told)
            with pytest.raises(WorkerDied):
                executor.check_health()
        assert [(e.rank, e.pid, e.exitcode) for e in told] == [(victim, pid, -signal.SIGKILL)]


def test_a_worker_is_killed_while_nobody_looks(caplog):
    told = []
    with workers(2, on_failure=told.append) as executor:
        executor.children[1].kill()
        eventually(lambda: told)
        assert str(told[0]) in caplog.text
        with pytest.raises(WorkerDied, match="worker 1"):
            executor.collective_rpc("echo", unique_reply_rank=0)


def test_a_worker_leaves():
    with workers(2) as executor:
        with pytest.raises(WorkerDied, match=r"worker 1 .* exited with code 3") as caught:
            executor.collective_rpc("leave", (1, 3))
        assert caught.value.exitcode == 3


def test_a_reply_that_was_sent_before_the_death_counts():
    with workers(2) as executor:
        sent = executor.collective_rpc("echo", (1,), non_block=True)
        for queue in executor._replies:
            eventually(lambda queue=queue: not queue.empty())
        executor.children[0].kill()
        eventually(lambda: executor._failure is not None)
        assert sent.result() == [(0, 1, None), (1, 1, None)]


def test_on_failure_may_shut_down():
    executor = MultiprocExecutor(
        Probe, 2, start_method="fork", on_failure=lambda error: executor.shutdown(graceful=0.0)
    )
    waiting = executor.collective_rpc("nap", (1000,), non_block=True)
    executor.children[0].kill()
    with pytest.raises(WorkerDied, match="worker 0"):
        waiting.result()
    for child in executor.children:
        assert child.join(60)
    executor.shutdown()


@pytest.mark.parametrize(
    ("trouble", "error", "text"),
    [
        ("constructor", LookupError, "rank . has trouble"),
        ("dies", ChildDied, "worker-1 .* was killed by SIGKILL before it was ready"),
        ("slow", NotReady, "after 1 s not ready: .*worker-1"),
    ],
)
def test_a_worker_does_not_start(trouble, error, text, method):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    options = {"ready_timeout": 1} if trouble == "slow" else {}
    if trouble == "slow" and method != "fork":
        options = {"ready_timeout": 1}  # importing may take longer: then both are named
        text = "after 1 s not ready: .*worker-1"
    with pytest.raises(error, match=text):
        MultiprocExecutor(Probe, 2, kwargs={"trouble": trouble}, start_method=method, **options)
    left = [
        child
        for child in psutil.Process().children(recursive=True)
        if child.pid not in before and "tracker" not in " ".join(child.cmdline())
    ]
    assert all("forkserver" in " ".join(child.cmdline()) for child in left)
    assert len(left) <= 1


@pytest.mark.parametrize("trouble", ["load", "load and shutdown"])
def test_a_worker_that_can_not_load_is_shut_down(trouble, tmp_path):
    """And so is one that is still loading."""
    log = tmp_path / "log"
    log.touch()
    kwargs = {"trouble": trouble, "log": log}
    with pytest.raises(LookupError, match="rank 1 can't load"):
        MultiprocExecutor(Probe, 2, kwargs=kwargs, start_method="fork")
    assert sorted(log.read_text().splitlines()) == ["0 loads", "0 shutdown", "1 shutdown"]
    log.write_text("")
    with pytest.raises(LookupError, match="rank 0 can't load"):
        InProcessExecutor(Probe, kwargs=kwargs)
    assert log.read_text() == "0 shutdown\n"


EXECUTOR = """
import sys, time
import children
from fastipc.executor import MultiprocExecutor

def main():
    method, path = sys.argv[1:3]
    executor = MultiprocExecutor(children.Probe, 2, start_method=method)
    below = executor.collective_rpc("start_child", (method, path))
    busy = executor.collective_rpc("nap", (1000, [1]), non_block=True)
    print("pids", *below, *(child.pid for child in executor.children), flush=True)
    if len(sys.argv) > 3:
        executor.collective_rpc("echo", non_block=True)
        return executor
    time.sleep(1000)

if __name__ == "__main__":
    kept = main()
"""


def test_the_executors_process_is_killed(method, start_child, tmp_path):
    script = start_child(
        EXECUTOR, method, tmp_path / "pids", env={"PYTHONPATH": str(HERE)}, timeout=110
    )
    pids = [int(word) for word in script.wait_for("pids").split()[1:]]
    assert len(pids) == 4
    assert not any(map(gone, pids))
    script.send_signal(signal.SIGKILL)
    began = time.monotonic()
    eventually(lambda: all(map(gone, pids)))
    assert time.monotonic() - began < DEATH_WATCHDOG


def test_the_executors_process_ends_without_a_shutdown(method, start_child, tmp_path):
    script = start_child(
        EXECUTOR, method, tmp_path / "pids", "end", env={"PYTHONPATH": str(HERE)}, timeout=110
    )
    pids = [int(word) for word in script.wait_for("pids").split()[1:]]
    script.check()
    eventually(lambda: all(map(gone, pids)))


# ---- the end -----------------------------------------------------------------------------------


def test_shutdown_lets_workers_finish(method, tmp_path):
    log = tmp_path / "log"
    with workers(2, method=method, kwargs={"log": log}) as executor:
        for i in range(300):
            executor.collective_rpc("write", (str(i),), non_block=True)
    lines = log.read_text().splitlines()
    for rank in (0, 1):
        mine = [line.split()[1] for line in lines if line.startswith(f"{rank} ")]
        assert mine == [*map(str, range(300)), "shutdown"]
    assert [child.exitcode for child in executor.children] == [0, 0]


def test_shutdown_of_a_stopped_worker():
    executor = MultiprocExecutor(Probe, 2, start_method="fork")
    executor.collective_rpc("stop_itself", (1,), non_block=True)
    eventually(lambda: process_state(executor.children[1].pid) == "T")
    executor.shutdown(graceful=3.0, terminate=0.3)
    assert [child.describe_exit() for child in executor.children] == [
        "exited with code 0",
        "was killed by SIGKILL",
    ]


@pytest.mark.parametrize("at", ["_monitor.stop", "_out.close", "processes.stop"])
def test_a_shutdown_that_was_interrupted_is_taken_up(at, monkeypatch):
    executor = MultiprocExecutor(Probe, 2, start_method="fork")
    try:
        executor.collective_rpc("nap", (1000,), non_block=True)
        where, what = at.split(".")
        owner = processes if where == "processes" else getattr(executor, where)

        def interrupt(*args, **kwargs):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(owner, what, interrupt)
            with pytest.raises(KeyboardInterrupt):
                executor.shutdown()
        with pytest.raises(Closed):
            executor.collective_rpc("echo")
        assert executor.children[0].is_alive()
        for _ in range(2):
            executor.shutdown(graceful=0.0, terminate=60.0)
            assert [child.describe_exit() for child in executor.children] == [
                "ended at SIGTERM",
                "ended at SIGTERM",
            ]
    finally:
        processes.stop(executor.children, graceful=0.0)


def test_a_shutdown_takes_up_what_another_threads_waits_for():
    executor = MultiprocExecutor(Probe, 2, start_method="fork")
    executor.collective_rpc("nap", (1000,), non_block=True)
    patient = threading.Thread(target=executor.shutdown, kwargs={"graceful": 1000.0})
    patient.start()
    eventually(lambda: all(child.expected for child in executor.children))
    executor.shutdown(graceful=0.0, terminate=60.0)
    patient.join()
    assert not any(child.is_alive() for child in executor.children)


def test_shutdown_ends_the_calls_of_other_threads():
    executor = MultiprocExecutor(Probe, 2, start_method="fork")
    errors = []

    def call():
        try:
            executor.collective_rpc("nap", (1000,))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(executor._calls) == 3)
    pending = executor.collective_rpc("echo", non_block=True)
    executor.shutdown(graceful=0.0)
    for thread in threads:
        thread.join()
    assert [type(error) for error in errors] == [Closed] * 3
    with pytest.raises(Closed, match="shut down"):
        pending.result()


def test_a_shutdown_while_another_thread_looks_for_replies():
    executor = MultiprocExecutor(Probe, 2, start_method="fork")

    class Closing:
        """A queue that is closed when it has just said that it isn't."""

        closed = False

        def __init__(self, queue):
            self.queue = queue

        def __getattr__(self, name):
            return getattr(self.queue, name)

        def empty(self):
            thread = threading.Thread(target=executor.shutdown, kwargs={"graceful": 0.0})
            thread.start()
            thread.join()
            return self.queue.empty()

    executor._replies[1] = Closing(executor._replies[1])
    with pytest.raises(Closed, match="the executor was shut down"):
        executor.collective_rpc("nap", (1000, [0]))


def test_what_was_never_shut_down():
    executor = MultiprocExecutor(Probe, 2, start_method="fork")
    made = executor.children
    with pytest.warns(ResourceWarning, match="2 workers> was never shut down"):
        del executor
    assert [child.is_alive() for child in made] == [False, False]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        executor = MultiprocExecutor(Probe, 1, start_method="fork")
        executor.shutdown()
        del executor


def test_in_a_forked_process():
    with workers(2) as executor:

        def inner():
            executor.shutdown()
            with pytest.raises(fastipc.IPCError):
                executor.collective_rpc("echo")
            return "done"

        assert in_fork(inner) == "done"
        assert executor.collective_rpc("echo", unique_reply_rank=1) == (1, None, None)


def test_the_users_signals_are_the_users():
    def state():
        return [signal.getsignal(number) for number in signal.valid_signals()]

    before = state()
    with workers(2) as executor:
        assert state() == before
        executor.collective_rpc("echo")
    assert state() == before


def test_a_signal_ends_the_wait_and_the_next_call_works():
    def interrupt(number, frame):
        raise InterruptedError("mine")

    def call():
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        executor.collective_rpc("nap", (0.5,))

    with workers(2) as executor:
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            with pytest.raises(InterruptedError, match="mine"):
                call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert executor.collective_rpc("echo", (1,)) == [(0, 1, None), (1, 1, None)]
        assert not executor._calls


class Interrupted(Exception):
    pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signals_at_any_moment():
    """A handler that raises may do so right after a call was sent, or a reply taken."""
    count = 2000 if NIGHTLY else 200
    draw = random.Random(1)

    def interrupt(number, frame):
        raise Interrupted

    with workers(2) as executor:
        rpc = executor.collective_rpc
        interrupted = 0
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            for i in range(count):
                futures = []
                try:
                    signal.setitimer(signal.ITIMER_REAL, draw.random() * 0.002 + 1e-6)
                    for k in range(20):
                        futures.append(rpc("echo", (k,), non_block=True))
                        assert rpc("echo", (i,), unique_reply_rank=1) == (1, i, None)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Interrupted:
                    interrupted += 1
                for k, future in enumerate(futures):
                    error = future.exception(60)
                    if error is None:
                        assert future.result() == [(0, k, None), (1, k, None)]
                    else:
                        assert "the reply was lost" in str(error)
                assert rpc("echo", (i,), timeout=60) == [(0, i, None), (1, i, None)]
                with pytest.raises(LookupError, match="not here"):
                    rpc("echo", (children.Refuses(),), timeout=60)
                with pytest.raises(LookupError, match="not here"):
                    rpc("refuses", timeout=60)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert interrupted > count / 10


# ---- the README ------------------------------------------------------------------------------

README = HERE.parent / "README.md"


@pytest.mark.skipif(not README.exists(), reason="needs the source tree")
def test_the_readmes_example(method, run_child):
    text = README.read_text().split("\n## Workers\n")[1]
    code = text.split("```python\n")[1].split("```")[0]
    out = run_child(code, env={"FASTIPC_WORKER_MULTIPROC_METHOD": method})
    assert out == "[6.0, 10.0]\n1\n"


# ---- where the time goes -----------------------------------------------------------------------


def test_the_time_of_a_call(one):
    for _ in range(3):
        one.collective_rpc("nap", (0.05,))
    stats = one.stats()
    assert list(stats) == ["ring_wait", "execute", "reply", "step"]
    assert [stage.count for stage in stats.values()] == [3] * 4
    assert stats["execute"].min_ns >= 50_000_000
    parts = sum(stats[name].sum_ns for name in ("ring_wait", "execute", "reply"))
    assert abs(stats["step"].sum_ns - parts) <= 0.1 * stats["step"].sum_ns
    one.collective_rpc("nap", (0,))
    assert stats["step"].count == 3  # copies
