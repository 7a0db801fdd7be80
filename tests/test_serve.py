"""``fastipc serve``: what it answers, how it ends, and what is left when its processes are killed.

That no process and no file is left is checked after each of these tests by conftest.py.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import http.client
import importlib.util
import json
import os
import random
import re
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from serving import Server, Stream
from support import eventually, has_ended

import fastipc

for extra in ("starlette", "uvicorn"):
    if importlib.util.find_spec(extra) is None:
        pytest.skip(f"needs {extra}", allow_module_level=True)

from fastipc.demo import model  # noqa: E402
from fastipc.server import run  # noqa: E402

# A stream of this many tokens takes seconds: long enough for a test to interfere.
LONG_TOKENS = 4096


@pytest.fixture(scope="module")
def shard():
    weights = model.train(model.read(Path(fastipc.__file__).parent))
    return model.Shard(weights, 0, 1)


def expected(shard, prompt, tokens, seed, temperature=1.0, image=None):
    scaled = round(temperature * model.TEMPERATURE_ONE)
    job = model.Job(model.tokenize(prompt), tokens, seed, scaled, image)
    return model.detokenize(model.generate(shard, [job])[0])


def gone(processes):
    for process in processes:
        eventually(lambda p=process: has_ended(p))


# -- what it answers -------------------------------------------------------------------------------


def test_one_server_with_an_engine_and_two_workers(start_child, shard):
    """Several things of one server, which takes a while to start."""
    server = Server(start_child, "--workers", 2)
    assert set(server.pids) == {
        "API server 0", "engine 0", "worker 0 of engine 0", "worker 1 of engine 0",
    }  # fmt: skip

    # A completion, whole.
    status, answer = server.post({"prompt": "def send(", "max_tokens": 40, "seed": 3})
    assert status == 200
    assert answer["choices"][0]["text"] == expected(shard, "def send(", 40, 3)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 9, "completion_tokens": 40, "total_tokens": 49}

    # Streamed: one event a token, and the same text.
    stream = Stream(server, prompt="def send(", max_tokens=40, seed=3)
    assert stream.answer.headers["content-type"].startswith("text/event-stream")
    assert stream.text() == (answer["choices"][0]["text"], 40)
    stream.close()

    # With an image, and greedily.
    image = np.random.default_rng(1).integers(0, 256, (3, 40, 60), np.uint8) // 2
    encoded = {"shape": image.shape, "data": base64.b64encode(image.tobytes()).decode()}
    body = {"prompt": "class ", "max_tokens": 30, "temperature": 0.5, "seed": 1, "image": encoded}
    status, answer = server.post(body)
    assert answer["choices"][0]["text"] == expected(shard, "class ", 30, 1, 0.5, image)

    # Many at once, each its own.
    prompts = [f"{'x' * i}def f{i}(" for i in range(40)]
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        bodies = [{"prompt": p, "max_tokens": 25, "seed": i} for i, p in enumerate(prompts)]
        answers = list(pool.map(server.post, bodies))
    for i, (prompt, (status, answer)) in enumerate(zip(prompts, answers, strict=True)):
        assert (status, answer["choices"][0]["text"]) == (200, expected(shard, prompt, 25, i))

    # Without a seed, two are not the same.
    two = [server.post({"prompt": "", "max_tokens": 60})[1]["choices"][0]["text"] for _ in "ab"]
    assert two[0] != two[1]

    # Requests that can't be understood; the next works.
    for body, what in (
        ("", "truncated"),
        ("{", "truncated"),
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 10**9}, "max_tokens"),
        ({"prompt": "a", "temperature": 3}, "temperature"),
        ({"prompt": "a", "seed": -1}, "seed"),
        ({"prompt": "a", "image": {"shape": [3, 8, 8], "data": "AAAA"}}, "image"),
        ({"prompt": "a", "image": {"shape": [3, 8, 8], "data": "!"}}, "image"),
        ({"prompt": "a", "image": {"shape": [3, 1, 1], "data": "AAAA"}}, "image"),
    ):
        status, answer = server.post(body)
        assert status == 400, body
        assert what in answer["error"]["message"]
        assert answer["error"]["type"] == "invalid_request_error"
    with server.connection() as connection:
        for i in range(3):  # on one connection
            status, answer = server.post({"prompt": "a", "max_tokens": 1 + i}, connection)
            assert (status, answer["usage"]["completion_tokens"]) == (200, 1 + i)
    assert server.get("/nowhere")[0] == 404
    assert server.get("/v1/completions")[0] == 405

    # Health and metrics.
    assert server.get("/health") == (200, '{"status":"ok","engines":{"engine 0":"ready"}}')
    assert server.metric("fastipc_api_servers") == 1
    assert server.metric("fastipc_requests_in_flight") == 0
    finished = server.metric('fastipc_requests_total{outcome="finished"}')
    assert finished == 3 + 40 + 2 + 3
    assert server.metric('fastipc_stage_seconds_count{stage="total"}') == finished
    assert server.metric('fastipc_stage_seconds_bucket{le="+Inf",stage="total"}') == finished
    assert server.metric('fastipc_engine_up{engine="0"}') == 1

    # A client that goes away ends its request in the engine, streaming or not.
    stream = Stream(server, prompt="a", max_tokens=LONG_TOKENS)
    next(iter(stream))
    assert server.metric("fastipc_requests_in_flight") == 1
    stream.close()
    stream.answer.close()
    eventually(lambda: server.metric('fastipc_requests_total{outcome="aborted"}') == 1)
    with server.connection() as connection:
        body = json.dumps({"prompt": "a", "max_tokens": LONG_TOKENS})
        connection.request("POST", "/v1/completions", body)
        eventually(lambda: server.metric("fastipc_requests_in_flight") == 1)
    eventually(lambda: server.metric('fastipc_requests_total{outcome="aborted"}') == 2)
    eventually(lambda: server.metric("fastipc_requests_in_flight") == 0)
    assert server.metric("fastipc_http_open") == 0

    # SIGTERM lets a stream finish.
    stream = Stream(server, prompt="a", max_tokens=1000, seed=5)
    first = next(iter(stream))
    server.child.send_signal(signal.SIGTERM)
    text, _ = stream.text()
    assert json.loads(first)["choices"][0]["text"] + text == expected(shard, "a", 1000, 5)
    stream.close()
    assert server.child.wait() == 0
    assert "Traceback" not in server.child.stderr


def test_several_api_servers_and_engines(start_child, shard):
    server = Server(start_child, "--api-servers", 3, "--engines", 2)
    assert set(server.pids) == {
        "parent", "API server 0", "API server 1", "API server 2", "engine 0", "engine 1",
    }  # fmt: skip
    bodies = [{"prompt": f"def f{i}(", "max_tokens": 10, "seed": i} for i in range(60)]
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(server.post, bodies))
    for i, (status, answer) in enumerate(answers):
        text = expected(shard, bodies[i]["prompt"], 10, i)
        assert (status, answer["choices"][0]["text"]) == (200, text)
    # More than one of them answered, and the metrics are of all, whoever is asked.
    assert len({answer["id"].rsplit("-", 1)[0] for _, answer in answers}) > 1
    for _ in range(5):
        assert server.metric("fastipc_api_servers") == 3
        assert server.metric('fastipc_requests_total{outcome="finished"}') == 60

    # SIGTERM to the parent lets all streams finish.
    streams = [Stream(server, prompt="a", max_tokens=400, seed=i) for i in range(6)]
    firsts = [next(iter(stream)) for stream in streams]
    server.child.send_signal(signal.SIGTERM)
    for i, (first, stream) in enumerate(zip(firsts, streams, strict=True)):
        text, _ = stream.text()
        assert json.loads(first)["choices"][0]["text"] + text == expected(shard, "a", 400, i)
        stream.close()
    assert server.child.wait() == 0
    assert "Traceback" not in server.child.stderr


# -- deaths ----------------------------------------------------------------------------------------


def test_a_dead_engine_is_named_and_the_server_ends(start_child):
    server = Server(start_child, "--engines", 2)
    pid = server.pids["engine 1"]
    streams = [Stream(server, prompt="a", max_tokens=LONG_TOKENS) for _ in range(2)]
    for stream in streams:
        next(iter(stream))
    os.kill(pid, signal.SIGKILL)

    # The one that was in it is told; the other is finished.
    last = [list(stream)[-1] for stream in streams]
    assert sum(event == "[DONE]" for event in last) == 1
    (error,) = (json.loads(event)["error"] for event in last if event != "[DONE]")
    assert error["type"] == "engine_dead"
    assert re.search(rf"engine 1 \(pid {pid} on .*\) is dead: was killed by SIGKILL",
                     error["message"])  # fmt: skip
    for stream in streams:
        stream.close()
    assert server.child.wait() == 1
    assert f"engine 1 (pid {pid}) is dead: was killed by SIGKILL" in server.child.stderr
    assert "Traceback" not in server.child.stderr


def test_health_names_a_dead_engine_until_it_is_back(start_child):
    server = Server(start_child, "--restart")
    pid = server.pids["engine 0"]
    os.kill(pid, signal.SIGKILL)

    status, text = eventually(lambda: (h := server.get("/health"))[0] != 200 and h)
    assert status == 503
    assert json.loads(text)["status"] == "engine 0 dead"
    assert "was killed by SIGKILL" in json.loads(text)["engines"]["engine 0"]
    status, answer = server.post({"prompt": "a"})
    assert status == 503 or answer["usage"]["completion_tokens"] == 16  # back already
    eventually(lambda: server.get("/health")[0] == 200)
    assert server.post({"prompt": "a"})[0] == 200
    server.child.wait_for("engine 0 is back, as pid ", "stderr")
    server.child.send_signal(signal.SIGTERM)
    assert server.child.wait() == 0


def test_an_idle_worker_that_dies_ends_its_engine(start_child):
    server = Server(start_child, "--workers", 2)
    pid = server.pids["worker 1 of engine 0"]
    os.kill(pid, signal.SIGKILL)

    assert server.child.wait() == 1
    assert f"worker 1 (pid {pid}) was killed by SIGKILL" in server.child.stderr
    assert "engine 0 " in server.child.stderr
    assert "Traceback" not in server.child.stderr


def test_an_api_server_that_dies_is_named(start_child):
    server = Server(start_child, "--api-servers", 2)
    everybody = server.everybody()
    pid = server.pids["API server 1"]
    os.kill(pid, signal.SIGKILL)

    assert server.child.wait() == 1
    assert f"API server 1 (pid {pid}) was killed by SIGKILL; the server ends" in server.child.stderr
    gone(everybody)


def test_an_api_server_that_dies_is_started_again(start_child):
    server = Server(start_child, "--api-servers", 2, "--restart")
    os.kill(server.pids["API server 0"], signal.SIGKILL)

    server.child.wait_for("it is started again", "stderr")
    eventually(lambda: server.metric("fastipc_api_servers") == 2)
    assert server.post({"prompt": "a"})[0] == 200
    server.child.send_signal(signal.SIGTERM)
    assert server.child.wait() == 0


# In the parent, and in API servers, something doesn't go as it should; see the tests.
OUT_OF_ORDER = """
    import os, sys
    from fastipc import processes
    from fastipc.__main__ import main
    from fastipc.server import run

    def start(target, args, **options):
        if len(os.listdir(".")) > files and options["name"].startswith("API server"):
            raise OSError("no more processes")
        return real_start(target, args, **options)

    async def serve(self, sockets):
        try:
            os.close(os.open("raised", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            await real_serve(self, sockets)
        else:
            raise ZeroDivisionError("out of order")

    what = sys.argv[1]
    real_start, real_serve = processes.start, run._HttpServer.serve
    if what in ("raises", "can't start"):
        run._HttpServer.serve = serve
    if __name__ == "__main__":
        files = len(os.listdir("."))
        if what == "can't start":
            processes.start = start
        if what == "no time":
            run.ASK_SECONDS = 0.0
        sys.exit(main(["serve", "--port", "0", "--api-servers", "2", "--restart"]))
"""


def test_an_api_server_that_raises_is_started_again(start_child):
    child = start_child(OUT_OF_ORDER, "raises")
    child.wait_for("exited with code 1; it is started again", "stderr")
    child.wait_for("listening on", "stderr")
    child.send_signal(signal.SIGTERM)
    assert child.wait() == 0


def test_an_api_server_that_can_not_be_started_again_ends_the_server(start_child):
    child = start_child(OUT_OF_ORDER, "can't start")
    assert child.wait() == 1
    assert re.search(
        r"API server . can't be started again: no more processes; the server ends", child.stderr
    )


def test_metrics_when_no_api_server_answers_in_time(start_child):
    child = start_child(OUT_OF_ORDER, "no time")
    port = int(child.wait_for("listening on", "stderr").rsplit(":", 1)[1])
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        assert answer.status == 200
        assert b"\nfastipc_api_servers 1.0\n" in answer.read()
    child.send_signal(signal.SIGTERM)
    assert child.wait() == 0


def test_a_free_port_is_kept_from_the_start(monkeypatch):
    bound = []

    class Socket(socket.socket):
        def bind(self, where):
            bound.append(where)
            super().bind(where)

    monkeypatch.setattr(socket, "socket", Socket)
    options = run.Options("127.0.0.1", 0, 1, 1, 2, False, "")
    with run._bind(options)[0] as sock:
        assert bound == [("127.0.0.1", 0)]
        run._sharing(sock.family, sock.getsockname()).close()


@pytest.mark.parametrize("api_servers", [1, 2])
def test_everybody_ends_when_the_server_is_killed(start_child, api_servers):
    server = Server(start_child, "--workers", 2, "--api-servers", api_servers)
    everybody = server.everybody()
    stream = Stream(server, prompt="a", max_tokens=LONG_TOKENS)
    next(iter(stream))
    os.kill(server.child.pid, signal.SIGKILL)

    assert server.child.wait() == -signal.SIGKILL
    gone(everybody)
    stream.close()


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGINT, []),
        (signal.SIGINT, ["--api-servers", 2]),
        (signal.SIGTERM, ["--workers", 2]),
        (signal.SIGTERM, ["--api-servers", 2, "--engines", 2]),
    ],
)
def test_a_signal_to_all_processes_lets_streams_finish(start_child, shard, number, options):
    """As a terminal does with Ctrl-C, and a service manager with SIGTERM."""
    server = Server(start_child, *options)
    stream = Stream(server, prompt="a", max_tokens=400, seed=3)
    first = next(iter(stream))
    root = psutil.Process(server.child.pid)
    for process in [*root.children(recursive=True), root]:
        process.send_signal(number)
    text, _ = stream.text()
    assert json.loads(first)["choices"][0]["text"] + text == expected(shard, "a", 400, 3)
    stream.close()
    assert server.child.wait() == {signal.SIGTERM: 0, signal.SIGINT: 130}[number]
    assert re.sub("fastipc serve: (.* is pid .*|listening on .*)\n", "", server.child.stderr) == ""


# Before the named function is called, the process gets the signal.
AT_A_MOMENT = """
    import os, signal, sys
    from fastipc import processes
    from fastipc.__main__ import main
    from fastipc.engine import AsyncEngineClient, EngineGroup
    from fastipc.server import run

    def signalled_before(owner, name):
        function = getattr(owner, name)

        def wrapper(*args, **kwargs):
            if name != "_say" or args[0].startswith("listening"):
                os.kill(os.getpid(), number)
            return function(*args, **kwargs)

        setattr(owner, name, wrapper)

    if __name__ == "__main__":
        moment, api_servers, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
        owner = {
            "Monitor": processes, "wait_until_ready": EngineGroup, "wait_all_ready": processes,
            "__aenter__": AsyncEngineClient, "_say": run, "serve": run._HttpServer,
            "shutdown": EngineGroup,
        }[moment]
        signalled_before(owner, moment)
        if moment == "shutdown":
            signalled_before(run, "_say")
        sys.exit(main(["serve", "--port", "0", "--api-servers", api_servers]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("moment", "api_servers"),
    [
        ("Monitor", 1),
        ("wait_until_ready", 1),
        ("__aenter__", 1),
        ("_say", 1),
        ("serve", 1),
        ("shutdown", 1),
        ("wait_all_ready", 2),
        ("_say", 2),
        ("shutdown", 2),
    ],
)
def test_a_signal_at_any_moment_is_a_good_end(start_child, moment, api_servers, number):
    child = start_child(AT_A_MOMENT, moment, str(api_servers), str(int(number)))
    assert child.wait() == {signal.SIGTERM: 0, signal.SIGINT: 130}[number]
    # And nothing is complained of.
    for line in child.stderr.splitlines():
        assert re.match(r"fastipc serve: (.* is pid \d+|listening on )", line), child.stderr


@pytest.mark.parametrize("api_servers", ["1", "2"])
def test_a_signal_that_another_thread_gets(start_child, tmp_path, api_servers):
    child = start_child(
        """
        import os, signal, sys, threading, time
        from fastipc.__main__ import main

        def tell():
            while not os.path.exists("now"):
                time.sleep(0.01)
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

        if __name__ == "__main__":
            threading.Thread(target=tell, daemon=True).start()
            sys.exit(main(["serve", "--port", "0", "--api-servers", sys.argv[1]]))
        """,
        api_servers,
    )
    child.wait_for("listening on", "stderr")
    (tmp_path / "now").touch()
    assert child.wait() == 0


def test_ctrl_c_twice_does_not_wait_for_streams(start_child):
    server = Server(start_child)
    stream = Stream(server, prompt="a", max_tokens=LONG_TOKENS)
    next(iter(stream))
    server.child.send_signal(signal.SIGINT)
    eventually(lambda: not _listens(server.port))
    server.child.send_signal(signal.SIGINT)

    assert server.child.wait() == 130
    with pytest.raises(AssertionError):
        stream.text()
    stream.close()


def test_half_a_request_does_not_keep_the_server(start_child):
    server = Server(start_child)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{")
        assert server.get("/health")[0] == 200  # so the half has been read as well
        server.child.send_signal(signal.SIGTERM)
        answer = http.client.HTTPResponse(client)
        answer.begin()
        assert answer.status == 503
        assert json.loads(answer.read())["error"]["type"] == "server_draining"
        answer.close()
    assert server.child.wait() == 0
    assert "Traceback" not in server.child.stderr


def test_a_connection_that_comes_late_does_not_keep_the_server(start_child):
    """After uvicorn has looked which are idle, and before it has stopped listening, say."""
    child = start_child(
        """
        import asyncio, sys
        from fastipc.__main__ import main
        from fastipc.server import run

        async def shutdown(self, sockets):
            state = self.server_state
            late, state.connections = state.connections, set()
            asyncio.get_running_loop().call_soon(setattr, state, "connections", late)
            await real_shutdown(self, sockets)

        real_shutdown, run._HttpServer.shutdown = run._HttpServer.shutdown, shutdown
        if __name__ == "__main__":
            sys.exit(main(["serve", "--port", "0"]))
        """
    )
    port = int(child.wait_for("listening on", "stderr").rsplit(":", 1)[1])
    with contextlib.ExitStack() as stack:
        for said in (b"", b"GET /health HTTP/1.1\r\n"):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(said)
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            connection.request("GET", "/health")
            connection.getresponse().read()  # so the others have been accepted as well
            child.send_signal(signal.SIGTERM)
            assert child.wait() == 0
    assert "Traceback" not in child.stderr


@pytest.mark.parametrize("signals", [1, 2])
def test_a_client_that_does_not_read_does_not_keep_the_server(start_child, signals):
    child = start_child(
        """
        import socket, sys
        from fastipc.__main__ import main
        from fastipc.server import run

        def bind(options):
            sock, address = real_bind(options)
            # Connections have it, too: the kernel would take in whole answers.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            return sock, address

        real_bind, run._bind = run._bind, bind
        if __name__ == "__main__":
            run.STALL_SECONDS = float(sys.argv[1])
            sys.exit(main(["serve", "--port", "0"]))
        """,
        "0.5" if signals == 1 else "3600",
    )
    port = int(child.wait_for("listening on", "stderr").rsplit(":", 1)[1])
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        body = json.dumps({"prompt": "a", "max_tokens": LONG_TOKENS, "stream": True})
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body.encode())
        )
        assert client.recv(1)
        child.send_signal(signal.SIGTERM)
        if signals == 2:
            eventually(lambda: not _listens(port))
            child.send_signal(signal.SIGTERM)
        assert child.wait() == 0
    assert "Traceback" not in child.stderr


def _listens(port):
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(50))
def test_kill_anybody_at_any_moment(start_child, seed):
    """SIGKILL while it starts or serves: the others say what happened and end, or are restarted."""
    dice = random.Random(seed)
    restart = dice.random() < 0.3
    options = ["--engines", dice.choice((1, 2)), "--workers", dice.choice((1, 2)),
               "--api-servers", dice.choice((1, 2))]  # fmt: skip
    if dice.random() < 0.2:
        _kill_while_starting(start_child, dice, options)
        return
    server = Server(start_child, *options, *(["--restart"] if restart else []))
    everybody = server.everybody()
    stop = threading.Event()

    def load(number):
        random_number = random.Random(number)
        while not stop.is_set():
            try:
                if random_number.random() < 0.5:
                    length = random_number.randrange(1, 200)
                    with contextlib.closing(
                        Stream(server, prompt="a", max_tokens=length)
                    ) as stream:
                        list(stream)
                else:
                    server.post({"prompt": "b", "max_tokens": random_number.randrange(1, 200)})
            except (OSError, http.client.HTTPException, ValueError):
                time.sleep(0.01)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        loads = [pool.submit(load, i) for i in range(8)]
        try:
            time.sleep(dice.random() * 2)
            name, pid = dice.choice(sorted(server.pids.items()))
            os.kill(pid, signal.SIGKILL)
            survives = restart and pid != server.child.pid
            if survives:
                server.child.wait_for(
                    "is back, as pid" if "engine" in name else "it is started again", "stderr"
                )
                eventually(lambda: _healthy(server))
                server.child.send_signal(signal.SIGTERM)
            code = server.child.wait()
        finally:
            stop.set()
        for one in loads:
            one.result()
    if survives:
        assert code == 0
    elif pid == server.child.pid:
        assert code == -signal.SIGKILL
    else:
        assert code == 1
        assert f"(pid {pid}) was killed by SIGKILL" in server.child.stderr or re.search(
            rf"\(pid {pid}\) is dead: was killed by SIGKILL", server.child.stderr
        )
    gone(everybody)


def _healthy(server):
    try:
        return server.get("/health")[0] == 200 and server.post({"prompt": "a"})[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def _kill_while_starting(start_child, dice, options):
    child = start_child(
        command=["-m", "fastipc", "serve", "--port", "0", *map(str, options)], timeout=110
    )
    root = psutil.Process(child.pid)
    until = time.monotonic() + dice.random() * 2
    seen = set()
    while time.monotonic() < until and child.process.poll() is None:
        seen |= set(root.children(recursive=True))
        time.sleep(0.005)
    spawned = [p for p in seen if p.is_running() and "spawn_main" in " ".join(p.cmdline())]
    victim = dice.choice([root, *sorted(spawned, key=lambda p: p.pid)])
    victim.kill()
    assert child.wait() == (-signal.SIGKILL if victim == root else 1)
    if victim != root:
        assert "killed by SIGKILL" in child.stderr
    gone(seen)


# -- what goes wrong before it serves --------------------------------------------------------------


def test_a_port_in_use_is_a_sentence(start_child):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for api_servers in (1, 2):
            child = start_child(
                command=["-m", "fastipc", "serve", "--port", str(port),
                         "--api-servers", str(api_servers)]
            )  # fmt: skip
            assert child.wait() == 1
            assert f"can't listen on 127.0.0.1 port {port}: Address already in use" in child.stderr
            assert "Traceback" not in child.stderr


@pytest.mark.parametrize(
    "options",
    [["--port", "65536"], ["--engines", "0"], ["--path", "no/such"], ["--api-servers", "x"]],
    ids=" ".join,
)
def test_bad_arguments(start_child, options):
    child = start_child(command=["-m", "fastipc", "serve", *options])
    assert child.wait() == 2
    assert "Traceback" not in child.stderr


def test_without_the_extra_there_is_a_sentence(start_child):
    child = start_child(
        """
        import sys, importlib.util
        real = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *a: None if name == "uvicorn" else real(name, *a)
        from fastipc.__main__ import main
        sys.exit(main(["serve"]))
        """
    )
    assert child.wait() == 1
    assert child.stderr == ("fastipc serve needs uvicorn: pip install 'fastipc-core[server]'\n")


def test_metrics_without_the_extra_are_a_sentence(start_child):
    child = start_child(
        """
        import sys
        from fastipc.server import metrics
        metrics.available = lambda: False
        from fastipc.__main__ import main
        if __name__ == "__main__":
            sys.exit(main(["serve", "--port", "0"]))
        """
    )
    port = int(child.wait_for("listening on", "stderr").rsplit(":", 1)[1])
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    assert answer.status == 501
    assert "pip install 'fastipc-core[metrics]'" in answer.read().decode()
    connection.close()
    child.send_signal(signal.SIGTERM)
    assert child.wait() == 0
