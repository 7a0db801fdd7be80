"""Queues among the members of a process group: gloo, and anything that can broadcast."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import group_workers as jobs
import pytest
from support import NIGHTLY, Member, Team

from fastipc import MessageQueue

ARRAYS = 2000 if NIGHTLY else 200
RANKS = 4


def _run_hub(members: list[Member]) -> list[Any]:
    """Passes on what members broadcast, until each has returned."""
    results: list[Any] = [None] * len(members)
    done: set[int] = set()
    while len(done) < len(members):
        said = {i: m._connection.recv() for i, m in enumerate(members) if i not in done}
        rounds = {}
        for i, word in said.items():
            if word[0] == "round":
                rounds[i] = word
            elif word[0] == "error":
                raise word[1]
            else:
                results[i] = word[1]
                done.add(i)
        if rounds:
            sources = {src for _, src, _ in rounds.values()}
            assert len(sources) == 1
            obj = rounds[sources.pop()][2]
            for i in rounds:
                members[i].tell(obj)
    for member in members:
        member.process.join()
    return results


def duck(team: Team, job: str, *arguments: Any, away: set[int] = frozenset()) -> list[Any]:
    members = [
        team.start(jobs.duck_member, job, rank, RANKS, set(away), arguments)
        for rank in range(RANKS)
    ]
    return _run_hub(members)


def gloo(team: Team, store: Path, job: str, *arguments: Any) -> list[Any]:
    pytest.importorskip("torch.distributed")
    members = [
        team.start(jobs.gloo_member, job, rank, RANKS, str(store / job), arguments)
        for rank in range(RANKS)
    ]
    return [member.result() for member in members]


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may hide /proc")


def _others(*ranks: int) -> list[int]:
    return [rank for rank in range(RANKS) if rank not in ranks]


@pytest.mark.timeout(1800 if NIGHTLY else 240)
def test_every_member_of_a_gloo_group_writes_to_the_others(tmp_path: Path) -> None:
    with Team("spawn") as team:
        seen = gloo(team, tmp_path, "every_writer", ARRAYS)
    for member in seen:
        assert member == {str(w): (_others(w), []) for w in range(RANKS)}


@pytest.mark.timeout(1800 if NIGHTLY else 240)
def test_every_member_of_any_group_writes_to_the_others() -> None:
    with Team("spawn") as team:
        seen = duck(team, "every_writer", ARRAYS)
    for member in seen:
        assert member == {str(w): (_others(w), []) for w in range(RANKS)}


@needs_root
@pytest.mark.timeout(1800 if NIGHTLY else 240)
def test_who_cannot_open_the_memory_reads_over_tcp() -> None:
    with Team("spawn") as team:
        seen = duck(team, "every_writer", ARRAYS, away={1, 3})
    expected = {"0": ([2], [1, 3]), "1": ([], [0, 2, 3]), "2": ([0], [1, 3]), "3": ([], [0, 1, 2])}
    for member in seen:
        assert member == expected


@pytest.mark.timeout(1800 if NIGHTLY else 240)
def test_one_member_reads_from_all_others_gloo(tmp_path: Path) -> None:
    with Team("spawn") as team:
        local = gloo(team, tmp_path, "single_reader", ARRAYS)
    assert local[0] == local[RANKS - 1] == [True] * RANKS
    assert local[1] == []


@needs_root
@pytest.mark.timeout(1800 if NIGHTLY else 240)
def test_one_member_reads_from_all_others_here_and_elsewhere() -> None:
    with Team("spawn") as team:
        local = duck(team, "single_reader", ARRAYS, away={1})
    assert local[0] == local[RANKS - 1] == [True, False, True, True]


def test_a_queue_from_outside_is_read_by_all_members() -> None:
    with Team("spawn") as team, MessageQueue(RANKS, RANKS) as queue:
        members = [
            team.start(jobs.duck_member, "external", rank, RANKS, set(), (queue.export_handle(),))
            for rank in range(RANKS)
        ]
        for i in range(3):
            queue.enqueue(i)
        import threading

        def finish() -> None:
            queue.wait_until_ready(60)
            queue.close()

        thread = threading.Thread(target=finish)
        thread.start()
        assert _run_hub(members) == [[0, 1, 2]] * RANKS
        thread.join()


def test_a_failure_is_everyones() -> None:
    with Team("spawn") as team:
        texts = duck(team, "failing")
    assert len(set(texts)) == 1
    assert "max_chunk_bytes" in texts[0]


def test_what_only_one_member_has_wrong_is_everyones_failure() -> None:
    with Team("spawn") as team:
        for texts in duck(team, "misconfigured"):
            assert len(texts) == 4
            assert all("FASTIPC_SPIN_US" in text for text in texts)


class Alone:
    rank = 0
    world_size = 1

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        return obj


def test_what_is_no_group_is_refused() -> None:
    with pytest.raises(TypeError, match="broadcast_obj"):
        MessageQueue.create_from_process_group(object(), 1 << 20, 4)
    with pytest.raises(ValueError, match="writer_rank"):
        MessageQueue.create_from_process_group(Alone(), 1 << 20, 4, writer_rank=1)
    with pytest.raises(ValueError, match="one member"):
        MessageQueue.create_from_process_group(Alone(), 1 << 20, 4)
    with pytest.raises(ValueError, match="reader_rank"):
        MessageQueue.create_from_process_group_single_reader(Alone(), 1 << 20, 4, reader_rank=-1)
