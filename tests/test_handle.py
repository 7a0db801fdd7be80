"""Handle: a small immutable value that travels by any means and says when it doesn't fit."""

from __future__ import annotations

import base64
import copy
import pickle

import msgspec
import pytest
import workers
from support import Team

from fastipc import Handle, HandleMismatch, IPCError, MessageQueue, ShmRingBuffer
from fastipc.hostinfo import boot_id, host_name


@pytest.fixture
def writer():
    with MessageQueue(3, 3, local_reader_ranks=[2, 0, 9], max_chunk_bytes=4096) as queue:
        yield queue


def _changed(handle: Handle, **changes) -> Handle:
    return Handle(**{**{f: getattr(handle, f) for f in handle.__struct_fields__}, **changes})


TRIPS = {
    **{f"pickle {p}": (lambda h, p=p: pickle.loads(pickle.dumps(h, p))) for p in range(6)},
    "text": lambda h: Handle.from_str(h.to_str()),
    "msgpack": lambda h: msgspec.msgpack.decode(msgspec.msgpack.encode(h), type=Handle),
    "json": lambda h: msgspec.json.decode(msgspec.json.encode(h), type=Handle),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "builtins": lambda h: msgspec.convert(msgspec.to_builtins(h), Handle),
}


@pytest.mark.parametrize("trip", TRIPS)
def test_it_travels(trip, writer):
    handle = writer.export_handle()
    got = TRIPS[trip](handle)
    assert type(got) is Handle
    assert got == handle
    with MessageQueue.create_from_handle(got, 9) as reader:
        writer.enqueue(trip)
        assert reader.dequeue() == trip


def test_its_fields(writer):
    handle = writer.export_handle()
    assert handle.n_reader == 3
    assert handle.local_reader_ranks == [2, 0, 9]
    assert handle.host == host_name()
    assert handle.boot_id == boot_id()
    assert handle.path == ""
    assert handle.max_chunk_bytes == 4096
    assert handle.serializer == "pickle"
    assert len(bytes.fromhex(handle.queue_id)) == 16
    # Every end gives the same one; every queue has its own.
    with MessageQueue.create_from_handle(handle, 2) as reader:
        assert reader.export_handle() == handle
    with MessageQueue(1, 1) as other:
        assert other.export_handle().queue_id != handle.queue_id


def test_it_is_small_and_one_word(writer):
    text = writer.export_handle().to_str()
    assert len(text) < 600
    assert text.isascii()
    assert not any(c.isspace() for c in text)
    assert len(pickle.dumps(writer.export_handle())) < 800


def test_it_does_not_change(writer):
    handle = writer.export_handle()
    with pytest.raises(AttributeError):
        handle.pid = 1
    with pytest.raises(AttributeError):
        handle.other = 1


def test_readers_elsewhere_get_it_by_any_way(writer):
    handle = writer.export_handle()
    with Team() as team:
        members = [
            team.start(workers.endless_reader, copied, rank)
            for copied, rank in ((handle, 2), (pickle.loads(pickle.dumps(handle)), 0),
                                 (Handle.from_str(handle.to_str()), 9))
        ]  # fmt: skip
        for i in range(5):
            writer.enqueue(i)
        for member in members:
            member.said("attached")
        writer.close()
        assert [member.result() for member in members] == [5, 5, 5]


DAMAGED = [
    "",
    "x",
    "not a handle",
    "\u20ac",
    "====",
    base64.urlsafe_b64encode(b"\xff" * 50).decode(),
    base64.urlsafe_b64encode(msgspec.msgpack.encode({"a": 1})).decode(),
    base64.urlsafe_b64encode(msgspec.msgpack.encode([1, 2])).decode(),
    base64.urlsafe_b64encode(b"").decode(),
]


@pytest.mark.parametrize("text", DAMAGED)
def test_text_that_is_no_handle(text):
    with pytest.raises(HandleMismatch, match="not a handle"):
        Handle.from_str(text)


