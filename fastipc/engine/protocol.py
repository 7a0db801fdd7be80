"""What front ends, engine cores, the coordinator and who launched them say to each other.

Four channels, all ZMQ, all msgpack by `fastipc.codec` (so a peer can't make anybody run code):

- requests: a ROUTER that the front end binds, a DEALER of each engine, whose identity is the
  engine's index as 2 bytes, little-endian. Down go a type frame and a message (`Request`,
  `Aborts`, ...) with a frame for each tensor; up goes `Ready`, whenever the connection is made.
- outputs: a PULL that the front end binds, a PUSH of each engine: `Outputs`, or ENGINE_CORE_DEAD
  and `Dead`.
- control: a ROUTER of who launched the engines, a DEALER of each engine and front end: who is
  where, and who has ended.
- loads and waves, with several engines: see coordinator.py.

A connection that is made again is not a delivery: what was under way on the old one may be lost.
So each has an epoch, which the engine counts and `Ready` tells; an engine that is started again
begins above its predecessor's, whose outputs may still be on the way. The engine drops the requests
of a front end whose connection was lost; the front end fails what it had sent in an earlier epoch.
A second request with the same id is ignored, and an abort may come twice.

Bounded memory: outputs are numbered in an epoch, and the front end says up to which it has taken
them (`Credit`). An engine never has more than a window of bytes on the way to one front end.
"""

from __future__ import annotations

import base64
from typing import Any, Generic, TypeVar

import msgspec

from ..errors import HandleMismatch

PROTOCOL = 2
"""Changes whenever a message changes its meaning."""

# The type frame of what goes to an engine.
ADD = b"\x00"
ABORT = b"\x01"
START_DP_WAVE = b"\x02"
UTILITY = b"\x03"
CREDIT = b"\x04"
PING = b"\x05"

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"

MESSAGE_COST = 256
"""Bytes that a message on the way costs beside its frames: ZMQ's own, in both processes."""

RequestT = TypeVar("RequestT")
OutputT = TypeVar("OutputT")


def identity(engine: int) -> bytes:
    """What a ROUTER calls an engine."""
    return engine.to_bytes(2, "little")


# -- requests: front end to engine -----------------------------------------------------------------


class Request(msgspec.Struct, Generic[RequestT], array_like=True):
    """ADD. `wave`: the latest the front end knows of."""

    wave: int
    request: RequestT


class Aborts(msgspec.Struct, array_like=True):
    """ABORT: these requests are wanted no more."""

    request_ids: list[str]


class StartWave(msgspec.Struct, array_like=True):
    """START_DP_WAVE: all engines step together from now on, if they don't already."""

    wave: int


class Call(msgspec.Struct, array_like=True):
    """UTILITY. `arguments`: a UtilityResult of [args, kwargs], which is decoded by itself with the
    frames of the message: what can't be decoded fails this call and nothing else."""

    call_id: int
    method: str
    arguments: msgspec.Raw


class Credit(msgspec.Struct, array_like=True):
    """CREDIT: the outputs of this epoch up to this number were taken."""

    epoch: int
    number: int


class Ready(msgspec.Struct, array_like=True):
    """The engine's first word on a connection.

    Attributes:
        protocol: PROTOCOL of the engine.
        engine: its index.
        epoch: of the connection.
        pid, host, boot_id: its process.
        window: bytes of outputs that may be on the way without having been taken.
        lockstep: `EngineCore.lockstep`.
        info: what `EngineCore.info()` returned, in plain msgpack types.
    """

    protocol: int
    engine: int
    epoch: int
    pid: int
    host: str
    boot_id: str
    window: int
    lockstep: bool
    info: Any = None


def request_id_in(encoded: Any, of: Any, item: int | None = None) -> str | None:
    """The id in a request or an output that can't be decoded as the Struct that it should be, if it
    can be made out; `item` is its place, if `encoded` is a list that it is in."""
    at = of.__struct_fields__.index("request_id")
    try:
        found = msgspec.msgpack.decode(encoded)
        if item is not None:
            found = found[item]
        if isinstance(found, dict):
            found = found[of.__struct_encode_fields__[at]]
        else:
            # A tag comes before the fields.
            found = found[at + (of.__struct_config__.tag is not None)]
    except Exception:
        return None
    return found if isinstance(found, str) else None


# -- outputs: engine to front end ------------------------------------------------------------------


class Failure(msgspec.Struct, array_like=True):
    """A request that the engine gave up. `kind` is the name of an exception. `request_id` is "" if
    it can't tell which it was."""

    request_id: str
    kind: str
    message: str
    traceback: str = ""


class Result(msgspec.Struct, array_like=True):
    """Of a utility call: `result` is a UtilityResult, decoded by itself as `Call.arguments` is;
    `failure` says why there is none. At most one in a message comes with frames."""

    call_id: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    failure: Failure | None = None


