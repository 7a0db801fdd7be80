"""The demo: a small inference server with all its processes, whose every token is checked.

Front ends send prompts, some with an image, to engines; each engine generates tokens step by step
with its workers, which hold a shard of a language model each; and the front ends compare what they
get with what the model says when one process runs all of it. All three channels are used: ROUTER
and DEALER for requests, PUSH and PULL for outputs, the ring between an engine and its workers.

``model`` is the language model, ``core`` the engine and its workers, ``front_end`` sends and
checks, ``driver`` starts everybody and counts, ``display`` shows.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastipc import IPCError

if TYPE_CHECKING:
    from fastipc.demo.core import DemoCore

__all__ = ["add_parser", "count", "main"]

PACKAGE = Path(__file__).resolve().parent.parent


def count(most: int) -> Any:
    """The type of an option that is a whole number of 1 to ``most``."""

    def parse(text: str) -> int:
        value = int(text)
        if not 1 <= value <= most:
            raise argparse.ArgumentTypeError(f"must be 1 to {most:,}, not {text}")
        return value

    parse.__name__ = "number"  # argparse shows it
    return parse


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text}")
    return value


def add_parser(nouns: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``demo`` to the commands of the command line."""
    parser = nouns.add_parser(
        "demo",
        help="run a small inference server and verify every token",
        description="Runs front ends, engines and workers, which generate text with a language "
        "model that they learn from the files under a path, and verifies every token against the "
        "same model in one process.",
        epilog="exit code: 0 all verified, 1 a wrong token or a dead process, 2 bad arguments, "
        "130 Ctrl-C",
    )
    parser.add_argument(
        "--engines", type=count(64), default=2, metavar="N", help="engines (default 2)"
    )
    parser.add_argument(
        "--workers", type=count(64), default=2, metavar="M", help="workers per engine (default 2)"
    )
    parser.add_argument(
        "--clients", type=count(64), default=1, metavar="K", help="front ends (default 1)"
    )
    parser.add_argument(
        "--requests",
        type=count(10**9),
        metavar="R",
        help="stop after so many requests (default: as many as go in the time)",
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=3.0, metavar="S", help="how long to send (default 3)"
    )
    parser.add_argument(
        "--path",
        type=Path,
        default=PACKAGE,
        help="text to learn from: a file, or a directory (default: this package)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=main)


def main(arguments: argparse.Namespace, core_class: type[DemoCore] | None = None) -> int:
    """Run the demo, print what came out, and return the exit code.

    ``core_class`` replaces the engine; what it says is checked as ever.
    """

    def failed(error: dict[str, Any], code: int) -> int:
        if arguments.json:
            print(json.dumps({"verified": False, "error": error}))
        print(f"fastipc demo: {error['message']}", file=sys.stderr)
        return code

    try:
        # Not at the top: they import numpy and asyncio, for which --help should not wait.
        from fastipc.demo import core, display, driver, front_end, model

        model.read(arguments.path)  # what can't be read is found before anybody is started
        options = driver.Options(
            str(arguments.path.resolve()),
            arguments.engines,
            arguments.workers,
            arguments.clients,
            arguments.requests,
            arguments.seconds,
        )
        with display.Progress(sys.stderr, arguments.seconds, arguments.requests) as progress:
            result = driver.run(options, progress, core_class or core.DemoCore)
    except KeyboardInterrupt:
        return failed({"type": "KeyboardInterrupt", "message": "interrupted"}, 130)
    except model.NothingToRead as exc:
        return failed({"type": "NothingToRead", "message": str(exc)}, 2)
    except front_end.WrongTokens as exc:
        return failed(
            {
                "type": "WrongTokens",
                "message": str(exc),
                "request": exc.number,
                "at": exc.at,
            },
            1,
        )
    except (IPCError, TimeoutError) as exc:
        told = {name: getattr(exc, name, None) for name in ("engine", "rank", "pid", "exitcode")}
        named = {name: value for name, value in told.items() if value is not None}
        return failed({"type": type(exc).__name__, "message": str(exc), **named}, 1)

    if arguments.json:
        print(json.dumps(display.figures(result)))
    else:
        print(display.table(result))
    return 0
