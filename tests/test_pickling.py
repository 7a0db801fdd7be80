"""Objects arrive as they were sent: arrays bit for bit, writable, owned; failures harm nothing."""

from __future__ import annotations

import copyreg
import ctypes
import dataclasses
import importlib
import importlib.util
import pickle
import threading
import weakref
from collections import namedtuple

import numpy as np
import pytest
from support import ends, pair

from fastipc import DecodeError, Empty


@pytest.fixture
def send():
    """Sends an object through a queue and returns what arrives."""
    with pair(max_chunk_bytes=1 << 20, max_chunks=4) as (writer, reader):

        def through(obj):
            writer.enqueue(obj, timeout=0)
            return reader.dequeue(timeout=0)

        yield through
        assert reader.empty()


# ---- numpy: every dtype in every layout --------------------------------------------------------

_STRUCTURED = np.dtype([("a", "<i2"), ("b", ">f8", (2, 3)), ("c", "S3"), ("d", "M8[us]")])
_ALIGNED = np.dtype([("a", "i1"), ("b", "f8")], align=True)
_OFFSETS = np.dtype({"names": ["x", "y"], "formats": ["i2", "f4"], "offsets": [4, 12],
                     "itemsize": 24, "titles": ["title of x", None]})  # fmt: skip

DTYPES = [
    *["?", "b", "B", "h", "H", "i", "I", "l", "L", "q", "Q", "e", "f", "d", "g", "F", "D", "G"],
    *([">i2", ">i4", ">i8", ">u2", ">u4", ">u8", ">f2", ">f4", ">f8", ">c8", ">c16", ">g"]),
    *(["S1", "S7", "U1", "U5", ">U5", "V1", "V3", "V8", "V16"]),
    *(["M8[D]", "M8[ns]", "M8[25s]", ">M8[us]", "m8[s]", "m8[ns]", ">m8[h]"]),
    _STRUCTURED,
    _ALIGNED,
    _OFFSETS,
    np.dtype([("nested", _STRUCTURED), ("flag", "?")]),
    np.dtype((np.record, [("a", "i4"), ("b", "f4")])),
    np.dtype("f4", metadata={"unit": "m"}),
]


def _elements(dtype, n: int) -> np.ndarray:
    """n elements of random bytes, NaNs of all sorts included."""
    dtype = np.dtype(dtype)
    noise = np.random.default_rng(dtype.itemsize).integers(0, 256, n * dtype.itemsize, np.uint8)
    if dtype.kind == "b":
        noise &= 1
    if dtype.kind == "U":
        noise[:] = ord("a") if dtype.str[0] == "<" else 0
    return np.ndarray(n, dtype, noise.data)


def _layouts(flat: np.ndarray) -> dict[str, np.ndarray]:
    c = flat[:60].reshape(5, 12)
    cube = flat.reshape(4, 5, 6)
    raw = bytearray(b"\0" + flat.tobytes())
    item = flat.itemsize
    readonly = flat.copy()
    readonly.flags.writeable = False
    record = np.zeros(20, np.dtype([("pad", "i1"), ("value", flat.dtype), ("more", "S5")]))
    record["value"] = flat[:20]
    return {
        "0-dim": flat[3:4].reshape(()),
        "0-dim of a strided one": flat[::7][3:4].reshape(()),
        "one element": flat[:1],
        "one element, many axes": flat[5:6].reshape(1, 1, 1),
        "empty": flat[:0],
        "empty (3, 0, 2)": flat[:0].reshape(3, 0, 2),
        "empty (0, 0)": flat[:0].reshape(0, 0),
        "empty F-order": np.empty((0, 3), flat.dtype, order="F"),
        "empty strided": cube[::2, 5:, ::-1],
        "flat": flat,
        "strided": flat[::3],
        "negative stride": flat[::-1],
        "negative stride of 2": flat[::-2],
        "C": c,
        "F": np.asfortranarray(c),
        "transposed": c.T,
        "both negative": c[::-1, ::-1],
        "rows only": c[::2],
        "block": c[1:4, 3:9],
        "columns": c[:, ::5],
        "one column": c[:, 2:3],
        "cube": cube,
        "axes moved": cube.transpose(1, 2, 0),
        "axes moved back": cube.transpose(2, 0, 1),
        "axes moved, reversed": cube.transpose(1, 2, 0)[::-1],
        "F block": np.asfortranarray(cube)[1:, :, 1:4],
        "axes of length 1": c[None, :, None],
        "broadcast rows": np.broadcast_to(flat[:4], (3, 4)),
        "broadcast element": np.broadcast_to(flat[7:8], (2, 3, 2)),
        "overlapping": np.lib.stride_tricks.sliding_window_view(flat[:20], 5),
        "unaligned": np.frombuffer(raw, flat.dtype, offset=1),
        "unaligned strided": np.frombuffer(raw, flat.dtype, offset=1)[::-3],
        "field of records": record["value"],
        "stride of no multiple": np.ndarray((8,), flat.dtype, raw, 1, (item + 3,)),
        "read-only": readonly,
        "read-only strided": readonly[::2],
        "many axes": flat[:64].reshape((2,) * 6 + (1,) * 20),
    }


