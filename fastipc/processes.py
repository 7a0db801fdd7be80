"""Child processes that are missed when they die, and don't outlive whoever started them.

``start`` runs a function in a process of its own; its ``ChildProcess`` waits until the child says
``ready``, tells how it ended, and ``Monitor`` calls back when it ends unasked. Two pipes do it:

- the *death pipe*, whose write end only the parent has. When the parent ends, however that
  happens, the kernel closes it, and a thread in the child that waits for this ends the child,
  gracefully at first. The child's own children learn of it in the same way. Nothing is said through
  it, except to a child that doesn't end at SIGTERM: to that one a byte says what SIGTERM does to
  others. (The
  kernel's parent-death signal is no substitute: it comes when the *thread* that made the child
  ends.)
- the *ready pipe*, through which the child sends one value, or the exception that kept it from
  becoming ready.

They work only while nobody else holds a copy of their ends. Descriptors don't pass through exec;
what a fork copies, the copy closes at once (``_held``), whoever forked.

The parent gets no signal handler, thread or environment variable by starting a child. (Monitor is
a thread.) In the child SIGTERM raises SystemExit in the main thread, once for each signal, until
the function ends, unless it was started with ``ends_at_sigterm=False``; SIGINT is ignored there,
since the terminal sends Ctrl-C to the parent, too, and it's the parent that decides.
"""

from __future__ import annotations

import _thread
import importlib
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.reduction
import multiprocessing.resource_tracker
import multiprocessing.util
import operator
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import popen_forkserver, popen_spawn_posix
from multiprocessing.connection import Connection
from types import FrameType, TracebackType
from typing import Any

from . import failures
from .errors import ChildDied, NotReady
from .hostinfo import host_name
from .settings import START_METHODS, settings

__all__ = [
    "ChildProcess",
    "Monitor",
    "choose_start_method",
    "describe_exit",
    "on_parent_death",
    "ready",
    "start",
    "stop",
    "wait_all_ready",
]

logger = logging.getLogger("fastipc")

# After its parent's death a child has this long, in seconds, for a graceful end: so it is gone
# within a second, and every generation below it half a second later.
DEATH_GRACE = 0.5
# Likewise when its parent comes to its own end without having stopped it, and before SIGKILL.
EXIT_GRACE = 2.0
# Exit codes: of a graceful end at SIGTERM (as shells have it); of a child whose main script starts
# processes while it is imported (as sysexits.h has it: wrongly configured).
SIGTERM_EXIT = 128 + signal.SIGTERM
UNGUARDED_EXIT = 78
UNGUARDED = (
    "put the start of processes (and of executors and engines, which start some) under "
    "`if __name__ == '__main__':`. A child that is spawned imports the main script, and this one "
    "would start children of its own while it is imported, and these again"
)


# ---- start methods ---------------------------------------------------------------------------


def _accelerator() -> str | None:
    """Which kind of accelerator this process has initialised, if any. Imports nothing."""
    torch = sys.modules.get("torch")
    for name in ("cuda", "xpu"):
        try:
            if getattr(torch, name).is_initialized():
                return name.upper()
        except Exception:  # no torch, one that is half imported, or one without it
            continue
    return None


def _in_ray_actor() -> bool:
    ray = sys.modules.get("ray")
    try:
        return bool(ray.is_initialized() and ray.get_runtime_context().get_actor_id())  # type: ignore[union-attr]
    except Exception:
        return False


def _memory_policy() -> str:
    """The NUMA policy that this process's memory gets, "default" unless it is bound to nodes."""
    try:
        with open("/proc/self/numa_maps") as maps:
            return maps.readline().split()[1]
    except (OSError, IndexError):
        return "default"


def _is_wsl() -> bool:
    return "microsoft" in os.uname().release.lower()


