"""Recorded frames of the wire format, and the values they stand for."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fastipc.codec import UtilityResult

FILE = Path(__file__).parent / "data" / "msgpack_frames.json"


def load() -> list[dict[str, Any]]:
    """The cases: name, type, size_threshold, value (described as `value_of` reads it), frames."""
    cases: list[dict[str, Any]] = json.loads(FILE.read_text())
    return cases


def value_of(described: Any) -> Any:
    """The value that a description in the file stands for."""
    if isinstance(described, list):
        return [value_of(item) for item in described]
    if not isinstance(described, dict):
        return described
    if "ndarray" in described:
        data = bytes.fromhex(described["hex"])
        return np.frombuffer(bytearray(data), described["ndarray"]).reshape(described["shape"])
    if "tensor" in described:
        import torch

        data = bytearray.fromhex(described["hex"])
        dtype = getattr(torch, described["tensor"])
        if not data:
            return torch.empty(described["shape"], dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).view(described["shape"])
    if "list" in described:
        return value_of(described["list"])
    if "slice" in described:
        return slice(*described["slice"])
    if "utility" in described:
        return UtilityResult(value_of(described["utility"]))
    if "Request" in described:
        return request_type()(*map(value_of, described["Request"]))
    return described


def request_type() -> Any:
    import torch

    return msgspec.defstruct(
        "Request",
        [
            ("request_id", str),
            ("prompt_token_ids", list[int] | None),
            ("embeds", torch.Tensor | None, None),
            ("arrays", list[np.ndarray] | None, None),
            ("client_index", int, 0),
            ("priority", int, 0),
        ],
        array_like=True,
        omit_defaults=True,
    )


def type_of(name: str) -> Any:
    if name in ("tensor", "Request"):
        import torch

        return torch.Tensor if name == "tensor" else request_type()
    return {"ndarray": np.ndarray, "slice": slice, "utility": UtilityResult}[name]


def same(a: Any, b: Any) -> bool:
    """Equal in type, shape and every bit."""
    if type(a).__name__ == "Request" == type(b).__name__:
        return all(same(getattr(a, f), getattr(b, f)) for f in a.__struct_fields__)
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return (
            a.dtype == b.dtype
            and a.dtype.str == b.dtype.str
            and a.shape == b.shape
            and a.tobytes() == b.tobytes()
        )
    if isinstance(a, (np.longdouble, np.clongdouble)):
        return bool(a == b)  # a scalar's padding bytes are anything
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if type(a).__module__ == "torch":
        return a.dtype == b.dtype and a.shape == b.shape and tensor_bytes(a) == tensor_bytes(b)
    if isinstance(a, UtilityResult):
        return same(a.result, b.result)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes()
    return bool(a == b)


def tensor_bytes(tensor: Any) -> bytes:
    """The bytes of a tensor in row-major order, by a way of its own: not the one that is tested."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    size = plain.element_size()
    if not plain.numel():
        return b""
    steps = [n * size for n in plain.stride()]
    reach = size + sum(step * (n - 1) for step, n in zip(steps, plain.shape, strict=True))
    memory = np.frombuffer((ctypes.c_char * reach).from_address(plain.data_ptr()), f"V{size}", 1)
    return np.lib.stride_tricks.as_strided(memory, plain.shape, steps).tobytes()
