"""Coroutines: every message is delivered once, whoever is cancelled and when."""

from __future__ import annotations

import array
import asyncio
import random
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from support import NIGHTLY, eventually

from fastipc import Closed, Empty, Full, IPCError, MessageQueue

CALLS = 10_000 if NIGHTLY else 2_000


@pytest.fixture(params=["local", "remote"])
def where(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "local":
        return {"n_reader": 1, "n_local_reader": 1}
    return {"n_reader": 1, "n_local_reader": 0, "connect_ip": "127.0.0.1"}


class Pair:
    def __init__(self, where: dict[str, Any], **options: Any) -> None:
        self.writer = MessageQueue(**where, **options)
        self.reader = MessageQueue.create_from_handle(self.writer.export_handle(), 0)
        self.writer.wait_until_ready(30)

    def __enter__(self) -> tuple[MessageQueue, MessageQueue]:
        return self.writer, self.reader

    def __exit__(self, *_: object) -> None:
        self.writer.close()
        self.reader.close()


@pytest.mark.timeout(300)
def test_half_of_the_calls_cancelled_at_random(where: dict[str, Any]) -> None:
    async def run(writer: MessageQueue, reader: MessageQueue) -> list[int]:
        rng = random.Random(4)
        got: list[int] = []
        cancelled = sent = 0

        async def send() -> None:
            nonlocal sent
            while True:
                await writer.enqueue_async(sent)
                sent += 1
                await asyncio.sleep(rng.choice([0, 0, 0.0002, 0.001]))

        sending = asyncio.create_task(send())
        for i in range(CALLS):
            call = asyncio.create_task(reader.dequeue_async())
            if i % 2:
                # before it has begun, while it waits, or just when a message comes
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.random() * 0.002)
                call.cancel()
            try:
                got.append(await call)
            except asyncio.CancelledError:
                cancelled += 1
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        # whether the last one went before it was cancelled only the reader can tell
        writer.enqueue(-1)
        while (last := await reader.dequeue_async()) != -1:
            got.append(last)
        assert cancelled > CALLS / 10
        assert len(got) in (sent, sent + 1)
        return got

    with Pair(where) as (writer, reader):
        got = asyncio.run(run(writer, reader))
    assert got == list(range(len(got)))


def test_many_coroutines_share_an_end(where: dict[str, Any]) -> None:
    async def run(writer: MessageQueue, reader: MessageQueue) -> list[int]:
        async def read() -> list[int]:
            mine = []
            while True:
                try:
                    mine.append(await reader.dequeue_async())
                except Closed:
                    return mine

        readers = [asyncio.create_task(read()) for _ in range(5)]
        for i in range(500):
            await writer.enqueue_async(i)
        while not reader.empty():
            await asyncio.sleep(0.001)
        writer.close()
        return [i for mine in await asyncio.gather(*readers) for i in mine]

    with Pair(where) as (writer, reader):
        assert sorted(asyncio.run(run(writer, reader))) == list(range(500))


def test_async_for_ends_with_the_writer(where: dict[str, Any]) -> None:
    async def run(writer: MessageQueue, reader: MessageQueue) -> list[int]:
        def send() -> None:
            for i in range(50):
                writer.enqueue(i)
                time.sleep(0.001)
            writer.close()

        thread = threading.Thread(target=send)
        thread.start()
        got = [i async for i in reader]
        thread.join()
        return got

    with Pair(where) as (writer, reader):
        assert asyncio.run(run(writer, reader)) == list(range(50))


