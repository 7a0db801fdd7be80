"""The demo's language model: real, small, and exact whatever it is sharded over.

Interpolated n-grams over ASCII characters (Witten-Bell), trained when a worker starts, on text
files that are there. Its weights are one row of log-probabilities per context seen in training, one
column per token; an image adds a bias to every column. Tensor parallelism splits the columns: each
worker holds those of its part of the vocabulary and proposes its best token, and the best of the
proposals is the model's token.

All that decides between tokens is integer arithmetic on a token's own column, so that the result
is the same, bit for bit, over any number of shards and in any batch: a run over many processes can
be checked against one process, token by token.

    text --train--> Weights --shard(rank, of)--> Shard --propose(batch)--> scores, tokens --best-->
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Job",
    "NothingToRead",
    "Rows",
    "Shard",
    "Weights",
    "best",
    "check_image",
    "context_of",
    "detokenize",
    "generate",
    "read",
    "tokenize",
    "train",
]

Ints: TypeAlias = NDArray[np.int64]

# ASCII: every text has tokens, and no tokenizer is needed.
VOCABULARY = 128
INDENTATION = "    "
# Tokens of context: enough for names and keywords to come out whole.
ORDER = 5
# A context that was seen once only says what one place of the text says.
SEEN_LEAST = 2
# Training on so much takes a quarter of a second; more makes the samples little better.
READ_BYTES = 160 << 10
SUFFIXES = frozenset({".c", ".h", ".md", ".pxd", ".py", ".pyi", ".pyx", ".rst", ".txt"})

# Fixed point: log-probabilities (natural) and noise in units of 2^-10, probabilities of 2^-15.
LOG_ONE = 1 << 10
TEMPERATURE_ONE = 1 << 8
# log(2^-15) is a score of -10,647; no score of a known token is lower, whatever the image adds.
_PROBABILITY_ONE = 1 << 15
UNKNOWN = np.iinfo(np.int16).min
# The score of what is never proposed: far below any other.
NEVER = -(1 << 40)

# An image is seen as the mean of GRID x GRID fields in each of its CHANNELS.
GRID = 4
CHANNELS = 3
# Biases of up to some +-2 in log-probability: they bend the text without breaking it.
_IMAGE_SHIFT = 2


class NothingToRead(Exception):
    """The path has no text to learn from."""


class Weights(NamedTuple):
    """A trained model.

    Attributes:
        keys: uint64 (contexts,), sorted: the hash of each context of 0 to ORDER tokens.
        scores: int16 (contexts, tokens): log-probabilities in units of 1 / LOG_ONE; UNKNOWN for a
            token that the text has nowhere.
        image: int64 (CHANNELS * GRID * GRID, tokens): what a field's brightness adds, before
            _IMAGE_SHIFT.
        first: the token of column 0: a shard has the columns of some of the vocabulary only.
    """

    keys: NDArray[np.uint64]
    scores: NDArray[np.int16]
    image: Ints
    first: int

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.scores.nbytes + self.image.nbytes

    def digest(self) -> str:
        """Tells two trainings apart: 16 hexadecimal digits."""
        digest = hashlib.sha256(self.keys.tobytes())
        digest.update(self.scores.tobytes())
        digest.update(self.image.tobytes())
        return digest.hexdigest()[:16]


# -- text ----------------------------------------------------------------------------------------


def read(path: Path) -> bytes:
    """The text files under ``path``, in the order of names, up to READ_BYTES; as tokens.

    Raises NothingToRead.
    """
    if not path.exists():
        raise NothingToRead(f"no such file or directory: {path}")
    contents: list[bytes] = []
    room = READ_BYTES
    for file in _files(path):
        if room == 0:
            break
        try:
            with file.open("rb") as stream:
                content = stream.read(room)
        except OSError:
            continue
        contents.append(content)
        room -= len(content)
    text = tokenize(b"".join(contents).decode("utf-8", "replace"))
    if len(text) <= ORDER:
        raise NothingToRead(f"no text to learn from (more than {ORDER} bytes are needed): {path}")
    return text


def _files(path: Path) -> Iterator[Path]:
    """Regular files only: a read of anything else may hang."""
    if not path.is_dir():
        found = [path]
    else:
        found = []
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
            found += (Path(folder, n) for n in sorted(names) if Path(n).suffix in SUFFIXES)
    for file in found:
        try:
            if file.is_file():
                yield file
        except OSError:
            continue


def tokenize(text: str) -> bytes:
    """One token a character; an indentation is one, and what is not ASCII a question mark."""
    return text.replace(INDENTATION, "\t").encode("ascii", "replace")


def detokenize(tokens: bytes) -> str:
    """The text of tokens; of any part of them, the part of the text."""
    return tokens.decode("ascii").replace("\t", INDENTATION)


# -- training ------------------------------------------------------------------------------------

_MIX = np.uint64(0x9E3779B97F4A7C15)


def _extend(keys: NDArray[np.uint64], tokens: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The hashes of contexts that reach one token further back; the empty one's is 0."""
    mixed = (keys ^ (tokens + np.uint64(1))) * _MIX
    return mixed ^ (mixed >> np.uint64(29))