def _same(got: np.ndarray, sent: np.ndarray, name: str) -> None:
    assert type(got) is np.ndarray, name
    assert got.dtype == sent.dtype, name
    assert got.dtype.str == sent.dtype.str, name
    # (a long long arrives as the long of the same size, as in any pickle)
    assert got.dtype.type is pickle.loads(pickle.dumps(sent.dtype)).type, name
    assert got.dtype.isalignedstruct == sent.dtype.isalignedstruct, name
    assert got.shape == sent.shape, name
    if sent.dtype.fields is None:
        assert got.tobytes() == sent.tobytes(), name
    else:
        _same_fields(got, sent, name)
    assert got.flags.writeable, name
    assert got.flags.aligned, name
    if sent.flags.forc:
        assert got.flags.c_contiguous == sent.flags.c_contiguous, name
        assert got.flags.f_contiguous == sent.flags.f_contiguous, name


def _same_fields(got: np.ndarray, sent: np.ndarray, name: str) -> None:
    """Padding between fields is nobody's: the fields are compared, each with its bytes."""
    assert got.dtype.fields.keys() == sent.dtype.fields.keys(), name
    for field in sent.dtype.names:
        if sent.dtype[field].fields is not None:
            _same_fields(got[field], sent[field], name)
        else:
            assert got[field].tobytes() == sent[field].tobytes(), (name, field)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_in_every_layout(dtype, send):
    flat = _elements(dtype, 120)
    for name, array in _layouts(flat).items():
        _same(send(array), array, name)


@pytest.mark.parametrize("dtype", ["i1", "f4", "M8[ns]", _STRUCTURED, "V3"], ids=str)
def test_every_layout_when_large_and_in_fragments(dtype):
    """Fragments end inside rows and inside elements."""
    n = 40000 // np.dtype(dtype).itemsize // 120 * 120 + 120
    flat = _elements(dtype, n)
    with pair(max_chunk_bytes=1024 + 17, max_chunks=400, slots=512, inline_bytes=64) as ends_:
        writer, reader = ends_
        for name, array in {
            "flat": flat,
            "strided": flat[::3],
            "negative": flat[::-1],
            "axes moved": flat.reshape(4, -1, 6).transpose(1, 2, 0),
            "negative rows": flat.reshape(-1, 12)[::-1, 1:7],
            "broadcast": np.broadcast_to(flat[:50], (20, 50)),
            "F": np.asfortranarray(flat.reshape(-1, 12)),
        }.items():
            writer.enqueue(array, timeout=0)
            _same(reader.dequeue(timeout=0), array, name)