def test_timeouts(where: dict[str, Any]) -> None:
    async def run(writer: MessageQueue, reader: MessageQueue) -> None:
        for timeout in (0, 0.01, 0.15):
            with pytest.raises(Empty):
                await reader.dequeue_async(timeout)
        for wrong in (-1, float("nan")):
            with pytest.raises(ValueError, match="timeout"):
                await reader.dequeue_async(wrong)
            with pytest.raises(ValueError, match="timeout"):
                await writer.enqueue_async(1, wrong)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.dequeue_async(), 0.05)
        for i in range(4):
            await writer.enqueue_async(i, 5)
        for timeout in (0, 0.02):
            with pytest.raises(Full):
                await writer.enqueue_async(4, timeout)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.enqueue_async(4), 0.05)
        waiting = asyncio.create_task(writer.enqueue_async(4))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        assert [await reader.dequeue_async() for _ in range(5)] == [0, 1, 2, 3, 4]
        await waiting
        with pytest.raises(IPCError):
            await reader.enqueue_async(1)
        with pytest.raises(IPCError):
            await writer.dequeue_async()

    with Pair(where, slots=4) as (writer, reader):
        asyncio.run(run(writer, reader))


def test_a_message_larger_than_everything(where: dict[str, Any]) -> None:
    async def run(writer: MessageQueue, reader: MessageQueue) -> None:
        big = np.arange(3_000_000, dtype=np.uint32)
        for _ in range(3):
            sending = asyncio.create_task(writer.enqueue_async(big))
            got = await reader.dequeue_async()
            await sending
            assert np.array_equal(got, big)

    with Pair(where, max_chunk_bytes=1 << 20, max_chunks=2) as (writer, reader):
        asyncio.run(run(writer, reader))


def test_what_takes_more_room_than_its_bytes(where: dict[str, Any]) -> None:
    """Each buffer of a message takes room beside its bytes, and not every buffer's len is bytes."""

    class Counted:
        name = "counted"

        def dumps(self, n: int) -> list[Any]:
            return [b""] * n if n > 0 else [array.array("d", bytes(-8 * n))]

        def loads(self, buffers: list[memoryview]) -> int:
            return len(buffers) if len(buffers) > 1 else -len(buffers[0]) // 8

    async def run(writer: MessageQueue, reader: MessageQueue) -> None:
        for n in (2000, -500):
            sending = asyncio.create_task(writer.enqueue_async(n))
            assert await reader.dequeue_async() == n
            await sending

    own = Counted()
    with MessageQueue(**where, max_chunk_bytes=1024, max_chunks=2, serializer=own) as writer:
        handle = writer.export_handle()
        with MessageQueue.create_from_handle(handle, 0, serializer=own) as reader:
            writer.wait_until_ready(30)
            asyncio.run(run(writer, reader))


def _senders() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "fastipc-send"]


def test_the_loop_ends_though_a_large_message_is_stuck(where: dict[str, Any]) -> None:
    async def run(writer: MessageQueue, large: bytes) -> None:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(writer.enqueue_async(large), 0.05)

    with Pair(where, max_chunk_bytes=4096, max_chunks=2) as (writer, reader):
        writer.enqueue("first")
        asyncio.run(run(writer, bytes(100_000)))  # returns
        got: list[Any] = []
        while _senders():
            with suppress(Empty):
                got.append(reader.dequeue(0.01))
        while True:  # what has been sent may still fill the queue
            try:
                writer.enqueue("last", timeout=0.01)
                break
            except Full:
                with suppress(Empty):
                    got.append(reader.dequeue(0.01))
        while got[-1:] != ["last"]:
            got.append(reader.dequeue())
        # those that were being sent come whole, and those that had to wait for them not at all
        assert got == ["first", *[bytes(100_000)] * (len(got) - 2), "last"]

    with Pair(where, max_chunk_bytes=4096, max_chunks=2) as (writer, _):
        writer.enqueue("first")
        asyncio.run(run(writer, bytes(100_000)))
        writer.close()
        eventually(lambda: not _senders())


