"""The codec's contracts: wire format, types, ownership, registry, failures, threads."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import vectors
from vectors import same

from fastipc import _codec
from fastipc.codec import (
    CodecRegistry,
    InsecureDecodeError,
    MsgpackDecoder,
    MsgpackEncoder,
    OOBTensorConsumer,
    UtilityResult,
)
from fastipc.errors import DecodeError, IPCError

torch = pytest.importorskip("torch")
zmq = pytest.importorskip("zmq")

RAW = msgspec.msgpack.Encoder().encode


def through(value: Any, type: Any, wire: Any = bytearray, **options: Any) -> Any:
    """`value` after a journey in which each frame becomes a `wire`."""
    threshold = options.pop("size_threshold", None)
    insecure = {"allow_insecure_serialization": options.pop("insecure", None)}
    registry = {"registry": options.pop("registry", None)}
    frames = MsgpackEncoder(threshold, **insecure, **registry).encode(value)
    return MsgpackDecoder(type, **options, **insecure, **registry).decode([wire(f) for f in frames])


@pytest.fixture(params=["direct", "python"])
def way(request: pytest.FixtureRequest) -> Any:
    """Both ways to reach a tensor's bytes: torch's C functions, and without them (older torch)."""
    MsgpackEncoder()
    if _codec._set_direct(request.param == "direct") != (request.param == "direct"):
        pytest.skip("this torch does not offer its C functions")
    yield request.param
    _codec._set_direct(True)


# -- wire format -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("case", vectors.load(), ids=lambda c: c["name"])
def test_recorded_frames(case: dict[str, Any]) -> None:
    frames = [bytes.fromhex(f) for f in case["frames"]]
    value = vectors.value_of(case["value"])
    encoder = MsgpackEncoder(size_threshold=case["size_threshold"])
    assert [bytes(f) for f in encoder.encode(value)] == frames
    assert [bytes(f) for f in encoder.encode_into(value, bytearray(b"old" * 99))] == frames
    for share in (True, False):
        decoder = MsgpackDecoder(vectors.type_of(case["type"]), share_mem=share)
        for wire in (bytes, bytearray, memoryview, lambda f: memoryview(bytearray(f)), zmq.Frame):
            assert same(decoder.decode([wire(f) for f in frames]), value)


def test_frames_of_a_message_may_come_in_any_kind_of_sequence() -> None:
    array = np.arange(100.0)
    frames = MsgpackEncoder().encode(array)
    decoder = MsgpackDecoder(np.ndarray)
    assert same(decoder.decode(tuple(frames)), array)
    single = MsgpackEncoder().encode([1, 2])[0]
    for wire in (bytes, bytearray, memoryview, zmq.Frame):
        assert MsgpackDecoder().decode(wire(single)) == [1, 2]
    with pytest.raises(TypeError):
        MsgpackDecoder().decode([None])
    with pytest.raises(DecodeError):
        MsgpackDecoder().decode([])


# -- tensors and arrays ----------------------------------------------------------------------------

DTYPES = sorted({str(d)[6:] for d in vars(torch).values() if isinstance(d, torch.dtype)} - {"bit"})
QUANTIZED = {"qint8", "qint32", "quint8", "quint2x4", "quint4x2"}


def a_tensor(dtype: str, shape: tuple[int, ...]) -> Any:
    """A tensor with random bytes (of valid booleans for bool)."""
    out = torch.empty(shape, dtype=getattr(torch, dtype))
    size = out.numel() * out.element_size()
    if size:
        data = np.random.default_rng(size).integers(
            0, 2 if dtype == "bool" else 256, size, np.uint8
        )
        import ctypes

        ctypes.memmove(out.data_ptr(), data.tobytes(), size)
    return out


SHAPES = [(), (0,), (1,), (3, 0, 2), (2, 3), (300, 40)]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_torch_dtype(dtype: str) -> None:
    if dtype in QUANTIZED:
        with pytest.raises(TypeError, match=dtype):
            MsgpackEncoder().encode(torch.empty(3, dtype=getattr(torch, dtype)))
        return
    for shape in SHAPES:
        for threshold in (0, 256, 2**62):
            tensor = a_tensor(dtype, shape)
            for wire in (bytes, bytearray, zmq.Frame):
                for share in (True, False):
                    got = through(
                        tensor, torch.Tensor, wire, size_threshold=threshold, share_mem=share
                    )
                    assert same(got, tensor)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "complex64", "int8", "float64", "complex32"]
)
@pytest.mark.parametrize("size", [4, 60])
def test_tensors_that_are_not_plain_memory(dtype: str, size: int) -> None:
    base = a_tensor(dtype, (size, size))
    views = {
        "strided": base[::2, 1::3],
        "transposed": base.t(),
        "expanded": base[:1].expand(5, size),
        "zero stride": base[0, :1].expand(size),
        "offset": base[1:, 1:],
        "slice": base[1],
        "permuted": base.view(size // 2, 2, size).permute(2, 0, 1),
        "size-1 dimensions": base[None, :, None],
    }
    if base.is_complex():
        views["conjugated"] = base.conj()
        views["conjugated one"] = base.conj()[0, 0]
        if dtype != "complex32":
            views["negated"] = base.conj().imag
            views["negated one"] = base[0, :1].conj().imag[0]
    for name, view in views.items():
        for threshold in (0, 1 << 40):
            got = through(view, torch.Tensor, size_threshold=threshold)
            assert same(got, view), name
            assert got.is_contiguous()
            assert not got.is_conj()
            assert not got.is_neg()


def test_kinds_of_tensors() -> None:
    """Documented in the README's table."""
    grad = torch.ones(100, requires_grad=True)
    got = through(grad, torch.Tensor)
    assert same(got, grad.detach())
    assert not got.requires_grad
    parameter = torch.nn.Parameter(torch.ones(100))
    assert torch.equal(through(parameter, torch.Tensor), parameter)
    got = through(parameter, torch.nn.Parameter)
    assert type(got) is torch.nn.Parameter
    assert torch.equal(got, parameter)

    class Mine(torch.Tensor):
        pass

    got = through(torch.ones(100).as_subclass(Mine), Mine)
    assert type(got) is Mine
    assert same(through(torch.ones(100).as_subclass(Mine), torch.Tensor), torch.ones(100))
    with pytest.raises(TypeError, match="sparse"):
        MsgpackEncoder().encode(torch.eye(4).to_sparse())
    with pytest.raises(TypeError, match="meta"):
        MsgpackEncoder().encode(torch.empty(4, device="meta"))
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match="qint8"):
        MsgpackEncoder().encode(quantized)


