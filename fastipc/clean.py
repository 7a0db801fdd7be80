"""What processes that were killed left behind, and its removal: ``fastipc clean``.

Little is left at all. The memory of a queue has no name, unless shm_dir was given and some reader
has not attached yet; and the next process that makes such a thing sweeps its directory anyway. This
does it without one, and says what it did.

Whether an owner is gone, the kernel's locks tell, never a pid (which may be used again, or mean
another process in another container) and never an age (a process may be stopped for a week). Only
what fastipc made, as this user, is touched.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from . import private_dirs

__all__ = ["Found", "clean"]

SEGMENT = "segment"
SOCKETS = "sockets"
TENSORS = "tensors"

_WHY = {
    SEGMENT: "no process holds the writer's lock on it",
    SOCKETS: "no process holds its owner's lock on it",
    TENSORS: "no process holds its sender's lock on it, and nobody listens there",
}


@dataclass(frozen=True)
class Found:
    """One thing without an owner.

    Attributes:
        kind: "segment" (the named memory of a queue), "sockets" (a directory of ipc sockets) or
            "tensors" (a directory of multiprocessing, of a sender of `fastipc.tensor_ipc`).
        path: where it is, or was.
        why: how it is known that nobody owns it.
        removed: whether it is gone now; always False in a dry run.
        error: why it could not be removed, or "".
    """

    kind: str
    path: str
    why: str
    removed: bool
    error: str = ""


def clean(
    shm_dirs: Iterable[str | os.PathLike[str]] = ("/dev/shm",),
    ipc_dirs: Iterable[str | os.PathLike[str]] | None = None,
    *,
    dry_run: bool = False,
) -> list[Found]:
    """Remove this user's segments, sockets and directories whose owners are gone.

    Args:
        shm_dirs: the directories that queues were given as shm_dir.
        ipc_dirs: where directories of ipc sockets are made; None: FASTIPC_RPC_BASE_PATH, the
            temporary directory and /tmp.
        dry_run: remove nothing, only tell what would be.

    What has a living owner, belongs to another user or isn't fastipc's is neither touched nor
    reported. Any number of processes may clean at the same time, and while others make queues.
    """
    found: list[Found] = []

    def note(kind: str, path: str, error: str) -> None:
        found.append(Found(kind, path, _WHY[kind], not dry_run and not error, error))

    for directory in shm_dirs:
        from . import _core  # not at the top: the rest works without it

        for path, number in _core.sweep(directory, dry_run):
            note(SEGMENT, path, os.strerror(number) if number else "")
    if ipc_dirs is None:
        ipc_dirs = private_dirs.socket_bases()
    bases = [os.path.abspath(directory) for directory in ipc_dirs]
    for kind, sweep in (
        (SOCKETS, private_dirs.sweep_sockets),
        (TENSORS, private_dirs.sweep_tensors),
    ):
        for base in bases:
            sweep(
                base,
                dry_run=dry_run,
                seen=lambda path, error, kind=kind: note(  # type: ignore[misc]
                    kind, path, "" if error is None else error.strerror or str(error)
                ),
            )
    return found


# -- the command -----------------------------------------------------------------------------------


def add_parser(nouns: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``clean`` to the command line."""
    parser = nouns.add_parser(
        "clean",
        help="remove what killed processes left",
        description="Removes this user's named segments, sockets and directories whose owners are "
        "gone, as the kernel's locks tell. What has a living owner stays. Exit code: 0, or 1 when "
        "something could not be looked at or removed.",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="remove nothing, only say what would be removed"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--shm-dir",
        nargs="+",
        action="extend",
        metavar="DIR",
        help="where queues were made with shm_dir= (default: /dev/shm)",
    )
    parser.add_argument(
        "--ipc-dir",
        nargs="+",
        action="extend",
        metavar="DIR",
        help="where directories of ipc sockets are (default: FASTIPC_RPC_BASE_PATH, the temporary "
        "directory, /tmp)",
    )
    parser.set_defaults(run=main)


def main(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    problems = []
    for directory in [*(arguments.shm_dir or ()), *(arguments.ipc_dir or ())]:
        try:
            os.scandir(directory).close()
        except OSError as error:
            problems.append(f"{directory}: {error.strerror}")
    found = clean(arguments.shm_dir or ["/dev/shm"], arguments.ipc_dir, dry_run=arguments.dry_run)
    problems += [f"{item.path}: {item.error}" for item in found if item.error]
    if arguments.json:
        print(
            json.dumps(
                {
                    "dry_run": arguments.dry_run,
                    "found": [asdict(item) for item in found],
                    "problems": problems,
                }
            )
        )
    else:
        verb = "would remove" if arguments.dry_run else "removed"
        for item in found:
            if not item.error:
                print(f"{verb} {item.kind} {item.path}: {item.why}")
        if not found and not problems:
            print("nothing was left behind")
    for problem in problems:
        print(f"fastipc clean: {problem}", file=sys.stderr)
    return 1 if problems else 0
