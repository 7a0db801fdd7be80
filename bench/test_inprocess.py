"""What fastipc costs within one process: no wake-ups, no second processor, no noise from either.

    python -m pytest bench/test_inprocess.py

Writer and reader are in this process, and each timed call moves a batch of messages that fits the
ring. `enqueue` and `dequeue` are timed apart (the other half runs untimed between the rounds),
`there_and_back` together. The other groups take that apart: `dumps` and `loads` are plain pickling,
`serialize` is fastipc's own (into pieces, arrays left where they are), `pieces` the framing of
messages that are a number of buffers, `ring` the slots and chunks without serializer or framing,
`copy` moving the bytes once. For `enqueue` and `dequeue` the extra info has `us_per_message`.
"""

import pickle

import numpy as np
import pytest

from bench import objects
from fastipc import Empty, MessageQueue, ShmRingBuffer
from fastipc.pickling import PickleSerializer

# A batch amortises the clock, and fits the ring's 256 slots, or its 10 chunks.
SMALL_BATCH = 64
LARGE_BATCH = 2
ROUNDS = 30

BYTES = {f"bytes-{size}": size for size in objects.SIZES}
ARRAYS = {f"array-{size}": size for size in objects.SIZES}


def _size_name(name):
    kind, size = name.split("-")
    for unit, bytes_in_unit in (("MiB", objects.MIB), ("KiB", 1024)):
        if int(size) >= bytes_in_unit:
            return f"{kind}-{int(size) // bytes_in_unit}{unit}"
    return f"{kind}-{size}B"


def _make(name):
    kind, size = name.split("-")
    if kind == "bytes":
        return bytes(int(size))
    return np.ones(int(size) // 4, dtype=np.float32)


def _batch(name):
    return SMALL_BATCH if int(name.split("-")[1]) <= 8192 else LARGE_BATCH


PAYLOADS = {
    **{_size_name(n): (lambda n=n: _make(n), _batch(n)) for n in (*BYTES, *ARRAYS)},
    "scheduler_output": (objects.scheduler_output, SMALL_BATCH),
}


@pytest.fixture(params=list(PAYLOADS))
def load(request):
    """A payload and how many of it make a batch."""
    make, batch = PAYLOADS[request.param]
    return make(), batch


@pytest.fixture
def queues():
    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    writer.wait_until_ready(10)
    reader.wait_until_ready(10)
    yield writer, reader
    reader.close()
    writer.close()


def _per_message(benchmark, batch):
    benchmark.extra_info["batch"] = batch
    # Absent where timing is disabled.
    if benchmark.stats is not None:
        benchmark.extra_info["us_per_message"] = benchmark.stats.stats.median / batch * 1e6


@pytest.mark.benchmark(group="enqueue")
def test_enqueue(benchmark, queues, load):
    writer, reader = queues
    payload, batch = load
    waiting = 0

    def drain():
        nonlocal waiting
        for _ in range(waiting):
            reader.dequeue(timeout=10)
        waiting = batch

    def enqueue():
        for _ in range(batch):
            writer.enqueue(payload)

    benchmark.pedantic(enqueue, setup=drain, rounds=ROUNDS, warmup_rounds=2)
    drain()
    _per_message(benchmark, batch)


@pytest.mark.benchmark(group="dequeue")
def test_dequeue(benchmark, queues, load):
    writer, reader = queues
    payload, batch = load

    def fill():
        for _ in range(batch):
            writer.enqueue(payload, timeout=10)

    def dequeue():
        for _ in range(batch):
            reader.dequeue()

    benchmark.pedantic(dequeue, setup=fill, rounds=ROUNDS, warmup_rounds=2)
    _per_message(benchmark, batch)


@pytest.mark.benchmark(group="there and back")
def test_there_and_back(benchmark, queues, load):
    """One message at a time, so that it is in the cache when it is read."""
    writer, reader = queues
    payload, _ = load

    def there_and_back():
        writer.enqueue(payload)
        return reader.dequeue()

    received = benchmark(there_and_back)
    assert type(received) is type(payload)
    _per_message(benchmark, 1)


@pytest.mark.benchmark(group="poll")
def test_poll_of_an_empty_queue(benchmark, queues):
    _, reader = queues

    def poll():
        try:
            reader.dequeue(timeout=0)
        except Empty:
            return True

    assert benchmark(poll)


@pytest.mark.benchmark(group="pieces")
@pytest.mark.parametrize("count", [0, 1, 4, 16, 64, 256])
def test_pieces(benchmark, queues, count):
    """A message of so many 64-byte arrays, one buffer each: what a further buffer costs."""
    writer, reader = queues
    payload = [np.zeros(64, np.uint8) for _ in range(count)]

    def there_and_back():
        writer.enqueue(payload)
        return reader.dequeue()

    assert len(benchmark(there_and_back)) == count


@pytest.mark.benchmark(group="ring")
@pytest.mark.parametrize("size", [size for size in objects.SIZES if size <= 8 * objects.MIB])
def test_ring(benchmark, size):
    """Bytes written in place and read in place: two context managers and the ring, nothing else."""
    writer = ShmRingBuffer(1, 8 * objects.MIB, 4)
    reader = ShmRingBuffer.create_from_handle(writer.export_handle(), 0)
    writer.wait_until_ready(10)
    reader.wait_until_ready(10)

    def there_and_back():
        with writer.acquire_write(size):
            pass
        with reader.acquire_read() as view:
            return len(view)

    assert benchmark(there_and_back) == size
    reader.close()
    writer.close()


@pytest.mark.benchmark(group="serialize")
def test_serialize(benchmark, load):
    payload, _ = load
    benchmark(PickleSerializer().dump, payload)


@pytest.mark.benchmark(group="dumps")
def test_dumps(benchmark, load):
    payload, _ = load
    benchmark(lambda: pickle.dumps(payload, 5, buffer_callback=[].append))


@pytest.mark.benchmark(group="loads")
def test_loads(benchmark, load):
    payload, _ = load
    buffers = []
    data = pickle.dumps(payload, 5, buffer_callback=buffers.append)
    benchmark(lambda: pickle.loads(data, buffers=buffers))


@pytest.mark.benchmark(group="copy")
@pytest.mark.parametrize("size", objects.SIZES)
def test_copy(benchmark, size):
    """One copy between warm buffers: an array of that size costs two of them, there and back."""
    into, data = np.zeros(size, np.uint8), np.ones(size, np.uint8)
    benchmark(np.copyto, into, data)
