"""``fastipc serve``: HTTP in front of the demo's engines.

``api`` is the HTTP of one API server, ``metrics`` what /metrics says, ``run`` the processes.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from fastipc.demo import PACKAGE, count

__all__ = ["add_parser", "main"]


def add_parser(nouns: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``serve`` to the commands of the command line."""
    parser = nouns.add_parser(
        "serve",
        help="serve completions of the demo's model over HTTP",
        description="Serves POST /v1/completions (stream: true for server-sent events), GET "
        "/health and GET /metrics, with the demo's engines and workers behind it. SIGTERM and "
        "Ctrl-C, to the first process or to all of them, let running requests finish; a second one "
        "doesn't. A request that has not come whole by then, and an answer that its client doesn't "
        "read, are given up.",
        epilog="exit code: 0 ended by SIGTERM, 1 a process died or could not start, 2 bad "
        "arguments, 130 Ctrl-C",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address (default 127.0.0.1)")
    parser.add_argument(
        "--port", type=_port, default=8000, help="port, 0 for any that is free (default 8000)"
    )
    parser.add_argument(
        "--engines", type=count(64), default=1, metavar="N", help="engines (default 1)"
    )
    parser.add_argument(
        "--workers",
        type=count(64),
        default=1,
        metavar="M",
        help="workers per engine; one runs in the engine's process (default 1)",
    )
    parser.add_argument(
        "--api-servers",
        type=count(64),
        default=1,
        metavar="A",
        help="processes that serve HTTP on the port (default 1)",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="start an engine or API server again that died, instead of ending",
    )
    parser.add_argument(
        "--path",
        type=Path,
        default=PACKAGE,
        help="text to learn from: a file, or a directory (default: this package)",
    )
    parser.set_defaults(run=main)


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"must be 0 to 65535, not {text}")
    return value


def main(arguments: argparse.Namespace) -> int:
    """Serve until told to end; returns the exit code."""
    missing = [n for n in ("starlette", "uvicorn") if importlib.util.find_spec(n) is None]
    if missing:
        print(
            f"fastipc serve needs {' and '.join(missing)}: pip install 'fastipc-core[server]'",
            file=sys.stderr,
        )
        return 1
    from fastipc.demo import model
    from fastipc.server import run

    try:
        model.read(arguments.path)
    except model.NothingToRead as error:
        print(f"fastipc serve: {error}", file=sys.stderr)
        return 2
    return run.serve(
        run.Options(
            host=arguments.host,
            port=arguments.port,
            engines=arguments.engines,
            workers=arguments.workers,
            api_servers=arguments.api_servers,
            restart=arguments.restart,
            path=str(arguments.path.resolve()),
        )
    )
