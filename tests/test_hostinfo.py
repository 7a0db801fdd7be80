"""What a host, or a container on it, has. The limits are files that stand in for those of the
kernel's cgroups: a test can't put its own process under a limit on every machine."""

from __future__ import annotations

import logging
import os

import pytest

from fastipc import MessageQueue, hostinfo

MIB = 1 << 20


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Two cgroups of this process, one in the other, and how to set what is in their files."""
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.setattr(hostinfo, "_cgroups", lambda: [inner, tmp_path])

    def put(**files: str) -> None:
        for name, text in files.items():
            where, _, file = name.partition("_")
            (inner if where == "inner" else tmp_path).joinpath(file.replace("_", ".")).write_text(
                text
            )

    return put


def test_cpus_are_those_of_the_tightest_quota(groups):
    cpus = len(os.sched_getaffinity(0))
    assert hostinfo.available_cpus() == cpus
    groups(inner_cpu_max="max 100000\n", outer_cpu_max="max 100000\n")
    assert hostinfo.available_cpus() == cpus
    groups(outer_cpu_max="100000 100000\n")
    assert hostinfo.available_cpus() == 1
    groups(inner_cpu_max="50000 100000\n")
    assert hostinfo.available_cpus() == 1


def test_memory_is_what_the_tightest_limit_leaves(groups):
    assert hostinfo.memory_headroom() is None
    groups(inner_memory_max="max\n", inner_memory_current=f"{5 * MIB}\n")
    assert hostinfo.memory_headroom() is None
    groups(outer_memory_max=f"{100 * MIB}\n", outer_memory_current=f"{60 * MIB}\n")
    assert hostinfo.memory_headroom() == 40 * MIB
    groups(inner_memory_max=f"{50 * MIB}\n")
    assert hostinfo.memory_headroom() == 40 * MIB
    groups(inner_memory_current=f"{45 * MIB}\n")
    assert hostinfo.memory_headroom() == 5 * MIB


def test_cached_files_are_free_memory_and_shared_memory_is_not(groups, caplog):
    groups(inner_memory_max=f"{100 * MIB}\n", inner_memory_current=f"{95 * MIB}\n")
    stat = "anon {}\nfile {}\nshmem {}\ninactive_file {}\nactive_file {}\n"
    sizes = {"max_chunk_bytes": 10 * MIB, "max_chunks": 4}
    for shared, left, warned in ((0, 55, False), (30, 25, True)):
        cached = 50 - shared
        parts = (45, 50, shared, cached - 10, 10)
        groups(inner_memory_stat=stat.format(*(part * MIB for part in parts)))
        assert hostinfo.memory_headroom() == left * MIB
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fastipc"), MessageQueue(1, 1, **sizes):
            assert (f"leaves {left} MiB" in caplog.text) == warned
