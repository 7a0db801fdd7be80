"""Who has the address but not the handle: gets nothing, injects nothing, crashes nothing."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time

import pytest
import zmq
from support import NIGHTLY, eventually

import fastipc
from fastipc import HandleMismatch, MessageQueue, wire
from fastipc.addresses import split_endpoint

ROUNDS = 2000 if NIGHTLY else 200


class Served:
    """A writer and its reader, and how they do while strangers knock."""

    def __init__(self, secure: bool = True) -> None:
        self.writer = MessageQueue(1, 0, connect_ip="127.0.0.1", secure=secure)
        self.handle = self.writer.export_handle()
        self.reader = MessageQueue.create_from_handle(self.handle, 0)
        self.writer.wait_until_ready(30)
        self.where = split_endpoint(self.handle.address)
        self.number = 0

    def works(self, n: int = 20) -> None:
        """Messages arrive, and nothing else does."""
        for _ in range(n):
            self.writer.enqueue(("mine", self.number), timeout=30)
            assert self.reader.dequeue(30) == ("mine", self.number)
            self.number += 1
        assert self.reader.empty()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.close()
        self.reader.close()


@pytest.fixture(params=[True, False], ids=["secure", "plain"])
def served(request: pytest.FixtureRequest):
    with Served(request.param) as made:
        yield made


def test_random_bytes(served: Served) -> None:
    rng = random.Random(5)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00"
    stuck = []
    for i in range(ROUNDS):
        with socket.create_connection(served.where, timeout=10) as peer:
            data = rng.randbytes(rng.choice([1, 10, 64, 200, 5000]))
            if i % 3 == 0:
                mechanism = rng.choice([b"NULL", b"CURVE", b"PLAIN", b"x" * 20]).ljust(20, b"\0")
                data = greeting + mechanism + bytes([i % 2]) + bytes(31) + data
            try:
                peer.sendall(data)
            except OSError:
                continue
        if i % 40 == 0:
            served.works(3)
            # one that says nothing more, for as long as it likes
            stuck.append(socket.create_connection(served.where, timeout=10))
    served.works()
    for peer in stuck:
        peer.close()


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.XSUB, zmq.REQ, zmq.DEALER, zmq.PUSH, zmq.PAIR])
def test_a_plain_peer_gets_nothing_from_an_encrypted_queue(kind: int) -> None:
    with Served() as served, zmq.Context() as context, context.socket(kind) as peer:
        peer.linger = 0
        peer.sndhwm = 10
        if kind == zmq.SUB:
            peer.subscribe(b"")
        peer.connect(served.handle.address)
        if kind == zmq.XSUB:
            peer.send(b"\1")
        for _ in range(3):
            served.works(5)
            try:
                peer.send(b"injected", zmq.NOBLOCK)
            except zmq.ZMQError:
                pass
        if kind not in (zmq.PUSH, zmq.REQ):
            assert not peer.poll(300)
        served.works()


@pytest.mark.parametrize("key", ["another", "reader"])
def test_a_wrong_key_gets_nothing(key: str) -> None:
    with Served() as served, zmq.Context() as context, context.socket(zmq.XSUB) as peer:
        peer.linger = 0
        public, secret = zmq.curve_keypair()
        peer.curve_serverkey = zmq.curve_keypair()[0] if key == "another" else public
        peer.curve_publickey, peer.curve_secretkey = public, secret
        peer.connect(served.handle.address)
        peer.send(b"\1")
        served.works(50)
        assert not peer.poll(300)
        served.works()


def test_who_has_the_address_only_is_not_let_in() -> None:
    import msgspec

    with Served() as served:
        stranger = msgspec.structs.replace(
            served.handle, server_key=zmq.curve_keypair()[0].decode()
        )
        with MessageQueue.create_from_handle(stranger, 0) as reader:
            with pytest.raises(HandleMismatch, match="key"):
                reader.wait_until_ready(60)
        served.works()


def test_words_that_cannot_be_right_are_ignored(served: Served) -> None:
    """Even from somebody who has the key: random frames, cut and changed words, foreign ranks."""
    rng = random.Random(6)
    topics = wire.Topics(served.handle.id_bytes())
    nonce = wire.new_nonce()
    words = [
        topics.to_writer(wire.HELLO, wire.Hello(nonce, 99, wire.ANY, 1, "h").pack()),
        topics.to_writer(wire.HELLO, wire.Hello(nonce, 0, wire.ANY, 1, "h").pack()),
        topics.to_writer(wire.HELLO, wire.Hello(nonce, 0, 5, 1, "h").pack()),
        topics.to_writer(wire.ACK, wire.Ack(nonce, 1 << 60, 1 << 60).pack()),
        topics.to_writer(wire.LEFT, wire.Ack(nonce, 0, 0).pack()),
        topics.to_writer(77, b"what?"),
        topics.to_all(wire.DATA, 3),
        wire.MAGIC,
        wire.MAGIC + bytes(200),
    ]
    with zmq.Context() as context, context.socket(zmq.XSUB) as peer:
        peer.linger = 0
        if served.handle.server_key:
            peer.curve_serverkey = served.handle.server_key.encode()
            peer.curve_publickey, peer.curve_secretkey = zmq.curve_keypair()
        peer.connect(served.handle.address)
        peer.send(b"\1" + topics.own(nonce))
        for i in range(ROUNDS):
            word = rng.choice(words)
            change = rng.randrange(5)
            if change == 0:
                word = word[: rng.randrange(1, len(word) + 1)]
            elif change == 1:
                at = rng.randrange(len(word))
                word = word[:at] + rng.randbytes(1) + word[at + 1 :]
            elif change == 2:
                word = b"\2" + rng.randbytes(rng.randrange(1, 300))
            peer.send(word)
            if i % 50 == 0:
                served.works(2)
        # longer than a reader ever is: the connection is dropped, not the memory used up
        peer.send(b"fIPC" + bytes(1 << 20))
        served.works()
    assert served.writer.stats()["peers"][1]["state"] == "active"


def test_a_peer_that_never_reads_holds_nobody_up() -> None:
    """Without encryption anyone may subscribe to all of it, and then not read."""
    with Served(secure=False) as served, zmq.Context() as context:
        with context.socket(zmq.XSUB) as peer:
            peer.linger = 0
            peer.rcvhwm = 1
            peer.rcvbuf = 4096
            peer.connect(served.handle.address)
            peer.send(b"\1")
            eventually(lambda: len(served.writer._end._accepted) == 2)
            time.sleep(0.1)
            big = os.urandom(256 * 1024)
            for _ in range(1200):
                served.writer.enqueue(big, timeout=30)
                assert len(served.reader.dequeue(30)) == len(big)
            served.works()


def test_a_reader_believes_no_other_server() -> None:
    """Somebody else on the writer's port can't feed a reader anything, hostile pickles least."""
    with zmq.Context() as context, context.socket(zmq.XPUB) as impostor:
        impostor.linger = 0
        port = impostor.bind_to_random_port("tcp://127.0.0.1")
        with MessageQueue(1, 0, connect_ip="127.0.0.1") as queue:
            import msgspec

            handle = msgspec.structs.replace(
                queue.export_handle(), address=f"tcp://127.0.0.1:{port}"
            )
            with MessageQueue.create_from_handle(handle, 0) as reader:
                stop = threading.Event()

                def feed() -> None:
                    topics = wire.Topics(handle.id_bytes())
                    hostile = b"cos\nsystem\n(S'touch /tmp/never'\ntR."
                    frame = wire.FRAME.pack(topics.all, wire.DATA, wire.BARE, 0) + hostile
                    while not stop.is_set():
                        impostor.send(frame)
                        time.sleep(0.01)

                thread = threading.Thread(target=feed)
                thread.start()
                try:
                    with pytest.raises(HandleMismatch):
                        reader.dequeue(60)
                finally:
                    stop.set()
                    thread.join()


def test_what_a_writer_sends_wrongly_is_an_error_not_a_crash() -> None:
    """The last line, should the key be in the wrong hands: a reader checks what it is told."""
    rng = random.Random(7)
    with Served() as served:
        end = served.reader._end
        served.reader.wait_until_ready(30)
        topics = wire.Topics(served.handle.id_bytes())
        own = end._own
        for i in range(ROUNDS):
            kind = rng.randrange(0, 12)
            if i % 2:
                data = own + bytes([kind]) + rng.randbytes(rng.randrange(40))
            else:
                data = wire.FRAME.pack(topics.all, kind, rng.randrange(4), rng.randrange(1 << 40))
                data = data[: rng.randrange(len(data) + 1)] + rng.randbytes(rng.randrange(9))
            if kind in (wire.CLOSED, wire.REFUSED, wire.DATA):
                continue  # these are believed, and tested elsewhere
            try:
                with end._lock:
                    end._on_frame(zmq.Frame(data))
            except struct.error as error:
                pytest.fail(f"{data!r}: {error}")
        served.works()


def test_the_words_of_the_wire() -> None:
    hello = wire.Hello(b"12345678", -1, wire.ANY, 1 << 40, "höst" * 100)
    back = wire.Hello.unpack(hello.pack())
    assert (back.nonce, back.rank, back.wanted, back.pid) == (b"12345678", -1, wire.ANY, 1 << 40)
    assert back.host.startswith("höst")
    ack = wire.Ack(b"12345678", 5, 6, True)
    assert wire.Ack.unpack(ack.pack()) == ack
    welcome = wire.Welcome(True, 9, 256, 1 << 50)
    assert wire.Welcome.unpack(welcome.pack()) == welcome
    for kind in (wire.Hello, wire.Ack, wire.Welcome):
        with pytest.raises(struct.error):
            kind.unpack(b"short")
    assert wire.unpack_text(b"a\x00\x1b[31mb\xff") == "a??[31mb\ufffd"
    assert len(wire.MAGIC) == 4
    assert wire.MAGIC[0] > 1
    assert fastipc.wire.FRAME.size == 32
