"""Counts of durations by size: what a mean would hide, in a fixed amount of memory.

Buckets are the halves of the powers of two of nanoseconds: a percentile is so at most half too
large, which is less than what two runs differ by. (The log-linear layout of HDR histograms, with
one sub-bucket bit.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

_AT_ONCE = 512
"""Durations that are sorted in together: it then takes 0.1 ms."""

_BUCKETS = 128
"""Two for each power of two up to 2**63 ns, which is 292 years."""


def _upper(index: int) -> int:
    """The largest number of nanoseconds that belongs into a bucket."""
    power, half = divmod(index, 2)
    if power == 0:
        return index
    return (1 << power) + ((half + 1) << (power - 1)) - 1


class Histogram:
    """How often which duration came up.

    Durations go in as whole nanoseconds and come out as seconds. Negative ones, which clocks of
    two hosts give, count as 0. Several threads may record at once; what one of them records while
    another reads may be lost, and nothing worse.
    """

    __slots__ = ("_count", "_counts", "_max", "_min", "_new", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._new: list[int] = []
        self._count = 0
        self._sum = 0
        self._min = 0
        self._max = 0

    def record(self, ns: int) -> None:
        """Count one duration of ``ns`` nanoseconds."""
        new = self._new
        new.append(ns)
        if len(new) >= _AT_ONCE:
            self._sort_in()

    def _sort_in(self) -> None:
        """Count what was recorded since the last time: together that costs a fifth."""
        new, self._new = self._new, []
        if new:
            self._add(np.array(new, np.int64))

    def record_all(self, ns: npt.NDArray[np.int64]) -> None:
        """Count each of an array of durations in nanoseconds (int64, one dimension)."""
        if ns.size:
            self._add(ns)

    def _add(self, values: npt.NDArray[np.int64]) -> None:
        values = np.maximum(values, 0)
        # value = fraction * 2**exponent, with a fraction of 0.5 to 1
        fraction, exponent = np.frexp(values.astype(np.float64))
        index = 2 * (exponent.astype(np.int64) - 1) + (fraction >= 0.75)
        index = np.where(values <= 1, values, index)
        found = np.bincount(index, minlength=_BUCKETS).tolist()
        self._counts = [before + more for before, more in zip(self._counts, found, strict=True)]
        least, most = int(values.min()), int(values.max())
        self._min = min(self._min, least) if self._count else least
        self._max = max(self._max, most)
        self._count += values.size
        self._sum += int(values.sum())

    @property
    def count(self) -> int:
        """How many were recorded."""
        return self._count + len(self._new)

    @property
    def sum_ns(self) -> int:
        """Of all, in nanoseconds."""
        self._sort_in()
        return self._sum

    @property
    def min_ns(self) -> int:
        """The shortest in nanoseconds, 0 if there was none."""
        self._sort_in()
        return self._min

    @property
    def max_ns(self) -> int:
        """The longest in nanoseconds, 0 if there was none."""
        self._sort_in()
        return self._max

    def percentile(self, percent: float) -> float:
        """The duration in seconds that ``percent`` (0 to 100) of all don't exceed; 0.0 if none."""
        if not 0 <= percent <= 100:
            raise ValueError(f"percent={percent!r}: it is between 0 and 100")
        if not self.count:
            return 0.0
        wanted = self.count * percent / 100
        self._sort_in()
        seen = 0
        for index, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return min(max(_upper(index), self.min_ns), self.max_ns) * 1e-9
        return self.max_ns * 1e-9

    @property
    def mean(self) -> float:
        """The mean in seconds; 0.0 if there was none."""
        return self.sum_ns * 1e-9 / self.count if self.count else 0.0

    def buckets(self) -> Iterator[tuple[float, int]]:
        """Upper bounds in seconds, with how many durations don't exceed them; no empty buckets."""
        self._sort_in()
        seen = 0
        for index, count in enumerate(self._counts):
            seen += count
            if count:
                yield _upper(index) * 1e-9, seen

    def merge(self, other: Histogram) -> None:
        """Add what another one counted, in another thread or process."""
        self._sort_in()
        other._sort_in()
        if other._count:
            self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
            self._min = min(self._min, other._min) if self._count else other._min
            self._max = max(self._max, other._max)
            self._count += other._count
            self._sum += other._sum

    def summary(self) -> dict[str, float]:
        """``count``, then seconds: ``mean``, ``min``, ``p50`` to ``p99.9``, ``max``."""
        return {
            "count": self.count,
            "mean": self.mean,
            "min": self.min_ns * 1e-9,
            **{f"p{percent:g}": self.percentile(percent) for percent in (50, 90, 99, 99.9)},
            "max": self.max_ns * 1e-9,
        }

    def to_builtins(self) -> dict[str, Any]:
        """What ``from_builtins`` makes a histogram of again, on the other side of a channel."""
        self._sort_in()
        counts = {index: count for index, count in enumerate(self._counts) if count}
        return {"counts": counts, "sum": self._sum, "min": self._min, "max": self._max}

    @classmethod
    def from_builtins(cls, value: Mapping[str, Any]) -> Histogram:
        """The histogram that ``to_builtins`` described."""
        made = cls()
        for index, count in value["counts"].items():
            made._counts[int(index)] = count
        made._count = sum(made._counts)
        made._sum, made._min, made._max = value["sum"], value["min"], value["max"]
        return made

    @classmethod
    def merged(cls, others: Iterable[Histogram]) -> Histogram:
        """One histogram of what several counted."""
        total = cls()
        for other in others:
            total.merge(other)
        return total
