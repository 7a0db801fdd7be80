"""The parts of the codec that are not on its hot path: types, registry, type information, rare
tensors.

`_codec` imports this module and nothing here imports `_codec`.
"""

from __future__ import annotations

import ctypes
import enum
import operator
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from .errors import DecodeError, IPCError

if TYPE_CHECKING:
    import torch

EXT_PICKLE = 1
EXT_CLOUDPICKLE = 2
EXT_RAW = 3

MAX_NDIM = 64
"""Dimensions of a tensor or array that travels: numpy's own limit."""

INSECURE_HINT = (
    "set FASTIPC_ALLOW_INSECURE_SERIALIZATION=1 or pass allow_insecure_serialization=True"
)


class InsecureDecodeError(DecodeError, TypeError):
    """A peer sent a pickle, or named a type to import, and this decoder does not accept that."""


class UtilityResult:
    """Marks the result of a utility call, whose type the receiver doesn't know beforehand.

    The types of what is inside travel with it (see `MsgpackEncoder`), so that `result` comes back
    as it was.
    """

    __slots__ = ("result",)

    def __init__(self, result: Any = None) -> None:
        self.result = result

    def __repr__(self) -> str:
        return f"UtilityResult({self.result!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UtilityResult) and bool(self.result == other.result)

    __hash__ = None  # type: ignore[assignment]


