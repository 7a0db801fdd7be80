"""The demo: what it verifies, what it says when something is wrong, and that it cleans up.

That no process and no file is left is checked after each of these tests by conftest.py.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import signal
import time

import psutil
import pytest

from fastipc.demo import corpus, display

# Long enough for a test to interfere; a run that is not interfered with takes less.
LONG = ["--seconds", "60"]


def start_demo(start_child, *options, **kwargs):
    return start_child(command=["-m", "fastipc", "demo", *map(str, options)], **kwargs)


def worker_pids(child):
    """The workers' pids by rank, once all of them are ready."""
    line = child.wait_for("worker 0 is pid ", "stderr")
    return [int(pid) for pid in re.findall(r"is pid (\d+)", line)]


def spawned_workers(child):
    """The worker processes that exist, ready or not."""
    found = []
    for process in psutil.Process(child.pid).children(recursive=True):
        try:
            if "spawn_main" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def press_ctrl_c(child):
    """SIGINT for the whole group, as a terminal sends it."""
    root = psutil.Process(child.pid)
    for process in (root, *root.children(recursive=True)):
        try:
            process.send_signal(signal.SIGINT)
        except psutil.NoSuchProcess:
            continue


# -- runs that verify ----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_json_of_a_verified_run(start_child, workers):
    child = start_demo(start_child, "--workers", workers, "--seconds", 0.5, "--json")
    result = json.loads(child.check())

    assert result["verified"] is True
    assert result["workers"] == workers
    assert result["digests"] == result["messages"] * workers > 0
    assert result["messages_per_second"] > 0
    assert result["gb_per_second"] > 0
    assert 0 < result["round_trip_us"]["p50"] <= result["round_trip_us"]["p99"]
    assert result["corpus"]["larger_than_chunk"] > 0
    names = [process["name"] for process in result["processes"]]
    assert names == ["writer", *(f"worker {rank}" for rank in range(workers))]
    pids = [process["pid"] for process in result["processes"]]
    assert pids[0] == child.pid
    assert pids[1:] == worker_pids(child)
    assert all(process["messages"] == result["messages"] for process in result["processes"])
    assert all(process["cpu_seconds"] > 0 for process in result["processes"])


def test_table_of_a_verified_run(start_child):
    child = start_demo(start_child, "--seconds", 0.3)
    printed = child.check()

    assert printed.startswith("verified: ")
    for text in ("messages/s", "GB/s", "p50", "p99", "writer", "worker 0", "worker 1"):
        assert text in printed
    assert len(worker_pids(child)) == 2
    # Not a terminal: no bar, and no more than the line at the start.
    assert child.stderr.count("\n") == 1


def test_path_may_be_one_small_file(start_child, tmp_path):
    (tmp_path / "small").write_bytes(b"a few bytes")
    child = start_demo(start_child, "--path", tmp_path / "small", "--seconds", 0.3, "--json")
    result = json.loads(child.check())

    assert (result["corpus"]["files"], result["corpus"]["bytes"]) == (1, 11)
    assert result["corpus"]["larger_than_chunk"] > 0


def test_version(run_child):
    assert re.fullmatch(
        r"fastipc \d+\.\d+\.\d+\n", run_child(command=["-m", "fastipc", "--version"])
    )


# -- runs that go wrong --------------------------------------------------------------------------


def test_killed_worker_is_named_by_rank_and_pid(start_child):
    child = start_demo(start_child, *LONG, "--json")
    pid = worker_pids(child)[1]
    os.kill(pid, signal.SIGKILL)

    assert child.wait() == 1
    assert f"worker 1 (pid {pid}) died" in child.stderr
    assert "Traceback" not in child.stderr
    result = json.loads(child.stdout)
    assert result["verified"] is False
    assert result["error"]["type"] == "WorkerDied"
    assert (result["error"]["rank"], result["error"]["pid"]) == (1, pid)


def test_worker_killed_while_starting_is_named(start_child):
    child = start_demo(start_child, *LONG, "--workers", 3)
    while len(workers := spawned_workers(child)) < 3:
        assert child.process.poll() is None
        time.sleep(0.001)
    os.kill(workers[2].pid, signal.SIGKILL)

    assert child.wait() == 1
    assert f"(pid {workers[2].pid}) died" in child.stderr
    assert "Traceback" not in child.stderr


def test_ctrl_c_while_running(start_child):
    child = start_demo(start_child, *LONG)
    worker_pids(child)
    press_ctrl_c(child)

    assert child.wait() == 130
    assert child.stderr.endswith("fastipc demo: interrupted\n")
    assert "Traceback" not in child.stderr


def test_ctrl_c_while_starting(start_child):
    child = start_demo(start_child, *LONG, "--workers", 3)
    while not spawned_workers(child):
        assert child.process.poll() is None
        time.sleep(0.001)
    press_ctrl_c(child)

    assert child.wait() == 130
    assert child.stderr.endswith("fastipc demo: interrupted\n")
    assert "Traceback" not in child.stderr


def test_workers_end_when_the_writer_is_killed(start_child):
    child = start_demo(start_child, *LONG)
    workers = [psutil.Process(pid) for pid in worker_pids(child)]
    os.kill(child.pid, signal.SIGKILL)

    assert child.wait() == -signal.SIGKILL
    for worker in workers:
        while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    assert "Traceback" not in child.stderr


