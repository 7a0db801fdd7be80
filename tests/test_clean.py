"""`fastipc clean`: what killed processes left goes, what has a living owner stays, and nothing that
isn't ours is touched. Owners are real processes, and SIGKILL is what ends them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import ROOT
from support import in_fork

from fastipc import MessageQueue
from fastipc.clean import Found, clean

# What may be left, and by whom: each prints a line when it has it, and stays.
SEGMENT = """
    import sys, time
    from fastipc import MessageQueue
    queues = [MessageQueue(1, 1, shm_dir=sys.argv[1], slots=4, max_chunk_bytes=4096)
              for _ in range(2)]
    print("\\n".join(q.export_handle().path for q in queues), flush=True)
    print("up", flush=True)
    time.sleep(1000)
"""
SOCKETS = """
    import os, sys, time, zmq
    from fastipc.sockets import get_open_zmq_ipc_path, make_zmq_socket
    path = get_open_zmq_ipc_path()
    socket = make_zmq_socket(zmq.Context(), path, zmq.PULL)
    print(os.path.dirname(path.removeprefix("ipc://")), flush=True)
    print("up", flush=True)
    time.sleep(1000)
"""
TENSORS = """
    import os, sys, time, torch
    import torch.multiprocessing
    from multiprocessing import util
    from fastipc.tensor_ipc import TensorIpcSender

    class Into:
        def put(self, item, timeout=None):
            pass

    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    if __name__ == "__main__":
        sender = TensorIpcSender(Into())
        assert sender(torch.ones(100_000)) is not None
        print(util.get_temp_dir(), flush=True)
        print("up", flush=True)
        time.sleep(1000)