class OOBTensorConsumer:
    """Takes tensors out of messages while they are encoded; subclass it and override `__call__`."""

    def __call__(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        """Take `tensor` (of at least the size threshold), or leave it to the encoder.

        Returns:
            A map of msgpack-able values with which the provider at the other end finds the tensor,
            or None: the tensor then travels in a frame as usual.
        """
        raise NotImplementedError

    def new_message(self) -> None:
        """Called before each message is encoded, in the thread that encodes it."""


OOBTensorProvider = Callable[[str, tuple[int, ...], dict[str, Any]], Any]
"""`provider(dtype name, shape, placeholder map) -> torch.Tensor`, the receiving half of an
`OOBTensorConsumer`."""


class FrameWriter(Protocol):
    """The auxiliary frames of the message being encoded; valid during the call it is handed to."""

    def append(self, buffer: Any) -> int:
        """Add a contiguous buffer as a frame of its own, borrowed until sent, and return its
        index."""
        ...


class FrameReader(Protocol):
    """The auxiliary frames of the message being decoded; valid during the call it is handed to.

    Each frame is handed out once, so that no two objects share memory.
    """

    def buffer(self, index: object) -> memoryview:
        """The frame with this index, as bytes. Raises DecodeError if there is none."""
        ...

    def convert(self, value: object, type: Any) -> Any:
        """What `value` is as `type`: any type that a decoder accepts, tensors, arrays and Structs
        included."""
        ...


EncodeFn = Callable[[Any, Any], Any]
DecodeFn = Callable[[Any, Any], Any]

# What msgspec encodes without asking: an encode function for these would never run.
_NATIVE = (
    dict,
    list,
    tuple,
    set,
    frozenset,
    str,
    bytes,
    bytearray,
    memoryview,
    enum.Enum,
    msgspec.Struct,
)
_NATIVE_EXACT = (int, float, bool, type(None))
_NATIVE_MARKS = ("__dataclass_fields__", "__attrs_attrs__", "__struct_fields__")


class CodecRegistry:
    """The user's own types: how to encode and decode each, and which ones a `UtilityResult` may
    name.

    Registering is for start-up: do it in both processes before the first message. Reading is thread
    safe. A forked or spawned child has what the modules it imported registered.
    """

    def __init__(self) -> None:
        self._by_type: dict[type, tuple[EncodeFn, DecodeFn]] = {}
        self._by_name: dict[tuple[str, str], type] = {}

    def register(self, cls: type, encode: EncodeFn, decode: DecodeFn) -> None:
        """Carry objects of `cls` and of its subclasses.

        Args:
            cls: the type; fields of this type are decoded by `decode`.
            encode: `encode(obj, frames: FrameWriter)` returns what to send instead: anything the
                encoder accepts, tensors and arrays included. Large buffers may go out as
                `frames.append(buffer)`.
            decode: `decode(value, frames: FrameReader)` gets that value as plain lists, dicts,
                strings and numbers, and returns the object; `frames.convert(value, type)` brings
                back tensors, arrays and Structs. The value comes from a peer: what `decode` raises
                on nonsense becomes a DecodeError.

        Raises:
            TypeError: msgspec carries this type by itself (Structs, dataclasses, containers), so
                `encode` would never be asked.
        """
        native = issubclass(cls, _NATIVE) or cls in _NATIVE_EXACT or cls is UtilityResult
        if native or any(hasattr(cls, mark) for mark in _NATIVE_MARKS):
            raise TypeError(
                f"{cls.__qualname__} is carried without registration; wrap it in a type of your own"
            )
        self._by_type[cls] = (encode, decode)
        self.allow(cls)

    def allow(self, *classes: type) -> None:
        """Let a `UtilityResult` bring back objects of these types (Structs, dataclasses, enums,
        ...)."""
        for cls in classes:
            self._by_name[cls.__module__, cls.__qualname__] = cls

    def _find(self, cls: type) -> tuple[EncodeFn, DecodeFn] | None:
        found = self._by_type.get(cls)
        if found is None and self._by_type:
            for base in cls.__mro__[1:]:
                found = self._by_type.get(base)
                if found is not None:
                    break
        return found


registry = CodecRegistry()
"""The registry that encoders and decoders use unless they are given another."""

register = registry.register


# -- slices ----------------------------------------------------------------------------------------


def slice_parts(value: slice) -> tuple[int | None, ...]:
    """(start, stop, step) of a slice of integers."""
    parts = (value.start, value.stop, value.step)
    for part in parts:
        if part is not None and not hasattr(type(part), "__index__"):
            raise TypeError(f"cannot encode a slice of {type(part).__qualname__}")
    return tuple(None if part is None else operator.index(part) for part in parts)


def slice_from_parts(parts: Any) -> slice:
    """The slice that `slice_parts` took apart."""
    if not isinstance(parts, (list, tuple)) or len(parts) != 3:
        raise DecodeError("a slice is three items")
    if not all(part is None or type(part) is int for part in parts):
        raise DecodeError("a slice holds integers and None")
    return slice(*parts)


# -- utility results -------------------------------------------------------------------------------

# The types a UtilityResult may name without anybody's permission: they hold data and do nothing
# when made. They are looked up in modules that are loaded, never imported because a message says
# so.
_SAFE_NAMES = {
    "builtins": {
        "bool",
        "int",
        "float",
        "str",
        "bytes",
        "bytearray",
        "list",
        "dict",
        "tuple",
        "set",
        "frozenset",
        "slice",
    },
    "datetime": {"datetime", "date", "time", "timedelta"},
    "uuid": {"UUID"},
    "decimal": {"Decimal"},
    "torch": {"Tensor"},
    "torch.nn.parameter": {"Parameter"},
}

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


def _is_plain(value: Any) -> bool:
    cls = type(value)
    if cls is list:
        return all(map(_is_plain, value))
    if cls is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return cls in _PLAIN


def type_info(value: Any, always: bool) -> Any:
    """What travels before a utility result: None if msgpack alone brings it back, else the names of
    its types.

    A list or dict is described by a list or dict of the same shape, None by None, and anything else
    by `[module, qualified name]`. A tuple that holds more than plain values has its description as
    a third item.
    """
    return _type_info(value) if always or not _is_plain(value) else None


def _type_info(value: Any) -> Any:
    cls = type(value)
    if value is None:
        return None
    if cls is list:
        return [_type_info(item) for item in value]
    if cls is dict:
        return {key: _type_info(item) for key, item in value.items()}
    if cls is tuple and not all(map(_is_plain, value)):
        return ["builtins", "tuple", [_type_info(item) for item in value]]
    return [cls.__module__, cls.__qualname__]


def from_type_info(info: Any, value: Any, resolve: Callable[[str, str], type], convert: Any) -> Any:
    """The utility result that `type_info` described."""
    if info is None:
        return value
    if isinstance(info, dict):
        if not isinstance(value, dict) or info.keys() != value.keys():
            raise DecodeError("type information does not fit the utility result")
        return {
            key: from_type_info(info[key], item, resolve, convert) for key, item in value.items()
        }
    if not isinstance(info, list):
        raise DecodeError("malformed type information in a utility result")
    if info and isinstance(info[0], str):
        if len(info) == 3 and info[:2] == ["builtins", "tuple"]:
            return tuple(from_type_info(info[2], value, resolve, convert))
        if len(info) != 2 or not isinstance(info[1], str):
            raise DecodeError("malformed type information in a utility result")
        return convert(value, resolve(info[0], info[1]))
    if not isinstance(value, list) or len(info) != len(value):
        raise DecodeError("type information does not fit the utility result")
    return [
        from_type_info(item, part, resolve, convert) for item, part in zip(info, value, strict=True)
    ]


def resolve_type(module: str, name: str, known: CodecRegistry, insecure: bool) -> type:
    """The type that a utility result names, if the receiver accepts it."""
    found = known._by_name.get((module, name))
    if found is not None:
        return found
    loaded = sys.modules.get(module)
    if module == "numpy":
        candidate = getattr(np, name, None)
        safe = candidate is np.ndarray or (
            isinstance(candidate, type) and issubclass(candidate, np.generic)
        )
        if safe and candidate is not np.object_:
            return candidate  # type: ignore[return-value]
    elif name in _SAFE_NAMES.get(module, ()):
        if loaded is None:
            raise DecodeError(
                f"a utility result holds a {module}.{name}; import {module} before decoding it"
            )
        return getattr(loaded, name)  # type: ignore[no-any-return]
    if not insecure:
        raise InsecureDecodeError(
            f"a utility result names the type {module}.{name}, which is not known here: "
            f"registry.allow() it, or {INSECURE_HINT}"
        )
    import importlib

    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise DecodeError(f"a utility result names {module}.{name}: {error}") from error
    if not isinstance(target, type):
        raise DecodeError(f"{module}.{name} is not a type")
    return target


# -- pickle, only when switched on -----------------------------------------------------------------


def pickle_ext(obj: Any) -> msgspec.msgpack.Ext:
    """`obj` as a pickle; functions by cloudpickle, which carries their code."""
    if isinstance(obj, type(pickle_ext)):
        import cloudpickle

        return msgspec.msgpack.Ext(EXT_CLOUDPICKLE, cloudpickle.dumps(obj))
    import pickle

    return msgspec.msgpack.Ext(EXT_PICKLE, pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL))