def test_a_dtypes_metadata_is_either_kept_or_dropped_but_harmless(send):
    array = np.zeros(3, np.dtype("f4", metadata={"unit": "m"}))
    assert np.array_equal(send(array), array)


def test_arrays_of_objects(send):
    array = np.array([1, "two", None, [3], np.arange(4)], dtype=object)
    got = send(array)
    assert got.dtype == object
    assert got[:4].tolist() == array[:4].tolist()
    assert np.array_equal(got[4], array[4])
    structured = np.array([(1, "x")], dtype=[("n", "i4"), ("o", "O")])
    assert send(structured).tolist() == structured.tolist()


def test_strings_of_any_width(send):
    if not hasattr(np.dtypes, "StringDType"):  # before numpy 2
        return
    array = np.array(["", "a", "long " * 50], dtype=np.dtypes.StringDType())
    got = send(array)
    assert got.dtype == array.dtype
    assert got.tolist() == array.tolist()


@pytest.mark.parametrize("kind", ["S0", "U0", "V0"])
def test_items_without_width(kind, send):
    array = np.zeros(3, np.dtype(kind))
    got = send(array)
    assert got.dtype == array.dtype
    assert got.shape == (3,)


class Tagged(np.ndarray):
    """A subclass as numpy's manual shows it: with state of its own."""

    def __array_finalize__(self, obj):
        self.tag = getattr(obj, "tag", None)

    def __reduce__(self):
        function, args, state = super().__reduce__()
        return function, args, (*state, self.tag)

    def __setstate__(self, state):
        self.tag = state[-1]
        super().__setstate__(state[:-1])


def test_subclasses_stay_what_they_are(send, tmp_path):
    tagged = np.arange(5).view(Tagged)
    tagged.tag = "kept"
    got = send(tagged)
    assert type(got) is Tagged
    assert got.tag == "kept"
    assert np.array_equal(got, tagged)

    masked = np.ma.masked_array(np.arange(6.0), mask=[0, 1, 0, 0, 1, 0], fill_value=-1)
    got = send(masked)
    assert type(got) is np.ma.MaskedArray
    assert np.array_equal(got.mask, masked.mask)
    assert np.array_equal(got.data, masked.data)
    assert got.fill_value == -1

    records = np.rec.array([(1, 2.5), (3, 4.5)], names="a,b")
    got = send(records)
    assert type(got) is np.recarray
    assert got.b.tolist() == [2.5, 4.5]

    mapped = np.memmap(tmp_path / "file", dtype=np.int32, mode="w+", shape=(100, 3))
    mapped[:] = np.arange(300).reshape(100, 3)
    got = send(mapped)
    assert np.array_equal(got, mapped)
    del mapped

    characters = np.char.array(["a", "bc"])
    got = send(characters)
    assert type(got) is type(characters)
    assert got.tolist() == characters.tolist()


def test_scalars(send):
    for scalar in (
        np.float32(1.5),
        np.int8(-3),
        np.datetime64("2020-01-01"),
        np.bool_(True),
        np.longdouble("1.1"),
        np.complex64(1j),
        np.str_("x"),
        np.void(b"ab"),
    ):
        got = send(scalar)
        assert type(got) is type(scalar)
        assert got == scalar


def _dtypes_from_outside() -> list:
    """Users' dtypes, as far as there are any here."""
    found = []
    if importlib.util.find_spec("ml_dtypes"):
        ml_dtypes = importlib.import_module("ml_dtypes")
        names = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4")
        found += [np.dtype(getattr(ml_dtypes, name)) for name in names]
    if importlib.util.find_spec("numpy._core._rational_tests"):
        rational_tests = importlib.import_module("numpy._core._rational_tests")
        found.append(np.dtype(rational_tests.rational))
    return found


def test_dtypes_from_outside_numpy(send):
    for dtype in _dtypes_from_outside():
        array = np.arange(12).astype(dtype).reshape(3, 4)
        for variant in (array, array.T, array[::2], array[::-1], array[:0]):
            got = send(variant)
            assert got.dtype == dtype
            assert got.tolist() == variant.tolist()
            assert got.tobytes() == variant.tobytes()
            assert got.flags.writeable


