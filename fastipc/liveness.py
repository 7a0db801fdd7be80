"""How a writer tells a reader on another host that died from one whose connection was torn.

Both look the same: a connection ends. And that nobody comes back for a while proves nothing, since
a process may be slow, starved or stopped. But a kernel refuses connections to a port on which
nobody listens any more. So each reader listens on a port of its own (a Sign), and the writer knocks
there: once when the reader joins, to see that it can (a firewall may be in between, or an address
that means another host there), and again when the connection was lost. Refused means dead, at once;
taken means alive, for however long. Where it couldn't knock, only time can tell.

Whoever else connects to a Sign gets eight random bytes, and can say nothing.
"""

from __future__ import annotations

import errno
import socket

from . import addresses

__all__ = ["Probe", "Sign"]

NONCE_BYTES = 8
# A kernel answers within a round trip; after this time a knock was lost.
KNOCK_SECONDS = 2.0


class Sign:
    """A reader's port. Not thread safe.

    Attributes:
        text: where it is, for the writer; "" when it can't be had.
    """

    def __init__(self, towards: tuple[str, int], nonce: bytes) -> None:
        self._nonce = nonce
        self._listener: socket.socket | None = None
        self.text = ""
        self.port = 0
        family = socket.AF_INET6 if addresses.is_ipv6(towards[0]) else socket.AF_INET
        try:
            where = socket.getaddrinfo(*towards, family, socket.SOCK_DGRAM)[0][4]
            with socket.socket(family, socket.SOCK_DGRAM) as route:
                route.connect(where)  # sends nothing
                mine = route.getsockname()
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            return
        try:
            listener.bind((mine[0], 0, *mine[2:]))
            listener.listen(16)
            listener.setblocking(False)
        except OSError:
            listener.close()
            return
        self._listener = listener
        self.port = listener.getsockname()[1]
        self.text = addresses.endpoint(str(mine[0]).partition("%")[0], self.port)

    def fileno(self) -> int:
        """Readable when somebody knocks; -1 for none."""
        return -1 if self._listener is None else self._listener.fileno()

    def answer(self) -> None:
        """Whoever knocks."""
        while self._listener is not None:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer:
                try:
                    peer.setblocking(False)
                    peer.send(self._nonce)
                except OSError:
                    pass

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


class Probe:
    """One knock at a Sign. Never waits: look asks how it went.

    Attributes:
        began: when, monotonic.
    """

    def __init__(self, sign: str, scope: str, nonce: bytes, now: float) -> None:
        """scope: of a link-local address, as this host calls it."""
        self.began = now
        self._nonce = nonce
        self._got = b""
        self._socket: socket.socket | None = None
        self._result: str | None = None
        try:
            host, port = addresses.split_endpoint(sign)
            if host.startswith("fe80:") and scope:
                host = f"{host}%{scope}"
            family = socket.AF_INET6 if addresses.is_ipv6(host) else socket.AF_INET
            # an address, so nobody is asked
            flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            where = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=flags)[0][4]
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            code = self._socket.connect_ex(where)
        except (OSError, ValueError, OverflowError):
            self._end("unknown")
            return
        if code not in (0, errno.EINPROGRESS):
            self._end("refused" if code == errno.ECONNREFUSED else "unknown")

    def _end(self, result: str) -> str:
        self._result = result
        self.close()
        return result

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def look(self, now: float, patience: float) -> str | None:
        """None so far; or "alive" (it said its nonce), "taken" (a kernel took it, and nobody has
        said anything for `patience` seconds), "refused" (nobody listens, or another than who is
        meant), or "unknown"."""
        if self._result is not None or self._socket is None:
            return self._result
        late = now - self.began > KNOCK_SECONDS
        try:
            data = self._socket.recv(NONCE_BYTES)
        except BlockingIOError:
            try:
                self._socket.getpeername()
            except OSError:
                return self._end("unknown") if late else None
            return self._end("taken") if now - self.began > patience else None
        except ConnectionRefusedError:
            return self._end("refused")
        except OSError as error:
            # not connected yet
            if error.errno == errno.ENOTCONN and not late:
                return None
            return self._end("unknown")
        self._got += data
        if self._got == self._nonce:
            return self._end("alive")
        if data and len(self._got) < NONCE_BYTES:
            return None
        # Closed without a word: its process is ending, or that is another's port.
        return self._end("refused" if len(self._got) == NONCE_BYTES else "taken")
