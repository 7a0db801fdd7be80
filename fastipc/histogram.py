"""Counts of durations by size: what a mean would hide, in a fixed amount of memory.

Buckets are the halves of the powers of two of nanoseconds: a percentile is so at most half too
large, which is less than what two runs differ by. (The log-linear layout of HDR histograms, with
one sub-bucket bit.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

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

    Durations go in as whole nanoseconds and come out as seconds. Not for several threads at once
    without a lock of theirs: a count might be lost, nothing worse. Negative durations, which
    clocks of two hosts give, count as 0.
    """

    __slots__ = ("_counts", "count", "max_ns", "min_ns", "sum_ns")

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self.count = 0
        self.sum_ns = 0
        self.min_ns = 0
        self.max_ns = 0

    def record(self, ns: int) -> None:
        """Count one duration of ``ns`` nanoseconds."""
        if ns <= 1:
            index = ns = 1 if ns == 1 else 0
        else:
            power = ns.bit_length() - 1
            index = 2 * power + (ns >> (power - 1) & 1)
        self._counts[index] += 1
        if not self.count or ns < self.min_ns:
            self.min_ns = ns
        if ns > self.max_ns:
            self.max_ns = ns
        self.count += 1
        self.sum_ns += ns

    def percentile(self, percent: float) -> float:
        """The duration in seconds that ``percent`` (0 to 100) of all don't exceed; 0.0 if none."""
        if not 0 <= percent <= 100:
            raise ValueError(f"percent={percent!r}: it is between 0 and 100")
        if not self.count:
            return 0.0
        wanted = self.count * percent / 100
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
        seen = 0
        for index, count in enumerate(self._counts):
            seen += count
            if count:
                yield _upper(index) * 1e-9, seen

    def merge(self, other: Histogram) -> None:
        """Add what another one counted, in another thread or process."""
        if other.count:
            for index, count in enumerate(other._counts):
                self._counts[index] += count
            self.min_ns = min(self.min_ns, other.min_ns) if self.count else other.min_ns
            self.max_ns = max(self.max_ns, other.max_ns)
            self.count += other.count
            self.sum_ns += other.sum_ns

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
        counts = {index: count for index, count in enumerate(self._counts) if count}
        return {"counts": counts, "sum": self.sum_ns, "min": self.min_ns, "max": self.max_ns}

    @classmethod
    def from_builtins(cls, value: Mapping[str, Any]) -> Histogram:
        """The histogram that ``to_builtins`` described."""
        made = cls()
        for index, count in value["counts"].items():
            made._counts[int(index)] = count
        made.count = sum(made._counts)
        made.sum_ns, made.min_ns, made.max_ns = value["sum"], value["min"], value["max"]
        return made

    @classmethod
    def merged(cls, others: Iterable[Histogram]) -> Histogram:
        """One histogram of what several counted."""
        total = cls()
        for other in others:
            total.merge(other)
        return total
