"""Hosts for the tests of remote readers: network namespaces joined by a bridge, child processes
inside of them, and a proxy that delays, stalls and tears connections."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import select
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from support import Member, Team

from fastipc import Handle

CLONE_NEWNET = 0x40000000


def _ip(*words: str) -> None:
    result = subprocess.run(
        ["ip", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30
    )
    if result.returncode:
        raise OSError(f"ip {' '.join(words)}: {result.stderr.strip()}")


class Network:
    """Hosts w, a and b: w at 10.77.0.1 and fd77::1, a at .2 and ::2, b at .3 and ::3. The link
    of w is called br0, that of the others eth0; each has a link-local IPv6 address, too."""

    hosts = ("w", "a", "b")

    def __init__(self) -> None:
        self._prefix = f"fipc{os.getpid()}"
        self._made: list[str] = []
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def namespace(self, host: str) -> str:
        return f"{self._prefix}{host}"

    def _make(self) -> None:
        for host in self.hosts:
            _ip("netns", "add", self.namespace(host))
            self._made.append(host)
            self._in(host, "link", "set", "lo", "up")
        self._in("w", "link", "add", "br0", "type", "bridge")
        for i, host in enumerate(self.hosts):
            link = "br0"
            if host != "w":
                link = "eth0"
                there = f"to-{host}"
                self._in(
                    "w", "link", "add", there, "type", "veth", "peer", "name", link,
                    "netns", self.namespace(host),
                )  # fmt: skip
                self._in("w", "link", "set", there, "master", "br0", "up")
            self._in(host, "addr", "add", f"10.77.0.{i + 1}/24", "dev", link)
            self._in(host, "-6", "addr", "add", f"fd77::{i + 1}/64", "dev", link, "nodad")
            self._in(host, "link", "set", link, "addrgenmode", "none")
            self._in(host, "link", "set", link, "up")
            self._in(host, "-6", "addr", "add", f"fe80::{i + 1}/64", "dev", link, "nodad")

    def _in(self, host: str, *words: str) -> None:
        _ip("-n", self.namespace(host), *words)

    def close(self) -> None:
        for host in self._made:
            _ip("netns", "del", self.namespace(host))
        self._made.clear()


def enter(namespace: str) -> None:
    """Moves this process (its one thread) to another network namespace."""
    fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(fd, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(fd)


def made_or_skipped() -> Iterator[Network]:
    """For a fixture."""
    try:
        made = Network()
    except OSError as error:
        pytest.skip(f"network namespaces can't be made here: {error}")
    yield made
    made.close()


def _there(connection: Any, namespace: str, target: Callable[..., Any], args: tuple) -> Any:
    enter(namespace)
    return target(connection, *args)


class Hosts(Team):
    """A team whose members are on hosts of a network."""

    def __init__(self, network: Network) -> None:
        super().__init__("spawn")
        self._network = network

    def on(self, host: str, target: Callable[..., Any], *args: Any) -> Member:
        return self.start(_there, self._network.namespace(host), target, args)


# ---- a bad line --------------------------------------------------------------------------------


class BadLine:
    """A TCP proxy, in threads of this process.

    Args:
        target: (host, port) that connections are passed on to.
        delay: seconds that every byte is kept for, each way.
        tear_bytes: the mean number of bytes after which a connection is torn, at a random byte.
        stall_every, stall_seconds: the mean time between two stalls of everything, and how long
            one lasts, at most.
    """

    def __init__(
        self,
        target: tuple[str, int],
        *,
        host: str = "127.0.0.1",
        delay: float = 0.0,
        tear_bytes: float = 0.0,
        stall_every: float = 0.0,
        stall_seconds: float = 0.0,
        seed: int = 1,
    ) -> None:
        self._target = target
        self._delay = delay
        self._tear_bytes = tear_bytes
        self._stall = (stall_every, stall_seconds)
        self._random = random.Random(seed)
        self._stalled_until = 0.0
        self._next_stall = self._after_stall()
        self._ended = threading.Event()
        self.paused = threading.Event()  # set: nothing passes
        self.failures: list[OSError] = []  # of accepting
        self.accepted = 0
        self.tears = 0
        self.stalls = 0
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=64)
        self.address = (host, self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _after_stall(self) -> float:
        every, seconds = self._stall
        if not every:
            return float("inf")
        return time.monotonic() + seconds + self._random.expovariate(1 / every)

    def handle(self, handle: Handle) -> Handle:
        """The same handle, by way of this proxy."""
        host, port = self.address
        where = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        return msgspec.structs.replace(handle, address=where)

    def tear(self) -> None:
        """Tears every connection."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            for end in pair:
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError as error:
                if self._ended.is_set():
                    return
                self.failures.append(error)
                time.sleep(0.01)
                continue
            self.accepted += 1
            try:
                far = socket.create_connection(self._target, timeout=5)
            except OSError:
                near.close()
                continue
            with self._lock:
                limit = self._random.expovariate(1 / self._tear_bytes) if self._tear_bytes else 0
            thread = threading.Thread(target=self._carry, args=(near, far, limit), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _hold(self) -> bool:
        """Whether nothing may pass now."""
        now = time.monotonic()
        if self.paused.is_set():
            return True
        with self._lock:
            if now >= self._next_stall:
                self.stalls += 1
                self._stalled_until = now + self._random.uniform(0.5, 1) * self._stall[1]
                self._next_stall = self._after_stall()
            return now < self._stalled_until

    def _carry(self, near: socket.socket, far: socket.socket, limit: float) -> None:
        pair = (near, far)
        with self._lock:
            self._pairs.add(pair)
        for end in pair:
            end.setblocking(False)
        # What is on its way from each end to the other: (when it may arrive, bytes).
        ways = [(near, far, deque()), (far, near, deque())]
        held = [0, 0]
        passed = 0
        try:
            while not self._ended.is_set():
                now = time.monotonic()
                reads = [w[0] for w, n in zip(ways, held, strict=True) if n < 4 << 20]
                due = [w for w in ways if w[2] and w[2][0][0] <= now]
                hold = self._hold()
                writes = [] if hold else [w[1] for w in due]
                pause = 0.05
                waiting = [w[2][0][0] - now for w in ways if w[2] and w[2][0][0] > now]
                if waiting and not hold:
                    pause = min(pause, max(min(waiting), 0))
                readable, writable, _ = select.select([] if hold else reads, writes, [], pause)
                for i, (source, sink, way) in enumerate(ways):
                    if source in readable:
                        data = source.recv(1 << 18)
                        if not data:
                            return
                        way.append((time.monotonic() + self._delay, data))
                        held[i] += len(data)
                    if sink in writable:
                        when, data = way[0]
                        room = len(data)
                        if limit:
                            room = min(room, max(1, int(limit) - passed))
                        sent = sink.send(data[:room])
                        passed += sent
                        held[i] -= sent
                        if sent == len(data):
                            way.popleft()
                        else:
                            way[0] = (when, data[sent:])
                        if limit and passed >= limit:
                            self.tears += 1
                            return
        except OSError:
            return
        finally:
            with self._lock:
                self._pairs.discard(pair)
            near.close()
            far.close()

    def close(self) -> None:
        self._ended.set()
        self._listener.close()
        for end in [end for pair in list(self._pairs) for end in pair]:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        # accept is only woken by a connection
        try:
            socket.create_connection(self.address, timeout=1).close()
        except OSError:
            pass
        for thread in self._threads:
            thread.join(10)

    def __enter__(self) -> BadLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def bad_line(connection: Any, target: tuple[str, int], options: dict[str, Any]) -> tuple[int, int]:
    """A proxy as a process of its own; told anything, it ends and returns (tears, stalls)."""
    with BadLine(target, **options) as line:
        connection.send(line.address)
        connection.recv()
        return line.tears, line.stalls


@contextmanager
def many(count: int, target: Callable[..., Any], *args: Any) -> Iterator[Sequence[Member]]:
    """So many processes that run the same at once."""
    with Team("spawn") as team:
        yield [team.start(target, *args, i) for i in range(count)]


def cpu_count() -> int:
    return multiprocessing.cpu_count()
