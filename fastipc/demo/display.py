"""What the demo shows: progress on a terminal while it runs, and tables at the end."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from typing import Any, TextIO

from fastipc.demo import model
from fastipc.demo.driver import Result, Watcher
from fastipc.demo.front_end import Report

# Ten a second look alive, and cost nothing beside the work.
DRAW_SECONDS = 0.1
# A log file should not fill up with progress.
LINE_SECONDS = 10.0
BAR_WIDTH = 24
# Of a sample, characters of the prompt's end and of what the model said.
SAMPLE_CHARACTERS = 60


class Progress(Watcher):
    """A bar on a terminal; elsewhere a line at the start and then one every LINE_SECONDS. Nothing
    where there is no stream, as sys.stderr is None in a process that was started without."""

    def __init__(self, stream: TextIO | None, seconds: float, requests: int | None) -> None:
        self._stream = stream
        self._seconds = seconds
        self._requests = requests
        self._on_terminal = stream is not None and stream.isatty()
        self._drawn = False
        self._next = 0.0
        self._start = 0.0

    def __enter__(self) -> Progress:
        if self._on_terminal:
            self._draw("starting engines and workers, which learn the model ...")
        return self

    def __exit__(self, *exc: object) -> None:
        self._clear()

    def started(self, topology: list[tuple[str, int]]) -> None:
        self._clear()
        who = ", ".join(f"{name} is pid {pid}" for name, pid in topology)
        self._line(f"fastipc demo: {who}")
        self._start = time.monotonic()
        self._next = self._start + (0 if self._on_terminal else LINE_SECONDS)

    def moved(self, report: Report) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        done = min(1.0, (now - self._start) / self._seconds)
        if self._requests is not None:
            done = max(done, min(1.0, report.requests / self._requests))
        text = f"{done:4.0%}  {report.requests:,} requests  {report.tokens:,} tokens"
        if not self._on_terminal:
            self._next = now + LINE_SECONDS
            self._line(f"fastipc demo: {text.strip()}")
            return
        self._next = now + DRAW_SECONDS
        bar = "#" * round(BAR_WIDTH * done)
        self._draw(f"[{bar:.<{BAR_WIDTH}}] {text}")

    def checking(self) -> None:
        if self._on_terminal:
            self._draw("checking every token against the model in one process ...")

    def _draw(self, text: str) -> None:
        assert self._stream is not None
        text = text[: shutil.get_terminal_size().columns - 1]
        self._stream.write(f"\r{text}\x1b[K")
        self._stream.flush()
        self._drawn = True

    def _clear(self) -> None:
        if self._drawn:
            assert self._stream is not None
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._drawn = False

    def _line(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text + "\n")
            self._stream.flush()


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds, and of how many."""
    ordered = sorted(seconds)
    if not ordered:
        return {"p50": 0.0, "p99": 0.0, "count": 0}

    def at(share: float) -> float:
        return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {"p50": at(0.50), "p99": at(0.99), "count": len(ordered)}


def figures(result: Result) -> dict[str, Any]:
    """The result in plain values, as --json prints it. Times in ms where a name says so."""
    options, reports = result.options, result.reports
    sending = max(report.ended for report in reports) - min(report.began for report in reports)
    totals = {
        name: sum(getattr(report, name) for report in reports)
        for name in ("requests", "images", "image_bytes", "tokens")
    }
    return {
        "verified": True,
        **options._asdict(),
        "requests": totals["requests"],
        "tokens": totals["tokens"],
        "seconds": sending,
        "requests_per_second": totals["requests"] / sending,
        "tokens_per_second": totals["tokens"] / sending,
        "first_token_ms": percentiles([s for report in reports for s in report.first]),
        "next_token_ms": percentiles([s for report in reports for s in report.next]),
        "channels": {
            "requests": {
                "requests": totals["requests"],
                "with_image": totals["images"],
                "tensor_frames": sum(r.stats["tensor_frames"] for r in reports),
                "image_bytes": totals["image_bytes"],
            },
            "outputs": {
                "messages": sum(r.stats["output_messages"] for r in reports),
                "tokens": totals["tokens"],
            },
            "ring": {
                "steps": sum(counts["steps"] for counts in result.counts),
                "readers": options.workers,
                "rows": sum(counts["tokens"] for counts in result.counts),
            },
        },
        "stages_ms": {
            name: {key: 1e3 * stage[key] for key in ("p50", "p99")}
            for name, stage in reports[0].stats["stages"].items()
        },
        "model": {
            "digest": result.info[0]["digest"],
            "shard_bytes": result.info[0]["shard_bytes"],
        },
        "sample": {
            "prompt": model.detokenize(reports[0].sample[0]),
            "said": model.detokenize(reports[0].sample[1]),
        },
        "processes": [
            {**use._asdict(), "cpu_percent": 100 * use.cpu_seconds / result.seconds}
            for use in result.processes
        ],
    }


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def table(result: Result) -> str:
    """The result for a person."""
    told = figures(result)
    requests, outputs, ring = (told["channels"][name] for name in ("requests", "outputs", "ring"))
    options = result.options
    prompt, said = told["sample"]["prompt"], told["sample"]["said"]
    lines = [
        f"verified: {_count(told['tokens'], 'token')} of {_count(told['requests'], 'request')}, "
        "each as the same model says in one process",
        f"topology: {_count(options.clients, 'front end')}, {_count(options.engines, 'engine')}, "
        f"{_count(options.workers, 'worker')} each",
        "",
        f"channel 1, requests: {_count(requests['requests'], 'message')} ROUTER to DEALER; "
        f"{requests['with_image']:,} had an image, in {_count(requests['tensor_frames'], 'frame')} "
        f"of their own ({requests['image_bytes'] / 1e6:.1f} MB)",
        f"channel 2, outputs:  {_count(outputs['messages'], 'message')} PUSH to PULL with "
        f"{_count(outputs['tokens'], 'token')}",
        f"channel 3, the ring: {_count(ring['steps'], 'step')} to "
        f"{_count(ring['readers'], 'worker')} each, {ring['rows'] / max(1, ring['steps']):.1f} "
        "sequences a step, and their answers",
        "",
        f"sample:   {prompt[-SAMPLE_CHARACTERS:]!r}",
        f"     ->   {said[:SAMPLE_CHARACTERS]!r}",
        "",
        f"requests/s {told['requests_per_second']:14,.0f}",
        f"tokens/s   {told['tokens_per_second']:14,.0f}",
        "",
        f"{'milliseconds':<22}{'p50':>10}{'p99':>10}",
    ]
    rows = {"first token": told["first_token_ms"], "next token": told["next_token_ms"]}
    rows |= {f"  {name}": stage for name, stage in told["stages_ms"].items()}
    lines += [f"{name:<22}{row['p50']:>10.2f}{row['p99']:>10.2f}" for name, row in rows.items()]
    lines += ["", f"{'process':<22}{'pid':>10}{'CPU s':>10}{'% of a core':>14}"]
    lines += [
        f"{use['name']:<22}{use['pid']:>10}{use['cpu_seconds']:>10.2f}{use['cpu_percent']:>14.0f}"
        for use in told["processes"]
    ]
    return "\n".join(lines)
