"""Tensors through shared memory, between real processes."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import queue
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.multiprocessing as tmp  # noqa: E402

from fastipc.codec import MsgpackDecoder, MsgpackEncoder  # noqa: E402
from fastipc.errors import DecodeError, IPCError  # noqa: E402
from fastipc.tensor_ipc import (  # noqa: E402
    TensorIpcError,
    TensorIpcReceiver,
    TensorIpcSender,
    TensorIpcTimeout,
)

SPAWN = tmp.get_context("spawn")
WAIT = 60


def tensor_of(n: int) -> Any:
    return torch.arange(n, n + 3000, dtype=torch.int64).view(30, 100)


@contextlib.contextmanager
def process(target: Any, *args: Any) -> Any:
    child = SPAWN.Process(target=target, args=args)
    child.start()
    try:
        yield child
    finally:
        child.join(WAIT)
        if child.is_alive():
            child.kill()
            child.join()


@pytest.fixture
def line() -> Any:
    made = SPAWN.Queue()
    yield made
    made.close()
    made.cancel_join_thread()


def send_messages(line: Any, frames: Any, first: int, count: int, release: Any) -> None:
    sender = TensorIpcSender(line)
    encoder = MsgpackEncoder(oob_tensor_consumer=sender)
    for n in range(first, first + count):
        source = tensor_of(n)
        frames.put([bytes(f) for f in encoder.encode([n, [source, source.t(), source[3]]])])
        source.fill_(-1)  # sent as it was
    release.wait(WAIT)


TYPE = tuple[int, list[torch.Tensor]]


def check(message: Any) -> int:
    n, (plain, transposed, row) = message
    assert torch.equal(plain, tensor_of(n))
    assert torch.equal(transposed, tensor_of(n).t())
    assert torch.equal(row, tensor_of(n)[3])
    plain.add_(1)  # writable, and nobody else's
    return int(n)


def test_several_senders(line: Any) -> None:
    frames, release = SPAWN.Queue(), SPAWN.Event()
    receiver = TensorIpcReceiver(line, timeout=WAIT)
    decoder = MsgpackDecoder(TYPE, oob_tensor_provider=receiver)
    with contextlib.ExitStack() as stack:
        for first in (0, 1000, 2000):
            stack.enter_context(process(send_messages, line, frames, first, 5, release))
        seen = []
        for _ in range(15):
            message = frames.get(timeout=WAIT)
            assert len(message) == 1
            assert len(message[0]) < 600  # the bytes went another way
            seen.append(check(decoder.decode(message)))
        release.set()
    assert sorted(seen) == [s + i for s in (0, 1000, 2000) for i in range(5)]
    assert receiver.pending == receiver.dropped == 0


def test_out_of_order_and_stale(line: Any) -> None:
    sender, receiver = TensorIpcSender(line), TensorIpcReceiver(line, timeout=WAIT, window=3)
    encoder = MsgpackEncoder(oob_tensor_consumer=sender)
    decoder = MsgpackDecoder(TYPE, oob_tensor_provider=receiver)
    messages = [encoder.encode([n, [t, t.t(), t[3]]]) for n in range(8) for t in [tensor_of(n)]]
    for n in (2, 0, 1):
        assert check(decoder.decode(messages[n])) == n
    assert receiver.pending == 0
    assert check(decoder.decode(messages[7])) == 7
    # 3 is more than three messages older than 7: its tensors are gone. 4 is not.
    assert receiver.dropped == 3
    assert receiver.pending == 9
    with pytest.raises(TensorIpcError, match="stale"):
        decoder.decode(messages[3])
    for n in (6, 4, 5):
        assert check(decoder.decode(messages[n])) == n
    assert receiver.pending == 0
    with pytest.raises(TensorIpcError):
        decoder.decode(messages[0])


def test_late_tensors_of_a_stale_message_are_dropped_as_they_come(line: Any) -> None:
    sender = TensorIpcSender(line)
    names = []
    for n in range(4):
        sender.new_message()
        names.append(sender(tensor_of(n)))
    items = [line.get(timeout=WAIT) for _ in range(4)]
    again: Any = queue.Queue()
    receiver = TensorIpcReceiver(again, timeout=0, window=1)
    for n in (3, 0, 1, 2):
        again.put(items[n])
    assert torch.equal(receiver("int64", (30, 100), names[3]), tensor_of(3))
    assert torch.equal(receiver("int64", (30, 100), names[2]), tensor_of(2))
    assert (receiver.dropped, receiver.pending) == (2, 0)


def test_unclaimed_tensors_age_out(line: Any) -> None:
    sender, receiver = TensorIpcSender(line), TensorIpcReceiver(line, timeout=WAIT, stale_after=0.0)
    sender.new_message()
    sender(tensor_of(0))
    sender.new_message()
    name = sender(tensor_of(1))
    with contextlib.suppress(IPCError):
        receiver("int64", (30, 100), name)
    assert receiver.dropped >= 1
    assert receiver.pending <= 1


def test_timeouts_name_what_is_missing(line: Any) -> None:
    name = {"sender_id": "abc", "message_id": 5, "tensor_id": 2}
    for timeout in (0, 0.01):
        receiver = TensorIpcReceiver(line, timeout=timeout)
        with pytest.raises(
            TensorIpcTimeout, match="tensor 2 of message 5 from sender abc"
        ) as caught:
            receiver("int64", (30, 100), name)
        assert isinstance(caught.value, TimeoutError)
        assert isinstance(caught.value, IPCError)
    frames = MsgpackEncoder().encode(["int64", [30, 100], name])
    with pytest.raises(TensorIpcTimeout):
        MsgpackDecoder(torch.Tensor, oob_tensor_provider=receiver).decode(frames)
    for bad in (-1, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            TensorIpcReceiver(line, timeout=bad)


@pytest.mark.parametrize(
    "name",
    [
        {},
        {"sender_id": "x"},
        {"sender_id": 1, "message_id": 1, "tensor_id": 1},
        {"sender_id": "x", "message_id": True, "tensor_id": 1},
        {"sender_id": "x", "message_id": "1", "tensor_id": 1},
        {"sender_id": "x", "message_id": 1, "tensor_id": 1, "more": 1},
    ],
)
def test_malformed_placeholders(line: Any, name: dict[str, Any]) -> None:
    receiver = TensorIpcReceiver(line, timeout=WAIT)
    frames = MsgpackEncoder().encode(["int64", [30, 100], name])
    with pytest.raises(DecodeError):
        MsgpackDecoder(torch.Tensor, oob_tensor_provider=receiver).decode(frames)


def test_a_tensor_that_is_not_what_the_message_says(line: Any) -> None:
    sender, receiver = TensorIpcSender(line), TensorIpcReceiver(line, timeout=WAIT)
    for dtype, shape in (("float64", (30, 100)), ("int64", (3000,))):
        sender.new_message()
        with pytest.raises(DecodeError, match="came"):
            receiver(dtype, shape, sender(tensor_of(0)))


def test_fall_back_to_frames_with_one_warning(line: Any, caplog: pytest.LogCaptureFixture) -> None:
    full: Any = queue.Queue(maxsize=1)
    full.put("no room")
    sender = TensorIpcSender(full, timeout=0)
    encoder = MsgpackEncoder(oob_tensor_consumer=sender)
    with caplog.at_level(logging.WARNING, "fastipc"):
        for n in range(3):
            frames = encoder.encode(tensor_of(n))
            assert len(frames) == 2
            assert torch.equal(MsgpackDecoder(torch.Tensor).decode(frames), tensor_of(n))
    assert len(caplog.records) == 1
    assert "Full" in caplog.text
    full.get()
    assert len(encoder.encode(tensor_of(0))) == 1


def test_no_shared_memory_left(
    line: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    encoder = MsgpackEncoder(oob_tensor_consumer=TensorIpcSender(line))
    with caplog.at_level(logging.WARNING, "fastipc"):
        assert len(encoder.encode(tensor_of(0))) == 2
    assert "No space left" in caplog.text


def test_dtypes(line: Any) -> None:
    sender, receiver = TensorIpcSender(line), TensorIpcReceiver(line, timeout=WAIT)
    encoder = MsgpackEncoder(0, oob_tensor_consumer=sender)
    decoder = MsgpackDecoder(torch.Tensor, oob_tensor_provider=receiver)
    values = [
        torch.rand(40, 40).to(torch.bfloat16),
        torch.rand(500).to(torch.float8_e4m3fn),
        torch.rand(30, 30).t(),
        torch.view_as_complex(torch.rand(50, 2)).conj(),
        torch.rand(100, requires_grad=True),
        torch.empty(0, 3),
        torch.tensor(5.0),
        torch.empty(300, dtype=torch.bits8).view(torch.uint8),
        torch.ones(400, dtype=torch.bool),
    ]
    for value in values:
        got = decoder.decode(encoder.encode(value))
        assert got.dtype == value.dtype
        assert torch.equal(
            got.view(torch.uint8) if got.element_size() == 1 else got,
            value.view(torch.uint8) if value.element_size() == 1 else value.detach(),
        )
    huge = torch.empty(1 << 30, dtype=torch.uint8)  # address space only
    small = huge[10:20].fill_(3)
    before = shared_bytes()
    got = decoder.decode(encoder.encode(small))
    assert torch.equal(got, torch.full((10,), 3, dtype=torch.uint8))
    assert shared_bytes() - before < 1 << 20


def shared_bytes() -> int:
    return (
        int(
            next(
                s for s in Path("/proc/self/status").read_text().splitlines() if "RssShmem" in s
            ).split()[1]
        )
        * 1024
    )


def test_engines() -> None:
    lines: list[Any] = [queue.Queue(), queue.Queue()]
    sender = TensorIpcSender(lines)
    for target in (1, 0, 1):
        sender.set_target_engine(target)
        sender.new_message()
        assert sender(tensor_of(0)) is not None
    assert [q.qsize() for q in lines] == [1, 2]
    for bad in (-1, 2):
        with pytest.raises(IndexError):
            sender.set_target_engine(bad)
    with pytest.raises(ValueError, match="queue"):
        TensorIpcSender([])


def send_and_leave(line: Any, name: Any) -> None:
    sender = TensorIpcSender(line)
    sender.new_message()
    name.put(sender(tensor_of(5)))


def test_a_sender_that_ends_before_its_tensor_is_opened(line: Any) -> None:
    names = SPAWN.Queue()
    with process(send_and_leave, line, names) as child:
        name = names.get(timeout=WAIT)
    assert child.exitcode == 0
    receiver = TensorIpcReceiver(line, timeout=WAIT)
    with contextlib.suppress(TensorIpcError) as _:
        assert torch.equal(open_or_say_why(receiver, name), tensor_of(5))


def open_or_say_why(receiver: TensorIpcReceiver, name: dict[str, Any]) -> Any:
    """The tensor, or the error that names the reason: never a wait until the time-out."""
    try:
        return receiver("int64", (30, 100), name)
    except TensorIpcTimeout:
        pytest.fail("waited in vain")


def test_threads_share_a_sender_and_a_receiver(line: Any) -> None:
    sender, receiver = TensorIpcSender(line), TensorIpcReceiver(line, timeout=WAIT, window=10_000)
    encoder = MsgpackEncoder(oob_tensor_consumer=sender)
    decoder = MsgpackDecoder(TYPE, oob_tensor_provider=receiver)
    box: Any = queue.Queue()
    failures: list[Any] = []

    def send(first: int) -> None:
        for n in range(first, first + 10):
            t = tensor_of(n)
            box.put(encoder.encode([n, [t, t.t(), t[3]]]))

    def receive() -> None:
        try:
            for _ in range(10):
                check(decoder.decode(box.get(timeout=WAIT)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=send, args=(1000 * n,)) for n in range(4)]
    threads += [threading.Thread(target=receive) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert receiver.pending == 0


def test_a_forked_child_is_a_sender_of_its_own(line: Any) -> None:
    sender = TensorIpcSender(queue.Queue())
    mine = sender(torch.ones(3))
    here, there = multiprocessing.Pipe()
    with here, there:
        pid = os.fork()
        if pid == 0:
            sender._queues = [queue.Queue()]
            name = sender(torch.ones(3))
            there.send(name["sender_id"] if name else "")
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        theirs = here.recv()
    assert theirs
    assert theirs != mine["sender_id"]


def test_a_thread_never_meets_a_sender_without_a_name() -> None:
    class Watched(TensorIpcSender):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "_pid" and value == os.getpid():
                named.append(bool(self._sender_id))  # what another thread would find now
            super().__setattr__(name, value)

    named: list[bool] = []
    sender = Watched(queue.Queue())
    assert sender(tensor_of(1)) is not None
    assert named == [True]


def test_received_tensors_give_their_descriptors_back(line: Any) -> None:
    sender, receiver = TensorIpcSender(line), TensorIpcReceiver(line, timeout=WAIT)

    def one(n: int) -> None:
        sender.new_message()
        assert torch.equal(receiver("int64", (30, 100), sender(tensor_of(n))), tensor_of(n))

    one(0)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for n in range(30):
        one(n)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 3
