"""Private directories that the kernel knows the owner of: those of ipc sockets, and those that
multiprocessing makes for the senders of tensor_ipc.

The owner holds a lock (flock: of the open file, not of the process) for as long as it lives, and
the kernel drops it however the owner ends; so whoever gets the lock knows that the owner is gone
and may remove what it left. Neither pids nor ages say anything. A forked child closes its copy of
the descriptor, which leaves the parent's lock alone.

No other module of fastipc but `settings` is needed here, and no ZMQ: `fastipc clean` is to be quick
and to work when nothing else does.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import itertools
import os
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .settings import settings

__all__ = ["SocketDirectory", "mark_temp_dir", "socket_bases", "sweep_sockets", "sweep_tensors"]

# The socket address field holds 108 bytes, the last of them zero.
MAX_IPC_PATH = 107

PREFIX = "fastipc-"
_RANDOM = 8  # what mkdtemp appends

# In a temporary directory of multiprocessing: says that the process that made it sends tensors.
MARK = "fastipc-tensors"
_TEMP_PREFIX = "pymp-"

# Told of each directory found: its path, and why it could not be removed (None: it was, or would
# be).
Seen = Callable[[str, OSError | None], None]


# -- the owner's side ------------------------------------------------------------------------------


class SocketDirectory:
    """The private directory of this process's ipc sockets. Thread safe.

    A forked child leaves its parent's alone, and makes its own when it asks for a path.
    """

    def __init__(self) -> None:
        self._forget()
        # Held while forking: a child that is forked between open and lock would keep a descriptor
        # that it doesn't know of.
        os.register_at_fork(
            before=lambda: self._lock.acquire(),
            after_in_parent=lambda: self._lock.release(),
            after_in_child=self._after_fork_in_child,
        )

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._path: str | None = None
        self._fd = -1
        self._names = itertools.count()

    def socket_path(self) -> str:
        """A path that nothing else uses.

        Raises:
            OSError: ENAMETOOLONG, before anything is created.
        """
        with self._lock:
            if self._path is None:
                self._create()
            return f"{self._path}/{next(self._names)}"

    def _create(self) -> None:
        base = base_directory()
        sweep_sockets(base)
        while True:
            path = tempfile.mkdtemp(prefix=PREFIX, dir=base)  # mode 0700
            fd = -1
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Somebody who sweeps may have been in between.
                if os.path.samestat(os.stat(path), os.fstat(fd)):
                    break
            # Who sweeps, or looks what is to be swept, got it before it was locked: another one.
            with contextlib.suppress(OSError):
                os.rmdir(path)
            if fd >= 0:
                os.close(fd)
        self._path, self._fd = path, fd
        atexit.register(self.remove)
        # Children of multiprocessing end without atexit, but run these. Others have no need to
        # import it.
        util: Any = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.Finalize(self, self.remove, exitpriority=-100)

    def remove(self, *, wait: bool = True) -> None:
        """Removes it, with its sockets; the next path is in a new one. Without waiting: not if
        another thread is about to make it, to get a path or to remove it."""
        if not self._lock.acquire(blocking=wait):
            return
        try:
            path, fd, self._path, self._fd = self._path, self._fd, None, -1
        finally:
            self._lock.release()
        if path is not None:
            with contextlib.suppress(OSError):
                _empty(fd, None)
                os.rmdir(path)
            os.close(fd)

    def _after_fork_in_child(self) -> None:
        # Closed, not unlocked: the lock belongs to the open file, which the parent still has.
        if self._fd >= 0:
            os.close(self._fd)
        self._forget()


def base_directory() -> str:
    """Where the directories of ipc sockets are made.

    Raises:
        OSError: ENAMETOOLONG: FASTIPC_RPC_BASE_PATH leaves no room for a socket.
    """
    # Two slashes, the name, and room for a million sockets.
    room = MAX_IPC_PATH - (2 + len(PREFIX) + _RANDOM + 6)
    base = settings().rpc_base_path
    if base is None:
        base = tempfile.gettempdir()
        if len(os.fsencode(base)) > room:
            base = "/tmp"
    base = os.path.abspath(base)
    length = len(os.fsencode(base))
    if length > room:
        raise OSError(
            errno.ENAMETOOLONG,
            f"no room for a socket under a directory of {length} bytes (at most {room}); "
            "set FASTIPC_RPC_BASE_PATH to a shorter one",
            base,
        )
    return base


def socket_bases() -> list[str]:
    """Where directories may be that processes of this user made, with these variables or without
    them."""
    found = [settings().rpc_base_path, tempfile.gettempdir(), "/tmp"]
    return list(dict.fromkeys(os.path.abspath(path) for path in found if path is not None))


_mark_fd = -1
_mark_pid = -1


def mark_temp_dir() -> None:
    """Makes multiprocessing's temporary directory of this process, unless there is one, and marks
    it as one that may be swept when this process is gone.

    A torch tensor's descriptor is passed on through a socket in there, which a process that is
    killed leaves behind. A directory that was there before may be another process's (children
    inherit their parent's) and is left unmarked.
    """
    global _mark_fd, _mark_pid
    from multiprocessing import process, util

    if _mark_pid == os.getpid():
        return
    _mark_pid = os.getpid()
    if process.current_process()._config.get("tempdir") is not None:  # type: ignore[attr-defined]
        return
    path: str = util.get_temp_dir()  # type: ignore[attr-defined]
    fd = os.open(os.path.join(path, MARK), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    _mark_fd = fd


def _close_mark() -> None:
    global _mark_fd
    if _mark_fd >= 0:
        os.close(_mark_fd)
        _mark_fd = -1


os.register_at_fork(after_in_child=_close_mark)


# -- sweeping --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _ours(path: str) -> Iterator[int]:
    """A descriptor of the directory, or -1: it isn't this user's alone, or isn't a directory."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield -1
        return
    try:
        info = os.fstat(fd)
        private = info.st_uid == os.geteuid() and stat.S_IMODE(info.st_mode) == 0o700
        yield fd if private else -1
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    """Whether the lock could be had: then the owner is gone."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_at(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except OSError:
        return False


def _foreign(fd: int, mark: str | None) -> str | None:
    """The name of something in the directory that isn't a socket, nor the mark."""
    with os.scandir(fd) as entries:
        for entry in entries:
            if entry.name == mark or stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                continue
            return entry.name
    return None


