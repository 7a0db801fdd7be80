"""The demo: real work for a few processes over one broadcast queue, checked piece by piece.

The writer broadcasts the files under a path, cut into pieces of mixed sizes; every worker hashes
every piece and sends its SHA-256 back over a reply queue of its own; the writer compares each with
a digest that it took itself beforehand, without any queue.

``corpus`` cuts the files, ``worker`` is what the other processes run, ``driver`` sends and checks,
``display`` shows.
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
    from fastipc.demo.worker import Digest

__all__ = ["add_parser", "main"]

MAX_WORKERS = 64


def _workers(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_WORKERS:
        raise argparse.ArgumentTypeError(f"must be 1 to {MAX_WORKERS}, not {text}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text}")
    return value


def add_parser(nouns: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``demo`` to the commands of the command line."""
    parser = nouns.add_parser(
        "demo",
        help="broadcast files to worker processes and verify their digests",
        description="Broadcasts the files under a path, in pieces of mixed sizes, to worker "
        "processes, gets the SHA-256 of every piece back from each, and verifies them all.",
        epilog="exit code: 0 all verified, 1 a wrong digest or a dead worker, 2 bad arguments, "
        "130 Ctrl-C",
    )
    parser.add_argument(
        "--workers", type=_workers, default=2, metavar="N", help="worker processes (default 2)"
    )
    parser.add_argument(
        "--path",
        type=Path,
        default=Path(__file__).resolve().parent.parent,
        help="a file, or a directory to take the files of (default: this package)",
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=3.0, metavar="S", help="how long to send (default 3)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=main)


def main(arguments: argparse.Namespace, digest: Digest | None = None) -> int:
    """Run the demo, print what came out, and return the exit code.

    ``digest`` replaces the function by which the workers hash; the one by which the writer checks
    stays. It is sent to spawned processes, so it must be importable there.
    """

    def failed(error: dict[str, Any], code: int) -> int:
        if arguments.json:
            print(json.dumps({"verified": False, "error": error}))
        print(f"fastipc demo: {error['message']}", file=sys.stderr)
        return code

    try:
        # Not at the top: they import numpy, for which --help and --version should not wait.
        from fastipc.demo import corpus, display, driver
        from fastipc.demo.worker import sha256

        work = corpus.load(arguments.path)
        with display.Progress(sys.stderr, arguments.seconds) as progress:
            result = driver.run(
                work, arguments.workers, arguments.seconds, progress, digest or sha256
            )
    except KeyboardInterrupt:
        return failed({"type": "KeyboardInterrupt", "message": "interrupted"}, 130)
    except corpus.NothingToRead as exc:
        return failed({"type": "NothingToRead", "message": str(exc)}, 2)
    except driver.DemoFailed as exc:
        return failed(exc.as_dict(), 1)
    except (IPCError, TimeoutError) as exc:
        return failed({"type": type(exc).__name__, "message": str(exc)}, 1)

    if arguments.json:
        print(json.dumps(result.as_dict()))
    else:
        print(display.table(result))
    return 0
