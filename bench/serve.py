"""``fastipc serve`` under load: errors, and throughput beside the same handler without engines.

    python -m bench.serve [--seconds 60] [--connections 64] [--api-servers 1] [--engines 1] ...

Clients on raw asyncio keep connections open and send completions one after another, half of them
streamed, and check each answer's status and number of tokens. The same load then goes, in turn, to
the same HTTP application with a client behind it that has all its tokens at hand: what is left is
HTTP, JSON and the event loop. The figures of both are of one run; compare their ratio.
"""

import argparse
import asyncio
import json
import multiprocessing
import re
import signal
import socket
import subprocess
import sys
import time

from .report import number, table

TOKENS = 32


class Tally:
    def __init__(self):
        self.requests = 0
        self.tokens = 0
        self.errors = {}
        self.latencies = []

    def failed(self, what):
        self.errors[what] = self.errors.get(what, 0) + 1


# -- an HTTP client --------------------------------------------------------------------------------


async def _answer(reader):
    """(status, body) of one answer; the body of a chunked one joined."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status = int(head.split(" ", 2)[1])
    length = re.search(r"(?im)^content-length: (\d+)\r?$", head)
    if length:
        return status, await reader.readexactly(int(length[1]))
    body = bytearray()
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return status, bytes(body)


def _request(i):
    body = json.dumps(
        {"prompt": f"def f{i}(", "max_tokens": TOKENS, "seed": i, "stream": i % 2 == 0}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _check(i, status, body):
    """What is wrong with an answer, or None."""
    if status != 200:
        return f"status {status}: {body[:100]!r}"
    if i % 2:
        tokens = json.loads(body)["usage"]["completion_tokens"]
        return None if tokens == TOKENS else f"{tokens} tokens"
    events = body.count(b"data: ")
    if events != TOKENS + 1 or not body.endswith(b"data: [DONE]\n\n"):
        return f"a stream of {events} events that ends {body[-100:]!r}"
    return None


async def _keep_asking(port, first, step, until, tally):
    writer = None
    i = first
    while time.monotonic() < until:
        try:
            if writer is None:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            begin = time.monotonic()
            writer.write(_request(i))
            wrong = _check(i, *await asyncio.wait_for(_answer(reader), 60))
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong is None:
            tally.requests += 1
            tally.tokens += TOKENS
            tally.latencies.append(time.monotonic() - begin)
        else:
            tally.failed(wrong)
            if writer is not None:
                writer.close()
            writer = None
        i += step
    if writer is not None:
        writer.close()


async def load(port, connections, seconds):
    tally = Tally()
    until = time.monotonic() + seconds
    begin = time.monotonic()
    await asyncio.gather(
        *(_keep_asking(port, i, connections, until, tally) for i in range(connections))
    )
    taken = time.monotonic() - begin
    ordered = sorted(tally.latencies) or [0.0]
    return {
        "requests": tally.requests,
        "requests_per_second": tally.requests / taken,
        "tokens_per_second": tally.tokens / taken,
        "p50_ms": 1e3 * ordered[len(ordered) // 2],
        "p99_ms": 1e3 * ordered[int(len(ordered) * 0.99)],
        "errors": tally.errors,
    }


# -- the two servers -------------------------------------------------------------------------------


class AllAtHand:
    """In the place of an engine client: says the same to everybody, at once."""

    engines = {}  # noqa: RUF012

    async def generate(self, request):
        from fastipc.demo.core import Tokens

        for i in range(request.max_tokens):
            # As with an engine, others get their turn between two tokens.
            await asyncio.sleep(0)
            yield Tokens(request.request_id, b"x", i + 1 == request.max_tokens)


def _without_engines(listener):
    import uvicorn

    from fastipc.server.api import Service, application

    async def no_metrics():
        return None

    config = uvicorn.Config(
        application(Service(AllAtHand(), no_metrics)),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
    )
    asyncio.run(uvicorn.Server(config).serve([listener]))


class Served:
    name = "fastipc serve"

    def __init__(self, options):
        command = [sys.executable, "-m", "fastipc", "serve", "--port", "0", *options]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for line in self._process.stderr:
            if "listening on" in line:
                self.port = int(line.rsplit(":", 1)[1])
                return
        raise RuntimeError(f"the server ended with code {self._process.wait()}")

    def close(self):
        self._process.send_signal(signal.SIGTERM)
        said = self._process.stderr.read()
        code = self._process.wait()
        if code or said:
            raise RuntimeError(f"the server ended with code {code} and said: {said}")


class Bare:
    name = "the handler alone"

    def __init__(self):
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.port = listener.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_without_engines, args=(listener,), daemon=True)
        self._process.start()
        listener.close()

    def close(self):
        self._process.terminate()
        self._process.join()


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=60.0, help="of load for each of the two")
    parser.add_argument("--rounds", type=int, default=4, help="in which that is divided")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--engines", default="1")
    parser.add_argument("--workers", default="1")
    parser.add_argument("--api-servers", default="1")
    parser.add_argument("--json", help="file for every round")
    arguments = parser.parse_args()

    options = ["--engines", arguments.engines, "--workers", arguments.workers]
    options += ["--api-servers", arguments.api_servers]
    both = []
    rounds = {Served.name: [], Bare.name: []}
    try:
        both += [Served(options), Bare()]
        each = arguments.seconds / arguments.rounds
        for i in range(arguments.rounds):
            for one in both if i % 2 == 0 else reversed(both):
                told = asyncio.run(load(one.port, arguments.connections, each))
                rounds[one.name].append(told)
                print(f"{one.name}: {told}", flush=True)
    finally:
        for one in both:
            one.close()
    rows = []
    for name, told in rounds.items():
        row = [name, sum(r["requests"] for r in told)]
        for key in ("requests_per_second", "tokens_per_second", "p50_ms", "p99_ms"):
            row.append(number(sorted(r[key] for r in told)[len(told) // 2]))
        row.append(sum(sum(r["errors"].values()) for r in told))
        rows.append(row)
    print()
    print(table(["", "requests", "requests/s", "tokens/s", "p50 ms", "p99 ms", "errors"], rows))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rounds, file)
    return 1 if any(r["errors"] for told in rounds.values() for r in told) else 0


if __name__ == "__main__":
    sys.exit(main())