def unpickle_ext(code: int, data: Any) -> Any:
    try:
        if code == EXT_CLOUDPICKLE:
            import cloudpickle

            return cloudpickle.loads(data)
        import pickle

        return pickle.loads(data)
    except IPCError:
        raise
    except Exception as error:
        raise DecodeError(f"a pickle in the message does not load: {error!r}") from error


# -- numpy -----------------------------------------------------------------------------------------

# The spellings of dtype.str that name plain data. The text is checked before numpy sees it: its own
# parser accepts far more, structured and object dtypes included.
_DTYPE_STR = re.compile(
    r"\|b1|\|[iu]1|[<>][iu][248]|[<>]f(?:2|4|8|12|16)|[<>]c(?:8|16|24|32)"
    r"|\|[SV][1-9][0-9]{0,8}|[<>]U[1-9][0-9]{0,7}|[<>][mM]8(?:\[[0-9]{0,9}[a-zA-Z]{1,7}\])?",
    re.ASCII,
)


def parse_dtype(text: str) -> np.dtype[Any]:
    """The dtype that `text`, the `dtype.str` of the sender's array, names."""
    if len(text) <= 32 and _DTYPE_STR.fullmatch(text):
        try:
            dtype = np.dtype(text)
        except (TypeError, ValueError):
            pass
        else:
            if dtype.str == text and not dtype.hasobject:
                return dtype
    raise DecodeError(f"not the name of an array's dtype: {text[:40]!r}")


def dtype_str(array: np.ndarray[Any, Any]) -> str | None:
    """`array.dtype.str` if that says all about the dtype, else None."""
    text = array.dtype.str
    return text if array.dtype.names is None and _DTYPE_STR.fullmatch(text) else None


def is_masked(array: np.ndarray[Any, Any]) -> bool:
    """Whether the array has a mask, which its bytes do not tell of."""
    ma = sys.modules.get("numpy.ma")
    return ma is not None and isinstance(array, ma.MaskedArray)


def scalar_value(scalar: np.generic[Any]) -> Any:
    """The plain value that a numpy scalar travels as; a 0-dim array where no plain value has all
    its bits."""
    kind = scalar.dtype.kind
    if kind in "biuSU" or (kind == "f" and scalar.dtype.itemsize <= 8):
        return scalar.item()
    return np.asarray(scalar)


