"""Opening the sockets between engines, front ends and the group, which a forked child closes.

The kernel tells a peer that a process has ended when the last copy of its connection is closed, and
a forked child has copies of all of them: while it lived, nobody would see its parent die. So the
child closes its copies, which are found by the addresses that they are bound at or connected to.
Those are of these channels alone: the paths are in private directories, the ports are chosen by the
system.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import zmq

from .. import addresses
from ..keeper import stream_sockets
from ..sockets import make_zmq_socket

__all__ = ["open_channel"]

# A path, or the address and port, at which a socket is bound or (False) to which it is connected.
_End = tuple[bool, str | tuple[str, int]]

# Held while a socket is made, and while forking: a child must know of each. (Reentrant, for a
# signal's handler may fork.)
_lock = threading.RLock()
_ends: weakref.WeakKeyDictionary[Any, _End] = weakref.WeakKeyDictionary()


def open_channel(ctx: zmq.Context[Any], path: str, kind: int, bind: bool, **options: Any) -> Any:
    """A socket as `make_zmq_socket` makes it. Forked children don't keep it, nor its connections.

    Thread safe.
    """
    end = None if bind else _end(path, bind)
    with _lock:
        made = make_zmq_socket(ctx, path, kind, bind, **options)
        if bind:
            end = _end(made.getsockopt_string(zmq.LAST_ENDPOINT), bind)
        if end is not None:
            _ends[made] = end
    return made


def _end(path: str, bind: bool) -> _End | None:
    if path.startswith("ipc://"):
        return bind, path.removeprefix("ipc://")
    host, port = addresses.split_endpoint(path)
    try:
        return bind, (_plain(addresses.parse(host, "the address of a channel")), port)
    except ValueError:
        return None  # a name that nobody knows: there is no connection either


def _plain(host: str) -> str:
    """The address as it is compared: without a scope, and not mapped."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def _name(of: tuple[Any, ...] | str | bytes) -> str | tuple[str, int]:
    """What the kernel calls the end of a connection, as `_End` has it."""
    if isinstance(of, tuple):
        return _plain(of[0]), of[1]
    return os.fsdecode(of)


def _found(ends: Iterable[_End]) -> list[int]:
    """The descriptors of these sockets and of their connections."""
    wanted = set(ends)
    everywhere = {end[1] for bound, end in wanted if bound and end[0] in ("0.0.0.0", "::")}
    found = []
    for view in stream_sockets():
        if view.family not in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
            continue
        try:
            here = _name(view.getsockname())
            ours = (True, here) in wanted or (isinstance(here, tuple) and here[1] in everywhere)
            if ours or (False, _name(view.getpeername())) in wanted:
                found.append(view.fileno())
        except OSError:
            pass  # not connected
    return found


def _after_fork_in_child() -> None:
    _lock.release()
    ends = list(_ends.values())
    # What is opened here from now on is this process's.
    _ends.clear()
    for fd in _found(ends) if ends else ():
        try:
            os.close(fd)
        except OSError:
            pass


os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_after_fork_in_child
)
