"""The work: files, cut into pieces of mixed sizes, each with its SHA-256."""

from __future__ import annotations

import hashlib
import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastipc.demo.worker import Bytes

# Small enough that pieces larger than a chunk, which travel as fragments, cost little memory.
CHUNK_BYTES = 1 << 20
LARGEST_BYTES = 3 * CHUNK_BYTES
# A message up to this size counts as small; it fits into a slot.
SMALL_BYTES = 4 << 10
# The files are read once and kept: more than this shows nothing new.
READ_BYTES = 64 << 20
N_PIECES = 128


class NothingToRead(Exception):
    """The path has no file that could be read."""


class Piece(NamedTuple):
    data: Bytes
    digest: bytes


class Corpus(NamedTuple):
    path: Path
    files: int
    bytes_read: int
    pieces: list[Piece]

    @property
    def small(self) -> list[Piece]:
        return [piece for piece in self.pieces if piece.data.nbytes <= SMALL_BYTES]

    @property
    def larger_than_chunk(self) -> int:
        return sum(piece.data.nbytes > CHUNK_BYTES for piece in self.pieces)


def load(path: Path) -> Corpus:
    """Read what is under ``path`` (up to READ_BYTES, in the order of names) and cut it up.

    Raises NothingToRead.
    """
    if not path.exists():
        raise NothingToRead(f"no such file or directory: {path}")
    contents: list[bytes] = []
    room = READ_BYTES
    for file in _regular_files(path):
        if room == 0:
            break
        try:
            with file.open("rb") as stream:
                content = stream.read(room)
        except OSError:
            continue
        if content:
            contents.append(content)
            room -= len(content)
    if not contents:
        raise NothingToRead(f"no file with anything in it that can be read: {path}")
    return _cut(path, contents)


def _regular_files(path: Path) -> Iterator[Path]:
    """The files that a read cannot hang on: no FIFOs, devices or sockets."""
    for file in _walk(path) if path.is_dir() else [path]:
        try:
            if stat.S_ISREG(file.stat().st_mode):
                yield file
        except OSError:
            continue


def _walk(directory: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        yield from (Path(folder, name) for name in sorted(names))


def _cut(path: Path, contents: list[bytes]) -> Corpus:
    read = np.frombuffer(b"".join(contents), dtype=np.uint8)
    # Few small files still make pieces of every size: they are repeated.
    blob = np.resize(read, max(read.size, LARGEST_BYTES))
    # The same path gives the same pieces, so that two runs can be compared.
    random_number = random.Random(0)
    sizes = [1, SMALL_BYTES, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, LARGEST_BYTES]
    while len(sizes) < N_PIECES:
        sizes.append(int(LARGEST_BYTES ** random_number.random()))
    random_number.shuffle(sizes)
    pieces = []
    position = 0
    for size in sizes:
        if position + size > blob.size:
            position = 0
        data = blob[position : position + size]
        pieces.append(Piece(data, hashlib.sha256(data.data).digest()))
        position += size
    return Corpus(path, len(contents), read.size, pieces)
