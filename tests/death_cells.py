"""Runs cells of the death matrix through Python, each process spawned: a script for
test_death_pairs.py, that runs it on the build with test hooks.

argv[1]: a JSON list of cells. Prints a line of JSON for each, with what was seen; the first thing
that is wrong ends it with a traceback. The survivors live through all cells; who dies is spawned
anew for each.
"""

# ruff: noqa: PT017 (a script: no pytest here)
from __future__ import annotations

import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import fastipc
from fastipc import Closed, Empty, Full, MessageQueue, PeerDied, ShmRingBuffer
from fastipc.hostinfo import host_name

FRESH_MESSAGES = 1000
AFTER_JOINING = 20
POINT = "FIPC_TEST_POINT"

# Bytes of a message: in a slot, in a chunk, through several chunks.
SIZES = {"slot": 10, "chunk": 3000, "fragments": 9000}
OPTIONS = {"inline_bytes": 512, "max_chunk_bytes": 4096, "max_chunks": 4, "slots": 8}


def make(serializer: str, size: int, number: int) -> Any:
    """Message number so-and-so: whoever has it can tell whether it is whole."""
    if serializer == "raw":
        return number.to_bytes(8, "little") + bytes([number % 251]) * size
    body = np.full(size, number % 251, np.uint8)
    return [number, body] if serializer == "msgpack" else {"number": number, "body": body}


def number_of(serializer: str, size: int, message: Any) -> int:
    """The number of a message that is whole; anything else is corrupt."""
    if serializer == "raw":
        number = int.from_bytes(message[:8], "little")
        assert message[8:] == bytes([number % 251]) * size, "a corrupt message"
        return number
    if serializer == "msgpack":
        number, body = message
    else:
        number, body = message["number"], message["body"]
    assert body.shape == (size,)
    assert (body == number % 251).all(), "a corrupt message"
    return number


def attach(handle: fastipc.Handle, rank: int, serializer: str) -> MessageQueue:
    if serializer == "msgpack":
        return MessageQueue.create_from_handle(handle, rank, type=tuple[int, np.ndarray])
    return MessageQueue.create_from_handle(handle, rank)


# ---- who lives on -------------------------------------------------------------------------------


def survivor(connection: Connection) -> None:
    while True:
        call, *args = connection.recv()
        if call is None:
            return
        connection.send(("done", globals()[call](connection, *args)))


def read_until_the_end(connection, handle, rank, serializer, size, busy) -> dict[str, Any]:
    with attach(handle, rank, serializer) as reader:
        connection.send(("attached", None))
        numbers: list[int] = []
        while True:
            try:
                message = reader.dequeue(timeout=0 if busy else None)
            except Empty:
                time.sleep(0)
                continue
            except (PeerDied, Closed) as error:
                ended = type(error).__name__
                pid = getattr(error, "pid", None)
                assert not isinstance(error, PeerDied) or error.rank is None
                break
            numbers.append(number_of(serializer, size, message))
        told = time.monotonic()
        try:
            reader.dequeue(timeout=0)
        except (PeerDied, Closed) as error:
            assert type(error).__name__ == ended
    first = numbers[0] if numbers else 0
    assert numbers == list(range(first, first + len(numbers))), "lost, or twice, or out of order"
    return {"first": first, "n": len(numbers), "ended": ended, "pid": pid, "told": told}


def read_buffers_until_the_end(connection, handle, rank, size) -> dict[str, Any]:
    with ShmRingBuffer.create_from_handle(handle, rank) as reader:
        connection.send(("attached", None))
        n = 0
        while True:
            try:
                with reader.acquire_read() as view:
                    assert bytes(view) == bytes([n % 251]) * size
                    n += 1
            except PeerDied as error:
                return {
                    "first": min(n, 1),
                    "n": n,
                    "ended": "PeerDied",
                    "pid": error.pid,
                    "told": time.monotonic(),
                }


def read_fresh(connection, handle, rank) -> int:
    with MessageQueue.create_from_handle(handle, rank) as reader:
        assert [reader.dequeue() for _ in range(FRESH_MESSAGES)] == list(range(FRESH_MESSAGES))
        try:
            reader.dequeue()
        except Closed:
            return FRESH_MESSAGES
    raise AssertionError("more than was sent")