def test_a_small_slice_of_a_large_tensor_sends_only_itself() -> None:
    huge = torch.empty(1 << 28, dtype=torch.float32)  # 1 GiB of address space, never touched
    huge[1000:1004] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for part in (huge[1000:1004], huge.view(-1, 4)[250], huge[1000:1004].numpy()):
        for threshold in (0, 256):
            frames = MsgpackEncoder(threshold).encode(part)
            assert sum(len(f) for f in frames) < 1024
            got = MsgpackDecoder(type(part)).decode([bytes(f) for f in frames])
            assert same(got, part if isinstance(part, torch.Tensor) else part.copy())


NUMPY_DTYPES = [*"?bBhHiIlLqQefdgFDG", "S5", "U3", "V6", "M8[ns]", "M8[25s]", "M8", "m8[us]", "m8"]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("order", ["=", "<", ">"])
def test_every_numpy_dtype(dtype: str, order: str) -> None:
    wanted = np.dtype(dtype).newbyteorder(order)
    for shape in [*SHAPES, (2, 1, 3)]:
        array = np.zeros(shape, wanted)
        if wanted.kind == "U":
            array[...] = "é€"
        elif array.size:
            raw = np.random.default_rng(7).integers(0, 2, array.nbytes, np.uint8)
            array = np.frombuffer(bytearray(raw), wanted).reshape(shape)
        for view in (array, array[::2] if array.ndim else array, array.T, np.asfortranarray(array)):
            for threshold in (0, 256):
                for wire in (bytes, bytearray):
                    got = through(view, np.ndarray, wire, size_threshold=threshold)
                    assert same(got, view.copy("C"))
                    assert got.flags.c_contiguous
                    assert got.flags.aligned


def test_arrays_that_bytes_do_not_describe_are_refused_by_name() -> None:
    structured = np.zeros(3, [("x", "f4"), ("y", "i8")])
    refused = [
        structured,
        structured.view(np.recarray),
        np.array([object()]),
        np.ma.masked_array([1, 2], [True, False]),
        np.zeros(2, np.dtype("V0")),
    ]
    if hasattr(np.dtypes, "StringDType"):
        refused.append(np.array(["a"], np.dtypes.StringDType()))
    for array in refused:
        with pytest.raises(TypeError, match=r"cannot encode a numpy .* of dtype"):
            MsgpackEncoder(allow_insecure_serialization=False).encode(array)
    with pytest.raises(TypeError):
        MsgpackEncoder().encode(structured[0])
    got = through(structured, np.ndarray, insecure=True)
    assert got.dtype == structured.dtype


def test_numpy_negative_strides_and_broadcasts() -> None:
    base = np.arange(600.0).reshape(20, 30)
    for view in (base[::-1, ::-2], np.broadcast_to(base[0], (7, 30)), base[3:4], base[..., None]):
        assert same(through(view, np.ndarray), view.copy("C"))


