"""Named segments, for readers that cannot reach the writer through /proc: private, swept, and
SharedMemoryFull rather than SIGBUS where the file system is small."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import workers
from support import Team, drain, ends, forever, pair

import fastipc
from fastipc import HandleMismatch, MessageQueue, SharedMemoryFull

SHM = Path("/dev/shm")


def _segments() -> set[Path]:
    return {path for path in SHM.iterdir() if "fastipc-" in path.name}


def test_the_file_is_private_and_goes_when_all_have_attached():
    with MessageQueue(2, 2, shm_dir="/dev/shm") as writer:
        path = Path(writer.export_handle().path)
        assert path.parent == SHM
        info = path.stat()
        assert stat.S_IMODE(info.st_mode) == 0o600
        assert info.st_uid == os.getuid()
        # Nobody guesses the name: 128 random bits, not the pid.
        assert len(path.name) == len("fastipc-") + 32
        handle = writer.export_handle()
        with MessageQueue.create_from_handle(handle, 0) as one:
            assert path.exists()
            with MessageQueue.create_from_handle(handle, 1) as two:
                writer.wait_until_ready()
                assert not path.exists()
                writer.enqueue(np.arange(100_000))
                for reader in (one, two):
                    assert np.array_equal(reader.dequeue(), np.arange(100_000))
                # A replacement still finds it, through the writer.
                two.close()
                with MessageQueue.create_from_handle(handle, 1) as again:
                    writer.enqueue("more")
                    assert again.dequeue() == "more"
                    assert one.dequeue() == "more"


def test_a_umask_makes_no_difference():
    before = os.umask(0)
    try:
        with MessageQueue(1, 1, shm_dir="/dev/shm") as writer:
            mode = stat.S_IMODE(os.stat(writer.export_handle().path).st_mode)
            assert mode == 0o600
    finally:
        os.umask(before)


def test_the_file_goes_with_a_writer_that_closes_before_anyone_attached():
    with MessageQueue(1, 1, shm_dir="/dev/shm") as writer:
        path = Path(writer.export_handle().path)
    assert not path.exists()
    # Attaching afterwards is a clear error, and makes no new file.
    with pytest.raises(HandleMismatch):
        MessageQueue.create_from_handle(writer.export_handle(), 0)
    assert not path.exists()


def test_readers_in_other_processes():
    with Team() as team, MessageQueue(2, 2, shm_dir="/dev/shm", slots=4) as writer:
        handle = writer.export_handle()
        members = [team.start(workers.check_all, handle, rank, 9, 100_000) for rank in (0, 1)]
        writer.wait_until_ready()
        pattern = workers.Pattern(9, 100_000)
        for i in range(200):
            writer.enqueue(pattern.make(i))
        writer.close()
        assert [member.result() for member in members] == [200, 200]


def test_what_a_killed_writer_left_is_swept_by_the_next_creation():
    before = _segments()
    with Team() as team:
        members = [team.start(workers.obedient_writer, {"shm_dir": "/dev/shm"}) for _ in range(3)]
        handles = [member._connection.recv() for member in members]
        paths = [Path(handle.path) for handle in handles]
        members[0].kill()
        members[1].kill()
        assert all(path.exists() for path in paths)
        with ends(1, shm_dir="/dev/shm"):
            assert [path.exists() for path in paths] == [False, False, True]
        # The living one's queue works on.
        with MessageQueue.create_from_handle(handles[2], 0) as reader:
            members[2].tell("alive")
            assert reader.dequeue() == "alive"
            members[2].said("sent")
            members[2].tell(None)
            members[2].result()
    assert not _segments() - before


def test_sweeping_leaves_other_files_alone():
    name = "fastipc-" + 32 * "0"
    paths = [SHM / name, SHM / ("." + name), SHM / "fastipc-mine", SHM / (name + "0")]
    try:
        for path in paths:
            path.write_bytes(b"something else")
        with ends(1, shm_dir="/dev/shm"):
            assert all(path.read_bytes() == b"something else" for path in paths)
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def test_directories_that_cannot_be(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for wrong in (tmp_path / "missing", file, tmp_path / ("x" * 300), Path("/proc")):
        with pytest.raises(OSError):
            MessageQueue(1, 1, shm_dir=wrong)
    for length in range(100, 300, 7):
        directory = _directory_of_length(tmp_path, length)
        if directory is None:
            continue
        # It works, or it is too long and says so.
        outcome = "works"
        try:
            with pair(shm_dir=directory, max_chunk_bytes=4096) as (writer, reader):
                writer.enqueue(1)
                assert reader.dequeue() == 1
        except OSError as error:
            outcome = str(error)
        assert outcome == "works" or "name too long" in outcome
        assert list(directory.iterdir()) == []


def _directory_of_length(base: Path, length: int) -> Path | None:
    missing = length - len(str(base)) - 1
    if missing < 1:
        return None
    parts = [missing] if missing <= 200 else [200, missing - 201]
    path = base.joinpath(*("d" * n for n in parts if n > 0))
    path.mkdir(parents=True, exist_ok=True)
    return path


def test_a_path_as_text_or_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(SHM)
    with pair(shm_dir=".", max_chunk_bytes=4096) as (writer, reader):
        assert os.path.isabs(writer.export_handle().path)
        writer.enqueue(1)
        assert reader.dequeue() == 1
    with pair(shm_dir=tmp_path, max_chunk_bytes=4096) as (writer, reader):
        writer.enqueue(np.arange(1000))
        assert len(reader.dequeue()) == 1000
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_replaced_is_not_taken_for_the_queue(tmp_path):
    with MessageQueue(1, 1, shm_dir=tmp_path, max_chunk_bytes=4096) as writer:
        handle = writer.export_handle()
        path = Path(handle.path)
        size = path.stat().st_size
        moved = tmp_path / "moved"
        path.rename(moved)
        for content in (b"", b"x" * 100, bytes(size), moved.read_bytes()[: size // 2]):
            path.write_bytes(content)
            with pytest.raises(HandleMismatch):
                MessageQueue.create_from_handle(handle, 0)
        # Another queue's segment, in good order, is not this one either.
        with MessageQueue(1, 1, shm_dir=tmp_path, max_chunk_bytes=4096) as other:
            path.unlink(missing_ok=True)  # (its creation has swept it)
            os.link(other.export_handle().path, path)
            with pytest.raises(HandleMismatch):
                MessageQueue.create_from_handle(handle, 0)
        path.unlink(missing_ok=True)
        moved.rename(path)
        with MessageQueue.create_from_handle(handle, 0) as reader:
            writer.enqueue(1)
            assert reader.dequeue() == 1


# ---- small file systems ------------------------------------------------------------------------

# A mount of the child's own, which ends with it; as an ordinary user inside a user namespace.
NAMESPACE = """
    import ctypes, os, sys

    NEWNS, NEWUSER, NEWPID = 0x00020000, 0x10000000, 0x20000000
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(flags):
        uid, gid = os.getuid(), os.getgid()
        if uid != 0:
            flags |= NEWUSER
        if libc.unshare(flags) != 0:
            print("cannot:", os.strerror(ctypes.get_errno()))
            sys.exit(77)
        if uid != 0:
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"),
                               ("gid_map", f"0 {gid} 1")):
                with open(f"/proc/self/{name}", "w") as f:
                    f.write(text)

    def mount(kind, where, options=""):
        libc.mount(b"none", b"/", None, 1 << 18 | 1 << 14, None)  # private, all the way down
        if libc.mount(kind, where, kind, 0, options) != 0:
            print("cannot mount:", os.strerror(ctypes.get_errno()))
            sys.exit(77)
