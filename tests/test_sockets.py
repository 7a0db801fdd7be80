"""Sockets: every type and transport, paths, directories, exits, and sends that borrow."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import multiprocessing
import os
import signal
import socket as _socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.asyncio
from support import interrupted_at

from fastipc import sockets
from fastipc.codec import MsgpackDecoder, MsgpackEncoder
from fastipc.sockets import (
    BufferPool,
    PendingSend,
    close_sockets,
    get_open_zmq_inproc_path,
    get_open_zmq_ipc_path,
    get_tcp_uri,
    make_zmq_path,
    make_zmq_socket,
    pending_sends,
    send_frames,
    send_frames_async,
    split_zmq_path,
    zmq_socket_ctx,
)

NIGHTLY = os.environ.get("FASTIPC_NIGHTLY") == "1"


# Sockets that a test drops are closed by the context's destroy, in the fixture below.
pytestmark = pytest.mark.filterwarnings("ignore:Unclosed (socket|context):ResourceWarning")


@pytest.fixture(autouse=True)
def no_socket_directory_is_left() -> Iterator[None]:
    """The directory of ipc sockets goes with its owner, the whole session: here with each test."""
    yield
    sockets._directory.remove()


@pytest.fixture
def ctx() -> Iterator[Any]:
    context: Any = zmq.Context()
    context.linger = 0  # of sockets that a test makes itself: ZMQ's own default waits for ever
    yield context
    context.destroy(linger=0)


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), _socket.socket(_socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


def endpoint(transport: str) -> str:
    """A path to bind to; tcp ports are chosen by the bind itself."""
    if transport == "tcp6" and not has_ipv6():
        pytest.skip("no IPv6 here")
    return {
        "ipc": get_open_zmq_ipc_path,
        "inproc": get_open_zmq_inproc_path,
        "tcp": lambda: "tcp://127.0.0.1:0",
        "tcp6": lambda: "tcp://[::1]:0",
    }[transport]()


def bound_to(socket: Any) -> str:
    return str(socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0"))


def soon(socket: Any, flag: int = zmq.POLLIN) -> None:
    assert socket.poll(20_000, flag), "nothing came"


# -- paths -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("tcp://127.0.0.1:5555", ("tcp", "127.0.0.1", "5555")),
        ("tcp://[::1]:5555", ("tcp", "::1", "5555")),
        ("tcp://[fe80::1%eth0]:1", ("tcp", "fe80::1%eth0", "1")),
        ("tcp://[::]:0", ("tcp", "::", "0")),
        ("tcp://some-host:65535", ("tcp", "some-host", "65535")),
        ("tcp://*:*", ("tcp", "*", "*")),
        ("ipc:///run/x/y", ("ipc", "/run/x/y", "")),
        ("ipc://relative", ("ipc", "relative", "")),
        ("ipc://with:colon", ("ipc", "with:colon", "")),
        ("inproc://name", ("inproc", "name", "")),
    ],
)
def test_split_and_make_are_inverse(path: str, parts: tuple[str, str, str]) -> None:
    assert split_zmq_path(path) == parts
    assert make_zmq_path(*parts) == path


@pytest.mark.parametrize(
    "path",
    [
        "",
        "x",
        "tcp://",
        "tcp://127.0.0.1",
        "tcp://:5555",
        "tcp://host:",
        "tcp://host:65536",
        "tcp://host:-1",
        "tcp://::1:5555",
        "tcp://[::1]",
        "tcp://[nonsense]:1",
        "tcp://host:port",
        "ipc://",
        "http://x:1",
        "tcp://host:٣",
    ],
)
def test_malformed_paths(path: str, ctx: Any) -> None:
    with pytest.raises(ValueError, match="invalid ZMQ path"):
        split_zmq_path(path)
    with pytest.raises(ValueError, match="invalid ZMQ path"):
        make_zmq_socket(ctx, path, zmq.PULL)


def test_tcp_uris() -> None:
    assert get_tcp_uri("10.0.0.1", 80) == "tcp://10.0.0.1:80"
    assert get_tcp_uri("::1", 80) == "tcp://[::1]:80"
    assert make_zmq_path("tcp", "fe80::2%lo", 80) == "tcp://[fe80::2%lo]:80"
    assert make_zmq_path("ipc", "some/path") == "ipc://some/path"
    assert len({get_open_zmq_inproc_path() for _ in range(100)}) == 100
    assert len({get_open_zmq_ipc_path() for _ in range(100)}) == 100


# -- every type, transport and context -------------------------------------------------------------

PAIRS = {
    "ROUTER-DEALER": (zmq.ROUTER, zmq.DEALER),
    "PULL-PUSH": (zmq.PULL, zmq.PUSH),
    "XPUB-SUB": (zmq.XPUB, zmq.SUB),
    "XPUB-XSUB": (zmq.XPUB, zmq.XSUB),
    "PUB-SUB": (zmq.PUB, zmq.SUB),
    "PAIR": (zmq.PAIR, zmq.PAIR),
    "REP-REQ": (zmq.REP, zmq.REQ),
}
TRANSPORTS = ["ipc", "inproc", "tcp", "tcp6"]
PAYLOAD = [b"head", bytes(100_000), b"tail"]


def open_pair(ctx: Any, pair: str, transport: str) -> tuple[Any, Any]:
    binder, connecter = PAIRS[pair]
    first = make_zmq_socket(ctx, endpoint(transport), binder, bind=True, linger=0)
    options = {"identity": b"\x01\x00"} if connecter == zmq.DEALER else {}
    second = make_zmq_socket(ctx, bound_to(first), connecter, bind=False, linger=0, **options)
    return first, second


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("pair", PAIRS)
def test_every_type_and_transport(ctx: Any, pair: str, transport: str) -> None:
    first, second = open_pair(ctx, pair, transport)
    if pair in ("XPUB-SUB", "XPUB-XSUB"):
        second.send(b"\x01") if pair == "XPUB-XSUB" else second.subscribe(b"")
        soon(first)
        assert first.recv() == b"\x01"
        send_frames(first, PAYLOAD)
        soon(second)
        assert second.recv_multipart() == PAYLOAD
    elif pair == "PUB-SUB":
        second.subscribe(b"")
        while not second.poll(20):  # until the subscription has arrived, which nobody is told
            first.send_multipart(PAYLOAD)
        assert second.recv_multipart() == PAYLOAD
    else:
        send_frames(second, PAYLOAD)
        soon(first)
        got = first.recv_multipart()
        assert got[-3:] == PAYLOAD
        if pair == "ROUTER-DEALER":
            assert got[0] == b"\x01\x00"
        if pair != "PULL-PUSH":
            send_frames(first, got)
            soon(second)
            assert second.recv_multipart() == PAYLOAD


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("pair", PAIRS)
def test_every_type_and_transport_with_asyncio(pair: str, transport: str) -> None:
    async def run(ctx: Any) -> None:
        first, second = open_pair(ctx, pair, transport)
        if pair in ("XPUB-SUB", "XPUB-XSUB"):
            if pair == "XPUB-XSUB":
                await second.send(b"\x01")
            else:
                second.subscribe(b"")
            assert await first.recv() == b"\x01"
            await send_frames_async(first, PAYLOAD)
            assert await second.recv_multipart() == PAYLOAD
        elif pair == "PUB-SUB":
            second.subscribe(b"")
            while not await second.poll(20):
                await send_frames_async(first, PAYLOAD)
            assert await second.recv_multipart() == PAYLOAD
        else:
            await send_frames_async(second, PAYLOAD)
            got = await first.recv_multipart()
            assert got[-3:] == PAYLOAD
            if pair != "PULL-PUSH":
                await send_frames_async(first, got)
                assert await second.recv_multipart() == PAYLOAD

    context = zmq.asyncio.Context()
    try:
        asyncio.run(asyncio.wait_for(run(context), 30))
    finally:
        context.destroy(linger=0)


def test_options(ctx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for big in (False, True):
        monkeypatch.setattr(sockets, "_wants_big_buffers", lambda big=big: big)
        for kind in (
            zmq.ROUTER,
            zmq.DEALER,
            zmq.PUSH,
            zmq.PULL,
            zmq.XPUB,
            zmq.PUB,
            zmq.SUB,
            zmq.XSUB,
        ):
            with make_zmq_socket(ctx, get_open_zmq_inproc_path(), kind, bind=True) as made:
                sends, receives = (
                    kind in (zmq.ROUTER, zmq.DEALER, zmq.PUSH),
                    kind in (zmq.ROUTER, zmq.DEALER, zmq.PULL),
                )
                assert (made.SNDHWM == 0) == sends
                assert (made.RCVHWM == 0) == receives
                assert (1 << 29 if sends and big else -1) == made.SNDBUF
                assert (1 << 29 if receives and big else -1) == made.RCVBUF
                assert made.LINGER == 500
    with make_zmq_socket(
        ctx, get_open_zmq_inproc_path(), zmq.DEALER, bind=True, identity=b"me", linger=7
    ) as made:
        assert (made.IDENTITY, made.LINGER, made.IPV6) == (b"me", 7, 0)
    if has_ipv6():
        with make_zmq_socket(ctx, "tcp://[::1]:0", zmq.PULL) as made:
            assert made.IPV6 == 1


@pytest.mark.parametrize(
    "kind", [zmq.PUSH, zmq.SUB, zmq.XSUB, zmq.PULL, zmq.ROUTER, zmq.DEALER, zmq.XPUB, zmq.PUB]
)
def test_who_binds(ctx: Any, kind: int) -> None:
    path = get_open_zmq_ipc_path()
    made = make_zmq_socket(ctx, path, kind)
    assert os.path.exists(path.removeprefix("ipc://")) == (
        kind not in (zmq.PUSH, zmq.SUB, zmq.XSUB)
    )
    made.close()


def test_a_bind_that_fails_leaves_no_socket_open(ctx: Any) -> None:
    path = get_open_zmq_inproc_path()
    first = make_zmq_socket(ctx, path, zmq.PULL)
    with pytest.raises(zmq.ZMQError) as caught:
        make_zmq_socket(ctx, path, zmq.PULL)
    assert caught.value.errno == errno.EADDRINUSE
    assert not first.closed
    assert len([s for s in ctx._sockets if not s.closed]) == 1


def test_every_subscription_is_passed_on(ctx: Any) -> None:
    xpub = make_zmq_socket(ctx, get_open_zmq_ipc_path(), zmq.XPUB)
    subscribers = [make_zmq_socket(ctx, bound_to(xpub), zmq.SUB) for _ in range(3)]
    for subscriber in subscribers:
        subscriber.subscribe(b"same")
        soon(xpub)
        assert xpub.recv() == b"\x01same"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_send_to_an_unknown_identity_is_an_error(ctx: Any, transport: str) -> None:
    router = make_zmq_socket(ctx, endpoint(transport), zmq.ROUTER, bind=True)
    big = bytearray(1 << 20)
    for send in (lambda f: send_frames(router, f), router.send_multipart):
        with pytest.raises(zmq.ZMQError) as caught:
            send([b"nobody", b"x", big])
        assert caught.value.errno == errno.EHOSTUNREACH
    assert pending_sends(router) == 0
    gc.collect()
    wait_until_free(big)
    dealer = make_zmq_socket(ctx, bound_to(router), zmq.DEALER, bind=False, identity=b"somebody")
    dealer.send(b"here")
    soon(router)
    assert router.recv_multipart() == [b"somebody", b"here"]
    send_frames(router, [b"somebody", b"x", big])
    soon(dealer)
    assert dealer.recv_multipart() == [b"x", big]


@pytest.mark.parametrize("handover", [True, False])
def test_router_handover(ctx: Any, handover: bool) -> None:
    router = make_zmq_socket(ctx, get_open_zmq_ipc_path(), zmq.ROUTER, router_handover=handover)
    first = make_zmq_socket(ctx, bound_to(router), zmq.DEALER, bind=False, identity=b"id")
    first.send(b"1")
    soon(router)
    router.recv_multipart()
    second = make_zmq_socket(ctx, bound_to(router), zmq.DEALER, bind=False, identity=b"id")
    second.send(b"2")
    if handover:
        soon(router)
        assert router.recv_multipart() == [b"id", b"2"]
        router.send_multipart([b"id", b"back"])
        soon(second)
        assert second.recv() == b"back"
    else:
        router.send_multipart([b"id", b"back"])
        soon(first)
        assert first.recv() == b"back"


def test_context_manager_and_close() -> None:
    path = get_open_zmq_ipc_path()
    with zmq_socket_ctx(path, zmq.PULL) as pull, zmq_socket_ctx(path, zmq.PUSH) as push:
        push.send(b"x")
        soon(pull)
        assert pull.recv() == b"x"
    assert pull.closed
    assert push.closed
    assert push.context.closed
    with pytest.raises(KeyError), zmq_socket_ctx(path, zmq.PULL) as pull:
        raise KeyError
    assert pull.closed
    assert pull.context.closed
    context: Any = zmq.Context()
    some = [context.socket(zmq.PUSH), None, context.socket(zmq.PULL)]
    close_sockets(some)
    assert some[0].closed
    assert some[2].closed
    context.term()


# -- ipc paths and their directory -----------------------------------------------------------------


@pytest.fixture
def short_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as path:
        yield Path(path)


@pytest.mark.parametrize("length", [105, 106, 107, 108, 200])
@pytest.mark.parametrize("letter", ["x", "é"])
def test_ipc_path_lengths(ctx: Any, short_dir: Path, length: int, letter: str) -> None:
    room = length - len(str(short_dir)) - 1
    name = letter * (room // len(letter.encode()))
    path = short_dir / name.ljust(room - len(name.encode()) + len(name), "x")
    assert len(os.fsencode(path)) == length
    if length <= 107:
        pull = make_zmq_socket(ctx, f"ipc://{path}", zmq.PULL)
        push = make_zmq_socket(ctx, f"ipc://{path}", zmq.PUSH)
        push.send(b"x")
        soon(pull)
        assert stat.S_ISSOCK(path.stat().st_mode)
        push.close(0)
        pull.close(0)
    else:
        for kind in (zmq.PULL, zmq.PUSH):
            with pytest.raises(OSError, match="107") as caught:
                make_zmq_socket(ctx, f"ipc://{path}", kind)
            assert caught.value.errno == errno.ENAMETOOLONG
        assert list(short_dir.iterdir()) == []
        assert not ctx._sockets or all(s.closed for s in ctx._sockets)


USE_A_PATH = """
import os, sys, zmq
from fastipc.sockets import *
path = get_open_zmq_ipc_path()
with zmq_socket_ctx(path, zmq.PULL) as pull, zmq_socket_ctx(path, zmq.PUSH) as push:
    push.send(b"x"); assert pull.poll(20000) and pull.recv() == b"x"
