"""Everything that the environment can set, read once, when it is first needed.

An argument beats the variable, the variable beats the default.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache

__all__ = ["Settings", "settings"]


@dataclass(frozen=True)
class Settings:
    """The values of the ``FASTIPC_*`` variables.

    Attributes:
        spin_us: ``FASTIPC_SPIN_US``: longest spin before a wait sleeps, in microseconds; 0 never
            spins, None learns (up to 300).
        warning_interval: ``FASTIPC_RINGBUFFER_WARNING_INTERVAL``: a wait for a peer is reported
            each time this many seconds have passed.
        msgpack_zero_copy_threshold: ``FASTIPC_MSGPACK_ZERO_COPY_THRESHOLD``: bytes from which a
            tensor or array travels in a frame of its own.
        allow_insecure_serialization: ``FASTIPC_ALLOW_INSECURE_SERIALIZATION`` is "1": the codec may
            pickle, and load the pickles that a peer sends.
        rpc_base_path: ``FASTIPC_RPC_BASE_PATH``: where the private directory of ipc sockets is
            made; None: in the temporary directory.
        host_ip: ``FASTIPC_HOST_IP``: the address that readers on other hosts are told when the
            queue is made without connect_ip; "" leaves it to the default route.
        remote_grace: ``FASTIPC_REMOTE_GRACE``: seconds for which a lost connection to a peer on
            another host may be coming back before the peer counts as dead.
        remote_linger: ``FASTIPC_REMOTE_LINGER``: after close, what was sent is given up
            when none of it has moved to readers on other hosts for this many seconds.
        worker_multiproc_method: ``FASTIPC_WORKER_MULTIPROC_METHOD``: how child processes are
            started: "fork", "spawn" or "forkserver"; None: :mod:`fastipc.processes` chooses.
        mq_max_chunk_bytes: ``FASTIPC_MQ_MAX_CHUNK_BYTES_MB``, there in MiB, here in bytes: the
            chunks of the queues between an executor and its workers; None: their default.
    """

    spin_us: float | None = None
    warning_interval: float = 60.0
    msgpack_zero_copy_threshold: int = 256
    allow_insecure_serialization: bool = False
    rpc_base_path: str | None = None
    host_ip: str = ""
    remote_grace: float = 10.0
    remote_linger: float = 5.0
    worker_multiproc_method: str | None = None
    mq_max_chunk_bytes: int | None = None


START_METHODS = ("fork", "spawn", "forkserver")


def _number(name: str, default: float | None) -> float | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 <= value < math.inf):
        raise ValueError(f"{name}={text!r} in the environment must be a number of at least 0")
    return value


def _spin_us() -> float | None:
    value = _number("FASTIPC_SPIN_US", None)
    # as the argument spin_us, of which nobody would think here
    if value is not None and value > 50000:
        raise ValueError(
            f"FASTIPC_SPIN_US={value:g} in the environment must be at most 50,000 microseconds"
        )
    return value


def _start_method() -> str | None:
    method = os.environ.get("FASTIPC_WORKER_MULTIPROC_METHOD", "").strip()
    if method and method not in START_METHODS:
        raise ValueError(
            f"FASTIPC_WORKER_MULTIPROC_METHOD={method!r} in the environment must be one of "
            f"{', '.join(START_METHODS)}"
        )
    return method or None


def _chunk_bytes() -> int | None:
    mebibytes = _number("FASTIPC_MQ_MAX_CHUNK_BYTES_MB", None)
    if mebibytes is None:
        return None
    # less would be no room for anything, more than a tebibyte is a slip of the keyboard
    if not 64 <= mebibytes * 2**20 <= 2**40:
        raise ValueError(
            f"FASTIPC_MQ_MAX_CHUNK_BYTES_MB={mebibytes:g} in the environment must be a number of "
            "MiB of at most 1048576, and more than 0"
        )
    return int(mebibytes * 2**20)


@cache
def settings() -> Settings:
    """The settings. Raises ValueError naming the variable that can't be understood."""
    warning = _number("FASTIPC_RINGBUFFER_WARNING_INTERVAL", 60.0)
    grace = _number("FASTIPC_REMOTE_GRACE", 10.0)
    linger = _number("FASTIPC_REMOTE_LINGER", 5.0)
    assert warning is not None
    assert grace is not None
    assert linger is not None
    threshold = _number("FASTIPC_MSGPACK_ZERO_COPY_THRESHOLD", 256)
    assert threshold is not None
    if threshold != int(threshold):
        raise ValueError(
            f"FASTIPC_MSGPACK_ZERO_COPY_THRESHOLD={threshold} in the environment must be a whole "
            "number of bytes"
        )
    return Settings(
        spin_us=_spin_us(),
        warning_interval=warning,
        msgpack_zero_copy_threshold=int(threshold),
        allow_insecure_serialization=os.environ.get("FASTIPC_ALLOW_INSECURE_SERIALIZATION") == "1",
        rpc_base_path=os.environ.get("FASTIPC_RPC_BASE_PATH") or None,
        host_ip=os.environ.get("FASTIPC_HOST_IP", "").strip(),
        remote_grace=grace,
        remote_linger=linger,
        worker_multiproc_method=_start_method(),
        mq_max_chunk_bytes=_chunk_bytes(),
    )