# Runs the demo with another function in the place of the workers' digest.
REPLACED_DIGEST = """
    import argparse, os, sys
    from pathlib import Path
    import fastipc.demo
    from fastipc.demo.worker import sha256

    def wrong_when_large(data):
        digest = sha256(data)
        return digest if data.nbytes <= 1 << 20 else digest[::-1]

    def exits(data):
        os._exit(3)

    def raises(data):
        raise ZeroDivisionError("out of order")

    if __name__ == "__main__":
        arguments = argparse.Namespace(
            path=Path(fastipc.demo.__file__).parent, workers=2, seconds=60.0, json=True
        )
        sys.exit(fastipc.demo.main(arguments, digest=globals()[sys.argv[1]]))
"""


def test_wrong_digest_is_found_and_its_worker_named(start_child):
    child = start_child(REPLACED_DIGEST, "wrong_when_large")

    assert child.wait() == 1
    error = json.loads(child.stdout)["error"]
    assert error["type"] == "WrongDigest"
    assert worker_pids(child)[error["rank"]] == error["pid"]
    assert error["nbytes"] > 1 << 20
    assert "with a wrong digest" in child.stderr


def test_worker_that_exits_is_named(start_child):
    child = start_child(REPLACED_DIGEST, "exits")

    assert child.wait() == 1
    error = json.loads(child.stdout)["error"]
    assert error["type"] == "WorkerDied"
    assert worker_pids(child)[error["rank"]] == error["pid"]


def test_worker_that_raises_is_named_and_its_traceback_shown(start_child):
    child = start_child(REPLACED_DIGEST, "raises")

    assert child.wait() == 1
    error = json.loads(child.stdout)["error"]
    assert error["type"] == "WorkerDied"
    assert worker_pids(child)[error["rank"]] == error["pid"]
    assert "exit code 1" in error["message"]
    assert "ZeroDivisionError: out of order" in child.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--path", "no/such/path"],
        ["--path", os.devnull],
        ["--workers", "0"],
        ["--workers", "many"],
        ["--seconds", "0"],
        ["--seconds", "nan"],
        ["--nonsense"],
    ],
    ids=" ".join,
)
def test_bad_arguments(start_child, options):
    child = start_demo(start_child, *options)

    assert child.wait() == 2
    assert child.stdout == ""
    assert re.search(r"^fastipc( demo)?: ", child.stderr, re.MULTILINE)
    assert "Traceback" not in child.stderr


# -- the parts -----------------------------------------------------------------------------------


def test_pieces_are_of_the_files_and_of_every_size(tmp_path):
    content = os.urandom(5000)
    (tmp_path / "b").write_bytes(content[2000:])
    (tmp_path / "a").write_bytes(content[:2000])
    os.mkfifo(tmp_path / "fifo")  # a read of it would hang
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    loaded = corpus.load(tmp_path)

    assert (loaded.files, loaded.bytes_read) == (2, 5000)
    repeated = content * (corpus.LARGEST_BYTES // len(content) + 1)
    position = 0
    for piece in loaded.pieces:
        if position + piece.data.nbytes > corpus.LARGEST_BYTES:
            position = 0
        expected = repeated[position : position + piece.data.nbytes]
        assert piece.data.tobytes() == expected
        assert piece.digest == hashlib.sha256(expected).digest()
        position += piece.data.nbytes
    sizes = {piece.data.nbytes for piece in loaded.pieces}
    assert {1, corpus.CHUNK_BYTES, corpus.CHUNK_BYTES + 1, corpus.LARGEST_BYTES} <= sizes
    assert [p.data.nbytes for p in corpus.load(tmp_path).pieces] == [
        p.data.nbytes for p in loaded.pieces
    ]


def test_reading_stops_at_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "READ_BYTES", 30)
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 20)
    loaded = corpus.load(tmp_path)

    assert (loaded.files, loaded.bytes_read) == (2, 30)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_on_a_terminal_is_a_bar_that_goes_away(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(display, "DRAW_SECONDS", 0)
    terminal = Terminal()
    with display.Progress(terminal, 2.0) as progress:
        progress.started([11, 12])
        progress.moved(1.0, 1234, 5 * 10**9)

    first, _, rest = terminal.getvalue().partition("\n")
    assert first == "fastipc demo: worker 0 is pid 11, worker 1 is pid 12"
    assert rest.startswith("\r[############............]  50%  1,234 messages  5.00 GB")
    assert rest.endswith("\r\x1b[K")


def test_progress_elsewhere_is_a_line_now_and_then(monkeypatch):
    monkeypatch.setattr(display, "LINE_SECONDS", 3600)
    stream = io.StringIO()
    with display.Progress(stream, 2.0) as progress:
        progress.started([11])
        progress.moved(0.5, 1, 1)
        progress.moved(1.0, 2, 2)
        monkeypatch.setattr(display, "LINE_SECONDS", 0)
        progress.started([11])
        progress.moved(1.0, 3, 3)

    assert stream.getvalue().splitlines() == [
        "fastipc demo: worker 0 is pid 11",
        "fastipc demo: worker 0 is pid 11",
        "fastipc demo: 50%  3 messages  0.00 GB",
    ]