def test_the_process_ends_though_a_large_message_is_stuck(run_child) -> None:
    run_child(
        """
        import asyncio, fastipc

        async def run(writer):
            try:
                await asyncio.wait_for(writer.enqueue_async(bytes(100_000)), 0.05)
            except TimeoutError:
                print("stuck")

        writer = fastipc.MessageQueue(1, 1, max_chunk_bytes=4096, max_chunks=2)
        reader = fastipc.MessageQueue.create_from_handle(writer.export_handle(), 0)
        asyncio.run(run(writer))
        """
    )


def test_calls_that_need_a_thread_when_there_is_none_to_be_had(
    where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def run(writer: MessageQueue, reader: MessageQueue) -> None:
        large = bytes(100_000)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for _ in range(2):
                with pytest.raises(RuntimeError):
                    await reader.dequeue_async()
                with pytest.raises(RuntimeError):
                    await writer.enqueue_async(large)
        waiting = asyncio.create_task(reader.dequeue_async())
        await asyncio.sleep(0)
        await writer.enqueue_async(large)
        assert await waiting == large

    with Pair(where, max_chunk_bytes=4096, max_chunks=2) as (writer, reader):
        asyncio.run(run(writer, reader))


def test_the_loop_goes_on_while_a_call_waits(where: dict[str, Any]) -> None:
    async def run(writer: MessageQueue, reader: MessageQueue) -> int:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while turns < 1000:
                turns += 1
                await asyncio.sleep(0)
            writer.enqueue("done")

        counting = asyncio.create_task(count())
        assert await reader.dequeue_async() == "done"
        await counting
        return turns

    with Pair(where) as (writer, reader):
        assert asyncio.run(run(writer, reader)) == 1000


def test_shutdown_ends_a_wait(where: dict[str, Any]) -> None:
    async def run(reader: MessageQueue) -> None:
        call = asyncio.create_task(reader.dequeue_async())
        await asyncio.sleep(0.02)
        reader.shutdown()
        with pytest.raises(Closed):
            await call

    with Pair(where) as (_, reader):
        asyncio.run(run(reader))


def test_a_wait_that_is_cancelled_while_it_is_ended(where: dict[str, Any]) -> None:
    """Ctrl-C: asyncio cancels the main task in the signal's handler, which runs where it likes."""

    class CancelledJustNow(asyncio.Future):  # type: ignore[type-arg]
        def set_result(self, result: Any) -> None:
            self.cancel()
            super().set_result(result)

    async def run(writer: MessageQueue, reader: MessageQueue) -> None:
        loop = asyncio.get_running_loop()
        complaints: list[Any] = []
        loop.set_exception_handler(lambda loop, context: complaints.append(context))
        usual = loop.create_future
        loop.create_future = lambda: CancelledJustNow(loop=loop)  # type: ignore[method-assign]
        call = asyncio.create_task(reader.dequeue_async())
        await asyncio.sleep(0)
        loop.create_future = usual  # type: ignore[method-assign]
        writer.enqueue("a")
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await reader.dequeue_async() == "a"
        assert complaints == []

    with Pair(where) as (writer, reader):
        asyncio.run(run(writer, reader))


def test_the_thread_ends_when_nobody_waits(where: dict[str, Any]) -> None:
    async def run(reader: MessageQueue) -> None:
        for _ in range(20):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.dequeue_async(), 0.001)

    def ours() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "fastipc-aio"]

    eventually(lambda: not ours())  # what other tests had
    with Pair(where) as (writer, reader):
        asyncio.run(run(reader))
        assert len(ours()) <= 1
        eventually(lambda: not ours())
        writer.enqueue("again")

        async def once() -> Any:
            return await reader.dequeue_async()

        assert asyncio.run(once()) == "again"


def test_asyncio_is_imported_when_first_used(run_child) -> None:
    run_child(
        """
        import sys
        import fastipc
        with fastipc.MessageQueue(1, 1) as writer:
            with fastipc.MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
                writer.enqueue(1)
                assert reader.dequeue() == 1
        assert "asyncio" not in sys.modules
        assert "zmq" not in sys.modules
        assert "fastipc.aio" not in sys.modules
        """
    )
