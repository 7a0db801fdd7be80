"""Child processes: their start, their end, and that no end of a pipe is where it shouldn't be."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import types
from contextlib import contextmanager
from pathlib import Path

import children
import psutil
import pytest
from support import DEATH_WATCHDOG, eventually, in_fork, process_state

from fastipc import ChildDied, NotReady, RemoteError, processes
from fastipc.settings import settings

METHODS = ("fork", "spawn", "forkserver")
HERE = Path(__file__).parent


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


@contextmanager
def started(target, *args, method="fork", n=1, **options):
    """Children that are stopped in the end, without patience."""
    made = []
    try:
        for i in range(n):
            made.append(
                processes.start(target, args, name=f"child-{i}", start_method=method, **options)
            )
        yield made if n > 1 else made[0]
    finally:
        processes.stop(made, graceful=0.0, terminate=1.0)
        assert not any(child.is_alive() for child in made)


@pytest.fixture(autouse=True)
def nothing_held():
    """No end of a pipe outlives its child."""
    yield
    assert not processes._held
    assert not processes._children


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# ---- the start ---------------------------------------------------------------------------------


def test_what_a_child_says_when_it_is_ready(method, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with started(
        children.tell, 1, "two", method=method, env={"FASTIPC_TEST_EXTRA": "here"}
    ) as child:
        told = child.wait_ready(60)
        assert child.wait_ready() is told
        assert told["values"] == (1, "two")
        assert told["pid"] == child.pid
        assert told["extra"] == "here"
        assert told["sigint"]
        assert told["blocked"] == []
        assert child.start_method == method
        assert child.is_alive()
        assert child.exitcode is None
        assert child.describe_exit() == "is still running"
        # A fork has the libraries that it has; else they find their variables.
        assert told["omp"] == (None if method == "fork" else "1")
        assert told["seen"] == (None if method == "fork" else "here")
        assert "FASTIPC_TEST_EXTRA" not in os.environ
        assert "OMP_NUM_THREADS" not in os.environ


def test_variables_that_are_set_stay(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with started(children.tell, method="spawn") as child:
        assert child.wait_ready(60)["omp"] == "3"
    monkeypatch.delenv("OMP_NUM_THREADS")
    with started(children.tell, method="spawn", env={"OMP_NUM_THREADS": "5"}) as child:
        assert child.wait_ready(60)["omp"] == "5"


def test_an_exception_before_it_is_ready(method):
    with started(children.fail, KeyError("that"), method=method) as child:
        for _ in range(2):
            with pytest.raises(KeyError, match="that") as caught:
                child.wait_ready(60)
        cause = caught.value.__cause__
        assert isinstance(cause, RemoteError)
        assert cause.type_name == "KeyError"
        assert "in fail" in cause.traceback
        assert f"child-0 (pid {child.pid})" in caught.value.__notes__[0]
        assert child.join(60)
        assert child.describe_exit() == "exited with code 1"


def test_an_exception_that_does_not_travel():
    with started(children.fail_stubbornly) as child:
        with pytest.raises(RemoteError, match="1 and 2") as caught:
            child.wait_ready(60)
        assert caught.value.type_name == "children.Stubborn"
        assert "in fail_stubbornly" in str(caught.value)
        assert type(pickle.loads(pickle.dumps(caught.value))) is RemoteError


def test_an_end_before_it_is_ready(method):
    with started(children.leave, 3, method=method) as child:
        with pytest.raises(ChildDied, match="exited with code 3 before it was ready") as caught:
            child.wait_ready(60)
        assert caught.value.exitcode == 3
        assert caught.value.pid == child.pid
    with started(children.never_ready, method=method) as child:
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(ChildDied, match="was killed by SIGKILL") as caught:
            child.wait_ready(60)
        assert caught.value.exitcode == -signal.SIGKILL


def test_who_is_not_ready_in_time_is_named():
    with started(children.tell) as quick, started(children.never_ready) as slow:
        quick.wait_ready(60)
        with pytest.raises(NotReady, match=rf"0.2 s not ready: child-0 \(pid {slow.pid}\)") as e:
            processes.wait_all_ready([quick, slow], 0.2)
        assert e.value.missing == (1,)
        assert isinstance(e.value, TimeoutError)
        assert quick.wait_ready(0)["pid"] == quick.pid


def test_the_first_failure_is_told_at_once():
    with started(children.never_ready) as slow, started(children.leave, 4) as bad:
        with pytest.raises(ChildDied, match="exited with code 4"):
            processes.wait_all_ready([slow, bad])


def test_what_can_not_be_pickled_starts_nothing():
    with pytest.raises((pickle.PicklingError, AttributeError)):
        processes.start(lambda: 1, name="child", start_method="spawn")
    assert not processes._held
    with started(children.tell, method="spawn") as child:
        child.wait_ready(60)


def test_in_a_daemonic_process():
    def inner():
        multiprocessing.current_process()._config["daemon"] = True
        processes.start(children.tell, name="grandchild")

    with pytest.raises(RuntimeError, match=r"grandchild can't be started: .* daemonic"):
        in_fork(inner)


def test_ready_is_for_children():
    with pytest.raises(RuntimeError, match="ready"):
        processes.ready()
    with pytest.raises(RuntimeError, match="on_parent_death"):
        processes.on_parent_death(print)


INTERRUPTED = """
import multiprocessing.forkserver, multiprocessing.util, os, psutil, signal, sys, threading
import children
from fastipc import processes