SCALARS = [
    np.bool_(True),
    np.int8(-3),
    np.uint8(200),
    np.int16(-300),
    np.uint16(65535),
    np.int32(-(2**31)),
    np.uint32(7),
    np.int64(-(2**63)),
    np.uint64(2**64 - 1),
    np.float16(0.1),
    np.float32(0.1),
    np.float64(0.1),
    np.longdouble(0.1),
    np.complex64(1 + 2j),
    np.complex128(0.1 - 3j),
    np.clongdouble(2j),
    np.datetime64("2024-01-01T00:00:01.5"),
    np.timedelta64(5, "ms"),
    np.str_("é"),
    np.bytes_(b"xy"),
    np.void(b"raw"),
    np.float64("nan"),
    np.float32("inf"),
]


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda s: f"{type(s).__name__}")
def test_numpy_scalars(scalar: Any) -> None:
    got = through([scalar], list[type(scalar)])[0]  # type: ignore[misc]
    assert same(got, scalar)
    struct = msgspec.defstruct("S", [("x", type(scalar) | None, None)])
    assert same(through(struct(scalar), struct).x, scalar)
    if scalar.dtype.kind in "biufSU" and scalar.dtype.itemsize <= 8:
        plain = through(scalar, type(scalar.item()))
        assert plain == scalar or plain != plain


@pytest.mark.parametrize(
    ("type", "value"),
    [
        (np.int8, 300),
        (np.uint8, -1),
        (np.int64, 1.5),
        (np.int64, True),
        (np.float32, 1e300),
        (np.float16, "x"),
        (np.bool_, 1),
        (np.str_, b"x"),
        (np.complex64, 1.0),
        (np.float32, ["<f8", [], bytes(8)]),
        (np.float32, 16777217),
        (np.datetime64, 5),
    ],
)
def test_numpy_scalars_that_do_not_fit(type: Any, value: Any) -> None:
    with pytest.raises(DecodeError):
        MsgpackDecoder(type).decode(RAW(value))


def test_slices() -> None:
    for value in (slice(None), slice(1, 2), slice(-5, None, -1), slice(np.int64(3), None, 2**40)):
        assert through(value, slice) == value
    with pytest.raises(TypeError, match="slice of str"):
        MsgpackEncoder().encode(slice("a", "b"))


@dataclasses.dataclass
class Data:
    name: str
    tensors: dict[str, list[torch.Tensor]]
    array: npt.NDArray[np.float32] | None = None


class Item(msgspec.Struct, array_like=True, omit_defaults=True):
    data: Data
    when: datetime.datetime | None = None
    where: slice | None = None
    pair: tuple[np.ndarray, torch.Tensor] | None = None
    parts: list[dict[int, np.ndarray]] = []


def test_nested_containers_and_structs() -> None:
    item = Item(
        Data("n", {"a": [torch.ones(2), torch.zeros(200)], "b": []}, np.ones(3, np.float32)),
        when=datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC),
        where=slice(1, 2),
        pair=(np.arange(500), torch.arange(500)),
        parts=[{1: np.zeros(1)}, {2: np.zeros(1000)}],
    )
    got = through(item, Item)
    assert same(got.data.tensors, item.data.tensors)
    assert same(got.data.array, item.data.array)
    assert (got.when, got.where) == (item.when, item.where)
    assert same(got.pair, item.pair)
    assert same(got.parts, item.parts)


def test_untyped_decoding_gives_the_lists_that_travelled() -> None:
    assert through([np.float32([1])], None) == [["<f4", [1], np.float32([1]).tobytes()]]


# -- ownership -------------------------------------------------------------------------------------

