"""What the codec costs, against its rivals, all of them alternating in one run.

    python bench/codec.py [--rounds N] [--json]

Rivals: plain msgspec (for what has no tensors), pickle 5, and "hooks in Python": the same wire
    format with msgspec
hooks written in Python on torch's and numpy's own functions, the usual way to do this. If vLLM is
installed, its codec takes part.

Compare figures of one run with each other only: the machine's speed changes from run to run.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from fastipc.codec import MsgpackDecoder, MsgpackEncoder

warnings.filterwarnings("ignore")


class Request(msgspec.Struct, array_like=True, omit_defaults=True):
    """A request as an API server sends it."""

    request_id: str
    prompt_token_ids: list[int] | None = None
    embeds: torch.Tensor | None = None
    tensors: list[torch.Tensor] | None = None
    arrays: list[np.ndarray] | None = None


# -- rivals ----------------------------------------------------------------------------------------


class PythonHooks:
    """The same format, with hooks in Python."""

    def __init__(self, type: Any) -> None:
        self.encoder = msgspec.msgpack.Encoder(enc_hook=self.enc_hook)
        self.decoder = msgspec.msgpack.Decoder(
            type, dec_hook=self.dec_hook, ext_hook=lambda code, data: data
        )

    def encode(self, obj: Any) -> list[Any]:
        self.frames = [b""]
        self.frames[0] = self.encoder.encode(obj)
        return self.frames

    def decode(self, frames: list[Any]) -> Any:
        self.frames = frames
        return self.decoder.decode(frames[0])

    def enc_hook(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            name, data = (
                str(obj.dtype).removeprefix("torch."),
                obj.contiguous().flatten().view(torch.uint8).numpy().data,
            )
        elif isinstance(obj, np.ndarray):
            name, data = obj.dtype.str, np.ascontiguousarray(obj).data
        else:
            raise TypeError
        if obj.nbytes < 256:
            return name, tuple(obj.shape), msgspec.msgpack.Ext(3, bytes(data))
        self.frames.append(data)
        return name, tuple(obj.shape), len(self.frames) - 1

    def dec_hook(self, type: Any, obj: Any) -> Any:
        name, shape, data = obj
        buffer = self.frames[data] if isinstance(data, int) else data
        if type is torch.Tensor:
            flat = torch.frombuffer(buffer, dtype=torch.uint8)
            flat = flat if isinstance(data, int) else flat.clone()
            return flat.view(getattr(torch, name)).view(shape)
        flat = np.frombuffer(buffer, name)
        return (flat if isinstance(data, int) else flat.copy()).reshape(shape)


class Ours:
    """fastipc's codec."""

    def __init__(self, type: Any) -> None:
        self.encode = MsgpackEncoder().encode
        self.decode = MsgpackDecoder(type).decode


class Plain:
    """msgspec alone."""

    def __init__(self, type: Any) -> None:
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode = msgspec.msgpack.Decoder(type).decode


class Pickle:
    """pickle protocol 5 with out-of-band buffers."""

    def __init__(self, type: Any) -> None:
        pass

    def encode(self, obj: Any) -> list[Any]:
        buffers: list[Any] = []
        return [pickle.dumps(obj, 5, buffer_callback=buffers.append), *buffers]

    def decode(self, frames: list[Any]) -> Any:
        return pickle.loads(frames[0], buffers=frames[1:])


def vllm_codec() -> Any:
    """vLLM's codec, if it is installed."""
    try:
        from vllm.v1 import serial_utils
    except ImportError:
        return None

    class Theirs:
        def __init__(self, type: Any) -> None:
            self.encode = serial_utils.MsgpackEncoder().encode
            self.decode = serial_utils.MsgpackDecoder(type).decode

    return Theirs


# -- measuring -------------------------------------------------------------------------------------


