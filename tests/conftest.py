"""What every test gets: a watch for leftovers, a build with test hooks, and child processes.

After each test the suite looks for what it must not leave: files in /dev/shm and in the temporary
directory, shared memory without a name, processes. The test that left something fails. Outlive a
test what belongs to a fixture of wider scope: it was there before the test, so it is no leftover.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

import fastipc
import fastipc.sockets

ROOT = Path(__file__).resolve().parent.parent
CI = os.environ.get("FASTIPC_CI") == "1"
NIGHTLY = os.environ.get("FASTIPC_NIGHTLY") == "1"

# A peer's death, and then its files' end, are seen within a second; a loaded machine needs more.
GRACE_SECONDS = 5.0
# What is about to go has as long as this to do so: only a test that has failed waits for all of it.
LEFTOVER_SECONDS = 30.0

# The suite's own room: temporary files go to one half, where nothing may stay, and what pytest and
# the fixtures keep goes to the other. The names are short for the sake of socket paths.
_SCRATCH = Path(tempfile.mkdtemp(prefix="fipc-"))
_TMP = _SCRATCH / "t"
_KEPT = _SCRATCH / "k"
# What other libraries keep in the temporary directory until the process exits.
_FOREIGN_TMP = ("pymp-", "torch")
# The semaphores of a multiprocessing.Queue, which go with the last of their owners.
_FOREIGN_SHM = ("sem.mp-",)


# -- the session ---------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background jobs with Ctrl-C ignored, and every child of theirs would inherit
    # that: tests of it would wait in vain.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # No bound on the time of an example: a loaded machine is no counterexample.
    hypothesis.settings.register_profile("suite", deadline=None)
    hypothesis.settings.load_profile("suite")
    _TMP.mkdir()
    _KEPT.mkdir()
    os.environ["TMPDIR"] = str(_TMP)
    tempfile.tempdir = None
    if config.option.basetemp is None:
        config.option.basetemp = str(_KEPT / "pytest")
    _adopt_orphans()


def pytest_unconfigure() -> None:
    # What multiprocessing would clean up at exit lies in the directory that goes now.
    multiprocessing.util._run_finalizers()
    shutil.rmtree(_SCRATCH, ignore_errors=True)


# Fixtures that compile: whose test comes first waits for that, on a busy machine for minutes.
_BUILDS = {"hooked_core", "wheel"}
BUILD_SECONDS = 600.0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _BUILDS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.timeout(BUILD_SECONDS))  # one of its own comes first
    if NIGHTLY:
        return
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    if nightly:
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if item not in nightly]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: pytest.TestReport = yield
    if report.when == "call":
        item.stash[_FAILED] = report.failed
    _no_skips(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report: pytest.CollectReport = yield
    _no_skips(report)
    return report


def _no_skips(report: pytest.TestReport | pytest.CollectReport) -> None:
    """On a CI machine, where everything is installed, a skipped test is a failed one."""
    if CI and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: skipped, which counts as failed here: {reason}"


# -- what is left behind -------------------------------------------------------------------------

_FAILED = pytest.StashKey[bool]()


def _adopt_orphans() -> None:
    """Have the kernel give this process the children of a child that died, so they are seen."""
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def _children() -> set[psutil.Process]:
    """The living descendants of this process, except those that multiprocessing keeps."""
    multiprocessing.active_children()  # reaps those that have ended
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() == psutil.STATUS_ZOMBIE:
                continue
            command = " ".join(child.cmdline())
        except psutil.NoSuchProcess:
            continue
        if "multiprocessing.resource_tracker" in command or "multiprocessing.forkserver" in command:
            continue
        found.add(child)
    return found


def _shared_memory() -> set[Path]:
    directory = Path("/dev/shm")
    if not directory.is_dir():
        return set()
    found = set()
    for path in directory.iterdir():
        if path.name.startswith(_FOREIGN_SHM):
            continue
        try:
            if path.stat().st_uid == os.getuid():
                found.add(path)
        except FileNotFoundError:
            continue
    return found


def _temporary_files() -> set[Path]:
    if not _TMP.is_dir():
        return set()
    return {path for path in _TMP.iterdir() if not path.name.startswith(_FOREIGN_TMP)}


def _memfds() -> set[tuple[int, str]]:
    """Shared memory without a name that this process holds open."""
    found = set()
    directory = Path("/proc/self/fd")
    if not directory.is_dir():
        return set()
    for entry in directory.iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:  # the descriptor that listed the directory
            continue
        if target.startswith("/memfd:"):
            found.add((int(entry.name), target))
    return found


def _held_elsewhere(path: Path) -> bool:
    """Whether a process that is none of this suite's has the file open: then it isn't ours."""
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for process in psutil.process_iter():
        if process.pid in ours:
            continue
        try:
            if any(Path(f.path) == path for f in (*process.open_files(), *process.memory_maps())):
                return True
        except (psutil.Error, OSError):
            continue
    return False


class _Leftovers:
    """What is there now, to be compared with what is there later."""

    def __init__(self, memory: bool) -> None:
        self._looks: dict[str, Callable[[], set]] = {
            "processes": _children,
            "files in /dev/shm": _shared_memory,
            "temporary files": _temporary_files,
        }
        if memory:
            self._looks["shared memory held by this process"] = _memfds
        self._before = {name: look() for name, look in self._looks.items()}

    def new(self) -> dict[str, set]:
        """What was not there before; what is about to go is waited for."""
        deadline = time.monotonic() + LEFTOVER_SECONDS
        collected = False
        while True:
            new = {name: look() - self._before[name] for name, look in self._looks.items()}
            new = {name: things for name, things in new.items() if things}
            if not new:
                return {}
            if not collected:
                gc.collect()
                collected = True
            elif time.monotonic() >= deadline:
                break
            else:
                time.sleep(0.05)
        shm = new.get("files in /dev/shm", set())
        shm -= {path for path in shm if _held_elsewhere(path)}
        return {name: things for name, things in new.items() if things}


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test that leaves a process, a file or shared memory behind, and removes it."""
    before = _Leftovers(memory=True)
    yield
    new = before.new()
    for process in new.get("processes", ()):
        _kill(process)
    # (what isn't named like ours may be some other program's that began meanwhile)
    shm = {path for path in new.get("files in /dev/shm", set()) if "fastipc" in path.name}
    for path in shm | new.get("temporary files", set()):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if request.node.stash.get(_FAILED, False):
        # The traceback of a failed test keeps its queues alive.
        new.pop("shared memory held by this process", None)
    if new:
        listed = "; ".join(
            f"{name}: {', '.join(sorted(map(str, things)))}" for name, things in new.items()
        )
        pytest.fail(f"{request.node.nodeid} left behind {listed}", pytrace=False)