def train(text: bytes, seed: int = 0) -> Weights:
    """Learns from ``text``; the same text and seed give the same weights, bit for bit.

    Witten-Bell: a context seen n times before d different tokens trusts its own counts with
    n / (n + d), and the context that is one token shorter with the rest.
    """
    if not text or max(text) >= VOCABULARY:
        raise ValueError("the text must be tokens, made by tokenize(), and at least one")
    tokens = np.frombuffer(text, np.uint8).astype(np.uint64)
    counts = np.bincount(tokens.astype(np.int64), minlength=VOCABULARY).astype(np.float64)
    keys = [np.zeros(1, np.uint64)]
    probabilities = [(counts / counts.sum())[np.newaxis]]
    # The places whose context of this order is known; the context; and its row.
    places = np.arange(tokens.size)
    context = np.zeros(tokens.size, np.uint64)
    row = np.zeros(tokens.size, np.int64)
    for order in range(1, ORDER + 1):
        # A context seen once only is not kept, and so nor is any longer one that ends with it.
        within = places >= order
        places, row = places[within], row[within]
        context = _extend(context[within], tokens[places - order])
        found, index, seen = np.unique(context, return_inverse=True, return_counts=True)
        kept = seen >= SEEN_LEAST
        if not kept.any():
            break
        again = kept[index]
        index = (np.cumsum(kept) - 1)[index[again]]
        places, context, row = places[again], context[again], row[again]
        found = found[kept]
        shorter = np.zeros(found.size, np.int64)
        shorter[index] = row
        following = tokens[places].astype(np.int64)
        pairs = np.bincount(index * VOCABULARY + following, minlength=found.size * VOCABULARY)
        table = pairs.reshape(found.size, VOCABULARY).astype(np.float64)
        different = (table > 0).sum(axis=1, keepdims=True)
        table += different * probabilities[-1][shorter]
        table /= seen[kept][:, np.newaxis] + different
        keys.append(found)
        probabilities.append(table)
        row = index
    all_keys = np.concatenate(keys)
    in_order = np.argsort(all_keys, kind="stable")
    fixed = (np.concatenate(probabilities) * _PROBABILITY_ONE).astype(np.int32)
    scores = _LOGS[fixed[in_order]]
    scores[:, counts == 0] = UNKNOWN
    generator = np.random.default_rng(seed)
    image = generator.integers(-8, 9, (CHANNELS * GRID * GRID, VOCABULARY), np.int64)
    return Weights(all_keys[in_order], scores, image, 0)