def choose_start_method(
    requested: str | None = None, *, api_server: bool = False
) -> tuple[str, str]:
    """How a child process should be started, and why.

    Args:
        requested: "fork", "spawn" or "forkserver"; None: FASTIPC_WORKER_MULTIPROC_METHOD, else
            what suits the state that this process is in.
        api_server: the child is an API server, which is always spawned.

    Returns:
        (method, reason); the reason is a phrase for a log line.

    fork is the quickest, and the only one that doesn't import the main script anew; so it is the
    default, where the child can't inherit something that doesn't work there. Threads are the
    usual obstacle: of the parent's threads the child has one, and of their locks all, as they are.

    Raises ValueError for another method.
    """
    if requested is not None and requested not in START_METHODS:
        raise ValueError(f"start_method={requested!r} must be one of {', '.join(START_METHODS)}")
    if api_server:
        return "spawn", "API servers are always spawned"
    if requested is not None:
        return requested, "as requested"
    method = settings().worker_multiproc_method
    if method is not None:
        return method, "as FASTIPC_WORKER_MULTIPROC_METHOD says"
    accelerator = _accelerator()
    if accelerator is not None:
        return "spawn", f"{accelerator} is initialised here, and does not work in a forked child"
    if _in_ray_actor():
        return "spawn", "this is a Ray actor, whose connections must not be forked"
    policy = _memory_policy()
    if policy != "default":
        return "spawn", f"memory is bound to NUMA nodes ({policy}), and fork would share its pages"
    if _is_wsl():
        return "spawn", "under WSL the GPU driver does not work in a forked child"
    if "torch" in sys.modules:
        return "spawn", "torch is imported, and its OpenMP threads deadlock in a forked child"
    others = [t.name for t in threading.enumerate() if t is not threading.current_thread()]
    if others:
        return "spawn", f"other threads are running ({', '.join(others[:3])}): fork is unsafe"
    return "fork", "no other thread is running, nor anything else that a fork would break"


# ---- what a fork must not copy ---------------------------------------------------------------

# Every end of a pipe that this process has: a forked child closes its copies.
_held: set[Connection] = set()
# Held while ends come into being or go, and by whoever forks: every end that a child gets a copy of
# is in _held. (Not a plain lock: a signal handler may fork.)
_pipes = threading.RLock()
# By thread: the ends that are for the child which that thread is forking.
_passing: dict[int, tuple[Connection, ...]] = {}
# The children of this process that may be running.
_children: set[ChildProcess] = set()


def _forget_parents_ends() -> None:
    mine = _passing.get(threading.get_ident(), ())
    for end in _held.difference(mine):
        try:
            end.close()
        except OSError:
            pass
    _held.clear()
    _held.update(mine)
    for child in _children:
        child._disown()
    _children.clear()
    _monitors.clear()
    _passing.clear()
    _pipes.release()


os.register_at_fork(
    before=_pipes.acquire,
    after_in_parent=_pipes.release,
    after_in_child=_forget_parents_ends,
)


def _pipe() -> tuple[Connection, Connection]:
    with _pipes:
        reader, writer = multiprocessing.connection.Pipe(duplex=False)
        _held.update((reader, writer))
    return reader, writer


def _let_go(*ends: Connection | None) -> None:
    with _pipes:
        for end in ends:
            if end is not None:
                end.close()
                _held.discard(end)


# ---- in the child ----------------------------------------------------------------------------


class _Child:
    """What a started child knows of itself."""

    def __init__(self, death: Connection, ready: Connection, ends_at_sigterm: bool) -> None:
        self.death = death
        self.ready: Connection | None = ready
        self.pid = os.getpid()
        self.ends_at_sigterm = ends_at_sigterm
        self.told = False  # to end, by the parent or its death
        self.callbacks: list[Callable[[], object]] = []
        self.last_callbacks: list[Callable[[], object]] = []
        self.lock = threading.Lock()

    def say(self, message: tuple[str, Any]) -> None:
        """Through the ready pipe; any but the first ("started") closes it. A parent that isn't
        listening any more is no error of this process's: it is on its way out."""
        with self.lock:
            if self.ready is None:
                raise RuntimeError("ready() was called before, or the start has failed")
            try:
                self.ready.send(message)
            except OSError:
                pass
            if message[0] != "started":
                _let_go(self.ready)
                self.ready = None

    def watch(self) -> None:
        try:
            while os.read(self.death.fileno(), 1):
                self.interrupt()
        except OSError:
            pass
        try:
            threading.Thread(target=self.end, name="fastipc-death-end", daemon=True).start()
        except RuntimeError:  # the interpreter is on its way out
            pass
        time.sleep(DEATH_GRACE)
        try:
            self.call(self.last_callbacks)
        finally:
            os._exit(SIGTERM_EXIT)

    def call(self, callbacks: list[Callable[[], object]]) -> None:
        for callback in callbacks:
            try:
                callback()
            except Exception:
                logger.exception("what was to be called at the parent's death failed")

    def end(self) -> None:
        self.call(self.callbacks)
        self.interrupt()

    def interrupt(self) -> None:
        self.told = True
        # The main thread itself gets it: a signal to the process may interrupt another's wait.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


