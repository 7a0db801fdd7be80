"""The demo: what it verifies, what it says when something is wrong, and that it cleans up.

That no process and no file is left is checked after each of these tests by conftest.py.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from support import eventually, has_ended

import fastipc
from fastipc.demo import display
from fastipc.demo.front_end import Report

# Long enough for a test to interfere; a run that is not interfered with takes less.
LONG = ["--seconds", "100"]


def start_demo(start_child, *options, **kwargs):
    command = ["-m", "fastipc", "demo", *map(str, options)]
    return start_child(command=command, timeout=110, **kwargs)


def pids(child):
    """{name: pid} of every process, once all of them are ready."""
    line = child.wait_for("front end 0 is pid ", "stderr")
    found = re.findall(r"(?:demo: |, )([a-z0-9 ]+) is pid (\d+)", line)
    return {name: int(pid) for name, pid in found}


def press_ctrl_c(child):
    """SIGINT for the whole group, as a terminal sends it."""
    root = psutil.Process(child.pid)
    for process in (root, *root.children(recursive=True)):
        try:
            process.send_signal(signal.SIGINT)
        except psutil.NoSuchProcess:
            continue


# -- runs that verify ----------------------------------------------------------------------------


@pytest.mark.parametrize(("engines", "workers"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_every_token_is_verified_and_every_channel_used(start_child, engines, workers):
    child = start_demo(
        start_child, "--engines", engines, "--workers", workers, "--requests", 120,
        "--seconds", 60, "--json",
    )  # fmt: skip
    result = json.loads(child.check())

    assert result["verified"] is True
    assert (result["engines"], result["workers"], result["clients"]) == (engines, workers, 1)
    assert result["requests"] == 120
    channels = result["channels"]
    # Every fourth request has an image, which travels as a frame of its own.
    assert channels["requests"]["tensor_frames"] == channels["requests"]["with_image"] == 30
    assert channels["outputs"]["tokens"] == result["tokens"] == channels["ring"]["rows"] > 120 * 8
    assert 0 < channels["outputs"]["messages"] <= result["tokens"]
    assert channels["ring"]["readers"] == workers
    assert 0 < channels["ring"]["steps"] <= result["tokens"]
    assert result["first_token_ms"]["count"] == 120
    assert 0 < result["first_token_ms"]["p50"] <= result["first_token_ms"]["p99"]
    assert result["stages_ms"]["step"]["p50"] > 0
    assert len(result["model"]["shard_bytes"]) == workers
    names = [process["name"] for process in result["processes"]]
    expected = ["front end 0"]
    for engine in range(engines):
        expected.append(f"engine {engine}")
        expected += [f"worker {rank} of engine {engine}" for rank in range(workers)]
    assert names == expected
    started = pids(child)
    assert started["front end 0"] == child.pid
    assert {p["name"]: p["pid"] for p in result["processes"]}.items() <= started.items()
    assert ("coordinator" in started) == (engines > 1)
    assert all(process["cpu_seconds"] > 0 for process in result["processes"])


def test_several_front_ends_share_the_requests(start_child):
    child = start_demo(
        start_child, "--engines", 2, "--workers", 1, "--clients", 3, "--requests", 90,
        "--seconds", 60, "--json",
    )  # fmt: skip
    result = json.loads(child.check())

    assert result["requests"] == 90
    assert result["channels"]["requests"]["with_image"] == 23
    names = [process["name"] for process in result["processes"]]
    assert names[:3] == ["front end 0", "front end 1", "front end 2"]


def test_table_of_a_verified_run(start_child):
    child = start_demo(start_child, "--seconds", 0.3, "--engines", 1)
    printed = child.check()

    assert printed.startswith("verified: ")
    for text in (
        "channel 1", "channel 2", "channel 3", "sample", "requests/s", "tokens/s", "p50", "p99",
        "first token", "engine_queue", "front end 0", "worker 1 of engine 0",
    ):  # fmt: skip
        assert text in printed
    # Not a terminal: no bar, and no more than the line at the start.
    assert child.stderr.count("\n") == 1


def test_the_text_may_be_a_file(start_child, tmp_path):
    (tmp_path / "small").write_text("abcabd" * 100)
    child = start_demo(
        start_child, "--path", "small", "--requests", 8, "--engines", 1, "--workers", 1, "--json"
    )
    result = json.loads(child.check())
    assert set(result["sample"]["said"]) <= set("abcd")


def test_version(run_child):
    assert re.fullmatch(
        r"fastipc \d+\.\d+\.\d+\n", run_child(command=["-m", "fastipc", "--version"])
    )


IDLE = """
    import asyncio, sys, time
    import psutil
    from fastipc.demo.core import DemoConfig, DemoCore, Generate
    from fastipc.engine import AsyncEngineClient

    async def main():
        config = DemoConfig(path=sys.argv[1], workers=2)
        client = AsyncEngineClient.launch(DemoCore, config, engines=2)
        async with client:
            for i in range(10):
                async for _ in client.generate(Generate(f"{i}", b"def ", 10)):
                    pass
            await asyncio.sleep(1)  # waits that spun have learnt not to
            everybody = psutil.Process().children(recursive=True) + [psutil.Process()]

            def used():
                return sum(sum(process.cpu_times()[:2]) for process in everybody)

            before, began = used(), time.monotonic()
            await asyncio.sleep(8)
            print(len(everybody), (used() - before) / (time.monotonic() - began))

    if __name__ == "__main__":
        asyncio.run(main())