def _log_table() -> NDArray[np.int16]:
    # One table, made in one go in every process: element by element, a vectorised logarithm may
    # round differently from one position of an array to another.
    steps = np.arange(_PROBABILITY_ONE + 1, dtype=np.float64)
    steps[0] = 1  # rarer than the unit counts as one unit
    logs: NDArray[np.int16] = np.rint(np.log(steps / _PROBABILITY_ONE) * LOG_ONE).astype(np.int16)
    return logs


_LOGS = _log_table()


# -- sampling ------------------------------------------------------------------------------------

_NOISE_BITS = 12


def _noise_table() -> Ints:
    """Gumbel noise: the token with the best log-probability plus noise is a sample."""
    steps = (np.arange(1 << _NOISE_BITS) + 0.5) / (1 << _NOISE_BITS)
    noise: Ints = np.rint(-np.log(-np.log(steps)) * LOG_ONE).astype(np.int64)
    return noise


_NOISE = _noise_table()


class Rows(NamedTuple):
    """A batch: for each sequence what a worker needs in order to propose its next token.

    Attributes:
        contexts: uint8 (n, ORDER): the last tokens, the newest last; tokens before the prompt's
            first are 0.
        positions: int64 (n,): how many tokens the sequence has; with the seed, what makes the
            noise of this step.
        seeds: int64 (n,).
        temperatures: int64 (n,), in units of 1 / TEMPERATURE_ONE; 0 is greedy.
    """

    contexts: NDArray[np.uint8]
    positions: Ints
    seeds: Ints
    temperatures: Ints


class Shard:
    """The columns of one worker out of ``of``, and all that is done with them."""

    def __init__(self, weights: Weights, rank: int, of: int) -> None:
        if not 0 <= rank < of <= VOCABULARY:
            raise ValueError(f"there is no shard {rank} of {of} (at most {VOCABULARY})")
        first, last = rank * VOCABULARY // of, (rank + 1) * VOCABULARY // of
        # Copies: what is not this shard's is let go of.
        self.weights = Weights(
            weights.keys,
            np.ascontiguousarray(weights.scores[:, first:last]),
            np.ascontiguousarray(weights.image[:, first:last]),
            first,
        )
        self._tokens = np.arange(first, last, dtype=np.uint64)
        self._never = self.weights.scores[0] == UNKNOWN

    def see(self, image: NDArray[np.uint8]) -> Ints:
        """The bias, int64 (tokens of this shard,), of an image: uint8 (CHANNELS, height, width)."""
        return (_features(image) @ self.weights.image) >> _IMAGE_SHIFT

    def propose(self, rows: Rows, biases: Sequence[Ints | None]) -> tuple[Ints, Ints]:
        """For each row the best score and its token, both int64 (n,); the lowest token of several.

        ``biases`` has what :meth:`see` returned, or None, for each row; or nothing at all.
        """
        scores = self.weights.scores[self._find(rows.contexts)].astype(np.int64)
        for row, bias in enumerate(biases):
            if bias is not None:
                scores[row] += bias
        scores += self._noise(rows)
        scores[:, self._never] = NEVER
        at = scores.argmax(axis=1)
        return scores[np.arange(at.size), at], at + self.weights.first

    def _find(self, contexts: NDArray[np.uint8]) -> Ints:
        """The row of the longest known context of each."""
        keys = self.weights.keys
        wide = contexts.astype(np.uint64)
        hashes = np.zeros(wide.shape[0], np.uint64)
        found = np.searchsorted(keys, hashes)
        for back in range(1, ORDER + 1):
            hashes = _extend(hashes, wide[:, -back])
            at = np.minimum(np.searchsorted(keys, hashes), keys.size - 1)
            found = np.where(keys[at] == hashes, at, found)
        return found

    def _noise(self, rows: Rows) -> Ints:
        """Made of the request's seed, the position and the token alone, not of batch or shard."""
        row = rows.seeds.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)
        row ^= rows.positions.astype(np.uint64) * np.uint64(0x8CB92BA72F3D8DD7)
        mixed = row[:, np.newaxis] ^ (self._tokens * _MIX)
        mixed ^= mixed >> np.uint64(30)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(27)
        mixed *= np.uint64(0x94D049BB133111EB)
        noise = _NOISE[mixed >> np.uint64(64 - _NOISE_BITS)]
        scaled: Ints = noise * rows.temperatures[:, np.newaxis] // TEMPERATURE_ONE
        return scaled


