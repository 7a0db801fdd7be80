"""Whatever is supported comes back: same type, same bits, at any depth."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from vectors import same

from fastipc.codec import CodecRegistry, MsgpackDecoder, MsgpackEncoder, UtilityResult

torch = pytest.importorskip("torch")

NIGHTLY = os.environ.get("FASTIPC_NIGHTLY") == "1"
FAIR = settings(
    max_examples=20_000 if NIGHTLY else 300,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

TORCH_DTYPES = [
    d
    for d in {getattr(torch, n) for n in dir(torch) if isinstance(getattr(torch, n), torch.dtype)}
    if not str(d).startswith("torch.q")
]
TORCH_DTYPES.sort(key=str)
NUMPY_KINDS = [
    "?",
    "i1",
    "u1",
    "i2",
    ">u2",
    "i4",
    "u4",
    ">i8",
    "u8",
    "f2",
    "f4",
    ">f8",
    "c8",
    ">c16",
    "S3",
    "U2",
    "V5",
    "M8[s]",
    "m8[D]",
]


@pytest.fixture(autouse=True, scope="module")
def repr_of_any_tensor() -> Any:
    """torch cannot print some of its dtypes, which would hide the example that failed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.Tensor, "__repr__", lambda t, **_: f"<{t.dtype} {tuple(t.shape)} {t.stride()}>"
        )
        yield


SHAPE = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@st.composite
def tensors(draw: Any, dtypes: Any = tuple(TORCH_DTYPES)) -> Any:
    dtype = draw(st.sampled_from(dtypes))
    tensor = torch.empty(draw(SHAPE), dtype=dtype)
    size = tensor.numel() * tensor.element_size()
    top = 1 if dtype == torch.bool else 255
    data = (
        np.random.default_rng(draw(st.integers(0, 2**32)))
        .integers(0, top + 1, size, np.uint8)
        .tobytes()
    )
    if size:
        ctypes.memmove(tensor.data_ptr(), data, size)
    for _ in range(draw(st.integers(0, 2)) if tensor.ndim else 0):
        dim = draw(st.integers(0, tensor.ndim - 1))
        kind = draw(st.sampled_from(["step", "cut", "transpose", "expand", "conj", "row"]))
        if tensor.ndim == 0:
            break
        if kind == "step":
            tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
        elif kind == "cut":
            tensor = tensor[(slice(None),) * dim + (slice(1, None),)]
        elif kind == "transpose":
            tensor = tensor.transpose(dim, -1)
        elif kind == "expand":
            tensor = tensor.unsqueeze(dim).expand(*tensor.shape[:dim], 3, *tensor.shape[dim:])
        elif kind == "conj" and tensor.is_complex():
            tensor = tensor.conj()
        elif kind == "row" and tensor.shape[0]:
            tensor = tensor[-1]
            if tensor.ndim == 0:
                break
    return tensor


@st.composite
def arrays(draw: Any) -> Any:
    dtype = np.dtype(draw(st.sampled_from(NUMPY_KINDS)))
    array = np.zeros(draw(SHAPE), dtype)
    if dtype.kind == "U":
        array[...] = draw(st.text(max_size=2))
    elif array.size:
        raw = np.random.default_rng(draw(st.integers(0, 2**32))).integers(
            0, 2, array.nbytes, np.uint8
        )
        array = np.frombuffer(bytearray(raw), dtype).reshape(array.shape)
    change = draw(
        st.sampled_from(["", "step", "transpose", "flip", "fortran", "broadcast", "read-only"])
    )
    if change == "step" and array.ndim:
        array = array[::2]
    elif change == "transpose":
        array = array.T
    elif change == "flip" and array.ndim:
        array = array[::-1]
    elif change == "fortran":
        array = np.asfortranarray(array)
    elif change == "broadcast":
        array = np.broadcast_to(array, (3, *array.shape))
    elif change == "read-only":
        array.flags.writeable = False
    return array


def scalars() -> Any:
    kinds = [
        "?",
        "i1",
        "u2",
        "i4",
        "u8",
        "f2",
        "f4",
        "f8",
        "c8",
        "c16",
        "S3",
        "U2",
        "M8[ms]",
        "m8[s]",
    ]
    # A signalling NaN becomes a quiet one when a float16 or float32 is widened: the only bit that
    # may change.
    return (
        st.sampled_from(kinds)
        .flatmap(lambda k: hnp.from_dtype(np.dtype(k)))
        .filter(lambda s: s.dtype.kind not in "fc" or not np.isnan(s))
    )


def of(type_: Any, values: Any) -> Any:
    return values.map(lambda v: (type_, v))


class Box:
    """A registered type around anything."""

    def __init__(self, value: Any) -> None:
        self.value = value