"""


def test_an_idle_topology_uses_less_than_a_hundredth_of_a_core(run_child):
    source = Path(fastipc.__file__).parent / "demo"
    processes, used = run_child(IDLE, source, timeout=110).split()
    # A front end, a coordinator, 2 engines, 4 workers; and Python's resource trackers.
    assert int(processes) >= 8
    assert float(used) < 0.01


# -- runs that go wrong --------------------------------------------------------------------------


def test_killed_engine_is_named(start_child):
    child = start_demo(start_child, *LONG, "--json")
    pid = pids(child)["engine 1"]
    os.kill(pid, signal.SIGKILL)

    assert child.wait() == 1
    assert re.search(rf"engine 1 \(pid {pid} on .*\) is dead: was killed by SIGKILL", child.stderr)
    assert "Traceback" not in child.stderr
    result = json.loads(child.stdout)
    assert result["verified"] is False
    assert result["error"]["type"] == "EngineDeadError"
    assert (result["error"]["engine"], result["error"]["exitcode"]) == (1, -signal.SIGKILL)


def test_killed_worker_is_named(start_child):
    child = start_demo(start_child, *LONG, "--json")
    pid = pids(child)["worker 1 of engine 0"]
    os.kill(pid, signal.SIGKILL)

    assert child.wait() == 1
    assert "engine 0 " in child.stderr
    assert f"worker 1 (pid {pid}) was killed by SIGKILL" in child.stderr
    assert "Traceback" not in child.stderr
    # (which of the two depends on whether it was found dead in a step or in a call)
    assert json.loads(child.stdout)["error"]["type"] in ("EngineDeadError", "RequestFailed")


def test_killed_front_end_is_named(start_child):
    child = start_demo(start_child, *LONG, "--clients", 2, "--engines", 1, "--workers", 1, "--json")
    pid = pids(child)["front end 1"]
    os.kill(pid, signal.SIGKILL)

    assert child.wait() == 1
    assert f"front end 1 (pid {pid}) was killed by SIGKILL" in child.stderr
    assert json.loads(child.stdout)["error"]["type"] == "ChildDied"


def test_everybody_ends_when_the_demo_is_killed(start_child):
    child = start_demo(start_child, *LONG)
    others = [psutil.Process(pid) for name, pid in pids(child).items() if name != "front end 0"]
    assert len(others) == 7
    os.kill(child.pid, signal.SIGKILL)

    assert child.wait() == -signal.SIGKILL
    for other in others:
        eventually(lambda p=other: has_ended(p))
    assert "Traceback" not in child.stderr


def test_ctrl_c_while_running(start_child):
    child = start_demo(start_child, *LONG)
    pids(child)
    press_ctrl_c(child)

    assert child.wait() == 130
    assert child.stderr.endswith("fastipc demo: interrupted\n")
    assert "Traceback" not in child.stderr


def test_ctrl_c_while_starting(start_child):
    child = start_demo(start_child, *LONG)
    while not psutil.Process(child.pid).children():
        assert child.process.poll() is None
        time.sleep(0.001)
    press_ctrl_c(child)

    assert child.wait() == 130
    assert child.stderr.endswith("fastipc demo: interrupted\n")
    assert "Traceback" not in child.stderr


def test_ctrl_c_while_checking(start_child):
    child = start_child(
        """
        import sys, time
        from fastipc.__main__ import main
        from fastipc.demo import front_end

        def check(orders, said):
            print("checking", len(said), flush=True)
            time.sleep(1000)

        if __name__ == "__main__":
            front_end.check = check
            sys.exit(main(["demo", "--requests", "5", "--engines", "1", "--workers", "1"]))
        """
    )
    child.wait_for("checking 5")
    press_ctrl_c(child)

    assert child.wait() == 130
    assert child.stderr.endswith("fastipc demo: interrupted\n")
    assert "Traceback" not in child.stderr


# Runs the demo with another engine in the place of the right one.
REPLACED_CORE = """
    import argparse, os, sys
    from pathlib import Path
    import fastipc.demo
    from fastipc.demo import core

    class OneTokenIsWrong(core.DemoCore):
        def _said(self, sequence, token):
            output = super()._said(sequence, token)
            if sequence.request.request_id == "demo-5" and output.finished:
                output.tokens = bytes((token ^ 1,))
            return output

    class Raises(core.DemoCore):
        def step(self):
            raise ZeroDivisionError("out of order")

    if __name__ == "__main__":
        arguments = argparse.Namespace(
            path=Path(fastipc.demo.__file__).parent, engines=1, workers=1, clients=1,
            requests=20, seconds=60.0, json=True,
        )
        sys.exit(fastipc.demo.main(arguments, core_class=globals()[sys.argv[1]]))