_this: _Child | None = None


def ready(value: Any = None) -> None:
    """In a child: tells the parent's wait_ready that the start has succeeded.

    Args:
        value: what wait_ready returns; any picklable object.

    Raises:
        RuntimeError: a second call, or this process was not started by ``start``.
    """
    if _this is None:
        raise RuntimeError("ready() is for processes that fastipc.processes.start has started")
    _this.say(("ready", value))


def on_parent_death(callback: Callable[[], object], *, last: bool = False) -> None:
    """In a child: has callback called, in a thread of its own, when the parent has ended. After
    it the main thread gets SIGTERM; half a second after the parent's end the process exits,
    whatever the state of either.

    With ``last`` it is called right before that exit, if the process has not come to its end by
    itself; then it must not wait for anything.

    A parent may be dead before its child runs. What the ``prepare`` of ``start`` registers is
    called then, too.

    Raises RuntimeError where ``start`` has not started this process.
    """
    if _this is None:
        raise RuntimeError("on_parent_death() is for processes that processes.start has started")
    (_this.last_callbacks if last else _this.callbacks).append(callback)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    child = _this
    # (what this process has forked has the handler, too, and nobody who could tell it otherwise)
    if child is not None and not (child.ends_at_sigterm or child.told) and child.pid == os.getpid():
        return
    raise SystemExit(SIGTERM_EXIT)


def _main(
    death: Connection,
    ready_end: Connection,
    target: Callable[..., object],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    env: Mapping[str, str],
    ends_at_sigterm: bool,
    prepare: Callable[[], object] | None,
) -> None:
    """The child's first function of ours, in its main thread."""
    global _this
    _this = child = _Child(death, ready_end, ends_at_sigterm)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _on_sigterm)
    # A forked child would write its signals into the parent's asyncio loop.
    signal.set_wakeup_fd(-1)
    _held.update((death, ready_end))
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)
        if prepare is not None:
            prepare()
        threading.Thread(target=child.watch, name="fastipc-death-watch", daemon=True).start()
        _hook_exit()
        os.environ.update(env)
        child.say(("started", None))
        target(*args, **kwargs)
    except Exception as error:
        if child.ready is None:
            raise  # multiprocessing prints it
        child.say(("failed", failures.pack(error)))
        sys.exit(1)
    finally:
        # What follows is the end: another SIGTERM could only spoil it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


# ---- starting --------------------------------------------------------------------------------

# Between the fork and the child's own handlers these would run the parent's.
_HELD_BACK = (signal.SIGINT, signal.SIGTERM)


