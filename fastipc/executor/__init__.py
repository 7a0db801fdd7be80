"""Workers, and whoever makes them work: one call goes to all of them, their replies come back.

    class Model(Worker):
        def load(self): ...
        def step(self, batch): ...

    with MultiprocExecutor(Model, 2) as executor:
        tokens = executor.collective_rpc("step", (batch,), unique_reply_rank=0)

A call's way: ``MultiprocExecutor.collective_rpc`` in multiproc.py, one broadcast MessageQueue,
``serve`` in worker.py, one reply MessageQueue per worker, and back in multiproc.py.
"""

from __future__ import annotations

from typing import Any

from .base import Executor, ReplyFuture
from .inprocess import InProcessExecutor
from .multiproc import MultiprocExecutor
from .worker import Worker

__all__ = [
    "Executor",
    "InProcessExecutor",
    "MultiprocExecutor",
    "ReplyFuture",
    "Worker",
    "make_executor",
]


def make_executor(worker_class: Any, world_size: int = 1, **options: Any) -> Executor:
    """One worker in this process, or several in processes of their own.

    Args:
        worker_class, world_size: as of MultiprocExecutor.
        options: args and kwargs for the worker; with several workers all that MultiprocExecutor
            takes. One worker needs none of it, so it is left unused then.
    """
    if world_size == 1:
        mine = {name: options[name] for name in ("args", "kwargs") if name in options}
        return InProcessExecutor(worker_class, **mine)
    return MultiprocExecutor(worker_class, world_size, **options)