# ---- owned, and as they were -------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [64, 4096, 9000, 200_000])
def test_what_was_received_is_never_changed_by_what_comes_later(nbytes):
    with ends(2, max_chunk_bytes=128 << 10, max_chunks=2, slots=4) as (writer, readers):
        kept = []
        for i in range(50):
            writer.enqueue(np.full(nbytes, i, np.uint8), timeout=0)
            kept.append([reader.dequeue(timeout=0) for reader in readers])
        for i in range(500):
            writer.enqueue(np.full(nbytes, 100 + i % 100, np.uint8), timeout=0)
            for reader in readers:
                reader.dequeue(timeout=0)[:] = 255
        for i, arrays in enumerate(kept):
            for array in arrays:
                assert (array == i).all()
        # Each reader has its own: changing one changes no other.
        kept[0][0][:] = 77
        assert (kept[0][1] == 0).all()
        assert (kept[1][0] == 1).all()
    # The memory is the receiver's, whatever becomes of the queue.
    assert (kept[49][1] == 49).all()
    kept[49][1] += 1


@pytest.mark.parametrize("nbytes", [16, 9000, 3 << 20])
def test_the_caller_may_overwrite_its_array_at_once(nbytes):
    with ends(2) as (writer, readers):
        array = np.arange(nbytes, dtype=np.uint8)
        expected = array.copy()
        raw = bytearray(expected.tobytes())
        writer.enqueue({"array": array, "strided": array[::2], "raw": pickle.PickleBuffer(raw)})
        array[:] = 0
        raw[:] = bytes(nbytes)
        for reader in readers:
            got = reader.dequeue(timeout=0)
            assert np.array_equal(got["array"], expected)
            assert np.array_equal(got["strided"], expected[::2])
            assert bytes(got["raw"]) == expected.tobytes()


def test_nothing_of_a_message_is_kept_alive():
    with pair() as (writer, reader):
        array = np.zeros(100_000, np.uint8)
        alive = weakref.ref(array)
        writer.enqueue([array, array[::2]])
        del array
        assert alive() is None
        got = reader.dequeue()
        alive = weakref.ref(got[0])
        del got
        assert alive() is None


def test_a_resizable_buffer_is_not_pinned_after_enqueue():
    with pair() as (writer, _):
        raw = bytearray(100_000)
        writer.enqueue(np.frombuffer(raw, np.uint8))
        raw.extend(b"more")  # BufferError if it were


def test_an_array_may_come_twice_in_a_message(send):
    array = np.arange(1000)
    first, second, part = send([array, array, array[:10]])
    assert first is second
    assert np.array_equal(part, array[:10])


# ---- other objects -----------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Batch:
    ids: np.ndarray
    names: list
    more: dict


def test_ordinary_objects(send):
    recursive = [1]
    recursive.append(recursive)
    for obj in (None, True, 0, -1, 2**70, 1.5, "", "text", "\ud800", b"", b"bytes" * 30_000, (),
                {"a": [1, {2}, frozenset({3})]}, Point(1, 2), range(5), slice(1, 2), 1j, ...,
                int, len, ValueError("x").args):  # fmt: skip
        got = send(obj)
        assert got == obj
        assert type(got) is type(obj)
    got = send(recursive)
    assert got[1] is got
    batch = send(Batch(np.arange(3), ["a"], {"k": np.ones((2, 2), order="F")}))
    assert batch.ids.tolist() == [0, 1, 2]
    assert batch.more["k"].flags.f_contiguous
    error = send(ValueError("sent as an object"))
    assert type(error) is ValueError


@pytest.mark.parametrize("nbytes", [0, 1, 65535, 65536, 1 << 20])
def test_bytes_and_bytearrays(nbytes, send):
    data = np.random.default_rng(nbytes).bytes(nbytes)
    for obj in (data, bytearray(data)):
        got = send(obj)
        assert got == obj
        assert type(got) is type(obj)


