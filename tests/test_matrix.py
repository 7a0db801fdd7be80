"""Every message to every reader, once, in order: over readers, start methods, ring sizes, sizes.

FASTIPC_TEST_MESSAGES sets the messages of a cell; the nightly setting makes it 20,000.
"""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest
import workers
from support import MESSAGES, NIGHTLY, Team, ends, eventually, pair, resident_bytes

from fastipc import Empty, Full, MessageQueue

CHUNK = 64 << 10
LARGEST = 3 * CHUNK
LARGE_CELL_SECONDS = 900 if NIGHTLY else 120


@pytest.mark.timeout(LARGE_CELL_SECONDS)
@pytest.mark.parametrize("slots", [2, 256])
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("n_readers", [1, 2, 4, 7, 8])
def test_every_reader_gets_every_message_once_in_order(n_readers, method, slots):
    pattern = workers.Pattern(n_readers, LARGEST)
    with Team(method) as team:
        options = {"slots": slots, "max_chunk_bytes": CHUNK, "max_chunks": 4}
        with MessageQueue(n_readers, n_readers, **options) as writer:
            handle = writer.export_handle()
            readers = [
                team.start(workers.check_all, handle, rank, n_readers, LARGEST)
                for rank in range(n_readers)
            ]
            writer.wait_until_ready()
            for i in range(MESSAGES):
                writer.enqueue(pattern.make(i))
        assert [reader.result() for reader in readers] == [MESSAGES] * n_readers


