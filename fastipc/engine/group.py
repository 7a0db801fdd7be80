"""Launching engines, and telling everyone who is where and who has ended.

A group is the engines of one server, the coordinator if there are several, and the control socket
at which they and the front ends introduce themselves. Whoever makes it is their parent: when that
ends, however it does, they end.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import zmq

from .. import addresses, failures
from .. import processes as children
from ..errors import ChildDied, Closed, IPCError
from ..keeper import Wake
from ..remote_end import curve_key_pair
from ..sockets import (
    get_open_zmq_ipc_path,
    remove_orphaned_directories,
    remove_own_directory,
)
from .channels import open_channel
from .coordinator import endpoint_of_any_port, run_coordinator
from .core import EngineCore, check_core_class
from .intake import keep_alive
from .process import WINDOW_BYTES, orphaned, run_engine
from .protocol import (
    PROTOCOL,
    ClientSpec,
    Control,
    CoordinatorAddress,
    Ended,
    Exited,
    FrontEnd,
    Hello,
    Joined,
    Uncoordinated,
    Welcome,
    decode_control,
    encode_control,
)

__all__ = ["EngineGroup", "launch"]

logger = logging.getLogger("fastipc")

RESTARTS = 5
"""An engine that ends more often than this in a minute is not started again."""

PROBE_SECONDS = 1.0
"""How often it is asked whether engines that others launched are there, where the rest would wait
for them: seldom enough to cost nothing."""


def _engine_main(
    core_class: type[EngineCore], config: Any, index: int, control: str, key: str, window: int
) -> None:
    """The main function of an engine's process."""
    started = False

    def ready() -> None:
        nonlocal started
        started = True
        children.ready()

    try:
        run_engine(
            core_class,
            config,
            index=index,
            control=control,
            control_key=key,
            ready=ready,
            window=window,
        )
    except ChildDied as error:
        if not started:
            raise  # which whoever launched the engine is told
        logger.error("engine %d ends: %s", index, error)
        sys.exit(1)


def _coordinator_main(control: str, key: str, host: str) -> None:
    run_coordinator(control, key, host, children.ready)


def clean_up_when_orphaned() -> None:
    """The ``prepare`` of a process that `fastipc.processes.start` starts: should its parent be
    killed, the directories of sockets of both go, however little time this process is given."""
    children.on_parent_death(_parent_died)
    children.on_parent_death(_remove_directories, last=True)


def _parent_died() -> None:
    orphaned.set()
    # At once, and in this thread: on a busy machine half a second is soon over.
    remove_own_directory()
    remove_orphaned_directories()
    # Not a daemon, as the thread that this is: the main thread may be at its end sooner than its
    # dying parent.
    threading.Thread(target=_sweep, name="fastipc-sweep", daemon=False).start()


def _remove_directories() -> None:
    """The last thing that this process does, maybe before `_parent_died` got to run."""
    remove_own_directory(wait=False)
    remove_orphaned_directories()


def _sweep() -> None:
    """Whoever launched this process was killed: what it left goes with those that end now. They
    have half a second, and the kernel closes what the dead had open one after the other."""
    for _ in range(10):
        remove_orphaned_directories()
        time.sleep(0.04)


def _name_of(struct: type) -> str:
    return f"{struct.__module__}:{struct.__qualname__}"


