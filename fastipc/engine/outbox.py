"""The engine's output thread: sends what steps made, and no more than is taken.

What a step made is encoded by the loop's thread before the next one begins, which may change it.
The output thread owns the PUSH sockets. Whatever is waiting when it looks goes out as one message
per front end (but what comes with frames as one of its own). When the loop's thread has nothing
else to do it does this work itself, under a lock (`put`): ZMQ sockets may change hands, but not be
used by two threads at a time.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import msgspec
import zmq

from .. import failures
from ..codec import MsgpackEncoder, UtilityResult
from ..sockets import BufferPool, PendingSend, send_frames
from .protocol import ENGINE_CORE_DEAD, MESSAGE_COST, Dead, Failure, Outputs, Report, Result

logger = logging.getLogger("fastipc")


NOBLOCK = int(zmq.NOBLOCK)

_UNSENT_BATCHES = 64
"""Steps that the core may be ahead of the output thread: enough that neither waits for the other
in turn, and few enough that outputs which nobody takes are noticed in time."""


class Taken(NamedTuple):
    """An output that was encoded when the core yielded it, or why it could not be."""

    request_id: str
    finished: bool
    encoded: msgspec.Raw
    frames: list[Any]
    failure: Failure | None = None


class Batch:
    """What a step made for one front end."""

    __slots__ = (
        "aborted",
        "encoded",
        "failures",
        "frames",
        "outputs",
        "report",
        "results",
        "stamps",
    )

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.encoded: list[tuple[int, bytes]] = []  # of outputs: how many, and the list of them
        self.frames: list[Any] = []  # of what is encoded already; nobody else has them
        self.stamps: list[tuple[int, int, int, int, int]] = []
        self.failures: list[Failure] = []
        self.results: list[Result] = []
        self.aborted: list[str] = []
        self.report: dict[str, Any] | None = None

    def encode(self, encoder: MsgpackEncoder, copy: bool) -> Iterable[str]:
        """Encode the outputs: the core may change them from now on, arrays only if `copy`.

        Returns the requests that fail, as an output of theirs can't be encoded."""
        failed: Iterable[str] = ()
        if not self.outputs:
            return failed
        try:
            main, *frames = encoder.encode(self.outputs)
        except Exception:
            failed = self._drop_what_cannot_be_encoded(encoder)
            main, *frames = encoder.encode(self.outputs)
        self.encoded.append((len(self.outputs), main))
        if frames:
            self.frames = [_kept(frame) for frame in frames] if copy else frames
        self.outputs = []
        return failed

    def all_outputs(self) -> Any:
        """The encoded outputs as one list."""
        if len(self.encoded) == 1:
            return msgspec.Raw(self.encoded[0][1])
        parts = [main[len(_list_head(count)) :] for count, main in self.encoded]
        head = _list_head(sum(count for count, _ in self.encoded))
        return msgspec.Raw(b"".join([head, *parts]))

    def _drop_what_cannot_be_encoded(self, encoder: MsgpackEncoder) -> set[str]:
        """Replace outputs that the codec refuses by failures that say so, and leave out what
        follows for the same requests, which it returns."""
        kept: list[Any] = []
        moved = {}
        failed: set[str] = set()
        for index, output in enumerate(self.outputs):
            if output.request_id in failed:
                continue
            try:
                encoder.encode(output)
            except Exception as error:
                failed.add(output.request_id)
                self.failures.append(_not_encoded(output, error))
            else:
                moved[index] = len(kept)
                kept.append(output)
        self.outputs = kept
        self.stamps = [(moved[i], r, s, b, e) for i, r, s, b, e in self.stamps if i in moved]
        return failed

    def add_result(self, encoder: MsgpackEncoder, call_id: int, result: Any) -> None:
        """Encode what a utility call returned, for a batch of its own."""
        try:
            main, *frames = encoder.encode(UtilityResult(result))
        except Exception as error:
            self.fail_call(
                call_id, error, f"the call's result can't be encoded: {failures.text(error)}"
            )
        else:
            self.results.append(Result(call_id, msgspec.Raw(main)))
            self.frames = [_kept(frame) for frame in frames]

    def fail_call(self, call_id: int, error: BaseException, message: str) -> None:
        failure = Failure("", type(error).__name__, message, failures.lines(error))
        self.results.append(Result(call_id, failure=failure))

    def fits(self, later: Batch) -> bool:
        """Whether one message can have both."""
        if self.aborted and (later.encoded or later.failures):
            return False  # these may be of a request with an id that was aborted before
        return not (self.frames and later.frames)  # the frames of each are numbered from 1

    def add(self, later: Batch) -> None:
        """Append what was made later, and fits."""
        self.frames = self.frames or later.frames
        if later.stamps:
            before = sum(count for count, _ in self.encoded)
            self.stamps += [(i + before, r, s, b, e) for i, r, s, b, e in later.stamps]
        self.encoded += later.encoded
        self.failures += later.failures
        self.results += later.results
        self.aborted += later.aborted
        if later.report is not None:
            self.report = later.report


