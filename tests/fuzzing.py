"""What the Python fuzz targets share: inputs that are kept, mutations, and a watch for what nobody
asked for.

Each corpus is a file of corpus/, a list of cases, a case being a list of frames in hexadecimal. A
target replays its corpus, then mutates what is in it. What a run finds is printed in that form, to
be added to the file together with the repair.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

NASTY = bytes.fromhex("007f8090 91939fa0 c0c1c4c7 c9cacbcf d3d4d9dc dddedfff")
# Audit events that decoding has no business to raise.
FORBIDDEN = (
    "import",
    "exec",
    "compile",
    "open",
    "os.",
    "subprocess.",
    "socket.",
    "pickle.",
    "ctypes.dlopen",
    "shutil.",
)


def corpus(name: str) -> list[list[bytes]]:
    text = Path(__file__).with_name("corpus").joinpath(f"{name}.json").read_text()
    return [[bytes.fromhex(frame) for frame in case] for case in json.loads(text)]


def shown(case: list[bytes]) -> str:
    return json.dumps([bytes(frame).hex() for frame in case])


def mutate(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """The frames with a change or some."""
    frames = list(frames)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        if not frames:
            break
        i = rng.randrange(len(frames)) if rng.random() < 0.3 else 0
        f = bytearray(frames[i])
        at = rng.randrange(len(f) + 1)
        kind = rng.randrange(9)
        if kind == 0:
            f = f[:at]
        elif kind == 1:
            f[at:at] = bytes(rng.choices(NASTY, k=rng.randrange(1, 9)))
        elif kind == 2 and f:
            f[at % len(f)] = rng.choice(NASTY)
        elif kind == 3 and f:
            f[at % len(f)] ^= 1 << rng.randrange(8)
        elif kind == 4:
            del f[at : at + rng.randrange(1, 9)]
        elif kind == 5:
            f[at:at] = f[: rng.randrange(len(f) + 1)]
        elif kind == 6:
            j = rng.randrange(len(frames))
            frames[i], frames[j] = frames[j], frames[i]
            continue
        elif kind == 7:
            frames.insert(rng.randrange(len(frames) + 1), frames[i])
            continue
        elif len(frames) > 1:
            del frames[i]
            continue
        frames[i] = bytes(f)
    return frames


class Watch:
    """While it is on (a with-statement), forbidden audit events of this thread are noted."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self._on = False
        self._thread = threading.get_ident()
        sys.addaudithook(self._hook)  # for good: there is no way to remove one

    def _hook(self, event: str, args: Any) -> None:
        if self._on and event.startswith(FORBIDDEN) and threading.get_ident() == self._thread:
            self.events.append((event, str(args)[:200]))

    def __enter__(self) -> Watch:
        self._on = True
        return self

    def __exit__(self, *_: object) -> None:
        self._on = False


def check_growth(before: int, allowed: int) -> int:
    """How much the process's memory has grown since it was `before`. A sanitizer keeps what is
    freed, so on such a build it may be anything."""
    grown = resident_bytes() - before
    assert grown < allowed or "FASTIPC_SANITIZE" in os.environ, grown
    return grown


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