def test_a_handle_that_was_cut_or_changed_on_the_way(writer):
    text = writer.export_handle().to_str()
    for n in range(0, len(text) - 1, 7):
        with pytest.raises(IPCError):
            Handle.from_str(text[:n])
    # One character changed: no handle any more, or one that leads nowhere, or (where it was in the
    # host's name, say) one that still does; never anything else.
    taken = 0
    for i in range(0, len(text), 3):
        other = "A" if text[i] != "A" else "B"
        try:
            reader = MessageQueue.create_from_handle(
                Handle.from_str(text[:i] + other + text[i + 1 :]), 9
            )
        except (HandleMismatch, OSError, ValueError):
            continue
        taken += 1
        reader.close()
    assert taken < len(text) // 6
    with MessageQueue.create_from_handle(writer.export_handle(), 2) as reader:
        writer.enqueue("works")
        assert reader.dequeue() == "works"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": 2}, "version 2"),
        ({"version": 0}, "version 0"),
        ({"boot_id": "elsewhere", "host": "far-away"}, "far-away"),
        ({"queue_id": "0" * 32}, "not this queue"),
        ({"queue_id": "0" * 30}, "damaged"),
        ({"queue_id": "zz" * 16}, "damaged"),
        ({"queue_id": ""}, "damaged"),
        ({"path": "/nowhere/at/all", "fd": 9999}, None),
        ({"path": "x" * 5000}, "damaged"),
        ({"fd": 0}, None),
        ({"fd": -1}, None),
        ({"fd": 9999}, "gone|closed"),
        ({"fd": 1 << 40}, "damaged"),
        ({"pid": (1 << 64) - 1}, "damaged"),
        ({"pid": 0, "start_time": 0}, None),
        ({"pid": 1 << 40, "start_time": 0}, None),
        ({"start_time": 1}, "has ended"),
        ({"local_reader_ranks": [0, 9], "n_reader": 2}, "not this queue"),
        ({"local_reader_ranks": [0, 1, 2, 9]}, "not this queue"),
    ],
)
def test_a_handle_that_leads_elsewhere(changes, text, writer):
    wrong = _changed(writer.export_handle(), **changes)
    with pytest.raises((HandleMismatch, OSError), match=text):
        MessageQueue.create_from_handle(wrong, 9)
    with MessageQueue.create_from_handle(writer.export_handle(), 9) as reader:
        writer.enqueue(1)
        assert reader.dequeue() == 1


def test_a_process_without_descriptors_says_so(writer, run_child):
    run_child(
        """
        import errno, os, resource, sys
        from fastipc import Handle, MessageQueue

        taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
        few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        handle = Handle.from_str(sys.argv[1])
        MessageQueue.create_from_handle(handle, 0).close()  # all is imported
        resource.setrlimit(resource.RLIMIT_NOFILE, (8, most))
        try:
            MessageQueue.create_from_handle(handle, 2)
        except OSError as error:
            assert error.errno == errno.EMFILE, error
        else:
            raise AssertionError
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
        MessageQueue.create_from_handle(handle, 2).close()
        """,
        writer.export_handle().to_str(),
    )


def test_the_handle_of_a_queue_that_took_the_last_descriptors_is_right(run_child):
    run_child(
        """
        import errno, os, resource
        from fastipc import MessageQueue

        MessageQueue(1, 1).close()  # all is imported
        few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, most))
        taken = []
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        while True:
            try:
                writer = MessageQueue(1, 1)
                break
            except OSError as error:
                assert error.errno == errno.EMFILE, error
                os.close(taken.pop())  # so it takes just what it needs
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
        with writer, MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            writer.enqueue(1)
            assert reader.dequeue() == 1
        """
    )


def test_fields_of_a_wrong_type_are_refused_when_decoded(writer):
    encoded = msgspec.to_builtins(writer.export_handle())
    for field, value in (("pid", "12"), ("local_reader_ranks", 3), ("path", None), ("fd", 1.5)):
        bad = base64.urlsafe_b64encode(msgspec.msgpack.encode({**encoded, field: value}))
        with pytest.raises(HandleMismatch):
            Handle.from_str(bad.decode())
    for field in ("pid", "queue_id"):
        missing = {k: v for k, v in encoded.items() if k != field}
        bad = base64.urlsafe_b64encode(msgspec.msgpack.encode(missing))
        with pytest.raises(HandleMismatch):
            Handle.from_str(bad.decode())


def test_a_ring_buffers_handle_is_one_too():
    with ShmRingBuffer(1, 4096, 1) as ring:
        handle = Handle.from_str(ring.export_handle().to_str())
        with ShmRingBuffer.create_from_handle(handle, 0):
            ring.wait_until_ready()
