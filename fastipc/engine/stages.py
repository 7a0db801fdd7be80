"""Where a request's time goes, stage by stage.

=============== =====================================================================
api_queue       the client was called -> the request was sent
request_channel sent -> decoded by the engine's input thread (ROUTER, DEALER, codec)
engine_queue    decoded -> handed to the core, between two steps
scheduler_queue handed to the core -> the step began that made its first output
step            that step
output_queue    the step ended -> the output thread took it up
output_channel  taken up -> decoded by the client (codec, PUSH, PULL)
client          decoded -> the consumer has it
first_output    the client was called -> the first output was decoded
total           the client was called -> the last output was decoded
=============== =====================================================================

The stages from request_channel to output_channel are of a request's first output. Those that
compare clocks of two processes are left out when the engine is on another host.
"""

from __future__ import annotations

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


class Stages:
    """A histogram for each stage."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram() for name in STAGES}
        self.record = {name: self.histograms[name].record for name in STAGES}

    def first(
        self,
        same_clock: bool,
        sent: int,
        stamps: tuple[int, int, int, int, int],
        taken_up: int,
        decoded: int,
    ) -> None:
        """Account for a request's first output. All times in nanoseconds."""
        record = self.record
        _, received, scheduled, began, ended = stamps
        record["engine_queue"](scheduled - received)
        record["scheduler_queue"](began - scheduled)
        record["step"](ended - began)
        record["output_queue"](taken_up - ended)
        if same_clock:
            record["request_channel"](received - sent)
            record["output_channel"](decoded - taken_up)
