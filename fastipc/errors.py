"""The exceptions of fastipc. All are :class:`IPCError`, all survive pickling.

Most also are the built-in exception that code written for ``queue.Queue``, pipes or files already
catches: an empty read is a ``queue.Empty`` and a ``TimeoutError``, a dead peer is a
``ConnectionError``.
"""

from __future__ import annotations

import errno
import queue

__all__ = [
    "ChildDied",
    "Closed",
    "DecodeError",
    "Empty",
    "EngineDeadError",
    "Full",
    "HandleMismatch",
    "IPCError",
    "NotReady",
    "PeerDied",
    "RemoteError",
    "RequestFailed",
    "ReplyTimeout",
    "SharedMemoryFull",
    "SlowConsumer",
    "TooManyRequests",
    "WorkerDied",
]


class IPCError(Exception):
    """Base of every exception that fastipc raises on its own account."""


class Empty(IPCError, queue.Empty, TimeoutError):
    """No message arrived within the timeout. Nothing was taken; the next call works."""


class Full(IPCError, queue.Full, TimeoutError):
    """No room appeared within the timeout. Nothing will be delivered; the next call works."""


class NotReady(IPCError, TimeoutError):
    """Not every rank had attached within the timeout.

    Attributes:
        missing: the ranks that had not.
    """

    def __init__(self, message: str = "", missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.missing)


class Closed(IPCError, RuntimeError, ValueError):
    """This end was closed or shut down, or the other side has closed and is drained."""


class PeerDied(IPCError, ConnectionError):
    """A process at the other end of the queue ended without closing it.

    Attributes:
        rank: the reader's rank, None when it was the writer.
        pid: its process id, as that process saw it.
        host: the name of the host it ran on.
    """

    def __init__(
        self,
        message: str = "a peer died",
        rank: int | None = None,
        pid: int | None = None,
        host: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.pid = pid
        self.host = host

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.rank, self.pid, self.host)


class ChildDied(PeerDied):
    """A process that this one had started ended although nobody asked it to.

    Attributes:
        rank, pid, host: as of PeerDied; rank None where there is none.
        exitcode: what it exited with, or minus the signal that killed it; None if unknown.
    """

    def __init__(
        self,
        message: str = "a child process died",
        rank: int | None = None,
        pid: int | None = None,
        host: str | None = None,
        exitcode: int | None = None,
    ) -> None:
        super().__init__(message, rank, pid, host)
        self.exitcode = exitcode

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.rank, self.pid, self.host, self.exitcode)


class WorkerDied(ChildDied):
    """A worker of an executor ended: calls that wait for it fail, and so do later ones."""


class ReplyTimeout(IPCError, TimeoutError):
    """Workers had not replied to a call within its timeout. A reply that comes later is dropped;
    the next call works.

    Attributes:
        missing: the ranks that had not.
    """

    def __init__(self, message: str = "", missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.missing)


class RemoteError(IPCError, RuntimeError):
    """An exception of another process, in words.

    It is the ``__cause__`` of the exception itself; where that can't be had here (it doesn't
    pickle, or its class can't be imported), it is raised in its stead.

    Attributes:
        type_name: the class of the exception there, with its module unless that is built in.
        message: its text.
        traceback: the traceback there, as Python prints it.
    """

    def __init__(self, type_name: str = "", message: str = "", traceback: str = "") -> None:
        super().__init__(type_name, message, traceback)
        self.type_name = type_name
        self.message = message
        self.traceback = traceback

    def __str__(self) -> str:
        said = f"{self.type_name}: {self.message}" if self.message else self.type_name
        return f"{said}\n\n{self.traceback.rstrip()}" if self.traceback else said


class SharedMemoryFull(IPCError, OSError):
    """There is not enough room for the pages of a segment. Never a SIGBUS.

    Attributes:
        errno: ``ENOSPC``.
        needed, available: bytes.
    """

    def __init__(self, message: str = "", needed: int = 0, available: int = 0) -> None:
        super().__init__(errno.ENOSPC, message)
        self.needed = needed
        self.available = available

    def __str__(self) -> str:
        return str(self.strerror)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self.strerror), self.needed, self.available)


class HandleMismatch(IPCError, ValueError):
    """A handle doesn't lead to its queue, or not as the rank that was asked for.

    Attributes:
        gone: True when the queue did exist, but its writer has closed it or ended.
    """

    def __init__(self, message: str = "", gone: bool = False) -> None:
        super().__init__(message)
        self.gone = gone

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.gone)


class DecodeError(IPCError, ValueError):
    """A frame can't be what it claims to be. It was skipped; the next call works."""


class EngineDeadError(IPCError, ConnectionError):
    """An engine core has ended, or can't be reached any more.

    Attributes:
        engine: its index; None when it is all of them.
        exitcode: of its process, negative for a signal; None when it isn't known.
    """

    def __init__(
        self, message: str = "", engine: int | None = None, exitcode: int | None = None
    ) -> None:
        super().__init__(message)
        self.engine = engine
        self.exitcode = exitcode

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.engine, self.exitcode)


class RequestFailed(IPCError, RuntimeError):
    """The engine core refused or gave up one request, an output of it can't be decoded, or a
    utility call raised. The next works.

    Its ``__cause__`` is a RemoteError with the traceback there, if there was an exception.

    Attributes:
        request_id: of the request, "" for a call.
        kind: the name of the exception (in the engine core, if it was there).
    """

    def __init__(self, message: str = "", request_id: str = "", kind: str = "") -> None:
        super().__init__(message)
        self.request_id = request_id
        self.kind = kind

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.request_id, self.kind)


class SlowConsumer(RequestFailed):
    """A request was aborted because nobody took its outputs and more than the limit gathered."""


class TooManyRequests(IPCError, RuntimeError):
    """So many requests are under way that another is refused. Nothing was sent; try again when one
    has finished.

    Attributes:
        in_flight, limit: requests, or bytes of requests.
    """

    def __init__(self, message: str = "", in_flight: int = 0, limit: int = 0) -> None:
        super().__init__(message)
        self.in_flight = in_flight
        self.limit = limit

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.in_flight, self.limit)