@pytest.mark.timeout(LARGE_CELL_SECONDS)
def test_two_slots_and_readers_that_pause_at_random():
    n = MESSAGES * 10 if NIGHTLY else max(MESSAGES // 2, 100)
    pattern = workers.Pattern(3, 4096)
    with Team() as team, MessageQueue(2, 2, slots=2) as writer:
        handle = writer.export_handle()
        readers = [team.start(workers.check_all, handle, rank, 3, 4096, True) for rank in range(2)]
        for i in range(n):
            writer.enqueue(pattern.make(i))
        writer.close()
        assert [reader.result() for reader in readers] == [n, n]


@pytest.mark.timeout(LARGE_CELL_SECONDS)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_writer_may_be_the_child(method):
    with Team(method) as team:
        options = {"slots": 4, "max_chunk_bytes": CHUNK, "n_reader": 1}
        member = team.start(workers.send_all, 5, LARGEST, MESSAGES, options)
        handle = member._connection.recv()
        pattern = workers.Pattern(5, LARGEST)
        with MessageQueue.create_from_handle(handle, 0) as reader:
            reader.wait_until_ready()
            n = 0
            for message in reader:
                pattern.check(n, message)
                n += 1
        assert n == MESSAGES
        member.result()


def test_nothing_is_lost_right_after_the_handshake():
    rounds = 1000 if NIGHTLY else 100
    with Team() as team:
        member = team.start(workers.first_message_of_each, 0)
        for _ in range(rounds):
            with MessageQueue(1, 1, slots=2, max_chunks=1, max_chunk_bytes=4096) as writer:
                handle = writer.export_handle()
                member.tell(handle)
                writer.wait_until_ready()
                writer.enqueue(("first of", handle.queue_id))
                eventually(writer.empty)
        member.tell(None)
        assert member.result() == rounds


def test_messages_sent_before_anyone_attached_are_kept():
    with MessageQueue(2, 2, slots=8) as writer:
        for i in range(8):
            writer.enqueue(i, timeout=0)
        with pytest.raises(Full):
            writer.enqueue(8, timeout=0.01)
        for rank in range(2):
            with MessageQueue.create_from_handle(writer.export_handle(), rank) as reader:
                assert [reader.dequeue(timeout=0) for _ in range(8)] == list(range(8))


# ---- sizes around the borders ------------------------------------------------------------------

INLINE = 1024
SMALL_CHUNK = 4096


def _frame_bytes(writer, obj) -> int:
    before = writer.stats()["bytes"]
    writer.enqueue(obj, timeout=0)
    return writer.stats()["bytes"] - before


def _make_bytes(n: int, k: int) -> bytes:
    return np.random.default_rng(k + 100).bytes(n)


def _make_array(n: int, k: int) -> np.ndarray:
    return np.random.default_rng(k + 100).integers(0, 256, n, dtype=np.uint8)


def _overhead(make) -> int:
    """What a frame has beside the payload, for payloads about as large as those here."""
    with pair(max_chunk_bytes=1 << 20) as (writer, _):
        return _frame_bytes(writer, make(2000, 0)) - 2000


@pytest.mark.parametrize("fitted", ["frame", "payload"])
@pytest.mark.parametrize("make", [_make_bytes, _make_array])
@pytest.mark.parametrize("border", [INLINE, SMALL_CHUNK, 2 * SMALL_CHUNK, 3 * SMALL_CHUNK])
def test_sizes_around_a_border(border, make, fitted):
    overhead = _overhead(make) if fitted == "frame" else 0
    seen = set()
    with pair(inline_bytes=INLINE, max_chunk_bytes=SMALL_CHUNK, max_chunks=8) as (writer, reader):
        for k in range(-80, 81):
            obj = make(border + k - overhead, k)
            size = _frame_bytes(writer, obj)
            seen.add(size)
            if fitted == "frame":
                assert size == border + k
            got = reader.dequeue(timeout=0)
            assert type(got) is type(obj)
            assert np.array_equal(got, obj) if make is _make_array else got == obj
        # The ring is as before: nothing of those messages is left in it.
        assert reader.empty()
        assert writer.empty()
    assert len(seen) == 161


@pytest.mark.parametrize("inline_bytes", [0, 1, 63, 64, 65, SMALL_CHUNK, 1 << 20])
def test_inline_room_of_any_size(inline_bytes):
    """More than a chunk is capped there."""
    with pair(inline_bytes=inline_bytes, max_chunk_bytes=SMALL_CHUNK, max_chunks=4) as ends:
        writer, reader = ends
        for n in (0, 1, 63, 64, 65, 4000, 4090, 4096, 5000):
            for make in (_make_bytes, _make_array):
                obj = make(n, n)
                writer.enqueue(obj, timeout=0)
                assert np.array_equal(reader.dequeue(timeout=0), obj)


def test_the_smallest_chunks():
    with pair(max_chunk_bytes=64, max_chunks=1, slots=2) as (writer, reader):
        sent = [_make_array(n, n) for n in (0, 1, 63, 64, 65, 1000, 5000)]
        thread = threading.Thread(target=lambda: [writer.enqueue(a) for a in sent])
        thread.start()
        for array in sent:
            assert np.array_equal(reader.dequeue(), array)
        thread.join()


@pytest.mark.parametrize("delta", [-1, 0, 1])
def test_one_mebibyte_buffer(delta):
    with pair() as (writer, reader):
        array = _make_array((1 << 20) + delta, 1)
        writer.enqueue(array, timeout=0)
        assert np.array_equal(reader.dequeue(timeout=0), array)


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 254, 255, 256, 257, 65535, 65536])
def test_any_number_of_buffers(count):
    with pair() as (writer, reader):
        values = np.arange(count, dtype=np.uint32)
        arrays = [values[i : i + 1] for i in range(count)]
        writer.enqueue(arrays, timeout=0)
        got = reader.dequeue(timeout=0)
        assert len(got) == count
        assert all(a.shape == (1,) and a.flags.writeable for a in got)
        assert not count or np.array_equal(np.concatenate(got), values)


def test_many_buffers_of_mixed_sizes_through_small_chunks():
    rng = np.random.default_rng(4)
    sizes = rng.choice([0, 1, 7, 64, 65, 500, 4096, 9000], 300)
    arrays = [_make_array(int(n), i) for i, n in enumerate(sizes)]
    options = {"max_chunk_bytes": SMALL_CHUNK, "max_chunks": 2, "slots": 2}
    with pair(**options) as (writer, reader):
        thread = threading.Thread(target=writer.enqueue, args=(arrays,))
        thread.start()
        got = reader.dequeue()
        thread.join()
    assert all(np.array_equal(a, b) for a, b in zip(got, arrays, strict=True))


def test_pickle_buffers_of_the_users_own():
    with pair() as (writer, reader):
        source = bytearray(b"abc" * 1000)
        writer.enqueue([pickle.PickleBuffer(source), pickle.PickleBuffer(b"xy")], timeout=0)
        source[:] = b"z" * 3000
        first, second = reader.dequeue(timeout=0)
        assert bytes(first) == b"abc" * 1000
        assert bytes(second) == b"xy"


