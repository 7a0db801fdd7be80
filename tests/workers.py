"""What the tests run in child processes. Importable under spawn, and quick to import."""

from __future__ import annotations

import os
import random
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from support import asleep, eventually, resident_bytes

import fastipc
from fastipc import Handle, HandleMismatch, MessageQueue

# ---- messages whose content follows from their number ------------------------------------------


class Pattern:
    """Message number i of a run: its size is log-uniform between 1 byte and `largest`, its content
    a stretch of one random array that depends on i, and its kind changes with i."""

    def __init__(self, seed: int, largest: int) -> None:
        rng = np.random.default_rng(seed)
        self._largest = largest
        # Sizes and offsets in advance: the check must cost less than the message.
        self._sizes = np.exp(rng.uniform(0, np.log(largest), 1009)).astype(np.int64)
        self._noise = rng.integers(0, 256, largest + 4096, dtype=np.uint8)

    def _stretch(self, i: int) -> np.ndarray:
        size = int(self._sizes[i % 1009])
        start = i * 7919 % 4096
        return self._noise[start : start + size]

    def make(self, i: int) -> tuple[int, Any]:
        stretch = self._stretch(i)
        kind = i % 4
        if kind == 0:
            return i, stretch
        if kind == 1:
            return i, stretch.tobytes()
        if kind == 2:
            middle = len(stretch) // 2
            return i, [stretch[:middle], str(i), stretch[middle:]]
        return i, bytearray(stretch)

    def check(self, i: int, message: Any) -> None:
        number, payload = message
        assert number == i, f"message {i} was expected, {number} came"
        stretch = self._stretch(i)
        if i % 4 == 2:
            first, text, second = payload
            assert text == str(i)
            payload = np.concatenate([first, second])
        elif i % 4:
            payload = np.frombuffer(payload, np.uint8)
        assert payload.dtype == np.uint8
        assert np.array_equal(payload, stretch), f"message {i} has the wrong bytes"


def check_all(
    connection: Connection, handle: Handle, rank: int, seed: int, largest: int, slow: bool = False
) -> int:
    """Reads until the writer closes; every message must be the next one. Returns their number."""
    pattern = Pattern(seed, largest)
    hesitate = random.Random(rank)
    with MessageQueue.create_from_handle(handle, rank) as queue:
        n = 0
        for message in queue:
            if slow and n % 10 == 0:
                time.sleep(hesitate.uniform(0, 0.005))
            pattern.check(n, message)
            n += 1
    return n


def read_awake_then_asleep(connection: Connection, handle: Handle, n: int) -> tuple[Any, int, int]:
    """Takes messages 0 to n - 1 without ever sleeping, then one more in its sleep, of which it
    tells over the connection. Returns that one, and its memory after a twentieth of the others and
    in the end."""
    early = 0
    with MessageQueue.create_from_handle(handle, 0) as queue:
        for i in range(n):
            while True:
                try:
                    message = queue.dequeue(timeout=0)
                    break
                except fastipc.Empty:
                    pass
            assert message == i
            if i == n // 20:
                early = resident_bytes()
        assert queue.stats()["sleeps"] == 0

        def tell() -> None:
            eventually(asleep(queue))
            connection.send("asleep")

        teller = threading.Thread(target=tell)
        teller.start()
        last = queue.dequeue()
        teller.join()
    return last, early, resident_bytes()


def send_all(connection: Connection, seed: int, largest: int, n: int, options: dict) -> None:
    """A writer: reports its handle, sends n pattern messages."""
    pattern = Pattern(seed, largest)
    readers = options.pop("n_reader", 1)
    with MessageQueue(readers, readers, **options) as queue:
        connection.send(queue.export_handle())
        queue.wait_until_ready()
        for i in range(n):
            queue.enqueue(pattern.make(i))


# ---- peers that do as they are told ------------------------------------------------------------


def obedient_reader(connection: Connection, handle: Handle, rank: int) -> None:
    """Attaches, then does what comes down the connection: a number is how many to read."""
    with MessageQueue.create_from_handle(handle, rank) as queue:
        connection.send("attached")
        while (n := connection.recv()) is not None:
            connection.send([queue.dequeue() for _ in range(n)])


def endless_reader(connection: Connection, handle: Handle, rank: int) -> int:
    """Reads until the writer closes, and returns how many messages there were."""
    with MessageQueue.create_from_handle(handle, rank) as queue:
        connection.send("attached")
        return sum(1 for _ in queue)


def attach_and_exit(connection: Connection, handle: Handle, rank: int) -> None:
    """Attaches and ends without close: an orderly end all the same."""
    queue = MessageQueue.create_from_handle(handle, rank)
    connection.send("attached")
    connection.recv()
    globals()["kept"] = queue


def obedient_writer(connection: Connection, options: dict) -> None:
    """Makes a queue, reports its handle, then sends what it is told to, until it gets None."""
    n = options.pop("n_reader", 1)
    with MessageQueue(n, n, **options) as queue:
        connection.send(queue.export_handle())
        while (message := connection.recv()) is not None:
            queue.enqueue(message)
            connection.send("sent")


def read_twice(connection: Connection, handles: list[Handle], rank: int, delay: float) -> list:
    """Attaches late to each of the handles, and reads one message from each."""
    time.sleep(delay)
    got = []
    for handle in handles:
        with MessageQueue.create_from_handle(handle, rank) as queue:
            got.append(queue.dequeue())
    return got


def request_response(connection: Connection, requests: Handle, options: dict) -> int:
    """Reads requests, answers each over a queue of its own; returns how many."""
    with (
        MessageQueue.create_from_handle(requests, 0) as inbox,
        MessageQueue(1, 1, **options) as out,
    ):
        connection.send(out.export_handle())
        n = 0
        for request in inbox:
            out.enqueue(("answer", request))
            n += 1
    return n


def attach_many(connection: Connection, handle: Handle, rank: int, times: int) -> None:
    for _ in range(times):
        MessageQueue.create_from_handle(handle, rank).close()


def first_message_of_each(connection: Connection, rank: int) -> int:
    """Attaches to each queue whose handle comes, and confirms its first message."""
    n = 0
    while (handle := connection.recv()) is not None:
        with MessageQueue.create_from_handle(handle, rank) as queue:
            queue.wait_until_ready()
            assert queue.dequeue() == ("first of", handle.queue_id)
        n += 1
    return n


def attempt(connection: Connection, handle: Handle, rank: int) -> str:
    """What attaching raises."""
    try:
        MessageQueue.create_from_handle(handle, rank).close()
    except fastipc.IPCError as error:
        return type(error).__name__
    return "attached"


def parent_pid(connection: Connection) -> int:
    return os.getppid()


def try_to_attach(connection: Connection, text: str) -> str:
    """What comes of it, as text."""
    try:
        MessageQueue.create_from_handle(Handle.from_str(text), 0).close()
    except HandleMismatch as error:
        return str(error)
    return "attached"