def interrupting(function):
    def interrupted(*args):
        result = function(*args)
        for again in range(3):
            # Another thread takes the signal: the main thread has to handle it, wherever it is.
            signal.pthread_kill(bystander.ident, signal.SIGINT)
            os.read(taken, 1)
        return result
    return interrupted

if __name__ == "__main__":
    taken, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    bystander = threading.Thread(target=threading.Event().wait, daemon=True)
    bystander.start()
    first = processes.start(children.tell, name="first", start_method=sys.argv[1])
    processes.stop([first], graceful=0.0)
    others = psutil.Process().children()  # the resource tracker; the fork server
    multiprocessing.util.spawnv_passfds = interrupting(multiprocessing.util.spawnv_passfds)
    multiprocessing.forkserver.connect_to_new_process = interrupting(
        multiprocessing.forkserver.connect_to_new_process
    )
    try:
        processes.start(children.tell, name="second", start_method=sys.argv[1])
    except KeyboardInterrupt:
        print("interrupted")
    assert psutil.Process().children() == others
    assert not processes._held and not processes._children
"""


@pytest.mark.parametrize("method", METHODS[1:])
def test_ctrl_c_amidst_a_start(method, start_child):
    script = start_child(INTERRUPTED, method, env={"PYTHONPATH": str(HERE)})
    assert script.wait() == 0, script.stderr
    assert script.stdout == "interrupted\n"
    assert script.stderr == ""


GUARDLESS = """
import sys
from fastipc import processes
{what}
print("not reached")
"""


@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize(
    "what",
    [
        "import children\n"
        "child = processes.start(children.tell, name='the-child', start_method=sys.argv[1])\n"
        "child.wait_ready(60)",
        "from fastipc.executor import *\nMultiprocExecutor(Worker, 2, start_method=sys.argv[1])",
    ],
    ids=["start", "executor"],
)
def test_a_script_without_a_guard(what, method, start_child):
    script = start_child(GUARDLESS.format(what=what), method, env={"PYTHONPATH": str(HERE)})
    assert script.wait() == 1
    assert "not reached" not in script.stdout
    last = script.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: ")
    assert "could not start: put the start of processes" in last
    assert "under `if __name__ == '__main__':`" in last


def test_no_trace_in_the_users_process(method):
    def state():
        return (
            [signal.getsignal(number) for number in signal.valid_signals()],
            signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            sys.excepthook,
            dict(os.environ),
            threading.active_count(),
        )

    before = state()
    with started(children.tell, method=method, n=2) as both:
        processes.wait_all_ready(both, 60)
        assert state() == before
    assert state() == before


# ---- start methods -----------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch):
    """As in a process of its own: nothing that speaks against a fork."""
    monkeypatch.delenv("FASTIPC_WORKER_MULTIPROC_METHOD", raising=False)
    settings.cache_clear()
    for name in ("torch", "ray"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(processes, "_memory_policy", lambda: "default")
    monkeypatch.setattr(processes, "_is_wsl", lambda: False)
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])
    yield monkeypatch
    settings.cache_clear()


def module(**contents):
    return types.SimpleNamespace(**contents)


def test_which_method(fresh):
    choose = processes.choose_start_method
    assert choose()[0] == "fork"
    for requested in METHODS:
        assert choose(requested) == (requested, "as requested")
    assert choose("fork", api_server=True)[0] == "spawn"
    with pytest.raises(ValueError, match="start_method='thread' must be one of fork, spawn"):
        choose("thread")


def test_the_variable_says_which(fresh):
    for name in METHODS:
        fresh.setenv("FASTIPC_WORKER_MULTIPROC_METHOD", name)
        settings.cache_clear()
        got, reason = processes.choose_start_method()
        assert (got, "FASTIPC_WORKER_MULTIPROC_METHOD" in reason) == (name, True)
        assert processes.choose_start_method("spawn")[0] == "spawn"
    fresh.setenv("FASTIPC_WORKER_MULTIPROC_METHOD", "frok")
    settings.cache_clear()
    with pytest.raises(ValueError, match="FASTIPC_WORKER_MULTIPROC_METHOD='frok'"):
        processes.choose_start_method()


CUDA = module(cuda=module(is_initialized=lambda: True))
XPU = module(cuda=module(is_initialized=lambda: False), xpu=module(is_initialized=lambda: True))
ACTOR = module(
    is_initialized=lambda: True,
    get_runtime_context=lambda: module(get_actor_id=lambda: "an id"),
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.setitem(sys.modules, "torch", CUDA), "CUDA is initialised"),
        (lambda m: m.setitem(sys.modules, "torch", XPU), "XPU is initialised"),
        (lambda m: m.setitem(sys.modules, "torch", module()), "torch is imported"),
        (lambda m: m.setitem(sys.modules, "ray", ACTOR), "Ray actor"),
        (lambda m: m.setattr(processes, "_memory_policy", lambda: "bind:1"), "bind:1"),
        (lambda m: m.setattr(processes, "_is_wsl", lambda: True), "WSL"),
        (
            lambda m: m.setattr(
                threading,
                "enumerate",
                lambda: [threading.current_thread(), threading.Thread(name="another")],
            ),
            "another",
        ),
    ],
)
def test_what_speaks_against_a_fork(change, reason, fresh):
    change(fresh)
    got, why = processes.choose_start_method()
    assert got == "spawn"
    assert reason in why
    assert processes.choose_start_method("fork")[0] == "fork"


def test_what_does_not(fresh):
    fresh.setitem(sys.modules, "ray", module(is_initialized=lambda: False))
    assert processes.choose_start_method()[0] == "fork"


def test_this_machine_is_understood():
    assert ":" in processes._memory_policy() or processes._memory_policy().isalpha()
    assert processes._is_wsl() == ("WSL" in os.uname().release or "icrosoft" in os.uname().release)


def test_the_reason_is_logged(caplog):
    with caplog.at_level(logging.INFO, "fastipc"):
        with started(children.tell):
            pass
    assert "child-0 starts by fork: as requested" in caplog.messages


# ---- descriptors under fork --------------------------------------------------------------------


def foreign_ends(ends, child, others):
    """Which of these pipe ends belong to the death or ready pipes of other children."""
    pipes = {}
    for other in others:
        if other is not child:
            pipes[os.fstat(other._death.fileno()).st_ino] = f"death pipe of {other.name}"
            pipes[os.fstat(other._ready.fileno()).st_ino] = f"ready pipe of {other.name}"
    return [pipes[inode] for inode, _ in ends if inode in pipes]


def test_a_forked_child_has_no_end_of_anothers_pipes():
    with started(children.tell_pipes, n=4) as made:
        # (not wait_ready, which would close the ready pipes)
        for child in made:
            eventually(lambda child=child: child._ready.poll())
        for child in made:
            assert child._ready.recv()[0] == "started"
            ends = child._ready.recv()[1]
            assert not foreign_ends(ends, child, made)
            mine = os.fstat(child._death.fileno()).st_ino
            assert [writing for inode, writing in ends if inode == mine] == [False]
            child._outcome = ("ready", None)
        # and so has one that somebody else has forked
        assert not foreign_ends(in_fork(children.pipe_ends), None, made)
        with started(children.tell_pipes, method="spawn") as spawned:
            ends = spawned.wait_ready(60)
            assert not foreign_ends(ends, None, made)


def test_what_a_child_forks_has_no_end_of_the_childs_pipes(method):
    with started(children.tell_pipes_of_a_fork, method=method) as child:
        mine = {os.fstat(end.fileno()).st_ino for end in (child._death, child._ready)}
        ends = child.wait_ready(60)
        assert len(ends) >= 2
        assert not [end for end in ends if end[0] in mine]


def test_starting_from_several_threads(method):
    """A fork amidst another thread's start copies what is on its way to that thread's child."""
    made, errors = [], []
    count = 4 if method == "fork" else 1

    def many():
        try:
            for _ in range(count):
                made.append(processes.start(children.tell_pipes, name="child", start_method=method))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=many) for _ in range(5)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # seconds: between any two steps
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        told = processes.wait_all_ready(made, 100)
        for ends, child in zip(told, made, strict=True):
            others = [other for other in made if other is not child]
            deaths = {os.fstat(other._death.fileno()).st_ino for other in others}
            assert not [inode for inode, writing in ends if inode in deaths and writing]
    finally:
        sys.setswitchinterval(interval)
        processes.stop(made, graceful=0.0)
    assert not processes._held


def test_a_forked_process_leaves_its_parents_children_alone():
    with started(children.tell) as child:
        child.wait_ready(60)

        def inner():
            assert "another process" in repr(child)
            with pytest.raises(RuntimeError, match="a child of another process"):
                child.is_alive()
            processes._end_children()
            return len(processes._held), len(processes._children)

        assert in_fork(inner) == (0, 0)
        assert child.is_alive()


# ---- ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-9, "was killed by SIGKILL"),
        (-11, "was killed by SIGSEGV"),
        (-250, "was killed by signal 250"),
        (128 + 15, "ended at SIGTERM"),
        (None, "ended (its exit code is unknown: this process waited for it elsewhere)"),
    ],
)
def test_how_it_ended_in_words(code, text):
    assert processes.describe_exit(code) == text


def test_a_child_ends_in_order_at_sigterm(method, tmp_path):
    path = tmp_path / "child"
    with started(children.graceful, path, method=method) as child:
        child.wait_ready(60)
        eventually(path.with_suffix(".inside").exists)
        child.send_signal(signal.SIGINT)  # the terminal's: not for it
        child.terminate()
        assert child.join(60)
        assert child.describe_exit() == "ended at SIGTERM"
    assert path.with_suffix(".ended").exists()
    assert not path.with_suffix(".called").exists()
    child.kill()
    child.terminate()


def test_a_child_that_only_its_parent_ends(method, tmp_path):
    path = tmp_path / "child"
    with started(children.graceful, path, method=method, ends_at_sigterm=False) as child:
        if method != "forkserver":
            child.send_signal(signal.SIGTERM)  # while it starts
        child.wait_ready(60)
        eventually(path.with_suffix(".inside").exists)
        child.send_signal(signal.SIGTERM)
        assert not child.join(0.3)
        child.terminate()
        assert child.join(60)
        assert child.describe_exit() == "ended at SIGTERM"
    assert path.with_suffix(".ended").exists()
    child.terminate()


def test_its_children_are_its_own_to_end_too_but_not_what_it_forks():
    with started(children.two_below, ends_at_sigterm=False) as child:
        started_one, forked = child.wait_ready(60)
        for pid in (started_one, forked):
            os.kill(pid, signal.SIGTERM)
        eventually(lambda: gone(forked))
        for _ in range(30):
            time.sleep(0.01)
            assert not gone(started_one)
        child.terminate()
        assert child.join(60)
        eventually(lambda: gone(started_one))


def test_a_child_that_only_its_parent_ends_dies_with_it(run_child):
    """Which is killed."""
    pid = int(
        run_child(
            """
            import os, sys
            from fastipc import processes
            import children
            if __name__ == "__main__":
                child = processes.start(children.tell, name="x", ends_at_sigterm=False)
                child.wait_ready(60)
                print(child.pid, flush=True)
                os._exit(0)
            """,
            env={"PYTHONPATH": str(HERE)},
        )
    )
    eventually(lambda: gone(pid))


def test_sigint_is_not_for_children(method):
    with started(children.tell, method=method) as child:
        child.wait_ready(60)
        child.send_signal(signal.SIGINT)
        assert not child.join(0.3)


def test_a_childs_signals_are_not_its_parents():
    """What an asyncio loop waits on is written to by signal handlers, in forked children too."""
    here, there = socket.socketpair()
    for end in (here, there):
        end.setblocking(False)
    before = signal.set_wakeup_fd(there.fileno())
    try:
        with started(children.tell) as child:
            child.wait_ready(60)
            child.terminate()
            assert child.join(60)
        with pytest.raises(BlockingIOError):
            here.recv(1)
    finally:
        signal.set_wakeup_fd(before)
        here.close()
        there.close()


def test_stop_uses_what_force_it_needs(method):
    with (
        started(children.ready_then, 0, method=method) as orderly,
        started(children.tell, method=method) as polite,
        started(children.deaf, method=method) as deaf,
        started(children.tell, method=method) as stopped,
    ):
        made = [orderly, polite, deaf, stopped]
        processes.wait_all_ready(made, 100)
        os.kill(stopped.pid, signal.SIGSTOP)
        eventually(lambda: process_state(stopped.pid) == "T")
        # Those that need no force, or little, have as long as they like.
        assert orderly.join(60)
        processes.stop([polite], graceful=0.2, terminate=30)
        threads = [
            threading.Thread(
                target=processes.stop, args=(made,), kwargs={"graceful": 0.2, "terminate": 1.0}
            )
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [child.describe_exit() for child in made] == [
            "exited with code 0",
            "ended at SIGTERM",
            "was killed by SIGKILL",
            "was killed by SIGKILL",
        ]
        assert [child.sentinel for child in made] == [-1] * 4
        processes.stop(made)
        processes.stop([])


def test_a_monitor_reports_each_death_once(method):
    seen = []
    with started(children.tell, method=method, n=3) as made:
        processes.wait_all_ready(made, 100)
        monitor = processes.Monitor(made[:2], seen.append)
        monitor.add(made[2])
        for child in (made[0], made[2]):
            child.kill()
        eventually(lambda: len(seen) == 2)
        processes.stop(made, graceful=0.0)
        monitor.stop()
        monitor.stop()
        assert set(seen) == {made[0], made[2]}
        with pytest.raises(RuntimeError, match="stopped"):
            monitor.add(made[1])


def test_a_death_just_before_stop_is_reported_all_the_same():
    seen = []
    with started(children.tell, n=2) as made:
        processes.wait_all_ready(made, 60)
        for child in made:
            child.kill()
            assert child.join(60)
        processes.stop(made)
        monitor = processes.Monitor(made, seen.append)
        eventually(lambda: len(seen) == 2)
        monitor.stop()


def test_a_monitor_goes_on_after_an_exception_and_can_be_stopped_by_its_own_call(caplog):
    calls = []

    def on_exit(child):
        calls.append(child)
        if len(calls) == 2:
            monitor.stop()
        raise LookupError("mine")

    with started(children.tell, n=3) as made:
        processes.wait_all_ready(made, 60)
        monitor = processes.Monitor(made, on_exit)
        for n, child in enumerate(made):
            child.kill()
            assert child.join(60)
            eventually(lambda n=n: len(calls) == min(n + 1, 2))
        monitor.stop()
    assert calls == made[:2]
    assert "child-0 failed" in caplog.text


# ---- the parent's end --------------------------------------------------------------------------

FAMILY = """
import sys, time
import children
from fastipc import processes

