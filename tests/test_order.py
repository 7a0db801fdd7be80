"""The order of memory, as csrc/ states it: every access, every pair, both ways."""

from __future__ import annotations

import re

import pytest

from tests.verify import source

ACQUIRES = ("acquire", "acqrel", "seqcst")
RELEASES = ("release", "acqrel", "seqcst")

ACCESSES = source.all_accesses()
ORDERED = [a for a in ACCESSES if a.order != "relaxed"]
PAIRS = source.pairs()
RELAXED = source.relaxed_words()


def _labels() -> set[str]:
    return {label for p in PAIRS for label in p.labels}


def test_the_source_is_read() -> None:
    # Fewer would mean that the reader of the source no longer understands it.
    assert len(ORDERED) >= 30
    assert len(ACCESSES) >= 100
    assert len(PAIRS) >= 12


def test_only_one_file_includes_the_atomics() -> None:
    including = [
        f.name
        for f in sorted(source.CSRC.iterdir())
        if f.suffix in (".c", ".h")
        and re.search(r"^\s*#\s*include\s*<stdatomic\.h>", f.read_text(), re.M)
    ]
    assert including == ["fipc_atomic.h"]


def test_no_access_goes_past_the_functions() -> None:
    around = re.compile(
        r"\b(atomic_\w+|__atomic_\w+|__sync_\w+|_Atomic|volatile|memory_order\w*)\b|\bfipc_a(?:32|64)\s*\*\)"
    )
    for f in sorted(source.CSRC.iterdir()):
        if f.suffix not in (".c", ".h") or f.name == "fipc_atomic.h":
            continue
        code = re.sub(r"/\*.*?\*/", "", f.read_text(), flags=re.S).replace("__volatile__", "")
        assert around.search(code) is None, (f.name, around.search(code))


def test_every_ordered_access_has_a_label_of_the_tables() -> None:
    known = _labels()
    for a in ORDERED:
        assert a.labels, f"{a.where}: {a.order} without a label"
        unknown = set(a.labels) - known
        assert not unknown, f"{a.where}: {unknown} is in no table"


def test_no_label_is_used_twice() -> None:
    seen = [label for p in PAIRS for label in dict.fromkeys(p.labels)]
    assert len(seen) == len(set(seen))


def test_relaxed_accesses_carry_no_label() -> None:
    known = _labels()
    for a in ACCESSES:
        if a.order == "relaxed":
            assert not set(a.labels) & known, f"{a.where}: relaxed, and labelled {a.labels}"


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: p.labels[0])
def test_the_sides_of_a_pair_name_each_other(pair: source.Pair) -> None:
    words = pair.word.split(", ")
    sides = [
        [a for a in ORDERED if label in a.labels and a.function in functions]
        for label, functions in zip(pair.labels, pair.functions, strict=True)
    ]
    for side, functions, label in zip(sides, pair.functions, pair.labels, strict=True):
        assert functions
        assert {a.function for a in side} == set(functions), label
    if pair.full:
        for side in sides:
            assert all(a.order == "seqcst" for a in side)
            assert any(a.stores for a in side), pair.labels
            assert any(a.loads for a in side), pair.labels
    else:
        releasing, acquiring = sides
        for function in pair.functions[0]:
            mine = [a for a in releasing if a.function == function]
            assert any(a.stores and a.order in RELEASES for a in mine), function
        for function in pair.functions[1]:
            mine = [a for a in acquiring if a.function == function]
            assert any(a.loads and a.order in ACQUIRES for a in mine), function
    # and nothing else has the label
    for label in pair.labels:
        for a in ORDERED:
            if label in a.labels:
                assert a.function in pair.functions[0] + pair.functions[1], f"{a.where}: {label}"
                assert a.word in words, f"{a.where}: {label} is about {words}, not {a.word}"


def test_every_relaxed_access_says_why() -> None:
    # in a comment at hand, or in the file's table of relaxed words (the ring's for its header)
    for a in ACCESSES:
        if a.order != "relaxed" or "relaxed" in a.comment.lower():
            continue
        table = dict(RELAXED.get(a.file, {}))
        for header in ("fipc_ring.h", a.file.replace("_io.c", ".c"), a.file.replace(".c", ".h")):
            table |= RELAXED.get(header, {})
        assert a.word in table, f"{a.where}: {a.word} is relaxed, and nothing says why"


def test_the_tables_of_relaxed_words_have_no_dead_entry() -> None:
    used = {a.word for a in ACCESSES if a.order == "relaxed"}
    for file, table in RELAXED.items():
        assert table
        for word, reason in table.items():
            assert word in used, f"{file}: {word}"
            assert reason, f"{file}: {word} without a reason"
