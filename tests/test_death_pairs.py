"""Death at every point through Python, each process spawned: a choice of cells in which every point
is in every role that comes by, and any two of the other choices meet. FASTIPC_NIGHTLY=1: any two of
all choices, the points among them. The full matrix, in C, is tests/c/test_matrix.c."""

from __future__ import annotations

import collections
import itertools
import json
import re
from typing import Any

import pytest
from conftest import ROOT
from support import NIGHTLY

CELLS_IN_A_RUN = 12

FACTORS: dict[str, list[Any]] = {
    "readers": [1, 2, 3, 4],
    "serializer": ["pickle", "raw", "msgpack"],
    "size": ["slot", "chunk", "fragments"],
    "on_reader_death": ["raise", "evict"],
    "busy": [False, True],
}
# What a point needs to be passed.
NEEDS: dict[str, dict[str, list[Any]]] = {
    "part-taken": {"size": ["fragments"]},
    "between-fragments": {"size": ["fragments"]},
    "pages-reserved": {"size": ["chunk", "fragments"]},
    "loan-lent": {"size": ["slot", "chunk"], "serializer": ["raw"], "busy": [False]},
    "evict": {"on_reader_death": ["evict"]},
    "evict-cursor": {"on_reader_death": ["evict"]},
    "evicted": {"on_reader_death": ["evict"]},
    "grant-begin": {"on_reader_death": ["evict"]},
    "granted": {"on_reader_death": ["evict"]},
}
REPEATING = {"write", "publish", "fragment", "read", "acknowledge"}


def _points() -> list[dict[str, Any]]:
    """The roles of all points, as points.h has them."""
    path = ROOT / "tests/c/points.h"
    if not path.exists():
        pytest.skip("needs the source tree", allow_module_level=True)
    found = []
    pattern = r'POINT\("([^"]+)", "([^"]+)", (\w+), (\w+)\)'
    for number, (point, step, reader, writer) in enumerate(re.findall(pattern, path.read_text())):
        common = {"point": point, "closes": step == "close"}
        # "pages-reserved" happens once for each chunk, and then no more.
        often = step in REPEATING and point != "pages-reserved"
        common["count"] = 1 + number % 4 if often else 1
        if reader != "NONE":
            found.append({**common, "what": "a_reader_dies", "outcome": reader})
        if writer == "NOT_BORN":
            left = int(point not in ("create-begin", "sweep-removed"))
            found.append({**common, "what": "a_maker_dies", "outcome": writer, "left": left})
        elif writer != "NONE":
            mourns = step in ("evict", "replace")
            found.append(
                {
                    **common,
                    "what": "a_writer_dies",
                    "outcome": writer,
                    "mourns": mourns,
                    "replaces": step == "replace",
                }
            )
    return found


def _choices(role: dict[str, Any]) -> list[dict[str, Any]]:
    if role["what"] == "a_maker_dies":
        return [{}]
    needs = NEEDS.get(role["point"], {})
    values = [needs.get(name, all_of_it) for name, all_of_it in FACTORS.items()]
    return [dict(zip(FACTORS, choice, strict=True)) for choice in itertools.product(*values)]


def _pairs(role: dict[str, Any], choice: dict[str, Any], with_point: bool) -> set[Any]:
    facts = list(choice.items())
    if with_point:
        facts.append(("role", (role["what"], role["point"])))
    return set(itertools.combinations(facts, 2))


def select(every_pair: bool) -> list[dict[str, Any]]:
    """One cell for each point and role, each the one with the most pairs that are new; and, if
    asked for, more of them until no pair is left."""
    roles = _points()
    left: set[Any] = set()
    for role in roles:
        for choice in _choices(role):
            left |= _pairs(role, choice, every_pair)
    cells = []
    used: collections.Counter[Any] = collections.Counter()
    for role in roles:
        while True:
            # (with no new pair to be had, what was used least)
            choice = max(
                _choices(role),
                key=lambda c: (
                    len(_pairs(role, c, every_pair) & left),
                    -sum(used[pair] for pair in _pairs(role, c, False)),
                ),
            )
            left -= _pairs(role, choice, every_pair)
            used.update(_pairs(role, choice, False))
            cells.append({**role, **choice})
            mine = {p for c in _choices(role) for p in _pairs(role, c, every_pair)}
            if not every_pair or not any(
                fact[0] == "role" for pair in mine & left for fact in pair
            ):
                break
    assert not left
    return cells


CELLS = select(NIGHTLY)
RUNS = [CELLS[i : i + CELLS_IN_A_RUN] for i in range(0, len(CELLS), CELLS_IN_A_RUN)]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", range(len(RUNS)))
def test_cells(number, start_child, hooked_core):
    child = start_child(
        command=[str(ROOT / "tests/death_cells.py"), json.dumps(RUNS[number])],
        pythonpath=hooked_core,
        timeout=300,
    )
    said = [json.loads(line) for line in child.check().splitlines()]
    done = [line for line in said if "cell" in line]
    assert [line["cell"] for line in done] == RUNS[number]
    late = [line["told_after"] for line in done if line["told_after"] is not None]
    print(
        f"{len(done)} cells, {sum(line['messages'] for line in done)} messages verified; "
        f"told after at most {max(late, default=0):.2f} s"
    )


def test_the_choice_has_every_point_in_every_role():
    cells = {(cell["what"], cell["point"]) for cell in select(False)}
    assert cells == {(role["what"], role["point"]) for role in _points()}
    assert len(cells) > 50