@pytest.fixture(autouse=True, scope="session")
def nothing_left_by_the_session() -> Iterator[None]:
    """The same for what fixtures of wider scope leave."""
    before = _Leftovers(memory=False)
    yield
    new = before.new()
    assert not new, f"the session left behind {new}"


@pytest.fixture(scope="module")
def own_socket_directory() -> Iterator[None]:
    """The directory of this process's ipc sockets goes when it ends: here with the module."""
    fastipc.sockets.get_open_zmq_ipc_path()
    yield
    fastipc.sockets._directory.remove()


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
        process.wait(GRACE_SECONDS)
    except (psutil.NoSuchProcess, psutil.TimeoutExpired):
        pass


# -- child processes -----------------------------------------------------------------------------


class Child:
    """A Python process that runs a script, under a watchdog that kills it and its descendants."""

    def __init__(self, command: list[str], env: dict[str, str], cwd: Path, timeout: float) -> None:
        self.timeout = timeout
        self.timed_out = False
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            cwd=cwd,
        )
        self.pid = self.process.pid
        self._lines = {"stdout": [], "stderr": []}
        self._changed = threading.Condition()
        self._open = 2
        self._threads = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("stdout", self.process.stdout), ("stderr", self.process.stderr))
        ]
        self._watchdog = threading.Timer(timeout, self._time_out)
        self._watchdog.daemon = True
        for thread in (*self._threads, self._watchdog):
            thread.start()

    def _read(self, name: str, stream) -> None:
        with stream:
            for line in stream:
                with self._changed:
                    self._lines[name].append(line)
                    self._changed.notify_all()
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def _time_out(self) -> None:
        self.timed_out = True
        self.kill_tree()

    @property
    def stdout(self) -> str:
        with self._changed:
            return "".join(self._lines["stdout"])

    @property
    def stderr(self) -> str:
        with self._changed:
            return "".join(self._lines["stderr"])

    def wait_for(self, text: str, stream: str = "stdout") -> str:
        """Wait until a line contains ``text`` and return the line."""

        def found() -> str | None:
            return next((line for line in self._lines[stream] if text in line), None)

        with self._changed:
            # The watchdog ends this wait: it closes both streams.
            self._changed.wait_for(lambda: found() is not None or not self._open)
            line = found()
        assert line is not None, f"no line with {text!r}{self._output()}"
        return line

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill_tree(self) -> None:
        """SIGKILL for the process and all its descendants, each by its id."""
        try:
            parent = psutil.Process(self.pid)
            processes = [*parent.children(recursive=True), parent]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def wait(self) -> int:
        """Wait for the end and return the exit code; running out of time fails the test."""
        code = self.process.wait()
        self._watchdog.cancel()
        for thread in self._threads:
            # A descendant that lives on may hold a stream open.
            thread.join(GRACE_SECONDS)
        assert not self.timed_out, f"still running after {self.timeout:g} s{self._output()}"
        return code

    def check(self) -> str:
        """Wait for the end, which must be a success, and return what was printed."""
        code = self.wait()
        assert code == 0, f"exit code {code}{self._output()}"
        return self.stdout

    def close(self) -> None:
        self._watchdog.cancel()
        if self.process.poll() is None:
            self.kill_tree()
        self.process.wait()
        for thread in self._threads:
            thread.join(GRACE_SECONDS)

    def _output(self) -> str:
        return f"\n-- stdout\n{self.stdout}\n-- stderr\n{self.stderr}"


