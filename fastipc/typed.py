"""Typed messages on the ring: msgpack instead of pickle.

The codec (:mod:`fastipc.codec`) makes a main frame and one frame per large tensor or array; in the
ring they are a message's buffers, copied once in and once out like any others. What arrives is
checked against a declared type, and no pickle is ever loaded, whatever the environment allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._core import Endpoint
from .codec import MsgpackDecoder, MsgpackEncoder

__all__ = ["use_msgpack"]


def use_msgpack(end: Endpoint, type: Any) -> Callable[[Any], tuple[list[Any], int]]:
    """Makes msgpack the endpoint's serializer; type is what it receives (None: plain values).
    Returns what makes the pieces of a message.

    Encoder and decoder are this endpoint's own, and safe for several threads.
    """
    encode = MsgpackEncoder(allow_insecure_serialization=False).encode
    decode = MsgpackDecoder(type, allow_insecure_serialization=False).decode

    def dump(obj: Any) -> tuple[list[Any], int]:
        return encode(obj), 1

    # Received buffers are this process's own memory, so tensors and arrays lie in them.
    end.use_serializer(dump, decode, decode)
    return dump
