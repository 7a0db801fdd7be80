"""What a layout of a server takes: processes, threads, sockets, descriptors, ports, shared memory.

The layout is that of ``fastipc serve``, on one node or several: engines with their workers, API
servers (as many as engines, unless told otherwise), the process that starts them and, with several
engines, a coordinator. Each figure is a sum that is shown, and tests compare it with what running
processes have.

A process that isn't another's: with one API server this starts the engines itself; with several
there is a parent. One worker per engine runs in the engine's process. So one GPU takes 2 processes
(API server, engine), TP 4 takes 6 (API server, engine, 4 workers), and TP 2 x DP 4 takes 18 (8
workers, 4 engines, 4 API servers, parent, coordinator).
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from typing import Any, NamedTuple

__all__ = ["Layout", "Role", "add_parser", "main", "roles", "shared_memory"]

# A context of ZMQ has two threads (one for input and output, one that closes sockets), which poll a
# descriptor each, and three mailboxes. Each of its sockets has a mailbox, too.
_ZMQ_THREADS = (2, "of ZMQ")
_ZMQ_CONTEXT = (5, "ZMQ context")
# Standard input, output and error; what multiprocessing has in a process that it spawned.
_STANDARD = (3, "standard")
_SPAWNED = (5, "of multiprocessing, death watch")
# The pair of sockets through which a signal wakes the first process.
_SIGNALS = (2, "signals")
# Each child costs its parent the pipes of multiprocessing, death and readiness, and its pidfd.
_PER_CHILD = 4
# The pipe to Python's resource tracker, and the one that wakes the monitor of children.
_TRACKER = (1, "resource tracker")
_MONITOR = (2, "monitor of children")
# What a segment costs each of its participants: the segment, and the description that is locked.
_PER_SEGMENT = 2

Sum = list[tuple[int, str]]


class Layout(NamedTuple):
    """What the command line says.

    Attributes:
        dp: engines.
        tp: workers per engine.
        gpus_per_node: one worker each.
        api_servers: on the first node.
    """

    dp: int
    tp: int
    gpus_per_node: int
    api_servers: int

    @property
    def engines_per_node(self) -> int:
        return self.gpus_per_node // self.tp

    @property
    def nodes(self) -> int:
        return -(-self.dp // self.engines_per_node)

    @property
    def in_process(self) -> bool:
        """The only worker of an engine runs in its process."""
        return self.tp == 1

    def engines_on(self, node: int) -> int:
        return min(self.engines_per_node, self.dp - node * self.engines_per_node)


class Role(NamedTuple):
    """One kind of process: what each of them has, as (number, what) to be added up.

    ``sockets`` are descriptors, too, and among these; so are what ``descriptors`` lists besides.
    """

    name: str
    threads: Sum
    sockets: Sum
    descriptors: Sum

    def total(self, what: str) -> int:
        if what == "descriptors":
            return _sum(self.sockets) + _sum(self.descriptors)
        return _sum(getattr(self, what))


def _sum(parts: Sum) -> int:
    return sum(number for number, _ in parts)


def roles(layout: Layout) -> dict[str, Role]:
    """What each process of a layout has when nobody is connected over HTTP."""
    dp, tp, api = layout.dp, layout.tp, layout.api_servers
    coordinated = dp > 1
    workers = 0 if layout.in_process else tp
    children = layout.engines_on(0) + coordinated + (api if api > 1 else 0)
    # One node's channels are ipc sockets, in a directory of whoever listens.
    directory = (int(layout.nodes == 1), "directory of sockets")

    # The launcher's control socket: a ROUTER that everybody but workers has a connection to.
    control: Sum = [
        (1, "control, listening"),
        (dp, "control, engines"),
        (api, "control, API servers"),
        (int(coordinated), "control, coordinator"),
    ]
    launcher_descriptors: Sum = [
        _STANDARD,
        _ZMQ_CONTEXT,
        (1, "mailbox of 1 ZMQ socket"),
        (1, "wake-up"),
        directory,
        _TRACKER,
        (_PER_CHILD * children, f"{_PER_CHILD} x {children} children"),
    ]
    client_sockets: Sum = [
        (1, "requests, listening"),
        (1, "outputs, listening"),
        (2 * dp, f"2 x {dp} engines"),
        (1, "control"),
        (int(coordinated), "loads"),
    ]
    client_mailboxes = 3 + coordinated
    client_descriptors: Sum = [
        _ZMQ_CONTEXT,
        (client_mailboxes, f"mailboxes of {client_mailboxes} ZMQ sockets"),
    ]
    found = {}
    if api == 1:
        found["API server"] = Role(
            "API server",
            [(1, "main"), (2, "of the engines' launcher"), (4, "of 2 ZMQ contexts")],
            [(2, "asyncio"), _SIGNALS, (1, "HTTP"), *control, *client_sockets],
            [*launcher_descriptors, _MONITOR, *client_descriptors, (1, "asyncio")],
        )
    else:
        found["parent"] = Role(
            "parent",
            [
                (1, "main"),
                (2, "of the engines' launcher"),
                (1, "monitor of API servers"),
                (1, "asyncio"),
                _ZMQ_THREADS,
            ],
            [
                (2, "asyncio"),
                _SIGNALS,
                (1, "HTTP, reserved"),
                (api, "pipes to API servers"),
                *control,
            ],
            [*launcher_descriptors, (4, "2 monitors of children"), (1, "asyncio")],
        )
        found["API server"] = Role(
            "API server",
            [(1, "main"), (1, "death watch"), _ZMQ_THREADS],
            [(2, "asyncio"), (1, "HTTP"), (1, "pipe to the parent"), *client_sockets],
            [
                _STANDARD,
                _SPAWNED,
                *client_descriptors,
                (1, "asyncio"),
                directory,
            ],
        )
    if coordinated:
        found["coordinator"] = Role(
            "coordinator",
            [(1, "main"), (1, "death watch"), _ZMQ_THREADS],
            [
                (3, "listening"),
                (api, "loads, API servers"),
                (2 * dp, f"2 x {dp} engines"),
                (1, "control"),
            ],
            [
                _STANDARD,
                _SPAWNED,
                _ZMQ_CONTEXT,
                (4, "mailboxes of 4 ZMQ sockets"),
                directory,
            ],
        )
    engine_descriptors: Sum = [
        _STANDARD,
        _SPAWNED,
        _ZMQ_CONTEXT,
        (1, "wake-up"),
        # A DEALER and a PUSH, and the two ends of the monitor of each.
        (6 * api, f"mailboxes, 6 ZMQ sockets x {api} API servers"),
        (1 + 2 * coordinated, f"mailboxes, {1 + 2 * coordinated} more"),
    ]
    engine_threads: Sum = [
        (1, "main"),
        (1, "death watch"),
        (1, "input"),
        (1, "output"),
        _ZMQ_THREADS,
    ]
    if workers:
        segments = 1 + workers
        engine_threads.append((1, "monitor of workers"))
        engine_descriptors += [
            _MONITOR,
            (_PER_CHILD * workers, f"{_PER_CHILD} x {workers} workers"),
            (_PER_SEGMENT * segments, f"{_PER_SEGMENT} x {segments} segments"),
        ]
    found["engine"] = Role(
        "engine",
        engine_threads,
        [
            (1, "control"),
            (2 * api, f"2 x {api} API servers"),
            (2 * coordinated, "coordinator"),
        ],
        engine_descriptors,
    )
    if workers:
        found["worker"] = Role(
            "worker",
            [(1, "main"), (1, "death watch")],
            [],
            [_STANDARD, _SPAWNED, (2 * _PER_SEGMENT, f"{_PER_SEGMENT} x 2 segments")],
        )
    return {name: _without_zeros(role) for name, role in found.items()}


def _without_zeros(role: Role) -> Role:
    kept = ([part for part in parts if part[0]] for parts in role[1:])
    return Role(role.name, *kept)


def count(layout: Layout, node: int) -> dict[str, int]:
    """How many processes of each role a node has."""
    engines = layout.engines_on(node)
    found = {"engine": engines}
    if not layout.in_process:
        found["worker"] = engines * layout.tp
    if node == 0:
        found = {
            "parent": int(layout.api_servers > 1),
            "API server": layout.api_servers,
            "coordinator": int(layout.dp > 1),
            **found,
        }
    return {name: number for name, number in found.items() if number}


def ports(layout: Layout, node: int) -> Sum:
    """TCP ports that a node listens on."""
    if node > 0:
        return []
    found: Sum = [(1, "HTTP")]
    if layout.nodes > 1:
        api = layout.api_servers
        found += [(1, "control"), (2 * api, f"2 x {api} API servers: requests, outputs")]
        if layout.dp > 1:
            found.append((3, "coordinator"))
    return found


def shared_memory(layout: Layout) -> list[tuple[int, str, int, int]]:
    """The segments of one engine: (how many, of what, bytes of each when it is made, and when all
    its chunks are in use)."""
    if layout.in_process:
        return []
    from fastipc import MessageQueue, _core
    from fastipc.executor import MultiprocExecutor
    from fastipc.executor.multiproc import chunk_bytes

    def default(of: Any, name: str) -> int:
        value = inspect.signature(of).parameters[name].default
        assert isinstance(value, int)
        return value

    def segment(readers: int) -> tuple[int, int]:
        return _core.segment_bytes(
            readers=readers,
            max_chunk_bytes=chunk_bytes(),
            max_chunks=default(MultiprocExecutor, "max_chunks"),
            slots=default(MessageQueue, "slots"),
            inline_bytes=default(MessageQueue, "inline_bytes"),
        )

    return [
        (1, f"calls, 1 writer and {layout.tp} readers", *segment(layout.tp)),
        (layout.tp, "replies, 1 writer and 1 reader", *segment(1)),
    ]


# -- the command -----------------------------------------------------------------------------------


def _number(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1 << 16:
        raise argparse.ArgumentTypeError(f"must be 1 to {1 << 16}, not {text}")
    return value


def add_parser(nouns: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``plan`` to the commands of the command line."""
    parser = nouns.add_parser(
        "plan",
        help="what a layout takes: processes, descriptors, ports, shared memory",
        description="Prints what each node of a server needs, with the arithmetic: processes, "
        "threads, sockets, descriptors, ports and shared memory.",
    )
    parser.add_argument("--dp", type=_number, default=1, help="engines (default 1)")
    parser.add_argument("--tp", type=_number, default=1, help="workers per engine (default 1)")
    parser.add_argument(
        "--gpus-per-node", type=_number, metavar="G", help="default: as many as dp x tp"
    )
    parser.add_argument(
        "--api-servers", type=_number, metavar="N", help="on the first node (default: as dp)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=main)


def main(arguments: argparse.Namespace) -> int:
    """Print the plan; returns the exit code."""
    layout = Layout(
        arguments.dp,
        arguments.tp,
        arguments.gpus_per_node or arguments.dp * arguments.tp,
        arguments.api_servers or arguments.dp,
    )
    if layout.tp > layout.gpus_per_node:
        print(
            f"fastipc plan: --tp {layout.tp} does not fit into a node of {layout.gpus_per_node} "
            "GPUs: an engine and its workers are on one host",
            file=sys.stderr,
        )
        return 2
    print(json.dumps(as_dict(layout)) if arguments.json else text(layout))
    return 0


def as_dict(layout: Layout) -> dict[str, Any]:
    """The plan in plain values."""
    every = roles(layout)
    # All nodes between the first and the last are alike, and often the last one, too.
    last = layout.nodes - 1
    different = sorted({0, min(1, last), last})
    if len(different) == 3 and count(layout, 1) == count(layout, last):
        different.pop()
    nodes: list[dict[str, Any]] = []
    for node in different:
        processes = count(layout, node)
        memory = shared_memory(layout)
        engines = layout.engines_on(node)
        nodes.append(
            {
                "node": node,
                "alike": 1,
                "processes": processes,
                **{
                    what: sum(every[name].total(what) * n for name, n in processes.items())
                    for what in ("threads", "sockets", "descriptors")
                },
                "ports": _sum(ports(layout, node)),
                "shared_memory": {
                    "at_once": engines * sum(n * at_once for n, _, at_once, _ in memory),
                    "at_most": engines * sum(n * at_most for n, _, _, at_most in memory),
                },
            }
        )
    for one, following in zip(nodes, [*different[1:], layout.nodes], strict=True):
        one["alike"] = following - one["node"]
    total: dict[str, int] = {}
    for node in range(layout.nodes):
        for name, number in count(layout, node).items():
            total[name] = total.get(name, 0) + number
    return {
        **layout._asdict(),
        "nodes_in_all": layout.nodes,
        "processes": total,
        "processes_in_all": sum(total.values()),
        "roles": {
            name: {what: role.total(what) for what in ("threads", "sockets", "descriptors")}
            for name, role in every.items()
        },
        "nodes": nodes,
    }


def _arithmetic(parts: Sum) -> str:
    if not parts:
        return "0"
    return f"{_sum(parts)} = " + " + ".join(f"{number} ({what})" for number, what in parts)


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"


def _named(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def text(layout: Layout) -> str:
    """The plan for a person."""
    told = as_dict(layout)
    every = roles(layout)
    in_all = " + ".join(_named(n, name) for name, n in told["processes"].items())
    lines = [
        f"layout: DP {layout.dp} x TP {layout.tp}, {_named(layout.api_servers, 'API server')}, "
        f"{_named(layout.nodes, 'node')} of {layout.gpus_per_node} GPUs",
        f"processes: {in_all} = {told['processes_in_all']:,} in all",
    ]
    if layout.in_process:
        lines.append("(each engine's only worker runs in its process, without a ring)")
    lines += ["(and one resource tracker of Python's on each node)", "", "each process:"]
    for name, role in every.items():
        lines.append(f"  {name}")
        lines.append(f"    threads      {_arithmetic(role.threads)}")
        lines.append(f"    sockets      {_arithmetic(role.sockets)}")
        others = [(role.total("sockets"), "sockets"), *role.descriptors]
        lines.append(f"    descriptors  {_arithmetic([part for part in others if part[0]])}")
    lines.append("(threads: besides those of numeric libraries; each HTTP connection: one socket)")
    memory = shared_memory(layout)
    if memory:
        lines += ["", "shared memory of each engine (MiB when made; with all chunks in use):"]
        lines += [
            f"  {number} x {what}: {number} x {_mib(at_once)}; {number} x {_mib(at_most)}"
            for number, what, at_once, at_most in memory
        ]
    for node in told["nodes"]:
        named = f"node {node['node']}"
        if node["alike"] > 1:
            named = f"nodes {node['node']} to {node['node'] + node['alike'] - 1}, each"
        processes = node["processes"]
        lines += ["", f"{named}:"]
        listed = " + ".join(_named(n, name) for name, n in processes.items())
        lines.append(f"  processes      {sum(processes.values()):,} = {listed}")
        for what in ("threads", "sockets", "descriptors"):
            parts = " + ".join(f"{n} x {every[name].total(what)}" for name, n in processes.items())
            lines.append(f"  {what:<14} {node[what]:,} = {parts}")
        lines.append(f"  ports          {_arithmetic(ports(layout, node['node']))}")
        shared = node["shared_memory"]
        lines.append(
            f"  shared memory  {_mib(shared['at_once'])} at once, {_mib(shared['at_most'])} at most"
        )
    most = max(every.values(), key=lambda role: role.total("descriptors"))
    lines += [
        "",
        f"most descriptors of one process: {most.total('descriptors'):,} ({most.name}); compare "
        "with ulimit -n",
    ]
    return "\n".join(lines)
