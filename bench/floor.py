"""The machine's floor: floor.c as a program, and a bare ping-pong that pickles.

`Floor` builds floor.c into a temporary folder and runs it. `Bare` takes part in the runner's
round-trip cases like a rival: two processes, two mailboxes in shared memory, each side spinning in
C without giving anything up; what is sent is pickled, copied in, and unpickled where it lies. No
Python channel with the same objects can be quicker.

    python bench/floor.py [--ms N] [--json]
"""

import argparse
import ctypes
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench import objects, peers
from bench.cases import BARE
from bench.rivals import End, Rival, Setup

SOURCE = Path(__file__).with_name("floor.c")
LINE = 64  # bytes before a mailbox's payload, as in floor.c
_PROGRAM_LIMIT_S = 60
# A lost peer ends the wait; the runner's own limits are shorter.
_AWAIT_LIMIT_S = 120.0


class Floor:
    """floor.c, built. A context manager: what was built goes when it ends."""

    def __init__(self):
        self.folder = None

    def __enter__(self):
        self.folder = tempfile.mkdtemp(prefix="fastipc-floor-")
        try:
            compiler = os.environ.get("CC", "cc").split()
            common = [*compiler, "-std=c11", "-O2", "-pthread", str(SOURCE), "-o"]
            subprocess.run([*common, self.program], check=True)
            subprocess.run([*common, self.library, "-shared", "-fPIC"], check=True)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def program(self):
        return os.path.join(self.folder, "floor")

    @property
    def library(self):
        return os.path.join(self.folder, "floor.so")

    def measure(self, ms=100, only=None):
        """What floor.c prints, as a dict."""
        command = [self.program, "--ms", str(ms)]
        if only is not None:
            command += ["--only", only]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_PROGRAM_LIMIT_S
        )
        return json.loads(done.stdout)


class Bare(Rival):
    """The bare pickling ping-pong."""

    name = BARE
    library = None  # set by the runner, once floor.c is built

    @classmethod
    def missing(cls):
        return None if cls.library else "floor.c is not built"

    def __init__(self, setup, context):
        super().__init__(setup, context)
        if setup.readers != 1 or setup.arrays:
            raise ValueError("the bare ping-pong has one reader and no arrays")
        # An anonymous mapping that started processes inherit; one line more, to align it.
        size = LINE + setup.largest + LINE
        self._boxes = [context.RawArray(ctypes.c_char, size) for _ in range(2)]

    def shares(self):
        share = (type(self).library, self._boxes)
        return share, [share]

    def sweep(self):
        # Not earlier: multiprocessing would give the same shared memory to the next one who asks.
        self._boxes = None
        super().sweep()

    @classmethod
    def open_writer(cls, share, setup):
        library, (there, back) = share
        return _mailbox_end(library, outgoing=there, incoming=back)

    @classmethod
    def open_reader(cls, share, setup, rank, offer):
        library, (there, back) = share
        return _mailbox_end(library, outgoing=back, incoming=there)


def _aligned(array):
    """The first cache line within the mapping: the same one in every process, because mappings
    begin at a page."""
    return -(-ctypes.addressof(array) // LINE) * LINE


def _mailbox_end(library, outgoing, incoming):
    # PyDLL keeps the GIL: giving it up and taking it again is no part of the floor.
    calls = ctypes.PyDLL(library)
    publish, wait = calls.floor_publish, calls.floor_await
    publish.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64]
    publish.restype = None
    wait.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_double]
    wait.restype = ctypes.c_int64
    out, into = _aligned(outgoing), _aligned(incoming)
    begin = into - ctypes.addressof(incoming) + LINE
    payload = memoryview(incoming).cast("B")[begin:]
    dumps, loads = pickle.dumps, pickle.loads
    sent = received = 0

    def send(obj):
        nonlocal sent
        sent += 1
        data = dumps(obj, 5)
        publish(out, data, len(data), sent)

    def recv():
        nonlocal received
        received += 1
        length = wait(into, received, _AWAIT_LIMIT_S)
        if length < 0:
            raise TimeoutError("the other side of the bare ping-pong is gone")
        return loads(payload[:length])

    return End(send, recv)


def bare_ping_pong(payload_name, seconds=1.0):
    """The bare ping-pong by itself: the writer's figures of one round."""
    from bench.teams import Team

    with_replies = Setup(replies=True)
    team = Team.of_rival(Bare, with_replies, payload_name)
    try:
        first = team.round("echo", "ping", 60, {"count": 200})[0]
        count = max(200, int(200 * seconds / first["seconds"]))
        return team.round("echo", "ping", 60 + 10 * seconds, {"count": count})[0]
    finally:
        team.close()


def main():
    parser = argparse.ArgumentParser(description="The floor that benchmarks are compared with.")
    parser.add_argument("--ms", type=int, default=200, help="milliseconds for each figure")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with Floor() as floor:
        Bare.library = floor.library
        result = floor.measure(options.ms)
        for name in ("small", "scheduler_output"):
            seconds = options.ms / 1e3
            costs = peers.pickle_alone(None, objects.make(name), seconds)
            trip = bare_ping_pong(name, seconds)
            result[name] = {
                "pickled_bytes": len(pickle.dumps(objects.make(name), 5)),
                "dumps_us": round(costs["dumps_ns"] / 1e3, 3),
                "loads_us": round(costs["loads_ns"] / 1e3, 3),
                "bare_round_trip_us": round(trip["p50_ns"] / 1e3, 3),
                "bare_round_trip_p99_us": round(trip["p99_ns"] / 1e3, 3),
            }
    if options.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        if isinstance(value, dict):
            print(f"{key}:")
            for inner, figure in value.items():
                print(f"  {inner:24} {figure:>10}")
        else:
            print(f"{key:26} {value:>10}")


if __name__ == "__main__":
    main()