def write_on(connection, n, serializer, size, busy, options, rank) -> dict[str, Any]:
    """A writer that lives on: until told that the replacement is there, and for a while after."""
    writer = MessageQueue(n, n, serializer=serializer, **options)
    seen: dict[str, Any] = {"deaths": [], "told": []}
    evicted = False
    with writer:
        connection.send(("handle", writer.export_handle()))
        assert connection.recv() == "go"
        number = 0
        joined = False
        shared = None
        left = AFTER_JOINING
        while left:
            if not joined and connection.poll():
                assert connection.recv() == "joined"
                joined = True
                shared = number + 1
            try:
                writer.enqueue(make(serializer, size, number + 1), timeout=0.02)
            except Full:
                continue
            except Closed:  # nobody is left, so far
                assert n == 1
                time.sleep(0.005)
                continue
            except PeerDied as error:
                assert options["on_reader_death"] == "raise"
                assert error.rank == rank
                assert error.host == host_name()
                seen["deaths"].append(error.pid)
                seen["told"].append(time.monotonic())
                try:
                    writer.enqueue(make(serializer, size, number + 1), timeout=0)
                    raise AssertionError("it was forgotten")
                except PeerDied as again:
                    assert again.pid == error.pid
                writer.evict(rank)
                connection.send(("told", None))
                continue
            finally:
                if options["on_reader_death"] == "evict" and not evicted:
                    peer = {p["rank"]: p for p in writer.stats()["peers"]}[rank]
                    if peer["state"] == "dead":
                        evicted = True
                        seen["deaths"].append(peer["pid"])
                        seen["told"].append(time.monotonic())
                        connection.send(("told", None))
            number += 1
            left -= joined
            if busy:
                time.sleep(0.001)
    seen.update(sent=number, shared=shared)
    return seen


# ---- who dies -----------------------------------------------------------------------------------


def dying_reader(handle, rank, serializer, closes) -> None:
    reader = attach(handle, rank, serializer)
    n = 0
    while not closes or n < 2:
        reader.dequeue()
        n += 1
    reader.close()


def dying_writer(connection, n, serializer, size, options, closes, lends) -> None:
    if lends:
        ring = ShmRingBuffer(n, max_chunk_bytes=4096, max_chunks=4, slots=8)
        connection.send(ring.export_handle())
        connection.recv()
        for number in itertools.count():
            with ring.acquire_write(size) as view:
                view[:] = bytes([number % 251]) * size
    writer = MessageQueue(n, n, serializer=serializer, **options)
    connection.send(writer.export_handle())
    connection.recv()
    number = 0
    while not closes or number < 10:
        try:
            writer.enqueue(make(serializer, size, number + 1))
        except PeerDied:
            continue
        except Closed:
            assert n == 1
            time.sleep(0.005)
            continue
        number += 1
        connection.send(number)
    writer.close()


def making_writer(shm_dir) -> None:
    MessageQueue(1, 1, shm_dir=shm_dir, **OPTIONS)


def idle_reader(connection, handle, rank, serializer) -> None:
    with attach(handle, rank, serializer):
        connection.send("attached")
        time.sleep(1000)


# ---- cells --------------------------------------------------------------------------------------


class Crew:
    """The survivors, and how to start somebody who dies."""

    def __init__(self, n: int) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.members = []
        for _ in range(n):
            here, there = self.context.Pipe()
            process = self.context.Process(target=survivor, args=(there,), daemon=True)
            process.start()
            there.close()
            self.members.append((process, here))

    def call(self, i: int, *what: Any) -> None:
        self.members[i][1].send(what)

    def hear(self, i: int, expected: str) -> Any:
        kind, value = self.members[i][1].recv()
        assert kind == expected, (kind, value)
        return value

    def start(self, spec: str, target: Any, *args: Any) -> Any:
        if spec:
            os.environ[POINT] = spec
        try:
            process = self.context.Process(target=target, args=args)
            process.start()
        finally:
            os.environ.pop(POINT, None)
        return process

    def end(self) -> None:
        for process, connection in self.members:
            connection.send((None,))
            process.join()
            assert process.exitcode == 0


def died(process: Any) -> float:
    process.join()
    assert process.exitcode == -9, f"exit code {process.exitcode}"
    return time.monotonic()


def a_reader_dies(crew: Crew, cell: dict[str, Any]) -> dict[str, Any]:
    n, serializer, size = cell["readers"], cell["serializer"], SIZES[cell["size"]]
    point, outcome, rank = cell["point"], cell["outcome"], cell["readers"] // 2
    options = {**OPTIONS, "on_reader_death": cell["on_reader_death"]}
    if cell["busy"]:
        options.update(slots=4096, max_chunks=200)
    writer = n  # the crew's number of the one who writes
    crew.call(writer, "write_on", n, serializer, size, cell["busy"], options, rank)
    handle = crew.hear(writer, "handle")
    others = [i for i in range(n) if i != rank]
    for i in others:
        crew.call(i, "read_until_the_end", handle, i, serializer, size, cell["busy"])
        crew.hear(i, "attached")
    spec = f"{point}:{cell['count']}:kill"
    victim = crew.start(spec, dying_reader, handle, rank, serializer, cell["closes"])
    crew.members[writer][1].send("go")
    when = died(victim)
    if outcome == "DEAD":
        crew.hear(writer, "told")
    crew.call(rank, "read_until_the_end", handle, rank, serializer, size, cell["busy"])
    crew.hear(rank, "attached")
    crew.members[writer][1].send("joined")
    wrote = crew.hear(writer, "done")
    assert wrote["deaths"] == ([victim.pid] if outcome == "DEAD" else [])
    messages = 0
    for i in range(n):
        read = crew.hear(i, "done")
        assert read["ended"] == "Closed"
        assert read["first"] + read["n"] - 1 == wrote["sent"]
        if i != rank or outcome == "FREE_AGAIN":
            assert read["first"] == 1
        else:
            assert read["first"] <= wrote["shared"]
        messages += read["n"]
    return {"messages": messages, "told_after": wrote["told"][0] - when if wrote["told"] else None}


