"""The payloads that every benchmark sends.

`small()` is a 64-byte bytes object, `scheduler_output()` a tuple as a scheduler broadcasts it each
step (5.3 KB pickled), `array()` a float32 array. All are the same in every run.
"""

import random

import numpy as np

MIB = 1 << 20

# From one cache line to one message larger than the default chunk (24 MiB).
SIZES = [64, 1024, 4096, 16384, 65536, 262144, MIB, 4 * MIB, 8 * MIB, 32 * MIB]


def small():
    """64 bytes of bytes."""
    return bytes(range(64))


def scheduler_output(requests=32):
    """What a scheduler tells its workers in one step: new and running requests with ids, token ids,
    block ids, counts and sampling parameters."""
    rng = random.Random(2)
    running = []
    for i in range(requests):
        running.append(
            (
                f"cmpl-{rng.getrandbits(64):016x}-{i}",
                [rng.randrange(50_000) for _ in range(21)],
                [rng.randrange(4096) for _ in range(14)],
                rng.randrange(2048),
                round(rng.random(), 3),
                rng.random(),
                "length" if i % 8 == 0 else None,
            )
        )
    total = sum(len(request[1]) for request in running)
    return ("step", 1_234, total, running, {"max_tokens": 8192, "finished": ["cmpl-0", "cmpl-1"]})


def scheduler_columns(requests=32):
    """The same content as columns: an array for each field, lists end to end with their lengths
    beside them, strings in one string."""
    kind, number, total, running, rest = scheduler_output(requests)
    ids, tokens, blocks, computed, penalties, temperatures, reasons = zip(*running, strict=True)
    return (
        kind,
        number,
        total,
        "\n".join(ids),
        np.array([token for row in tokens for token in row], np.int32),
        np.array([len(row) for row in tokens], np.int32),
        np.array([block for row in blocks for block in row], np.int32),
        np.array([len(row) for row in blocks], np.int32),
        np.array(computed, np.int32),
        np.array(penalties),
        np.array(temperatures),
        "\n".join(reason or "" for reason in reasons),
        rest,
    )


def array(mebibytes, fill=1.0):
    """A float32 array of so many MiB, all elements `fill`."""
    return np.full(mebibytes * MIB // 4, fill, dtype=np.float32)


def array8m():
    return array(8)


def array32m():
    return array(32)


PAYLOADS = {
    "small": small,
    "scheduler_output": scheduler_output,
    "scheduler_columns": scheduler_columns,
    "array8m": array8m,
    "array32m": array32m,
}


def make(name):
    """The payload of that name; processes make their own, instead of receiving it when started."""
    return PAYLOADS[name]()
