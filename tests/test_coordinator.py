"""Several engines: who gets a request, and the waves in which they step together."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from engine_cores import CountingCore, LockstepCore, Request
from hypothesis import given
from hypothesis import strategies as st
from support import NIGHTLY, eventually, forever

from fastipc import EngineDeadError
from fastipc.engine import EngineClient, launch
from fastipc.engine.coordinator import Coordinator
from fastipc.engine.protocol import Report, Wave

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("own_socket_directory")]


def busy(engine, wave, start=False, running=1):
    return Report(engine, 0, running, wave, True, start)


def idle(engine, wave):
    return Report(engine, 0, 0, wave, False)


# -- the state alone -------------------------------------------------------------------------------


def test_a_wave_begins_with_the_first_work_and_ends_with_the_last():
    state = Coordinator()
    assert state.take(idle(0, 0)) == state.take(idle(1, 0)) == []
    assert state.take(busy(0, 0, start=True)) == [Wave(0, True)]
    assert state.take(busy(1, 0)) == []
    assert state.take(idle(0, 0)) == []
    assert state.take(idle(1, 0)) == [Wave(0, False)]
    assert (state.wave, state.stepping) == (1, False)
    assert state.take(busy(1, 1, start=True)) == [Wave(1, True)]


def test_a_request_that_crosses_the_end_of_a_wave_begins_the_next():
    state = Coordinator()
    state.take(busy(0, 0, start=True))
    state.take(idle(1, 0))
    assert state.take(idle(0, 0)) == [Wave(0, False)]
    # Engine 1 had begun to work before it heard of that.
    assert state.take(busy(1, 0)) == []
    assert state.take(busy(1, 1, start=True)) == [Wave(1, True)]


def test_who_knows_nothing_of_past_waves_begins_the_next_one():
    """An engine that was started again, or the request of a new front end."""
    state = Coordinator()
    for wave in range(5):
        assert state.take(busy(0, wave, start=True)) == [Wave(wave, True)]
        assert state.take(idle(0, wave)) == [Wave(wave, False)]
    assert state.take(busy(1, 0, start=True)) == [Wave(5, True)]
    assert state.take(idle(1, 5)) == [Wave(5, False)]


def test_an_engine_that_is_gone_is_not_waited_for():
    state = Coordinator()
    state.take(busy(0, 0, start=True))
    state.take(busy(1, 0))
    assert state.take(idle(0, 0)) == []
    assert state.left(1) == [Wave(0, False)]
    assert [load[0] for load in state.loads().loads] == [0]


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60))
def test_nobody_rests_in_a_wave_with_work_for_long(events):
    """Engines that do as process.py does, with every message delivered at once."""
    state = Coordinator()
    engines = {i: {"work": 0, "wave": 0, "stepping": False} for i in range(3)}

    def tell(index, start=False):
        engine = engines[index]
        report = Report(index, 0, engine["work"], engine["wave"], engine["work"] > 0, start)
        for wave in state.take(report):
            for other, told in engines.items():
                if wave.wave < told["wave"]:
                    continue
                if wave.begins:
                    told.update(wave=wave.wave, stepping=True)
                else:
                    told.update(wave=wave.wave + 1, stepping=False)
                    if told["work"]:
                        told["stepping"] = True
                        tell(other, start=True)

    for index in engines:
        tell(index)
    for index, arrives in events:
        engine = engines[index]
        if arrives:
            engine["work"] += 1
            begins = not engine["stepping"]
            engine["stepping"] = True
            tell(index, start=begins)
        elif engine["work"]:
            engine["work"] -= 1
            tell(index)
        working = any(e["work"] for e in engines.values())
        assert {e["stepping"] for e in engines.values()} == {working}
        assert state.stepping == working
        assert len({e["wave"] for e in engines.values()}) == 1


# -- real engines ----------------------------------------------------------------------------------


def test_requests_go_to_the_engine_with_the_least_to_do():
    with EngineClient.launch(
        CountingCore, {"step_seconds": 0.005}, engines=3, timeout=60
    ) as client:
        streams = [client.add_request(Request(str(i), 1 << 40)) for i in range(30)]
        by_engine = [sum(s.engine == e for s in streams) for e in range(3)]
        assert by_engine == [10, 10, 10]
        # What another front end would have there counts as well, once it is known.
        eventually(lambda: sum(e.load for e in client.engines.values()) == 30)
        busiest = [s for s in streams if s.engine != 1]
        client.abort(*[s.request_id for s in busiest])
        eventually(lambda: [client.engines[e].load for e in range(3)] == [0, 10, 0])
        eventually(lambda: client.stats()["in_flight"] == 10)
        more = [client.add_request(Request(f"more{i}", 1 << 40)) for i in range(10)]
        assert {s.engine for s in more} == {0, 2}
        for engine in range(3):
            state = client.call("state", engine=engine)
            assert state["index"] == engine


def test_loads_of_other_front_ends_count(start_child):
    with launch(CountingCore, {"step_seconds": 0.005}, engines=2, clients=2) as group:
        with (
            EngineClient(group.clients[0], timeout=60) as one,
            EngineClient(group.clients[1], timeout=60) as other,
        ):
            for i in range(8):
                one.add_request(Request(f"one{i}", 1 << 40), engine=0)
            eventually(lambda: other.engines[0].load == 8)
            streams = [other.add_request(Request(f"other{i}", 1 << 40)) for i in range(8)]
            assert [s.engine for s in streams] == [1] * 8


def test_an_abort_goes_to_the_engine_that_has_the_request():
    with EngineClient.launch(
        CountingCore, {"step_seconds": 0.002}, engines=2, timeout=60
    ) as client:
        streams = [client.add_request(Request(str(i), 1 << 40)) for i in range(6)]
        for stream in streams:
            stream.get(30)
        client.abort(*(s.request_id for s in streams if s.engine == 1))
        eventually(lambda: client.call("state", engine=1)["live"] == [])
        assert len(client.call("state", engine=0)["live"]) == 3
        states = client.call("state")
        assert [s["aborted"] for s in states] == [0, 3]


def test_an_engine_that_died_gets_nothing_more():
    with EngineClient.launch(CountingCore, engines=2, timeout=60) as client:
        os.kill(client.engines[1].pid, signal.SIGKILL)
        eventually(lambda: not client.engines[1].alive)
        for i in range(10):
            stream = client.add_request(Request(str(i), 2))
            assert stream.engine == 0
            assert len(list(stream)) == 2
        with pytest.raises(EngineDeadError, match="engine 1"):
            client.add_request(Request("there"), engine=1)
        os.kill(client.engines[0].pid, signal.SIGKILL)
        eventually(lambda: not client.engines[0].alive)
        with pytest.raises(EngineDeadError, match=r"no engine is alive: engine 0: .*; engine 1: "):
            client.add_request(Request("anywhere"))


def test_engines_in_lockstep_step_together_and_rest_together():
    with EngineClient.launch(
        LockstepCore, {"step_seconds": 0.002}, engines=2, timeout=60
    ) as client:

        def dummy_steps():
            return [state["dummy_steps"] for state in client.call("state")]

        for turn in range(4):
            engine = turn % 2
            before = dummy_steps()
            got = list(client.generate(Request(str(turn), 50), engine=engine))
            assert len(got) == 50
            # The other one steps along, without work ...
            with client.add_request(Request(f"{turn} on", 1 << 40), engine=engine):
                eventually(lambda: dummy_steps()[1 - engine] - before[1 - engine] > 5)  # noqa: B023
            # ... and both rest when there is none.
            eventually(lambda: dummy_steps() == dummy_steps())
        assert client._core.wave >= 1
        eventually(lambda: not client._core.stepping)
        os.kill(client.engines[1].pid, signal.SIGKILL)
        eventually(lambda: not client.engines[1].alive)
        assert len(list(client.generate(Request("alone", 20)))) == 20


def test_an_engine_may_join_later():
    with EngineClient.launch(CountingCore, {"step_seconds": 0.002}, timeout=60) as client:
        first = client.add_request(Request("first", 1 << 40))
        assert client.group.coordinator is None
        for index in (1, 2):
            assert client.group.add_engine() == index
            eventually(lambda: len(client.engines) == index + 1)  # noqa: B023
            client.wait_until_ready(60)
        assert client.group.coordinator is not None
        streams = [client.add_request(Request(str(i), 1 << 40)) for i in range(11)]
        assert [sum(s.engine == e for s in (first, *streams)) for e in range(3)] == [4, 4, 4]
        # and the loads of all are known
        eventually(lambda: [client.engines[e].load for e in range(3)] == [4, 4, 4])
        first.get(30)


def test_the_end_of_the_coordinator(caplog):
    with EngineClient.launch(CountingCore, engines=2, timeout=60) as client:
        client.group.coordinator.kill()
        eventually(lambda: "engine coordinator" in caplog.text)
        assert "was killed by SIGKILL" in caplog.text
        for i in range(6):
            assert len(list(client.generate(Request(str(i), 3)))) == 3
    with EngineClient.launch(LockstepCore, engines=2, timeout=60) as client:
        client.group.coordinator.kill()
        with pytest.raises(EngineDeadError):
            forever(lambda: list(client.generate(Request("a", 3))))


@pytest.mark.timeout(3000 if NIGHTLY else 90)
def test_four_front_ends_and_two_engines(start_child):
    """Each request is answered once, to who sent it."""
    count = 25_000 if NIGHTLY else 500
    with launch(CountingCore, engines=2, clients=4) as group:
        children = [
            start_child(
                """
                import asyncio, sys, time
                from engine_cores import Request
                from fastipc.engine import AsyncEngineClient

                async def main(word, count):
                    async with AsyncEngineClient(word, timeout=60) as client:
                        limit = asyncio.Semaphore(250)
                        index = client._spec.client_index
                        async def one(i):
                            async with limit:
                                want = 1 + i % 3
                                request = Request(f"{index}-{i}", want)
                                got = [o.token async for o in client.generate(request)]
                                assert got == list(range(1, want + 1))
                        began = time.monotonic()
                        async with asyncio.TaskGroup() as tasks:
                            for i in range(count):
                                tasks.create_task(one(i))
                        seconds = time.monotonic() - began
                        stats = client.stats()
                        assert stats["finished"] == count and stats["in_flight"] == 0, stats
                        print("done", round(count / seconds), flush=True)

                asyncio.run(main(sys.argv[1], int(sys.argv[2])))
                """,
                spec.to_str(),
                count,
                env={"PYTHONPATH": os.path.dirname(__file__)},
                timeout=3000 if NIGHTLY else 80,
            )
            for spec in group.clients
        ]
        rates = [int(child.check().split()[1]) for child in children]
        print(f"{sum(rates)} requests/s through 4 front ends and 2 engines", file=sys.stderr)
        with EngineClient(group.clients[0], timeout=60) as client:
            states = client.call("state")
            assert sum(state["added"] for state in states) == 4 * count
            assert all(state["added"] > count / 2 for state in states)
            assert [state["live"] for state in states] == [[], []]
