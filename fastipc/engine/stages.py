"""Where a request's time goes, stage by stage.

=============== =====================================================================
api_queue       the client was called -> the request was sent
request_channel sent -> decoded by the engine's input thread (ROUTER, DEALER, codec)
engine_queue    decoded -> handed to the core, between two steps
scheduler_queue handed to the core -> the step began that made its first output
step            that step
output_queue    the step ended -> encoded, and taken up by the output thread
output_channel  taken up -> decoded by the client (PUSH, PULL, codec)
client          decoded -> the consumer has it
first_output    the client was called -> the first output was decoded
total           the client was called -> the last output was decoded
=============== =====================================================================

The stages up to output_channel are of a request's first output. Those that
compare clocks of two processes are left out when the engine is on another host.
"""

from __future__ import annotations

import numpy as np

from ..histogram import Histogram

STAGES = (
    "api_queue",
    "request_channel",
    "engine_queue",
    "scheduler_queue",
    "step",
    "output_queue",
    "output_channel",
    "client",
    "first_output",
    "total",
)


# The stage between each stamp of a request's first output and the next.
_BETWEEN = STAGES[:7]
_OF_ONE_CLOCK = {"request_channel", "output_channel"}
# Requests that are sorted in together, as a histogram does it with durations, and for that reason.
_AT_ONCE = 512


class Stages:
    """A histogram for each stage. For one thread at a time, but for ``delivered``."""

    def __init__(self) -> None:
        self._histograms = {name: Histogram() for name in STAGES}
        self._rows: dict[bool, list[tuple[int, ...]]] = {False: [], True: []}
        self.delivered = self._histograms["client"].record
        self.finished = self._histograms["total"].record

    def first(
        self,
        same_clock: bool,
        created: int,
        sent: int,
        stamps: tuple[int, int, int, int, int],
        taken_up: int,
        decoded: int,
    ) -> None:
        """Account for a request's first output. All times in nanoseconds."""
        _, received, scheduled, began, ended = stamps
        rows = self._rows[same_clock]
        rows.append((created, sent, received, scheduled, began, ended, taken_up, decoded))
        if len(rows) >= _AT_ONCE:
            self._sort_in()

    def _sort_in(self) -> None:
        for same_clock, rows in self._rows.items():
            if not rows:
                continue
            times = np.array(rows, np.int64)
            rows.clear()
            for name, took in zip(_BETWEEN, np.diff(times).T, strict=True):
                if same_clock or name not in _OF_ONE_CLOCK:
                    self._histograms[name].record_all(took)
            self._histograms["first_output"].record_all(times[:, -1] - times[:, 0])

    @property
    def histograms(self) -> dict[str, Histogram]:
        """By stage, up to date."""
        self._sort_in()
        return self._histograms