WIRES = {
    "bytes": bytes,
    "bytearray": bytearray,
    "zmq.Frame": lambda f: zmq.Frame(bytes(f)),
    "memoryview of bytes": lambda f: memoryview(bytes(f)),
    "memoryview of bytearray": lambda f: memoryview(bytearray(f)),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("inline", [True, False])
def test_who_owns_what_and_who_may_write(wire: str, share: bool, inline: bool) -> None:
    """The table in MsgpackDecoder's docstring, line by line."""
    value = [np.arange(64, dtype=np.int64), torch.arange(64, dtype=torch.int64)]
    sent = [bytes(f) for f in MsgpackEncoder(1 << 20 if inline else 0).encode(value)]
    frames = [WIRES[wire](f) for f in sent]
    array, tensor = MsgpackDecoder(tuple[np.ndarray, torch.Tensor], share_mem=share).decode(frames)
    writable = "bytes" not in wire.split()
    assert array.flags.aligned
    assert array.flags.writeable == (inline or writable or not share)
    in_frame = share and not inline
    for i, item in ((1, array), (2, tensor)):
        if i == 2 or item.flags.writeable:
            before = [bytes(f) for f in frames]
            item[3] = 77
            assert int(item[3]) == 77
            changed = [k for k, f in enumerate(frames) if bytes(f) != before[k]]
            assert changed == ([i] if in_frame and writable else [])
    if in_frame and wire == "bytearray":
        with pytest.raises(BufferError):
            frames[1].append(0)  # in use by the array
        with pytest.raises(BufferError):
            frames[2].append(0)
        del array, tensor, item
        gc.collect()
        for frame in frames:
            frame.append(0)
    elif wire == "bytearray":
        for frame in frames:
            frame.append(0)


@pytest.mark.usefixtures("way")
def test_what_lies_in_a_frame_outlives_everything_else() -> None:
    frames = [bytearray(f) for f in MsgpackEncoder().encode([torch.arange(999), np.arange(999)])]
    tensor, array = MsgpackDecoder(tuple[torch.Tensor, np.ndarray]).decode(frames)
    del frames
    gc.collect()
    junk = [bytearray(8000) for _ in range(50)]
    assert torch.equal(tensor, torch.arange(999))
    assert np.array_equal(array, np.arange(999))
    # The last reference may go in another thread, one that Python did not start among them.
    view = tensor[5:]
    del tensor
    holder = [view]
    del view
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    assert len(junk) == 50


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("offset", range(1, 17))
def test_misaligned_frames_are_copied(offset: int, share: bool) -> None:
    for dtype in ("float64", "complex128", "float16", "int32", "bool", "longdouble"):
        array = np.ones(100, dtype)
        value: list[Any] = [array]
        if dtype != "longdouble":
            value.append(torch.from_numpy(array))
        main, *aux = MsgpackEncoder(0).encode(value)
        frames = [main]
        for frame in aux:
            room = bytearray(offset + len(frame))
            room[offset:] = frame
            frames.append(memoryview(room)[offset:])
        got = MsgpackDecoder(
            list[np.ndarray] if dtype == "longdouble" else tuple[np.ndarray, torch.Tensor],
            share_mem=share,
        ).decode(frames)
        assert same(list(got), value)
        assert got[0].flags.aligned
        if dtype != "longdouble":
            assert got[1].data_ptr() % min(8, array.itemsize) == 0


def test_after_a_one_byte_buffer_a_float64_is_aligned_or_copied() -> None:
    value = [np.ones(1, np.uint8), np.full(33, 2.5)]
    main, one, eight = MsgpackEncoder(0).encode(value)
    packed = bytearray(bytes(one) + bytes(eight))
    got = MsgpackDecoder(list[np.ndarray]).decode(
        [main, memoryview(packed)[:1], memoryview(packed)[1:]]
    )
    assert same(got, value)
    assert got[1].flags.aligned


def test_encoding_borrows_and_keeps_alive() -> None:
    array, tensor = np.arange(500), torch.arange(500)
    frames = MsgpackEncoder().encode([array, tensor])
    array[7] = tensor[7] = -1
    assert np.frombuffer(frames[1], np.int64)[7] == -1
    assert np.frombuffer(frames[2], np.int64)[7] == -1
    expected = (array.copy(), tensor.clone())
    del array, tensor
    gc.collect()
    junk = [np.zeros(500) for _ in range(20)]
    assert same(np.frombuffer(frames[1], np.int64), expected[0])
    assert bytes(frames[2]) == vectors.tensor_bytes(expected[1])
    fixed = np.arange(500)
    fixed.flags.writeable = False
    frame = MsgpackEncoder().encode(fixed)[1]
    assert frame.readonly
    with pytest.raises(TypeError):
        frame[0] = 1
    assert len(junk) == 20


def test_frames_are_plain_buffers() -> None:
    _, frame = MsgpackEncoder(0).encode(torch.arange(6, dtype=torch.int16).view(2, 3))
    assert (frame.nbytes, len(frame), frame.format, frame.ndim, frame.c_contiguous) == (
        12,
        12,
        "B",
        1,
        True,
    )
    _, frame = MsgpackEncoder(0).encode(torch.empty(0))
    assert bytes(frame) == b""
    _, frame = MsgpackEncoder(0).encode(np.empty(0))
    assert bytes(frame) == b""


def test_empty_frames() -> None:
    for value in (np.empty((0, 5), "<f4"), torch.empty(0, 5)):
        frames = MsgpackEncoder(0).encode(value)
        assert len(frames) == 2
        for wire in (bytes, bytearray, zmq.Frame):
            assert same(MsgpackDecoder(type(value)).decode([wire(f) for f in frames]), value)


# -- registry --------------------------------------------------------------------------------------


class Fields:
    """A dict of named fields that hold nested lists of tensors, plus a description."""

    def __init__(self, modality: str, fields: dict[str, Any]) -> None:
        self.modality, self.fields = modality, fields


def encode_nested(value: Any) -> Any:
    return (
        [0, value]
        if isinstance(value, torch.Tensor)
        else [1, [encode_nested(item) for item in value]]
    )


def decode_nested(value: Any, frames: Any) -> Any:
    kind, content = value
    return (
        frames.convert(content, torch.Tensor)
        if kind == 0
        else [decode_nested(item, frames) for item in content]
    )


def fields_registry() -> CodecRegistry:
    registry = CodecRegistry()
    registry.register(
        Fields,
        lambda f, frames: [f.modality, {k: encode_nested(v) for k, v in f.fields.items()}],
        lambda v, frames: Fields(v[0], {k: decode_nested(t, frames) for k, t in v[1].items()}),
    )
    return registry


def test_registered_nested_multimodal_structure() -> None:
    value = Fields(
        "image",
        {
            "pixels": [torch.rand(3, 50, 50), [torch.rand(2), torch.rand(100)]],
            "grid": torch.ones(3),
        },
    )
    message = msgspec.defstruct("M", [("items", list[Fields]), ("tail", torch.Tensor)])
    got = through(message([value, value], torch.arange(1000)), message, registry=fields_registry())
    for item in got.items:
        assert item.modality == "image"
        assert same(item.fields, value.fields)
    assert same(got.tail, torch.arange(1000))


class Blob:
    def __init__(self, data: Any) -> None:
        self.data = data


class SubBlob(Blob):
    pass


def test_registered_type_with_frames_of_its_own() -> None:
    kept: list[Any] = []

    def encode(blob: Blob, frames: Any) -> Any:
        kept.append(frames)
        return frames.append(blob.data)

    def decode(value: Any, frames: Any) -> Blob:
        kept.append(frames)
        return Blob(frames.buffer(value))

    registry = CodecRegistry()
    registry.register(Blob, encode, decode)
    got = through(
        [SubBlob(b"x" * 10), Blob(bytearray(5)), Blob(np.arange(3.0))],
        list[Blob],
        registry=registry,
    )
    assert [bytes(b.data) for b in got] == [b"x" * 10, bytes(5), np.arange(3.0).tobytes()]
    assert not got[0].data.readonly
    with pytest.raises(ValueError, match="has been encoded"):
        kept[0].append(b"late")
    with pytest.raises(ValueError, match="has been decoded"):
        kept[-1].buffer(1)
    for bad in (0, 2, -1, True, None, "1", 1.0):
        with pytest.raises(DecodeError):
            MsgpackDecoder(Blob, registry=registry).decode([RAW(bad), b"one"])
    with pytest.raises(ValueError, match="contiguous"):
        MsgpackEncoder(registry=registry).encode(Blob(np.arange(9.0)[::2]))


def test_what_a_decode_function_raises_on_nonsense() -> None:
    decoder = MsgpackDecoder(Fields, registry=fields_registry())
    for nonsense in (
        None,
        1,
        [],
        ["image"],
        ["image", {"x": 3}],
        ["image", {"x": [0, ["float32", [1], 9]]}],
    ):
        with pytest.raises(DecodeError):
            decoder.decode(RAW(nonsense))


@pytest.mark.parametrize(
    "cls", [Item, Data, dict, list, int, str, enum.Enum, UtilityResult, type(None)]
)
def test_types_that_msgspec_carries_cannot_be_registered(cls: type) -> None:
    with pytest.raises(TypeError, match="without registration"):
        CodecRegistry().register(cls, lambda o, f: None, lambda v, f: None)


def test_insecure_decoding_still_ends_in_decode_errors() -> None:
    decoder = MsgpackDecoder(UtilityResult, allow_insecure_serialization=True)
    for name in (["no.such.module", "X"], ["os", "nothing"], ["os", "sep"], ["", ""], [".", "a"]):
        with pytest.raises(DecodeError):
            decoder.decode(RAW((name, "x")))


def test_more_dimensions_than_arrays_have() -> None:
    tensor = torch.ones((1,) * 65)
    with pytest.raises(TypeError, match="65 dimensions"):
        MsgpackEncoder().encode(tensor)
    assert same(through(torch.ones((1,) * 64), torch.Tensor), torch.ones((1,) * 64))


def test_unknown_types_are_refused_by_name() -> None:
    for value in (object(), Blob(1), lambda: 1, 1j, {"x": [Blob(1)]}):
        with pytest.raises(
            TypeError, match=r"cannot encode .*FASTIPC_ALLOW_INSECURE_SERIALIZATION"
        ):
            MsgpackEncoder().encode(value)
    with pytest.raises(DecodeError, match="no decode function"):
        MsgpackDecoder(Blob).decode(RAW(1))


# -- pickle ----------------------------------------------------------------------------------------


def test_pickle_only_when_asked_for() -> None:
    value = [Blob(1), lambda x: x + 1]
    frames = MsgpackEncoder(allow_insecure_serialization=True).encode(value)
    blob, function = MsgpackDecoder(allow_insecure_serialization=True).decode(frames)
    assert (blob.data, function(1)) == (1, 2)
    got = through(
        msgspec.defstruct("S", [("x", Blob)])(Blob(5)),
        msgspec.defstruct("S", [("x", Blob)]),
        insecure=True,
    )
    assert got.x.data == 5
    with pytest.raises(InsecureDecodeError, match="FASTIPC_ALLOW_INSECURE_SERIALIZATION") as caught:
        MsgpackDecoder().decode(frames)
    for kind in (DecodeError, IPCError, TypeError, ValueError):
        assert isinstance(caught.value, kind)
    bad = RAW([msgspec.msgpack.Ext(1, b"nonsense")])
    with pytest.raises(DecodeError):
        MsgpackDecoder(allow_insecure_serialization=True).decode(bad)


def test_the_environment_turns_pickle_on() -> None:
    code = "from fastipc.codec import *; print(len(MsgpackEncoder().encode(1j)))"
    for value, passes in (("1", True), ("0", False), ("", False), ("true", False)):
        env = {**os.environ, "FASTIPC_ALLOW_INSECURE_SERIALIZATION": value}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, check=False
        )
        assert (done.returncode == 0) == passes


