"""A scheduling step of 32 requests (about 5 KB) there and back over two rings: pickled, as typed
structs, as typed columns; in turn, with what the codecs cost alone in the same rounds.

    python -m bench.typed [--rounds N] [--messages N]
"""

import argparse
import multiprocessing
import pickle
import random
import statistics
import sys
import time
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import msgspec
import numpy as np

import fastipc

REQUESTS = 32
WARM_UP = 50
TIMEOUT = 60.0


class Step(msgspec.Struct, array_like=True):
    request_id: str
    token_ids: list[int]
    blocks: list[int]
    temperature: float
    position: int


class Steps(msgspec.Struct, array_like=True):
    requests: list[Step]


class Columns(msgspec.Struct, array_like=True, omit_defaults=True):
    request_ids: str
    token_ids: np.ndarray
    token_counts: np.ndarray
    blocks: np.ndarray
    block_counts: np.ndarray
    temperature: np.ndarray
    position: np.ndarray


def payloads():
    """(rows, structs, columns): the same step three times."""
    draw = random.Random(1)
    rows = tuple(
        (
            f"request-{i:06d}",
            [draw.randrange(32000) for _ in range(20)],
            [draw.randrange(4000) for _ in range(16)],
            draw.random(),
            i,
        )
        for i in range(REQUESTS)
    )
    columns = Columns(
        "\n".join(row[0] for row in rows),
        np.array([t for row in rows for t in row[1]], np.int32),
        np.array([len(row[1]) for row in rows], np.int32),
        np.array([b for row in rows for b in row[2]], np.int32),
        np.array([len(row[2]) for row in rows], np.int32),
        np.array([row[3] for row in rows]),
        np.array([row[4] for row in rows], np.int32),
    )
    return rows, Steps([Step(*row) for row in rows]), columns


def echo(handle, pipe, options):
    """The other process: sends back what it gets until the writer closes."""
    with (
        fastipc.MessageQueue(1, 1, **options) as answers,
        fastipc.MessageQueue.create_from_handle(handle, 0, type=options.get("type")) as questions,
    ):
        pipe.send(answers.export_handle())
        for message in questions:
            answers.enqueue(message, timeout=TIMEOUT)


class Pair:
    """Two queues to a process that echoes."""

    def __init__(self, **options):
        context = multiprocessing.get_context("spawn")
        self.out = fastipc.MessageQueue(1, 1, **options)
        mine, theirs = context.Pipe()
        self.process = context.Process(
            target=echo, args=(self.out.export_handle(), theirs, options)
        )
        self.process.start()
        self.back = fastipc.MessageQueue.create_from_handle(
            mine.recv(), 0, type=options.get("type")
        )
        self.out.wait_until_ready(TIMEOUT)

    def round_trip(self, message, n):
        """Median microseconds there and back."""
        times = []
        for i in range(n + WARM_UP):
            start = time.perf_counter_ns()
            self.out.enqueue(message, timeout=TIMEOUT)
            self.back.dequeue(timeout=TIMEOUT)
            if i >= WARM_UP:
                times.append(time.perf_counter_ns() - start)
        return statistics.median(times) / 1e3

    def close(self):
        self.out.close()
        self.process.join()
        self.back.close()


def alone(encode, decode, message, n):
    """Microseconds to encode and decode once."""
    start = time.perf_counter()
    for _ in range(n):
        decode(encode(message))
    return (time.perf_counter() - start) / n * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=1000)
    arguments = parser.parse_args()
    rows, structs, columns = payloads()
    pairs = {
        "pickle": (Pair(), rows),
        "structs": (Pair(serializer="msgpack", type=Steps), structs),
        "columns": (Pair(serializer="msgpack", type=Columns), columns),
        "small": (Pair(serializer="msgpack", type=int), 1),
    }
    print(f"{len(pickle.dumps(rows, 5))} bytes pickled; medians of {arguments.messages}, us")
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Steps)
    bounds, shares = [], []
    try:
        for _ in range(arguments.rounds):
            n = arguments.messages
            us = {name: pair.round_trip(message, n) for name, (pair, message) in pairs.items()}
            codec = alone(encoder.encode, decoder.decode, structs, n)
            # there and back is two of each
            bounds.append(us["structs"] / (1.25 * 2 * codec + us["small"]))
            shares.append(us["columns"] / us["pickle"])
            figures = "  ".join(f"{name} {value:.1f}" for name, value in us.items())
            print(f"{figures}  msgspec alone, once {codec:.1f}")
    finally:
        for pair, _ in pairs.values():
            pair.close()
    print(
        f"structs: {statistics.median(bounds):.2f} of (1.25 x what msgspec takes alone + a small "
        f"round trip); target <= 1\ncolumns: {statistics.median(shares):.2f} of pickle; target <= "
        "0.25"
    )


if __name__ == "__main__":
    main()
