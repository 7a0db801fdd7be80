"""The command line: ``fastipc <noun> ...``, also as ``python -m fastipc``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fastipc import __version__, clean, demo, plan, server
from fastipc.settings import settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 bad arguments or
    environment, 130 Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="fastipc", description="Channels between the processes of an inference server."
    )
    parser.add_argument("--version", action="version", version=f"fastipc {__version__}")
    nouns = parser.add_subparsers(dest="noun", metavar="command", required=True)
    demo.add_parser(nouns)
    plan.add_parser(nouns)
    server.add_parser(nouns)
    clean.add_parser(nouns)
    arguments = parser.parse_args(argv)
    try:
        settings()
    except ValueError as error:
        print(f"fastipc: {error}", file=sys.stderr)
        return 2
    code: int = arguments.run(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main())