def test_messages_do_not_remember_each_other(send):
    """A pickler's memo would make the second message refer to the first."""
    shared = ["shared"] * 3
    for _ in range(3):
        assert send([shared, shared]) == [shared, shared]
    text = "the same string object"
    assert [send(text) for _ in range(3)] == [text] * 3


# ---- failures ----------------------------------------------------------------------------------


class Refuses:
    def __reduce__(self):
        raise ZeroDivisionError("in __reduce__")


class FailsToLoad:
    def __getstate__(self):
        return {"x": np.arange(10)}

    def __setstate__(self, state):
        raise ZeroDivisionError("in __setstate__")


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Refuses(),
        lambda: [np.arange(100_000), "before", Refuses()],
        lambda: lambda: None,
        lambda: threading.Lock(),
    ],
    ids=["raises", "raises after an array", "a function without a name", "a lock"],
)
def test_a_failed_pickle_sends_nothing_and_harms_nothing(bad):
    with ends(2) as (writer, readers):
        before = writer.stats()
        for _ in range(3):
            with pytest.raises((ZeroDivisionError, TypeError, pickle.PicklingError,
                                AttributeError)):  # fmt: skip
                writer.enqueue(bad())
        assert writer.stats()["bytes"] == before["bytes"]
        writer.enqueue("next")
        for reader in readers:
            assert reader.dequeue(timeout=0) == "next"
            with pytest.raises(Empty):
                reader.dequeue(timeout=0)


def test_a_message_that_fails_to_load_has_been_taken():
    with ends(2, slots=2) as (writer, readers):
        for i in range(10):
            writer.enqueue([FailsToLoad(), np.arange(10)])
            writer.enqueue(i)
            for reader in readers:
                with pytest.raises(ZeroDivisionError):
                    reader.dequeue(timeout=0)
                assert reader.dequeue(timeout=0) == i


def test_a_class_that_the_reader_cannot_find():
    global Vanishing
    Vanishing = type("Vanishing", (), {"__module__": __name__})
    with pair() as (writer, reader):
        writer.enqueue(Vanishing())
        del Vanishing
        with pytest.raises(AttributeError):
            reader.dequeue(timeout=0)
        writer.enqueue(1)
        assert reader.dequeue(timeout=0) == 1


_nested: dict = {}


class SendsAnother:
    """Pickling it enqueues on another queue, or on the same."""

    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        _nested[self.name].enqueue(["nested in", self.name, np.arange(10)], timeout=5)
        return (SendsAnother, (self.name,))


def test_reduce_that_sends_on_another_queue():
    with pair() as (writer, reader), pair() as (other, other_reader):
        _nested["other"] = other
        writer.enqueue([np.arange(3), SendsAnother("other"), np.arange(4)])
        first, sender, last = reader.dequeue(timeout=0)
        assert first.tolist() == [0, 1, 2]
        assert sender.name == "other"
        assert last.tolist() == [0, 1, 2, 3]
        assert other_reader.dequeue(timeout=0)[:2] == ["nested in", "other"]
        _nested.clear()


def test_reduce_that_sends_on_the_same_queue():
    """The writer pickles before it takes a lock, so the inner message simply comes first."""
    with pair() as (writer, reader):
        _nested["same"] = writer
        writer.enqueue([np.arange(3), SendsAnother("same"), "end"])
        inner = reader.dequeue(timeout=0)
        assert inner[:2] == ["nested in", "same"]
        outer = reader.dequeue(timeout=0)
        assert outer[0].tolist() == [0, 1, 2]
        assert outer[2] == "end"
        assert reader.empty()
        _nested.clear()


class ReadsAnother:
    """Unpickling it dequeues from the same queue."""

    def __reduce__(self):
        return (_read_another, ())


def _read_another():
    return ("inner", _nested["reader"].dequeue(timeout=5))


