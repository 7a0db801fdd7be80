"""Engines, groups and front ends that end, or are replaced, at an awkward moment."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
from contextlib import contextmanager

import pytest
import zmq
from engine_cores import CountingCore, LockstepCore, Request
from support import eventually

import fastipc
from fastipc import Closed, EngineDeadError, IPCError
from fastipc.engine import AsyncEngineClient, EngineClient, frontend, launch
from fastipc.engine import aio as engine_aio
from fastipc.engine import group as engine_group
from fastipc.engine.protocol import PROTOCOL, Ready

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("own_socket_directory")]


def tokens(outputs):
    return [output.token for output in outputs]


def told(client):
    """Whether whoever launched the engines has said something that was not taken yet."""
    return client._opened._control.get(zmq.EVENTS) & zmq.POLLIN


@contextmanager
def stopped(pid):
    """That process does nothing, and hears nothing but SIGKILL."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass


@pytest.fixture
def start_engine(start_child):
    """Runs an engine of the group that somebody else launches."""

    def start(group, index, core="CountingCore"):
        return start_child(
            f"""
            import sys
            from engine_cores import {core}
            from fastipc.engine.process import run_engine

            run_engine({core}, index=int(sys.argv[1]), control=sys.argv[2])
            """,
            index,
            group.control[0],
            env={"PYTHONPATH": os.path.dirname(__file__)},
        )

    return start


# -- an engine that is started again ---------------------------------------------------------------


@pytest.mark.parametrize("killed", [True, False])
def test_the_end_of_an_engine_is_told_after_the_next_one_is_ready(killed):
    """A front end that was busy meanwhile sees the new one first; the old one's last words and
    outputs, and the news of its end, are not the new one's."""

    async def main():
        config = {} if killed else {"fail_step_at": 3}
        async with AsyncEngineClient.launch(
            CountingCore, config, restart=True, timeout=60
        ) as client:
            stream = client.add_request(Request("a", 2 if killed else 10))
            group = client.group
            pid = group.processes[0].pid
            # The loop has no turn until all of this has happened.
            if killed:
                os.kill(pid, signal.SIGKILL)
            eventually(lambda: group.processes[0].pid != pid)
            group.wait_until_ready(60)
            eventually(lambda: client._opened.has_news() and told(client))
            client._pump()
            engine = client.engines[0]
            assert (engine.alive, engine.pid) == (True, group.processes[0].pid)
            with pytest.raises(EngineDeadError, match=str(pid)):
                async for _ in stream:
                    pass
            await client.wait_until_ready(60)
            assert engine.pid == group.processes[0].pid != pid
            assert [o.token async for o in client.generate(Request("next", 2))] == [1, 2]

    asyncio.run(main())


def test_the_first_word_of_an_engine_that_has_ended_since_is_no_sign_of_life():
    """It comes over another connection than the news of its end."""
    with EngineClient.launch(CountingCore, timeout=60) as client:
        engine = client.engines[0]
        os.kill(engine.pid, signal.SIGKILL)
        eventually(lambda: engine.final)
        late = Ready(PROTOCOL, 0, engine.epoch + 1, engine.pid, engine.host, "", 1 << 20, False)
        with client._lock:
            client._core._take_ready(late)
        assert not engine.alive
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            client.add_request(Request("a"))


def test_all_that_an_engine_finished_before_its_end_counts(monkeypatch):
    # So that a few hundred messages take as many turns as those of a full window might.
    monkeypatch.setattr(frontend, "_AT_ONCE", 2)

    async def main():
        config = {"fail_step_at": 501, "step_seconds": 0.002}
        async with AsyncEngineClient.launch(CountingCore, config, timeout=60) as client:
            done = client.add_request(Request("done", 500))
            lost = client.add_request(Request("lost", 1 << 40))
            eventually(lambda: told(client))  # the loop has no turn until the end is told
            client._pump()
            assert [o.token async for o in done] == list(range(1, 501))
            with pytest.raises(EngineDeadError, match="the step went wrong"):
                async for _ in lost:
                    pass
            assert client.stats()["output_messages"] > 128

    asyncio.run(main())


def test_an_engine_that_cannot_be_started_again_is_given_up(monkeypatch):
    with EngineClient.launch(CountingCore, restart=True, timeout=60) as client:

        def fail(*args, **kwargs):
            raise OSError(errno.EAGAIN, "no more processes")

        monkeypatch.setattr(engine_group.children, "start", fail)
        os.kill(client.group.processes[0].pid, signal.SIGKILL)
        eventually(lambda: not client.engines[0].alive)
        with pytest.raises(EngineDeadError, match=r"SIGKILL, and can't be .* no more processes"):
            client.wait_until_ready(30)
        assert client.engines[0].final
        assert client.engines[0].exitcode == -signal.SIGKILL


