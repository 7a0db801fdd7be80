"""What writers and readers on different hosts say to each other. No sockets here.

Every ZMQ frame begins with the topic: four letters, protocol version, queue id, and a letter for
whom it is meant: 'A' all readers, 'R' one connection of one reader (its random nonce follows), 'W'
the writer. So neither another version nor another queue's reader matches anything.

    writer to readers
      DATA     seq, flags, the message as it would lie in the ring          to all
      RESEND   precedes, as a frame of its own, a DATA that is sent again   to one
      STATUS   head: the sequence number that the next message will have    to all, or to one
      READY    every rank has attached                                      to all
      CLOSED   head: the writer has closed, and this was all                to all, or to one
      WELCOME  start: the first sequence number that this reader gets       to one
      REFUSED  why                                                          to one
    reader to writer
      HELLO    rank, the next sequence number wanted (or ANY), who it is
      ACK      consumed and received: all below these numbers have been
      LEFT     the same, and that the reader has closed

A reader drops a sequence number that it has had and asks again (HELLO) when one is missing, when a
STATUS tells of more than it has, and after each reconnection. The writer keeps every message until
all readers have consumed it, and sends what is asked for again. So a torn connection, or a message
that ZMQ dropped, costs time and nothing else.
"""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass

__all__ = ["ANY", "PROTOCOL", "Ack", "Hello", "Topics", "Welcome", "pack_text", "unpack_text"]

MAGIC = b"fIPC"  # the first byte must not be 0 or 1: those are ZMQ's own subscriptions
PROTOCOL = 1
ANY = (1 << 64) - 1

DATA, RESEND, STATUS, READY, CLOSED, WELCOME, REFUSED = 1, 2, 3, 4, 5, 6, 7
HELLO, ACK, LEFT = 8, 9, 10

# flags of DATA
BARE = 1
# flags of ACK
HAS_CLOSED = 1

NONCE_BYTES = 8
_TEXT_MOST = 200  # bytes of a host's name or of a reason

# topic to all, kind, flags, number: sequence or head
FRAME = struct.Struct("<22sBBQ")
_WELCOME = struct.Struct("<BQQQ")  # ready, start, credit in messages, credit in bytes
_HELLO = struct.Struct("<8sqQq")  # nonce, rank, wanted, pid; then the host's name, 0, sign
_ACK = struct.Struct("<8sQQB")  # nonce, consumed, received, flags
KIND_AT = 22  # of the frames to all and to the writer


class Topics:
    """The topics of one queue."""

    def __init__(self, queue_id: bytes) -> None:
        prefix = MAGIC + bytes([PROTOCOL]) + queue_id
        self.all = prefix + b"A"
        self.one = prefix + b"R"
        self.writer = prefix + b"W"
        self.one_bytes = len(self.one) + NONCE_BYTES

    def own(self, nonce: bytes) -> bytes:
        """What one connection subscribes to."""
        return self.one + nonce

    def to_all(self, kind: int, number: int = 0) -> bytes:
        return FRAME.pack(self.all, kind, 0, number)

    def to_one(self, nonce: bytes, kind: int, body: bytes = b"") -> bytes:
        return self.own(nonce) + bytes([kind]) + body

    def to_writer(self, kind: int, body: bytes) -> bytes:
        return self.writer + bytes([kind]) + body


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def number(body: bytes) -> int:
    return int.from_bytes(body[:8], "little")


def pack_number(value: int) -> bytes:
    return value.to_bytes(8, "little")


def pack_text(text: str) -> bytes:
    return text.encode("utf-8", "replace")[:_TEXT_MOST]


def unpack_text(data: bytes) -> str:
    """For people only: whatever came, printable and short."""
    text = data[:_TEXT_MOST].decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text)


@dataclass(frozen=True)
class Welcome:
    ready: bool
    start: int
    credit_messages: int
    credit_bytes: int

    def pack(self) -> bytes:
        return _WELCOME.pack(self.ready, self.start, self.credit_messages, self.credit_bytes)

    @classmethod
    def unpack(cls, body: bytes) -> Welcome:
        """Raises struct.error."""
        ready, start, messages, nbytes = _WELCOME.unpack(body)
        return cls(bool(ready), start, messages, nbytes)


@dataclass(frozen=True)
class Hello:
    nonce: bytes
    rank: int
    wanted: int
    pid: int
    host: str
    sign: str = ""  # where it can be knocked at; see liveness.py

    def pack(self) -> bytes:
        head = _HELLO.pack(self.nonce, self.rank, self.wanted, self.pid)
        return head + pack_text(self.host.replace("\0", "")) + b"\0" + pack_text(self.sign)

    @classmethod
    def unpack(cls, body: bytes) -> Hello:
        """Raises struct.error."""
        nonce, rank, wanted, pid = _HELLO.unpack_from(body)
        host, _, sign = body[_HELLO.size :].partition(b"\0")
        return cls(nonce, rank, wanted, pid, unpack_text(host), unpack_text(sign))


@dataclass(frozen=True)
class Ack:
    nonce: bytes
    consumed: int
    received: int
    has_closed: bool = False

    def pack(self) -> bytes:
        return _ACK.pack(self.nonce, self.consumed, self.received, self.has_closed * HAS_CLOSED)

    @classmethod
    def unpack(cls, body: bytes) -> Ack:
        """Raises struct.error."""
        nonce, consumed, received, flags = _ACK.unpack(body)
        return cls(nonce, consumed, received, bool(flags & HAS_CLOSED))