"""


def _in_namespace(start_child, source, *args) -> str:
    child = start_child(textwrap.dedent(NAMESPACE) + textwrap.dedent(source), *args)
    code = child.wait()
    if code == 77:
        pytest.skip(f"no namespaces here: {child.stdout}")
    assert code == 0, f"exit code {code}\n{child.stdout}\n{child.stderr}"
    return child.stdout


def test_a_tmpfs_smaller_than_the_ring(start_child, tmp_path):
    out = _in_namespace(
        start_child,
        """
        enter(NEWNS)
        mount(b"tmpfs", sys.argv[1].encode(), b"size=1m")
        import numpy as np
        from fastipc import MessageQueue, SharedMemoryFull

        free = os.statvfs(sys.argv[1])
        free = free.f_bavail * free.f_bsize
        try:
            MessageQueue(1, 1, slots=1024, inline_bytes=8192, shm_dir=sys.argv[1])
        except SharedMemoryFull as error:
            assert isinstance(error, OSError) and error.errno == 28
            assert error.needed > 8 << 20 and free // 2 < error.available <= free
            assert str(error.needed) in str(error) and str(error.available) in str(error)
            assert "make the file system" in str(error)
            print("full")
        assert os.listdir(sys.argv[1]) == []
        now = os.statvfs(sys.argv[1])
        assert now.f_bavail * now.f_bsize == free
        # What fits, works; and a memfd doesn't care.
        with MessageQueue(1, 1, slots=4, shm_dir=sys.argv[1]) as writer:
            with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
                writer.enqueue(np.arange(10_000))
                assert len(reader.dequeue()) == 10_000
                print("fits")
        with MessageQueue(1, 1, slots=1024):
            print("memfd")
        """,
        tmp_path,
    )
    assert out.split() == ["full", "fits", "memfd"]


def test_a_tmpfs_that_fills_up_later(start_child, tmp_path):
    out = _in_namespace(
        start_child,
        """
        enter(NEWNS)
        mount(b"tmpfs", sys.argv[1].encode(), b"size=8m")
        import threading
        import numpy as np
        from fastipc import MessageQueue, SharedMemoryFull

        options = dict(slots=16, max_chunk_bytes=1 << 20, max_chunks=4, shm_dir=sys.argv[1])
        with MessageQueue(2, 2, **options) as writer:
            readers = [MessageQueue.create_from_handle(writer.export_handle(), i) for i in (0, 1)]
            filler = os.path.join(sys.argv[1], "filler")
            try:
                with open(filler, "wb", buffering=0) as f:
                    while True:
                        f.write(bytes(4096))
            except OSError:
                pass
            # Each slot can be written: the ring's pages were allocated at creation.
            for i in range(40):
                writer.enqueue(bytes([i]) * 8000)
                for reader in readers:
                    assert reader.dequeue() == bytes([i]) * 8000
            array = np.arange(200_000)
            for _ in range(3):
                try:
                    writer.enqueue(array)
                    print("sent?")
                except SharedMemoryFull as error:
                    assert str(error.needed) in str(error) and error.needed > 0
                    assert error.available < error.needed
            # More chunks than have pages: refused in the middle, and skipped by the readers.
            os.truncate(filler, os.path.getsize(filler) - (1 << 20) - (1 << 18))
            large = np.arange(3 << 17)
            try:
                writer.enqueue(large)
                print("sent?")
            except SharedMemoryFull:
                print("full")
            writer.enqueue("small")
            for reader in readers:
                assert reader.dequeue() == "small"
            # When room is back the queue works on.
            os.unlink(filler)
            for obj in (array, large):
                writer.enqueue(obj)
                for reader in readers:
                    assert np.array_equal(reader.dequeue(), obj)
            for reader in readers:
                reader.close()
            print("works")
        """,
        tmp_path,
    )
    assert out.split() == ["full", "works"]


# ---- other PID namespaces ----------------------------------------------------------------------


def test_a_reader_in_another_pid_namespace(start_child, tmp_path):
    """By name it attaches, and its death is noticed; a memfd's handle leads nowhere there."""
    source = """
        enter(NEWNS | NEWPID)
        pid = os.fork()
        if pid:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 127)
        mount(b"proc", b"/proc")
        import time
        from fastipc import Handle, HandleMismatch, MessageQueue

        assert os.getpid() == 1
        named, unnamed = (Handle.from_str(text) for text in sys.argv[1:3])
        try:
            MessageQueue.create_from_handle(unnamed, 0)
        except HandleMismatch as error:
            assert "shm_dir" in str(error), str(error)
            print("mismatch", flush=True)
        with MessageQueue.create_from_handle(named, 0) as reader:
            print(reader.dequeue(), flush=True)
            assert len(reader.dequeue()) == 300_000
            print("large", flush=True)
            time.sleep(1000)
    """
    with (
        MessageQueue(1, 1, shm_dir="/dev/shm", max_chunk_bytes=1 << 16) as named,
        MessageQueue(1, 1) as unnamed,
    ):
        child = start_child(
            textwrap.dedent(NAMESPACE) + textwrap.dedent(source),
            named.export_handle().to_str(),
            unnamed.export_handle().to_str(),
        )
        try:
            child.wait_for("mismatch")
        except AssertionError:
            if child.process.wait() == 77:
                pytest.skip(f"no namespaces here: {child.stdout}")
            raise
        named.wait_until_ready()
        assert not os.path.exists(named.export_handle().path)
        named.enqueue("hello")
        child.wait_for("hello")
        named.enqueue(bytes(300_000))
        child.wait_for("large")
        # It lives: its pid there says nothing here, the kernel's lock does.
        named.enqueue("unread")
        with pytest.raises(ValueError, match="not dead"):
            named.evict(0)
        peer = named.stats()["peers"][1]
        assert (peer["pid"], peer["state"]) == (1, "active")
        child.kill_tree()
        child.process.wait()
        with pytest.raises(fastipc.PeerDied) as caught:
            forever(lambda: named.enqueue("x", timeout=10))
        assert caught.value.rank == 0
        assert caught.value.pid == 1


