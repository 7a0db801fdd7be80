"""The demo's engine: continuous batching over the model, whose shards are in the workers.

A front end sends ``Generate``. The engine gives each sequence a place in its batch, and in every
step has all workers propose the next token of all of them; the winners go back as ``Tokens``. What
goes to the workers are columns, an array for each field of a row, and the images of sequences that
have just begun.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fastipc.demo import model
from fastipc.engine import EngineCore
from fastipc.executor import Executor, InProcessExecutor, MultiprocExecutor, Worker

__all__ = ["DemoConfig", "DemoCore", "Generate", "ModelWorker", "Tokens"]

logger = logging.getLogger("fastipc.demo")


class Generate(msgspec.Struct):
    """A request: see `model.Job`. ``image``: uint8 (3, height, width), or None."""

    request_id: str
    prompt: bytes
    max_tokens: int
    seed: int = 0
    temperature: int = model.TEMPERATURE_ONE
    image: np.ndarray | None = None

    def job(self) -> model.Job:
        return model.Job(self.prompt, self.max_tokens, self.seed, self.temperature, self.image)


class Tokens(msgspec.Struct):
    """An output: the next tokens of a request."""

    request_id: str
    tokens: bytes
    finished: bool


class DemoConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What every engine is given.

    Attributes:
        path: the text to learn from.
        seed: of the model.
        workers: per engine.
        in_process: the only worker runs in the engine's process, and there is no ring.
        batch: sequences at once, at most.
        worker_timeout: seconds for a step.
    """

    path: str
    seed: int = 0
    workers: int = 1
    in_process: bool = False
    batch: int = 64
    worker_timeout: float = 60.0


class ModelWorker(Worker):
    """A shard of the model, and the biases of the images that are being looked at."""

    def __init__(
        self, path: str, seed: int, *, rank: int, local_rank: int, world_size: int
    ) -> None:
        super().__init__(rank, local_rank, world_size)
        self._path = path
        self._seed = seed
        self._biases: dict[int, model.Ints] = {}

    def load(self) -> None:
        """Trains, and keeps this worker's columns."""
        weights = model.train(model.read(Path(self._path)), self._seed)
        self._digest = weights.digest()
        self._shard = model.Shard(weights, self.rank, self.world_size)

    def loaded(self) -> tuple[str, int, int]:
        """(digest of all weights, bytes of those that were kept, pid)."""
        return self._digest, self._shard.weights.nbytes, os.getpid()

    def usage(self) -> float:
        """Seconds of CPU time so far."""
        return time.process_time()

    def step(
        self, new: list[tuple[int, Any]], places: model.Ints, rows: tuple[Any, ...]
    ) -> tuple[model.Ints, model.Ints]:
        """The next tokens of the sequences at these places: the best of this shard's, scored.

        ``new`` has (place, image or None) of each sequence that has just begun.
        """
        for place, image in new:
            if image is None:
                self._biases.pop(place, None)
            else:
                self._biases[place] = self._shard.see(image)
        biases = self._biases
        return self._shard.propose(
            model.Rows(*rows),
            [biases.get(place) for place in places.tolist()] if biases else [],
        )


class _Sequence:
    __slots__ = ("left", "paused", "place", "request")

    def __init__(self, request: Generate) -> None:
        self.request = request
        self.left = request.max_tokens
        self.place = -1
        self.paused = False


