"""Mutated handles, and words that the two ends of a remote queue say to each other: what can't be
right is refused by name or ignored, and the ends work on. Usage: COUNT SEED
"""

from __future__ import annotations

import pickle
import random
import sys
import time
from collections.abc import Callable

import msgspec
import zmq
from fuzzing import Watch, check_growth, corpus, mutate, resident_bytes, shown

import fastipc
from fastipc import Handle, HandleMismatch, MessageQueue
from fastipc.engine import ClientSpec

# Of the queue in the kept words: it becomes the id of the queue that is spoken to.
KEPT_ID = bytes(range(16))
# Cases before fresh ends are made: a word may rightly end the reader's, or fill the writer's.
TURN = 100


def try_handle(case: list[bytes]) -> bool:
    """True when one of the two kinds took it."""
    text = b"".join(case).decode("latin-1")
    taken = False
    for kind in (Handle, ClientSpec):
        try:
            value = kind.from_str(text)
        except HandleMismatch:
            continue
        taken = True
        assert kind.from_str(value.to_str()) == value
        assert pickle.loads(pickle.dumps(value)) == value
        secret = value.server_key if kind is Handle else value.control_key
        assert len(secret) < 8 or secret not in repr(value)
        if kind is Handle:
            for check in (value.id_bytes, value.check_version):
                try:
                    check()
                except HandleMismatch:
                    pass
    for kind in (Handle, ClientSpec):
        for frame in case:
            try:
                msgspec.msgpack.decode(frame, type=kind)
            except msgspec.MsgspecError:
                pass
    return taken


class Ends:
    """A writer and its reader on one host, as if they were on two, to which anybody speaks."""

    def __init__(self) -> None:
        self.writer = MessageQueue(
            2, 0, connect_ip="127.0.0.1", secure=False, serializer="msgpack", slots=4
        )
        handle = self.writer.export_handle()
        self.reader = MessageQueue.create_from_handle(handle, 0)
        self.id = handle.id_bytes()
        with self.reader._end._lock:
            self.nonce = self.reader._end._own[-8:]

    def hear(self, data: bytes) -> None:
        """Both hear it, as the threads that serve them would let them."""
        if data:  # an empty frame is dropped before
            with self.writer._end._lock:
                self.writer._end._on_frame(data, time.monotonic())
        with self.reader._end._lock:
            self.reader._end._on_frame(zmq.Frame(data))

    def use(self) -> None:
        """Whatever was heard, a call ends at once, with a value or with an error that says why."""
        for call in (
            lambda: self.writer.enqueue([1, "two"], timeout=0),
            lambda: self.reader.dequeue(timeout=0),
            self.writer.stats,
            self.reader.stats,
            self.reader.qsize,
        ):
            try:
                call()
            except fastipc.IPCError:
                pass

    def close(self) -> None:
        self.reader.close()
        self.writer.close()


class Words:
    def __init__(self, watch: Watch) -> None:
        self._ends: Ends | None = None
        self._n = 0
        self._watch = watch

    def __call__(self, case: list[bytes]) -> bool:
        if self._n % TURN == 0:
            self.close()
            self._ends = Ends()
        self._n += 1
        ends = self._ends
        assert ends is not None
        before = ends.writer.stats(), ends.reader.stats()
        for word in case:
            word = word.replace(KEPT_ID, ends.id)
            if self._n % 2:
                word = word.replace(b"nonce123", ends.nonce)
            with self._watch:
                ends.hear(word)
        ends.use()
        return (ends.writer.stats(), ends.reader.stats()) != before

    def close(self) -> None:
        if self._ends is not None:
            self._ends.close()
            self._ends = None


def run(name: str, target: Callable[[list[bytes]], bool], count: int, seed: int) -> None:
    rng = random.Random(f"{name} {seed}")
    kept = corpus(name)
    taken = 0
    before = None
    for n in range(count):
        case = kept[n] if n < len(kept) else mutate(rng, rng.choice(kept))
        if n >= len(kept) and rng.random() < 0.3:  # after another one
            case = rng.choice(kept) + case
        try:
            taken += target(case)
        except BaseException:
            print(f"{name}: case {n} of seed {seed}: {shown(case)}", file=sys.stderr)
            raise
        if n == count // 4:
            before = resident_bytes()
    assert before is not None
    grown = check_growth(before, 32 << 20)
    assert 0 < taken < count, (taken, count)
    print(f"{name}: {count} cases, {taken} of them taken, memory {grown / (1 << 20):+.1f} MiB")


def main(count: int, seed: int) -> None:
    watch = Watch()
    words = Words(watch)
    try:
        run("words", words, count // 4, seed)
    finally:
        words.close()
    run("handle", try_handle, count, seed)
    assert not watch.events, watch.events[:5]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
