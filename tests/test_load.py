"""The stress runner and the soak, for a moment (nightly: for hours), and that they can fail."""

from __future__ import annotations

import importlib.util
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soak
import stress
from support import NIGHTLY

import fastipc

HERE = Path(__file__).parent

# Seconds: a loaded machine lets nobody wait so long, and who is stuck waits longer.
WINDOW = "10"


def _numbers(output: str) -> dict[str, int]:
    words = [line.split() for line in output.splitlines()]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


@pytest.mark.slow
@pytest.mark.timeout(7200 if NIGHTLY else 120)
@pytest.mark.parametrize("over", [False, True], ids=["exact", "oversubscribed"])
def test_stress(start_child: Callable[..., Any], over: bool) -> None:
    n = (1_500_000 if over else 10_000_000) if NIGHTLY else (3_000 if over else 40_000)
    arguments = ["--messages", str(n), "--window", WINDOW, "--large-every", "256"]
    child = start_child(
        command=[str(HERE / "stress.py"), *arguments, *(["--over"] if over else [])],
        timeout=7000 if NIGHTLY else 110,
    )
    output = child.check()
    numbers = _numbers(output)
    assert numbers["messages"] == n
    assert numbers["verified"] == n * (numbers["processes"] - 1)
    assert numbers["windows_without_progress"] == 0, output


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_stress_by_other_ways_to_start(start_child: Callable[..., Any], method: str) -> None:
    arguments = ["--messages", "5000", "--window", WINDOW, "--method", method]
    child = start_child(command=[str(HERE / "stress.py"), *arguments], timeout=110)
    assert _numbers(child.check())["verified"] == 5000


def test_the_stress_notices_what_is_wrong_with_a_message() -> None:
    messages = stress.Messages(1, 16)
    for i in range(200):
        payload = messages.payload(i)
        messages.check(i, (i, 0.0, payload))
        with pytest.raises(AssertionError, match="was expected"):
            messages.check(i, (i + 1, 0.0, messages.payload(i + 1)))
        wrong = payload.copy() if hasattr(payload, "copy") else payload
        if isinstance(payload, np.ndarray):
            wrong[len(wrong) // 2] ^= 1
        elif isinstance(payload, bytes):
            wrong = payload[:-1]
        elif isinstance(payload, list):
            wrong = [payload[0], payload[1][:-1]]
        elif isinstance(payload, dict):
            wrong["n"] += 1
        else:
            wrong += 1
        with pytest.raises(AssertionError, match="wrong contents"):
            messages.check(i, (i, 0.0, wrong))


# ---- the soak ----------------------------------------------------------------------------------


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the soak looks into /proc")


@LINUX
@pytest.mark.slow
@pytest.mark.timeout(3600 if NIGHTLY else 120)
def test_soak(start_child: Callable[..., Any], tmp_path: Path) -> None:
    minutes = 30.0 if NIGHTLY else 0.15
    data = tmp_path / "soak.jsonl"
    arguments = ["--minutes", str(minutes), "--data", str(data)]
    if importlib.util.find_spec("matplotlib"):
        arguments += ["--plot", str(tmp_path / "soak.png")]
    child = start_child(
        command=[str(HERE / "soak.py"), *arguments], timeout=3500 if NIGHTLY else 110
    )
    output = child.check()
    assert output.endswith("\nflat\n"), output
    assert "false_alarms 0\n" in output
    parts = [line.split(maxsplit=2) for line in output.splitlines() if line.startswith("done")]
    assert len(parts) >= 8
    assert all(int(count) > 0 for _, count, _ in parts), output
    # and once more from what was stored
    again = start_child(command=[str(HERE / "soak.py"), "--replay", str(data)])
    assert again.check() == "flat\n"


@LINUX
@pytest.mark.slow
def test_a_soak_that_leaks_fails_and_names_it(start_child: Callable[..., Any]) -> None:
    child = start_child(
        command=[str(HERE / "soak.py"), "--minutes", "0.15", "--parts", "churn", "--leak", "all"],
        timeout=110,
    )
    assert child.wait() == 1
    grown = [line for line in child.stdout.splitlines() if line.startswith("FAILED")]
    for what in ("rss", "pss", "segments", "descriptors", "threads", "memfds", "named segments"):
        assert any(f" {what} " in line for line in grown), (what, grown)


def _thirty_minutes(**series: Callable[[float], float]) -> list[str]:
    times = [1800 / soak.SAMPLES * i for i in range(soak.SAMPLES)]
    return soak.judge(times, {("p", kind): [f(t) for t in times] for kind, f in series.items()})


def test_the_rule_of_flatness() -> None:
    rng = random.Random(3)

    def noise(t: float) -> float:
        return 60_000 + 4_000 * rng.random()

    # what comes and goes, what only the beginning took, what goes away
    assert not _thirty_minutes(
        rss=noise,
        pss=lambda t: noise(t) - 40_000 * (t < 500),
        private=lambda t: noise(t) - t,
        descriptors=lambda t: 20 + rng.randrange(5),
        threads=lambda t: 4 + (t > 300),
        memfds=lambda t: 5 - (t > 1500),
    )
    # 100 KiB a minute under that noise, 30 without it; a descriptor every ten minutes
    assert len(_thirty_minutes(rss=lambda t: noise(t) + 100 * t / 60)) == 1
    assert len(_thirty_minutes(rss=lambda t: 60_000 + 30 * t / 60)) == 1
    assert len(_thirty_minutes(descriptors=lambda t: 20 + t // 600 + rng.randrange(3))) == 1
    # a long run is judged as strictly in all, and so more strictly by the minute
    times = [240.0 * i for i in range(360)]
    slow = [60_000 + 1.0 * t / 60 for t in times]
    assert soak.judge(times, {("p", "rss"): slow})
    assert soak.judge(times[:4], {("p", "rss"): slow[:4]})[0].startswith("4 samples are too few")


def test_a_peer_called_dead_is_a_false_alarm() -> None:
    said: list[Any] = []

    class Connection:
        send = staticmethod(said.append)

    def target(job: soak.Job) -> None:
        raise fastipc.PeerDied("reader rank 0 (pid 1 on here) died", 0, 1, "here")

    before = signal.getsignal(signal.SIGINT)
    try:
        soak._run(target, Connection(), 0.0, ())  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGINT, before)
    assert [kind for kind, _ in said] == ["false alarm"]