def test_loading_that_reads_from_the_same_queue():
    """A reader acknowledges before it runs user code, so that code may read on."""
    with pair(slots=2) as (writer, reader):
        _nested["reader"] = reader
        writer.enqueue([ReadsAnother(), np.arange(2)])
        writer.enqueue("second")
        assert reader.dequeue(timeout=0)[0] == ("inner", "second")
        writer.enqueue("third")
        assert reader.dequeue(timeout=0) == "third"
        _nested.clear()


class LateCopyreg:
    def __init__(self, value=0):
        self.value = value


def _load_late(value):
    return LateCopyreg(value + 100)


def test_copyreg_of_after_the_queue_was_made_is_honoured():
    with pair() as (writer, reader):
        writer.enqueue(LateCopyreg(1))
        assert reader.dequeue(timeout=0).value == 1
        copyreg.pickle(LateCopyreg, lambda obj: (_load_late, (obj.value,)))
        try:
            writer.enqueue(LateCopyreg(1))
            assert reader.dequeue(timeout=0).value == 101
        finally:
            del copyreg.dispatch_table[LateCopyreg]


def test_nothing_is_registered_globally():
    before = dict(copyreg.dispatch_table)
    with pair() as (writer, reader):
        writer.enqueue([np.arange(3), LateCopyreg()])
        reader.dequeue(timeout=0)
    assert copyreg.dispatch_table == before
    # Ordinary pickling of an array is numpy's own still.
    assert b"fastipc" not in pickle.dumps(np.arange(3), 5)


def test_bytes_that_are_no_pickle_are_an_error_of_the_reader_only():
    with pair() as (writer, reader):
        writer._end.send([b"not a pickle"], 1)
        with pytest.raises(pickle.UnpicklingError):
            reader.dequeue(timeout=0)
        writer._end.send([b""], 1)
        with pytest.raises(EOFError):
            reader.dequeue(timeout=0)
        writer.enqueue("fine")
        assert reader.dequeue(timeout=0) == "fine"


def test_what_shared_memory_holds_is_not_trusted():
    """A frame that claims more than there is: an error for that message, never a crash."""
    with pair(inline_bytes=4096) as (writer, reader):
        base, size = _a_mapping()
        obj = [np.arange(10), np.arange(20)]
        writer.enqueue(obj)
        memory = (ctypes.c_char * size).from_address(base)
        # Three buffers: their count, and the lengths of the pickle and of the two arrays.
        lengths = b"".join(n.to_bytes(8, "little") for n in (80, 160))
        where = ctypes.string_at(base, 1 << 20).find(lengths) - 16
        assert memory[where : where + 8] == (3).to_bytes(8, "little")
        memory[where : where + 8] = (2**60).to_bytes(8, "little")
        with pytest.raises(DecodeError):
            reader.dequeue(timeout=0)
        writer.enqueue("after it")
        assert reader.dequeue(timeout=0) == "after it"


def _a_mapping() -> tuple[int, int]:
    """Address and size of this process's only segment: either end's mapping of it."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "fastipc" in line and line.split()[1].endswith("s"):
                low, high = (int(x, 16) for x in line.split()[0].split("-"))
                return low, high - low
    raise AssertionError("no segment is mapped")


def test_threads_do_not_share_a_pickler():
    with pair(slots=64) as (writer, reader):
        n, per_thread = 6, 200

        def work(number):
            for i in range(per_thread):
                name = f"{number} {i}"
                writer.enqueue([number, i, name, {name: [name] * 20}, np.full(i, number)])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(n)]
        for thread in threads:
            thread.start()
        nexts = [0] * n
        for _ in range(n * per_thread):
            number, i, name, names, array = reader.dequeue()
            assert i == nexts[number]
            nexts[number] += 1
            assert name == f"{number} {i}"
            assert names == {name: [name] * 20}
            assert array.tolist() == [number] * i
        for thread in threads:
            thread.join()