def scalar_from_value(cls: type, value: Any) -> Any:
    """The numpy scalar of type `cls` that `scalar_value` sent as `value`."""
    wanted: tuple[type, ...]
    if issubclass(cls, np.bool_):
        wanted = (bool,)
    elif issubclass(cls, np.integer):
        wanted = (int,)
    elif issubclass(cls, np.floating):
        wanted = (float, int)
    elif issubclass(cls, np.str_):
        wanted = (str,)
    elif issubclass(cls, np.bytes_):
        wanted = (bytes,)
    else:
        wanted = ()
    if type(value) in wanted:
        try:
            with np.errstate(over="ignore"):
                result = cls(value)
        except (OverflowError, ValueError) as error:
            raise DecodeError(f"{str(value)[:40]} does not fit {cls.__name__}") from error
        if result.item() == value or value != value:
            return result
    raise DecodeError(f"{str(value)[:40]!r} is not a {cls.__name__}")


# -- torch -----------------------------------------------------------------------------------------

# name: (DLPack type code, bits, lanes), or None where the two have no common name for it.
TORCH_DTYPES: dict[str, tuple[int, int, int] | None] = {
    "bool": (6, 8, 1),
    "uint8": (1, 8, 1),
    "uint16": (1, 16, 1),
    "uint32": (1, 32, 1),
    "uint64": (1, 64, 1),
    "int8": (0, 8, 1),
    "int16": (0, 16, 1),
    "int32": (0, 32, 1),
    "int64": (0, 64, 1),
    "float16": (2, 16, 1),
    "bfloat16": (4, 16, 1),
    "float32": (2, 32, 1),
    "float64": (2, 64, 1),
    "complex32": (5, 32, 1),
    "complex64": (5, 64, 1),
    "complex128": (5, 128, 1),
    "float8_e4m3fn": (10, 8, 1),
    "float8_e4m3fnuz": (11, 8, 1),
    "float8_e5m2": (12, 8, 1),
    "float8_e5m2fnuz": (13, 8, 1),
    "float8_e8m0fnu": (14, 8, 1),
    "float4_e2m1fn_x2": None,
    "bits8": None,
    "bits16": None,
    "bits1x8": None,
    "bits2x4": None,
    "bits4x2": None,
    **{f"{sign}int{bits}": None for sign in ("", "u") for bits in range(1, 8)},
}


def describe_tensor(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], int]:
    """(dtype name, shape, bytes) of a tensor.

    Raises:
        TypeError: the tensor is more than its bytes (sparse, quantized, nested) or has none (meta).
    """
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    if name not in TORCH_DTYPES:
        raise TypeError(
            f"cannot encode a tensor of dtype {name}: its bytes are not all there is to it"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise TypeError(
            f"cannot encode a tensor of layout {tensor.layout}; convert it with .to_dense() first"
        )
    if tensor.device.type == "meta":
        raise TypeError("cannot encode a tensor on the meta device: it has no data")
    if tensor.ndim > MAX_NDIM:
        raise TypeError(f"cannot encode a tensor of {tensor.ndim} dimensions; {MAX_NDIM} at most")
    return name, tuple(tensor.shape), tensor.numel() * tensor.element_size()


def tensor_memory(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Where the bytes of a tensor are in row-major order, and the tensor (a copy, where one is
    needed) that they belong to."""
    import torch

    plain = tensor.detach()
    if plain.device.type != "cpu":
        plain = plain.cpu()
    if plain.is_conj():
        plain = plain.resolve_conj()
    if plain.is_neg():
        plain = plain.resolve_neg()
    if not plain.is_contiguous():
        if TORCH_DTYPES[str(plain.dtype).removeprefix("torch.")] is None:
            # torch moves these about, but does not copy them.
            plain = plain.view(torch.uint8 if plain.element_size() == 1 else torch.int16)
        plain = plain.contiguous()
    return plain.data_ptr(), plain


def tensor_from_buffer(name: str, shape: list[int], buffer: Any, share: bool) -> torch.Tensor:
    """A tensor over `buffer` (`share`, which needs writable and aligned memory), or over a copy of
    it."""
    import torch

    dtype: torch.dtype | None = getattr(torch, name, None) if name in TORCH_DTYPES else None
    if dtype is None:
        raise DecodeError(f"this torch has no dtype {name[:40]!r}")
    view = memoryview(buffer)
    if share and view.nbytes:
        return torch.frombuffer(view, dtype=dtype).view(shape)
    tensor = torch.empty(shape, dtype=dtype)
    if view.nbytes:
        ctypes.memmove(tensor.data_ptr(), bytes(view), view.nbytes)
    return tensor


def tensor_itemsize(name: str) -> int:
    """Bytes of one element of this dtype; 0 if this torch doesn't have it."""
    import torch

    dtype = getattr(torch, name, None) if name in TORCH_DTYPES else None
    return dtype.itemsize if isinstance(dtype, torch.dtype) else 0