class _Call:
    """Pickles as a call, which whoever loads the pickle makes."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


class _Name(str):
    """A process's name that brings its environment along.

    It is the first thing that a spawned child loads, before the main script and all that this
    imports; libraries look at their variables when they are imported. The other way, changing
    this process's own environment for a moment, would be seen by its other threads. The calls are
    of the standard library's functions: the child can't import anything else at that time.
    """

    __slots__ = ("_env",)
    _env: Mapping[str, str]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        environ = _Call(getattr, _Call(importlib.import_module, "os"), "environ")
        sets = [_Call(operator.setitem, environ, key, value) for key, value in self._env.items()]
        return operator.getitem, ((str(self), *sets), 0)


class _Uninterrupted:
    """How multiprocessing starts a process that isn't forked, but to its end once it has begun.

    A child that gets half of what it is to load prints a traceback, and of a process whose start
    was interrupted nobody knows the pid. Holding signals back in this thread is not enough: any
    other may take them, and then it is the main thread that runs their handlers, whatever it does.
    So another thread does what must not be interrupted, which is little: all is pickled here, by
    the caller's thread, for pickling may import, and so wait for what the caller has.
    """

    interrupted: BaseException | None = None

    def _launch(self, process_obj: Any) -> None:
        spawning: Any = self
        multiprocessing.context.set_spawning_popen(spawning)
        try:
            with multiprocessing.reduction.ForkingPickler.dumps(process_obj) as pickled:
                stand_in: Any = _Call(pickle.loads, bytes(pickled))
        finally:
            multiprocessing.context.set_spawning_popen(None)
        stand_in._name = process_obj._name
        launch = super()._launch  # type: ignore[misc]
        if threading.current_thread() is threading.main_thread():
            self.interrupted = _in_another_thread(launch, stand_in)
        else:
            _without_signals(launch, stand_in)


def _without_signals(function: Callable[..., object], *args: Any) -> None:
    held_back = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        function(*args)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held_back)


def _in_another_thread(function: Callable[..., object], *args: Any) -> BaseException | None:
    """Calls it there, with signals held back, and waits for it whatever happens.

    Returns what a signal's handler raised in this thread meanwhile. Raises what the call raises.
    """
    once = threading.Lock()
    outcome: list[BaseException | None] = []
    over = threading.Lock()
    over.acquire()

    def run() -> None:
        if not once.acquire(blocking=False):
            return
        try:
            _without_signals(function, *args)
        except BaseException as error:
            outcome.append(error)
        else:
            outcome.append(None)
        over.release()

    interrupted: BaseException | None = None
    # An exception may come between any two steps, also where a call has been made and has not
    # returned: so it is asked what has happened, and what may have been done is done again.
    while not outcome:
        try:
            if not once.locked():
                _thread.start_new_thread(run, ())
            over.acquire()
        except BaseException as error:
            if isinstance(error, RuntimeError) and not once.locked():
                raise  # no thread can be had
            interrupted = error
    try:
        if outcome[0] is not None:
            raise outcome[0]
        return interrupted
    finally:
        interrupted = None  # its traceback has this frame: no circle
        outcome.clear()


class _SpawnPopen(_Uninterrupted, popen_spawn_posix.Popen):
    pass


class _ForkserverPopen(_Uninterrupted, popen_forkserver.Popen):
    pass


class _SpawnProcess(multiprocessing.context.SpawnProcess):
    _Popen = staticmethod(_SpawnPopen)


class _ForkserverProcess(multiprocessing.context.ForkServerProcess):
    _Popen = staticmethod(_ForkserverPopen)


_PROCESSES: dict[str, Any] = {
    "fork": multiprocessing.context.ForkProcess,
    "spawn": _SpawnProcess,
    "forkserver": _ForkserverProcess,
}


def _refuse_in_bootstrap() -> None:
    """Where the main script is being imported by a child, starting a process is a fork bomb."""
    if not getattr(multiprocessing.process.current_process(), "_inheriting", False):
        return
    error = RuntimeError(UNGUARDED)
    hook = sys.excepthook

    def report(kind: type[BaseException], value: BaseException, tb: TracebackType | None) -> None:
        hook(kind, value, tb)
        if value is error:
            sys.stderr.flush()
            os._exit(UNGUARDED_EXIT)  # which tells the parent

    sys.excepthook = report
    raise error


def start(
    target: Callable[..., object],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str,
    start_method: str | None = None,
    api_server: bool = False,
    env: Mapping[str, str] | None = None,
    daemon: bool = False,
    ends_at_sigterm: bool | None = None,
    prepare: Callable[[], object] | None = None,
) -> ChildProcess:
    """Starts target(*args, **kwargs) in a child process, which ends when this process does.

    Args:
        target, args, kwargs: as of multiprocessing.Process: with spawn and forkserver they are
            pickled.
        name: what the child is called in messages.
        start_method, api_server: see choose_start_method; the choice is logged (INFO).
        env: environment variables for the child. A child that isn't forked also gets
            OMP_NUM_THREADS=1 unless it is set here or there: many processes that all use all
            CPUs are slower than one. Both are set before the child imports the main script. (A
            forked child has the libraries that it has. And what the dynamic linker or the
            interpreter reads at its start comes from this process's environment.)
        daemon: multiprocessing's; a daemonic process can't have children of its own.
        ends_at_sigterm: whether a SIGTERM from anywhere ends the child. If not, it ends when this
            process tells it (terminate, ``stop``) or ends: for who has to end in good order though
            a service manager sends SIGTERM to all processes at once. None: as this process itself,
            if it was started by ``start``; else True. (multiprocessing's fork server ends at
            SIGTERM whatever is said here, and so does its child until it has begun.)
        prepare: the child calls it, with no arguments, before it looks whether its parent is still
            alive: where ``on_parent_death`` is called for what must not be missed, though the
            parent died while the child was importing. Should not take long; pickled as target is.

    Returns:
        the child; call its wait_ready, or wait_all_ready, and in the end ``stop``.

    When this process ends without ``stop`` its children are ended first. Thread safe. A forked
    child of this process has nothing to do with its other children.

    Raises:
        ValueError: no such start method.
        What a signal's handler raises meanwhile (KeyboardInterrupt); then the child has ended, or
            ends by itself.
        RuntimeError: the main script has no ``if __name__ == '__main__'``; or this process is
            daemonic, and so can't have children.
        Whatever pickling target or its arguments raises.
    """
    _refuse_in_bootstrap()
    if multiprocessing.process.current_process().daemon:
        raise RuntimeError(
            f"{name} can't be started: this process is daemonic, and so can't have children; "
            "start it with daemon=False"
        )
    method, reason = choose_start_method(start_method, api_server=api_server)
    variables = dict(env or {})
    if method != "fork" and "OMP_NUM_THREADS" not in os.environ:
        variables.setdefault("OMP_NUM_THREADS", "1")
    logger.info("%s starts by %s: %s", name, method, reason)
    if method != "fork":
        # These start processes when they are first needed, which must not begin with signals held
        # back, and (the tracker) lets them through when it has.
        multiprocessing.resource_tracker.ensure_running()
    if method == "forkserver":
        multiprocessing.forkserver.ensure_running()
    _hook_exit()
    death_r, death_w = _pipe()
    ready_r, ready_w = _pipe()
    if ends_at_sigterm is None:
        ends_at_sigterm = _this is None or _this.ends_at_sigterm
    label = _Name(name)
    label._env = variables
    process = _PROCESSES[method](
        target=_main,
        args=(
            death_r,
            ready_w,
            target,
            tuple(args),
            dict(kwargs or {}),
            variables,
            ends_at_sigterm,
            prepare,
        ),
        name=label,
        daemon=daemon,
    )
    thread = threading.get_ident()
    _passing[thread] = (death_r, ready_w)
    try:
        if method == "fork":
            _without_signals(process.start)
        else:
            process.start()
        child = ChildProcess(process, name, method, death_w, ready_r, ends_at_sigterm)
    except BaseException:
        _let_go(death_w, ready_r)  # a child that has begun all the same ends for it
        raise
    finally:
        _passing.pop(thread, None)
        _let_go(death_r, ready_w)
    interrupted = getattr(process._popen, "interrupted", None)
    if interrupted is not None:
        process._popen.interrupted = None
        stop([child], graceful=0.0)
        try:
            raise interrupted
        finally:
            interrupted = None
    return child


class ChildProcess:
    """A process that ``start`` started. Thread safe; of use only in the process that started it.

    Attributes:
        name, pid, start_method: of the child.
        sentinel: a descriptor (or, where there are none for processes, a pipe's) that becomes
            readable when the child has ended; for multiprocessing.connection.wait. -1 after stop.
        expected: the end of the child is nothing to report: ``stop`` sets it.
    """

    def __init__(
        self,
        process: Any,
        name: str,
        method: str,
        death: Connection,
        ready: Connection,
        ends_at_sigterm: bool,
    ) -> None:
        self.name = name
        self.start_method = method
        self.pid = int(process.pid)
        self.expected = False
        self._process = process
        self._death: Connection | None = death
        self._ready: Connection | None = ready
        self._ends_at_sigterm = ends_at_sigterm
        self._lock = threading.RLock()
        self._exitcode: int | None = None
        self._ended = False
        self._reached = False
        self._outcome: tuple[str, Any] | None = None
        self._mine = True
        # A sentinel of multiprocessing's is a pipe that the child's forked children also hold: it
        # wouldn't end before they do.
        self._pidfd: int | None = None
        if hasattr(os, "pidfd_open"):
            try:
                self._pidfd = os.pidfd_open(self.pid)
            except OSError:  # ended already; or a kernel before 5.3
                pass
        self.sentinel: int = process.sentinel if self._pidfd is None else self._pidfd
        _children.add(self)

    def __repr__(self) -> str:
        return f"<ChildProcess {self.name} (pid {self.pid}), {self._state()}>"

    def _state(self) -> str:
        if not self._mine:
            return "of another process"
        return "running" if self.is_alive() else describe_exit(self._exitcode)

    def _disown(self) -> None:
        """In a forked child of this process."""
        self._mine = False
        self._lock = threading.RLock()
        self._death = self._ready = None  # closed with all that is in _held
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        self.sentinel = -1

    def _check(self) -> None:
        if not self._mine:
            raise RuntimeError(f"{self.name} (pid {self.pid}) is a child of another process")

    # -- its end

    def _reap(self) -> bool:
        """Whether it has ended; then its exit code is known, if it can be."""
        self._check()
        with self._lock:
            if self._ended:
                return True
            if not multiprocessing.connection.wait([self.sentinel], 0):
                return False
            # The kernel has it now, or the fork server says it soon. It stays unknown if somebody
            # else waited for all children of this process.
            patience = time.monotonic() + (5.0 if self.start_method == "forkserver" else 0.5)
            while (code := self._process.exitcode) is None and time.monotonic() < patience:
                time.sleep(0.001)
            self._exitcode = code
            self._ended = True
            _let_go(self._death)
            self._death = None
            _children.discard(self)
            return True

    @property
    def exitcode(self) -> int | None:
        """What it exited with, or minus the signal that killed it; None while it runs, and if
        another part of this process has taken it (os.wait)."""
        return self._exitcode if self._reap() else None

    def is_alive(self) -> bool:
        """Whether it has not ended; a stopped process is alive."""
        return not self._reap()

    def describe_exit(self) -> str:
        """How it ended, as the end of a sentence: "exited with code 3", "was killed by SIGKILL"."""
        return "is still running" if not self._reap() else describe_exit(self._exitcode)

    def join(self, timeout: float | None = None) -> bool:
        """Waits until it has ended, at most timeout seconds (None: for ever). Whether it has."""
        return not _wait_ended([self], timeout)

    def send_signal(self, number: int) -> None:
        """Nothing happens if it has ended."""
        with self._lock:
            if self._reap():
                return
            if self._pidfd is None:
                os.kill(self.pid, number)
                return
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                pass

    def terminate(self) -> None:
        """SIGTERM, or what stands for it: a graceful end, if its main thread comes to it."""
        if self._ends_at_sigterm:
            self.send_signal(signal.SIGTERM)
            return
        with self._lock:
            if not self._reap() and self._death is not None:
                try:
                    os.write(self._death.fileno(), b"\0")
                except OSError:
                    pass  # it is ending

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _release(self) -> None:
        """Gives back what this process has of a child that has ended."""
        with self._lock:
            _let_go(self._ready)
            self._ready = None
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None
            self.sentinel = -1

    # -- its start

    def wait_ready(self, timeout: float | None = None) -> Any:
        """Waits until the child calls ready(value), and returns the value; again at each call.

        Args:
            timeout: seconds; None waits for ever, or until the child ends.

        Raises:
            The exception that the child raised before it was ready; its ``__cause__`` is a
                RemoteError with the traceback there.
            NotReady: the timeout passed (a TimeoutError).
            ChildDied: it ended before it was ready, in whatever way.
            RuntimeError: it ended since the main script has no ``if __name__ == '__main__'``.
        """
        return wait_all_ready([self], timeout)[0]

    def _poll_ready(self) -> bool:
        """Takes what the ready pipe has; whether that decides the matter."""
        self._check()
        with self._lock:
            while self._outcome is None:
                # looked at first: what it said before its end is in the pipe by then
                ended = self._reap()
                try:
                    if self._ready is None or not self._ready.poll():
                        raise EOFError
                    message = self._ready.recv()
                except (EOFError, OSError):
                    if not ended:
                        return False
                    message = ("died", None)
                except Exception as error:  # the value doesn't unpickle
                    message = ("failed", failures.pack(error))
                if message[0] == "started":
                    self._reached = True
                else:
                    self._outcome = message
                    _let_go(self._ready)
                    self._ready = None
            return True

    def _result(self) -> Any:
        assert self._outcome is not None
        kind, value = self._outcome
        if kind == "ready":
            return value
        who = f"{self.name} (pid {self.pid})"
        if kind == "failed":
            error = failures.unpack(value)
            error.add_note(f"raised in {who} before it was ready")
            raise error
        if self._exitcode == UNGUARDED_EXIT and not self._reached:
            raise RuntimeError(f"{who} could not start: {UNGUARDED}")
        where = "before it was ready"
        if not self._reached:
            where = (
                "while it was importing the main script and what it was given; if that raised, "
                "the traceback is on its standard error"
            )
        how = describe_exit(self._exitcode)
        raise ChildDied(f"{who} {how} {where}", None, self.pid, host_name(), self._exitcode)


def describe_exit(code: int | None) -> str:
    """An exit code as the end of a sentence; negative: minus a signal's number."""
    if code is None:
        return "ended (its exit code is unknown: this process waited for it elsewhere)"
    if code == SIGTERM_EXIT:
        return "ended at SIGTERM"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def wait_all_ready(children: Iterable[ChildProcess], timeout: float | None = None) -> list[Any]:
    """What each child gave to ready(), in the order of the children.

    Args:
        timeout: seconds for all of them together; None waits for ever.

    Raises as ChildProcess.wait_ready, as soon as the first child fails, whichever it is; NotReady
    names those that are missing (``.missing``: their places among the children). The others are
    left as they are: ``stop`` them.
    """
    children = list(children)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        missing = []
        for place, child in enumerate(children):
            if not child._poll_ready():
                missing.append(place)
            elif child._outcome is not None and child._outcome[0] != "ready":
                child._result()
        if not missing:
            return [child._result() for child in children]
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        waiting: list[Any] = []
        for place in missing:
            child = children[place]
            waiting.append(child.sentinel)
            if child._ready is not None:
                waiting.append(child._ready)
        if not multiprocessing.connection.wait(waiting, left) and left == 0.0:
            names = ", ".join(f"{children[i].name} (pid {children[i].pid})" for i in missing)
            raise NotReady(f"after {timeout:g} s not ready: {names}", tuple(missing))


# ---- watching and ending ---------------------------------------------------------------------


def _wait_ended(children: Iterable[ChildProcess], timeout: float | None) -> list[ChildProcess]:
    """Those that have not ended after so many seconds."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        alive = [child for child in children if child.is_alive()]
        left = None if deadline is None else deadline - time.monotonic()
        if not alive or (left is not None and left <= 0):
            return alive
        sentinels = [child.sentinel for child in alive]
        # (-1: another thread's stop has just seen it end)
        if -1 not in sentinels:
            multiprocessing.connection.wait(sentinels, left)


def stop(
    children: Iterable[ChildProcess], *, graceful: float = 5.0, terminate: float = 2.0
) -> None:
    """Sees children to their end: waits for those that are about to end, then SIGTERM, then
    SIGKILL (which a process that is stopped can't evade either).

    Args:
        graceful: seconds to wait first. Whatever tells the children to end is the caller's.
        terminate: seconds between SIGTERM and SIGKILL.

    May be called again, and from several threads. Monitors don't report what ends from now on.
    """
    children = list(children)
    for child in children:
        # (one that had ended before did so unasked)
        if child.is_alive():
            child.expected = True
    alive = _wait_ended(children, graceful)
    for child in alive:
        child.terminate()
    alive = _wait_ended(alive, terminate if alive else 0)
    for child in alive:
        logger.warning("%s (pid %d) did not end at SIGTERM: SIGKILL", child.name, child.pid)
        child.kill()
    # Only a process that the kernel itself is stuck with (a dead disk, a dead GPU) takes longer.
    for child in _wait_ended(alive, 10.0 if alive else 0):
        logger.error("%s (pid %d) did not end at SIGKILL", child.name, child.pid)
    for child in children:
        if not child.is_alive():
            child._release()


class Monitor:
    """A thread that calls on_exit(child), once for each child that ends without ``stop``.

    The calls come from that thread, one after the other; what one raises is logged. It sleeps
    until something happens. Children may be added later. It doesn't survive a fork.
    """

    def __init__(
        self, children: Iterable[ChildProcess], on_exit: Callable[[ChildProcess], object]
    ) -> None:
        self._on_exit = on_exit
        self._watched = set(children)
        self._lock = threading.Lock()
        self._stopped = False
        self._stopped_itself = False
        self._wake_r, self._wake_w = _pipe()
        self._thread = threading.Thread(target=self._run, name="fastipc-monitor", daemon=True)
        self._thread.start()
        _monitors.add(self)
        _hook_exit()

    def add(self, child: ChildProcess) -> None:
        """Watches one more."""
        with self._lock:
            if self._stopped:
                raise RuntimeError("this monitor has been stopped")
            self._watched.add(child)
            self._wake_w.send_bytes(b"")

    def _run(self) -> None:
        while True:
            with self._lock:
                watched = list(self._watched)
            ended = [child for child in watched if not child.is_alive()]
            with self._lock:
                self._watched.difference_update(ended)
                sentinels = [child.sentinel for child in self._watched]
            for child in ended:
                if self._stopped:
                    break
                if child.expected:
                    continue
                try:
                    self._on_exit(child)
                except Exception:
                    logger.exception("what was to be called at the end of %s failed", child.name)
            if self._stopped:
                with self._lock:
                    if self._stopped_itself:  # nobody joins this thread
                        _let_go(self._wake_r, self._wake_w)
                return
            # (-1: stop has just seen it end)
            if not ended and -1 not in sentinels:
                happened = multiprocessing.connection.wait([self._wake_r, *sentinels])
                if self._wake_r in happened:
                    self._wake_r.recv_bytes()

    def stop(self) -> None:
        """No call of on_exit begins after this has returned; one that is running is waited for,
        unless it is the one that calls stop. May be called again."""
        self._stop(None)

    def _stop(self, patience: float | None) -> None:
        if sys.is_finalizing():
            return  # the exit hook has done it, or the thread ended amidst anything
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._wake_w.send_bytes(b"")
            if threading.current_thread() is self._thread:
                self._stopped_itself = True
        if threading.current_thread() is not self._thread:
            self._thread.join(patience)
            if not self._thread.is_alive():
                with self._lock:
                    _let_go(self._wake_r, self._wake_w)


_monitors: weakref.WeakSet[Monitor] = weakref.WeakSet()
_exit_hook_of = 0


def _hook_exit() -> None:
    """At the end of this process its children end first: multiprocessing would wait for them."""
    global _exit_hook_of
    if _exit_hook_of != os.getpid():
        _exit_hook_of = os.getpid()
        # runs before multiprocessing waits, in the main process and in its children alike, and
        # before queues close
        multiprocessing.util.Finalize(None, _end_children, exitpriority=100)


def _end_children() -> None:
    # A thread that still ran when the interpreter ends would keep the locks that it has.
    for monitor in list(_monitors):
        monitor._stop(EXIT_GRACE)
    children = list(_children)
    for child in children:
        child.expected = True
        with child._lock:
            _let_go(child._death)
            child._death = None
    stop(children, graceful=EXIT_GRACE, terminate=0.0)