"""


@pytest.fixture
def shm(tmp_path):
    path = tmp_path / "shm"
    path.mkdir()
    return path


@pytest.fixture
def tmp(tmp_path):
    path = Path(tmp_path / "t")
    path.mkdir()
    return path


@pytest.fixture
def owner(start_child, shm, tmp):
    """Starts one, and returns it with the paths that it owns."""

    def start(source: str):
        child = start_child(
            source,
            shm,
            env={"TMPDIR": str(tmp), "FASTIPC_RPC_BASE_PATH": str(tmp)},
            timeout=300,
        )
        child.wait_for("up")
        return child, [Path(line) for line in child.stdout.split() if line != "up"]

    return start


def _kill(child) -> None:
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL


def _command(*arguments: object) -> tuple[int, dict]:
    done = subprocess.run(
        [sys.executable, "-m", "fastipc", "clean", "--json", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def _tree(*bases: Path) -> set[Path]:
    return {path for base in bases for path in base.rglob("*")}


KINDS = [("segment", SEGMENT), ("sockets", SOCKETS), ("tensors", TENSORS)]


@pytest.mark.parametrize(("kind", "source"), KINDS, ids=[kind for kind, _ in KINDS])
def test_what_a_killed_process_left_goes_and_what_a_living_one_owns_stays(
    kind, source, owner, shm, tmp
):
    if kind == "tensors":
        pytest.importorskip("torch")
    victim, left = owner(source)
    alive, kept = owner(source)
    assert left
    _kill(victim)
    assert all(path.exists() for path in left)
    before = _tree(shm, tmp)

    where = ("--shm-dir", shm, "--ipc-dir", tmp)
    code, said = _command("--dry-run", *where)
    assert code == 0
    assert {item["path"] for item in said["found"]} == set(map(str, left))
    assert all(not item["removed"] and item["kind"] == kind for item in said["found"])
    assert _tree(shm, tmp) == before  # it touches nothing

    code, said = _command(*where)
    assert code == 0
    assert {item["path"] for item in said["found"]} == set(map(str, left))
    assert all(item["removed"] and "no process holds" in item["why"] for item in said["found"])
    assert not any(path.exists() for path in left)
    assert _tree(shm, tmp) == {p for p in before if not any(q in (p, *p.parents) for q in left)}
    assert all(path.exists() for path in kept)
    assert clean([shm], [tmp]) == []

    # A stopped owner is an owner, for however long.
    os.kill(alive.pid, signal.SIGSTOP)
    for path in kept:
        os.utime(path, (0, 0))
    assert clean([shm], [tmp]) == []
    _kill(alive)
    assert {item.path for item in clean([shm], [tmp])} == set(map(str, kept))
    assert _tree(shm, tmp) == set()


def test_the_living_queue_works_on(shm):
    with MessageQueue(1, 1, shm_dir=shm, max_chunk_bytes=4096) as writer:
        assert clean([shm], []) == []
        with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            writer.enqueue("before")
            assert clean([shm], []) == []
            assert reader.dequeue() == "before"
    assert list(shm.iterdir()) == []


def test_a_childs_copy_keeps_nothing_alive(owner, shm, tmp, start_child):
    """What was forked from the owner lives on, with all that it inherited."""
    source = """
        import os, sys, time
        from fastipc import MessageQueue
        from fastipc.sockets import get_open_zmq_ipc_path
        queue = MessageQueue(1, 1, shm_dir=sys.argv[1], max_chunk_bytes=4096)
        print(queue.export_handle().path, flush=True)
        print(os.path.dirname(get_open_zmq_ipc_path().removeprefix("ipc://")), flush=True)
        pid = os.fork()
        if pid == 0:
            os.close(1); os.close(2)
            time.sleep(1000)
        print("up", flush=True)
        time.sleep(1000)
    """
    child, left = owner(source)
    import psutil

    (grandchild,) = psutil.Process(child.pid).children()
    _kill(child)
    try:
        assert grandchild.is_running()
        assert {item.path for item in clean([shm], [tmp])} == set(map(str, left))
    finally:
        grandchild.kill()
        grandchild.wait(10)


def test_what_is_not_ours_is_not_touched(shm, tmp):
    hexes = "0123456789abcdef" * 2
    magic = b"fastipc\n" + bytes(120)
    (shm / f"fastipc-{hexes}").write_bytes(b"something else")  # no magic
    (shm / f"fastipc-{hexes}0").write_bytes(magic)
    (shm / "fastipc-short").write_bytes(magic)
    (shm / f"fastipc-{hexes.upper()}").write_bytes(magic)
    (shm / f"other-{hexes}").write_bytes(magic)
    precious = shm / "precious"
    precious.write_bytes(magic)
    (shm / f"fastipc-{hexes[::-1]}").symlink_to(precious)
    (shm / f".fastipc-{hexes[::-1]}").symlink_to(precious)
    (shm / f"fastipc-{'f' * 32}").mkdir()
    os.mkfifo(shm / f"fastipc-{'e' * 32}")

    real = tmp / "real"
    real.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(real / "0"))
    (tmp / "fastipc-linklink").symlink_to(real)
    (tmp / "pymp-linklink").symlink_to(real)
    (tmp / "fastipc-somebody").mkdir()
    os.chmod(tmp / "fastipc-somebody", 0o755)  # never made by us
    (tmp / "fastipc-toolongname").mkdir(0o700)
    (tmp / "fastipc-floor-xy").write_text("a file")
    unmarked = tmp / "pymp-abcdefgh"  # some other program's
    unmarked.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(unmarked / "listener-x"))
    before = _tree(shm, tmp)
    assert clean([shm], [tmp]) == []
    assert _tree(shm, tmp) == before
    assert precious.read_bytes() == magic


def test_a_directory_with_a_file_in_it_is_reported_and_kept_whole(tmp):
    directory = tmp / "fastipc-12345678"
    directory.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(directory / "0"))
    (directory / "file").write_text("precious")
    code, said = _command("--ipc-dir", tmp, "--shm-dir", tmp)
    assert code == 1
    (item,) = said["found"]
    assert not item["removed"]
    assert "file" in item["error"]
    assert any("fastipc-12345678" in problem for problem in said["problems"])
    assert sorted(path.name for path in directory.iterdir()) == ["0", "file"]


def test_somebody_who_inherited_a_senders_directory_and_listens_keeps_it(tmp):
    directory = tmp / "pymp-12345678"
    directory.mkdir(0o700)
    (directory / "fastipc-tensors").touch(0o600)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(directory / "listener-1"))
        listening.listen()
        assert clean([], [tmp]) == []
    assert [item.kind for item in clean([], [tmp])] == ["tensors"]
    assert list(tmp.iterdir()) == []


OTHER_UID = 54321


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_are_neither_touched_nor_reported(shm, tmp):
    hexes = "0123456789abcdef" * 2
    segment, directory = shm / f"fastipc-{hexes}", tmp / "fastipc-12345678"
    segment.write_bytes(b"fastipc\n" + bytes(120))
    directory.mkdir(0o700)
    for path in (shm, tmp, *shm.parents):
        if path.stat().st_uid == os.getuid() and path != Path("/"):
            os.chmod(path, path.stat().st_mode | 0o777)

    def as_another() -> list[Found]:
        os.setgroups([])
        os.setresgid(OTHER_UID, OTHER_UID, OTHER_UID)
        os.setresuid(OTHER_UID, OTHER_UID, OTHER_UID)
        return clean([shm], [tmp])

    assert in_fork(as_another) == []
    assert segment.exists()
    assert directory.exists()
    # And root cleans what is root's, not everybody's.
    os.chown(segment, OTHER_UID, OTHER_UID)
    os.chown(directory, OTHER_UID, OTHER_UID)
    assert clean([shm], [tmp]) == []
    for path in (segment, directory):
        os.chown(path, 0, 0)
    assert {Path(item.path) for item in clean([shm], [tmp])} == {segment, directory}


def test_many_clean_at_once_while_others_make(shm, tmp):
    """Each thing is removed once, and none that is being made."""
    hexes = [f"{i:032x}" for i in range(300)]
    for name in hexes:
        (shm / f"fastipc-{name}").write_bytes(b"fastipc\n" + bytes(120))
        (tmp / f"fastipc-{name[-8:]}").mkdir(0o700)
    removed: list[Found] = []
    errors: list[BaseException] = []
    stop = threading.Event()

    def sweep() -> None:
        try:
            while not stop.is_set():
                removed.extend(clean([shm], [tmp]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=sweep) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for i in range(60):
            with (
                MessageQueue(1, 1, shm_dir=shm, slots=2, max_chunk_bytes=4096) as writer,
                MessageQueue.create_from_handle(writer.export_handle(), 0) as reader,
            ):
                writer.enqueue(i)
                assert reader.dequeue() == i
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    removed.extend(clean([shm], [tmp]))
    assert not errors
    assert not [item for item in removed if item.error]
    # Each directory once. Segments are swept by who makes one, too; and one that is caught before
    # its maker has locked it (it has a hidden name then) is made once more.
    paths = [item.path for item in removed]
    assert len(set(paths)) == len(paths)
    assert {p for p in paths if Path(p).parent == tmp} == {
        str(tmp / f"fastipc-{name[-8:]}") for name in hexes
    }
    segments = {Path(p).name for p in paths if Path(p).parent == shm}
    assert {n for n in segments if not n.startswith(".")} <= {f"fastipc-{name}" for name in hexes}
    assert list(shm.iterdir()) == list(tmp.iterdir()) == []


def test_what_it_says_to_a_person(shm, tmp, capfd):
    from fastipc.__main__ import main

    (tmp / "fastipc-12345678").mkdir(0o700)
    where = ["--shm-dir", str(shm), "--ipc-dir", str(tmp)]
    assert main(["clean", "--dry-run", *where]) == 0
    out = capfd.readouterr().out
    assert "would remove sockets" in out
    assert "no process holds its owner's lock" in out
    assert main(["clean", *where]) == 0
    assert "removed sockets" in capfd.readouterr().out
    assert main(["clean", *where]) == 0
    assert capfd.readouterr().out == "nothing was left behind\n"
    assert main(["clean", "--shm-dir", str(shm / "missing"), "--ipc-dir", str(tmp)]) == 1
    assert "missing: No such file" in capfd.readouterr().err


def test_where_it_looks_by_default(monkeypatch, tmp, run_child):
    out = run_child(
        "from fastipc.private_dirs import socket_bases; print(socket_bases())",
        env={"TMPDIR": str(tmp), "FASTIPC_RPC_BASE_PATH": "/run"},
    )
    assert out.strip() == repr(["/run", str(tmp), "/tmp"])
