"""Typed messages on the ring: msgpack instead of pickle.

The codec (:mod:`fastipc.codec`) makes a main frame and one frame per large tensor or array; in the
ring they are a message's buffers, copied once in and once out like any others. What arrives is
checked against a declared type, and no pickle is ever loaded, whatever the environment allows.
"""

from __future__ import annotations

from typing import Any

from .codec import MsgpackDecoder, MsgpackEncoder
from .pickling import Coding

__all__ = ["msgpack_coding"]


def msgpack_coding(type: Any) -> Coding:
    """Objects by msgpack, for one endpoint; type is what it receives (None: plain values).

    Encoder and decoder are safe for several threads. Raises TypeError for a type that msgspec
    can't decode.
    """
    encode = MsgpackEncoder(allow_insecure_serialization=False).encode
    decode = MsgpackDecoder(type, allow_insecure_serialization=False).decode

    def dump(obj: Any) -> tuple[list[Any], int]:
        return encode(obj), 1

    # Received buffers are this process's own memory, so tensors and arrays lie in them.
    return Coding(dump, decode, decode)
