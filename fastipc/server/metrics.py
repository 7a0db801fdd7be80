"""What /metrics says, for Prometheus; of all API servers together, whichever is asked.

A snapshot is what one API server knows, in plain values, so that it can travel.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fastipc.histogram import Histogram

__all__ = ["available", "snapshot", "text"]

# Buckets end at powers of two of nanoseconds, as the histograms' own do: 16 us to 69 s.
_BOUNDS_NS = [1 << power for power in range(14, 37)]


def available() -> bool:
    """Whether the extra is installed."""
    return importlib.util.find_spec("prometheus_client") is not None


def snapshot(client: Any, http_open: int) -> dict[str, Any]:
    """What this API server knows: of its `AsyncEngineClient`, and how many answers are under
    way."""
    stats = client.stats()
    histograms = client.histograms()
    return {
        "http_open": http_open,
        **{n: stats[n] for n in ("in_flight", "sent", "finished", "failed", "aborted", "outputs")},
        "stages": {name: h.to_builtins() for name, h in histograms["stages"].items()},
        "engines": {
            index: {
                "alive": engine["alive"],
                "in_flight": engine["in_flight"],
                "histograms": {
                    name: h.to_builtins() for name, h in histograms["engines"][index].items()
                },
            }
            for index, engine in stats["engines"].items()
        },
    }


def text(snapshots: Sequence[dict[str, Any]]) -> bytes:
    """In Prometheus's text format."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(snapshots))
    return generate_latest(registry)


class _Collector:
    def __init__(self, snapshots: Sequence[dict[str, Any]]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        snapshots = self._snapshots

        def total(name: str) -> int:
            return sum(one[name] for one in snapshots)

        yield GaugeMetricFamily(
            "fastipc_api_servers", "API servers that answered", value=len(snapshots)
        )
        yield GaugeMetricFamily(
            "fastipc_http_open", "Completions that are being answered", value=total("http_open")
        )
        yield GaugeMetricFamily(
            "fastipc_requests_in_flight", "Requests under way", value=total("in_flight")
        )
        requests = CounterMetricFamily(
            "fastipc_requests", "Requests that ended, and how", labels=["outcome"]
        )
        for outcome in ("finished", "failed", "aborted"):
            requests.add_metric([outcome], total(outcome))
        yield requests
        yield CounterMetricFamily("fastipc_requests_sent", "Requests sent", value=total("sent"))
        yield CounterMetricFamily("fastipc_outputs", "Outputs received", value=total("outputs"))

        stages = HistogramMetricFamily(
            "fastipc_stage_seconds", "Where the time of requests goes", labels=["stage"]
        )
        for name in snapshots[0]["stages"]:
            merged = _merged(one["stages"][name] for one in snapshots)
            stages.add_metric([name], _buckets(merged), merged.sum_ns * 1e-9)
        yield stages

        up = GaugeMetricFamily("fastipc_engine_up", "The engine is alive", labels=["engine"])
        load = GaugeMetricFamily(
            "fastipc_engine_in_flight", "Requests under way in an engine", labels=["engine"]
        )
        own = HistogramMetricFamily(
            "fastipc_engine_seconds", "Durations within an engine", labels=["engine", "stage"]
        )
        for index in sorted(snapshots[0]["engines"]):
            seen = [one["engines"][index] for one in snapshots if index in one["engines"]]
            up.add_metric([str(index)], int(all(engine["alive"] for engine in seen)))
            load.add_metric([str(index)], sum(engine["in_flight"] for engine in seen))
            # An engine reports to each API server; the newest report counts the most.
            reports = [engine["histograms"] for engine in seen]
            for name in sorted({name for report in reports for name in report}):
                histograms = [Histogram.from_builtins(r[name]) for r in reports if name in r]
                newest = max(histograms, key=lambda h: h.count)
                own.add_metric([str(index), name], _buckets(newest), newest.sum_ns * 1e-9)
        yield from (up, load, own)


def _merged(values: Iterable[dict[str, Any]]) -> Histogram:
    return Histogram.merged(Histogram.from_builtins(value) for value in values)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """(upper bound in seconds, how many don't exceed it), for the same bounds every time."""
    found = list(histogram.buckets())
    buckets = []
    seen, at = 0, 0
    for bound in _BOUNDS_NS:
        while at < len(found) and found[at][0] <= bound * 1e-9:
            seen = found[at][1]
            at += 1
        buckets.append((repr(bound * 1e-9), float(seen)))
    buckets.append(("+Inf", float(histogram.count)))
    return buckets
