"""What SECURITY.md claims, as far as no other module shows it; and that each of its claims names
tests that exist."""

from __future__ import annotations

import ast
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import workers
import zmq
from conftest import ROOT
from support import Team, in_fork, pair

from fastipc import HandleMismatch, MessageQueue, sockets
from fastipc.sockets import get_open_zmq_ipc_path, zmq_socket_ctx

SECURITY = ROOT / ".github" / "SECURITY.md"
OTHER_UID = 54321

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def _as_another_user(function):
    """What the function returns, in a forked child that is another user, without any capability."""

    def child():
        os.setgroups([])
        os.setresgid(OTHER_UID, OTHER_UID, OTHER_UID)
        os.setresuid(OTHER_UID, OTHER_UID, OTHER_UID)
        return function()

    return in_fork(child)


def _tried(call, *args) -> str:
    try:
        call(*args)
    except OSError as error:
        return type(error).__name__
    except HandleMismatch as error:
        return str(error)
    return "it was let in"


# ---- the document -------------------------------------------------------------------------------


def _python_tests(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }


def _c_tests(path: Path) -> set[str]:
    return set(re.findall(r'\{"([^"]+)",\s*\w+\}', path.read_text()))


def _missing(text: str) -> list[str]:
    """The tests that the text names and that don't exist."""
    missing = []
    for file, name in re.findall(r"`(tests/[\w/.]+)::([^`]+)`", text):
        path = ROOT / file
        known = set()
        if path.is_file():
            known = _python_tests(path) if path.suffix == ".py" else _c_tests(path)
        if name not in known:
            missing.append(f"{file}::{name}")
    return missing


def test_every_claim_names_tests_that_exist():
    if not SECURITY.exists():
        pytest.skip("needs the source tree")
    text = SECURITY.read_text()
    assert _missing(text) == []
    assert len(re.findall(r"`tests/[\w/.]+::", text)) > 40
    # Each claim has one. What is not done, or left to the user, is told in the sections without.
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        claims, _, _ = section.partition("\nWhat it doesn't do:")
        for claim in re.split(r"\n- ", claims)[1:]:
            if claim.startswith("`fastipc.tensor_ipc` and executors"):
                continue
            assert "`tests/" in claim, f"no test shows: {claim}"


def test_the_check_of_the_document_can_fail():
    assert _missing("`tests/test_security.py::test_that_never_was`") != []
    assert _missing("`tests/c/test_frame.c::a thing that never was`") != []
    assert _missing("`tests/test_nowhere.py::test_x`") != []


# ---- another user -------------------------------------------------------------------------------


@as_root
def test_another_user_cannot_open_the_memory():
    with pair() as (writer, reader):
        handle = writer.export_handle()
        path = f"/proc/{os.getpid()}/fd/{handle.fd}"
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600

        def attempts() -> list[str]:
            return [
                _tried(os.open, path, os.O_RDONLY),
                _tried(os.open, path, os.O_RDWR),
                _tried(os.listdir, f"/proc/{handle.pid}/fd"),
                _tried(os.listdir, f"/proc/{handle.pid}/map_files"),
                _tried(MessageQueue.create_from_handle, handle, 0),
            ]

        *files, attached = _as_another_user(attempts)
        assert files == ["PermissionError"] * 4
        assert "the same user" in attached
        writer.enqueue("works")
        assert reader.dequeue() == "works"


@as_root
def test_another_user_cannot_open_a_named_segment(tmp_path):
    os.chmod(tmp_path, 0o1777)
    for parent in tmp_path.parents:  # the directories are in nobody's way
        if parent != Path("/") and parent.stat().st_uid == os.getuid():
            os.chmod(parent, parent.stat().st_mode | 0o055)
    with MessageQueue(1, 1, shm_dir=tmp_path, max_chunk_bytes=4096) as writer:
        handle = writer.export_handle()

        def attempts() -> list[str]:
            return [
                _tried(os.open, handle.path, os.O_RDONLY),
                _tried(os.open, handle.path, os.O_RDWR),
                _tried(os.unlink, handle.path),
                _tried(os.rename, handle.path, handle.path + "x"),
                _tried(MessageQueue.create_from_handle, handle, 0),
            ]

        *files, attached = _as_another_user(attempts)
        assert files == ["PermissionError"] * 4
        assert "the same user" in attached
        with MessageQueue.create_from_handle(handle, 0) as reader:
            writer.enqueue("works")
            assert reader.dequeue() == "works"


@as_root
def test_a_segment_that_another_user_laid_there_is_not_taken(tmp_path):
    """A name is free again when everyone has attached. Whoever knows it and may write there could
    lay something else there, for a replacement to find; even root doesn't take it."""
    with MessageQueue(1, 1, shm_dir=tmp_path, max_chunk_bytes=4096) as writer:
        handle = writer.export_handle()
        size = os.stat(handle.path).st_size
        copy = tmp_path / "copy"
        with open(handle.path, "rb") as real:
            copy.write_bytes(real.read(1 << 16))
        os.truncate(copy, size)
        first = MessageQueue.create_from_handle(handle, 0)
        writer.wait_until_ready()
        first.close()
        assert not os.path.exists(handle.path)
        shutil.move(copy, handle.path)  # to the last bit what a queue would be
        os.chmod(handle.path, 0o666)
        os.chown(handle.path, OTHER_UID, OTHER_UID)
        with pytest.raises(HandleMismatch, match="the same user"):
            MessageQueue.create_from_handle(handle, 0)
        os.unlink(handle.path)
        with MessageQueue.create_from_handle(handle, 0) as replacement:
            writer.enqueue("works")
            assert replacement.dequeue() == "works"


@as_root
def test_another_user_cannot_reach_an_ipc_socket():
    path = get_open_zmq_ipc_path()
    file = path.removeprefix("ipc://")
    directory = os.path.dirname(file)
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    with zmq_socket_ctx(path, zmq.PULL) as pull:

        def connect() -> None:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(file)

        def attempts() -> list[str]:
            return [_tried(connect), _tried(os.listdir, directory), _tried(os.unlink, file)]

        assert _as_another_user(attempts) == ["PermissionError"] * 3
        with zmq_socket_ctx(path, zmq.PUSH, linger=1000) as push:
            push.send(b"works")
            assert pull.poll(30_000)
            assert pull.recv() == b"works"
    # (it goes with this process; the suite's temporary directory would miss it before)
    sockets._directory.remove()


# ---- the same user ------------------------------------------------------------------------------


def test_the_same_user_needs_no_handle():
    """That is no gap but where the boundary runs: the system lets a user's processes at each
    other's descriptors, and who is told otherwise would rely on it."""
    source = """
        import os, sys
        for fd in os.listdir(f"/proc/{sys.argv[1]}/fd"):
            path = f"/proc/{sys.argv[1]}/fd/{fd}"
            if "memfd:fastipc" in os.readlink(path):
                with open(path, "r+b") as memory:
                    print(memory.read(8))
                break
    """
    with pair():
        out = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(source), str(os.getpid())],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    assert out.strip() == repr(b"fastipc\n")


def test_a_handle_is_no_more_than_its_queue():
    """When the queue is gone the handle opens nothing, in any process."""
    with MessageQueue(1, 1) as writer:
        text = writer.export_handle().to_str()
    with Team() as team, MessageQueue(1, 1):  # the descriptor's number is another queue's now
        assert "attached" not in team.start(workers.try_to_attach, text).result()