def best(proposals: Iterable[tuple[Ints, Ints]]) -> Ints:
    """Each row's token, out of what the shards propose; the lowest token of several."""
    scores, tokens = (np.stack(part) for part in zip(*proposals, strict=True))
    # Shards come in the order of their tokens, and argmax takes the first of equals.
    chosen = scores.argmax(axis=0)
    result: Ints = tokens[chosen, np.arange(chosen.size)]
    return result


class Job(NamedTuple):
    """A sequence to generate.

    Attributes:
        prompt: tokens.
        max_tokens: how many to say.
        seed: of the noise.
        temperature: in units of 1 / TEMPERATURE_ONE; 0 is greedy.
        image: uint8 (CHANNELS, height, width), or None.
    """

    prompt: bytes
    max_tokens: int
    seed: int = 0
    temperature: int = TEMPERATURE_ONE
    image: NDArray[np.uint8] | None = None


# As many sequences at once as keep numpy busy with more than its own overhead.
_TOGETHER = 64


def generate(shard: Shard, jobs: Sequence[Job]) -> list[bytes]:
    """What the model says to each, by one process that holds all columns."""
    said = [bytearray() for _ in jobs]
    for first in range(0, len(jobs), _TOGETHER):
        _generate(shard, jobs[first : first + _TOGETHER], said[first : first + _TOGETHER])
    return [bytes(tokens) for tokens in said]


def _generate(shard: Shard, jobs: Sequence[Job], said: Sequence[bytearray]) -> None:
    biases = [None if job.image is None else shard.see(job.image) for job in jobs]
    going = list(range(len(jobs)))
    while going := [i for i in going if len(said[i]) < jobs[i].max_tokens]:
        rows = Rows(
            np.stack([context_of(jobs[i].prompt[-ORDER:] + said[i]) for i in going]),
            np.array([len(jobs[i].prompt) + len(said[i]) for i in going]),
            np.array([jobs[i].seed for i in going]),
            np.array([jobs[i].temperature for i in going]),
        )
        for i, token in zip(
            going, best([shard.propose(rows, [biases[i] for i in going])]), strict=True
        ):
            said[i].append(token)


def context_of(prompt: bytes | bytearray) -> NDArray[np.uint8]:
    """The last ORDER tokens of a prompt, uint8 (ORDER,)."""
    context = np.zeros(ORDER, np.uint8)
    tail = prompt[-ORDER:]
    if tail:
        context[-len(tail) :] = np.frombuffer(tail, np.uint8)
    return context


def check_image(image: NDArray[Any]) -> None:
    """Raises ValueError that says what an image is."""
    if (
        image.dtype != np.uint8
        or image.ndim != 3
        or image.shape[0] != CHANNELS
        or min(image.shape[1:]) < GRID
    ):
        raise ValueError(
            f"an image is uint8 ({CHANNELS}, height, width) of at least {GRID} x {GRID}, not "
            f"{image.dtype} {image.shape}"
        )


def _features(image: NDArray[Any]) -> Ints:
    """The mean brightness of each field, centred, int64 (CHANNELS * GRID * GRID,)."""
    check_image(image)
    _, height, width = image.shape
    rows = np.arange(GRID) * height // GRID
    columns = np.arange(GRID) * width // GRID
    sums = np.add.reduceat(image.astype(np.int64), rows, axis=1)
    sums = np.add.reduceat(sums, columns, axis=2)
    heights = np.diff(rows, append=height)
    widths = np.diff(columns, append=width)
    means: Ints = sums // (heights[:, np.newaxis] * widths)
    return means.reshape(-1) - 128