def test_the_ticks_sending_hides_no_news():
    async def main():
        async with AsyncEngineClient.launch(
            CountingCore, {"step_seconds": 0.01}, engines=2, restart=True, timeout=60
        ) as client:
            group = client.group
            pid = group.processes[0].pid
            client._tick.cancel()
            os.kill(pid, signal.SIGKILL)
            while client.engines[0].alive:
                await asyncio.sleep(0.01)
            eventually(lambda: group.processes[0].pid != pid)
            group.wait_until_ready(60)
            # (to look takes up the signal as sending does)
            eventually(client._opened.has_news)
            client._on_tick()
            assert client.engines[0].alive

    asyncio.run(main())


def test_the_ticks_sending_hides_no_news_from_the_thread():
    with EngineClient.launch(CountingCore, engines=2, restart=True, timeout=60) as client:
        group = client.group
        pid = group.processes[0].pid
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not client.engines[0].alive)
        with client._lock:
            eventually(lambda: group.processes[0].pid != pid)
            group.wait_until_ready(60)
            eventually(client._core.has_news)
        eventually(lambda: client.engines[0].alive)


# -- engines that others launch --------------------------------------------------------------------


def test_an_engine_takes_the_place_of_one_whose_connection_stands(start_engine):
    with launch(CountingCore, external=1) as group:
        first = start_engine(group, 0)
        with EngineClient(group.clients[0], timeout=60) as client:
            assert client.engines[0].pid == first.pid
            with stopped(first.pid):
                second = start_engine(group, 0)
                eventually(lambda: client.engines[0].pid == second.pid)
                assert tokens(client.generate(Request("a", 2))) == [1, 2]
                first.send_signal(signal.SIGKILL)
                first.wait()
            assert tokens(client.generate(Request("b", 2))) == [1, 2]
        group.shutdown()
        second.check()  # it was told


def test_a_wave_ends_without_an_engine_that_others_launched_and_that_died(start_engine):
    with launch(LockstepCore, engines=2, external=1) as group:
        for _ in range(2):
            child = start_engine(group, 1, "LockstepCore")
            with EngineClient(group.clients[0], timeout=60) as client:
                stream = client.add_request(Request("endless", 1 << 40), engine=1)
                stream.get(30)
                eventually(lambda: client._core.stepping)
                child.send_signal(signal.SIGKILL)
                child.wait()

                def dummy_steps():
                    return client.call("state", engine=0)["dummy_steps"]

                # Nobody else has work, and so all rest.
                eventually(lambda: not client._core.stepping)
                eventually(lambda: dummy_steps() == dummy_steps())
                assert len(list(client.generate(Request("a", 20), engine=0))) == 20


# -- the end of a group ----------------------------------------------------------------------------


def test_a_front_end_that_comes_while_the_group_ends_is_told_so():
    with launch(CountingCore, clients=2) as group:
        with EngineClient(group.clients[0], timeout=60) as client:
            with stopped(client.engines[0].pid):
                ending = threading.Thread(target=group.shutdown, args=(80.0,))
                ending.start()
                eventually(lambda: not client.engines[0].alive)
                with pytest.raises(EngineDeadError, match="whoever launched it has ended it"):
                    EngineClient(group.clients[1], timeout=30)
                assert ending.is_alive()
            ending.join()


def test_an_interrupted_shutdown_can_be_repeated():
    with launch(CountingCore) as group, EngineClient(group.clients[0], timeout=60) as client:
        child = group.processes[0]

        def interrupt():
            eventually(lambda: not client.engines[0].alive)
            os.kill(os.getpid(), signal.SIGINT)

        with stopped(child.pid):
            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                group.shutdown(timeout=80)
            thread.join()
            assert child.is_alive()
            with pytest.raises(fastipc.Closed, match="shut down"):
                group.add_engine()
            group.shutdown(timeout=0)
            assert not child.is_alive()
            assert not group._thread.is_alive()
        group.shutdown()


def test_no_engine_is_added_to_a_group_that_ends_at_that_moment():
    with launch(CountingCore) as group:
        lock = group._lock

        class Lock:
            def __enter__(self):
                group._lock = lock
                group.shutdown()
                lock.acquire()

            def __exit__(self, *_):
                lock.release()

        group._lock = Lock()
        with pytest.raises(fastipc.Closed, match="shut down"):
            group.add_engine()
        assert list(group.processes) == [0]


# -- the end of the coordinator --------------------------------------------------------------------


def test_engines_in_lockstep_end_with_their_coordinator_and_say_so():
    with EngineClient.launch(LockstepCore, engines=2, restart=True, timeout=60) as client:
        before = client.group.processes
        client.group.coordinator.kill()
        eventually(lambda: all(e.exitcode is not None for e in client.engines.values()))
        for engine in client.engines.values():
            assert engine.final
            assert "engine coordinator" in engine.reason
            assert engine.exitcode == 0
        with pytest.raises(EngineDeadError, match=r"engine coordinator .* was killed by SIGKILL"):
            client.add_request(Request("a"))
        # None was started in place of another.
        assert client.group.processes == before
        spec = client.group.clients[0]
        with pytest.raises(EngineDeadError, match=r"engine coordinator .* was killed by SIGKILL"):
            EngineClient(spec, timeout=30)


