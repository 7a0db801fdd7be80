"""What csrc/ says about memory order: every access to an atomic word, and the tables of pairs.

An access is a call of one of fipc_atomic.h's functions, whose name ends in the order. Behind it, on
the same line, a comment names the pairs that it belongs to. A table of pairs is a comment that
begins with the word "Pairs"; an entry of it is

    LABEL  word: access order in function, function -> LABEL access order in function
    LABEL  word: access order in function <-> access order in function       (store buffering)

The second label may be left out: then both sides carry the first. "->" leads from releases to
acquires; on either side of "<->" everything is sequentially consistent. A table of relaxed words
is a comment that begins with "Relaxed", and has "word, word  reason" in each entry.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"

CALL = re.compile(
    r"\bfipc_(load|store|or|add|swap|cas)(32|64)_(relaxed|acquire|release|acqrel|seqcst)\("
)
LABEL = r"[A-Z][0-9]?(?:-[a-z]+)?"
FUNCTION = re.compile(r"^[A-Za-z_][\w\s*]*?\b(\w+)\(")


@dataclass(frozen=True)
class Access:
    file: str
    line: int  # from 1
    start: int  # of the call, in the file's text
    function: str
    operation: str
    bits: int
    order: str
    word: str
    labels: tuple[str, ...]
    comment: str  # on the line and above it

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line} {self.function}"

    @property
    def stores(self) -> bool:
        return self.operation != "load"

    @property
    def loads(self) -> bool:
        return self.operation != "store"


def _first_argument(text: str, at: int) -> str:
    depth = 0
    for i in range(at, len(text)):
        c = text[i]
        if c in "([":
            depth += 1
        elif c in ")]":
            if depth == 0:
                return text[at:i]
            depth -= 1
        elif c == "," and depth == 0:
            return text[at:i]
    raise ValueError("a call without an end")


def _word(argument: str) -> str:
    """The name of the field or variable: &r->cursors[i].seq is seq."""
    without_index = re.sub(r"\[[^\]]*\]", "", argument)
    names = re.findall(r"\w+", without_index.split("(")[0])
    return names[-1]


def _comments(text: str) -> str:
    return " ".join(re.findall(r"/\*(.*?)(?:\*/|$)", text, re.S))


def accesses(file: Path) -> list[Access]:
    text = file.read_text()
    lines = text.split("\n")
    found = []
    function = ""
    at = 0
    for number, line in enumerate(lines, 1):
        begins = FUNCTION.match(line)
        if begins and not line.rstrip().endswith(";"):
            function = begins.group(1)
        code = re.sub(r"/\*.*?(\*/|$)", lambda m: " " * len(m.group()), line)
        for call in CALL.finditer(code):
            comment = _comments(line)
            head = re.match(rf"\s*({LABEL}(?:, {LABEL})*)\b", comment)
            above = "\n".join(lines[max(0, number - 6) : number])
            found.append(
                Access(
                    file=file.name,
                    line=number,
                    start=at + call.start(),
                    function=function,
                    operation=call.group(1),
                    bits=int(call.group(2)),
                    order=call.group(3),
                    word=_word(_first_argument(text, at + call.end())),
                    labels=tuple(head.group(1).split(", ")) if head else (),
                    comment=_comments(above),
                )
            )
        at += len(line) + 1
    return found


def all_accesses(csrc: Path = CSRC) -> list[Access]:
    return [a for f in sorted(csrc.glob("*.c")) for a in accesses(f)]


@dataclass
class Pair:
    file: str
    word: str
    full: bool  # store buffering
    labels: tuple[str, str]  # of its sides
    functions: tuple[list[str], list[str]]
    text: str = field(repr=False)


def _entries(text: str, title: str) -> list[str]:
    """The entries of the tables with this title: lines that begin at the first entry's column."""
    found = []
    for block in re.findall(rf"^ \* {title}\b[^\n]*\n(.*?)(?:^ \*/|^ \*$|\*/)", text, re.S | re.M):
        entry = ""
        for line in block.split("\n"):
            body = line[2:] if line.startswith(" *") else line
            if re.match(r"   \S", body):
                found.append(entry)
                entry = body.strip()
            elif body.strip():
                entry += " " + body.strip()
        found.append(entry)
    return [e for e in found if e]


PAIR = re.compile(rf"({LABEL}) +([\w., ]+?): (.*?) (<->|->)(?: ({LABEL}))? (.*?)(?:\. |\.$)(.*)$")


def pairs(csrc: Path = CSRC) -> list[Pair]:
    found = []
    for file in sorted([*csrc.glob("*.c"), *csrc.glob("*.h")]):
        for entry in _entries(file.read_text(), "Pairs"):
            m = PAIR.match(entry)
            if m is None:
                raise ValueError(f"{file.name}: not an entry of a table of pairs: {entry!r}")
            label, word, left, arrow, other, right, text = m.groups()
            found.append(
                Pair(
                    file=file.name,
                    word=word,
                    full=arrow == "<->",
                    labels=(label, other or label),
                    functions=(
                        re.findall(r"\b\w*_?\w+\b", _after_in(left)),
                        re.findall(r"\b\w*_?\w+\b", _after_in(right)),
                    ),
                    text=text,
                )
            )
    return found


def _after_in(side: str) -> str:
    return side.split(" in ", 1)[1]


def relaxed_words(csrc: Path = CSRC) -> dict[str, dict[str, str]]:
    """For each file its words that are only ever accessed relaxed, with the reason."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted([*csrc.glob("*.c"), *csrc.glob("*.h")]):
        for entry in _entries(file.read_text(), "Relaxed"):
            words, _, reason = entry.partition(": ")
            for word in words.split(", "):
                found.setdefault(file.name, {})[word.strip()] = reason
    return found
