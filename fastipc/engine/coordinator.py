"""The coordinator of several engines: a process that knows their loads, and begins and ends waves.

It binds an XPUB to the front ends, an XPUB to the engines, and a PULL for the engines' reports.
Loads go out when they have changed, at most every 50 ms. In a group whose engines step together
(`EngineCore.lockstep`) a wave is the time from the first request while all rest until none has
work: the coordinator tells the engines when one begins and when it is over. A request may cross
the end of a wave: its engine then begins the next one.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import msgspec
import zmq

from ..sockets import get_open_zmq_ipc_path
from .channels import open_channel
from .intake import as_curve_client
from .protocol import (
    PROTOCOL,
    CoordinatorAddress,
    Ended,
    Exited,
    Hello,
    Loads,
    Report,
    Wave,
    decode_control,
    encode_control,
)

__all__ = ["Coordinator", "run_coordinator"]

logger = logging.getLogger("fastipc")

PUBLISH_SECONDS = 0.05
"""How often loads go out at most: an engine's step takes as long, and front ends count what they
send themselves meanwhile."""


class Coordinator:
    """What is known of the engines; does no input or output."""

    def __init__(self) -> None:
        self.reports: dict[int, Report] = {}
        self.wave = 0
        self.stepping = False
        self.changed = True

    def take(self, report: Report) -> list[Wave]:
        """A report came; returns what the engines are to be told."""
        self.reports[report.engine] = report
        self.changed = True
        if report.start and not self.stepping:
            # (an engine that was started again, or a new front end, doesn't know of past waves)
            self.wave = max(self.wave, report.wave)
            self.stepping = True
            return [Wave(self.wave, True)]
        if report.start and report.wave > self.wave:
            self.wave = report.wave
            return [Wave(self.wave, True)]
        return self._over()

    def left(self, engine: int) -> list[Wave]:
        """An engine has ended: it has no work, and is not waited for."""
        self.changed |= self.reports.pop(engine, None) is not None
        return self._over()

    def _over(self) -> list[Wave]:
        if not self.stepping or any(report.busy for report in self.reports.values()):
            return []
        over = Wave(self.wave, False)
        self.wave += 1
        self.stepping = False
        return [over]

    def loads(self) -> Loads:
        """What the front ends are told."""
        loads = [(r.engine, r.waiting, r.running) for r in self.reports.values()]
        return Loads(loads, self.wave, self.stepping)


def run_coordinator(control: str, control_key: str, host: str, ready: Any) -> None:
    """Run the coordinator in this process until the group ends. `ready` is called with its
    `CoordinatorAddress`. `host`: the address to bind, "" for ipc."""
    ctx: zmq.Context[Any] = zmq.Context()
    key = ""
    configure = None
    if control_key:
        public, secret = zmq.curve_keypair()
        key = public.decode()

        def configure(socket: Any) -> None:
            socket.curve_server = True
            socket.curve_publickey = public
            socket.curve_secretkey = secret

    def bind(kind: int) -> tuple[Any, str]:
        path = get_open_zmq_ipc_path() if not host else endpoint_of_any_port(host)
        socket = open_channel(ctx, path, kind, True, configure=configure)
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    front_ends, to_front_ends = bind(zmq.XPUB)
    engines, to_engines = bind(zmq.XPUB)
    reports, to_reports = bind(zmq.PULL)
    group = open_channel(ctx, control, zmq.DEALER, False, configure=as_curve_client(control_key))
    group.send(encode_control(Hello(PROTOCOL, os.getpid())))
    decode = msgspec.msgpack.Decoder(Report).decode
    encode = msgspec.msgpack.Encoder().encode
    state = Coordinator()
    poller = zmq.Poller()
    for socket in (front_ends, engines, reports, group):
        poller.register(socket, zmq.POLLIN)
    ready(CoordinatorAddress(to_front_ends, to_engines, to_reports, key))
    published = 0.0
    try:
        while True:
            # Without news there is nothing to wake up for.
            wait = None
            if state.changed:
                wait = max(0, round((published + PUBLISH_SECONDS - time.monotonic()) * 1000))
            ready_now = dict(poller.poll(wait))
            waves: list[Wave] = []
            if reports in ready_now:
                while (message := _receive(reports)) is not None:
                    try:
                        waves += state.take(decode(message))
                    except msgspec.MsgspecError as error:
                        logger.warning("coordinator: bad report: %s", error)
            if group in ready_now:
                while (message := _receive(group)) is not None:
                    told = decode_control(message)
                    if isinstance(told, Ended):
                        return
                    if isinstance(told, Exited):
                        waves += state.left(told.engine)
            for wave in waves:
                engines.send(encode(wave))
            if front_ends in ready_now:  # somebody new: tell all, which is once a front end
                while _receive(front_ends) is not None:
                    state.changed, published = True, 0.0
            if engines in ready_now:
                while _receive(engines) is not None:
                    if state.stepping:
                        engines.send(encode(Wave(state.wave, True)))
            if state.changed and time.monotonic() >= published + PUBLISH_SECONDS:
                front_ends.send(encode(state.loads()))
                state.changed = False
                published = time.monotonic()
    finally:
        ctx.destroy(linger=0)


def endpoint_of_any_port(host: str) -> str:
    """The path to bind at that address, with a port that the system chooses."""
    return f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"


def _receive(socket: Any) -> bytes | None:
    try:
        message: bytes = socket.recv(zmq.NOBLOCK)
        return message
    except zmq.Again:
        return None
