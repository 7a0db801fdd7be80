"""The engine's input thread: takes requests in, decoded, and keeps the connections.

It owns the control DEALER, a DEALER for each front end, the monitors of their connections, and the
subscription to the coordinator.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from ..codec import MsgpackDecoder, UtilityResult
from ..errors import DecodeError
from ..hostinfo import boot_id, host_name
from ..keeper import Wake
from ..remote_end import curve_key_pair
from ..sockets import close_sockets
from .channels import open_channel
from .outbox import Outbox
from .protocol import (
    ABORT,
    ADD,
    CREDIT,
    PING,
    PROTOCOL,
    START_DP_WAVE,
    UTILITY,
    Aborts,
    Call,
    CoordinatorAddress,
    Credit,
    Ended,
    FrontEnd,
    Hello,
    Ready,
    Request,
    StartWave,
    Wave,
    Welcome,
    decode_control,
    encode_control,
    identity,
    request_id_in,
)

logger = logging.getLogger("fastipc")

_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
# As ints, which cost a fraction of what pyzmq's enum types do.
EVENTS, RCVMORE = int(zmq.EVENTS), int(zmq.RCVMORE)
POLLIN, NOBLOCK = int(zmq.POLLIN), int(zmq.NOBLOCK)
# Messages that are taken from one socket before the others are looked at.
_AT_ONCE = 256


def as_curve_client(server_key: str) -> Callable[[Any], None] | None:
    """What makes a socket one that encrypts, towards the holder of that key; None for ""."""
    if not server_key:
        return None
    public, secret = curve_key_pair()

    def configure(socket: Any) -> None:
        socket.curve_serverkey = server_key.encode()
        socket.curve_publickey = public
        socket.curve_secretkey = secret

    return configure


def keep_alive(socket: Any) -> None:
    """Have the kernel probe an idle TCP connection: a host that vanished is noticed within half a
    minute, while a process that is stopped still has a kernel that answers."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 4)


class _Peer:
    """The connection to one front end."""

    def __init__(self, where: FrontEnd) -> None:
        self.where = where
        self.epoch = 0
        self.connected = False
        self.requests: Any = None
        self.monitors: list[tuple[Any, Any]] = []  # (the socket that is watched, the reader)