def _empty(fd: int, mark: str | None) -> None:
    """Unlinks the sockets, and then the mark. Through the descriptor: whatever becomes of the path
    meanwhile."""
    with os.scandir(fd) as entries:
        for entry in entries:
            if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.name, dir_fd=fd)
    if mark is not None:
        os.unlink(mark, dir_fd=fd)


def _remove(path: str, fd: int, mark: str | None, dry_run: bool, seen: Seen | None) -> None:
    error: OSError | None = None
    try:
        name = _foreign(fd, mark)
        if name is not None:  # not ours; it keeps its directory
            raise OSError(errno.ENOTEMPTY, f"there is a file that is none of fastipc's: {name}")
        if not dry_run:
            _empty(fd, mark)
            os.rmdir(path)
    except FileNotFoundError:
        return  # it went meanwhile
    except OSError as caught:
        error = caught
    if seen is not None:
        seen(path, error)


def _names(base: str, prefix: str) -> list[str]:
    with os.scandir(base) as entries:
        return sorted(
            entry.path
            for entry in entries
            if entry.name.startswith(prefix) and len(entry.name) == len(prefix) + _RANDOM
        )


def sweep_sockets(base: str, *, dry_run: bool = False, seen: Seen | None = None) -> None:
    """Removes the directories of ipc sockets under `base` whose owners are gone. A base that can't
    be listed has none."""
    paths: list[str] = []
    with contextlib.suppress(OSError):
        paths = _names(base, PREFIX)
    for path in paths:
        with _ours(path) as fd:
            if fd >= 0 and _locked(fd) and _is_at(path, fd):
                _remove(path, fd, None, dry_run, seen)


def _refuses(path: str) -> bool:
    """Whether nobody listens at the socket any more, as the kernel knows."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def sweep_tensors(base: str, *, dry_run: bool = False, seen: Seen | None = None) -> None:
    """Removes the temporary directories of multiprocessing under `base` that senders of tensors
    made and marked, when they are gone and nobody who inherited them listens there."""
    paths: list[str] = []
    with contextlib.suppress(OSError):
        paths = _names(base, _TEMP_PREFIX)
    for path in paths:
        with _ours(path) as fd:
            if fd < 0:
                continue
            try:
                mark = os.open(MARK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            except OSError:
                continue  # no mark: some other program's
            try:
                sockets = [name for name in os.listdir(fd) if name != MARK]
                if (
                    _locked(mark)
                    and _is_at(path, fd)
                    and all(_refuses(f"/proc/self/fd/{fd}/{name}") for name in sockets)
                ):
                    _remove(path, fd, MARK, dry_run, seen)
            finally:
                os.close(mark)
