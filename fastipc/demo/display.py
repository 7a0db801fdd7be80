"""What the demo shows: progress on a terminal while it runs, and a table at the end."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

from fastipc.demo.corpus import CHUNK_BYTES, SMALL_BYTES
from fastipc.demo.driver import Result, Watcher

# Ten a second look alive, and cost nothing beside the work.
DRAW_SECONDS = 0.1
# A log file should not fill up with progress.
LINE_SECONDS = 10.0
BAR_WIDTH = 24


class Progress(Watcher):
    """A bar on a terminal; elsewhere a line at the start and then one every LINE_SECONDS."""

    def __init__(self, stream: TextIO, seconds: float) -> None:
        self._stream = stream
        self._seconds = seconds
        self._on_terminal = stream.isatty()
        self._drawn = False
        self._next = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def started(self, pids: list[int | None]) -> None:
        workers = ", ".join(f"worker {rank} is pid {pid}" for rank, pid in enumerate(pids))
        self._line(f"fastipc demo: {workers}")
        self._next = time.monotonic() + (0 if self._on_terminal else LINE_SECONDS)

    def moved(self, elapsed: float, messages: int, nbytes: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        done = min(1.0, elapsed / self._seconds)
        text = f"{done:4.0%}  {messages:,} messages  {nbytes / 1e9:.2f} GB"
        if not self._on_terminal:
            self._next = now + LINE_SECONDS
            self._line(f"fastipc demo: {text.strip()}")
            return
        self._next = now + DRAW_SECONDS
        bar = "#" * round(BAR_WIDTH * done)
        text = f"[{bar:.<{BAR_WIDTH}}] {text}"[: shutil.get_terminal_size().columns - 1]
        self._stream.write(f"\r{text}\x1b[K")
        self._stream.flush()
        self._drawn = True

    def _line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


def table(result: Result) -> str:
    """The result as a small table."""
    figures = result.as_dict()
    corpus = result.corpus
    lines = [
        f"verified: {figures['digests']:,} SHA-256 digests of {result.messages:,} messages, "
        f"from {result.workers} worker{'s' if result.workers > 1 else ''}",
        f"work:     {corpus.files} files, {corpus.bytes_read / 1e6:.1f} MB, cut into "
        f"{len(corpus.pieces)} pieces, {corpus.larger_than_chunk} of them larger than a chunk "
        f"({CHUNK_BYTES >> 20} MiB)",
        "",
        f"round trip, one message of up to {SMALL_BYTES >> 10} KiB at a time, hashing included",
        f"  p50               {figures['round_trip_us']['p50']:12,.1f} us",
        f"  p99               {figures['round_trip_us']['p99']:12,.1f} us",
        "stream, pieces of all sizes, hashing included",
        f"  messages/s        {figures['messages_per_second']:12,.0f}",
        f"  GB/s              {figures['gb_per_second']:12.3f}    to each worker",
        "",
        f"{'process':<12}{'pid':>10}{'CPU s':>10}{'% of a core':>14}",
    ]
    for use in figures["processes"]:
        lines.append(
            f"{use['name']:<12}{use['pid']:>10}{use['cpu_seconds']:>10.2f}"
            f"{use['cpu_percent']:>14.0f}"
        )
    return "\n".join(lines)
