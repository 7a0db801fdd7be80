"""Handle: where a queue is found. A small value that travels by any means."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from .errors import HandleMismatch

__all__ = ["Handle"]

# Changes whenever a field changes its meaning: an old reader then refuses a new handle.
HANDLE_VERSION = 1


class Handle(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader needs to find its queue. Immutable; pickles, and encodes as msgpack or JSON.

    Whoever holds it can attach: on the same host as the same user, and from elsewhere, if the queue
    has readers elsewhere, as anybody. So keep it where only they see it. Attaching is a
    separate step: ``MessageQueue.create_from_handle(handle, rank)``.

    Attributes:
        queue_id: 32 hexadecimal digits, random.
        n_reader: how many readers the queue has in all.
        local_reader_ranks: the ranks of those on the writer's host.
        host: the name of the writer's host, for messages.
        boot_id: tells hosts, and boots of one host, apart.
        pid, start_time, fd: the writer's process (start_time in clock ticks since boot, which
            tells a process from a later one of the same pid) and its descriptor of the segment.
        path: of the named segment, "" for a memfd.
        serializer: the name of what turns objects into bytes.
        max_chunk_bytes: bytes.
        remote_reader_ranks: the ranks of those on other hosts.
        address: where they connect to, ``tcp://host:port``; "" if there are none.
        server_key: lets them in: whoever has it can read the queue. "" when it is not encrypted.
            Not shown by repr.
        version: of this structure.
    """

    queue_id: str
    n_reader: int
    local_reader_ranks: list[int]
    host: str
    boot_id: str
    pid: int
    start_time: int
    fd: int
    path: str
    serializer: str
    max_chunk_bytes: int
    remote_reader_ranks: list[int] = []
    address: str = ""
    server_key: str = ""
    version: int = HANDLE_VERSION

    def to_str(self) -> str:
        """The handle as one printable word (URL-safe base64)."""
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode()

    @classmethod
    def from_str(cls, text: str) -> Handle:
        """What to_str made. Raises HandleMismatch when text isn't that."""
        try:
            handle = msgspec.msgpack.decode(base64.urlsafe_b64decode(text), type=cls)
        except (ValueError, msgspec.MsgspecError) as error:
            raise HandleMismatch(
                f"this is not a handle as Handle.to_str makes it: {error}"
            ) from None
        return handle

    def id_bytes(self) -> bytes:
        """The queue id. Raises HandleMismatch when it can't be one."""
        try:
            queue_id = bytes.fromhex(self.queue_id)
        except ValueError:
            queue_id = b""
        if len(queue_id) != 16:
            raise HandleMismatch("the handle is damaged: its queue id is not 32 hexadecimal digits")
        return queue_id

    def __repr__(self) -> str:
        shown = (
            f"{name}={getattr(self, name)!r}"
            for name in self.__struct_fields__
            if name != "server_key"
        )
        return f"Handle({', '.join(shown)}, server_key={'...' if self.server_key else ''!r})"

    def check_version(self) -> None:
        """Raises HandleMismatch when the handle is another version's."""
        if self.version != HANDLE_VERSION:
            raise HandleMismatch(
                f"the handle is of version {self.version}, this fastipc reads {HANDLE_VERSION}: "
                "use the same version on both sides"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return Handle.from_str, (self.to_str(),)