# -- utility results -------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


def test_utility_results_carry_their_types() -> None:
    registry = CodecRegistry()
    registry.allow(Item, Data, Colour)
    results: list[Any] = [
        None,
        3,
        "x",
        {"a": [1, 2.5, "x", None]},
        (1, (2, 3)),
        {1, 2},
        b"raw",
        bytearray(b"x"),
        torch.arange(300),
        np.arange(300),
        np.float32(0.1),
        np.int64(5),
        slice(1, 2),
        np.complex64(1j),
        [torch.ones(2), {"k": np.zeros(2)}, (torch.ones(1), [np.ones(1), (torch.zeros(500), 1)])],
        Colour.RED,
        {"deep": [{"er": [Colour.RED, None, 4]}]},
        {1: (2,)},
        [[], {}, ()],
        datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC),
        ["builtins", "int"],
        [["builtins", "int"]],
        ["a", "b", ["c"]],
    ]
    for result in results:
        for insecure in (False, True):
            got = through(
                UtilityResult(result), UtilityResult, insecure=insecure, registry=registry
            )
            assert same(got.result, result), result
    item = Item(Data("n", {"a": [torch.ones(200)]}))
    got = through(UtilityResult([item]), UtilityResult, registry=registry)
    assert same(got.result[0].data.tensors, item.data.tensors)


