"""asyncio for MessageQueue: a thread only waits, and the coroutine takes.

So a call that is cancelled has taken no message, and sent none: what it waited for is still there
for the next one. The thread waits in slices, so that one that nobody needs any more ends soon, and
all waits of one end share it.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from .errors import Empty, Full

__all__ = ["Waiter", "dequeue", "enqueue", "settle"]

# A thread whose waits were all cancelled goes on for up to this long.
SLICE = 0.1
# How long one is kept for the next wait: starting one costs more than a message.
IDLE = 1.0
# A writer that waits for room looks this often, in seconds, longer and longer.
ROOM_FIRST = 0.0005
ROOM_MOST = 0.02

Waiting = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Waiter:
    """The thread that waits until a reader's end is readable, for any number of coroutines, of
    any event loops. Thread safe."""

    def __init__(self, wait_readable: Callable[[float], None]) -> None:
        self._wait_readable = wait_readable
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        self._waiting: list[Waiting] = []
        self._running = False

    async def readable(self, timeout: float | None) -> None:
        """Returns when there may be something to take, or to be told; or at the timeout."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        entry = (loop, future)
        with self._lock:
            self._waiting.append(entry)
            self._wanted.set()
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="fastipc-aio", daemon=True).start()
        try:
            await asyncio.wait_for(future, timeout)
        except TimeoutError:
            pass
        finally:
            with self._lock:
                if entry in self._waiting:
                    self._waiting.remove(entry)
                if not self._waiting:
                    self._wanted.clear()

    def _run(self) -> None:
        while True:
            if not self._wanted.wait(IDLE):
                with self._lock:
                    if not self._waiting:
                        self._running = False
                        return
                continue
            try:
                self._wait_readable(SLICE)
            except Empty:
                continue
            except BaseException:
                pass  # whoever takes meets it, too
            self._wake_all()

    def _wake_all(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._wanted.clear()
        for loop, future in waiting:
            try:
                loop.call_soon_threadsafe(settle, future, None)
            except RuntimeError:
                pass  # that loop was closed


def settle(future: asyncio.Future[Any], result: Any, error: BaseException | None = None) -> None:
    """Gives the future its outcome, unless nobody waits for it any more.

    Asking it first would not do: Ctrl-C makes asyncio cancel the main task, and what it waits for,
    from the signal's handler, which may run between the question and the deed.
    """
    try:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
    except asyncio.InvalidStateError:
        pass


def _deadline(timeout: float | None) -> float:
    if timeout is None:
        return math.inf
    if not timeout >= 0:
        raise ValueError(
            f"timeout must be None or a number of seconds of at least 0, not {timeout!r}"
        )
    return time.monotonic() + timeout


async def dequeue(take: Callable[[float], Any], waiter: Waiter, timeout: float | None) -> Any:
    """take(0) until it has something. Cancelled, it has taken nothing."""
    deadline = _deadline(timeout)
    while True:
        try:
            return take(0)
        except Empty:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
        await waiter.readable(None if left == math.inf else left)


async def enqueue(send: Callable[[float | None], None], brief: bool, timeout: float | None) -> None:
    """send(0) until there is room. Cancelled, it has sent nothing.

    Unless it is not brief: then the message may need more chunks than there are, so that only a
    call that waits can send it, bit by bit. A thread makes that call, and can't be cancelled.
    """
    deadline = _deadline(timeout)
    if not brief:
        await asyncio.get_running_loop().run_in_executor(None, send, timeout)
        return
    pause = ROOM_FIRST
    while True:
        try:
            send(0)
            return
        except Full:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
        await asyncio.sleep(min(pause, left))
        pause = min(pause * 1.5, ROOM_MOST)
