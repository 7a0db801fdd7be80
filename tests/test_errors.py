"""The exceptions: what else they are, what they say, and that they survive a pickle."""

from __future__ import annotations

import errno
import multiprocessing
import pickle
import queue
from concurrent.futures import ProcessPoolExecutor

import pytest

import fastipc
from fastipc import (
    ChildDied,
    Closed,
    DecodeError,
    Empty,
    EngineDeadError,
    Full,
    HandleMismatch,
    IPCError,
    NotReady,
    PeerDied,
    RemoteError,
    ReplyTimeout,
    RequestFailed,
    SharedMemoryFull,
    SlowConsumer,
    TooManyRequests,
    WorkerDied,
)

KINDS = [IPCError, Empty, Full, NotReady, Closed, PeerDied, SharedMemoryFull, HandleMismatch,
         DecodeError, ChildDied, WorkerDied, RemoteError, EngineDeadError,
         RequestFailed, SlowConsumer, TooManyRequests, ReplyTimeout]  # fmt: skip
EXAMPLES = [
    IPCError("text"),
    Empty("text"),
    Full("text"),
    NotReady("text", (3, 5)),
    Closed("text"),
    PeerDied("text", 4, 1234, "a-host"),
    PeerDied("the writer", None, 99, "b-host"),
    SharedMemoryFull("text", 4096, 17),
    HandleMismatch("text"),
    ChildDied("text", None, 12, "a-host", 3),
    WorkerDied("text", 1, 12, "a-host", -9),
    ReplyTimeout("text", (1,)),
    RemoteError("there.Error", "text", "Traceback ..."),
    DecodeError("text"),
    EngineDeadError("text", 3, -9),
    RequestFailed("text", "request-1", "ValueError"),
    SlowConsumer("text", "request-1", "SlowConsumer"),
    TooManyRequests("text", 7, 7),
    *(kind() for kind in KINDS),
]
ATTRIBUTES = ("rank", "pid", "host", "missing", "needed", "available", "errno",
              "exitcode", "type_name", "message", "traceback", "engine", "request_id", "kind",
              "in_flight", "limit")  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        (Empty, (queue.Empty, TimeoutError)),
        (Full, (queue.Full, TimeoutError)),
        (NotReady, (TimeoutError,)),
        (Closed, (RuntimeError, ValueError)),
        (PeerDied, (ConnectionError, OSError)),
        (SharedMemoryFull, (OSError,)),
        (HandleMismatch, (ValueError,)),
        (DecodeError, (ValueError,)),
        (ChildDied, (PeerDied, ConnectionError)),
        (WorkerDied, (ChildDied,)),
        (RemoteError, (RuntimeError,)),
        (ReplyTimeout, (TimeoutError,)),
    ],
)
def test_what_else_they_are(kind, others):
    assert issubclass(kind, IPCError)
    for other in others:
        assert issubclass(kind, other)
        with pytest.raises(other):
            raise kind("text")


def test_all_of_them_are_exported():
    named = {name for name in fastipc.__all__ if isinstance(getattr(fastipc, name), type)
             and issubclass(getattr(fastipc, name), Exception)}  # fmt: skip
    assert named == {type(example).__name__ for example in EXAMPLES}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("error", EXAMPLES, ids=repr)
def test_they_survive_a_pickle(error, protocol):
    got = pickle.loads(pickle.dumps(error, protocol))
    assert type(got) is type(error)
    assert str(got) == str(error)
    for name in ATTRIBUTES:
        assert getattr(got, name, "none") == getattr(error, name, "none")


def test_shared_memory_full_is_enospc_and_names_bytes():
    error = SharedMemoryFull("text", 4096, 17)
    assert error.errno == errno.ENOSPC
    assert (error.needed, error.available) == (4096, 17)
    assert str(error) == "text"


def _raise(error):
    raise error


def test_they_arrive_from_a_process_pool():
    """concurrent.futures and multiprocessing send them as pickles, with a cause attached."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        for example in EXAMPLES[:14]:
            with pytest.raises(type(example)) as caught:
                pool.submit(_raise, example).result()
            assert str(caught.value) == str(example)
            for name in ATTRIBUTES:
                assert getattr(caught.value, name, "none") == getattr(example, name, "none")
