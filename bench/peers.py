"""What runs in the processes that the runner starts: a writer, its readers, or one process alone.

Each takes its commands from a control pipe, one job a round, and sleeps there in between, so that
the processes of a rival whose turn it is not use no processor. Messages on the control pipe are
pairs of a word and a value: "offer", "ready", "armed" (a reader is about to receive), "done",
"failed".
"""

import ctypes
import itertools
import os
import pickle
import signal
import sys
import time
import traceback

from . import objects

SIZE_OF_STAMP = 8
_FILLER = bytes(56)  # a stamped message is 64 bytes, like objects.small()


def quantile(ordered, q):
    """The value at q (0 to 1) of a sorted list."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


# -- jobs of the writer --------------------------------------------------------------------------


def ping(end, payload, count):
    """Round trips, each timed from the last one's end."""
    send, recv, clock = end.send, end.recv, time.perf_counter_ns
    stamps = [0] * (count + 1)
    cpu = time.process_time_ns()
    stamps[0] = clock()
    for i in range(1, count + 1):
        send(payload)
        recv()
        stamps[i] = clock()
    cpu = time.process_time_ns() - cpu
    took = sorted(b - a for a, b in itertools.pairwise(stamps))
    return {
        "begin": None,
        "seconds": (stamps[-1] - stamps[0]) / 1e9,
        "p50_ns": quantile(took, 0.5),
        "p99_ns": quantile(took, 0.99),
        "cpu_ns": cpu,
    }


def stream(end, payload, count):
    """The same object `count` times, as quickly as the channel takes it."""
    send = end.send
    cpu = time.process_time_ns()
    begin = time.monotonic_ns()
    for _ in range(count):
        send(payload)
    return {"begin": begin, "cpu_ns": time.process_time_ns() - cpu}


def paced(end, payload, count, period):
    """A stamped message every `period` seconds, the first after one period."""
    send, clock = end.send, time.monotonic_ns
    at = time.monotonic()
    cpu = time.process_time_ns()
    for _ in range(count):
        at += period
        pause = at - time.monotonic()
        if pause > 0:
            time.sleep(pause)
        send(clock().to_bytes(SIZE_OF_STAMP, "little") + _FILLER)
    return {"begin": None, "cpu_ns": time.process_time_ns() - cpu}


def distinct_arrays(end, payload, count):
    """Arrays that differ, for `keep_arrays` to tell apart."""
    for i in range(count):
        # A new array each time: what is sent without a copy must not change under way.
        end.send(objects.array(payload.nbytes // objects.MIB, fill=float(i)))
    return {}


# -- jobs of a reader ----------------------------------------------------------------------------


def echo(end, payload, count):
    """Sends back what it receives: unpickled and pickled again."""
    send, recv = end.send, end.recv
    cpu = time.process_time_ns()
    for _ in range(count):
        send(recv())
    return {"cpu_ns": time.process_time_ns() - cpu}


def receive(end, payload, count):
    recv = end.recv
    cpu = time.process_time_ns()
    for _ in range(count):
        recv()
    return {"end": time.monotonic_ns(), "cpu_ns": time.process_time_ns() - cpu}


def receive_arrays(end, payload, count):
    """Like `receive`; the array before is alive until the next has come, as in a real consumer."""
    recv = end.recv
    cpu = time.process_time_ns()
    array = None
    for _ in range(count):
        array = recv()
        array[0] = 0.0  # raises where it is not writable
    finish = time.monotonic_ns()
    cpu = time.process_time_ns() - cpu
    if array.shape != payload.shape or array[-1] != payload[-1]:
        raise ValueError("a received array differs from the one sent")
    return {"end": finish, "cpu_ns": cpu}


def receive_stamped(end, payload, count):
    """How old each message was on arrival, and what waiting for it cost."""
    recv, clock = end.recv, time.monotonic_ns
    ages = []
    begin = clock()
    cpu = time.process_time_ns()
    for _ in range(count):
        message = recv()
        ages.append(clock() - int.from_bytes(message[:SIZE_OF_STAMP], "little"))
    cpu = time.process_time_ns() - cpu
    return {"end": clock(), "ages_ns": ages, "cpu_ns": cpu, "seconds": (clock() - begin) / 1e9}


def keep_arrays(end, payload, count):
    """Untimed: keeps every array, overwrites its end, and compares the rest when all have come.
    A view of memory that the channel uses again fails here."""
    kept = []
    for _ in range(count):
        array = end.recv()
        array[-1] = -1.0
        kept.append(array)
    for i, array in enumerate(kept):
        if array[-1] != -1.0 or not (array[:-1] == float(i)).all():
            raise ValueError(f"kept array {i} was overwritten by a later message")
    return {}


# -- jobs of one process alone -------------------------------------------------------------------


def pickle_alone(end, payload, seconds):
    """What dumps and loads of the payload cost when nothing is sent."""
    data = pickle.dumps(payload, 5)
    return {
        "dumps_ns": _cost(lambda: pickle.dumps(payload, 5), seconds / 2),
        "loads_ns": _cost(lambda: pickle.loads(data), seconds / 2),
    }


def _cost(call, seconds):
    """The median over short batches: a batch that was interrupted does not count."""
    clock = time.perf_counter_ns
    batches = []
    until = clock() + int(seconds * 1e9)
    while clock() < until or not batches:
        begin = clock()
        for _ in _BATCH:
            call()
        batches.append((clock() - begin) / len(_BATCH))
    batches.sort()
    return quantile(batches, 0.5)


_BATCH = range(50)


JOBS = {
    job.__name__: job
    for job in (
        ping,
        stream,
        paced,
        distinct_arrays,
        echo,
        receive,
        receive_arrays,
        receive_stamped,
        keep_arrays,
        pickle_alone,
    )
}
READER_JOBS = {"echo", "receive", "receive_arrays", "receive_stamped", "keep_arrays"}


# -- the processes -------------------------------------------------------------------------------


def _settle(parent):
    """The runner answers for Ctrl-C and ends its processes; if it is killed, they end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _serve(control, end, payload_name):
    payload = objects.make(payload_name)
    control.send(("ready", None))
    while True:
        command = control.recv()
        if command is None:
            break
        name, arguments = command
        if name in READER_JOBS:
            control.send(("armed", None))
        control.send(("done", JOBS[name](end, payload, **arguments)))


def main(control, parent, role, *arguments):
    """A started process: a failure is reported to the runner, not printed."""
    _settle(parent)
    try:
        ROLES[role](control, *arguments)
    except EOFError:
        return  # the runner has dropped this process
    except BaseException:
        try:
            control.send(("failed", traceback.format_exc()))
        except OSError:
            pass
        sys.exit(1)


def _writer(control, rival, share, setup, payload_name):
    end = rival.open_writer(share, setup)
    # Pickled here: the runner passes it on without knowing what it is.
    control.send(("offer", pickle.dumps(end.offer)))
    end.join([pickle.loads(offer) for offer in control.recv()])
    _serve(control, end, payload_name)
    end.close()


def _reader(control, rival, share, setup, payload_name, rank):
    end = rival.open_reader(share, setup, rank, pickle.loads(control.recv()))
    control.send(("offer", pickle.dumps(end.offer)))
    end.join(None)
    _serve(control, end, payload_name)
    end.close()


def _alone(control, payload_name):
    _serve(control, None, payload_name)


ROLES = {"writer": _writer, "reader": _reader, "alone": _alone}