def _kept(frame: Any) -> Any:
    """A frame as it is now, whatever its owner does with it."""
    return frame if type(frame) is bytes else bytes(frame)


def _list_head(count: int) -> bytes:
    """What msgpack begins a list of so many items with."""
    if count < 16:
        return bytes([0x90 | count])
    if count < 1 << 16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")


def _not_encoded(output: Any, error: BaseException) -> Failure:
    return Failure(
        output.request_id,
        type(error).__name__,
        f"the engine's output for it can't be encoded: {failures.text(error)}",
        failures.lines(error),
    )


class _Peer:
    """One front end's side: what is on the way to it, and what waits for its credit."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.start(0)

    def start(self, epoch: int) -> None:
        self.epoch = epoch
        self.number = 0
        self.sent: deque[tuple[int, int]] = deque()  # (number, bytes), oldest first
        self.sent_bytes = 0
        self.backlog: deque[tuple[list[Any], int, int]] = deque()  # (frames, number, bytes)
        self.backlog_bytes = 0
        self.overrun = False
        self.stall = 0  # the number of the last one
        self.limit: int | None = None  # bytes of backlog; None until the core has answered it


class Outbox(threading.Thread):
    """Thread safe: `put` and the other calls only leave word.

    `tell(what, client, number)` is called from this thread with "stall" when a front end doesn't
    take its outputs any more, "resume" when it does again, and "overrun" when too much has
    gathered. The number is that of the stall, which rises; the answer to it is `stalled`.
    """

    def __init__(self, engine: int, window: int, tell: Any, copy: bool = True) -> None:
        super().__init__(name="fastipc-engine-output", daemon=True)
        self._engine = engine
        self._window = window
        self._tell = tell
        self._copy = copy
        self._words: SimpleQueue[tuple[str, int, Any]] = SimpleQueue()
        self._bell = threading.Lock()
        self._bell.acquire()
        self._mine = threading.Lock()  # the sockets, the peers
        self._peers: dict[int, _Peer] = {}
        self.encoder = MsgpackEncoder()
        self._buffers = BufferPool()
        self._reports: Any = None
        self._stalls = itertools.count(1)
        self._room = threading.Semaphore(_UNSENT_BATCHES)
        self._linger_ms: int | None = None  # what "stop" said
        self.failed: BaseException | None = None

    # -- calls from other threads ------------------------------------------------------------------

    def put(self, client: int, batch: Batch, now: bool = False) -> Iterable[str]:
        """Hand over what a step made. One thread only calls this.

        Args:
            client: the front end that it is for.
            batch: not to be touched any more. What is in its outputs may be: they are encoded here.
            now: the caller has nothing else to do: unless there is something before it, it
                sends this itself, which saves waking the thread.

        Returns the requests that fail, as an output of theirs can't be encoded; the front end is
        told. Waits while the thread is behind: that never waits itself, so it is soon over.
        """
        failed = batch.encode(self.encoder, self._copy)
        if now and self._mine.acquire(blocking=False):
            try:
                # Words are taken out with the lock held: so all that came before is done.
                if self._words.empty():
                    peer = self._peers.get(client)
                    if peer is not None:
                        self._put(client, peer, batch)
                    return failed
            finally:
                self._mine.release()
        if self.failed is None:
            self._room.acquire()
        self._leave_word("batch", client, batch)
        return failed

    def take(self, output: Any) -> Taken:
        """Encode one output that was yielded: what the core does before it yields the next may
        change it."""
        try:
            main, *frames = self.encoder.encode(output)
        except Exception as error:
            failure = _not_encoded(output, error)
            return Taken(output.request_id, output.finished, msgspec.Raw(), [], failure)
        if self._copy:
            frames = [_kept(frame) for frame in frames]
        return Taken(output.request_id, output.finished, msgspec.Raw(main), frames)

    def credit(self, client: int, epoch: int, number: int) -> None:
        self._leave_word("credit", client, (epoch, number))

    def stalled(self, client: int, number: int, paused: bool) -> None:
        """The answer to the "stall" of that number: whether the core has stopped making outputs for
        that front end."""
        self._leave_word("stalled", client, (number, paused))

    def connect(self, client: int, socket: Any) -> None:
        """Hand over the PUSH socket to a front end; the one before it is closed here."""
        self._leave_word("connect", client, socket)

    def epoch(self, client: int, epoch: int) -> None:
        """The connection was made (again): nothing is on the way, nothing waits."""
        self._leave_word("epoch", client, epoch)

    def report_to(self, socket: Any) -> None:
        """Hand over the PUSH socket to the coordinator."""
        self._leave_word("report_to", 0, socket)

    def report(self, report: Report) -> None:
        self._leave_word("report", 0, report)

    def dead(self, reason: str) -> None:
        """Tell every front end that this engine ends."""
        self._leave_word("dead", 0, reason)

    def stop(self, linger_ms: int) -> None:
        """Send what is there and close the sockets; ZMQ keeps what is unsent for linger_ms."""
        self._leave_word("stop", linger_ms, None)

    def _leave_word(self, what: str, client: int, item: Any) -> None:
        self._words.put((what, client, item))
        try:
            self._bell.release()
        except RuntimeError:
            pass  # it rings already

    # -- the thread --------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            while True:
                self._bell.acquire()
                with self._mine:
                    if not self._take_words():
                        return
        except BaseException as error:
            self.failed = error
            logger.exception("the engine's output thread failed")
            self._tell("failed", 0, 0)
            self._room.release()  # for who waits already; nobody else will
            self._last_words()

    def _last_words(self) -> None:
        """After a failure: tell front ends why the engine ends, as far as that is possible."""
        while self._linger_ms is None:
            what, client, item = self._words.get()
            with self._mine:
                if what == "dead":
                    try:
                        self._obey(what, client, item)
                    except Exception:
                        logger.exception("front ends can't be told that the engine ends")
                elif what == "stop":
                    self._linger_ms = client
        with self._mine:
            self._close()

    def _take_words(self) -> bool:
        """Do all that there is to do; False after "stop"."""
        batches: dict[int, Batch] = {}
        while True:
            try:
                what, client, item = self._words.get_nowait()
            except Empty:
                break
            if what == "batch":
                self._room.release()
                there = batches.get(client)
                if there is not None and there.fits(item):
                    there.add(item)
                else:
                    if there is not None:
                        self._flush({client: there})
                    batches[client] = item
                continue
            if what == "stop":
                self._linger_ms = client
            self._flush(batches)
            if what == "stop":
                self._close()
                return False
            self._obey(what, client, item)
        self._flush(batches)
        return True

    def _close(self) -> None:
        for peer in self._peers.values():
            peer.socket.close(linger=self._linger_ms)
        if self._reports is not None:
            self._reports.close(linger=self._linger_ms)

    def _obey(self, what: str, client: int, item: Any) -> None:
        if what == "credit":
            peer = self._peers.get(client)
            if peer is not None and item[0] == peer.epoch:
                self._take_credit(client, peer, item[1])
        elif what == "connect":
            old = self._peers.pop(client, None)
            if old is not None:
                old.socket.close(linger=0)
            self._peers[client] = _Peer(item)
        elif what == "stalled":
            peer = self._peers.get(client)
            number, paused = item
            # (The answer to an earlier stall says nothing: the core has been told to resume since.)
            if peer is not None and peer.backlog and number == peer.stall:
                # What was made before the core heard of it is no fault of a core that has paused.
                peer.limit = self._window + (peer.backlog_bytes if paused else 0)
                self._look_at_limit(client, peer)
        elif what == "epoch":
            if client in self._peers:
                self._peers[client].start(item)
        elif what == "report_to":
            if self._reports is not None:
                self._reports.close(linger=0)
            self._reports = item
        elif what == "report":
            if self._reports is not None:
                self._send(self._reports, [msgspec.msgpack.encode(item)])
        elif what == "dead":
            dead = Dead(self._engine, item, os.getpid())
            message = [ENGINE_CORE_DEAD, msgspec.msgpack.encode(dead)]
            for peer in self._peers.values():
                self._send(peer.socket, message)
        else:  # pragma: no cover
            raise AssertionError(what)

    def _flush(self, batches: dict[int, Batch]) -> None:
        for client, batch in batches.items():
            peer = self._peers.get(client)
            if peer is not None:
                self._put(client, peer, batch)
        batches.clear()

    def _put(self, client: int, peer: _Peer, batch: Batch) -> None:
        peer.number += 1
        message: Outputs[Any] = Outputs(
            self._engine,
            peer.epoch,
            peer.number,
            batch.all_outputs(),
            time.monotonic_ns(),
            batch.stamps,
            batch.failures,
            batch.results,
            batch.aborted,
            batch.report,
        )
        buffer = self._buffers.get()
        frames = [*self.encoder.encode_into(message, buffer), *batch.frames]
        size = MESSAGE_COST * len(frames) + len(buffer)
        for frame in frames[1:]:
            size += len(memoryview(frame).cast("B"))
        if peer.sent_bytes <= self._window and not peer.backlog:
            self._transmit(peer, frames, peer.number, size)
            return
        if not peer.backlog:
            peer.stall = next(self._stalls)
            self._tell("stall", client, peer.stall)
        peer.backlog.append((frames, peer.number, size))
        peer.backlog_bytes += size
        self._look_at_limit(client, peer)

    def _look_at_limit(self, client: int, peer: _Peer) -> None:
        if peer.limit is not None and peer.backlog_bytes > peer.limit and not peer.overrun:
            peer.overrun = True
            self._tell("overrun", client, peer.stall)

    def _transmit(self, peer: _Peer, frames: list[Any], number: int, size: int) -> None:
        peer.sent.append((number, size))
        peer.sent_bytes += size
        send = self._send(peer.socket, frames)
        self._buffers.give(frames[0], send)

    def _take_credit(self, client: int, peer: _Peer, number: int) -> None:
        while peer.sent and peer.sent[0][0] <= number:
            peer.sent_bytes -= peer.sent.popleft()[1]
        if not peer.backlog:
            return
        while peer.backlog and peer.sent_bytes <= self._window:
            frames, at, size = peer.backlog.popleft()
            peer.backlog_bytes -= size
            self._transmit(peer, frames, at, size)
        if not peer.backlog:
            peer.overrun = False
            peer.limit = None
            self._tell("resume", client, peer.stall)

    def _send(self, socket: Any, frames: list[Any]) -> PendingSend:
        return send_frames(socket, frames, NOBLOCK)
