"""Exceptions on their way to another process.

What travels is the exception itself as a pickle, if it survives one, and always its class's name,
its text and its traceback in words. On arrival it is raised as what it is, with those words as
its ``__cause__`` (a :class:`fastipc.RemoteError`), or else the RemoteError is raised. Loading a
pickle runs code: this is for processes that trust each other.
"""

from __future__ import annotations

import pickle
import traceback
from typing import NamedTuple

from .errors import RemoteError

__all__ = ["Failure", "pack", "unpack"]


class Failure(NamedTuple):
    """An exception, ready to be sent.

    Attributes:
        pickled: the exception; b"" if it can't be pickled.
        type_name, message, traceback: as of RemoteError.
    """

    pickled: bytes
    type_name: str
    message: str
    traceback: str


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as another:  # a __str__ of the user's
        return f"(its text can't be had: {type(another).__name__})"


def pack(error: BaseException) -> Failure:
    """Never raises, whatever the exception's own methods do."""
    kind = type(error)
    plain = kind.__module__ in ("builtins", "__main__", "__mp_main__")
    try:
        pickled = pickle.dumps(error, 5)
        # many a class pickles, and then can't be made again from what it pickled
        if type(pickle.loads(pickled)) is not kind:
            pickled = b""
    except Exception:
        pickled = b""
    try:
        lines = "".join(traceback.format_exception(error))
    except Exception:
        lines = "".join(traceback.format_tb(error.__traceback__))
    name = kind.__qualname__ if plain else f"{kind.__module__}.{kind.__qualname__}"
    return Failure(pickled, name, _text(error), lines)


def unpack(failure: Failure) -> BaseException:
    """What to raise here. Never raises."""
    remote = RemoteError(failure.type_name, failure.message, failure.traceback)
    if failure.pickled:
        try:
            error = pickle.loads(failure.pickled)
        except Exception:
            return remote
        if isinstance(error, BaseException):
            error.__cause__ = remote
            return error
    return remote