if __name__ == "__main__":
    method, path, generations = sys.argv[1], sys.argv[2], int(sys.argv[3])
    made = [
        processes.start(
            children.family, (generations, method, path), name="child", start_method=method
        )
        for _ in range(2)
    ]
    processes.wait_all_ready(made, 100)
    print("ready", flush=True)
    if len(sys.argv) < 5:
        time.sleep(1000)
"""


def test_the_parent_is_killed(method, start_child, tmp_path):
    """Two children, each with two of its own: all of them end, within about a second."""
    path = tmp_path / "pids"
    script = start_child(FAMILY, method, path, 2, env={"PYTHONPATH": str(HERE)}, timeout=110)
    script.wait_for("ready")
    pids = [int(line) for line in path.read_text().splitlines()]
    assert len(pids) == 2 + 4
    assert not any(map(gone, pids))
    script.send_signal(signal.SIGKILL)
    began = time.monotonic()
    eventually(lambda: all(map(gone, pids)))
    took = time.monotonic() - began
    assert took < DEATH_WATCHDOG, f"it took {took:.2f} s"


def test_the_parent_is_killed_and_a_child_in_between_stopped(start_child, tmp_path):
    """The stopped one can't do anything, but what is under it belongs to it."""
    path = tmp_path / "pids"
    script = start_child(FAMILY, "fork", path, 2, env={"PYTHONPATH": str(HERE)})
    script.wait_for("ready")
    pids = [int(line) for line in path.read_text().splitlines()]
    tops = [child.pid for child in psutil.Process(script.pid).children()]
    os.kill(tops[0], signal.SIGSTOP)
    eventually(lambda: process_state(tops[0]) == "T")
    below = {child.pid for child in psutil.Process(tops[0]).children()}
    assert len(below) == 2
    script.send_signal(signal.SIGKILL)
    eventually(lambda: all(gone(pid) for pid in pids if pid != tops[0] and pid not in below))
    assert not any(map(gone, below))
    os.kill(tops[0], signal.SIGKILL)
    eventually(lambda: all(map(gone, pids)))