LEAVES = st.one_of(
    of(torch.Tensor, tensors()),
    of(np.ndarray, arrays()),
    scalars().map(lambda s: (type(s), s)),
    of(int, st.integers(-(2**63), 2**64 - 1)),
    of(float, st.floats(allow_nan=False)),
    of(str, st.text(max_size=20)),
    of(bytes, st.binary(max_size=300)),
    of(bool, st.booleans()),
    of(type(None), st.none()),
    of(slice, st.builds(slice, *[st.none() | st.integers(-99, 99)] * 3)),
)


def containers(children: Any) -> Any:
    structs = st.lists(children, max_size=4).map(as_struct)
    tuples = st.lists(children, min_size=1, max_size=4).map(
        lambda pairs: (tuple[tuple(t for t, _ in pairs)], tuple(v for _, v in pairs))  # type: ignore[misc]
    )
    lists = st.tuples(children, st.integers(0, 3)).map(lambda p: (list[p[0][0]], [p[0][1]] * p[1]))  # type: ignore[name-defined]
    dicts = st.tuples(children, st.lists(st.text(max_size=5), unique=True, max_size=3)).map(
        lambda p: (dict[str, p[0][0]], dict.fromkeys(p[1], p[0][1]))  # type: ignore[name-defined]
    )
    return structs | tuples | lists | dicts


def as_struct(pairs: Any) -> Any:
    fields = [(f"f{i}", pair[0]) for i, pair in enumerate(pairs)]
    type_ = msgspec.defstruct("Any", fields, array_like=len(pairs) % 2 == 0)
    return type_, type_(*[v for _, v in pairs])


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(
            equal(getattr(a, f), getattr(b, f)) for f in a.__struct_fields__
        )
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict) and type(a) is type(b):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    return same(a, b)


WIRES = st.sampled_from([bytes, bytearray, lambda f: memoryview(bytearray(f))])
ENCODERS = {threshold: MsgpackEncoder(threshold) for threshold in (0, 1, 64, 256, 1 << 40)}


@FAIR
@given(
    st.recursive(LEAVES, containers, max_leaves=8),
    st.sampled_from(sorted(ENCODERS)),
    WIRES,
    st.booleans(),
)
def test_any_nested_structure_round_trips(
    typed: Any, threshold: int, wire: Any, share: bool
) -> None:
    type_, value = typed
    encoder = ENCODERS[threshold]
    frames = [wire(f) for f in encoder.encode(value)]
    assert equal(MsgpackDecoder(type_, share_mem=share).decode(frames), value)
    buffer = bytearray(b"left over")
    again = [bytes(f) for f in encoder.encode_into(value, buffer)]
    assert again == [bytes(f) for f in frames]


RESULTS = st.recursive(
    LEAVES.map(lambda pair: pair[1]),
    lambda c: (
        st.lists(c, max_size=3)
        | st.dictionaries(st.text(max_size=4), c, max_size=3)
        | st.tuples(c, c)
    ),
    max_leaves=6,
)


@FAIR
@given(RESULTS, st.booleans(), WIRES)
def test_any_utility_result_keeps_its_types(result: Any, insecure: bool, wire: Any) -> None:
    frames = MsgpackEncoder(allow_insecure_serialization=insecure).encode(UtilityResult(result))
    decoder = MsgpackDecoder(UtilityResult, allow_insecure_serialization=insecure)
    assert equal(decoder.decode([wire(f) for f in frames]).result, result)


def boxes() -> CodecRegistry:
    registry = CodecRegistry()
    registry.register(
        Box,
        lambda box, frames: [[type(v).__name__, v] for v in box.value],
        lambda value, frames: Box([frames.convert(v, BY_NAME[name]) for name, v in value]),
    )
    return registry


BY_NAME = {"Tensor": torch.Tensor, "ndarray": np.ndarray, "Box": Box}
COMMON = (torch.float32, torch.bfloat16, torch.int8, torch.complex64)  # whose repr works
BOX = st.recursive(
    st.lists(tensors(COMMON) | arrays(), max_size=3).map(Box),
    lambda c: st.lists(c, max_size=2).map(Box),
    max_leaves=5,
)


@FAIR
@given(BOX, st.sampled_from([0, 256]), WIRES)
def test_any_registered_structure_round_trips(box: Box, threshold: int, wire: Any) -> None:
    registry = boxes()

    def unboxed(box: Any) -> Any:
        return [unboxed(v) for v in box.value] if isinstance(box, Box) else box

    frames = MsgpackEncoder(threshold, registry=registry).encode(box)
    got = MsgpackDecoder(Box, registry=registry).decode([wire(f) for f in frames])
    assert equal(unboxed(got), unboxed(box))