def test_loads_that_the_coordinator_told_before_its_end_count_no_more():
    with (
        launch(CountingCore, {"step_seconds": 0.005}, engines=2, clients=2) as group,
        EngineClient(group.clients[0], timeout=60) as one,
    ):
        with EngineClient(group.clients[1], timeout=60) as other:
            for i in range(8):
                other.add_request(Request(f"other{i}", 1 << 40), engine=0)
            eventually(lambda: one.engines[0].load == 8)
            group.coordinator.kill()
            eventually(lambda: one.engines[0].load == 0)
        streams = [one.add_request(Request(f"one{i}", 1 << 40)) for i in range(8)]
        assert [sum(s.engine == e for s in streams) for e in range(2)] == [4, 4]


# -- opening and closing in an event loop ----------------------------------------------------------


class Launches:
    """In place of ``launch``: waits to be let go, and keeps the groups."""

    def __init__(self):
        self.begun = threading.Event()
        self.go = threading.Event()
        self.groups = []

    def __call__(self, *args, **kwargs):
        self.begun.set()
        assert self.go.wait(60)
        self.groups.append(launch(*args, **kwargs))
        return self.groups[0]

    async def opening(self):
        """A client that is being opened, and the task that does it: it has come here."""
        client = AsyncEngineClient.launch(CountingCore)
        task = asyncio.create_task(client.open())
        await asyncio.to_thread(self.begun.wait, 60)
        return client, task

    def all_ended(self):
        return self.groups and not any(
            child.is_alive() for child in self.groups[0].processes.values()
        )


@pytest.mark.parametrize("launched", [False, True])
def test_opening_that_is_cancelled_ends_what_it_has_launched(monkeypatch, launched):
    launches = Launches()
    monkeypatch.setattr(engine_aio, "launch", launches)

    async def main():
        client, task = await launches.opening()
        if launched:
            launches.go.set()
            eventually(lambda: launches.groups)  # of which the loop knows nothing yet
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        launches.go.set()
        await client.close()
        while not launches.all_ended():
            await asyncio.sleep(0.01)

    asyncio.run(main())
    eventually(lambda: launches.groups[0]._closed)


def test_closing_while_the_engines_are_launched_ends_them(monkeypatch):
    launches = Launches()
    monkeypatch.setattr(engine_aio, "launch", launches)

    async def main():
        client, task = await launches.opening()
        await client.close()
        launches.go.set()
        with pytest.raises(fastipc.Closed, match="closed while it was opened"):
            await task
        assert launches.all_ended()

    asyncio.run(main())


def test_closing_ends_the_wait_for_the_engines():
    async def main():
        with launch(CountingCore, external=1) as group:
            client = AsyncEngineClient(group.clients[0])
            opening = asyncio.create_task(client.open())
            while client._opened is None or not client._opened.welcome:
                await asyncio.sleep(0.01)
            await client.close()
            with pytest.raises(fastipc.Closed):
                await asyncio.wait_for(opening, 30)

    asyncio.run(main())


# -- signal handlers -------------------------------------------------------------------------------


@contextmanager
def handling_while_sending(handler, monkeypatch):
    """The next time that this thread is about to send, it gets a signal, and handles it so."""
    send = frontend.send_frames
    here = threading.get_ident()

    def sending(*args, **options):
        if threading.get_ident() == here:
            monkeypatch.setattr(frontend, "send_frames", send)
            signal.raise_signal(signal.SIGUSR1)
        return send(*args, **options)

    monkeypatch.setattr(frontend, "send_frames", sending)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_inside_a_call_sends_nothing_in_its_midst(monkeypatch):
    """The messages would become one. What it aborts is aborted when the call is over."""
    with EngineClient.launch(CountingCore, {"step_seconds": 0.001}, timeout=60) as client:
        running = client.add_request(Request("running", 1 << 40))
        handled = []

        def handler(*_):
            for call in (
                lambda: client.add_request(Request("inner")),
                lambda: client.call("add", 1),
                lambda: client.wait_until_ready(60),
            ):
                with pytest.raises(IPCError, match="inside a call of this client already"):
                    call()
            running.abort()
            handled.append(client.stats()["in_flight"])

        with handling_while_sending(handler, monkeypatch):
            outer = client.add_request(Request("outer", 3))
        assert handled == [2]
        assert tokens(outer) == [1, 2, 3]
        list(running)
        assert client.call("state")["live"] == []


def test_a_handler_inside_a_call_may_close_the_client(monkeypatch):
    client = EngineClient.launch(CountingCore, {"step_seconds": 0.001}, timeout=60)
    engine = client.group.processes[0]
    with handling_while_sending(lambda *_: client.close(), monkeypatch):
        outer = client.add_request(Request("outer", 1 << 40))
    with pytest.raises(Closed, match="is closed"):
        list(outer)
    with pytest.raises(Closed, match="is closed"):
        client.add_request(Request("next"))
    eventually(lambda: engine.exitcode is not None and not client._thread.is_alive())
    client.close()
