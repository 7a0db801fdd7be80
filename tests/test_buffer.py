"""ShmRingBuffer: bytes in place, for those who bring their own framing."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import workers
from support import Team, asleep, ends, eventually, in_fork, pair

import fastipc
from fastipc import Closed, Empty, Full, IPCError, MessageQueue, ShmRingBuffer


def test_a_message_in_place():
    with pair(kind=ShmRingBuffer, max_chunk_bytes=4096, max_chunks=3) as (writer, reader):
        with writer.acquire_write(5) as view:
            assert len(view) == 5
            assert not view.readonly
            view[:] = b"hello"
        with reader.acquire_read() as view:
            assert bytes(view) == b"hello"
            assert view.readonly
        with pytest.raises(Empty):
            with reader.acquire_read(timeout=0):
                pass
        assert writer.stats()["bytes"] == reader.stats()["bytes"] == 5
        # Filled in place by the user: this end copied nothing.
        assert writer.stats()["bytes_copied"] == 0


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 511, 512, 513, 4095, 4096])
def test_any_size_up_to_a_chunk(nbytes):
    options = {"max_chunk_bytes": 4096, "max_chunks": 2, "inline_bytes": 512, "slots": 4}
    with ends(2, kind=ShmRingBuffer, **options) as (writer, readers):
        for i in range(20):
            data = np.random.default_rng(i).bytes(nbytes)
            with writer.acquire_write(nbytes, timeout=0) as view:
                view[:] = data
            for reader in readers:
                with reader.acquire_read(timeout=0) as view:
                    assert view.tobytes() == data


def test_the_default_is_a_whole_chunk_and_more_is_an_error():
    with pair(kind=ShmRingBuffer, max_chunk_bytes=4096, max_chunks=2) as (writer, reader):
        with writer.acquire_write() as view:
            assert len(view) == 4096
        for wrong in (4097, 1 << 40, -1):
            with pytest.raises(ValueError, match="nbytes"):
                with writer.acquire_write(wrong):
                    pass
        with reader.acquire_read() as view:
            assert len(view) == 4096


def test_an_exception_publishes_nothing():
    with pair(kind=ShmRingBuffer, max_chunk_bytes=4096, max_chunks=1) as (writer, reader):
        for nbytes in (10, 4096):
            with pytest.raises(ZeroDivisionError):
                with writer.acquire_write(nbytes) as view:
                    view[1 // 0] = 1
            with pytest.raises(Empty):
                with reader.acquire_read(timeout=0):
                    pass
        with writer.acquire_write(4096) as view:
            view[:4] = b"good"
        with reader.acquire_read() as view:
            assert bytes(view[:4]) == b"good"


def test_an_exception_leaves_the_message_for_the_next_call():
    with pair(kind=ShmRingBuffer, max_chunk_bytes=4096, max_chunks=2) as (writer, reader):
        for text in (b"one", b"two"):
            with writer.acquire_write(3) as view:
                view[:] = text
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                with reader.acquire_read() as view:
                    assert view[0] == ord("o") / (bytes(view) != b"one")
        for text in (b"one", b"two"):
            with reader.acquire_read() as view:
                assert bytes(view) == text


def test_a_view_that_is_still_in_use_is_an_error():
    """Nobody keeps a window into memory that the other side goes on to use."""
    with pair(kind=ShmRingBuffer, max_chunk_bytes=4096, max_chunks=2) as (writer, reader):
        with pytest.raises(BufferError, match="still in use"):
            with writer.acquire_write(8) as view:
                kept = np.frombuffer(view, np.uint8)
        with pytest.raises(Empty):
            with reader.acquire_read(timeout=0):
                pass
        del kept
        with writer.acquire_write(8) as view:
            np.frombuffer(view, np.uint8)[:] = 7
        with pytest.raises(BufferError, match="still in use"):
            with reader.acquire_read() as view:
                kept = np.frombuffer(view, np.uint8)
        del kept
        # The message has stayed.
        with reader.acquire_read() as view:
            assert (np.frombuffer(view, np.uint8) == 7).all()
            copied = np.frombuffer(view, np.uint8).copy()
        assert (copied == 7).all()


def test_after_the_block_the_view_is_gone():
    with pair(kind=ShmRingBuffer, max_chunk_bytes=4096, max_chunks=2) as (writer, reader):
        with writer.acquire_write(4) as written:
            written[:] = b"abcd"
        with reader.acquire_read() as read:
            pass
        for view in (written, read):
            with pytest.raises(ValueError, match="released"):
                view[0]


def test_a_view_that_was_kept_does_not_make_close_crash(run_child):
    out = run_child(
        """
        import numpy as np
        from fastipc import ShmRingBuffer

        writer = ShmRingBuffer(1, 4096, 2)
        reader = ShmRingBuffer.create_from_handle(writer.export_handle(), 0)
        kept = []
        for call in (lambda: writer.acquire_write(4), reader.acquire_read):
            if call == reader.acquire_read:
                with writer.acquire_write(4) as view:
                    view[:] = b"abcd"
            try:
                with call() as view:
                    kept.append(np.frombuffer(view, np.uint8))
            except BufferError:
                print("in use")
        reader.close()
        writer.close()
        # Their memory is there still, whatever it holds.
        print([len(array.tobytes()) for array in kept])
        """
    )
    assert out.splitlines() == ["in use", "in use", "[4, 4]"]


def test_closing_inside_a_block():
    for which in (0, 1):
        with pair(kind=ShmRingBuffer, max_chunk_bytes=4096, max_chunks=2) as both:
            writer, reader = both
            with writer.acquire_write(4) as view:
                view[:] = b"abcd"
            block = reader.acquire_read() if which else writer.acquire_write(4)
            with block as view:
                both[which].close()
                assert len(view) == 4
                if not which:
                    view[:] = b"last"


def test_a_full_ring_and_timeouts():
    options = {"max_chunk_bytes": 64, "max_chunks": 2, "slots": 2}
    with pair(kind=ShmRingBuffer, **options) as (writer, reader):
        for _ in range(2):
            with writer.acquire_write(8, timeout=0):
                pass
        for timeout in (0, 0.01):
            with pytest.raises(Full):
                with writer.acquire_write(8, timeout=timeout):
                    pass
        for wrong in (-1, float("nan")):
            with pytest.raises(ValueError):
                with writer.acquire_write(8, timeout=wrong):
                    pass
            with pytest.raises(ValueError):
                with reader.acquire_read(timeout=wrong):
                    pass
        for _ in range(2):
            with reader.acquire_read(timeout=0):
                pass
        for timeout in (0, 0.01):
            with pytest.raises(Empty):
                with reader.acquire_read(timeout=timeout):
                    pass


def test_closing_and_shutting_down():
    with pair(kind=ShmRingBuffer, max_chunk_bytes=64, max_chunks=2) as (writer, reader):
        outcome = []

        def wait():
            try:
                with reader.acquire_read():
                    pass
            except Closed as error:
                outcome.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        eventually(asleep(reader))
        reader.shutdown()
        thread.join()
        assert outcome
        with writer.acquire_write(1):
            pass
    with pair(kind=ShmRingBuffer, max_chunk_bytes=64, max_chunks=2) as (writer, reader):
        with writer.acquire_write(1) as view:
            view[:] = b"x"
        writer.close()
        with pytest.raises(Closed):
            with writer.acquire_write(1):
                pass
        with reader.acquire_read() as view:
            assert bytes(view) == b"x"
        with pytest.raises(Closed):
            with reader.acquire_read():
                pass


def test_each_end_refuses_the_others_verb():
    with pair(kind=ShmRingBuffer, max_chunk_bytes=64, max_chunks=2) as (writer, reader):
        with pytest.raises(IPCError, match="readers"):
            with writer.acquire_read():
                pass
        with pytest.raises(IPCError, match="writer"):
            with reader.acquire_write(1):
                pass


def test_using_the_end_again_inside_a_block_is_an_error_not_a_dead_lock():
    with pair(kind=ShmRingBuffer, max_chunk_bytes=64, max_chunks=2) as (writer, reader):
        with writer.acquire_write(1) as view:
            view[:] = b"x"
            with pytest.raises(IPCError, match="inside a call"):
                with writer.acquire_write(1):
                    pass
        with reader.acquire_read() as view:
            with pytest.raises(IPCError, match="inside a call"):
                with reader.acquire_read(timeout=5):
                    pass
            assert bytes(view) == b"x"


def test_threads_take_turns():
    options = {"max_chunk_bytes": 4096, "max_chunks": 4, "slots": 8, "inline_bytes": 64}
    with pair(kind=ShmRingBuffer, **options) as (writer, reader):
        n, per_thread = 4, 200
        got = []

        def write(number):
            for i in range(per_thread):
                with writer.acquire_write(1000) as view:
                    view[:] = bytes([number]) * 996 + i.to_bytes(4, "little")

        def read():
            for _ in range(per_thread):
                with reader.acquire_read() as view:
                    data = bytes(view)
                got.append(data)

        threads = [threading.Thread(target=write, args=(i,)) for i in range(n)]
        threads += [threading.Thread(target=read) for _ in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(got)) == n * per_thread
        assert all(data[:996] == data[:1] * 996 for data in got)


def test_another_process():
    with ShmRingBuffer(2, 4096, 2, slots=4) as writer:
        handle = writer.export_handle()
        with ShmRingBuffer.create_from_handle(handle, 1) as here:

            def child():
                with ShmRingBuffer.create_from_handle(handle, 0) as there:
                    got = []
                    for _ in range(4):
                        with there.acquire_read(timeout=10) as view:
                            got.append(bytes(view))
                return got

            for i in range(4):
                with writer.acquire_write(3) as view:
                    view[:] = bytes([i]) * 3
            expected = [bytes([i]) * 3 for i in range(4)]
            assert in_fork(child) == expected
            for data in expected:
                with here.acquire_read(timeout=0) as view:
                    assert bytes(view) == data


def test_a_buffer_and_a_queue_are_not_mixed_up():
    """Attached as the wrong kind, what was written is an error or is refused, never a crash."""
    with MessageQueue(1, 1) as writer:
        with ShmRingBuffer.create_from_handle(writer.export_handle(), 0) as reader:
            writer.enqueue([np.arange(3)])
            with pytest.raises(fastipc.DecodeError):
                with reader.acquire_read(timeout=1):
                    pass


def test_passing_it_to_a_process_says_what_to_pass():

    with pair(kind=ShmRingBuffer, max_chunk_bytes=64, max_chunks=1) as (writer, reader):
        with Team() as team:
            for end in (writer, reader):
                with pytest.raises(TypeError, match="export_handle"):
                    team.start(workers.attempt, end, 0)


def test_wrong_arguments():
    for arguments in ((0, 4096, 1), (1, 1, 1), (1, 4096, 0)):
        with pytest.raises(ValueError):
            ShmRingBuffer(*arguments)
    with pair(kind=ShmRingBuffer, max_chunk_bytes=64, max_chunks=1) as (writer, reader):
        assert repr(writer) == "<ShmRingBuffer writer, 1 readers>"
        assert repr(reader) == "<ShmRingBuffer reader rank 0, 1 readers>"