class Outputs(msgspec.Struct, Generic[OutputT], array_like=True, omit_defaults=True):
    """What one or more steps made for one front end.

    Attributes:
        engine: its index.
        epoch, number: of this message; numbers begin at 1 in each epoch.
        outputs: in order.
        stamps: for each output that is its request's first: its index here, and when the request
            was decoded, was handed to the core, and when the step that made the output began and
            ended. Nanoseconds of CLOCK_MONOTONIC of the engine's host.
        sent: when the output thread took this up, on the same clock.
        failures, results: see there.
        aborted: requests whose abort the engine has seen.
        report: histograms of the engine, now and then (see `stages`).
    """

    engine: int
    epoch: int
    number: int
    outputs: list[OutputT]
    sent: int
    stamps: list[tuple[int, int, int, int, int]] = []
    failures: list[Failure] = []
    results: list[Result] = []
    aborted: list[str] = []
    report: dict[str, Any] | None = None


class Dead(msgspec.Struct, array_like=True):
    """ENGINE_CORE_DEAD: the last word of the engine that process `pid` is."""

    engine: int
    reason: str
    pid: int


# -- control ---------------------------------------------------------------------------------------


class FrontEnd(msgspec.Struct, array_like=True):
    """Where a front end listens. `key` is its CURVE key, "" when it uses none."""

    index: int
    requests: str
    outputs: str
    key: str = ""


class CoordinatorAddress(msgspec.Struct, array_like=True):
    """Where the coordinator listens: for front ends, for engines, and for reports."""

    front_ends: str
    engines: str
    reports: str
    key: str = ""


class Hello(msgspec.Struct, tag="hello"):
    """An engine's or a front end's first word to who launched the engines."""

    protocol: int
    pid: int
    engine: int | None = None
    front_end: FrontEnd | None = None


class Welcome(msgspec.Struct, tag="welcome"):
    """The answer to Hello: also sent again to engines when a front end comes."""

    engines: list[int]
    front_ends: list[FrontEnd]
    coordinator: CoordinatorAddress | None = None
    refused: str = ""


class Exited(msgspec.Struct, tag="exited"):
    """An engine, which was process `pid`, ended, and won't be started again if `final`."""

    engine: int
    reason: str
    exitcode: int | None
    final: bool
    pid: int


class Joined(msgspec.Struct, tag="joined"):
    """One more engine is being started."""

    engine: int


class Uncoordinated(msgspec.Struct, tag="uncoordinated"):
    """The coordinator has ended: the loads that it told are old."""


class Ended(msgspec.Struct, tag="ended"):
    """Who launched the engines ends them, and this group. `reason` says why, if not because it was
    told to."""

    reason: str = ""


Control = Hello | Welcome | Exited | Joined | Uncoordinated | Ended

encode_control = msgspec.msgpack.Encoder().encode
decode_control = msgspec.msgpack.Decoder(Control).decode


# -- loads and waves -------------------------------------------------------------------------------


class Report(msgspec.Struct, array_like=True):
    """Engine to coordinator, when something changed.

    Attributes:
        engine: its index.
        waiting, running: requests.
        wave: the wave that the engine is in, or waits for the start of.
        busy: it has work.
        start: it begins this wave.
    """

    engine: int
    waiting: int
    running: int
    wave: int
    busy: bool
    start: bool = False


class Loads(msgspec.Struct, array_like=True):
    """Coordinator to front ends. `loads`: (engine, waiting, running)."""

    loads: list[tuple[int, int, int]]
    wave: int
    stepping: bool


class Wave(msgspec.Struct, array_like=True):
    """Coordinator to engines: this wave begins, or is over."""

    wave: int
    begins: bool


# -- the address of it all -------------------------------------------------------------------------


class ClientSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a front end needs to reach engines. Small and immutable; pickles, and encodes as
    msgpack or JSON. Whoever holds it can send requests and read outputs: keep it like a password.

    Attributes:
        client_index: of the front end: each has its own.
        control: where who launched the engines listens.
        control_key: its CURVE key, "" when it uses none (ipc). Not shown by repr.
        request_type, output_type: how to import the engine's types, "module:name".
        host: the address that the front end listens at, "" for ipc.
        secure: whether it encrypts (TCP only).
        max_in_flight: how many requests it may have under way.
        protocol: PROTOCOL of who launched them.
    """

    client_index: int
    control: str
    control_key: str = ""
    request_type: str = ""
    output_type: str = ""
    host: str = ""
    secure: bool = True
    max_in_flight: int = 4096
    protocol: int = PROTOCOL

    def to_str(self) -> str:
        """The spec as one printable word (URL-safe base64)."""
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode()

    @classmethod
    def from_str(cls, text: str) -> ClientSpec:
        """What to_str made. Raises HandleMismatch when text isn't that."""
        try:
            return msgspec.msgpack.decode(base64.urlsafe_b64decode(text), type=cls)
        except (ValueError, msgspec.MsgspecError) as error:
            raise HandleMismatch(
                f"this is not a spec as ClientSpec.to_str makes it: {error}"
            ) from None

    def __repr__(self) -> str:
        shown = (
            f"{name}={getattr(self, name)!r}"
            for name in self.__struct_fields__
            if name != "control_key"
        )
        return f"ClientSpec({', '.join(shown)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ClientSpec.from_str, (self.to_str(),)