def test_small_messages_need_no_chunks():
    """A burst of small messages beside occupied chunks is not held up by them."""
    large = _make_array(3000, 0)
    options = {"inline_bytes": 512, "max_chunk_bytes": SMALL_CHUNK, "max_chunks": 1}
    with pair(**options) as (writer, reader):
        writer.enqueue(large, timeout=0)
        with pytest.raises(Full):
            writer.enqueue(large, timeout=0)
        for i in range(100):
            writer.enqueue(i, timeout=0)
        assert np.array_equal(reader.dequeue(timeout=0), large)
        assert [reader.dequeue(timeout=0) for _ in range(100)] == list(range(100))


def test_a_message_larger_than_all_chunks():
    with pair(max_chunk_bytes=SMALL_CHUNK, max_chunks=2) as (writer, reader):
        array = _make_array(50 * SMALL_CHUNK + 13, 0)
        # Without waiting it can't be sent, and nothing of it is.
        with pytest.raises(Full):
            writer.enqueue(array, timeout=0)
        with pytest.raises(Empty):
            reader.dequeue(timeout=0)
        # With a reader that reads too little in time, it can't either, and the rest is skipped.
        with pytest.raises(Full):
            writer.enqueue(array, timeout=0.05)
        writer_thread = threading.Thread(target=lambda: (writer.enqueue(array), writer.enqueue(1)))
        writer_thread.start()
        assert np.array_equal(reader.dequeue(), array)
        assert reader.dequeue() == 1
        writer_thread.join()


def test_what_had_arrived_of_a_large_message_survives_a_timeout():
    with pair(max_chunk_bytes=SMALL_CHUNK, max_chunks=2) as (writer, reader):
        array = _make_array(20 * SMALL_CHUNK, 0)
        thread = threading.Thread(target=writer.enqueue, args=(array,))
        empty = 0
        with pytest.raises(Empty):
            reader.dequeue(timeout=0)
        thread.start()
        while True:
            try:
                got = reader.dequeue(timeout=0)
                break
            except Empty:
                empty += 1
        thread.join()
        assert np.array_equal(got, array)
        assert reader.empty()


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_one_message_of_more_than_four_gibibytes():
    array = np.zeros((4 << 30) + 4097, np.uint8)
    array[:: 1 << 20] = np.arange(len(array[:: 1 << 20])) % 251
    array[-1] = 7
    with pair() as (writer, reader):
        thread = threading.Thread(target=writer.enqueue, args=(array,))
        thread.start()
        got = reader.dequeue()
        thread.join()
        assert got.shape == array.shape
        assert np.array_equal(got, array)
        assert writer.stats()["bytes_copied"] > 4 << 30


# ---- what it costs: the ledger of copies -------------------------------------------------------


@pytest.mark.parametrize("n_readers", [1, 3])
@pytest.mark.parametrize("nbytes", [100, 8 << 10, 1 << 20, 70 << 20])
def test_each_byte_is_copied_once_in_and_once_out_by_each_reader(nbytes, n_readers):
    array = np.ones(nbytes, np.uint8)
    with ends(n_readers) as (writer, readers):
        writer.enqueue(array, timeout=0)
        frame = writer.stats()["bytes"]
        # the array, and a pickle that says what it is
        assert nbytes < frame < nbytes + 400
        assert writer.stats()["bytes_copied"] == frame
        for reader in readers:
            got = reader.dequeue(timeout=0)
            assert reader.stats()["bytes"] == reader.stats()["bytes_copied"] == frame
            assert got.nbytes == nbytes


def test_memory_in_use_does_not_grow_with_messages():
    array = np.ones(1 << 20, np.float32)
    with pair() as (writer, reader):
        kept = []

        def run(n):
            for i in range(n):
                writer.enqueue(array, timeout=0)
                got = reader.dequeue(timeout=0)
                if i % 50 == 0:
                    kept.append(got)

        run(50)
        before = resident_bytes()
        kept.clear()
        run(300)
        grown = resident_bytes() - before
        assert grown < (len(kept) + 8) * array.nbytes


def test_the_chunk_freed_last_is_used_first():
    """One large message at a time stays in one chunk, and so in the processor's cache."""
    array = np.ones(1 << 20, np.uint8)
    with pair(max_chunk_bytes=2 << 20, max_chunks=10) as (writer, reader):
        before = writer.stats()["resident_bytes"]
        for _ in range(30):
            writer.enqueue(array, timeout=0)
            reader.dequeue(timeout=0)
        assert writer.stats()["resident_bytes"] - before <= 2 << 20