@pytest.mark.parametrize("target", ["graceful", "deaf", "stuck"])
def test_how_a_child_ends_with_its_parent(target, start_child, tmp_path):
    path = tmp_path / "child"
    script = start_child(
        f"""
        import sys, time
        from pathlib import Path
        import children
        from fastipc import processes

        args = (Path(sys.argv[1]),) if {target!r} == "graceful" else ()
        if args:
            processes.DEATH_GRACE = 30  # it needs no force, on a busy machine just more time
        child = processes.start(children.{target}, args, name="child", start_method="fork")
        child.wait_ready(60)
        print("pid", child.pid, flush=True)
        time.sleep(1000)
        """,
        path,
        env={"PYTHONPATH": str(HERE)},
    )
    pid = int(script.wait_for("pid").split()[1])
    if target == "graceful":
        eventually(path.with_suffix(".inside").exists)
    script.send_signal(signal.SIGKILL)
    began = time.monotonic()
    eventually(lambda: gone(pid))
    assert time.monotonic() - began < DEATH_WATCHDOG
    if target == "graceful":
        assert path.with_suffix(".called").exists()
        assert path.with_suffix(".ended").exists()


def test_the_parent_is_killed_while_its_child_imports(start_child, tmp_path):
    """What was prepared is done, however long the preparing took."""
    said = tmp_path / "said"
    script = start_child(
        """
        import os, sys, time
        from pathlib import Path
        from fastipc import processes

        said = Path(sys.argv[1])
        if __name__ == "__mp_main__":
            print(f"importing {os.getpid()}", flush=True)
            while os.getppid() == int(os.environ["STARTED_BY"]):
                time.sleep(0.01)

        def prepare():
            time.sleep(1)
            processes.on_parent_death(lambda: said.write_text("orphaned"))

        def child():
            time.sleep(1000)

        if __name__ == "__main__":
            os.environ["STARTED_BY"] = str(os.getpid())
            processes.start(child, name="child", start_method="spawn", prepare=prepare)
            time.sleep(1000)
        """,
        said,
    )
    pid = int(script.wait_for("importing").split()[1])
    script.send_signal(signal.SIGKILL)
    eventually(lambda: gone(pid))
    assert said.read_text() == "orphaned"


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_the_parent_ends_without_stopping_its_children(method, stopped, start_child, tmp_path):
    path = tmp_path / "pids"
    source = FAMILY
    if stopped:
        source += """
    import os, signal
    os.kill(made[0].pid, signal.SIGSTOP)
"""
    script = start_child(source, method, path, 1, "and-end", env={"PYTHONPATH": str(HERE)})
    script.check()
    pids = [int(line) for line in path.read_text().splitlines()]
    assert len(pids) == 2
    eventually(lambda: all(map(gone, pids)))


def test_many_starts_and_ends_leave_nothing():
    def count():
        return len(os.listdir("/proc/self/fd"))

    with started(children.tell):
        pass
    before = count()
    for target, _ in itertools.product([children.tell, children.never_ready], range(10)):
        with started(target):
            pass
    assert count() <= before