@pytest.fixture
def start_child(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """``start_child(source, *args, env={}, pythonpath=None, timeout=60) -> Child``.

    Runs ``source`` (a script; multiprocessing may re-import it) or, with ``command=[...]`` instead,
    ``python`` with those arguments. What still runs at the end of the test is killed.
    """
    started: list[Child] = []

    def start(
        source: str | None = None,
        *args: object,
        command: list[str] | None = None,
        env: dict[str, str] | None = None,
        pythonpath: Path | None = None,
        timeout: float = 60.0,
    ) -> Child:
        if command is None:
            assert source is not None
            script = tmp_path / f"child{len(started)}.py"
            script.write_text(textwrap.dedent(source))
            command = [str(script), *map(str, args)]
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1", **(env or {})}
        # The package under test, however it came to be importable here.
        under_test = pythonpath or Path(fastipc.__file__).parent.parent
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(under_test), *([inherited] if inherited else [])]
        )
        child = Child([sys.executable, *command], environment, tmp_path, timeout)
        started.append(child)
        return child

    yield start
    for child in started:
        child.close()


@pytest.fixture
def run_child(start_child: Callable[..., Child]) -> Callable[..., str]:
    """``run_child(source, *args, ...)``: runs to a successful end, returns what was printed."""

    def run(*args: object, **options: object) -> str:
        return start_child(*args, **options).check()

    return run


# -- a build with test hooks ---------------------------------------------------------------------


@pytest.fixture(scope="session")
def hooked_core() -> Path:
    """A directory with a second copy of the package, whose core has the test hooks compiled in.

    For the PYTHONPATH of child processes: ``start_child(source, pythonpath=hooked_core)``.
    """
    if not (ROOT / "csrc").is_dir():
        pytest.skip("needs the source tree")
    source, built = _KEPT / "hooked-source", _KEPT / "hooked"
    if built.is_dir():
        return built
    # Built from a copy, so that neither the tree nor a build of it that runs now is touched.
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("csrc", "fastipc"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    result = subprocess.run(
        [sys.executable, "setup.py", "-q", "build", "-j", "2", "--build-lib", str(built)],
        cwd=source,
        # (without a sanitizer's run-time library, which would make the compiler crawl)
        env={**os.environ, "FASTIPC_TEST_HOOKS": "1", "LD_PRELOAD": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, f"building with test hooks failed:\n{result.stdout}"
    return built