def test_utility_results_on_the_wire() -> None:
    plain = {"a": [1, 2.5]}
    assert MsgpackEncoder().encode(UtilityResult(plain))[0] == RAW((None, plain))
    info = {"a": [["builtins", "int"], ["builtins", "float"]]}
    assert MsgpackEncoder(allow_insecure_serialization=True).encode(UtilityResult(plain))[0] == RAW(
        (info, plain)
    )
    value = [torch.ones(1), None]
    data = ["float32", [1], msgspec.msgpack.Ext(3, vectors.tensor_bytes(value[0]))]
    expected = RAW(([["torch", "Tensor"], None], [data, None]))
    assert MsgpackEncoder().encode(UtilityResult(value))[0] == expected


def test_utility_results_name_no_other_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_by_data.py").write_text("class Kind(str): pass")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in (
        ["imported_by_data", "Kind"],
        ["collections", "OrderedDict"],
        ["os", "system"],
        ["builtins", "eval"],
        ["subprocess", "Popen"],
        ["test_codec", "Item"],
        ["numpy", "load"],
        ["numpy", "object_"],
        ["torch", "load"],
        ["fractions", "Fraction"],
    ):
        with pytest.raises(InsecureDecodeError, match="not known here"):
            MsgpackDecoder(UtilityResult).decode(RAW((name, "x")))
    assert "imported_by_data" not in sys.modules
    for info in (
        1,
        "x",
        [1],
        ["a"],
        ["a", 2],
        {"b": None},
        {"a": [None, None]},
        ["builtins", "tuple", 5],
    ):
        with pytest.raises(DecodeError):
            MsgpackDecoder(UtilityResult).decode(RAW((info, {"a": [1]})))


# -- out of band -----------------------------------------------------------------------------------


class Shelf(OOBTensorConsumer):
    def __init__(self) -> None:
        self.messages, self.tensors = 0, {}

    def new_message(self) -> None:
        self.messages += 1

    def __call__(self, tensor: Any) -> dict[str, Any] | None:
        if tensor.dtype == torch.int32:
            return None
        self.tensors[len(self.tensors)] = tensor
        return {"n": len(self.tensors) - 1}


