"""EngineCore: what a server's author subclasses. How it is run is in process.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import msgspec

__all__ = ["EngineCore", "check_core_class", "utility"]


class EngineCore:
    """The part of an engine that is one's own: what it does with requests, step by step.

    A subclass runs in a process of its own. All its methods are called by one thread, one at a
    time, so it needs no locks; other threads take requests in and send outputs meanwhile. Between
    two steps come new requests, aborts and utility calls. While there is no work, it sleeps.

    Any public method that the subclass adds is a utility: front ends call it by its name
    (``client.call("reset_cache", 5)``).

    Attributes:
        request_type: a ``msgspec.Struct`` with ``request_id: str``, unique among the requests of
            all front ends that are under way. Arrays and tensors in it travel without copies.
        output_type: a ``msgspec.Struct`` with ``request_id: str`` and ``finished: bool``.
        lockstep: with several engines, whether all step as long as one of them has work: those
            without call `dummy_step` (mixture-of-experts layers need that).
        copy_outputs: whether arrays and tensors in outputs are copied when `step` returns or yields
            them, so that their memory can be used again. False saves that copy: what a step has
            handed over must not change any more. (Everything else is encoded at once, and what
            utilities return is copied always.)
        index: of this engine, 0 to the number of engines - 1.
        config: what ``launch`` was given.
    """

    request_type: ClassVar[type]
    output_type: ClassVar[type]
    lockstep: ClassVar[bool] = False
    copy_outputs: ClassVar[bool] = True
    # Where `fail` says so: the loop that runs the core, once there is one.
    _on_fail: Callable[[BaseException], object] | None = None
    _failure: BaseException | None = None

    def __init__(self, config: Any = None, *, index: int = 0) -> None:
        """Runs in the engine's process. Load the model and start the workers here; front ends
        learn that the engine is ready when it returns. An exception ends the engine, and is what
        they are told."""
        self.config = config
        self.index = index

    def add_request(self, request: Any) -> None:
        """Take a request on. An exception refuses it: the front end gets a `RequestFailed` with
        the traceback."""
        raise NotImplementedError

    def abort(self, request_ids: list[str]) -> None:
        """Forget these requests, all of which were added and have not finished. Outputs for them
        are not wanted any more."""
        raise NotImplementedError

    def has_work(self) -> bool:
        """Whether `step` has something to do now. While it hasn't, the engine sleeps until the
        next request or call."""
        raise NotImplementedError

    def step(self) -> Iterable[Any]:
        """Do a piece of work, and return the outputs that it made, of `output_type`, or yield them.
        The last one of a request has ``finished=True``. An output is sent as it is then: lists,
        arrays and all may be changed afterwards (see `copy_outputs`). One that can't be encoded
        fails its request, which is aborted if it has not finished. An exception here, or an output
        of which nobody can tell whose it is (its request_id is no str, say), ends the engine:
        everything under way fails with `EngineDeadError`."""
        raise NotImplementedError

    def dummy_step(self) -> None:
        """A step for the sake of other engines' (see `lockstep`)."""

    def pause(self, request_ids: list[str]) -> bool:
        """Make no outputs for these requests for now: their front end has stopped reading.

        Return True if that is done. Otherwise outputs are kept for it up to a limit, and then the
        requests are aborted.
        """
        return False

    def resume(self, request_ids: list[str]) -> None:
        """Go on with requests that `pause` was asked to stop. Some may not be known any more."""

    def load(self) -> tuple[int, int] | None:
        """(waiting, running) requests, by which front ends choose an engine; None counts all
        that are under way as running."""
        return None

    def info(self) -> Any:
        """What front ends find in ``client.engines[i].info``: plain values."""
        return None

    def stats(self) -> dict[str, Any]:
        """Histograms by name (`fastipc.histogram.Histogram`) that ``client.stats()`` shows beside
        the engine's own: those of an executor (``self.executor.stats()``), for example."""
        executor: Any = getattr(self, "executor", None)
        return dict(executor.stats()) if hasattr(executor, "stats") else {}

    def fail(self, error: BaseException) -> None:
        """Call it to end this engine with that error, as if `step` had raised it, even while it
        sleeps. Thread safe: it will do as an executor's ``on_failure``."""
        if self._failure is None:
            self._failure = error
            if self._on_fail is not None:
                self._on_fail(error)

    def close(self) -> None:
        """The engine ends: stop the workers. Called once, whatever the reason. Unless it is
        overridden it shuts down ``self.executor``, if there is one."""
        executor: Any = getattr(self, "executor", None)
        if hasattr(executor, "shutdown"):
            executor.shutdown()


def utility(core: EngineCore, name: str) -> Any:
    """The utility method of that name.

    Raises AttributeError with the names there are.
    """
    ours = {*dir(EngineCore), *EngineCore.__annotations__}
    names = [
        n
        for n in dir(type(core))
        if not n.startswith("_") and n not in ours and callable(getattr(type(core), n))
    ]
    if name in names:
        return getattr(core, name)
    there = ", ".join(names) or "none"
    raise AttributeError(f"{type(core).__name__} has no utility method {name!r} (it has: {there})")


def check_core_class(core_class: Any) -> None:
    """Raises TypeError that says what is missing."""
    if not (isinstance(core_class, type) and issubclass(core_class, EngineCore)):
        raise TypeError(f"an engine is a subclass of EngineCore, not {core_class!r}")
    for attribute, fields in (
        ("request_type", ("request_id",)),
        ("output_type", ("request_id", "finished")),
    ):
        struct = getattr(core_class, attribute, None)
        if not (isinstance(struct, type) and issubclass(struct, msgspec.Struct)):
            raise TypeError(
                f"{core_class.__name__}.{attribute} must be a msgspec.Struct, not {struct!r}"
            )
        for field in fields:
            if field not in struct.__struct_fields__:
                raise TypeError(
                    f"{core_class.__name__}.{attribute} is {struct.__name__}, "
                    f"which has no field {field!r}"
                )
    for method in ("add_request", "abort", "has_work", "step"):
        if getattr(core_class, method) is getattr(EngineCore, method):
            raise TypeError(f"{core_class.__name__} must define {method}()")