directory = os.path.dirname(path.removeprefix("ipc://"))
info = os.stat(directory)
assert info.st_mode & 0o777 == 0o700 and info.st_uid == os.geteuid()
assert len(path.removeprefix("ipc://").encode()) <= 107
keep = make_zmq_socket(zmq.Context(), get_open_zmq_ipc_path(), zmq.PULL)
print(directory, flush=True)
"""


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("ends", ["", "raise KeyError", "sys.exit(3)"])
def test_the_directory_is_private_and_goes_with_its_owner(short_dir: Path, ends: str) -> None:
    done = run(USE_A_PATH + ends, FASTIPC_RPC_BASE_PATH=str(short_dir))
    assert done.stdout.startswith(f"{short_dir}/fastipc-"), done.stderr
    assert list(short_dir.iterdir()) == []


@pytest.mark.parametrize("length", [60, 82, 83, 84, 100, 106, 107, 108, 200])
def test_base_directories_of_any_depth(short_dir: Path, length: int) -> None:
    base = short_dir / ("x" * (length - len(str(short_dir)) - 1))
    base.mkdir()
    done = run(USE_A_PATH, FASTIPC_RPC_BASE_PATH=str(base))
    if length <= 83:
        assert done.returncode == 0, done.stderr
    else:
        assert "shorter" in done.stderr
    assert list(base.iterdir()) == []
    # A deep TMPDIR that nobody chose for sockets is no reason to fail.
    done = run(USE_A_PATH, TMPDIR=str(base))
    assert done.returncode == 0, done.stderr
    assert not os.path.exists(done.stdout.strip())
    assert list(base.iterdir()) == []


CHILDREN = """
import multiprocessing, os, sys
from fastipc.sockets import get_open_zmq_ipc_path
mine = os.path.dirname(get_open_zmq_ipc_path()[6:])
def child(conn):
    theirs = os.path.dirname(get_open_zmq_ipc_path()[6:])
    conn.send((theirs, os.path.isdir(theirs), os.path.isdir(mine)))