def once(call: Callable[[Any], Any], argument: Any, number: int) -> float:
    """Microseconds per call."""
    start = time.perf_counter()
    for _ in range(number):
        call(argument)
    return (time.perf_counter() - start) / number * 1e6


def alternate(
    rivals: dict[str, tuple[Callable[[Any], Any], Any]], number: int, rounds: int
) -> dict[str, float]:
    """Median microseconds of each, taken in turn so that a slow spell meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(rounds):
        order = list(rivals) if turn % 2 else list(reversed(rivals))
        for name in order:
            call, argument = rivals[name]
            times[name].append(once(call, argument, number))
    return {name: statistics.median(values) for name, values in times.items()}


def differences(
    rivals: dict[str, tuple[Callable[[Any], Any], Any, Any]], number: int, rounds: int
) -> dict[str, float]:
    """Median of how many microseconds longer each takes for its second argument, turn by turn."""
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(rounds):
        order = list(rivals) if turn % 2 else list(reversed(rivals))
        for name in order:
            call, without, with_ = rivals[name]
            first = once(call, without, number)
            times[name].append(once(call, with_, number) - first)
    return {name: statistics.median(values) for name, values in times.items()}


def compare(
    rivals: dict[str, Any], values: dict[str, Any], types: dict[str, Any], number: int, rounds: int
) -> Any:
    """Encode and decode time of each rival, on its form of the value."""
    coders = {name: make(types[name]) for name, make in rivals.items()}
    frames = {name: coder.encode(values[name]) for name, coder in coders.items()}
    encode = alternate({n: (c.encode, values[n]) for n, c in coders.items()}, number, rounds)
    decode = alternate({n: (c.decode, frames[n]) for n, c in coders.items()}, number, rounds)
    return {name: (encode[name], decode[name]) for name in coders}


# -- a scheduler's message, three ways -------------------------------------------------------------


class Step(msgspec.Struct, array_like=True):
    """One request in a step."""

    request_id: str
    token_ids: list[int]
    blocks: list[int]
    computed: int
    temperature: float


class Steps(msgspec.Struct, array_like=True):
    """A step as a list of objects."""

    number: int
    requests: list[Step]
    finished: list[str]


class Columns(msgspec.Struct, array_like=True):
    """The same as columns: one array per field; lists end to end with their lengths beside them."""

    number: int
    request_ids: str
    token_ids: np.ndarray
    token_counts: np.ndarray
    blocks: np.ndarray
    block_counts: np.ndarray
    computed: np.ndarray
    temperature: np.ndarray
    finished: str


def scheduler_messages() -> tuple[Any, Steps, Columns]:
    """A tuple for pickle (about 5 KB), and the same content as Structs and as columns."""
    rng = random.Random(1)
    rows = [
        (
            f"request-{n:06d}",
            [rng.randrange(128_000) for _ in range(8)],
            [rng.randrange(50_000) for _ in range(16)],
            rng.randrange(4096),
            rng.random(),
        )
        for n in range(32)
    ]
    finished = [f"request-{n:06d}" for n in range(4)]
    columns = Columns(
        7,
        "\n".join(row[0] for row in rows),
        np.array([t for row in rows for t in row[1]], np.int32),
        np.array([len(row[1]) for row in rows], np.int32),
        np.array([b for row in rows for b in row[2]], np.int32),
        np.array([len(row[2]) for row in rows], np.int32),
        np.array([row[3] for row in rows], np.int32),
        np.array([row[4] for row in rows]),
        "\n".join(finished),
    )
    return (7, rows, finished), Steps(7, [Step(*row) for row in rows], finished), columns


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rounds = options.rounds
    rng = random.Random(0)
    ids = [rng.randrange(128_000) for _ in range(512)]
    text = Request("request-1", ids)
    large = Request("request-1", ids, torch.zeros(3, 336, 336, dtype=torch.float16))
    small = Request(
        "request-1",
        ids,
        None,
        [torch.zeros(8) for _ in range(16)],
        [np.zeros(1024) for _ in range(16)],
    )
    tiny = Request("r")

    tensors: dict[str, Any] = {"fastipc": Ours, "hooks in Python": PythonHooks}
    theirs = vllm_codec()
    if theirs is not None:
        tensors["vLLM"] = theirs
    everything = {**tensors, "pickle": Pickle}
    result: dict[str, Any] = {}

    def case(
        name: str, rivals: dict[str, Any], value: Any, number: int, **special: tuple[Any, Any]
    ) -> None:
        types = dict.fromkeys(rivals, type(value))
        values = dict.fromkeys(rivals, value)
        for rival, (other_value, other_type) in special.items():
            values[rival], types[rival] = other_value, other_type
        result[name] = compare(rivals, values, types, number, rounds)

    case("tiny, no tensors", {"fastipc": Ours, "msgspec": Plain}, tiny, 20_000)
    case(
        "512 ids, no tensors",
        {"fastipc": Ours, "msgspec": Plain, **everything},
        text,
        2000,
    )
    case("512 ids + one 3x336x336 float16 tensor", everything, large, 1000)
    case("512 ids + 16 small tensors + 16 arrays of 8 KiB", everything, small, 300)
    rows, structs, columns = scheduler_messages()
    case(
        "step of 32 requests, 5 KB",
        {"structs": Ours, "columns": Ours, "msgspec on structs": Plain, "pickle": Pickle},
        structs,
        500,
        columns=(columns, Columns),
        pickle=(rows, None),
    )

    base = result["512 ids, no tensors"]
    added: dict[str, Any] = {}
    for name, value, count, number in (
        ("512 ids + one 3x336x336 float16 tensor", large, 1, 1000),
        ("512 ids + 16 small tensors + 16 arrays of 8 KiB", small, 32, 300),
    ):
        added[name] = {}
        coders = {rival: make(Request) for rival, make in tensors.items()}
        frames = {rival: (c.encode(text), c.encode(value)) for rival, c in coders.items()}
        encode = differences(
            {rival: (c.encode, text, value) for rival, c in coders.items()}, number, rounds
        )
        decode = differences(
            {rival: (c.decode, *frames[rival]) for rival, c in coders.items()}, number, rounds
        )
        for rival in coders:
            added[name][rival] = (encode[rival] / count, decode[rival] / count)
    if options.json:
        print(json.dumps({"us": result, "us added by each": added}, indent=1))
        return
    for name, table in result.items():
        print(f"\n{name}: us to encode, to decode")
        for rival, (encode, decode) in table.items():
            print(f"  {rival:20}{encode:9.3f}{decode:9.3f}")
    for name, table in added.items():
        print(f"\nadded by each tensor or array of: {name}")
        for rival, (encode, decode) in table.items():
            ours = table["fastipc"]
            print(
                f"  {rival:20}{encode:9.3f}{decode:9.3f}   fastipc is "
                f"{ours[0] / encode:.2f} and {ours[1] / decode:.2f} of it"
            )
    ratio = [ours / theirs for ours, theirs in zip(base["fastipc"], base["msgspec"], strict=True)]
    fixed = [a - b for a, b in zip(*result["tiny, no tensors"].values(), strict=True)]
    total = [sum(base[name]) for name in ("fastipc", "msgspec")]
    print(
        f"\n512 ids against plain msgspec: encode {ratio[0]:.3f}, decode {ratio[1]:.3f}, "
        f"both {total[0] / total[1]:.3f}"
    )
    print(f"fixed cost, us: encode {fixed[0]:.3f}, decode {fixed[1]:.3f}")
    step = {name: sum(times) for name, times in result["step of 32 requests, 5 KB"].items()}
    for name in ("structs", "columns"):
        print(
            f"step as {name}: {step[name] / step['pickle']:.2f} of pickle, "
            f"{step[name] / step['msgspec on structs']:.2f} of plain msgspec on structs"
        )


if __name__ == "__main__":
    main()