def test_the_writer_in_a_process_without_proc(start_child, tmp_path):
    """Where /proc is not mounted, a named segment works and a memfd is refused with the remedy."""
    out = _in_namespace(
        start_child,
        """
        enter(NEWNS)
        import numpy, fastipc
        from fastipc import MessageQueue
        mount(b"tmpfs", b"/proc", b"size=64k")
        try:
            MessageQueue(1, 1)
        except OSError as error:
            assert "shm_dir" in str(error), error
            print("refused")
        with MessageQueue(1, 1, shm_dir="/dev/shm") as writer:
            with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
                writer.enqueue("works")
                print(reader.dequeue())
        """,
    )
    assert out.split() == ["refused", "works"]


def test_a_memfd_has_no_name_and_needs_no_dev_shm(start_child):
    """64 MiB of chunks in use beside a /dev/shm of 1 MiB."""
    before = _segments()
    out = _in_namespace(
        start_child,
        """
        enter(NEWNS)
        mount(b"tmpfs", b"/dev/shm", b"size=1m")
        import numpy as np
        from fastipc import MessageQueue
        with MessageQueue(1, 1, max_chunk_bytes=16 << 20, max_chunks=4) as writer:
            with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
                writer.enqueue(np.ones(60 << 20, np.uint8))
                print(int(reader.dequeue().sum()) == 60 << 20)
        """,
    )
    assert out.split() == ["True"]
    assert _segments() == before


