"""What a peer may send: nothing but a right value or a DecodeError, and nothing else happens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fastipc.codec import MsgpackDecoder
from fastipc.errors import DecodeError

torch = pytest.importorskip("torch")
NIGHTLY = os.environ.get("FASTIPC_NIGHTLY") == "1"
RAW = msgspec.msgpack.encode
EXT = msgspec.msgpack.Ext

HUGE = [2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]

SHAPES: list[Any] = [
    # Times 4 bytes these are 32 in 64-bit arithmetic, just what the frame holds.
    [2**62 + 8],
    [2, 2**61 + 4],
    [2**31, 2**31, 2, 2 + 2**60],
    [-1],
    [2, -4],
    *[[n] for n in HUGE],
    [2**32, 2**32],
    [2**21, 2**21, 2**21],
    [0, 2**63],
    [2**62, 0, 2**62],
    [1] * 65,
    [1] * 5000,
    [8, 8, 8],
    [7],
    [9],
    [True],
    [1.0],
    ["8"],
    [None],
    [[8]],
    None,
    "8",
    8,
    {},
    {"0": 8},
    b"8",
]

DATA: list[Any] = [
    0,
    -1,
    2,
    3,
    *HUGE,
    True,
    1.0,
    None,
    "1",
    [],
    [1],
    EXT(3, b""),
    EXT(3, b"\0" * 31),
    EXT(3, b"\0" * 33),
    b"",
    b"\0" * 31,
    EXT(1, b"\0" * 32),
    EXT(2, b"\0" * 32),
    EXT(4, b"\0" * 32),
    EXT(-1, b"\0" * 32),
    EXT(127, b""),
    {},
    {"sender_id": "x"},
]

NAMES: list[Any] = [
    "",
    "float",
    "double",
    "float33",
    "torch.float32",
    "Tensor",
    "load",
    "__class__",
    "float32\0",
    "qint8",
    "O",
    "|O",
    "|O8",
    "O8",
    "<f4,<f4",
    "f4,f4",
    "(2,3)f4",
    "<f3",
    "<f400",
    "|S0",
    "|V0",
    "<U0",
    "|S99999999999",
    "<U9999999999",
    "{'names':['a'],'formats':['O']}",
    "<M8[xx]",
    "<M8[generic]",
    "M8[s][s]",
    "x" * 100_000,
    "\ud7ff",
    None,
    5,
    [],
    ["<f4"],
    b"<f4",
    {},
    "=f4",
    "f4",
    "T",
    "|T16",
    "float32 ",
    "<f4 ",
    "<f4\n",
]


@pytest.mark.parametrize(
    "type", [torch.Tensor, np.ndarray, np.float32, torch.nn.Parameter, np.matrix]
)
def test_every_part_of_a_tensor_out_of_range(type: Any) -> None:
    name = "float32" if issubclass(type, torch.Tensor) else "<f4"
    decoder = MsgpackDecoder(type)
    good = [
        RAW([name, [] if type is np.float32 else [2, 4], 1]),
        b"\0" * (4 if type is np.float32 else 32),
    ]
    decoder.decode(good)
    messages: list[Any] = [[name, shape, 1] for shape in SHAPES]
    messages += [[name, [2, 4], data] for data in DATA]
    messages += [[n, [2, 4], 1] for n in NAMES]
    messages += [
        [],
        [name],
        [name, [2, 4]],
        [name, [2, 4], 1, 1],
        None,
        3,
        "x",
        b"x",
        {},
        {"a": 1},
        [[]],
        [[name, [2, 4], 1]],
    ]
    for message in messages:
        for frames in ([RAW(message), b"\0" * 32], [RAW(message), bytearray(32)], [RAW(message)]):
            if type is np.float32 and isinstance(message, (int, float)):
                continue  # a number is a fine float32
            with pytest.raises(DecodeError):
                decoder.decode(frames)
    decoder.decode(good)


@pytest.mark.parametrize("type", [torch.Tensor, np.ndarray])
def test_frames_of_the_wrong_size_missing_or_used_twice(type: Any) -> None:
    name = "float32" if type is torch.Tensor else "<f4"
    decoder = MsgpackDecoder(list[type])
    one = [name, [8], 1]
    for frames in ([b""], [b"", b""], [b"\0" * 31], [b"\0" * 33], [], [b"\0" * 4]):
        with pytest.raises(DecodeError):
            decoder.decode([RAW([one]), *frames])
    with pytest.raises(DecodeError, match="twice"):
        decoder.decode([RAW([one, one]), b"\0" * 32])
    with pytest.raises(DecodeError):
        decoder.decode([RAW([one]), np.zeros(32, np.uint8)[::2]])
    assert len(decoder.decode([RAW([one]), b"\0" * 32, b"never referred to"])) == 1


def test_the_main_frame_is_nobodys_data() -> None:
    for type, name in ((torch.Tensor, "uint8"), (np.ndarray, "|u1")):
        size = len(RAW([name, [100], 0]))
        main = RAW([name, [size], 0])
        assert len(main) == size
        for frames in ([main], [main, b"x"], [bytearray(main), b"x"]):
            with pytest.raises(DecodeError):
                MsgpackDecoder(type).decode(frames)


def test_text_that_is_none() -> None:
    for order, bad in (("<", b"\0\0\x11\0"), (">", b"\0\x11\0\0"), ("<", b"\xff" * 4)):
        for data in (EXT(3, bad * 2), 1):
            with pytest.raises(DecodeError):
                MsgpackDecoder(np.ndarray).decode([RAW([order + "U2", [1], data]), bad * 2])


def test_deep_and_truncated_structures() -> None:
    for main in (
        b"\x91" * 100_000,
        b"\x81\xa0" * 50_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x03",
        b"\xc6\xff\xff\xff\xff",
        b"",
        b"\xc1",
        b"\xa2\xff\xff",
        b"\x01\x01",
        b"\xd4\x03",
        b"\x93\xa3<f4\x91\x01",
    ):
        for type in (None, torch.Tensor, np.ndarray, list[np.ndarray]):
            with pytest.raises(DecodeError):
                MsgpackDecoder(type).decode(main)


@pytest.mark.timeout(7200 if NIGHTLY else 120)
@pytest.mark.parametrize("seed", range(4 if NIGHTLY else 2))
@pytest.mark.parametrize("target", ["codec", "words"])
def test_fuzz(target: str, seed: int) -> None:
    count = 250_000 if NIGHTLY else 10_000
    fuzz = Path(__file__).with_name(f"fuzz_{target}.py")
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "error", str(fuzz), str(count), str(seed)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