def test_out_of_band_tensors() -> None:
    shelf = Shelf()
    asked: list[Any] = []

    def provider(dtype: str, shape: tuple[int, ...], placeholder: dict[str, Any]) -> Any:
        asked.append((dtype, shape))
        return shelf.tensors[placeholder["n"]]

    value = [
        torch.rand(20, 30),
        torch.ones(3),
        torch.arange(200, dtype=torch.int32),
        torch.rand(60, 2).t(),
    ]
    frames = MsgpackEncoder(oob_tensor_consumer=shelf).encode(value)
    assert len(frames) == 2  # the small one is inline, the refused one in a frame
    assert shelf.messages == 1
    got = MsgpackDecoder(list[torch.Tensor], oob_tensor_provider=provider).decode(frames)
    assert same(got, value)
    assert asked == [("float32", (20, 30)), ("float32", (2, 60))]
    with pytest.raises(DecodeError, match="out of band"):
        MsgpackDecoder(list[torch.Tensor]).decode(frames)


def test_what_a_provider_raises() -> None:
    def late(*_: Any) -> Any:
        raise TimeoutError("did not come")

    frames = MsgpackEncoder(oob_tensor_consumer=Shelf()).encode(torch.rand(100))
    with pytest.raises(TimeoutError):
        MsgpackDecoder(torch.Tensor, oob_tensor_provider=late).decode(frames)
    with pytest.raises(DecodeError):
        MsgpackDecoder(torch.Tensor, oob_tensor_provider=lambda *_: 5).decode(frames)


# -- failures leave nothing behind -----------------------------------------------------------------


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 2**200])
@pytest.mark.parametrize("into", [False, True])
def test_a_failed_encode_leaves_the_encoder_clean(number: int, into: bool) -> None:
    struct = msgspec.defstruct("S", [("big", torch.Tensor), ("n", Any)])
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(struct)
    buffer = bytearray()

    def encode(value: Any) -> Any:
        return encoder.encode_into(value, buffer) if into else encoder.encode(value)

    for bad, error in (
        (number, OverflowError),
        (Blob(1), TypeError),
        ([np.ones(900), object()], TypeError),
    ):
        with pytest.raises(error):
            encode(struct(torch.ones(1000), {"x": [bad]}))
        frames = encode(struct(torch.arange(777), 2**63))
        assert len(frames) == 2
        got = decoder.decode(frames)
        assert same((got.big, got.n), (torch.arange(777), 2**63))
    for edge in (2**64 - 1, -(2**63), 2**63):
        assert decoder.decode(encode(struct(torch.ones(1), edge))).n == edge


def test_failed_encodes_keep_nothing_alive() -> None:
    encoder = MsgpackEncoder()
    array = np.ones(1000)
    before = sys.getrefcount(array)
    for _ in range(50):
        with pytest.raises(TypeError):
            encoder.encode([array, object()])
    assert sys.getrefcount(array) == before
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(RecursionError):
        encoder.encode([array, cycle])
    assert sys.getrefcount(array) == before
    assert len(encoder.encode([array])) == 2


def test_references_are_balanced() -> None:
    array, tensor = np.arange(1000), torch.arange(1000)
    shape_number = 1000  # not one of the small integers that live for ever
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(tuple[np.ndarray, torch.Tensor])
    gc.collect()
    counts = [sys.getrefcount(o) for o in (array, tensor, array.dtype, None, shape_number)]
    for _ in range(1000):
        frames = [bytearray(f) for f in encoder.encode((array, tensor))]
        got = decoder.decode(frames)
        del got
        decoder.decode([bytes(f) for f in frames])
        with pytest.raises(DecodeError):
            decoder.decode(frames[:2])
    del frames
    gc.collect()
    for now, then in zip(
        (sys.getrefcount(o) for o in (array, tensor, array.dtype, None, shape_number)),
        counts,
        strict=True,
    ):
        assert abs(now - then) < 500


def test_encode_into_refuses_a_buffer_in_use() -> None:
    encoder = MsgpackEncoder()
    buffer = bytearray()
    assert encoder.encode_into([1, 2], buffer)[0] is buffer
    with memoryview(buffer), pytest.raises(BufferError):
        encoder.encode_into([3, 4], buffer)  # of the same length: nothing would have to be resized
    assert MsgpackDecoder().decode(buffer) == [1, 2]
    encoder.encode_into({"k": "long" * 99}, buffer)
    encoder.encode_into(5, buffer)
    assert bytes(buffer) == b"\x05"
    with pytest.raises(TypeError):
        encoder.encode_into([1], None)


# -- threads and nesting ---------------------------------------------------------------------------


class Slow:
    """Encoding it lets other threads run in the middle of a message."""

    def __init__(self, n: int) -> None:
        self.n = n


