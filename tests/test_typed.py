"""MessageQueue(serializer="msgpack", type=...): typed messages on the ring, and never a pickle."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import fastipc
from fastipc import MessageQueue
from fastipc.codec import MsgpackEncoder

MIB = 1 << 20


class Step(msgspec.Struct, array_like=True, omit_defaults=True):
    request_id: str
    token_ids: list[int]
    temperature: float = 1.0
    image: np.ndarray | None = None


class Steps(msgspec.Struct, array_like=True):
    steps: list[Step]


Pair = Callable[..., tuple[MessageQueue, MessageQueue]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends: list[MessageQueue] = []

    def make(type: Any = None, **options: Any) -> tuple[MessageQueue, MessageQueue]:
        writer = MessageQueue(1, 1, serializer="msgpack", type=type, **options)
        ends.append(writer)
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0, type=type)
        ends.append(reader)
        return writer, reader

    yield make
    for end in reversed(ends):
        end.close()


def steps(n: int, image_bytes: int) -> Steps:
    image = np.arange(image_bytes, dtype=np.uint32).astype(np.uint8)
    return Steps([Step(f"r{i}", list(range(i)), i / 7, image if i % 2 else None) for i in range(n)])


@pytest.mark.parametrize("image_bytes", [0, 1, 255, 256, 8192, 3 * MIB])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_structs_arrive_as_they_were(pair: Pair, n: int, image_bytes: int) -> None:
    writer, reader = pair(Steps, max_chunk_bytes=MIB)
    sent = steps(n, image_bytes)
    writer.enqueue(sent, timeout=10)
    got = reader.dequeue(timeout=10)
    assert type(got) is Steps
    assert len(got.steps) == n
    for a, b in zip(sent.steps, got.steps, strict=True):
        assert (a.request_id, a.token_ids, a.temperature) == (
            b.request_id,
            b.token_ids,
            b.temperature,
        )
        assert (a.image is None) == (b.image is None)
        if a.image is not None and b.image is not None:
            assert a.image.dtype == b.image.dtype
            assert np.array_equal(a.image, b.image)


def test_what_is_received_is_owned_and_writable(pair: Pair) -> None:
    writer, reader = pair(list[np.ndarray])
    kept = []
    for i in range(300):  # more than there are slots, and chunks
        writer.enqueue([np.full(50, i, np.int64), np.full(5000, i, np.int64)], timeout=10)
        small, large = reader.dequeue(timeout=10)
        assert small.flags.writeable
        assert large.flags.writeable
        kept.append((i, small, large))
    for i, small, large in kept:
        assert (small == i).all()
        assert (large == i).all()
        large += 1


def test_the_caller_may_overwrite_at_once(pair: Pair) -> None:
    writer, reader = pair(np.ndarray)
    array = np.zeros(1000, np.int64)
    for i in range(20):
        array[:] = i
        writer.enqueue(array, timeout=10)
    array[:] = -1
    for i in range(20):
        assert (reader.dequeue(timeout=10) == i).all()


def test_tensors(pair: Pair) -> None:
    torch = pytest.importorskip("torch")
    writer, reader = pair(list[torch.Tensor])
    sent = [torch.arange(6.0).reshape(2, 3).to(torch.bfloat16), torch.ones(3, 0, 2), torch.rand(())]
    writer.enqueue(sent, timeout=10)
    for a, b in zip(sent, reader.dequeue(timeout=10), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_a_message_of_another_type_is_refused_and_the_next_one_works(pair: Pair) -> None:
    writer, reader = pair(Step)
    writer.enqueue({"not": "a step"}, timeout=10)
    writer.enqueue(Step("r", [1]), timeout=10)
    with pytest.raises(fastipc.DecodeError):
        reader.dequeue(timeout=10)
    assert reader.dequeue(timeout=10) == Step("r", [1])


def test_what_msgpack_cannot_carry_is_refused_by_name_and_nothing_was_sent(pair: Pair) -> None:
    writer, reader = pair()
    with pytest.raises(TypeError, match="object"):
        writer.enqueue(object(), timeout=10)
    with pytest.raises(OverflowError):
        writer.enqueue([np.zeros(1000), 2**65], timeout=10)
    writer.enqueue("next", timeout=10)
    assert reader.dequeue(timeout=10) == "next"


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/nowhere/at/all",)


@pytest.mark.parametrize("environment", ["0", "1"])
def test_a_pickle_is_never_loaded(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, environment: str
) -> None:
    """Neither one that poses as a message, nor one that the codec would accept elsewhere."""
    monkeypatch.setenv("FASTIPC_ALLOW_INSECURE_SERIALIZATION", environment)
    writer, reader = pair()
    writer._end.send([pickle.dumps(Bomb(), 5)], 1)
    frames = MsgpackEncoder(allow_insecure_serialization=True).encode(Bomb())
    writer._end.send(frames, 1)
    for _ in range(2):
        with pytest.raises(fastipc.DecodeError):
            reader.dequeue(timeout=10)
    with pytest.raises(TypeError):
        writer.enqueue(Bomb(), timeout=10)


def test_bytes_are_checked_against_the_type_like_anything_else(pair: Pair) -> None:
    """The pickle queue's way for bytes objects doesn't exist here, on either side."""
    writer, reader = pair(Step)
    writer.enqueue(b"x" * 64, timeout=10)
    with pytest.raises(fastipc.DecodeError):
        reader.dequeue(timeout=10)
    # a writer that marks them as a pickle queue's writer does
    writer._end.use_serializer(lambda _: ([], 0), bytes, bytes, True)
    writer._end.put(b"x" * 64, 10)
    with pytest.raises(fastipc.DecodeError):
        reader.dequeue(timeout=10)


def test_the_handle_says_which_serializer(pair: Pair) -> None:
    writer, _ = pair(Step)
    assert writer.export_handle().serializer == "msgpack"
    with MessageQueue(1, 1) as pickled, pytest.raises(ValueError, match="type="):
        MessageQueue.create_from_handle(pickled.export_handle(), 0, type=Step)
    with pytest.raises(ValueError, match="'pickle' or 'msgpack'"):
        MessageQueue(1, 1, serializer="json")
    with pytest.raises(ValueError, match="type="):
        MessageQueue(1, 1, type=Step)


def test_the_pickle_queue_does_not_import_the_codec(run_child: Callable[..., str]) -> None:
    printed = run_child(
        """
        import sys, fastipc
        fastipc.MessageQueue(1, 1).close()
        print([name for name in sys.modules if name.startswith("fastipc._codec")])
        """
    )
    assert printed.strip() == "[]"


def test_a_type_that_cant_be_decoded_costs_nothing() -> None:
    with pytest.raises(TypeError):
        MessageQueue(1, 1, serializer="msgpack", type=5)
    with MessageQueue(1, 1, serializer="msgpack") as writer:
        writer.enqueue("first")
        with pytest.raises(TypeError) as raised:
            MessageQueue.create_from_handle(writer.export_handle(), 0, type=5)
        # the rank was never taken, though the error's traceback keeps what there is
        with MessageQueue.create_from_handle(writer.export_handle(), 0, type=str) as reader:
            assert reader.dequeue(0) == "first"
        del raised