def a_writer_dies(crew: Crew, cell: dict[str, Any]) -> dict[str, Any]:
    n, serializer, size = cell["readers"], cell["serializer"], SIZES[cell["size"]]
    point, outcome, rank = cell["point"], cell["outcome"], cell["readers"] - 1
    options = {**OPTIONS, "on_reader_death": cell["on_reader_death"]}
    mourns, lends = cell["mourns"], point == "loan-lent"
    here, there = crew.context.Pipe()
    # armed by the time that it has its readers: nothing before that passes these points
    spec = f"{point}:{cell['count']}:kill"
    victim = crew.start(
        spec, dying_writer, there, n, serializer, size, options, cell["closes"], lends
    )
    there.close()
    handle = here.recv()
    readers = [i for i in range(n) if not (mourns and i == rank)]
    for i in readers:
        if lends:
            crew.call(i, "read_buffers_until_the_end", handle, i, size)
        else:
            crew.call(i, "read_until_the_end", handle, i, serializer, size, cell["busy"])
        crew.hear(i, "attached")
    if mourns:
        mine, theirs = crew.context.Pipe()
        doomed = crew.start("", idle_reader, theirs, handle, rank, serializer)
        theirs.close()
        assert mine.recv() == "attached"
        doomed.kill()
        died(doomed)
        mine.close()
    here.send("go")
    if cell["replaces"]:  # once the writer has evicted: it goes on then, and is joined
        crew.call(rank, "read_until_the_end", handle, rank, serializer, size, cell["busy"])
        crew.hear(rank, "attached")
    sent = 0
    with contextlib.suppress(EOFError):
        while True:
            sent = here.recv()
    here.close()
    when = died(victim)
    messages = 0
    told_after = None
    lasts = set()
    for i in sorted({*readers, *([rank] if cell["replaces"] else [])}):
        read = crew.hear(i, "done")
        assert read["ended"] == ("Closed" if outcome == "CLOSED" else "PeerDied")
        assert outcome == "CLOSED" or read["pid"] == victim.pid
        messages += read["n"]
        if i in readers:
            lasts.add(read["first"] + read["n"] - 1 if read["n"] else 0)
        told_after = max(told_after or 0, read["told"] - when)
    assert len(lasts) <= 1
    if not lends and lasts:
        # (what it said of the last one may have died with it)
        assert sent <= lasts.pop() <= sent + 1
    return {"messages": messages, "told_after": told_after if outcome == "DRAINED" else None}


def a_maker_dies(crew: Crew, cell: dict[str, Any]) -> dict[str, Any]:
    directory = tempfile.mkdtemp(prefix="fastipc-cells-", dir="/dev/shm")
    try:
        if cell["point"].startswith("sweep"):
            died(crew.start("create-linked:1:kill", making_writer, directory))
            assert len(os.listdir(directory)) == 1
        died(crew.start(f"{cell['point']}:1:kill", making_writer, directory))
        assert len(os.listdir(directory)) == cell["left"]
        with MessageQueue(1, 1, shm_dir=directory, **OPTIONS):
            assert len(os.listdir(directory)) == 1
        assert os.listdir(directory) == []
    finally:
        shutil.rmtree(directory)
    return {"messages": 0, "told_after": None}


def run(crew: Crew, cell: dict[str, Any]) -> dict[str, Any]:
    fds = len(os.listdir("/proc/self/fd"))
    seen = globals()[cell["what"]](crew, cell)
    n = len(crew.members)
    with MessageQueue(n, n) as fresh:
        for i in range(n):
            crew.call(i, "read_fresh", fresh.export_handle(), i)
        for number in range(FRESH_MESSAGES):
            fresh.enqueue(number)
        fresh.wait_until_ready()
    for i in range(n):
        assert crew.hear(i, "done") == FRESH_MESSAGES
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= fds
    return seen


def main() -> None:
    crew = Crew(5)
    for cell in json.loads(sys.argv[1]):
        print(json.dumps({"begins": cell}), flush=True)
        print(json.dumps({"cell": cell, **run(crew, cell)}), flush=True)
    crew.end()


if __name__ == "__main__":
    main()
