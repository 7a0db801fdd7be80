"""``fastipc plan``: its sums, and that running processes have what it says."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import sys
import time

import psutil
import pytest
from serving import Server

from fastipc import MessageQueue, plan


def planned(run_child, *options):
    return json.loads(run_child(command=["-m", "fastipc", "plan", "--json", *options]))


@pytest.mark.parametrize(
    ("options", "processes"),
    [
        ([], {"API server": 1, "engine": 1}),
        (["--tp", "4"], {"API server": 1, "engine": 1, "worker": 4}),
        (
            ["--tp", "2", "--dp", "4"],
            {"parent": 1, "API server": 4, "coordinator": 1, "engine": 4, "worker": 8},
        ),
        (
            ["--dp", "48", "--tp", "8", "--gpus-per-node", "8"],
            {"parent": 1, "API server": 48, "coordinator": 1, "engine": 48, "worker": 384},
        ),
    ],
)
def test_processes(run_child, options, processes):
    told = planned(run_child, *options)
    assert told["processes"] == processes
    assert told["processes_in_all"] == sum(processes.values())
    # 2, 6 and 18 are what people know; see the module.
    known = {"": 2, "--tp 4": 6, "--tp 2 --dp 4": 18}
    assert told["processes_in_all"] == known.get(" ".join(options), told["processes_in_all"])
    over_nodes = sum(node["alike"] * sum(node["processes"].values()) for node in told["nodes"])
    assert over_nodes == told["processes_in_all"]
    assert sum(node["alike"] for node in told["nodes"]) == told["nodes_in_all"]
    for node in told["nodes"]:
        for what in ("threads", "sockets", "descriptors"):
            each = {name: role[what] for name, role in told["roles"].items()}
            assert node[what] == sum(each[name] * n for name, n in node["processes"].items())


def test_the_last_node_may_have_less(run_child):
    told = planned(run_child, "--dp", "5", "--tp", "2", "--gpus-per-node", "4")
    assert [(n["node"], n["alike"], n["processes"]["worker"]) for n in told["nodes"]] == [
        (0, 1, 4), (1, 1, 4), (2, 1, 2),
    ]  # fmt: skip


def test_the_sums_are_shown(run_child):
    printed = run_child(command=["-m", "fastipc", "plan", "--dp", "4", "--tp", "2"])
    assert "= 18 in all" in printed
    lines = re.findall(r"^ +(?:threads|sockets|descriptors|ports) +(.* = .*)$", printed, re.M)
    assert len(lines) > 10
    for line in lines:
        total, _, parts = line.partition(" = ")
        each = [re.sub(r"\([^)]*\)", "", part).split() for part in parts.split(" + ")]
        values = [int(p[0]) * (int(p[2]) if len(p) == 3 else 1) for p in each]
        assert sum(values) == int(total.replace(",", ""))


def test_shared_memory_is_what_queues_have():
    ((calls, _, *of_calls), (replies, _, *of_replies)) = plan.shared_memory(plan.Layout(1, 3, 3, 1))
    assert (calls, replies) == (1, 3)
    for readers, told in ((3, of_calls), (1, of_replies)):
        with MessageQueue(readers, readers) as queue:
            stats = queue.stats()
        assert told == [stats["resident_bytes"], stats["segment_bytes"]]


def test_chunks_are_those_of_the_environment(run_child):
    env = {"FASTIPC_MQ_MAX_CHUNK_BYTES_MB": "1"}
    command = ["-m", "fastipc", "plan", "--tp", "2", "--json"]
    told = json.loads(run_child(command=command, env=env))
    most = told["nodes"][0]["shared_memory"]["at_most"]
    assert 3 * 10 << 20 <= most < 3 * 13 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
@pytest.mark.skipif(not importlib.util.find_spec("uvicorn"), reason="needs uvicorn")
@pytest.mark.parametrize(("dp", "tp", "api_servers"), [(1, 1, 1), (1, 2, 1), (2, 1, 3), (2, 2, 1)])
def test_running_processes_have_what_is_planned(start_child, monkeypatch, dp, tp, api_servers):
    # Otherwise numpy's library for matrices has threads of its own.
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    server = Server(start_child, "--engines", dp, "--workers", tp, "--api-servers", api_servers)
    layout = plan.Layout(dp, tp, dp * tp, api_servers)
    every = plan.roles(layout)
    expected = {
        name: (every[role].total("threads"), every[role].total("descriptors"))
        for name in server.pids
        for role in every
        if name.startswith(role)
    }

    def had():
        processes = {name: psutil.Process(pid) for name, pid in server.pids.items()}
        return {name: (p.num_threads(), p.num_fds()) for name, p in processes.items()}

    started = psutil.Process(server.child.pid).children(recursive=True)
    trackers = [p for p in started if "resource_tracker" in " ".join(p.cmdline())]
    assert len(trackers) == 1
    assert 1 + len(started) - len(trackers) == sum(plan.count(layout, 0).values())
    found = settled(had, expected)
    assert found == expected
    server.child.send_signal(signal.SIGTERM)
    assert server.child.wait() == 0


def settled(look, expected):
    """What was seen at last: the last connections are made after the server is ready."""
    until = time.monotonic() + 20
    while (found := look()) != expected and time.monotonic() < until:
        time.sleep(0.05)
    return found


@pytest.mark.parametrize(
    "options", [["--dp", "0"], ["--tp", "x"], ["--tp", "16", "--gpus-per-node", "8"]], ids=" ".join
)
def test_bad_arguments(start_child, options):
    child = start_child(command=["-m", "fastipc", "plan", *options])
    assert child.wait() == 2
    assert re.search(r"^fastipc plan: ", child.stderr, re.MULTILINE)
