"""What this process may use of its host: CPUs, memory, and who the host is."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

__all__ = ["available_cpus", "boot_id", "host_name", "memory_headroom"]

_CGROUP_ROOT = Path("/sys/fs/cgroup")


@cache
def host_name() -> str:
    return socket.gethostname()


@cache
def boot_id() -> str:
    """Changes with every boot, differs between hosts; "" where there is none to be had."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _cgroups() -> list[Path]:
    """This process's cgroup and those above it (cgroup v2), innermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        if line.startswith("0::"):
            group = _CGROUP_ROOT / line[3:].lstrip("/")
            return [p for p in (group, *group.parents) if p.is_relative_to(_CGROUP_ROOT)]
    return []


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def available_cpus() -> int:
    """CPUs that this process may use: its affinity, limited by cpu.max of its cgroups (whole CPUs,
    at least 1)."""
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    else:
        cpus = os.cpu_count() or 1
    for group in _cgroups():
        quota = _read_words(group / "cpu.max")
        if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit():
            cpus = min(cpus, int(quota[0]) // int(quota[1]))
    return max(cpus, 1)


def memory_headroom() -> int | None:
    """Bytes until the tightest memory limit of this process's cgroups; None without a limit.

    Cached files count as free: the kernel gives them up before it kills. (Those of tmpfs, such as
    queues, are none of these.)
    """
    headroom = None
    for group in _cgroups():
        limit = _read_words(group / "memory.max")
        used = _read_words(group / "memory.current")
        if limit and used and limit[0].isdigit() and used[0].isdigit():
            stat = _read_words(group / "memory.stat")
            counts = dict(zip(stat[::2], stat[1::2], strict=False))
            cached = sum(int(counts.get(name, 0)) for name in ("active_file", "inactive_file"))
            left = int(limit[0]) - int(used[0]) + cached
            headroom = left if headroom is None else min(headroom, left)
    return headroom
