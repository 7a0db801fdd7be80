"""asyncio for MessageQueue: a thread only waits, and the coroutine takes.

So a call that is cancelled has taken no message, and sent none: what it waited for is still there
for the next one. The thread waits in slices, so that one that nobody needs any more ends soon, and
all waits of one end share it.

Only a message that may have to be sent bit by bit is sent by a thread. An executor's would do, but
asyncio.run and the interpreter wait for those, without end if nobody reads; ours are daemons, and
end when the queue is closed.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from .errors import Empty, Full

__all__ = ["Senders", "Waiter", "dequeue", "enqueue", "settle"]

# A thread whose waits were all cancelled goes on for up to this long.
SLICE = 0.1
# How long one is kept for the next wait: starting one costs more than a message.
IDLE = 1.0
# A writer that waits for room looks this often, in seconds, longer and longer.
ROOM_FIRST = 0.0005
ROOM_MOST = 0.02
# Threads that send for one end. The writer sends one message at a time anyway; what more of them
# are good for is that each sees its own timeout.
SENDERS_MOST = 32

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
        try:
            with self._lock:
                self._waiting.append(entry)
                self._wanted.set()
                if not self._running:
                    threading.Thread(target=self._run, name="fastipc-aio", daemon=True).start()
                    self._running = True  # not before: there may be no more threads to be had
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


class Senders:
    """The threads that send large messages of a writer's end for coroutines. They end when there
    is nothing to send. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._threads = 0

    async def call(self, send: Callable[[], None]) -> None:
        """send() in a thread. Cancelled, it has not been called, or goes on."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def job() -> None:
            if future.cancelled():
                return
            error: BaseException | None = None
            try:
                send()
            except BaseException as caught:
                error = caught
            try:
                loop.call_soon_threadsafe(settle, future, None, error)
            except RuntimeError:
                pass  # that loop was closed

        with self._lock:
            self._jobs.append(job)
            if self._threads < SENDERS_MOST:
                try:
                    threading.Thread(target=self._run, name="fastipc-send", daemon=True).start()
                    self._threads += 1
                except RuntimeError:  # there are no more threads to be had
                    if not self._threads:
                        self._jobs.pop()
                        raise
        await future

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._threads -= 1
                    return
                job = self._jobs.popleft()
            job()


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


async def enqueue(
    send: Callable[[float | None], None], senders: Senders | None, timeout: float | None
) -> None:
    """send(0) until there is room. Cancelled, it has sent nothing.

    Unless there are senders: then the message may need more chunks than there are, so that only a
    call that waits can send it, bit by bit. A thread makes that call, and can't be cancelled.
    """
    deadline = _deadline(timeout)
    if senders is not None:
        await senders.call(lambda: send(timeout))
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
