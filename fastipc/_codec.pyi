from collections.abc import Sequence
from typing import Any, Generic, TypeVar, overload

from typing_extensions import disjoint_base

from ._codec_types import CodecRegistry, OOBTensorConsumer, OOBTensorProvider

_T = TypeVar("_T")

@disjoint_base
class MsgpackEncoder:
    size_threshold: int
    oob_tensor_consumer: OOBTensorConsumer | None
    insecure: bool
    registry: CodecRegistry
    def __init__(
        self,
        size_threshold: int | None = None,
        oob_tensor_consumer: OOBTensorConsumer | None = None,
        *,
        allow_insecure_serialization: bool | None = None,
        registry: CodecRegistry | None = None,
    ) -> None: ...
    def encode(self, obj: Any, /) -> list[Any]: ...
    def encode_into(self, obj: Any, buffer: bytearray) -> list[Any]: ...

@disjoint_base
class MsgpackDecoder(Generic[_T]):
    share_mem: bool
    oob_tensor_provider: OOBTensorProvider | None
    insecure: bool
    registry: CodecRegistry
    @overload
    def __init__(
        self: MsgpackDecoder[Any],
        type: None = None,
        share_mem: bool = True,
        oob_tensor_provider: OOBTensorProvider | None = None,
        *,
        allow_insecure_serialization: bool | None = None,
        registry: CodecRegistry | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self: MsgpackDecoder[_T],
        type: type[_T],
        share_mem: bool = True,
        oob_tensor_provider: OOBTensorProvider | None = None,
        *,
        allow_insecure_serialization: bool | None = None,
        registry: CodecRegistry | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self: MsgpackDecoder[Any],
        type: Any = None,
        share_mem: bool = True,
        oob_tensor_provider: OOBTensorProvider | None = None,
        *,
        allow_insecure_serialization: bool | None = None,
        registry: CodecRegistry | None = None,
    ) -> None: ...
    def decode(self, frames: Sequence[Any] | bytes | bytearray | memoryview, /) -> _T: ...

def _set_direct(wanted: bool) -> bool: ...
