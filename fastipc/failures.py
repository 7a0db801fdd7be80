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

__all__ = ["Failure", "lines", "pack", "text", "unpack"]


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


def text(error: BaseException) -> str:
    """What the exception says, fit for UTF-8. Never raises, whatever its own __str__ does."""
    try:
        return _printable(str(error))
    except Exception as another:
        return f"(its text can't be had: {type(another).__name__})"


def lines(error: BaseException) -> str:
    """Its traceback as Python prints it, fit for UTF-8. Never raises."""
    try:
        found = traceback.format_exception(error)
    except Exception:
        found = traceback.format_tb(error.__traceback__)
    return _printable("".join(found))


def _printable(said: str) -> str:
    """With what UTF-8 doesn't have escaped: halves of characters, as names of files have them that
    are of another encoding."""
    return said.encode("utf-8", "backslashreplace").decode()


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
    name = kind.__qualname__ if plain else f"{kind.__module__}.{kind.__qualname__}"
    return Failure(pickled, name, text(error), lines(error))


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