for method in ("fork", "spawn"):
    if __name__ == "__main__":
        ctx = multiprocessing.get_context(method)
        here, there = ctx.Pipe()
        process = ctx.Process(target=child, args=(there,))
        process.start()
        theirs, made, kept = here.recv()
        process.join()
        assert made and theirs != mine and not os.path.exists(theirs), (method, theirs)
        assert os.path.isdir(mine)
if __name__ == "__main__":
    for leave in (os._exit, sys.exit):
        pid = os.fork()
        if pid == 0:
            leave(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert os.path.isdir(mine)
    print("fine", mine)
"""


def test_children_leave_the_directory_alone_and_clean_their_own(
    short_dir: Path, tmp_path: Path
) -> None:
    script = tmp_path / "children.py"
    script.write_text(CHILDREN)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "FASTIPC_RPC_BASE_PATH": str(short_dir),
    }
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("fine"), done.stderr
    assert list(short_dir.iterdir()) == []


def test_what_a_killed_owner_left_goes_with_the_next(short_dir: Path) -> None:
    """And what a living one uses stays, and so does what is not ours."""
    waits = USE_A_PATH + "sys.stdin.read()"
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "FASTIPC_RPC_BASE_PATH": str(short_dir),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", waits],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    killed, alive = (p.stdout.readline().strip() for p in processes)  # type: ignore[union-attr]
    (short_dir / "fastipc-somebody").mkdir(0o755)
    (short_dir / "fastipc-12345678").mkdir(0o700)
    (short_dir / "fastipc-12345678" / "file").write_text("precious")
    processes[0].kill()
    processes[0].wait()
    assert os.listdir(killed)
    assert run(USE_A_PATH, FASTIPC_RPC_BASE_PATH=str(short_dir)).returncode == 0
    assert not os.path.exists(killed)
    assert os.listdir(alive)
    processes[1].communicate("")
    assert not os.path.exists(alive)
    assert sorted(p.name for p in short_dir.iterdir()) == ["fastipc-12345678", "fastipc-somebody"]
    for process in processes:
        process.stdin.close()  # type: ignore[union-attr]
        process.stdout.close()  # type: ignore[union-attr]


def test_many_processes_make_and_sweep_directories_at_once(short_dir: Path) -> None:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "FASTIPC_RPC_BASE_PATH": str(short_dir),
    }
    for _ in range(3):
        batch = [
            subprocess.Popen(
                [sys.executable, "-c", USE_A_PATH + ("os.kill(os.getpid(), 9)" if n % 2 else "")],
                env=env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for n in range(6)
        ]
        for n, process in enumerate(batch):
            errors = process.communicate()[1]
            assert process.returncode == (-9 if n % 2 else 0), errors
    assert run(USE_A_PATH, FASTIPC_RPC_BASE_PATH=str(short_dir)).returncode == 0
    assert list(short_dir.iterdir()) == []


# -- the end of a process --------------------------------------------------------------------------

UNSENT = """
import os, signal, sys, zmq
import zmq.asyncio
from fastipc.sockets import *
ctx = zmq.Context()
push = make_zmq_socket(ctx, get_open_zmq_ipc_path(), zmq.PUSH, linger=LINGER)
dealer = make_zmq_socket(ctx, "tcp://127.0.0.1:1", zmq.DEALER, bind=False, linger=LINGER)
for socket in (push, dealer):
    for _ in range(100):
        send_frames(socket, [b"x", bytes(100_000)])
assert pending_sends(push) == 100
print("ready", flush=True)
"""


@pytest.mark.parametrize("linger", ["0", "100", "None"])
@pytest.mark.parametrize(
    "ends",
    [
        "",
        "raise KeyError",
        "ctx.term()",
        "del push, dealer, ctx",
        "push.close(); dealer.close(); ctx.term()",
        "signal.pause()",
    ],
)
def test_a_process_with_unsent_messages_ends(short_dir: Path, linger: str, ends: str) -> None:
    """It would wait for ever with ZMQ's own default; the time-out of the process is far above any
    linger asked for."""
    if ends == "ctx.term()":
        ends = "ctx.destroy()"  # term() waits for sockets that are open, by contract
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "FASTIPC_RPC_BASE_PATH": str(short_dir),
    }
    code = UNSENT.replace("LINGER", linger) + ends
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    if ends == "signal.pause()":
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == {"signal.pause()": -15, "raise KeyError": 1}.get(ends, 0)
    if ends == "signal.pause()":
        assert run(USE_A_PATH, FASTIPC_RPC_BASE_PATH=str(short_dir)).returncode == 0
    assert list(short_dir.iterdir()) == []


# -- sends that borrow -----------------------------------------------------------------------------


def test_every_frame_is_tracked(ctx: Any) -> None:
    """Not only the last: it is small, and done at once."""
    path = get_open_zmq_ipc_path()
    push = make_zmq_socket(ctx, path, zmq.PUSH)  # nobody there yet
    big, small = bytearray(b"a" * 200_000), bytearray(b"b" * 8)

    class Kept:
        pass

    import weakref

    kept = Kept()
    alive = weakref.ref(kept)
    send = send_frames(push, [big, small, big, small], keep=kept)
    del kept
    assert (send.done, send.nbytes, pending_sends(push)) == (False, 400_000, 1)
    with pytest.raises(TimeoutError):
        send.wait(0.01)
    assert alive() is not None
    small[:] = b"c" * 8  # copied: free at once
    with pytest.raises(BufferError):
        big.append(0)
    pull = make_zmq_socket(ctx, path, zmq.PULL)
    soon(pull)
    assert pull.recv_multipart() == [b"a" * 200_000, b"b" * 8] * 2
    send.wait(20)
    assert send.done
    assert pending_sends(push) == 0
    assert alive() is None
    wait_until_free(big)
    send.wait(0)


def test_small_messages_borrow_nothing(ctx: Any) -> None:
    push = make_zmq_socket(ctx, get_open_zmq_ipc_path(), zmq.PUSH)
    for frames in (
        [b"x"],
        [b"x", bytearray(65535)],
        [memoryview(b"y" * 100)],
        [np.zeros(10)],
        [b""],
    ):
        send = send_frames(push, frames)
        assert (send.done, send.nbytes) == (True, 0)
        send.wait(0)
    assert pending_sends(push) == 0
    with pytest.raises(TypeError):
        send_frames(push, ["text"])


def test_what_is_borrowed_outlives_the_socket(ctx: Any) -> None:
    path = get_open_zmq_ipc_path()
    push = make_zmq_socket(ctx, path, zmq.PUSH, linger=20_000)
    buffer = bytearray(b"z" * 300_000)
    import weakref

    class Kept:
        pass

    kept = Kept()
    alive = weakref.ref(kept)
    send_frames(push, [buffer], keep=kept)
    del kept
    push.close()
    del push
    gc.collect()
    assert alive() is not None
    with pytest.raises(BufferError):
        buffer.append(0)
    pull = make_zmq_socket(ctx, path, zmq.PULL)
    soon(pull)
    assert pull.recv() == b"z" * 300_000

    def free() -> bool:
        sockets._orphans.clean()
        return alive() is None

    wait_until(free)


def wait_until(condition: Any) -> None:
    gate = threading.Event()
    while not condition():  # under pytest's time-out
        gate.wait(0.001)


def wait_until_free(buffer: bytearray) -> None:
    """Until nothing holds it: a thread of pyzmq's may have to let go of it first."""

    def is_free() -> bool:
        try:
            buffer.append(0)
        except BufferError:
            return False
        return True

    wait_until(is_free)


def test_a_full_queue_sends_and_borrows_nothing(ctx: Any) -> None:
    push = ctx.socket(zmq.PUSH)
    push.SNDHWM = 1
    push.connect(get_open_zmq_ipc_path())
    first = bytearray(100_000)
    send_frames(push, [first])
    second = bytearray(100_000)
    with pytest.raises(zmq.Again):
        send_frames(push, [b"id", second, b"x"], zmq.NOBLOCK)
    gc.collect()
    wait_until_free(second)
    assert pending_sends(push) == 1


def sends(code: CodeType) -> bool:
    return code.co_name in ("send_frames", "send")


@pytest.mark.parametrize(
    ("kind", "peer"),
    [(zmq.ROUTER, zmq.DEALER), (zmq.DEALER, zmq.ROUTER), (zmq.PUSH, zmq.PULL)],
    ids=["router", "dealer", "push"],
)
def test_an_interrupted_send_leaves_a_socket_that_works(ctx: Any, kind: int, peer: int) -> None:
    path = get_open_zmq_ipc_path()
    end = make_zmq_socket(ctx, path, peer, bind=True, linger=0)
    sender = ctx.socket(kind)
    sender.LINGER = 0
    head = []
    if kind == zmq.ROUTER:
        end.close()
        end = make_zmq_socket(ctx, path, peer, bind=False, identity=b"peer", linger=0)
        sender.ROUTER_MANDATORY = 1
        sender.bind(path)
        end.send(b"I am here")
        sender.recv_multipart()
        head = [b"peer"]
    else:
        sender.connect(path)
    end.RCVTIMEO = 30_000
    big = bytes(100_000)
    whole = [b"head", big, b"tail"]
    skip = 1 if peer == zmq.ROUTER else 0
    interrupted = 0
    for point in range(100):
        if not interrupted_at(point, sends, lambda: send_frames(sender, [*head, *whole])):
            break
        interrupted += 1
        mark = b"whole %d" % point
        send_frames(sender, [*head, mark, big])
        while (got := end.recv_multipart()[skip:]) != [mark, big]:
            # of the interrupted one all, or a part that shows
            assert got == whole or (got[-1] == b"" and got[:-1] == whole[: len(got) - 1])
    else:
        pytest.fail("it never came to its end")
    assert interrupted > 10
    assert end.recv_multipart()[skip:] == whole
    wait_until(lambda: pending_sends(sender) == 0)


def test_a_frame_that_is_none_is_refused_before_anything_is_sent(ctx: Any) -> None:
    path = get_open_zmq_inproc_path()
    pull = make_zmq_socket(ctx, path, zmq.PULL, bind=True)
    push = make_zmq_socket(ctx, path, zmq.PUSH)
    for nothing, error in ((memoryview(bytes(8))[::2], BufferError), ("text", TypeError)):
        with pytest.raises(error):
            send_frames(push, [b"head", nothing])
        send_frames(push, [b"the", b"next"])
        assert pull.recv_multipart() == [b"the", b"next"]


def test_pending_sends_that_finish_out_of_order(ctx: Any) -> None:
    router = make_zmq_socket(ctx, get_open_zmq_ipc_path(), zmq.ROUTER, linger=0)
    dealers = [ctx.socket(zmq.DEALER) for _ in range(2)]
    for n, dealer in enumerate(dealers):
        dealer.RCVHWM = 1
        dealer.IDENTITY = bytes([n + 1])
        dealer.connect(bound_to(router))
        dealer.send(b"here")
        soon(router)
        router.recv_multipart()
    sends = [send_frames(router, [b"\x01", bytes(8 << 20)]) for _ in range(8)]
    sends += [send_frames(router, [b"\x02", bytes(100_000)]) for _ in range(100)]
    for _ in range(100):
        soon(dealers[1])
        dealers[1].recv_multipart()
    wait_until(lambda: all(send.done for send in sends[8:]))
    assert pending_sends(router) <= 8
    assert pending_sends(dealers[0]) == 0
    for _ in range(8):
        soon(dealers[0])
        dealers[0].recv_multipart()
    wait_until(lambda: pending_sends(router) == 0)


def narrow_pull(ctx: Any, path: str) -> Any:
    """A receiver that holds back its sender: make_zmq_socket's would take in all there is."""
    pull = ctx.socket(zmq.PULL)
    pull.RCVHWM = 1
    pull.RCVBUF = 1 << 16
    pull.bind(path)
    return pull


@pytest.mark.parametrize("payload", [70_000, 2_000_000])
def test_reused_buffers_against_a_slow_receiver(ctx: Any, payload: int) -> None:
    """A main frame of over 64 KiB is borrowed; the 8-byte frame after it is not. Each message must
    arrive as it was."""
    path = get_open_zmq_ipc_path()
    pull = narrow_pull(ctx, path)
    push = make_zmq_socket(ctx, path, zmq.PUSH, bind=False)
    encoder, decoder = MsgpackEncoder(size_threshold=0), MsgpackDecoder(tuple[int, str, np.ndarray])
    count = 1000 if payload < 1_000_000 else 50
    pool = BufferPool(limit=64)
    failures: list[Any] = []

    def receive() -> None:
        gate = threading.Event()
        try:
            for n in range(count):
                if n % 10 == 0:
                    gate.wait(0.002)
                soon(pull)
                number, text, array = decoder.decode(pull.recv_multipart(copy=False))
                assert number == n
                assert text == chr(ord("a") + n % 26) * payload
                assert array.tolist() == [n]
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    buffers = set()
    for n in range(count):
        while pool.pending > 20:
            threading.Event().wait(0.0005)
        buffer = pool.get()
        buffers.add(id(buffer))
        frames = encoder.encode_into((n, chr(ord("a") + n % 26) * payload, np.array([n])), buffer)
        assert len(frames) == 2
        assert len(frames[1]) == 8
        pool.give(buffer, send_frames(push, frames))
        del frames
    thread.join()
    assert not failures, failures
    assert len(buffers) <= 60
    wait_until(lambda: pool.pending == 0)
    assert pending_sends(push) == 0


def test_buffer_pool() -> None:
    pool = BufferPool(limit=2)
    buffers = [pool.get() for _ in range(3)]
    assert len({id(b) for b in buffers}) == 3
    for buffer in buffers:
        pool.give(buffer)
    again = [pool.get(), pool.get()]
    assert {id(b) for b in again} < {id(b) for b in buffers}
    assert all(id(pool.get()) != id(buffer) for buffer in buffers)
    assert PendingSend([], None, 0).done


def test_asyncio_sends_are_tracked() -> None:
    async def run(ctx: Any) -> None:
        path = get_open_zmq_ipc_path()
        push = make_zmq_socket(ctx, path, zmq.PUSH)
        big = bytearray(b"q" * 100_000)
        send = await send_frames_async(push, [b"head", big, b"tail"], keep=object())
        assert not send.done
        assert pending_sends(push) == 1
        pull = make_zmq_socket(ctx, path, zmq.PULL)
        assert await pull.recv_multipart() == [b"head", b"q" * 100_000, b"tail"]
        while not send.done:
            await asyncio.sleep(0.001)
        assert pending_sends(push) == 0
        big.append(0)

    context = zmq.asyncio.Context()
    try:
        asyncio.run(asyncio.wait_for(run(context), 30))
    finally:
        context.destroy(linger=0)


# -- memory ----------------------------------------------------------------------------------------


def send_arrays(path: str, count: int, size: int, pauses: set[int], go: Any) -> None:
    ctx: Any = zmq.Context()
    push = make_zmq_socket(ctx, path, zmq.PUSH, linger=20_000)
    push.SNDHWM = 4
    array = np.zeros(size, np.uint8)
    encoder = MsgpackEncoder()
    for n in range(count):
        sends = send_frames(push, encoder.encode([n, array]))
        sends.wait()
        if n in pauses:
            go.recv()
    push.close()
    ctx.term()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(600 if NIGHTLY else 120)
@pytest.mark.parametrize("kind", ["ndarray", "tensor"])
def test_resident_memory_is_what_is_kept(ctx: Any, kind: str) -> None:
    torch = pytest.importorskip("torch") if kind == "tensor" else None
    size, count = 4 << 20, 10_000 if NIGHTLY else 600
    path = get_open_zmq_ipc_path()
    pull = narrow_pull(ctx, path)
    # The sender waits after these, so that nothing is on its way when memory is looked at.
    looks = {count // 10, count // 2 - 1, count - 1}
    go, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=send_arrays, args=(path, count, size, looks, theirs)
    )
    process.start()
    decoder = MsgpackDecoder(tuple[int, np.ndarray])
    if torch is not None:
        decoder = MsgpackDecoder(tuple[int, torch.Tensor])
    kept: list[Any] = []
    levels = []
    for n in range(count):
        soon(pull)
        frames = pull.recv_multipart(copy=False)
        if torch is not None:  # the array travels as one; a tensor is named otherwise
            frames[0] = bytes(frames[0]).replace(b"\xa3|u1", b"\xa5uint8")
        number, array = decoder.decode(frames)
        del frames
        assert number == n
        assert len(array) == size
        if n >= count // 2 and n % 100 == 0:
            kept.append(array)
        del array
        if n in looks:
            gc.collect()
            levels.append(resident())
            go.send("on")
    process.join()
    assert process.exitcode == 0
    slack = 24 << 20  # what the allocators keep for later, about
    assert abs(levels[1] - levels[0]) < slack
    assert abs(levels[2] - levels[1] - len(kept) * size) < slack
    assert len(kept) == count // 200