"""


def test_one_wrong_token_is_found(start_child):
    child = start_child(REPLACED_CORE, "OneTokenIsWrong")

    assert child.wait() == 1
    error = json.loads(child.stdout)["error"]
    assert error["type"] == "WrongTokens"
    assert error["request"] == 5
    assert "wrong tokens: for request 5 " in child.stderr


def test_engine_that_raises_is_named_and_its_traceback_shown(start_child):
    child = start_child(REPLACED_CORE, "Raises")

    assert child.wait() == 1
    error = json.loads(child.stdout)["error"]
    assert error["type"] == "EngineDeadError"
    assert "engine 0" in error["message"]
    assert "ZeroDivisionError: out of order" in child.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--path", "no/such/path"],
        ["--path", os.devnull],
        ["--workers", "0"],
        ["--engines", "many"],
        ["--clients", "65"],
        ["--requests", "0"],
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


# -- the display ---------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_on_a_terminal_is_a_bar_that_goes_away(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setattr(display, "DRAW_SECONDS", 0)
    terminal = Terminal()
    with display.Progress(terminal, 1e6, 100) as progress:
        progress.started([("front end 0", 11), ("engine 0", 12)])
        progress.moved(Report(index=0, pid=11, requests=50, tokens=1234))
        progress.checking()

    shown = terminal.getvalue()
    assert "fastipc demo: front end 0 is pid 11, engine 0 is pid 12\n" in shown
    assert "\r[############............]  50%  50 requests  1,234 tokens" in shown
    assert shown.endswith("\r\x1b[K")


def test_progress_elsewhere_is_a_line_now_and_then(monkeypatch):
    monkeypatch.setattr(display, "LINE_SECONDS", 3600)
    stream = io.StringIO()
    with display.Progress(stream, 1e6, None) as progress:
        progress.started([("front end 0", 11)])
        progress.moved(Report(index=0, pid=11, requests=1, tokens=2))
        monkeypatch.setattr(display, "LINE_SECONDS", 0)
        progress.started([("front end 0", 11)])
        progress.moved(Report(index=0, pid=11, requests=3, tokens=4))

    assert stream.getvalue().splitlines() == [
        "fastipc demo: front end 0 is pid 11",
        "fastipc demo: front end 0 is pid 11",
        "fastipc demo: 0%  3 requests  4 tokens",
    ]


def test_progress_nowhere_is_nothing(monkeypatch):
    """A process that is started with its stderr closed has None there."""
    monkeypatch.setattr(display, "LINE_SECONDS", 0)
    with display.Progress(None, 1e6, None) as progress:
        progress.started([("front end 0", 11)])
        progress.moved(Report(index=0, pid=11, requests=1, tokens=2))
        progress.checking()


def test_the_figures_of_nothing(monkeypatch):
    assert display.percentiles([]) == {"p50": 0.0, "p99": 0.0, "count": 0}
    assert display.percentiles([0.002, 0.001]) == {"p50": 2.0, "p99": 2.0, "count": 2}
