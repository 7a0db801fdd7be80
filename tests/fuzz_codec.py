"""Mutated messages: each decodes to something sane or is a DecodeError. Usage: COUNT SEED"""

import random
import sys

import msgspec
import numpy as np
import torch
from fuzzing import Watch, check_growth, corpus, mutate, resident_bytes, shown

from fastipc.codec import MsgpackDecoder, MsgpackEncoder, UtilityResult, register
from fastipc.errors import DecodeError


class Inner(msgspec.Struct):
    t: list[torch.Tensor]
    n: dict[str, np.ndarray] = {}


class Box:
    def __init__(self, x):
        self.x = x


register(
    Box,
    lambda b, f: [f.append(bytes(9)), b.x],
    lambda v, f: Box((f.buffer(v[0]), f.convert(v[1], np.ndarray))),
)


class Message(msgspec.Struct, array_like=True, omit_defaults=True):
    name: str
    ids: list[int]
    one: torch.Tensor | None = None
    arrays: list[np.ndarray] = []
    inner: Inner | None = None
    where: slice | None = None
    scalar: np.float32 | None = None
    result: UtilityResult | None = None
    custom: Box | None = None


def values():
    yield Message("text", [1, 2, 70000] * 20)
    yield Message(
        "t",
        [],
        torch.zeros(3, 5, 7, dtype=torch.bfloat16),
        [np.arange(9.0), np.arange(2)],
        None,
        slice(1, 2),
    )
    yield Message(
        "d",
        [1],
        torch.zeros(2),
        [np.array(["ab", "c"]), np.zeros(400, ">i4")],
        Inner([torch.ones(100), torch.empty(0)], {"k": np.ones(3)}),
        None,
        np.float32(2),
    )
    yield Message(
        "u",
        [],
        None,
        [],
        None,
        None,
        None,
        UtilityResult([np.ones(50), (1, 2), {"x": torch.ones(1)}]),
    )
    yield Message("c", [], None, [np.ones(70)], None, None, None, None, Box(np.arange(5)))


decoder = MsgpackDecoder(Message)
untyped = MsgpackDecoder()
bases = [
    [bytes(f) for f in MsgpackEncoder(threshold).encode(v)]
    for v in values()
    for threshold in (1, 64, 1 << 30)
]
for base in bases:
    decoder.decode(base)
kept = corpus("codec")
bases += kept


def check(value, room):
    """Arrays that were made are inside of what was received."""
    stack, total = [value], 0
    while stack:
        v = stack.pop()
        if isinstance(v, torch.Tensor):
            total += v.numel() * v.element_size()
            bytes(v.reshape(-1).view(torch.uint8).numpy().data) if v.numel() else 0
            assert v.data_ptr() % min(8, v.element_size()) == 0
        elif isinstance(v, np.ndarray):
            total += v.nbytes
            v.tobytes()
            assert v.flags.aligned
        elif isinstance(v, msgspec.Struct):
            stack += [getattr(v, f) for f in v.__struct_fields__]
        elif isinstance(v, dict):
            stack += list(v.values())
        elif isinstance(v, (list, tuple)):
            stack += v
        elif isinstance(v, UtilityResult):
            stack.append(v.result)
        elif isinstance(v, Box):
            stack += list(v.x)
    assert total <= room, (total, room)


def main(count, seed):
    watch = Watch()
    rng = random.Random(seed)
    passed = refused = 0
    modules = set(sys.modules)
    before = None
    for n in range(count):
        case = kept[n] if n < len(kept) else mutate(rng, rng.choice(bases))
        received = [bytearray(f) if n % 2 else f for f in case]
        for d in (decoder, untyped):
            try:
                with watch:
                    value = d.decode(received)
                    check(value, sum(map(len, received)))
                passed += 1
            except DecodeError:
                refused += 1
            except BaseException:
                print(f"case {n} of seed {seed}: {shown(case)}", file=sys.stderr)
                raise
            value = None
        if n == count // 4:
            before = resident_bytes()
    grown = check_growth(before, 16 << 20)
    assert not watch.events, watch.events[:5]
    assert set(sys.modules) == modules, set(sys.modules) - modules
    assert refused > count // 3, (passed, refused)
    assert passed > count // 50, (passed, refused)
    print(passed, refused, grown)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