class DemoCore(EngineCore):
    request_type = Generate
    output_type = Tokens

    config: DemoConfig

    def __init__(self, config: DemoConfig, *, index: int = 0) -> None:
        super().__init__(config, index=index)
        self.executor = self._executor()
        try:
            self._loaded = self.executor.collective_rpc("loaded")
            if len({digest for digest, _, _ in self._loaded}) != 1:
                raise RuntimeError(
                    f"the workers have learnt different things: {config.path} was changed meanwhile"
                )
        except BaseException:
            self.executor.shutdown()
            raise
        self._waiting: deque[_Sequence] = deque()
        self._sequences: dict[str, _Sequence] = {}
        self._running: list[_Sequence] = []
        self._new: list[tuple[int, Any]] = []
        # The columns of the batch, by place.
        self._free = list(range(config.batch - 1, -1, -1))
        self._rows = model.Rows(
            np.zeros((config.batch, model.ORDER), np.uint8),
            *(np.zeros(config.batch, np.int64) for _ in range(3)),
        )
        self._counts = dict.fromkeys(("requests", "images", "steps", "tokens", "aborted"), 0)

    def _executor(self) -> Executor:
        arguments = (self.config.path, self.config.seed)
        if self.config.in_process:
            return InProcessExecutor(ModelWorker, args=arguments)
        return MultiprocExecutor(
            ModelWorker,
            self.config.workers,
            args=arguments,
            name=f"engine {self.index} worker",
            on_failure=self.fail,
        )

    # -- requests

    def add_request(self, request: Generate) -> None:
        if not 1 <= request.max_tokens <= 1 << 20:
            raise ValueError(f"max_tokens must be 1 to {1 << 20}, not {request.max_tokens}")
        if not 0 <= request.temperature <= 100 * model.TEMPERATURE_ONE:
            raise ValueError(f"temperature must be 0 to 100, not {request.temperature}")
        if not 0 <= request.seed < 1 << 63:
            raise ValueError(f"seed must be 0 to 2^63 - 1, not {request.seed}")
        if not request.prompt.isascii():  # which is quick, also for a long one
            raise ValueError(f"a prompt's tokens are below {model.VOCABULARY}")
        if request.image is not None:
            model.check_image(request.image)
        sequence = self._sequences[request.request_id] = _Sequence(request)
        self._waiting.append(sequence)
        self._counts["requests"] += 1
        self._counts["images"] += request.image is not None

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            sequence = self._sequences.pop(request_id)
            if sequence.place < 0:
                self._waiting.remove(sequence)
            else:
                self._running.remove(sequence)
                self._free.append(sequence.place)
            self._counts["aborted"] += 1

    def pause(self, request_ids: list[str]) -> bool:
        for request_id in request_ids:
            self._sequences[request_id].paused = True
        return True

    def resume(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            sequence = self._sequences.get(request_id)
            if sequence is not None:
                sequence.paused = False

    def load(self) -> tuple[int, int]:
        return len(self._waiting), len(self._running)

    # -- steps

    def has_work(self) -> bool:
        return (bool(self._waiting) and bool(self._free)) or any(
            not sequence.paused for sequence in self._running
        )

    def step(self) -> Iterable[Tokens]:
        while self._waiting and self._free:
            self._begin(self._waiting.popleft())
        going = [sequence for sequence in self._running if not sequence.paused]
        places = np.array([sequence.place for sequence in going])
        rows = tuple(column[places] for column in self._rows)
        proposals = self.executor.collective_rpc(
            "step", args=(self._new, places, rows), timeout=self.config.worker_timeout
        )
        self._new = []
        tokens = model.best(proposals)
        contexts = self._rows.contexts
        contexts[places, :-1] = contexts[places, 1:]
        contexts[places, -1] = tokens
        self._rows.positions[places] += 1
        self._counts["steps"] += 1
        self._counts["tokens"] += len(going)
        return [self._said(s, t) for s, t in zip(going, tokens.tolist(), strict=True)]

    def _begin(self, sequence: _Sequence) -> None:
        request = sequence.request
        place = sequence.place = self._free.pop()
        self._rows.contexts[place] = model.context_of(request.prompt)
        self._rows.positions[place] = len(request.prompt)
        self._rows.seeds[place] = request.seed
        self._rows.temperatures[place] = request.temperature
        self._new.append((place, request.image))
        request.image = None  # the workers have what it makes of it
        self._running.append(sequence)

    def _said(self, sequence: _Sequence, token: int) -> Tokens:
        sequence.left -= 1
        finished = sequence.left == 0
        request_id = sequence.request.request_id
        if finished:
            del self._sequences[request_id]
            self._running.remove(sequence)
            self._free.append(sequence.place)
        return Tokens(request_id, bytes((token,)), finished)

    # -- what front ends may ask

    def info(self) -> dict[str, Any]:
        return {
            "digest": self._loaded[0][0],
            "shard_bytes": [nbytes for _, nbytes, _ in self._loaded],
            "workers": [pid for _, _, pid in self._loaded],
            "in_process": self.config.in_process,
        }

    def usage(self) -> list[float]:
        """Seconds of CPU time so far: of this engine, and of each worker in another process."""
        own = [time.process_time()]
        return own if self.config.in_process else own + self.executor.collective_rpc("usage")

    def counts(self) -> dict[str, int]:
        """Requests, images, steps, tokens, aborted requests so far, and what is under way."""
        return {
            **self._counts,
            "waiting": len(self._waiting),
            "running": len(self._running),
            "free": len(self._free),
        }

    def close(self) -> None:
        self.executor.shutdown()