def test_a_signal_storm_does_not_keep_pages_from_being_allocated(run_child):
    out = run_child(
        """
        import signal
        import numpy as np
        from fastipc import MessageQueue

        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        for shm_dir in (None, "/dev/shm"):
            with MessageQueue(1, 1, max_chunk_bytes=32 << 20, shm_dir=shm_dir) as writer:
                with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
                    writer.enqueue(np.ones(30 << 20, np.uint8))
                    print(int(reader.dequeue().sum()) == 30 << 20)
        signal.setitimer(signal.ITIMER_REAL, 0)
        """
    )
    assert out.split() == ["True", "True"]


def test_the_segment_of_a_memfd_cannot_be_truncated_by_a_peer():
    with pair() as (writer, reader):
        handle = writer.export_handle()
        with open(f"/proc/self/fd/{handle.fd}", "r+b") as file:
            for size in (0, 100, 1 << 40):
                with pytest.raises(OSError):
                    os.ftruncate(file.fileno(), size)
        writer.enqueue("works")
        assert drain(reader) == ["works"]


def test_descriptors_are_not_passed_on_to_programs():
    with pair(), pair(shm_dir="/dev/shm"):
        out = subprocess.run(
            [sys.executable, "-c", "import os; print([os.readlink(f'/proc/self/fd/{f}') "
             "for f in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{f}')])"],
            stdout=subprocess.PIPE, text=True, check=True, close_fds=False,
        ).stdout  # fmt: skip
        assert "fastipc" not in out


def test_a_named_queue_killed_before_its_readers_were_complete_leaves_a_file_until_swept():
    """And fastipc.SharedMemoryFull is an OSError with ENOSPC, for those who catch that."""
    assert issubclass(SharedMemoryFull, OSError)
    with Team() as team:
        member = team.start(workers.obedient_writer, {"shm_dir": "/dev/shm", "n_reader": 2})
        handle = member._connection.recv()
        with MessageQueue.create_from_handle(handle, 0) as reader:
            os.kill(member.pid, signal.SIGKILL)
            member.process.join()
            with pytest.raises(fastipc.PeerDied):
                reader.dequeue()
            # It can still be attached to by name; that reader is told the same at once.
            with MessageQueue.create_from_handle(handle, 1) as late:
                with pytest.raises(fastipc.PeerDied):
                    late.dequeue()
        with ends(1, shm_dir="/dev/shm"):
            assert not os.path.exists(handle.path)