class EngineGroup:
    """Engines that this process has launched; see ``launch``. A with-statement ends them.

    Thread safe. A forked child has nothing to do with it.

    Attributes:
        clients: a ClientSpec for each front end, which it may be handed in any way
            (``spec.to_str()`` makes one word of it).
        engines: how many.
        coordinator: the process of the coordinator, None with one engine.
    """

    def __init__(
        self,
        core_class: type[EngineCore],
        config: Any,
        *,
        engines: int,
        clients: int,
        start_method: str | None,
        host: str,
        secure: bool,
        restart: bool,
        max_in_flight: int,
        window: int,
        external: int,
        on_failure: Callable[[int, str], object] | None,
        env: dict[str, str] | None,
        ends_at_sigterm: bool | None,
    ) -> None:
        check_core_class(core_class)
        for name, number, least in (
            ("engines", engines, 1),
            ("clients", clients, 1),
            ("max_in_flight", max_in_flight, 1),
            ("window", window, 1),
            ("external", external, 0),
        ):
            if not isinstance(number, int) or number < least:
                raise ValueError(f"{name}={number!r} must be a whole number of at least {least}")
        if engines > 65536 or external > engines:
            raise ValueError(f"engines={engines}, external={external}: at most 65536, and so many")
        self.engines = engines
        self.coordinator: children.ChildProcess | None = None
        self._core_class = core_class
        self._config = config
        self._start_method = start_method
        self._restart = restart
        self._window = window
        self._on_failure = on_failure
        self._env = env
        self._ends_at_sigterm = ends_at_sigterm
        self._lock = threading.RLock()
        self._children: dict[int, children.ChildProcess] = {}
        self._external = set(range(engines - external, engines))
        self._restarts: dict[int, list[float]] = {}
        self._exits: dict[int, Exited] = {}
        self._heard: set[int] = set()
        # No new calls; then: nothing is left to end. (What is interrupted between can be called
        # again.)
        self._closing = False
        self._closed = False
        self._ending = threading.RLock()
        self._end_reason = ""
        self._pid = os.getpid()
        self._coordinator_address: CoordinatorAddress | None = None
        self._ctx: zmq.Context[Any] = zmq.Context()
        self._words = _Mailbox()
        self._host = ""
        self._thread = threading.Thread(target=self._serve, name="fastipc-engines", daemon=True)
        self._monitor: children.Monitor | None = None
        try:
            self._open_control(host, secure)
            self.clients = [
                ClientSpec(
                    client_index=index,
                    control=self._control_path,
                    control_key=self._key,
                    request_type=_name_of(core_class.request_type),
                    output_type=_name_of(core_class.output_type),
                    host=host,
                    secure=secure,
                    max_in_flight=max_in_flight,
                )
                for index in range(clients)
            ]
            # Before threads: so that a fork is possible where it is wanted.
            coordinator = self._start_coordinator() if engines > 1 else None
            for index in range(engines):
                if index not in self._external:
                    self._start(index)
            self._thread.start()
            self._monitor = children.Monitor(self._all_children(), self._child_ended)
            if coordinator is not None:
                self._coordinator_address = coordinator.wait_ready(60.0)
                self._tell(("coordinator", None))
        except BaseException:
            self.shutdown(timeout=0.0)
            raise

    def _open_control(self, host: str, secure: bool) -> None:
        self._key = ""
        configure: Callable[[Any], None] | None = None
        if host:
            advertised, everywhere = addresses.advertised(host, "")
            self._host = ("::" if ":" in advertised else "0.0.0.0") if everywhere else advertised
            public, secret = curve_key_pair() if secure else (b"", b"")
            self._key = public.decode()
            if not secure:
                logger.warning(
                    "the channels of these engines are not encrypted: who reaches their ports can "
                    "send requests and read outputs"
                )

            def configure(socket: Any) -> None:
                keep_alive(socket)
                if secure:
                    socket.curve_server = True
                    socket.curve_publickey = public
                    socket.curve_secretkey = secret

        path = endpoint_of_any_port(self._host) if host else get_open_zmq_ipc_path()
        # An engine that takes another's place may come while the kernel still holds on to the old
        # one's connection, or a fork of it does.
        self._control = open_channel(
            self._ctx, path, zmq.ROUTER, True, configure=configure, router_handover=True
        )
        self._control_path = self._control.getsockopt_string(zmq.LAST_ENDPOINT)
        if host:
            port = addresses.split_endpoint(self._control_path)[1]
            self._control_path = addresses.endpoint(advertised, port)

    def _start_coordinator(self) -> children.ChildProcess:
        self.coordinator = started = children.start(
            _coordinator_main,
            (self._control_path, self._key, self._host),
            name="engine coordinator",
            start_method=self._start_method,
            ends_at_sigterm=self._ends_at_sigterm,
            prepare=clean_up_when_orphaned,
        )
        return started

    def _start(self, index: int) -> None:
        self._children[index] = children.start(
            _engine_main,
            (
                self._core_class,
                self._config,
                index,
                self._control_path,
                self._key,
                self._window,
            ),
            name=f"engine {index}",
            start_method=self._start_method,
            env=self._env,
            ends_at_sigterm=self._ends_at_sigterm,
            prepare=clean_up_when_orphaned,
        )

    def _all_children(self) -> list[children.ChildProcess]:
        engines = list(self._children.values())
        return engines if self.coordinator is None else [self.coordinator, *engines]

    # -- for the user ------------------------------------------------------------------------------

    @property
    def processes(self) -> dict[int, children.ChildProcess]:
        """The engines' processes by index."""
        with self._lock:
            return dict(self._children)

    @property
    def control(self) -> tuple[str, str]:
        """(address, key) at which ``run_engine`` finds this group."""
        return self._control_path, self._key

    def add_engine(self) -> int:
        """Start one more engine, and return its index at once. Front ends send to it as soon as it
        is ready."""
        with self._lock:
            self._check_open()
            assert self._monitor is not None
            if self.coordinator is None:
                coordinator = self._start_coordinator()
                self._monitor.add(coordinator)
                self._coordinator_address = coordinator.wait_ready(60.0)
                self._tell(("coordinator", None))
            index = self.engines
            self._start(index)
            self.engines += 1
            self._monitor.add(self._children[index])
        self._tell(("joined", Joined(index)))
        return index

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until every engine that was launched here has made its core.

        Raises:
            What a core's ``__init__`` raised, with the traceback there as ``__cause__``.
            NotReady: a timeout, which names the engines still missing.
            ChildDied: an engine ended before.
        """
        self._check_open()
        children.wait_all_ready((child for _, child in sorted(self.processes.items())), timeout)

    def shutdown(self, timeout: float = 10.0) -> None:
        """End the engines: they are told, and have ``timeout`` seconds; then SIGTERM, then SIGKILL.
        Requests under way fail with EngineDeadError. Idempotent; a call that was interrupted can be
        repeated. While one runs, one of another thread returns at once."""
        if os.getpid() != self._pid or not self._ending.acquire(blocking=False):
            return
        try:
            if not self._closed:
                self._shut_down(timeout)
                self._closed = True
        finally:
            self._ending.release()

    def _shut_down(self, timeout: float) -> None:
        with self._lock:
            self._closing = True
        if self._monitor is not None:
            self._monitor.stop()
        for child in self._all_children():
            child.expected = True
        for child in self._children.values():
            if child.pid not in self._heard:  # still making its core: it hears signals only
                child.terminate()
        if self._thread.ident is not None:
            self._tell(("end", None))
        else:
            timeout = 0.0
        children.stop(self._all_children(), graceful=timeout)
        if self._thread.ident is not None:
            self._tell(("stop", None))
            self._thread.join()
        if hasattr(self, "_control"):
            self._control.close(linger=500)
        self._words.close()
        self._ctx.term()
        remove_orphaned_directories()

    close = shutdown

    def __enter__(self) -> EngineGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and os.getpid() == self._pid:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
            self.shutdown(timeout=0.0)

    def __repr__(self) -> str:
        return f"<EngineGroup of {self.engines} {self._core_class.__name__}>"

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise IPCError(
                "these engines are of the process that launched them: give this one an element of "
                "`clients`"
            )
        if self._closing:
            raise Closed("the engines were shut down")

    # -- the thread that owns the control socket ---------------------------------------------------

    def _tell(self, what: tuple[str, Any]) -> None:
        self._words.put(what)

    def _child_ended(self, child: children.ChildProcess) -> None:
        """Called by the monitor's thread."""
        if self._closing:
            return
        if self.coordinator is not None and child is self.coordinator:
            reason = f"the engine coordinator (pid {child.pid}) {child.describe_exit()}"
            if self._core_class.lockstep:
                logger.error("%s: the engines can't step together without it, and end", reason)
                self._end_reason = reason
                self._tell(("end", reason))
            else:
                logger.error("%s: front ends choose engines by their own counts", reason)
                self._tell(("uncoordinated", Uncoordinated()))
            return
        index = next((i for i, c in self.processes.items() if c is child), None)
        if index is None:
            return
        how = child.describe_exit()
        logger.error("engine %d (pid %d) %s", index, child.pid, how)
        if child.exitcode and child.exitcode > 0:
            try:
                child.wait_ready(0)
            except IPCError:
                pass
            except Exception as error:  # what the core raised while it was made
                how = f"{how}: {type(error).__name__}: {failures.text(error)}"
        if self._end_reason:
            how = f"{how}, as {self._end_reason}"
        again = self._restart and not self._end_reason and self._may_restart(index)
        exited = Exited(index, how, child.exitcode, final=not again, pid=child.pid)
        with self._lock:
            self._exits[index] = exited
        self._tell(("exited", exited))
        if self._on_failure is not None:
            try:
                self._on_failure(index, how)
            except Exception:
                logger.exception("on_failure failed")
        if again:
            self._start_again(index, exited)

    def _start_again(self, index: int, exited: Exited) -> None:
        children.stop([self._children[index]], graceful=0.0)
        try:
            with self._lock:
                if self._closing:
                    return
                self._start(index)
                assert self._monitor is not None
                self._monitor.add(self._children[index])
        except Exception as error:  # no process, no memory: now is not the time to wait for some
            why = f"{type(error).__name__}: {failures.text(error)}"
            how = f"{exited.reason}, and can't be started again: {why}"
            logger.error("engine %d %s", index, how)
            exited = Exited(index, how, exited.exitcode, final=True, pid=exited.pid)
            with self._lock:
                self._exits[index] = exited
            self._tell(("exited", exited))
            return
        logger.warning("engine %d is started again", index)
        self._tell(("joined", Joined(index)))

    def _may_restart(self, index: int) -> bool:
        now = time.monotonic()
        recent = [t for t in self._restarts.get(index, []) if now - t < 60.0]
        if len(recent) >= RESTARTS:
            logger.error("engine %d has ended %d times in a minute: given up", index, len(recent))
            return False
        self._restarts[index] = [*recent, now]
        return True

    def _serve(self) -> None:
        engines: dict[bytes, int] = {}
        front_ends: dict[int, tuple[bytes, FrontEnd]] = {}
        others: set[bytes] = set()
        unconnected: set[bytes] = set()
        ending: Ended | None = None
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._words.fd, zmq.POLLIN)

        def welcome() -> Welcome:
            return Welcome(
                list(range(self.engines)),
                [where for _, where in front_ends.values()],
                self._coordinator_address,
            )

        def send(to: bytes, message: Control) -> None:
            try:
                self._control.send_multipart([to, encode_control(message)], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise
                engines.pop(to, None)
                others.discard(to)

        def send_all(message: Control) -> None:
            for to in [*engines, *others, *(who for who, _ in front_ends.values())]:
                send(to, message)

        def take(who: bytes, hello: Hello) -> None:
            if hello.protocol != PROTOCOL:
                text = f"this group speaks version {PROTOCOL}, not {hello.protocol}"
                send(who, Welcome([], [], None, refused=text))
            elif hello.engine is not None:
                engines[who] = hello.engine
                unconnected.discard(who)
                self._heard.add(hello.pid)
                send(who, ending or welcome())
            elif hello.front_end is not None:
                index = hello.front_end.index
                if not 0 <= index < len(self.clients):
                    text = f"there is no front end {index}: clients={len(self.clients)}"
                    send(who, Welcome([], [], None, refused=text))
                    return
                front_ends[index] = (who, hello.front_end)
                send(who, welcome())
                if ending is not None:
                    send(who, ending)
                    return
                with self._lock:
                    exits = list(self._exits.values())
                for exited in exits:
                    if exited.final:
                        send(who, exited)
                for engine in list(engines):
                    send(engine, welcome())
            else:
                others.add(who)
                if ending is not None:
                    send(who, ending)

        def probe() -> None:
            for who, index in engines.items():
                if index not in self._external:
                    continue
                try:  # (an engine that knows all this does nothing)
                    self._control.send_multipart([who, encode_control(welcome())], zmq.NOBLOCK)
                except zmq.ZMQError as error:
                    if error.errno != zmq.EHOSTUNREACH or who in unconnected:
                        continue
                    unconnected.add(who)
                    how = "is not connected any more"
                    logger.warning("engine %d %s", index, how)
                    # Front ends see for themselves; and it may come back.
                    for other in list(others):
                        send(other, Exited(index, how, None, final=False, pid=0))
                else:
                    unconnected.discard(who)

        every = PROBE_SECONDS if self._external and self._core_class.lockstep else None
        probed = time.monotonic()

        def obey(what: str, item: Any) -> None:
            if ending is not None and what == "end":
                send_all(ending)
            elif what == "coordinator":
                for to in [*engines, *(who for who, _ in front_ends.values())]:
                    send(to, welcome())
            else:
                send_all(item)

        while True:
            ready = dict(poller.poll(None if every is None else round(every * 1000)))
            if every is not None and time.monotonic() - probed >= every:
                probed = time.monotonic()
                try:
                    probe()
                except Exception:
                    logger.exception("probing the engines that are elsewhere failed")
            if self._words.fd in ready:
                for what, item in self._words.take():
                    if what == "stop":
                        return
                    if what == "end":
                        ending = Ended(item or "")
                    # Without this thread everybody would wait for ever: it outlives a failure.
                    try:
                        obey(what, item)
                    except Exception:
                        logger.exception("telling engines and front ends (%s) failed", what)
            if self._control in ready:
                while True:
                    try:
                        frames = self._control.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        break
                    try:
                        message = decode_control(frames[1])
                    except (msgspec.MsgspecError, IndexError) as error:
                        logger.warning("a bad message at the control socket: %s", error)
                        continue
                    except Exception:
                        logger.exception("a message at the control socket that can't be read")
                        continue
                    if isinstance(message, Hello):
                        try:
                            take(frames[0], message)
                        except Exception:
                            logger.exception("welcoming %r failed", message)


class _Mailbox:
    """Words for a thread that sleeps on descriptors. Thread safe."""

    def __init__(self) -> None:
        self._wake = Wake()
        self.fd = self._wake.fd
        self._words: deque[tuple[str, Any]] = deque()

    def put(self, word: tuple[str, Any]) -> None:
        self._words.append(word)
        self._wake.set()

    def take(self) -> Iterator[tuple[str, Any]]:
        self._wake.clear()
        while self._words:
            yield self._words.popleft()

    def close(self) -> None:
        self._wake.close()


def launch(
    core_class: type[EngineCore],
    config: Any = None,
    *,
    engines: int = 1,
    clients: int = 1,
    start_method: str | None = None,
    host: str = "",
    secure: bool = True,
    restart: bool = False,
    max_in_flight: int = 4096,
    window: int = WINDOW_BYTES,
    external: int = 0,
    on_failure: Callable[[int, str], object] | None = None,
    env: dict[str, str] | None = None,
    ends_at_sigterm: bool | None = None,
) -> EngineGroup:
    """Start engines, each in a process of its own, and return at once: front ends, and
    ``wait_until_ready``, wait for them.

    Args:
        core_class: a subclass of EngineCore; importable by the engines unless they are forked.
        config: handed to each core; pickled unless they are forked.
        engines: how many; with more than one there is a coordinator.
        clients: how many front ends there may be.
        start_method: "fork", "spawn" or "forkserver"; None: see children.choose_start_method.
        host: an address of this host for TCP, so that front ends and engines may be on others; ""
            for ipc sockets in a private directory.
        secure: encrypt and authenticate TCP (CURVE).
        restart: start an engine that ended again, at most 5 times a minute. Requests that it had
            fail all the same.
        max_in_flight: requests that each front end may have under way.
        window: bytes of outputs that may be on the way to a front end, and as many that wait.
        external: how many of the engines (the last ones) are not started here, but elsewhere with
            ``run_engine(..., control=group.control[0], control_key=group.control[1])``.
        on_failure: called as on_failure(index, how) in a thread when an engine ended unasked.
        env: environment variables for the engines.
        ends_at_sigterm: False: a SIGTERM that isn't from this process, but was sent to all
            processes at once by a service manager, say, ends neither the engines nor what they
            start with fastipc (workers); they end by ``shutdown``, or when this process does. See
            processes.start.

    Raises TypeError when the class lacks something, and as children.start.
    """
    return EngineGroup(
        core_class,
        config,
        engines=engines,
        clients=clients,
        start_method=start_method,
        host=host,
        secure=secure,
        restart=restart,
        max_in_flight=max_in_flight,
        window=window,
        external=external,
        on_failure=on_failure,
        env=env,
        ends_at_sigterm=ends_at_sigterm,
    )