def test_eight_threads_on_one_coder() -> None:
    registry = CodecRegistry()

    def encode(slow: Slow, frames: Any) -> Any:
        for _ in range(3):
            gate.acquire(timeout=0.00001)  # drops the GIL
        return [slow.n, np.full(100, slow.n)]

    def decode(value: Any, frames: Any) -> Slow:
        gate.acquire(timeout=0.00001)
        assert frames.convert(value[1], np.ndarray).tolist() == [value[0]] * 100
        return Slow(value[0])

    registry.register(Slow, encode, decode)
    struct = msgspec.defstruct(
        "S", [("a", torch.Tensor), ("slow", Slow), ("b", np.ndarray), ("n", int)]
    )
    encoder, decoder = MsgpackEncoder(registry=registry), MsgpackDecoder(struct, registry=registry)
    gate = threading.Lock()
    gate.acquire()
    rounds = 100_000 if os.environ.get("FASTIPC_NIGHTLY") else 300
    failures: list[Any] = []

    def work(n: int) -> None:
        try:
            value = struct(torch.full((100,), n), Slow(n), np.full(100, n), n)
            for _ in range(rounds):
                frames = encoder.encode(value)
                got = decoder.decode(frames)
                assert len(frames) == 4
                assert got.n == got.slow.n == n
                assert got.a.tolist() == [n] * 100 == got.b.tolist()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_encode_and_decode_from_inside_a_hook() -> None:
    registry = CodecRegistry()
    encoder = MsgpackEncoder(registry=registry)
    decoder = MsgpackDecoder(list[Slow | None], registry=registry)
    inner = MsgpackDecoder(np.ndarray, registry=registry)

    def encode(slow: Slow, frames: Any) -> Any:
        parts = (
            encoder.encode([Slow(slow.n - 1), np.full(99, slow.n)])
            if slow.n
            else encoder.encode(np.zeros(99))
        )
        return [slow.n, [frames.append(bytes(part)) for part in parts]]

    def decode(value: Any, frames: Any) -> Slow:
        parts = [frames.buffer(i) for i in value[1]]
        if value[0]:
            nested, array = nested_decoder.decode(parts)
            assert nested.n == value[0] - 1
            assert array.tolist() == [value[0]] * 99
        else:
            assert inner.decode(parts).tolist() == [0] * 99
        return Slow(value[0])

    registry.register(Slow, encode, decode)
    nested_decoder = MsgpackDecoder(tuple[Slow, np.ndarray], registry=registry)
    for _ in range(20):
        frames = encoder.encode([Slow(20), None, Slow(3)])
        assert [s and s.n for s in decoder.decode(frames)] == [20, None, 3]


def test_coders_are_freed() -> None:
    class Marker(OOBTensorConsumer):
        def __call__(self, tensor: Any) -> None:
            return None

    import weakref

    marker = Marker()
    gone = weakref.ref(marker)
    encoder = MsgpackEncoder(oob_tensor_consumer=marker)
    encoder.encode(torch.ones(100))
    del encoder, marker
    gc.collect()
    assert gone() is None


# -- torch is somebody else's to import ------------------------------------------------------------

WITHOUT_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ModuleNotFoundError("no torch here")
if {block}:
    sys.meta_path.insert(0, Block())
import fastipc, fastipc.codec, fastipc.sockets
from fastipc.codec import *
from fastipc.errors import DecodeError
import numpy as np, msgspec
fields = [("a", np.ndarray), ("b", list[np.ndarray]), ("s", slice), ("n", np.float32)]
struct = msgspec.defstruct("S", fields)
value = struct(np.arange(100), [np.ones(3), np.ones(300)], slice(1), np.float32(2))
frames = MsgpackEncoder().encode(value)
got = MsgpackDecoder(struct).decode([bytes(f) for f in frames])
assert got.a.tolist() == list(range(100)) and got.b[1].sum() == 300 and got.s == slice(1)
assert got.n == 2
result = MsgpackEncoder().encode(UtilityResult([np.ones(2), 1]))
assert MsgpackDecoder(UtilityResult).decode(result).result[0].tolist() == [1, 1]
named = (["torch", "Tensor"], ["float32", [], b"abcd"])
try:
    MsgpackDecoder(UtilityResult).decode(msgspec.msgpack.encode(named))
except DecodeError as error:
    assert "import torch" in str(error)
else:
    raise SystemExit("not refused")
try:
    MsgpackEncoder().encode(object())
except TypeError:
    pass
assert "torch" not in sys.modules
if not {block}:
    encoder = MsgpackEncoder()
    import torch
    frames = [bytes(f) for f in encoder.encode(torch.arange(100))]
    assert MsgpackDecoder(torch.Tensor).decode(frames).tolist() == list(range(100))
"""


@pytest.mark.parametrize("block", [True, False])
def test_without_torch(block: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH.replace("{block}", str(block))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_decoder_of_a_torch_type_finds_torch_imported_later() -> None:
    code = """
from fastipc.codec import MsgpackDecoder, MsgpackEncoder
import msgspec, numpy as np
decoder = MsgpackDecoder()
import torch
assert MsgpackDecoder(torch.Tensor).decode(MsgpackEncoder().encode(torch.ones(2))).tolist() == [1,
1]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
