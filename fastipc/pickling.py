"""Objects to pieces of a message and back, by pickle protocol 5.

CPU tensors and numpy arrays leave the pickle stream: their bytes are described where they are
(:class:`fastipc._core.Piece`) and copied once, straight into shared memory; on arrival they are
views of memory that the message's receiver owns, and writable. This goes for every dtype and
layout, since nothing but dtype name, shape and order is interpreted.

Everything else is what pickle does with it, including classes that reduce themselves and what
``copyreg`` knows at the time of the call. No reducer is registered globally.
"""

from __future__ import annotations

import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ._core import Block, PicklerPool, Piece, Sink

__all__ = ["Coding", "Dump", "pickle_coding"]

# obj -> (pieces, how many of them make the first buffer), as Endpoint.send takes them
Dump = Callable[[Any], tuple[list[Any], int]]


class Coding(NamedTuple):
    """A serializer as Endpoint.use_serializer takes it."""

    dump: Dump
    load_one: Callable[[bytes], Any]
    load_many: Callable[[list[Block]], Any]
    bytes_as_they_are: bool = False


# Kinds whose bytes mean the same everywhere and whose dtype.str says all about them; 'V' is
# structured or opaque, its dtype travels as an object.
_PLAIN_KINDS = frozenset("biufcSUmM")


def _dense_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """The order of axes in which an array is C-contiguous, if it is in any; strides in elements.

    Transposed and channels-last arrays are such: they go out as one piece of memory.
    """
    axes = sorted(range(len(shape)), key=lambda a: -strides[a])
    expected = 1
    for a in reversed(axes):
        if shape[a] != 1 and strides[a] != expected:
            return None
        expected *= shape[a]
    return tuple(axes)


# ---- numpy ----------------------------------------------------------------------------------


def _array(block: Any, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    return np.ndarray(shape, dtype, block)


def _permuted(block: Any, dtype: Any, shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    dense = np.ndarray(tuple(shape[a] for a in axes), dtype, block)
    return dense.transpose(np.argsort(axes))


def _reduce_array(array: np.ndarray) -> Any:
    dtype = array.dtype
    kind = dtype.kind
    # Objects, variable-width strings and zero-width items have no bytes to send.
    if dtype.hasobject or not dtype.itemsize or (kind not in _PLAIN_KINDS and kind != "V"):
        return NotImplemented
    # A user's dtype may call itself a void of its size: then only the object itself says which.
    name = dtype.str if kind in _PLAIN_KINDS and dtype.isbuiltin != 2 else dtype
    data = array
    if kind in "mMV" or dtype.isbuiltin == 2:
        # these export no buffer (times, users' dtypes), or one that is dear to describe
        data = array.view(np.dtype((np.void, dtype.itemsize)))
    if not array.flags.forc and array.size:
        item = dtype.itemsize
        strides = array.strides
        if all(s % item == 0 for s in strides):
            axes = _dense_order(array.shape, tuple(s // item for s in strides))
            if axes is not None:
                piece = Piece.of_array(data.transpose(axes))
                return _permuted, (pickle.PickleBuffer(piece), name, array.shape, axes)
    elif array.flags.fnc:
        axes = tuple(range(array.ndim))[::-1]
        piece = Piece.of_array(data)
        return _permuted, (pickle.PickleBuffer(piece), name, array.shape, axes)
    return _array, (pickle.PickleBuffer(Piece.of_array(data)), name, array.shape)


# ---- torch ----------------------------------------------------------------------------------
# torch is never imported here: without it in the process there are no tensors to send, and a
# process that receives one imports it then.


def _tensor(
    block: Any,
    dtype: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    requires_grad: bool,
    parameter: bool,
) -> Any:
    import torch

    kind = getattr(torch, dtype)
    if len(block):
        tensor = torch.frombuffer(block, dtype=kind)
        tensor = tensor.view(shape) if strides is None else tensor.as_strided(shape, strides)
    else:
        tensor = torch.empty(shape, dtype=kind)
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


_slow_kinds_warned: set[str] = set()


def _warn_slow(tensor: Any) -> None:
    """Once for each kind of tensor that takes torch's own way, which copies several times."""
    kind = f"{type(tensor).__name__} on {tensor.device.type}, {tensor.layout}, {tensor.dtype}"
    if kind not in _slow_kinds_warned:
        _slow_kinds_warned.add(kind)
        warnings.warn(
            f"a tensor of this kind ({kind}) is sent by torch's own pickling, which copies it "
            "several times; plain dense CPU tensors are copied once",
            RuntimeWarning,
            stacklevel=5,
        )


def _reduce_tensor(torch: Any, tensor: Any) -> Any:
    parameter = type(tensor) is torch.nn.Parameter
    if (
        (type(tensor) is not torch.Tensor and not parameter)
        or tensor.device.type != "cpu"
        or tensor.layout is not torch.strided
        or tensor.is_nested  # it calls itself strided, and has no shape
        or tensor.is_quantized
        or tensor.dtype.itemsize == 0
        or tensor.__dict__  # attributes of the user's own, which torch's pickling keeps
        or tensor._backward_hooks
    ):
        _warn_slow(tensor)
        return NotImplemented
    requires_grad = tensor.requires_grad
    if requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    shape = tuple(tensor.shape)
    strides = None
    item = tensor.element_size()
    nbytes = tensor.numel() * item
    address = tensor.data_ptr()
    # The storage is what owns the memory: a tensor may be given another one at any time.
    storage = tensor.untyped_storage()
    reach = sum((n - 1) * s for n, s in zip(shape, tensor.stride(), strict=True)) + 1
    if nbytes and (tensor.storage_offset() + reach) * item > storage.nbytes():
        # its memory was taken away (sharded training does that): torch knows what to say of it
        _warn_slow(tensor)
        return NotImplemented
    if nbytes == 0 or tensor.is_contiguous():
        piece = Piece.of_memory(address, nbytes, storage)
    elif _dense_order(shape, tensor.stride()) is not None:
        piece = Piece.of_memory(address, nbytes, storage)
        strides = tensor.stride()
    else:
        piece = Piece.of_strided(address, item, shape, tensor.stride(), storage)
    # "torch.float32" and so on; the name after the dot is an attribute of the module
    dtype = str(tensor.dtype)[6:]
    return _tensor, (pickle.PickleBuffer(piece), dtype, shape, strides, requires_grad, parameter)


# ---- the serializer -------------------------------------------------------------------------

_ndarray = np.ndarray
_modules = sys.modules


# pickle asks for each object that isn't of an exact built-in type.
def _reducer_override(obj: Any) -> Any:
    if type(obj) is _ndarray:
        return _reduce_array(obj)
    torch = _modules.get("torch")
    # (a module that is only half imported has no tensors yet)
    if torch is not None and isinstance(obj, getattr(torch, "Tensor", ())):
        return _reduce_tensor(torch, obj)
    return NotImplemented


class _Pickler(pickle.Pickler):
    """pickle.Pickler that takes arrays and tensors out of band."""

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink, 5, buffer_callback=sink.buffer)
        # of the instance: a method of the class would be bound anew for every message
        self.reducer_override = _reducer_override  # type: ignore[method-assign]


def _load_many(message: list[Block]) -> Any:
    return pickle.loads(message[0], buffers=message[1:])


def pickle_coding() -> Coding:
    """Objects by pickle. Loading runs whatever code a pickle names."""
    return Coding(PicklerPool(_Pickler).dump, pickle.loads, _load_many, True)