class Intake(threading.Thread):
    """Puts into `inbox` what the engine's loop is to do:
    ("add", client, (received, wave, request)), ("abort", client, ids),
    ("call", client, (call id, method, [args, kwargs])), ("gone", client, None),
    ("refuse", client, (request id, error)), ("refuse_call", client, (call id, error)),
    ("wave", 0, Wave), ("start_wave", client, wave), ("stop", 0, reason),
    ("fail", 0, error) when it has failed itself.
    """

    def __init__(
        self,
        engine: int,
        control: str,
        control_key: str,
        request_type: type,
        inbox: Any,
        outbox: Outbox,
        window: int,
        lockstep: bool,
        info: Any,
    ) -> None:
        super().__init__(name="fastipc-engine-input", daemon=True)
        self._engine = engine
        self._inbox = inbox
        self._outbox = outbox
        self._window = window
        self._lockstep = lockstep
        self._info = info
        self._ctx: zmq.Context[Any] = zmq.Context()
        # Descriptors and not sockets are waited for: that costs a tenth. Such a descriptor tells
        # only that something has changed, and a call that sends may take the news up. So each
        # reader goes on until there is nothing, or is called again (`_again`).
        self._poller = select.poll()
        self._sockets: dict[int, Any] = {}
        self._readers: dict[int, Callable[[], bool]] = {}
        self._again: set[int] = set()
        self._peers: dict[int, _Peer] = {}
        self._coordinator: CoordinatorAddress | None = None
        self._waves: Any = None
        self._requests: MsgpackDecoder[Request[Any]] = MsgpackDecoder(Request[request_type])  # type: ignore[valid-type]
        self._request_type = request_type
        self._calls = msgspec.msgpack.Decoder(Call)
        self._arguments: MsgpackDecoder[UtilityResult] = MsgpackDecoder(UtilityResult)
        self._aborts = msgspec.msgpack.Decoder(Aborts)
        self._credits = msgspec.msgpack.Decoder(Credit)
        self._starts = msgspec.msgpack.Decoder(StartWave)
        self._wave_decoder = msgspec.msgpack.Decoder(Wave)
        self._wake = Wake()
        self._stopping = False
        self._control = self._socket(control, zmq.DEALER, control_key, identity=identity(engine))
        self._listen(self._control, self._from_control)
        self._poller.register(self._wake.fd, select.POLLIN)
        self._control.send(encode_control(Hello(PROTOCOL, os.getpid(), engine=engine)))

    def stop(self) -> None:
        """End the thread and close its sockets. Call from another thread, once."""
        self._stopping = True
        self._wake.set()
        self.join()
        self._wake.close()
        for peer in self._peers.values():
            self._unwatch(peer)
        close_sockets(self._sockets.values())

    @property
    def context(self) -> zmq.Context[Any]:
        return self._ctx

    def _socket(
        self,
        path: str,
        kind: int,
        key: str,
        watch: Callable[[Any], None] | None = None,
        **options: Any,
    ) -> Any:
        """A connected socket. `watch` is called before it connects: what happens at once is not
        to be missed."""
        configure = as_curve_client(key)

        def prepare(socket: Any) -> None:
            # A peer that is not there yet, or not any more, is looked for ten times a second.
            socket.setsockopt(zmq.RECONNECT_IVL, 100)
            if path.startswith("tcp:"):
                keep_alive(socket)
            if configure is not None:
                configure(socket)
            if watch is not None:
                watch(socket)

        return open_channel(self._ctx, path, kind, False, configure=prepare, **options)

    def _listen(self, socket: Any, reader: Callable[[], bool]) -> None:
        """`reader` takes what has arrived, and returns whether there may be more."""
        fd = socket.FD
        self._sockets[fd] = socket
        self._readers[fd] = reader
        self._again.add(fd)
        self._poller.register(fd, select.POLLIN)

    def _forget(self, socket: Any) -> None:
        fd = socket.FD
        self._poller.unregister(fd)
        self._again.discard(fd)
        del self._readers[fd], self._sockets[fd]
        socket.close(linger=0)

    # -- the thread --------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            while not self._stopping:
                ready = [fd for fd, _ in self._poller.poll(0 if self._again else None)]
                if self._again:
                    ready += self._again.difference(ready)
                    self._again.clear()
                for fd in ready:
                    reader = self._readers.get(fd)
                    if reader is not None and reader():
                        self._again.add(fd)
        except BaseException as error:
            logger.exception("the engine's input thread failed")
            failure = RuntimeError("the engine's input thread failed")
            failure.__cause__ = error
            self._inbox.put(("fail", 0, failure))

    def _from_control(self) -> bool:
        while True:
            try:
                message = decode_control(self._control.recv(zmq.NOBLOCK))
            except zmq.Again:
                return False
            except msgspec.MsgspecError as error:
                logger.warning("engine %d: bad control message: %s", self._engine, error)
                continue
            if isinstance(message, Welcome):
                if message.refused:
                    self._inbox.put(("stop", 0, message.refused))
                for where in message.front_ends:
                    self._meet(where)
                if message.coordinator is not None and self._coordinator is None:
                    self._join_waves(message.coordinator)
            elif isinstance(message, Ended):
                self._inbox.put(("stop", 0, message.reason))

    # -- front ends --------------------------------------------------------------------------------

    def _meet(self, where: FrontEnd) -> None:
        """Connect to a front end, unless it is connected to already."""
        old = self._peers.get(where.index)
        if old is not None:
            if old.where == where:
                return
            self._inbox.put(("gone", where.index, None))
            self._unwatch(old)
            self._forget(old.requests)
        peer = self._peers[where.index] = _Peer(where)
        peer.epoch = 0 if old is None else old.epoch
        outputs = self._socket(
            where.outputs,
            zmq.PUSH,
            where.key,
            lambda socket: self._watch(peer, socket, self._outputs_event),
            linger=1000,
        )
        self._outbox.connect(where.index, outputs)
        peer.requests = self._socket(
            where.requests,
            zmq.DEALER,
            where.key,
            lambda socket: self._watch(peer, socket, self._requests_event),
            identity=identity(self._engine),
        )
        self._listen(peer.requests, lambda: self._from_front_end(peer))

    def _watch(self, peer: _Peer, socket: Any, event: Callable[[_Peer, int], None]) -> None:
        monitor = socket.get_monitor_socket(_WATCHED)

        def read() -> bool:
            while True:
                try:
                    frames = monitor.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    return False
                event(peer, parse_monitor_message(frames)["event"])

        peer.monitors.append((socket, monitor))
        self._listen(monitor, read)

    def _unwatch(self, peer: _Peer) -> None:
        """Have no more events told before their readers are closed: ZMQ's own thread would wait
        for a reader that is no more, and all connections with it.

        A socket of the outbox is among them, which is not closed yet: that happens when it is
        replaced, or after `stop`. ZMQ has a lock around monitors, so its thread needn't be asked.
        """
        for socket, monitor in peer.monitors:
            if not socket.closed:
                socket.disable_monitor()
            self._forget(monitor)
        peer.monitors.clear()

    def _requests_event(self, peer: _Peer, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            peer.connected = True
            self._begin_epoch(peer)
        elif event == zmq.EVENT_DISCONNECTED:
            peer.connected = False
            self._inbox.put(("gone", peer.where.index, None))

    def _outputs_event(self, peer: _Peer, event: int) -> None:
        # What was on the way is lost. When the front end is gone, that is told by the other.
        if event == zmq.EVENT_DISCONNECTED and peer.connected:
            self._begin_epoch(peer)

    def _begin_epoch(self, peer: _Peer) -> None:
        index = peer.where.index
        if peer.epoch:
            self._inbox.put(("gone", index, None))
        # Above those of an engine that was this one before it: milliseconds pass between starts.
        peer.epoch = peer.epoch + 1 if peer.epoch else time.time_ns() // 1_000_000
        self._outbox.epoch(index, peer.epoch)
        ready = Ready(
            PROTOCOL,
            self._engine,
            peer.epoch,
            os.getpid(),
            host_name(),
            boot_id(),
            self._window,
            self._lockstep,
            self._info,
        )
        peer.requests.send(msgspec.msgpack.encode(ready))
        self._again.add(peer.requests.FD)

    def _from_front_end(self, peer: _Peer) -> bool:
        receive = peer.requests.recv
        client = peer.where.index
        for taken in range(_AT_ONCE):
            # A message comes alone, or in a crowd: asking once whether there is a second one costs
            # a third of being told by an exception that there is none.
            if taken == 1 and not peer.requests.get(EVENTS) & POLLIN:
                return False
            try:
                kind = receive(NOBLOCK)
            except zmq.Again:
                return False
            frames: list[Any] = []
            while peer.requests.get(RCVMORE):
                # The first is small as a rule; of the others arrays are made in place.
                frames.append(receive(copy=not frames))
            try:
                self._take(client, kind, frames)
            except (DecodeError, msgspec.MsgspecError, IndexError) as error:
                logger.log(
                    logging.DEBUG if _given_up(frames or [kind]) else logging.WARNING,
                    "engine %d: front end %d sent a message that can't be decoded: %s",
                    self._engine,
                    client,
                    error,
                )

        return True

    def _take(self, client: int, kind: bytes, frames: list[Any]) -> None:
        if kind == ADD:
            try:
                message = self._requests.decode(frames)
            except Exception as error:  # of the types' own methods, too
                request_id = request_id_in(frames[0], self._request_type, 1) if frames else None
                if request_id is None and _given_up(frames):
                    raise
                self._inbox.put(("refuse", client, (request_id or "", error)))
                return
            self._inbox.put(("add", client, (time.monotonic_ns(), message.wave, message.request)))
        elif kind == CREDIT:
            credit = self._credits.decode(frames[0])
            self._outbox.credit(client, credit.epoch, credit.number)
        elif kind == ABORT:
            self._inbox.put(("abort", client, self._aborts.decode(frames[0]).request_ids))
        elif kind == UTILITY:
            call = self._calls.decode(frames[0])
            try:
                arguments = self._arguments.decode([call.arguments, *frames[1:]]).result
            except Exception as error:
                self._inbox.put(("refuse_call", client, (call.call_id, error)))
                return
            self._inbox.put(("call", client, (call.call_id, call.method, arguments)))
        elif kind == START_DP_WAVE:
            self._inbox.put(("start_wave", client, self._starts.decode(frames[0]).wave))
        elif kind != PING:
            raise DecodeError(f"unknown type frame {kind[:16]!r}")

    # -- the coordinator ---------------------------------------------------------------------------

    def _join_waves(self, where: CoordinatorAddress) -> None:
        self._coordinator = where
        self._outbox.report_to(self._socket(where.reports, zmq.PUSH, where.key))
        self._waves = self._socket(where.engines, zmq.XSUB, where.key)
        self._waves.send(b"\x01")
        self._listen(self._waves, self._from_coordinator)
        self._inbox.put(("joined", 0, None))

    def _from_coordinator(self) -> bool:
        while True:
            try:
                wave = self._wave_decoder.decode(self._waves.recv(zmq.NOBLOCK))
            except zmq.Again:
                return False
            except msgspec.MsgspecError as error:
                logger.warning("engine %d: bad message of waves: %s", self._engine, error)
                continue
            self._inbox.put(("wave", 0, wave))


def _given_up(frames: list[Any]) -> bool:
    """A sender that was interrupted ends its message with an empty frame: see send_frames. It
    knows."""
    return not frames or len(frames[-1]) == 0
