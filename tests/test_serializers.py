"""What turns objects into bytes: raw, and objects of the user's own, here and over TCP."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import pytest

from fastipc import HandleMismatch, MessageQueue


@pytest.fixture(params=["local", "remote"])
def where(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "local":
        return {"n_reader": 1, "n_local_reader": 1}
    return {"n_reader": 1, "n_local_reader": 0, "connect_ip": "127.0.0.1"}


class _Pair:
    def __init__(self, where: dict[str, Any], serializer: Any, **options: Any) -> None:
        self.writer = MessageQueue(**where, serializer=serializer, **options)
        given = None if isinstance(serializer, str) else serializer
        self.reader = MessageQueue.create_from_handle(
            self.writer.export_handle(), 0, serializer=given
        )
        self.writer.wait_until_ready(30)

    def __enter__(self) -> tuple[MessageQueue, MessageQueue]:
        return self.writer, self.reader

    def __exit__(self, *_: object) -> None:
        self.writer.close()
        self.reader.close()


class Lists:
    """A list of arrays of bytes: a head with their number, and each as a buffer."""

    name = "lists of arrays"

    def dumps(self, obj: list[np.ndarray]) -> list[Any]:
        return [len(obj).to_bytes(4, "little"), *obj]

    def loads(self, buffers: list[memoryview]) -> list[np.ndarray]:
        assert int.from_bytes(buffers[0], "little") == len(buffers) - 1
        return [np.frombuffer(b, np.uint8) for b in buffers[1:]]


class Reversing:
    def dumps(self, obj: bytes) -> list[bytes]:
        return [obj[::-1]]

    def loads(self, buffers: list[memoryview]) -> bytes:
        (one,) = buffers
        assert not one.readonly
        return bytes(one)


SIZES = [0, 1, 63, 64, 65, 8192, 8193, 65535, 65536, 65537, 1 << 20, 3_000_000]


@pytest.fixture
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle was used")

    for name in ("dumps", "loads", "dump", "load"):
        monkeypatch.setattr(pickle, name, refuse)
    return


@pytest.mark.usefixtures("no_pickle")
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.ndarray])
def test_raw_takes_bytes_like_objects_and_gives_bytes(where: dict[str, Any], kind: type) -> None:
    rng = np.random.default_rng(1)
    with _Pair(where, "raw", max_chunk_bytes=1 << 20, max_chunks=4) as (writer, reader):
        assert writer.export_handle().serializer == "raw"
        for size in SIZES:
            data = rng.integers(0, 256, size, np.uint8)
            sent = data if kind is np.ndarray else kind(data.tobytes())
            writer.enqueue(sent, timeout=30)
            got = reader.dequeue(30)
            assert type(got) is bytes
            assert got == data.tobytes()


def test_raw_gathers_what_is_not_in_order_and_refuses_what_has_no_bytes(
    where: dict[str, Any],
) -> None:
    with _Pair(where, "raw") as (writer, reader):
        for array in (np.arange(60.0)[::2], np.asfortranarray(np.arange(12).reshape(3, 4))):
            writer.enqueue(array)
            assert reader.dequeue(30) == array.tobytes()
        for wrong in ("text", 5, None, ["x"]):
            with pytest.raises(TypeError, match="bytes-like"):
                writer.enqueue(wrong)
        with pytest.raises(TypeError, match="addresses"):
            writer.enqueue(np.array([None, "x"], object))
        # what looks like a pickle is bytes like any other
        writer.enqueue(pickle.dumps(print))
        assert reader.dequeue(30) == pickle.dumps(print)


@pytest.mark.parametrize("lengths", [[], [0], [1], [5, 0, 7], [100_000, 3], [10] * 300, [2 << 20]])
def test_an_object_of_the_users(where: dict[str, Any], lengths: list[int]) -> None:
    rng = np.random.default_rng(2)
    with _Pair(where, Lists()) as (writer, reader):
        for _ in range(3):
            sent = [rng.integers(0, 256, n, np.uint8) for n in lengths]
            writer.enqueue(sent, timeout=30)
            for array in sent:
                array[:] = 0
        rng = np.random.default_rng(2)
        for _ in range(3):
            expected = [rng.integers(0, 256, n, np.uint8) for n in lengths]
            got = reader.dequeue(30)
            assert len(got) == len(expected)
            for a, b in zip(got, expected, strict=True):
                assert np.array_equal(a, b)
                assert a.flags.writeable
                a[:] = 1


class AsGiven:
    name = "as given"

    def dumps(self, obj: Any) -> Any:
        return obj

    def loads(self, buffers: list[memoryview]) -> list[bytes]:
        return [bytes(buffer) for buffer in buffers]


def test_dumps_that_returns_no_list(where: dict[str, Any]) -> None:
    with _Pair(where, AsGiven()) as (writer, reader):
        for wrong in (None, 5, "text", b"ab", bytearray(2), np.arange(3), np.zeros((2, 2))):
            with pytest.raises(TypeError, match=f"AsGiven.dumps .* not {type(wrong).__name__}"):
                writer.enqueue(wrong)
        for wrong in ([5], ["text"], [b"a", None]):
            with pytest.raises(TypeError, match="bytes-like"):
                writer.enqueue(wrong)
        for right in ((b"a", b""), iter([b"a", b""]), [b"a", b""]):
            writer.enqueue(right)
            assert reader.dequeue(30) == [b"a", b""]


def test_bytes_go_through_the_object_too(where: dict[str, Any]) -> None:
    with _Pair(where, Reversing()) as (writer, reader):
        for size in (1, 100, 70_000):
            sent = bytes(i % 251 for i in range(size))
            writer.enqueue(sent)
            assert reader.dequeue(30) == sent[::-1]
        writer.put(b"ab")
        assert reader.get() == b"ba"


def test_the_reader_must_have_the_same(where: dict[str, Any]) -> None:
    with MessageQueue(**where, serializer=Lists()) as writer:
        handle = writer.export_handle()
        assert handle.serializer == "lists of arrays"
        for given in (None, Reversing(), "pickle", "raw"):
            with pytest.raises(HandleMismatch, match="lists of arrays"):
                MessageQueue.create_from_handle(handle, 0, serializer=given)
        MessageQueue.create_from_handle(handle, 0, serializer=Lists()).close()
    with MessageQueue(**where) as writer:
        for given in ("raw", Lists()):
            with pytest.raises(HandleMismatch, match="'pickle'"):
                MessageQueue.create_from_handle(writer.export_handle(), 0, serializer=given)
    with MessageQueue(**where, serializer=Reversing()) as writer:
        assert writer.export_handle().serializer == f"{__name__}.Reversing"


def test_what_is_no_serializer_is_refused(where: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'raw', or an object"):
        MessageQueue(**where, serializer="json")
    with pytest.raises(TypeError, match="dumps and loads"):
        MessageQueue(**where, serializer=5)
    with pytest.raises(ValueError, match="'raw'"):
        MessageQueue(**where, serializer=type("Liar", (Lists,), {"name": "raw"})())


def test_errors_leave_the_queue_working(where: dict[str, Any]) -> None:
    class Moody:
        name = "moody"

        def dumps(self, obj: Any) -> list[bytes]:
            if obj == "no buffer":
                return []
            if obj == "no bytes":
                return [5]  # type: ignore[list-item]
            return [obj.encode()]

        def loads(self, buffers: list[memoryview]) -> str:
            text = bytes(buffers[0]).decode()
            if text == "bad":
                raise LookupError(text)
            return text

    with _Pair(where, Moody()) as (writer, reader):
        with pytest.raises(ValueError, match="no buffer"):
            writer.enqueue("no buffer")
        with pytest.raises(TypeError):
            writer.enqueue("no bytes")
        with pytest.raises(AttributeError):
            writer.enqueue(5)
        for text in ("a", "bad", "b"):
            writer.enqueue(text)
        assert reader.dequeue(30) == "a"
        with pytest.raises(LookupError):
            reader.dequeue(30)
        assert reader.dequeue(30) == "b"


def test_threads_share_it(where: dict[str, Any]) -> None:
    with _Pair(where, Lists()) as (writer, reader):

        def send(who: int) -> None:
            for _ in range(100):
                writer.enqueue([np.full(who + 1, who, np.uint8)] * who, timeout=30)

        threads = [threading.Thread(target=send, args=(who,)) for who in range(1, 5)]
        for thread in threads:
            thread.start()
        counts = dict.fromkeys(range(1, 5), 0)
        for _ in range(400):
            got = reader.dequeue(30)
            who = len(got)
            counts[who] += 1
            assert all(a.tolist() == [who] * (who + 1) for a in got)
        assert set(counts.values()) == {100}
        for thread in threads:
            thread.join()
