"""Objects to frames and back: msgpack for the structure, the bytes of tensors and arrays as they
are."""

from ._codec import MsgpackDecoder, MsgpackEncoder
from ._codec_types import (
    EXT_CLOUDPICKLE,
    EXT_PICKLE,
    EXT_RAW,
    CodecRegistry,
    FrameReader,
    FrameWriter,
    InsecureDecodeError,
    OOBTensorConsumer,
    OOBTensorProvider,
    UtilityResult,
    register,
    registry,
)

__all__ = [
    "EXT_CLOUDPICKLE",
    "EXT_PICKLE",
    "EXT_RAW",
    "CodecRegistry",
    "FrameReader",
    "FrameWriter",
    "InsecureDecodeError",
    "MsgpackDecoder",
    "MsgpackEncoder",
    "OOBTensorConsumer",
    "OOBTensorProvider",
    "UtilityResult",
    "register",
    "registry",
]
