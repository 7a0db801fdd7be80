"""What the tests of remote readers run in child processes."""

from __future__ import annotations

import os
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from workers import Pattern

import fastipc
from fastipc import Handle, MessageQueue


def send_pattern(
    connection: Connection, seed: int, largest: int, n: int, options: dict[str, Any]
) -> dict[str, Any]:
    """A writer: reports its handle, sends n pattern messages, and returns its statistics."""
    pattern = Pattern(seed, largest)
    with MessageQueue(**options) as queue:
        connection.send(queue.export_handle())
        queue.wait_until_ready(60)
        for i in range(n):
            queue.enqueue(pattern.make(i))
        stats = queue.stats()
    return stats


def overwrite_at_once(connection: Connection, n: int, options: dict[str, Any]) -> None:
    """Sends one array n times, and changes all of it right after each time."""
    array = np.empty(2 << 20, np.uint8)
    with MessageQueue(**options) as queue:
        connection.send(queue.export_handle())
        queue.wait_until_ready(60)
        for i in range(n):
            array[:] = i % 251
            queue.enqueue(array)
            array[:] = 255
        connection.send("sent")
        connection.recv()


def read_slowly(connection: Connection, handle: Handle, rank: int, pause: float) -> int:
    """Checks what overwrite_at_once sends."""
    with MessageQueue.create_from_handle(handle, rank) as queue:
        n = 0
        for array in queue:
            assert array.shape == (2 << 20,)
            assert (array == n % 251).all(), f"message {n} has bytes of a later one"
            n += 1
            time.sleep(pause)
    return n


def bounded_writer(connection: Connection, options: dict[str, Any]) -> int:
    """Sends 1 MiB arrays, each time it is told to, until there is no room for a while; reports
    how many went, and what its memory came to."""
    with MessageQueue(**options) as queue:
        connection.send(queue.export_handle())
        queue.wait_until_ready(60)
        n = 0
        array = np.zeros(1 << 20, np.uint8)
        while (order := connection.recv()) is not None:
            if order == "fill":
                try:
                    while True:
                        array[:8] = np.frombuffer(n.to_bytes(8, "little"), np.uint8)
                        queue.enqueue(array, timeout=0.5)
                        n += 1
                except fastipc.Full as error:
                    connection.send((n, str(error)))
            else:
                array[:8] = np.frombuffer(n.to_bytes(8, "little"), np.uint8)
                queue.enqueue(array)
                n += 1
                connection.send("sent")
    return n


def numbers(connection: Connection, handle: Handle, rank: int) -> int:
    """Reads what bounded_writer sends; the numbers must be without a gap."""
    with MessageQueue.create_from_handle(handle, rank) as queue:
        queue.wait_until_ready(60)
        connection.send("attached")
        n = 0
        for array in queue:
            assert int.from_bytes(array[:8].tobytes(), "little") == n
            n += 1
    return n


def create_many(connection: Connection, times: int, which: int) -> int:
    """Makes that many remote queues, each beside the one before."""
    connection.send("here")
    connection.recv()
    kept: list[MessageQueue] = []
    try:
        for _ in range(times):
            kept.append(MessageQueue(1, 0, connect_ip="127.0.0.1"))
            if len(kept) > 2:
                kept.pop(0).close()
    finally:
        for queue in kept:
            queue.close()
    return times


def echo_reader(connection: Connection, handle: Handle, rank: int) -> str:
    """Attaches, and reports what it reads or how it ends."""
    with MessageQueue.create_from_handle(handle, rank) as queue:
        queue.wait_until_ready(60)
        connection.send("attached")
        while True:
            try:
                connection.send(queue.dequeue())
            except fastipc.IPCError as error:
                return f"{type(error).__name__}: {error}"


def echo_writer(connection: Connection, options: dict[str, Any]) -> None:
    """Reports its handle, waits for its readers, and sends what it is told."""
    with MessageQueue(**options) as queue:
        connection.send(queue.export_handle())
        queue.wait_until_ready(60)
        connection.send("ready")
        while (message := connection.recv()) is not None:
            queue.enqueue(message)
            connection.send("sent")


def listening() -> set[int]:
    """The TCP ports that this process listens on."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                if fields[9] in inodes and fields[3] == "0A":
                    found.add(int(fields[1].rsplit(":", 1)[1], 16))
    return found


def sockets_of_local_queue(connection: Connection) -> tuple[list[int], list[str]]:
    """What a process that only has a local queue listens on, and which sockets it has."""
    import sys

    before = {os.readlink(f"/proc/self/fd/{n}") for n in _descriptors()}
    with (
        MessageQueue(1, 1) as queue,
        MessageQueue.create_from_handle(queue.export_handle(), 0) as reader,
    ):
        queue.wait_until_ready(10)
        queue.enqueue("x")
        assert reader.dequeue(10) == "x"
        now = {os.readlink(f"/proc/self/fd/{n}") for n in _descriptors()}
        assert "zmq" not in sys.modules
        return sorted(listening()), sorted(t for t in now - before if t.startswith("socket:"))


def _descriptors() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{name}"):
            found.append(name)
    return found


def tell_address(connection: Connection) -> str:
    return socket.gethostname()
