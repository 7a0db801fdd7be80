"""What turns objects into the buffers of a message, and back: by name, or an object of the user's.

``"pickle"`` is the default (pickling.py), ``"msgpack"`` carries typed messages (typed.py), and
``"raw"`` sends bytes-like objects as they are, and receives bytes: no pickle is read or written.
Anything else is an object with

    name               str; what the handle says, and a reader must have, too
    dumps(obj)         -> a list of at least one contiguous bytes-like object
    loads(buffers)     -> the object; buffers is a list of as many writable memoryviews, which
                       belong to the receiver, 64-byte aligned if they are large

Its methods may be called from several threads at once. What dumps returns is copied before enqueue
returns. Without a ``name`` the class's own, with its module, is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from .errors import HandleMismatch
from .pickling import Coding, pickle_coding

__all__ = ["Serializer", "coding_of", "name_of", "serializer_for"]


@runtime_checkable
class Serializer(Protocol):
    """What an object given as ``serializer=`` must have."""

    def dumps(self, obj: Any, /) -> Sequence[Any]: ...

    def loads(self, buffers: list[memoryview], /) -> Any: ...


def _pickle(_: Any) -> Coding:
    return pickle_coding()


def _msgpack(message_type: Any) -> Coding:
    from .typed import msgpack_coding  # imported for those who use it

    return msgpack_coding(message_type)


def _raw(_: Any) -> Coding:
    def dump(obj: Any) -> tuple[list[Any], int]:
        try:
            view = memoryview(obj)
        except TypeError:
            raise TypeError(
                f"serializer='raw' sends bytes-like objects, and not {type(obj).__name__}"
            ) from None
        if view.format == "O":
            raise TypeError("serializer='raw' sends bytes, and this array has addresses of objects")
        # The bytes of an array in another order are gathered in C order, as bytes() does.
        return [view if view.c_contiguous else view.tobytes()], 1

    return Coding(dump, bytes, lambda blocks: bytes(blocks[0]), True)


# name -> what makes it for an end, given the type of its messages
_KNOWN: dict[str, Callable[[Any], Coding]] = {
    "pickle": _pickle,
    "msgpack": _msgpack,
    "raw": _raw,
}


def name_of(serializer: str | Serializer, message_type: Any = None) -> str:
    """What a handle calls it. Raises ValueError for a name that nobody knows, or a type with any
    but "msgpack", and TypeError for an object without dumps and loads."""
    if message_type is not None and serializer != "msgpack":
        raise ValueError(f"type= goes with serializer='msgpack', not {serializer!r}")
    if isinstance(serializer, str):
        if serializer not in _KNOWN:
            raise ValueError(
                f"there is no serializer {serializer!r}: use "
                f"{' or '.join(map(repr, _KNOWN))}, or an object with dumps and loads"
            )
        return serializer
    if not isinstance(serializer, Serializer):
        raise TypeError(
            f"a serializer is a name or an object with dumps and loads, not "
            f"{type(serializer).__name__}"
        )
    kind = type(serializer)
    name = getattr(serializer, "name", None) or f"{kind.__module__}.{kind.__qualname__}"
    if not isinstance(name, str) or name in _KNOWN:
        raise ValueError(f"{name!r} can't be the name of a serializer of one's own")
    return name


def serializer_for(
    name: str, given: str | Serializer | None, message_type: Any = None
) -> str | Serializer:
    """What a reader uses, whose handle says `name` and who was given this, or None.

    Raises HandleMismatch unless both are the same, ValueError for a type that doesn't go with it.
    """
    if message_type is not None and name != "msgpack":
        raise ValueError(f"type= goes with serializer='msgpack', not {name!r}")
    if given is None:
        if name in _KNOWN:
            return name
        raise HandleMismatch(
            f"the queue's writer uses a serializer of its own, {name!r}: pass the same to "
            "create_from_handle(handle, rank, serializer=...)"
        )
    mine = name_of(given)
    if mine != name:
        raise HandleMismatch(f"the queue's writer uses the serializer {name!r}, not {mine!r}")
    return given


def _is_one(made: Any) -> bool:
    """Whether it is a buffer, or text, and no list of them: its items may be buffers, too, and are
    not what was meant."""
    try:
        memoryview(made)
    except (TypeError, ValueError, BufferError):
        return isinstance(made, str)
    return True


def coding_of(serializer: str | Serializer, message_type: Any = None) -> Coding:
    """What an end of a queue is given to use it; message_type is for "msgpack". Raises TypeError
    for a type that can't be decoded."""
    if isinstance(serializer, str):
        return _KNOWN[serializer](message_type)
    dumps, loads = serializer.dumps, serializer.loads

    def dump(obj: Any) -> tuple[list[Any], int]:
        made = dumps(obj)
        if type(made) is not list and (not isinstance(made, Iterable) or _is_one(made)):
            raise TypeError(
                f"{type(serializer).__name__}.dumps must return a list of bytes-like objects, not "
                f"{type(made).__name__}"
            )
        buffers = list(made)
        if not buffers:
            raise ValueError(f"{type(serializer).__name__}.dumps returned no buffer")
        return buffers, 1

    return Coding(
        dump,
        lambda one: loads([memoryview(bytearray(one))]),
        lambda blocks: loads([memoryview(block) for block in blocks]),
    )
