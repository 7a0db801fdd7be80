# ruff: noqa: E501  (the lines of csrc/ are quoted as they are)
"""Negative controls: the source made wrong in one place at a time, and which check notices.

    python -m tests.verify.mutants              the whole table
    python -m tests.verify.mutants --smoke      a selection, for every run of the tests
    python -m tests.verify.mutants fipc_ring    only those whose name has this in it

Every access in csrc/ whose order is stronger than relaxed is weakened, as found by source.py, so
that the table follows the source; and the steps of the state machine are swapped, by edits that
fail when what they replace is no longer there. Each mutant is built and handed to the explorer's
clients, those first that are about its file, until one fails. A mutant that all pass is either a
needless order or a missing check, and makes this program fail.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import source

HERE = Path(__file__).resolve().parent

WEAKER = {
    ("load", "acquire"): ["relaxed"],
    ("load", "seqcst"): ["acquire", "relaxed"],
    ("store", "release"): ["relaxed"],
    ("store", "seqcst"): ["release", "relaxed"],
    ("rmw", "acquire"): ["relaxed"],
    ("rmw", "release"): ["relaxed"],
    ("rmw", "acqrel"): ["acquire", "release"],
    ("rmw", "seqcst"): ["acqrel", "relaxed"],
}


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    where: str
    text: str  # of the whole file

    smoke: bool = False


@dataclass(frozen=True)
class Step:
    """Steps of the state machine in the wrong order, or left out."""

    name: str
    file: str
    replacements: tuple[tuple[str, str], ...]
    smoke: bool = False


STEPS = [
    Step(
        "publish before the record",
        "fipc_ring.c",
        (
            ("    fipc_store64_seqcst(&slot->written, r->next); /* W1, D */\n", ""),
            (
                "    slot->len = record->len;\n",
                "    fipc_store64_seqcst(&slot->written, r->next);\n    slot->len = record->len;\n",
            ),
        ),
        smoke=True,
    ),
    Step(
        "publish before the payload",
        "fipc_queue_io.c",
        (
            (
                "    fipc_gather_copy(g, fipc_ring_inline(fipc_ring_slot(&q->ring)), g->total);\n"
                "    publish(q, &record);\n",
                "    char *to = fipc_ring_inline(fipc_ring_slot(&q->ring));\n"
                "    publish(q, &record);\n"
                "    fipc_gather_copy(g, to, g->total);\n",
            ),
        ),
    ),
    Step(
        "look for sleepers before publishing",
        "fipc_ring.c",
        (
            (
                "    fipc_store64_seqcst(&slot->written, r->next); /* W1, D */\n",
                "    bool sleeper =\n"
                "        (fipc_load32_seqcst(&r->control->data_bell) & FIPC_BELL_SLEEPER) != 0;\n"
                "    fipc_store64_seqcst(&slot->written, r->next);\n",
            ),
            (
                "    return (fipc_load32_seqcst(&r->control->data_bell) & FIPC_BELL_SLEEPER) != 0;"
                " /* D */\n",
                "    return sleeper;\n",
            ),
        ),
        smoke=True,
    ),
    Step(
        "look for the writer before acknowledging",
        "fipc_ring.c",
        (
            (
                "    fipc_store64_seqcst(&mine->seq, seq); /* R1, M, T */\n",
                "    bool asleep =\n"
                "        (fipc_load32_seqcst(&r->control->room_bell) & FIPC_BELL_SLEEPER) != 0;\n"
                "    fipc_store64_seqcst(&mine->seq, seq); /* R1, M, T */\n",
            ),
            (
                "    if (!(fipc_load32_seqcst(&r->control->room_bell) & FIPC_BELL_SLEEPER)) {",
                "    if (!asleep) {",
            ),
        ),
    ),
    Step(
        "look for slower readers before acknowledging",
        "fipc_ring.c",
        (
            (
                "    fipc_store64_seqcst(&mine->seq, seq); /* R1, M, T */\n",
                "    uint64_t others[FIPC_MAX_READERS];\n"
                "    for (uint32_t i = 0; i < r->n_readers; i++) {\n"
                "        others[i] = i == r->reader ? seq : fipc_load64_seqcst(&r->cursors[i].seq);\n"
                "    }\n"
                "    fipc_store64_seqcst(&mine->seq, seq); /* R1, M, T */\n",
            ),
            (
                "        if (fipc_load64_seqcst(&r->cursors[i].seq) < target) {",
                "        if (others[i] < target) {",
            ),
        ),
    ),
    Step(
        "acknowledge before the copy",
        "fipc_queue_io.c",
        (
            (
                "    bool last = (record.flags & FIPC_SLOT_LAST) != 0;\n",
                "    bool last = (record.flags & FIPC_SLOT_LAST) != 0;\n"
                "    const char *early = payload(q, slot, &record);\n"
                "    acknowledge(q, last);\n",
            ),
            ("payload(q, slot, &record), record.len)", "early, record.len)"),
            (
                "        drop_partial(q);\n    }\n    acknowledge(q, last);\n    return rc;\n",
                "        drop_partial(q);\n    }\n    return rc;\n",
            ),
        ),
        smoke=True,
    ),
    Step(
        "announce after the look (the last look is before the bell)",
        "fipc_queue.c",
        (
            (
                "        uint32_t seen = poll ? 0 : fipc_bell_park(bell); /* D, M */\n"
                "        now = now_of(q);\n"
                "        if (ready(q, true)) {\n"
                "            return waited(q, call, now);\n"
                "        }\n",
                "        now = now_of(q);\n"
                "        if (ready(q, true)) {\n"
                "            return waited(q, call, now);\n"
                "        }\n",
            ),
            (
                "        if (ready(q, true)) { /* look() may have granted, evicted or noticed something */\n"
                "            return waited(q, call, now);\n"
                "        }\n",
                "        uint32_t seen = poll ? 0 : fipc_bell_park(bell);\n",
            ),
        ),
        smoke=True,
    ),
    Step(
        "a target that readers don't reach",
        "fipc_queue.c",
        (
            (
                "room_target, room_target(q));",
                "room_target, room_target(q) + q->ring.n_slots);",
            ),
        ),
    ),
    Step(
        "a bell that is rung without a change of its word",
        "fipc_ring.c",
        (("(seen + FIPC_BELL_STEP) & ~FIPC_BELL_SLEEPER)", "seen & ~FIPC_BELL_SLEEPER)"),),
    ),
    Step(
        "a bell whose word changes only after the wake-up",
        "fipc_queue.c",
        (
            ("    fipc_bell_ring(bell);\n    bump(&q->wakes);\n", "    bump(&q->wakes);\n"),
            (
                "        q->ops->wake(q->ops->ctx, bell);\n    }\n}\n",
                "        q->ops->wake(q->ops->ctx, bell);\n    }\n    fipc_bell_ring(bell);\n}\n",
            ),
        ),
    ),
    Step(
        "no wake-up of readers",
        "fipc_queue_io.c",
        (("    if (ring) {\n        fipc_queue_wake_readers(q);\n    }\n", "    (void)ring;\n"),),
        smoke=True,
    ),
    Step(
        "no wake-up of the writer",
        "fipc_queue_io.c",
        (("    if (ring) {\n        fipc_queue_wake_writer(q);\n    }\n", "    (void)ring;\n"),),
    ),
    Step(
        "a slot more than there is",
        "fipc_ring.c",
        (
            (
                "    return held < r->n_slots ? r->n_slots - held : 0;",
                "    return held < r->n_slots + 1 ? r->n_slots + 1 - held : 0;",
            ),
        ),
        smoke=True,
    ),
    Step(
        "a chunk that is free while it is read",
        "fipc_ring.c",
        (
            (
                "        if (r->chunk_until[c] <= r->slowest) {\n            n++;",
                "        if (r->chunk_until[c] <= r->slowest + 1) {\n            n++;",
            ),
        ),
    ),
    Step(
        "the fastest reader counts instead of the slowest",
        "fipc_ring.c",
        (
            (
                "    uint64_t least = FIPC_CURSOR_LEFT;\n"
                "    for (uint32_t i = 0; i < r->n_readers; i++) {\n"
                "        if (r->counted[i]) {\n"
                "            uint64_t c = fipc_load64_acquire(",
                "    uint64_t least = 0;\n"
                "    for (uint32_t i = 0; i < r->n_readers; i++) {\n"
                "        if (r->counted[i]) {\n"
                "            uint64_t c = fipc_load64_acquire(",
            ),
            (
                " /* R1 */\n            least = c < least ? c : least;",
                "\n            least = c > least ? c : least;",
            ),
        ),
    ),
    Step(
        "granted before the start is set",
        "fipc_queue.c",
        (
            ("    fipc_store32_release(&r->peers[i].granted, epoch); /* G */\n", ""),
            (
                "    if (!untouched) {\n",
                "    fipc_store32_release(&r->peers[i].granted, epoch);\n    if (!untouched) {\n",
            ),
        ),
    ),
    Step(
        "members changes before the state does (attach)",
        "fipc_queue.c",
        (
            (
                '    fipc_add32_release(&q->ring.control->members, 1); /* J */\n    fipc_point("attach-told");',
                '    fipc_point("attach-told");',
            ),
            (
                "        rc = fipc_peer_join(",
                "        fipc_add32_release(&q->ring.control->members, 1);\n        rc = fipc_peer_join(",
            ),
        ),
    ),
    Step(
        "JOINING before pid and epoch",
        "fipc_peer.c",
        (
            ("    fipc_store32_release(&p->state, FIPC_PEER_JOINING); /* P-state */\n", ""),
            (
                '    fipc_peer_describe(p, host);\n    fipc_point("attach-described");',
                "    fipc_store32_release(&p->state, FIPC_PEER_JOINING);\n"
                '    fipc_peer_describe(p, host);\n    fipc_point("attach-described");',
            ),
        ),
    ),
    Step(
        "dead without the second look at the state",
        "fipc_peer.c",
        (
            (
                "    return (after == FIPC_PEER_JOINING || after == FIPC_PEER_ACTIVE) &&\n",
                "    (void)after;\n    return\n",
            ),
        ),
    ),
    Step(
        "dead without asking the kernel",
        "fipc_peer.c",
        (
            (
                "    if (fipc_lock_byte_held(s->lock_fd, FIPC_READER_LOCK(reader))) {",
                "    (void)s;\n    (void)reader;\n    if (false) {",
            ),
        ),
    ),
    Step(
        "a reader's lock is given up before it says LEFT",
        "fipc_queue.c",
        (
            (
                "            /* The cursor first: the writer may stop waiting for this reader at once. */\n",
                "            fipc_mem_close(&q->seg);\n",
            ),
        ),
    ),
    Step(
        "the writer's lock is given up before it says CLOSED",
        "fipc_queue.c",
        (
            (
                "            fipc_store32_release(&r->control->writer_state, FIPC_WRITER_CLOSED);",
                "            fipc_mem_close(&q->seg);\n"
                "            fipc_store32_release(&r->control->writer_state, FIPC_WRITER_CLOSED);",
            ),
        ),
    ),
    Step(
        "closed, without a last look for messages",
        "fipc_queue.c",
        (("(drain && fipc_queue_reader_ready(q, true))", "(drain && false)"),),
    ),
    Step(
        "a dead reader is still counted",
        "fipc_queue.c",
        (
            ('    fipc_point("evict");\n    r->counted[i] = 0;\n', '    fipc_point("evict");\n'),
            ("    fipc_store64_relaxed(&r->cursors[i].seq, FIPC_CURSOR_LEFT);\n", ""),
        ),
    ),
    Step(
        "a dead reader's cursor stays where it is",
        "fipc_queue.c",
        (("    fipc_store64_relaxed(&r->cursors[i].seq, FIPC_CURSOR_LEFT);\n", ""),),
    ),
    Step(
        "a lock that is taken without asking",
        "fipc_wait.c",
        (
            (
                "    if (!fipc_cas32_acquire(&l->word, &seen, 1)) {",
                "    if (!fipc_cas32_acquire(&l->word, &seen, 1) && seen == 7) {",
            ),
        ),
    ),
    Step(
        "a lock that is dropped without a wake-up",
        "fipc_wait.c",
        (("        ops->wake(ops->ctx, &l->word);", "        (void)ops;"),),
    ),
    Step(
        "shutdown rings before it says stop",
        "fipc_queue.c",
        (
            ("    fipc_store32_relaxed(&q->stop, 1);\n", ""),
            (
                "    q->ops->wake(q->ops->ctx, &q->lock.word);\n}\n",
                "    q->ops->wake(q->ops->ctx, &q->lock.word);\n    fipc_store32_relaxed(&q->stop, 1);\n}\n",
            ),
        ),
    ),
]

# The clients that say most about a file, cheap ones first; all others follow.
FIRST = {
    "fipc_ring.c": ["ring-pass", "ring-park", "ring-park-2", "ring-pass-2", "ring-chunk-2"],
    "fipc_wait.c": ["share-writer", "shutdown", "shutdown-full", "share-reader"],
    "fipc_block.c": ["block"],
    "fipc_peer.c": ["look", "evict", "attach-2", "leave"],
    "fipc_queue.c": [
        "look",
        "shutdown",
        "leave",
        "leave-2",
        "evict",
        "replace",
        "evict-2",
        "attach-2",
    ],
    "fipc_queue_io.c": ["queue-pass"],
}
SMOKE_ORDERS = [
    "fipc_ring.c fipc_ring_publish: store written seqcst -> release",
    "fipc_ring.c fipc_ring_publish: load data_bell seqcst -> acquire",
    "fipc_ring.c fipc_ring_peek: load written acquire -> relaxed",
    "fipc_ring.c fipc_ring_scan: load seq acquire -> relaxed",
    "fipc_ring.c fipc_ring_ack: store seq seqcst -> release",
    "fipc_ring.c fipc_bell_park: or bell seqcst -> acqrel",
    "fipc_wait.c fipc_lock_drop: swap word release -> relaxed",
    "fipc_queue.c grant: store granted release -> relaxed",
]


def weakened(csrc: Path) -> list[Mutant]:
    found = []
    seen: dict[str, int] = {}
    for a in source.all_accesses(csrc):
        kind = a.operation if a.operation in ("load", "store") else "rmw"
        for order in WEAKER.get((kind, a.order), []):
            text = (csrc / a.file).read_text()
            old = f"fipc_{a.operation}{a.bits}_{a.order}"
            assert text.startswith(old, a.start), a
            new = f"fipc_{a.operation}{a.bits}_{order}"
            name = f"{a.file} {a.function}: {a.operation} {a.word} {a.order} -> {order}"
            seen[name] = seen.get(name, 0) + 1
            if seen[name] > 1:
                name += f" ({seen[name]})"
            found.append(
                Mutant(
                    name=name,
                    file=a.file,
                    where=f"{a.file}:{a.line} {', '.join(a.labels)}",
                    text=text[: a.start] + new + text[a.start + len(old) :],
                    smoke=name in SMOKE_ORDERS,
                )
            )
    missing = set(SMOKE_ORDERS) - {m.name for m in found}
    if missing:
        raise SystemExit(f"no longer in the source: {sorted(missing)}")
    return found


def swapped(csrc: Path) -> list[Mutant]:
    found = []
    for step in STEPS:
        text = (csrc / step.file).read_text()
        for old, new in step.replacements:
            if text.count(old) != 1:
                raise SystemExit(
                    f"{step.name}: {step.file} has {text.count(old)} of what is to be replaced:\n{old}"
                )
            text = text.replace(old, new)
        found.append(Mutant(f"step: {step.name}", step.file, step.file, text, step.smoke))
    return found


class Builder:
    """The explorer, built once; and for each mutant the one file that differs."""

    def __init__(self, csrc: Path, out: Path, cc: str) -> None:
        self.csrc, self.out, self.cc = csrc, out, cc
        subprocess.run(
            ["make", "-s", "-C", str(HERE), f"CC={cc}", f"CSRC={csrc}", f"BUILD={out}", "explore"],
            check=True,
        )

    def build(self, mutant: Mutant, where: Path) -> Path:
        shutil.copytree(self.csrc, where / "csrc")
        (where / "csrc" / mutant.file).write_text(mutant.text)
        # what is built from this file: its object, or that of the client that includes it
        name = "client_block" if mutant.file == "fipc_block.c" else mutant.file.removesuffix(".c")
        subprocess.run(
            [
                "make",
                "-s",
                "-C",
                str(HERE),
                f"CC={self.cc}",
                f"CSRC={where / 'csrc'}",
                f"BUILD={where}",
                f"{where}/explore/{name}.o",
            ],
            check=True,
        )
        objects = [
            where / "explore" / o.name if o.stem == name else o
            for o in sorted((self.out / "explore").glob("*.o"))
        ]
        program = where / "explore-mutant"
        subprocess.run([self.cc, "-o", str(program), *map(str, objects)], check=True)
        return program

    def clients(self) -> list[str]:
        out = subprocess.run(
            [str(self.out / "explore" / "explore"), "--list"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        return [line.split()[0] for line in out.splitlines()]


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    client: str  # "" when nothing failed
    executions: int
    why: str


def judge(builder: Builder, mutant: Mutant, scratch: Path, limits: list[str]) -> Verdict:
    where = Path(tempfile.mkdtemp(dir=scratch))
    try:
        program = builder.build(mutant, where)
        first = FIRST.get(mutant.file, [])
        order = first + [c for c in builder.clients() if c not in first]
        # Short searches first, since most mutants fail at once. And the exhaustive search goes deep
        # first: what it doesn't reach within the limit the random one may find.
        for how in (
            ["--most", "3000", "--random", "2000"],
            ["--random", "3000", "--all-random"],
            limits,
            [*limits, "--all-random"],
        ):
            run = subprocess.run(
                [str(program), *how, "--first", *order], capture_output=True, text=True
            )
            if run.returncode not in (0, 1):
                raise RuntimeError(f"{mutant.name}: the explorer ended with {run.returncode}")
            failed = re.search(
                r"^(\S+) +(?:exhaustive|random) +(\d+).*FAILED: (.*)$", run.stdout, re.M
            )
            if failed is not None:
                return Verdict(mutant, failed.group(1), int(failed.group(2)), failed.group(3))
        return Verdict(mutant, "", 0, "")
    finally:
        shutil.rmtree(where)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a selection")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--csrc", type=Path, default=source.CSRC)
    parser.add_argument("--cc", default="gcc")
    parser.add_argument("--most", type=int, default=200000, help="executions of a search")
    parser.add_argument("--random", type=int, default=40000, help="executions of a random search")
    parser.add_argument("names", nargs="*", help="only mutants that have one of these in the name")
    options = parser.parse_args()
    mutants = weakened(options.csrc) + swapped(options.csrc)
    if options.smoke:
        mutants = [m for m in mutants if m.smoke]
    if options.names:
        mutants = [m for m in mutants if any(n in m.name for n in options.names)]
    began = time.monotonic()
    missed = 0
    limits = ["--most", str(options.most), "--random", str(options.random)]
    with tempfile.TemporaryDirectory() as scratch:
        builder = Builder(options.csrc, Path(scratch) / "base", options.cc)
        print(f"{'mutant':80}  {'labels':26}  {'caught by':14} executions  how", flush=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            jobs = [pool.submit(judge, builder, m, Path(scratch), limits) for m in mutants]
            for job in jobs:
                v = job.result()
                missed += not v.client
                print(
                    f"{v.mutant.name:80}  {v.mutant.where:26}  {v.client or 'NOTHING':14} "
                    f"{v.executions:10}  {v.why}",
                    flush=True,
                )
    print(
        f"{len(mutants)} mutants, {len(mutants) - missed} caught, "
        f"{time.monotonic() - began:.0f} s with {options.jobs} at a time"
    )
    return missed != 0


if __name__ == "__main__":
    sys.exit(main())
