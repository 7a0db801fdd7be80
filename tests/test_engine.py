"""Engines and their front ends: requests, outputs, calls, limits, and what happens to the dead."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import zmq
from engine_cores import (
    REFUSING,
    CountingCore,
    LendingCore,
    MistypedCore,
    OddOutputCore,
    OddStepCore,
    Output,
    PickyCore,
    PickyRequest,
    Request,
    ReusingCore,
    Sealed,
    TellingCore,
    Wordless,
    WordlessCore,
    WrongStepCore,
    YieldingCore,
)
from support import (
    NIGHTLY,
    Interrupted,
    eventually,
    forever,
    interrupted_at,
    process_state,
    within,
)

import fastipc
from fastipc import EngineDeadError, RequestFailed, SlowConsumer, TooManyRequests
from fastipc.engine import (
    AsyncEngineClient,
    ClientSpec,
    EngineClient,
    EngineCore,
    frontend,
    launch,
    protocol,
)
from fastipc.engine import group as group_module
from fastipc.engine.aio import AsyncOutputStream
from fastipc.engine.client import OutputStream, PendingCall
from fastipc.engine.core import check_core_class
from fastipc.engine.outbox import Batch, Outbox
from fastipc.histogram import Histogram

METHODS = ["fork", "spawn", "forkserver"]
pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("own_socket_directory")]


@pytest.fixture(scope="module")
def client(own_socket_directory):
    """A client of one engine, for what leaves it as it was."""
    # (steps that take some time: what a test leaves unread for a while is not too much)
    with EngineClient.launch(CountingCore, {"step_seconds": 0.001}, timeout=60) as made:
        yield made


@pytest.fixture
def patient(monkeypatch):
    """A front end waits for the word of an engine's parent as long as a busy machine may need."""
    monkeypatch.setattr(frontend, "EXIT_SECONDS", 30.0)


def running(pid):
    """Whether there is such a process, and not merely its exit code."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def tokens(outputs):
    return [output.token for output in outputs]


# -- requests and outputs --------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_outputs_come_in_order_and_end(method):
    with EngineClient.launch(CountingCore, start_method=method, timeout=60) as client:
        assert tokens(client.generate(Request("a", 5))) == [1, 2, 3, 4, 5]
        assert client.engines[0].info == {"index": 0, "limit": 17}
        assert client.engines[0].pid == client.group.processes[0].pid


def test_the_first_word_of_the_request_is_its_identity_and_type(client):
    assert [protocol.identity(i) for i in (0, 1, 256)] == [b"\0\0", b"\1\0", b"\0\1"]
    assert (protocol.ADD, protocol.ABORT, protocol.START_DP_WAVE, protocol.UTILITY) == (
        b"\0",
        b"\1",
        b"\2",
        b"\3",
    )


def test_arrays_travel_as_frames_of_their_own(client):
    image = np.arange(1 << 20, dtype=np.uint8)
    outputs = list(client.generate(Request("image", 2, image)))
    assert tokens(outputs) == [int(image.sum()) + 1, int(image.sum()) + 2]


def test_a_copied_array_may_be_changed_at_once(client):
    for i in range(20):
        image = np.full(1 << 21, i, np.uint8)
        stream = client.add_request(Request(f"copied{i}", 1, image))
        image[:] = 255
        assert stream.sent is None
        assert tokens(stream) == [i * (1 << 21) + 1]


def test_a_borrowed_array_may_be_changed_when_it_has_been_sent(client):
    image = np.full(8 << 20, 3, np.uint8)
    stream = client.add_request(Request("borrowed", 1, image), copy=False)
    stream.sent.wait(30)
    assert stream.sent.done
    image[:] = 255
    assert tokens(stream) == [3 * (8 << 20) + 1]


def test_many_requests_from_many_threads(client):
    failures = []

    def work(thread):
        try:
            for i in range(50):
                count = 1 + (thread + i) % 7
                got = tokens(client.generate(Request(f"{thread}-{i}", count)))
                assert got == list(range(1, count + 1))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    eventually(lambda: client.stats()["in_flight"] == 0)


def test_get_says_when_nothing_came_and_when_there_is_no_more():
    with EngineClient.launch(CountingCore, {"step_seconds": 0.2}, timeout=60) as client:
        stream = client.add_request(Request("slow", 2))
        with pytest.raises(fastipc.Empty, match="'slow' within 0 s"):
            stream.get(timeout=0)
        assert tokens(stream) == [1, 2]
        with pytest.raises(fastipc.Closed, match="no more outputs"):
            stream.get()
        assert list(stream) == []


def test_an_id_is_under_way_once(client):
    stream = client.add_request(Request("twice", 10_000_000))
    with pytest.raises(ValueError, match="'twice' is under way already"):
        client.add_request(Request("twice", 1))
    stream.abort()
    for _ in stream:
        pass
    eventually(lambda: client.stats()["in_flight"] == 0)
    assert tokens(client.generate(Request("twice", 1))) == [1]


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (Output("x", 1, True), TypeError, "a request is a Request, not Output"),
        (Request(""), TypeError, "not empty"),
        (Request(7), TypeError, "request_id must be a text"),
        ("x", TypeError, "not str"),
    ],
)
def test_what_is_no_request_is_refused_before_it_is_sent(client, request_, error, words):
    with pytest.raises(error, match=words):
        client.add_request(request_)
    assert client.stats()["in_flight"] == 0


def test_a_request_that_the_core_refuses_fails_alone(client):
    other = client.add_request(Request("good", 200))
    with pytest.raises(RequestFailed, match="tokens=-3 is not a count") as caught:
        list(client.generate(Request("bad", -3)))
    assert caught.value.request_id == "bad"
    assert caught.value.kind == "ValueError"
    assert "in add_request" in caught.value.__cause__.traceback
    assert len(tokens(other)) == 200


def test_a_request_of_another_type_fails_with_its_reason(client):
    """The front end's type is not what the engine decodes."""

    class Odd(msgspec.Struct):
        request_id: str
        tokens: str = "many"

    client._core.request_type, before = Odd, client._core.request_type
    try:
        stream = client.add_request(Odd("odd"))
    finally:
        client._core.request_type = before
    with pytest.raises(RequestFailed, match=r"Expected `int`"):
        list(stream)


def test_a_request_of_which_the_engine_cannot_tell_which_it_is_fails_all(client):
    class Nameless(msgspec.Struct):
        request_id: str = msgspec.field(name="id")

    good = client.add_request(Request("good", 1 << 40))
    assert good.get(30).token == 1
    client._core.request_type, before = Nameless, client._core.request_type
    try:
        nameless = client.add_request(Nameless("nameless"))
    finally:
        client._core.request_type = before
    for stream in (good, nameless):
        with pytest.raises(RequestFailed, match="missing required field `request_id`"):
            list(stream)
    assert tokens(client.generate(Request("good", 3))) == [1, 2, 3]
    eventually(lambda: client.call("state")["live"] == [])
    assert client.stats()["in_flight"] == 0


def test_when_all_are_lost_their_ids_can_be_used_again_at_once(client):
    """What is on the way of the old ones is not of the new ones."""
    core = client._core
    for _ in range(3):
        old = client.add_request(Request("again", 1 << 40))
        assert old.get(30).token == 1
        with client._lock:
            eventually(lambda: core._pull.get(zmq.EVENTS) & zmq.POLLIN)
            core._lose_all(core.engines[0], lambda: RequestFailed("lost"))
            new = OutputStream(client, "again", 100)
            core.add(Request("again", 3), new, None, True, time.monotonic_ns())
        with pytest.raises(RequestFailed, match="lost"):
            list(old)
        assert tokens(new) == [1, 2, 3]
    eventually(lambda: not core.undoing)


def test_an_output_that_cannot_be_encoded_fails_its_request_alone():
    with EngineClient.launch(OddOutputCore, timeout=60) as client:
        odd = client.add_request(Request("odd", 3))
        good = client.add_request(Request("good", 3))
        with pytest.raises(RequestFailed, match="can't be encoded"):
            list(odd)
        assert tokens(good) == [1, 2, 3]


def test_what_the_types_own_methods_raise_fails_that_request_alone():
    with EngineClient.launch(PickyCore, {"step_seconds": 0.001}, timeout=60) as client:
        good = client.add_request(PickyRequest("good", 1 << 40))
        with pytest.raises(RequestFailed, match="LookupError: no tokenizer for b'new'") as caught:
            list(client.generate(PickyRequest("refused", payload=b"new")))
        assert caught.value.kind == "LookupError"
        odd = client.add_request(PickyRequest("odd", 1 << 40))
        assert odd.get(30).token == 1
        with pytest.raises(RequestFailed, match="can't be decoded here: no word for 2"):
            odd.get(30)
        eventually(lambda: client.call("state")["live"] == ["good"])
        assert good.get(30).token == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("nothing", "must return outputs in a list, or yield them: it returned a NoneType"),
        ("one", "must return outputs in a list, or yield them: it returned a Output"),
        ("none", "made a NoneType where an output should be, a Output"),
        ("yields none", "made a NoneType where an output should be, a Output"),
        ("dict", "made a dict where an output should be, a Output"),
        ("number", "made an output whose request_id is a int, not a str"),
        ("yields number", "made an output whose request_id is a int, not a str"),
        ("list", "made an output whose request_id is a list, not a str"),
    ],
)
def test_an_engine_whose_step_makes_no_outputs_ends_and_says_what_it_made(wrong, said):
    with EngineClient.launch(WrongStepCore, {"wrong": wrong}, timeout=60) as client:
        with pytest.raises(EngineDeadError, match=rf"WrongStepCore.step\(\) {said}"):
            list(client.generate(Request("a", 3)))


# What msgpack makes of it is a key that no dict has.
KEY = msgspec.defstruct("Key", ["value"], frozen=True)(1)


@pytest.mark.parametrize("info", [object(), {"limit": np.int64(3)}, "\udce9", {KEY: 1}])
def test_an_engine_whose_info_cannot_be_sent_does_not_start(info):
    with pytest.raises(TypeError, match=r"TellingCore.info\(\) must return plain values"):
        EngineClient.launch(TellingCore, {"info": info}, start_method="fork", timeout=60)


@pytest.mark.parametrize("stats", [None, [Histogram()], {0: Histogram()}])
def test_an_engine_whose_stats_have_no_names_ends_and_says_so(stats):
    with EngineClient.launch(TellingCore, {"stats": stats}, timeout=60) as client:
        with pytest.raises(EngineDeadError, match=r"TellingCore.stats\(\) must return a dict"):
            list(client.generate(Request("a", 3)))


@pytest.mark.parametrize("load", [3, (1, 2, 3), (0.5, 1), (None, 1), (0, 1 << 63), "12"])
def test_an_engine_whose_load_is_no_load_ends_and_says_so(load):
    with EngineClient.launch(TellingCore, {"load": load}, engines=2, timeout=60) as client:
        with pytest.raises(EngineDeadError, match=r"TellingCore.load\(\) must return two numbers"):
            list(client.generate(Request("a", 1 << 40)))
        assert sum(engine.alive for engine in client.engines.values()) == 1


def test_a_load_may_be_of_numpys_numbers():
    config = {"load": (np.int64(1), np.int32(5))}
    with EngineClient.launch(TellingCore, config, engines=2, timeout=60) as client:
        client.add_request(Request("a", 1 << 40), engine=1)
        eventually(lambda: [engine.load for engine in client.engines.values()] == [0, 9])


def test_a_stream_that_has_ended_aborts_no_other_request_of_its_id():
    with EngineClient.launch(CountingCore, {"step_seconds": 0.001}, timeout=60) as client:
        with client.add_request(Request("a", 2)) as first:
            assert tokens(first) == [1, 2]
            second = client.add_request(Request("a", 300))
        first.abort()
        assert tokens(second) == list(range(1, 301))


def test_an_asyncio_stream_that_has_ended_aborts_no_other_request_of_its_id():
    async def main():
        async with AsyncEngineClient.launch(
            CountingCore, {"step_seconds": 0.001}, timeout=60
        ) as client:
            async with client.add_request(Request("a", 2)) as first:
                assert [output.token async for output in first] == [1, 2]
                second = client.add_request(Request("a", 300))
            first.abort()
            assert [output.token async for output in second] == list(range(1, 301))

    asyncio.run(main())


@pytest.mark.parametrize("name", ["max_buffered", "max_in_flight_bytes"])
@pytest.mark.parametrize("limit", [0, -1, None, "5"])
def test_a_limit_of_a_client_is_a_count(name, limit):
    spec = ClientSpec(client_index=0, control="ipc:///nowhere")
    for kind in (EngineClient, AsyncEngineClient):
        with pytest.raises(ValueError, match=f"{name}={limit!r} must be a whole number"):
            kind(spec, request_type=Request, output_type=Output, **{name: limit})


@pytest.mark.parametrize("kind", [OutputStream, AsyncOutputStream])
def test_as_many_outputs_may_wait_as_the_limit_says(client, kind):
    stream = kind(client, "a", 2)
    assert [stream.put(Output("a", token, False)) for token in (1, 2, 3)] == [True, True, False]


def test_a_client_is_opened_by_one_task_only():
    async def main():
        client = AsyncEngineClient.launch(CountingCore, timeout=60)
        opening = [asyncio.create_task(client.open()) for _ in range(2)]
        first, second = await asyncio.gather(*opening, return_exceptions=True)
        assert first is None
        assert isinstance(second, RuntimeError)
        assert "opened before" in str(second)
        await client.close()

    asyncio.run(main())


WITHOUT_WORDS = {"wordless": "can't be had: LookupError", "path": r"at /caf\\udce9"}


@pytest.mark.parametrize("what", WITHOUT_WORDS)
def test_an_exception_whose_text_cannot_be_had_or_encoded_is_told_all_the_same(what):
    with EngineClient.launch(WordlessCore, timeout=60) as client:
        good = client.add_request(Request("good", 1 << 40))
        for _ in range(2):
            with pytest.raises(RequestFailed, match=WITHOUT_WORDS[what]) as caught:
                list(client.generate(Request("a", payload=what.encode())))
            assert "in complain" in caught.value.__cause__.traceback
            with pytest.raises(RequestFailed, match=WITHOUT_WORDS[what]):
                client.call("complain", what)
        assert good.get(30).token == 1


@pytest.mark.parametrize(
    ("what", "kind"), [("wordless", Wordless), ("path", ValueError)], ids=["wordless", "path"]
)
def test_an_engine_that_fails_to_start_for_reasons_without_words_is_dead(what, kind):
    with launch(WordlessCore, {"raises": what}) as group:
        with pytest.raises(EngineDeadError, match=WITHOUT_WORDS[what]):
            EngineClient(group.clients[0], timeout=60)
        with pytest.raises(kind):
            group.wait_until_ready(60)


@pytest.mark.parametrize("yields", [False, True])
def test_a_request_of_which_an_output_cannot_be_encoded_is_aborted_in_the_core(yields):
    """Its id is free then; and it has failed though a good output comes in the same step."""
    config = {"yields": yields, "step_seconds": 0.001}
    with EngineClient.launch(OddStepCore, config, timeout=60) as client:
        good = client.add_request(Request("good", 300))
        for name, aborted in (("odd", 1), ("odd, then the end", 1), ("odd", 2)):
            odd = client.add_request(Request(name, 1 << 40))
            assert odd.get(30).token == 1
            with pytest.raises(RequestFailed, match="can't be encoded"):
                odd.get(30)
            state = client.call("state")
            assert (name in state["live"], state["aborted"]) == (False, aborted)
        assert tokens(client.generate(Request("odd", 1))) == [1]
        assert tokens(good) == list(range(1, 301))


@pytest.mark.parametrize("length", [2, 10])
def test_an_output_that_is_not_of_the_type_fails_its_request_alone(length):
    """Also when it is the last one, and nothing comes after it."""
    with EngineClient.launch(MistypedCore, {"step_seconds": 0.001}, timeout=60) as client:
        image = np.ones(100_000, np.uint8)
        good = client.add_request(Request("good", 300, image))
        odd = client.add_request(Request("odd", length))
        assert odd.get(30).token == 1
        for _ in range(2):
            with pytest.raises(
                RequestFailed, match=r"can't be decoded here: Expected `int`"
            ) as caught:
                odd.get(30)
            assert caught.value.request_id == "odd"
        assert tokens(good) == list(range(100_001, 100_301))
        eventually(lambda: client.stats()["in_flight"] == 0)
        assert client.call("state")["live"] == []
        assert tokens(client.generate(Request("odd", 1))) == [1]


def test_an_output_of_which_nobody_can_tell_whose_it_is_fails_all(caplog):
    with EngineClient.launch(MistypedCore, {"step_seconds": 0.001}, timeout=60) as client:
        streams = [client.add_request(Request(name, 1 << 40)) for name in ("good", "nobody")]
        for stream in streams:
            with pytest.raises(RequestFailed, match=r"can't be decoded here: Object missing"):
                list(stream)
        assert "of which request" in caplog.text
        eventually(lambda: client.call("state")["live"] == [])
        assert tokens(client.generate(Request("good", 3))) == [1, 2, 3]


ONE_SEND = within("fastipc/sockets.py")
SENDING = within("engine/client.py", "engine/aio.py", "engine/frontend.py", "fastipc/sockets.py")


def test_an_interrupted_add_leaves_nothing_and_its_id_free(client):
    image = np.ones(20_000)
    for point in range(1000):
        name = f"interrupted {point}"
        if not interrupted_at(
            point, SENDING, lambda name=name: client.add_request(Request(name, 1 << 40, image))
        ):
            break
        assert client.stats()["in_flight"] == 0
        assert client.stats()["in_flight_bytes"] == 0
        assert tokens(client.add_request(Request(name, 3))) == [1, 2, 3]
    else:
        pytest.fail("it never came to its end")
    assert point > 40
    client.abort(name)
    eventually(lambda: client.stats()["in_flight"] == 0)
    assert client.call("state")["live"] == []


def test_an_id_whose_adds_were_interrupted_again_and_again(client):
    """Outputs of the earlier ones, which the engine may have begun, are not the last one's."""
    core = client._core
    add, interruptions = core.add, 0

    def add_and_interrupt(*arguments):
        add(*arguments)
        raise Interrupted

    core.add = add_and_interrupt
    try:
        for base in range(1, 6):
            with pytest.raises(Interrupted):
                client.add_request(Request("again", 1 << 40, np.full(1, 1000 * base)))
            interruptions += 1
    finally:
        del core.add
    assert tokens(client.add_request(Request("again", 3))) == [1, 2, 3]
    eventually(lambda: not core.undoing)
    assert client.call("state")["live"] == []
    # an abort that waits for its turn after theirs
    core.add = add_and_interrupt
    try:
        with pytest.raises(Interrupted):
            client.add_request(Request("again", 1 << 40))
    finally:
        del core.add
    with client.add_request(Request("again", 1 << 40)):
        pass
    eventually(lambda: client.stats()["in_flight"] == 0)
    assert not core.undoing


def test_an_interrupted_abort_or_call_leaves_a_client_that_works(client):
    for point in range(1000):
        name = f"aborted {point}"
        stream = client.add_request(Request(name, 1 << 40))
        if not interrupted_at(point, ONE_SEND, lambda name=name: client.abort(name)):
            break
        eventually(lambda: client.stats()["in_flight"] == 0)
        for _ in stream:
            pass
    else:
        pytest.fail("it never came to its end")
    assert point > 10
    for point in range(1000):
        if not interrupted_at(point, SENDING, lambda: client.call_async("add", np.ones(20_000))):
            break
        assert client.call("add", point) == point + 1
    else:
        pytest.fail("it never came to its end")
    eventually(lambda: client.stats()["calls"] == 0)
    assert client.call("state")["live"] == []


def test_an_async_add_that_is_interrupted():
    async def main():
        async with AsyncEngineClient.launch(CountingCore, timeout=60) as client:
            for point in range(1000):
                name = f"interrupted {point}"
                if not interrupted_at(
                    point, SENDING, lambda name=name: client.add_request(Request(name, 1 << 40))
                ):
                    break
                assert client.stats()["in_flight"] == 0
                assert [o.token async for o in client.generate(Request(name, 2))] == [1, 2]
            assert point > 30
            client.abort(name)
            assert (await client.call("state"))["live"] == []

    asyncio.run(main())


@pytest.mark.parametrize("core", [ReusingCore, YieldingCore])
@pytest.mark.parametrize("size", [5, 1000, 20_000])
def test_outputs_are_what_they_were_when_the_step_handed_them_over(core, size):
    """The core goes on with the list, the dict and the array that it made outputs of."""
    with EngineClient.launch(core, {"size": size}, timeout=60) as client:
        streams = [client.add_request(Request(f"reused {i}", 200)) for i in range(2)]
        for stream in streams:
            for count, output in enumerate(stream, 1):
                assert output.step == count
                assert output.tokens == list(range(1, count + 1))
                assert output.table == {str(count): count}
                assert output.array.shape == (size,)
                assert (output.array == count).all()
            assert count == 200


def test_outputs_are_borrowed_when_the_core_says_so():
    with EngineClient.launch(LendingCore, {"reply_bytes": 1 << 20}, timeout=60) as client:
        for count, output in enumerate(client.generate(Request("lent", 20)), 1):
            assert output.array.nbytes == 1 << 20
            assert (output.array == count).all()
        assert count == 20


def test_a_result_is_what_it_was_when_the_utility_returned_it():
    with EngineClient.launch(ReusingCore, {"size": 20_000}, timeout=60) as client:
        with client.add_request(Request("running", 1 << 40)):
            for _ in range(50):
                steps, table, array = client.call("mine")
                assert table == {str(steps): steps}
                assert (array == steps).all()


def test_an_output_that_is_yielded_and_cannot_be_encoded_fails_its_request_alone():
    with EngineClient.launch(YieldingCore, {"size": 5, "odd": True}, timeout=60) as client:
        odd = client.add_request(Request("odd", 3))
        good = client.add_request(Request("good", 3))
        with pytest.raises(RequestFailed, match="can't be encoded"):
            list(odd)
        assert len(list(good)) == 3


def test_the_time_of_a_step_that_yields_is_the_steps():
    with EngineClient.launch(YieldingCore, {"size": 5, "seconds": 0.05}, timeout=60) as client:
        for i in range(3):
            list(client.add_request(Request(f"timed {i}", 1)))
        stages = client.stats()["stages"]
        assert stages["step"]["min"] >= 0.05
        assert stages["output_queue"]["min"] < 0.05


def test_what_a_call_cannot_decode_fails_that_call_alone():
    with EngineClient.launch(CountingCore, {"step_seconds": 0.001}, timeout=60) as client:
        running = client.add_request(Request("running", 1 << 40))
        running.get(30)
        with pytest.raises(RequestFailed, match=r"arguments can't be decoded.*Sealed") as caught:
            client.call("add", Sealed(1), np.ones(1000), timeout=30)
        assert caught.value.kind
        with pytest.raises(RequestFailed, match=r"result can't be decoded here.*Sealed"):
            client.call("sealed", timeout=30)
        assert client.call("add", np.ones(1000), 1, timeout=30).tolist() == [2.0] * 1000
        before = running.get(30).token
        assert running.get(30).token == before + 1
        running.abort()
        for _ in running:
            pass
        with pytest.raises(RequestFailed, match="result can't be decoded here"):
            client.call("sealed", timeout=30)
        assert client.stats()["calls"] == 0


def test_a_request_that_cannot_be_decoded_fails_by_its_own_id():
    for core in REFUSING:
        with EngineClient.launch(core, timeout=60) as client:
            stream = client.add_request(core.request_type("text", "its id", Sealed(0)))
            with pytest.raises(RequestFailed, match="it is sealed") as caught:
                stream.get(30)
            assert caught.value.request_id == "its id"


def test_an_abort_ends_the_stream_and_empties_the_tables(client):
    streams = [client.add_request(Request(f"endless{i}", 1 << 40)) for i in range(20)]
    for stream in streams:
        stream.get(30)
    client.abort(*[stream.request_id for stream in streams])
    client.abort(*[stream.request_id for stream in streams], "never heard of")
    for stream in streams:
        for _ in stream:
            pass
    eventually(lambda: client.stats()["in_flight"] == 0)
    assert client.call("state")["live"] == []


def test_leaving_the_loop_aborts(client):
    for output in client.generate(Request("left", 1 << 40)):
        if output.token == 3:
            break
    eventually(lambda: client.stats()["in_flight"] == 0)
    assert client.call("state")["live"] == []
    with client.add_request(Request("with", 1 << 40)) as stream:
        stream.get(30)
    eventually(lambda: client.stats()["in_flight"] == 0)


def test_a_request_sent_again_is_ignored_and_an_abort_may_come_twice(client):
    """What a front end that isn't sure would do, on the wire."""
    before = client.call("state")
    stream = client.add_request(Request("again", 3_000_000))
    core = client._core
    with client._lock:
        frames = core._encoder.encode(protocol.Request(0, Request("again", 3_000_000)))
        core._send(core.engines[0], protocol.ADD, frames)
    stream.get(30)
    aborts = msgspec.msgpack.encode(protocol.Aborts(["again", "again", "other"]))
    with client._lock:
        for _ in range(2):
            core._send(core.engines[0], protocol.ABORT, [aborts])
    stream.abort()
    eventually(lambda: client.stats()["in_flight"] == 0)
    after = client.call("state")
    assert after["added"] == before["added"] + 1
    assert after["aborted"] == before["aborted"] + 1
    assert after["live"] == []


def test_the_answer_to_an_earlier_stall_limits_nothing():
    """It comes late, when the front end has taken all, the core was told to resume, and the front
    end has stalled again; now the core makes outputs until it hears of that."""
    told = []
    outbox = Outbox(0, 1 << 20, lambda *word: told.append(word))

    def make(count):
        for _ in range(count):
            batch = Batch()
            batch.outputs = [Output("a", 1, False, np.zeros(1 << 18, np.uint8))]
            outbox.put(7, batch)
            outbox._take_words()

    with zmq.Context() as ctx, ctx.socket(zmq.PUSH) as push, ctx.socket(zmq.PULL) as pull:
        pull.bind(fastipc.sockets.get_open_zmq_ipc_path())
        push.connect(pull.getsockopt_string(zmq.LAST_ENDPOINT))
        outbox.connect(7, push)
        outbox.epoch(7, 1)
        make(6)
        ((what, client, first),) = told
        assert (what, client) == ("stall", 7)
        outbox.credit(7, 1, 6)
        outbox._take_words()
        assert told.pop() == ("resume", 7, first)
        make(6)
        *_, (what, client, second) = told
        assert (what, client) == ("stall", 7)
        assert second != first
        outbox.stalled(7, first, True)
        make(20)
        outbox.stalled(7, second, True)  # what was made before is no fault of the core
        make(3)
        assert len(told) == 2
        make(1)
        assert told[2:] == [("overrun", 7, second)]
        outbox.stop(0)
        outbox._take_words()


# -- utility calls ---------------------------------------------------------------------------------


def test_calls_return_what_the_method_does(client):
    assert client.call("add", 2, b=3) == 5
    assert client.call("add", np.ones(3), 2.0).tolist() == [3.0, 3.0, 3.0]
    big = np.arange(1 << 20)
    assert (client.call("add", big, 1) == big + 1).all()


def test_a_call_that_raises_brings_the_traceback(client):
    with pytest.raises(RequestFailed, match="KeyError: 'the reason'") as caught:
        client.call("refuse", "the reason")
    assert "in refuse" in caught.value.__cause__.traceback
    with pytest.raises(RequestFailed, match="no utility method 'step'") as caught:
        client.call("step")
    assert "state" in str(caught.value)
    with pytest.raises(RequestFailed, match="no utility method '__init__'"):
        client.call("__init__")
    with pytest.raises(RequestFailed, match="result can't be encoded"):
        client.call("unsendable")
    assert client.call("add", 1) == 2


@pytest.mark.parametrize("name", [5, b"add", None])
def test_a_call_of_what_is_no_name_is_not_sent(client, name):
    with pytest.raises(TypeError, match=f"by its name, a str, not by {name!r}"):
        client.call(name, 1)
    assert client.stats()["calls"] == 0
    assert client.call("add", 1) == 2


def test_a_call_has_a_timeout(client):
    with pytest.raises(fastipc.Empty, match=r"nap\(\) of engine 0 has not returned within 0 s"):
        client.call("nap", 0.3, timeout=0)
    assert client.call("add", 1) == 2


# -- limits ----------------------------------------------------------------------------------------


def test_too_many_requests_are_refused_and_nothing_is_lost():
    with EngineClient.launch(CountingCore, max_in_flight=3, timeout=60) as client:
        pid = client.engines[0].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            eventually(lambda: process_state(pid) == "T")
            streams = [client.add_request(Request(str(i), 5)) for i in range(3)]
            with pytest.raises(TooManyRequests, match="3 requests are under way") as caught:
                client.add_request(Request("more", 1))
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (caught.value.in_flight, caught.value.limit) == (3, 3)
        for stream in streams:
            assert tokens(stream) == [1, 2, 3, 4, 5]
        assert tokens(client.generate(Request("more", 1))) == [1]


def test_too_many_bytes_are_refused():
    with launch(CountingCore, {"step_seconds": 0.05}) as group:
        spec = group.clients[0]
        with EngineClient(spec, timeout=60, max_in_flight_bytes=1 << 20) as client:
            big = np.zeros(900_000, np.uint8)
            stream = client.add_request(Request("big", 10, big))
            with pytest.raises(TooManyRequests, match="would pass the limit of 1048576"):
                client.add_request(Request("second", 1, big))
            assert len(tokens(stream)) == 10
            assert tokens(client.generate(Request("second", 1, big))) == [1]


def test_outputs_that_nobody_takes_abort_their_request_alone():
    with launch(CountingCore) as group:
        with EngineClient(group.clients[0], timeout=60, max_buffered=1000) as client:
            lazy = client.add_request(Request("lazy", 1 << 40))
            eventually(lambda: client.stats()["failed"] == 1)
            assert tokens(client.generate(Request("other", 3))) == [1, 2, 3]
            got = []
            with pytest.raises(SlowConsumer, match="'lazy'"):
                got.extend(output.token for output in lazy)
            assert got == list(range(1, len(got) + 1))
            assert len(got) >= 1000
            assert client.call("state")["live"] == []


@pytest.mark.parametrize("pausable", [True, False])
def test_a_stopped_front_end_costs_the_engine_a_bounded_amount(start_child, pausable):
    """The front end is a process that is stopped while a request of its makes 64 KiB a step."""
    options = {"reply_bytes": 1 << 16, "pausable": pausable, "hold_at": 10}
    window = 2 << 20
    with launch(CountingCore, options, clients=2, window=window) as group:
        child = start_child(
            """
            import sys
            from engine_cores import Request
            from fastipc.engine import EngineClient

            with EngineClient(sys.argv[1], timeout=60) as client:
                stream = client.add_request(Request("endless", 1 << 40))
                for output in stream:
                    if output.token == 10:
                        print("reading", flush=True)
                    assert (output.array == output.token % 251).all()
                    if output.token == 20_000:
                        break
            """,
            group.clients[1].to_str(),
            env={"PYTHONPATH": os.path.dirname(__file__)},
        )
        with EngineClient(group.clients[0], timeout=60) as client:
            child.wait_for("reading")
            before = client.call("rss")
            child.send_signal(signal.SIGSTOP)
            client.call("let_go")
            try:
                if pausable:
                    # It stops making outputs for this front end: steps stand still.
                    eventually(
                        lambda: client.call("state")["steps"] == client.call("state")["steps"]
                    )
                else:
                    eventually(lambda: client.call("state")["live"] == [], pause=0.05)
                if NIGHTLY:
                    time.sleep(10)
                assert client.call("rss") - before < 16 * window
                # The others go on. (What this one is sent fits into its window.)
                assert len(tokens(client.generate(Request("other", 20)))) == 20
            finally:
                child.send_signal(signal.SIGCONT)
            if pausable:
                assert child.wait() == 0, child.stderr
            else:
                assert child.wait() != 0
                assert "did not take its outputs" in child.stderr
            eventually(lambda: client.call("state")["live"] == [])


# -- deaths ----------------------------------------------------------------------------------------


def test_an_engine_that_is_killed_fails_what_it_had():
    with EngineClient.launch(CountingCore, timeout=60) as client:
        stream = client.add_request(Request("endless", 1 << 40))
        stream.get(30)
        pid = client.group.processes[0].pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"engine 0 \(pid {pid} .*SIGKILL") as caught:
            for _ in stream:
                pass
        assert (caught.value.engine, caught.value.exitcode) == (0, -signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            client.add_request(Request("next"))
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            client.call("state")
        assert client.stats()["in_flight"] == 0


def test_what_is_sent_before_the_death_is_told_fails_with_its_reason():
    with (
        EngineClient.launch(CountingCore, timeout=60) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        streams = [client.add_request(Request("before", 1 << 40))]
        streams[0].get(30)
        with client.group._lock:  # so nobody is told
            os.kill(client.group.processes[0].pid, signal.SIGKILL)
            eventually(lambda: client.engines[0].unreachable_since is not None)
            streams.append(client.add_request(Request("after")))
            call = pool.submit(client.call, "state")
            assert client.engines[0].alive
            with pytest.raises(EngineDeadError, match="can't be reached at the moment"):
                client.add_request(Request("uncopied"), copy=False)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="SIGKILL") as caught:
                for _ in stream:
                    pass
            assert caught.value.exitcode == -signal.SIGKILL
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            call.result(30)
        assert client.stats()["in_flight"] == 0


def test_a_call_under_way_fails_with_the_engine(patient):
    with EngineClient.launch(CountingCore, timeout=60) as client:
        with pytest.raises(EngineDeadError, match="exited with code 5") as caught:
            client.call("exit", 5)
        assert caught.value.exitcode == 5


def test_a_step_that_raises_ends_the_engine_with_its_traceback(patient):
    with EngineClient.launch(CountingCore, {"fail_step_at": 3}, timeout=60) as client:
        stream = client.add_request(Request("a", 10))
        with pytest.raises(EngineDeadError, match="the step went wrong") as caught:
            list(stream)
        assert "exited with code 1" in str(caught.value)
        assert caught.value.exitcode == 1
        assert "in step" in str(caught.value)


@pytest.mark.parametrize(
    ("owner", "method"), [("Intake", "_take"), ("Outbox", "_flush"), ("Outbox", "_put")]
)
def test_an_engine_whose_thread_fails_ends_and_says_why(owner, method, patient):
    with EngineClient.launch(CountingCore, {"step_seconds": 0.01}, timeout=60) as client:
        stream = client.add_request(Request("a", 1 << 40))
        stream.get()
        with contextlib.suppress(EngineDeadError):  # its own answer may be what can't be sent
            client.call("break_thread", owner, method)
            client.call("add", 1)
        with pytest.raises(EngineDeadError, match="ZeroDivisionError: nobody foresaw") as caught:
            list(stream)
        assert caught.value.exitcode == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_core_that_cannot_be_made_is_reported_at_once(method):
    with pytest.raises(LookupError, match="the model is not there"):
        EngineClient.launch(CountingCore, {"fail_init": 0}, start_method=method, timeout=60)


def test_engines_still_missing_at_the_timeout_are_named():
    with launch(CountingCore, {"start_seconds": 30}, engines=2) as group:
        with pytest.raises(fastipc.NotReady, match="of 2 engines 0, 1 were not ready") as caught:
            EngineClient(group.clients[0], timeout=0.5)
        assert caught.value.missing == (0, 1)
        group.shutdown(timeout=0)


def test_a_spec_whose_group_is_gone_says_so():
    with launch(CountingCore) as group:
        spec = group.clients[0]
    with pytest.raises(fastipc.NotReady, match="nobody answered"):
        EngineClient(spec, timeout=0.3)


def test_shutting_down_the_group_fails_what_is_under_way():
    with launch(CountingCore) as group:
        with EngineClient(group.clients[0], timeout=60) as client:
            stream = client.add_request(Request("endless", 1 << 40))
            stream.get(30)
            group.shutdown()
            with pytest.raises(EngineDeadError):
                for _ in stream:
                    pass


def test_closing_the_client_ends_its_streams_and_frees_the_engine():
    with launch(CountingCore, clients=2) as group:
        with EngineClient(group.clients[0], timeout=60) as watcher:
            client = EngineClient(group.clients[1], timeout=60)
            stream = client.add_request(Request("endless", 1 << 40))
            stream.get(30)
            client.close()
            client.close()
            with pytest.raises(fastipc.Closed):
                for _ in stream:
                    pass
            with pytest.raises(fastipc.Closed):
                client.add_request(Request("x"))
            eventually(lambda: watcher.call("state")["live"] == [])


def test_a_front_end_that_is_killed_frees_the_engine_and_may_come_back(start_child):
    source = """
        import sys
        from engine_cores import Request
        from fastipc.engine import EngineClient

        client = EngineClient(sys.argv[1], timeout=60)
        for output in client.generate(Request("same id", int(sys.argv[2]))):
            if output.token == 5:
                print("reading", flush=True)
        client.close()
        print("done", flush=True)
        """
    env = {"PYTHONPATH": os.path.dirname(__file__)}
    with launch(CountingCore, clients=2) as group:
        with EngineClient(group.clients[0], timeout=60) as watcher:
            word = group.clients[1].to_str()
            for _ in range(3):
                child = start_child(source, word, 1 << 40, env=env)
                child.wait_for("reading")
                child.send_signal(signal.SIGKILL)
                child.wait()
                eventually(lambda: watcher.call("state")["live"] == [])
            start_child(source, word, 10, env=env).check()
            assert tokens(watcher.generate(Request("same id", 2))) == [1, 2]


@pytest.mark.parametrize("host", ["", "127.0.0.1", "0.0.0.0", "::1"])
def test_a_front_end_that_forked_and_is_killed_frees_the_engine(start_child, host):
    source = """
        import os, signal, socket, sys
        from engine_cores import Request
        from fastipc.engine import EngineClient

        # what is not fastipc's own stays open in a child
        listener = socket.create_server(("127.0.0.1", 0))
        mine = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
        mine += socket.socketpair()
        client = EngineClient(sys.argv[1], timeout=60)
        stream = client.add_request(Request("forked", 1 << 40))
        stream.get()
        child = os.fork()
        if child == 0:
            for i in (0, 2):
                mine[i].sendall(b"x")
                assert mine[i + 1].recv(1) == b"x"
            socket.create_connection(listener.getsockname()).close()
            print(f"forked {os.getpid()}", flush=True)
            os.close(1)
            os.close(2)
            signal.pause()
        for _ in stream:
            pass
        """
    env = {"PYTHONPATH": os.path.dirname(__file__)}
    # (slowly, so that outputs which nobody takes don't abort the request)
    options = {"step_seconds": 0.005}
    with launch(CountingCore, options, clients=2, host=host) as group:
        with EngineClient(group.clients[0], timeout=60) as watcher:
            child = start_child(source, group.clients[1].to_str(), env=env)
            forked = int(child.wait_for("forked ").split()[-1])
            try:
                assert watcher.call("state")["live"] == ["forked"]
                child.send_signal(signal.SIGKILL)
                child.wait()
                eventually(lambda: watcher.call("state")["live"] == [])
                assert running(forked)
            finally:
                os.kill(forked, signal.SIGKILL)


def test_a_forked_child_refuses_and_leaves_its_parent_everything(client):
    stream = client.add_request(Request("a", 1 << 40))
    stream.get()
    (call,) = client.call_async("nap", 0.5)
    engine = client.engines[0]
    before = engine.epoch, engine.pid
    with client._lock:  # as another thread may hold it
        pid = os.fork()
    if pid == 0:
        uses = [
            lambda: [stream.get() for _ in range(1 << 20)],
            call.result,
            lambda: client.add_request(Request("b")),
            lambda: client.call("add", 1),
            lambda: client.abort("a"),
            lambda: client.engines,
            client.stats,
            client.histograms,
            client.wait_until_ready,
        ]
        refused = 0
        for use in uses:
            try:
                use()
            except fastipc.IPCError as error:
                refused += "process that forked this one" in str(error)
        client.close()
        os._exit(refused - len(uses))
    assert os.waitpid(pid, 0)[1] == 0
    assert call.result() is None
    for _ in range(1000):
        stream.get()
    assert (engine.epoch, engine.pid) == before
    stream.abort()


def test_nobodys_forked_child_keeps_a_connection():
    """Neither the launcher's and front end's, nor an engine's."""
    with launch(CountingCore, engines=2, host="127.0.0.1") as group:
        with EngineClient(group.clients[0], timeout=60) as client:
            forked = client.call("fork")
            forked.append(os.fork())
            if forked[-1] == 0:
                signal.pause()
            try:
                for pid in (os.getpid(), group.processes[0].pid):
                    assert psutil.Process(pid).net_connections("tcp")
                for pid in forked:
                    # (the child itself closes them, and may not have come to it yet)
                    eventually(lambda pid=pid: not psutil.Process(pid).net_connections("tcp"))
                assert client.call("add", 1) == [2, 2]
            finally:
                for pid in forked:
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(forked[-1], 0)


@pytest.mark.parametrize("how", ["stopped", "replaced"])
def test_a_front_end_that_goes_amidst_does_not_block_zmqs_thread(run_child, how):
    """ZMQ's thread tells of each connection that ends. It must not wait for a reader of that who
    has been closed before, neither when the engine ends nor when the front end comes back."""
    source = """
        import faulthandler, queue, sys
        import zmq
        from fastipc.engine.intake import Intake
        from fastipc.engine.outbox import Outbox
        from fastipc.engine.protocol import FrontEnd, Welcome, encode_control
        from fastipc.sockets import get_open_zmq_ipc_path
        from engine_cores import Request

        def bound(ctx, kind):
            socket = ctx.socket(kind)
            socket.linger = 0
            path = get_open_zmq_ipc_path()
            socket.bind(path)
            return socket, path

        def front_end(ctx):
            router, requests = bound(ctx, zmq.ROUTER)
            pull, outputs = bound(ctx, zmq.PULL)
            return router, FrontEnd(0, requests, outputs, "")

        faulthandler.dump_traceback_later(20, exit=True)
        group, theirs = zmq.Context(), zmq.Context()
        control, path = bound(group, zmq.ROUTER)
        outbox = Outbox(0, 1 << 20, lambda *word: None)
        held = []  # as an outbox that has not come to it yet
        outbox.connect = lambda client, socket: held.append(socket)
        intake = Intake(0, path, "", Request, queue.SimpleQueue(), outbox, 1 << 20, False, None)
        intake.start()
        who, _ = control.recv_multipart()
        router, first = front_end(theirs)
        control.send_multipart([who, encode_control(Welcome([0], [first], None))])
        assert router.recv_multipart()  # it is ready: both are connected, or about to be
        if sys.argv[1] == "replaced":
            again, where = front_end(group)
            control.send_multipart([who, encode_control(Welcome([0], [where], None))])
            assert again.recv_multipart()
        else:
            intake.stop()
        theirs.destroy(linger=0)  # the connection of the first outputs ends now

        # Its thread is alive if it makes the connection again when somebody is there.
        pull = group.socket(zmq.PULL)
        pull.bind(first.outputs)
        for _ in range(100):
            held[0].send(b"x")
            if pull.poll(100):
                break
        else:
            raise AssertionError("ZMQ's thread is blocked")
        if sys.argv[1] == "replaced":
            intake.stop()
        intake.context.destroy(linger=0)
        group.destroy(linger=0)
        """
    run_child(source, how, env={"PYTHONPATH": os.path.dirname(__file__)})


def test_when_the_launcher_is_killed_everything_ends(start_child, tmp_path):
    child = start_child(
        """
        import sys, time
        from engine_cores import CountingCore, Request
        from fastipc.engine import EngineClient

        if __name__ == "__main__":
            client = EngineClient.launch(CountingCore, engines=2, timeout=60)
            streams = [client.add_request(Request(str(i), 1 << 40)) for i in range(4)]
            for stream in streams:
                stream.get(30)
            print(*[c.pid for c in client.group.processes.values()], client.group.coordinator.pid,
                  flush=True)
            time.sleep(100)
        """,
        env={"PYTHONPATH": os.path.dirname(__file__), "FASTIPC_RPC_BASE_PATH": str(tmp_path)},
    )
    pids = [int(word) for word in child.wait_for(" ").split()]
    assert len(pids) == 3
    child.send_signal(signal.SIGKILL)
    child.process.wait()
    eventually(lambda: not any(map(running, pids)))
    eventually(lambda: not list(tmp_path.glob("fastipc-*")))


def test_an_orphans_directory_goes_although_it_hears_late_that_it_is_one(start_child):
    """What it does first then doesn't come to its end in time, as on a machine too busy."""
    script = start_child(
        """
        import time
        from fastipc import processes, sockets
        from fastipc.engine.group import clean_up_when_orphaned

        def prepare():
            processes.on_parent_death(lambda: time.sleep(1000))
            clean_up_when_orphaned()

        def child():
            processes.ready(sockets.get_open_zmq_ipc_path())
            time.sleep(1000)

        made = processes.start(child, name="child", start_method="fork", prepare=prepare)
        print("path", made.wait_ready(60), made.pid, flush=True)
        time.sleep(1000)
        """
    )
    _, path, pid = script.wait_for("path").split()
    directory = Path(path.removeprefix("ipc://")).parent
    assert directory.is_dir()
    script.send_signal(signal.SIGKILL)
    eventually(lambda: not running(int(pid)))
    assert not directory.exists()


def test_a_parent_killed_while_its_engines_import_leaves_nothing(tmp_path, start_child):
    child = start_child(
        """
        import multiprocessing, os, time
        if __name__ == "__mp_main__":
            print(f"{multiprocessing.current_process().name} imports: {os.getpid()}", flush=True)
            while os.getppid() == int(os.environ["LAUNCHED_BY"]):
                time.sleep(0.01)

        from engine_cores import CountingCore
        from fastipc.engine import launch

        if __name__ == "__main__":
            os.environ["LAUNCHED_BY"] = str(os.getpid())
            group = launch(CountingCore, engines=2, start_method="spawn")
            time.sleep(100)
        """,
        env={"PYTHONPATH": os.path.dirname(__file__), "FASTIPC_RPC_BASE_PATH": str(tmp_path)},
    )
    names = ("engine coordinator", "engine 0", "engine 1")
    pids = [int(child.wait_for(f"{name} imports").split()[-1]) for name in names]
    assert len(list(tmp_path.glob("fastipc-*"))) == 1
    child.send_signal(signal.SIGKILL)
    child.process.wait()
    eventually(lambda: not any(map(running, pids)))
    assert not list(tmp_path.glob("fastipc-*"))


def test_an_engine_is_started_again_if_told_so():
    with EngineClient.launch(CountingCore, restart=True, timeout=60) as client:
        for _ in range(2):
            stream = client.add_request(Request("a", 1 << 40))
            stream.get(30)
            pid = client.engines[0].pid
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                for _ in stream:
                    pass
            client.wait_until_ready(60)
            assert client.engines[0].pid != pid
            assert tokens(client.generate(Request("a", 3))) == [1, 2, 3]


def test_an_engine_that_ends_again_and_again_is_given_up():
    told = []
    with EngineClient.launch(
        CountingCore,
        {"die_at": 1},
        restart=True,
        timeout=60,
        on_failure=lambda index, how: told.append((index, how)),
    ) as client:
        for _ in range(6):
            client.wait_until_ready(60)
            with pytest.raises(EngineDeadError):
                list(client.generate(Request("a", 1)))
        eventually(lambda: len(told) == 6)
        assert told[0] == (0, "exited with code 7")
        with pytest.raises(EngineDeadError, match="exited with code 7"):
            client.wait_until_ready(60)


def test_a_stopped_engine_is_not_dead():
    with EngineClient.launch(CountingCore, timeout=60) as client:
        stream = client.add_request(Request("a", 1 << 40))
        stream.get(30)
        pid = client.engines[0].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            for _ in range(3):  # ticks
                with pytest.raises(fastipc.Empty):
                    forever(lambda: stream.get(timeout=1.0))
            assert client.engines[0].alive
        finally:
            os.kill(pid, signal.SIGCONT)
        stream.get(30)


# -- where things are ------------------------------------------------------------------------------


def test_a_spec_is_small_and_hides_its_key():
    spec = ClientSpec(client_index=1, control="tcp://10.0.0.1:1", control_key="secret", host="::1")
    assert ClientSpec.from_str(spec.to_str()) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ClientSpec) == spec
    assert "secret" not in repr(spec)
    with pytest.raises(fastipc.HandleMismatch, match="not a spec"):
        ClientSpec.from_str("nonsense")


def test_a_spec_of_another_version_is_refused():
    spec = ClientSpec(client_index=0, control="ipc:///nowhere", protocol=99)
    with pytest.raises(fastipc.HandleMismatch, match="version 99"):
        EngineClient(spec, request_type=Request, output_type=Output)


def test_there_are_as_many_front_ends_as_were_asked_for():
    with launch(CountingCore) as group:
        spec = msgspec.structs.replace(group.clients[0], client_index=5)
        with pytest.raises(fastipc.HandleMismatch, match="no front end 5"):
            EngineClient(spec, timeout=30)


def test_types_that_cannot_be_imported_are_asked_for():
    with launch(CountingCore) as group:
        spec = msgspec.structs.replace(group.clients[0], output_type="no.such:Thing")
        with pytest.raises(fastipc.HandleMismatch, match="pass request_type="):
            EngineClient(spec, timeout=30)
        with EngineClient(spec, request_type=Request, output_type=Output, timeout=60) as client:
            assert tokens(client.generate(Request("a", 2))) == [1, 2]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("secure", [True, False])
def test_tcp(host, secure, caplog):
    with EngineClient.launch(
        CountingCore, engines=2, host=host, secure=secure, timeout=60
    ) as client:
        assert client.group.clients[0].control.startswith("tcp://")
        image = np.ones(1 << 20, np.uint8)
        for i in range(10):
            assert tokens(client.generate(Request(str(i), 2, image))) == [
                image.size + 1,
                image.size + 2,
            ]
        os.kill(client.engines[1].pid, signal.SIGKILL)
        eventually(lambda: not client.engines[1].alive)
        assert tokens(client.generate(Request("after", 2))) == [1, 2]
    assert ("not encrypted" in caplog.text) == (not secure)


def test_who_has_no_key_gets_nothing_and_injects_nothing():
    with EngineClient.launch(CountingCore, host="127.0.0.1", timeout=60) as client:
        ends = [client.group.clients[0].control]
        ends += [s.getsockopt_string(zmq.LAST_ENDPOINT) for s in client._core.sockets]
        ends = sorted({end for end in ends if end.startswith("tcp")})
        assert len(ends) == 3
        with zmq.Context() as ctx:
            for end in ends:
                for kind in (zmq.DEALER, zmq.PUSH):
                    with ctx.socket(kind) as socket:
                        socket.linger = 0
                        socket.connect(end)
                        socket.send_multipart([b"\0", os.urandom(100)])
                        if kind == zmq.DEALER:
                            assert not socket.poll(200)
        assert tokens(client.generate(Request("a", 2))) == [1, 2]


def test_garbage_on_the_channels_is_survived(client):
    core = client._core
    with client._lock:
        for frames in (
            [protocol.ADD, b"garbage"],
            [protocol.ADD],
            [protocol.ABORT, b"\xc1"],
            [protocol.UTILITY, b"\x93\x01"],
            [protocol.CREDIT, b""],
            [b"\x77", b"x"],
            [b""],
        ):
            core._router.send_multipart([protocol.identity(0), *frames])
    with zmq.Context() as ctx, ctx.socket(zmq.PUSH) as push, ctx.socket(zmq.DEALER) as dealer:
        push.connect(core._pull.getsockopt_string(zmq.LAST_ENDPOINT))
        dealer.connect(core._router.getsockopt_string(zmq.LAST_ENDPOINT))
        no_engine = [
            msgspec.msgpack.encode(protocol.Ready(protocol.PROTOCOL, i, 1, 1, "h", "b", 1, False))
            for i in (70_000, -1)
        ]
        for junk in (b"junk", b"\x94\x00\x01\x01\x90", protocol.ENGINE_CORE_DEAD, *no_engine):
            push.send(junk)
            dealer.send(junk)
        assert client.call("add", 1, timeout=30) == 2
    assert tokens(client.generate(Request("a", 2))) == [1, 2]


def test_engines_are_known_in_the_order_of_their_indices_however_they_come():
    """Before the group has said which there are, too: each says that it is ready when it is."""
    spec = ClientSpec(client_index=0, control=fastipc.sockets.get_open_zmq_ipc_path())
    core = frontend.FrontEndCore(spec, Request, Output)
    try:
        end = core._router.getsockopt_string(zmq.LAST_ENDPOINT)
        with zmq.Context() as ctx:
            for index in (2, 0, 1):
                with ctx.socket(zmq.DEALER) as engine:
                    engine.setsockopt(zmq.ROUTING_ID, protocol.identity(index))
                    engine.connect(end)
                    ready = protocol.Ready(
                        protocol.PROTOCOL, index, index + 1, 1, "h", "b", 1, False
                    )
                    engine.send(msgspec.msgpack.encode(ready))
                    eventually(lambda i=index: core.sockets[core._router]() or i in core.engines)
        assert list(core.engines) == [0, 1, 2]
        for engine in core.engines.values():
            engine.alive, engine.reason = False, "gone"
        expected = "no engine is alive: engine 0: gone; engine 1: gone; engine 2: gone"
        with pytest.raises(EngineDeadError, match=expected):
            core.choose(None)
    finally:
        core.close()


def break_(core, monkeypatch):
    """Have the next message of an engine be one too many for the front end."""

    def broken(frames):
        raise ZeroDivisionError("nobody foresaw this")

    monkeypatch.setattr(core, "_take", broken)


def test_a_client_whose_thread_fails_says_so_to_all_who_wait(monkeypatch, caplog):
    with EngineClient.launch(CountingCore, {"step_seconds": 0.01}, timeout=60) as client:
        streams = [client.add_request(Request(f"r{i}", 1 << 40)) for i in range(3)]
        assert [stream.get().token for stream in streams] == [1, 1, 1]
        (call,) = client.call_async("nap", 0)
        call.result()
        call = PendingCall("add() of engine 0")
        with client._lock:
            client._core.call(client._core.engines[0], "add", (1,), {}, call._finish)
            client._after_sending()
            break_(client._core, monkeypatch)
        for wait in (call.result, *(lambda s=s: list(s) for s in streams)):
            with pytest.raises(fastipc.Closed, match="ZeroDivisionError: nobody foresaw") as caught:
                wait()
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
        for use in (
            lambda: client.add_request(Request("later")),
            lambda: client.call("add", 1),
            client.wait_until_ready,
        ):
            with pytest.raises(fastipc.Closed, match="make another") as caught:
                use()
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "an engine client has failed" in caplog.text
    assert "in broken" in caplog.text


def test_an_async_client_whose_callback_fails_says_so_to_all_who_wait(monkeypatch, caplog):
    async def main():
        launched = AsyncEngineClient.launch(CountingCore, {"step_seconds": 0.01}, timeout=60)
        async with launched as client:
            streams = [client.add_request(Request(f"r{i}", 1 << 40)) for i in range(3)]
            assert [(await stream.get()).token for stream in streams] == [1, 1, 1]

            async def use_up(stream):
                async for _ in stream:
                    pass

            waits = [asyncio.create_task(use_up(stream)) for stream in streams]
            waits.append(asyncio.create_task(client.call("nap", 0.2)))
            await asyncio.sleep(0)  # they have begun
            break_(client._core, monkeypatch)
            for error in await asyncio.gather(*waits, return_exceptions=True):
                assert isinstance(error, fastipc.Closed)
                assert "ZeroDivisionError: nobody foresaw" in str(error)
                assert isinstance(error.__cause__, ZeroDivisionError)
            with pytest.raises(fastipc.Closed, match="make another"):
                client.add_request(Request("later"))
            with pytest.raises(fastipc.Closed, match="make another"):
                await client.wait_until_ready()

    run(main())
    assert "an engine client has failed" in caplog.text
    assert "in broken" in caplog.text


def test_the_control_thread_outlives_what_nobody_foresaw(monkeypatch, caplog):
    def broken(message):
        if message == b"strange" or isinstance(message, protocol.Exited):
            raise ZeroDivisionError("nobody foresaw this")
        return original[type(message) is bytes](message)

    original = {False: group_module.encode_control, True: group_module.decode_control}
    monkeypatch.setattr(group_module, "decode_control", broken)
    monkeypatch.setattr(group_module, "encode_control", broken)
    with launch(CountingCore) as group:
        with zmq.Context() as ctx, ctx.socket(zmq.DEALER) as dealer:
            dealer.connect(group.control[0])
            dealer.send(b"strange")
            eventually(lambda: "can't be read" in caplog.text)
        eventually(lambda: group._heard)  # else there is nobody to be told
        group._tell(("exited", protocol.Exited(0, "it did not", None, False, 0)))
        eventually(lambda: "front ends (exited) failed" in caplog.text)
        with EngineClient(group.clients[0], timeout=60) as client:
            assert client.call("add", 1) == 2


def test_outputs_that_went_missing_fail_what_they_belonged_to(client):
    stream = client.add_request(Request("gap", 1 << 40))
    stream.get(30)
    with client._lock:
        client._core.engines[0].number -= 5
    with pytest.raises(EngineDeadError, match="was lost and made again"):
        for _ in stream:
            pass
    eventually(lambda: client.call("state")["live"] == [])
    assert tokens(client.generate(Request("a", 2))) == [1, 2]


# -- classes that lack something -------------------------------------------------------------------


def test_a_core_class_is_checked_before_anything_is_started():
    with pytest.raises(TypeError, match="a subclass of EngineCore"):
        check_core_class(object)

    class NoTypes(EngineCore):
        pass

    with pytest.raises(TypeError, match=r"NoTypes.request_type must be a msgspec.Struct"):
        launch(NoTypes)

    class NoFinished(CountingCore):
        output_type = Request

    with pytest.raises(TypeError, match="no field 'finished'"):
        launch(NoFinished)

    class NoStep(EngineCore):
        request_type = Request
        output_type = Output
        add_request = abort = has_work = CountingCore.abort

    with pytest.raises(TypeError, match=r"NoStep must define step\(\)"):
        launch(NoStep)
    with pytest.raises(ValueError, match="engines=0"):
        launch(CountingCore, engines=0)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_without_a_guard_gets_an_explanation(start_child, method):
    child = start_child(
        f"""
        from engine_cores import CountingCore
        from fastipc.engine import EngineClient

        client = EngineClient.launch(CountingCore, start_method={method!r}, timeout=60)
        """,
        env={"PYTHONPATH": os.path.dirname(__file__)},
    )
    assert child.wait() != 0
    assert "put the start of processes" in child.stderr
    assert "if __name__ == '__main__'" in child.stderr


# -- numbers ---------------------------------------------------------------------------------------


def test_the_time_of_a_request_is_accounted_for(client):
    before = client.stats()["stages"]["total"]["count"]
    for i in range(30):
        list(client.generate(Request(f"timed{i}", 3)))
    stats = client.stats()
    assert stats["stages"]["total"]["count"] == before + 30
    parts = ("api_queue", "request_channel", "engine_queue", "scheduler_queue", "step",
             "output_queue", "output_channel")  # fmt: skip
    assert all(stats["stages"][name]["count"] >= 30 for name in parts)
    # The parts add up to the whole, as far as buckets tell.
    whole = stats["stages"]["first_output"]["mean"]
    assert sum(stats["stages"][name]["mean"] for name in parts) == pytest.approx(whole, rel=0.3)
    assert stats["engines"][0]["alive"]
    assert stats["engines"][0]["histograms"]["step"]["count"] > 0


def test_an_idle_client_and_engine_sleep(client):
    process = psutil.Process(client.engines[0].pid)

    def used():
        both = process.cpu_times(), psutil.Process().cpu_times()
        return sum(t.user + t.system for t in both)

    # (other threads of this process may have something to do for a moment: the best of three)
    shares = []
    while not shares or (shares[-1] >= 0.05 and len(shares) < 3):
        before, began = used(), time.monotonic()
        time.sleep(2.0)
        shares.append((used() - before) / (time.monotonic() - began))
    assert shares[-1] < 0.05


# -- asyncio ---------------------------------------------------------------------------------------


def run(coroutine):
    return asyncio.run(coroutine)


@pytest.mark.parametrize("method", METHODS)
def test_async_outputs(method):
    async def main():
        async with AsyncEngineClient.launch(
            CountingCore, start_method=method, timeout=60
        ) as client:
            got = [output.token async for output in client.generate(Request("a", 5))]
            assert got == [1, 2, 3, 4, 5]
            assert await client.call("add", np.ones(2), 1) is not None
            with pytest.raises(RequestFailed, match="KeyError"):
                await client.call("refuse", "x")
            with pytest.raises(fastipc.Empty):
                await client.call("nap", 0.3, timeout=0.01)
            with pytest.raises(RequestFailed, match="not a count"):
                async for _ in client.generate(Request("b", 0)):
                    pass

    run(main())


def test_cancelled_tasks_abort_their_requests():
    count, every = (3000 if NIGHTLY else 300), 3

    async def main():
        async with AsyncEngineClient.launch(
            CountingCore, {"step_seconds": 0.001}, timeout=60
        ) as client:
            seen = {}

            async def one(i):
                name = f"r{i}"
                seen[name] = []
                async for output in client.generate(Request(name, 40)):
                    seen[name].append(output.token)

            tasks = [asyncio.create_task(one(i)) for i in range(count)]
            while not all(seen.get(f"r{i}") for i in range(0, count, every)):
                await asyncio.sleep(0.001)
            for task in tasks[::every]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for i, result in enumerate(results):
                if result is None:
                    assert seen[f"r{i}"] == list(range(1, 41))
                else:
                    assert isinstance(result, asyncio.CancelledError)
                    assert i % every == 0
            while client.stats()["in_flight"]:
                await asyncio.sleep(0.01)
            state = await client.call("state")
            assert state["live"] == []
            assert state["added"] == count

    run(main())


class CancelledJustNow(asyncio.Future):
    """Ctrl-C: asyncio cancels the main task in the signal's handler, which runs where it likes."""

    def set_result(self, result):
        self.cancel()
        super().set_result(result)


def test_a_wait_that_is_cancelled_while_it_is_ended_costs_the_others_nothing():
    async def main():
        loop = asyncio.get_running_loop()
        complaints = []
        loop.set_exception_handler(lambda loop, context: complaints.append(context))
        async with AsyncEngineClient.launch(
            CountingCore, {"step_seconds": 0.001}, timeout=60
        ) as client:
            streams = [client.add_request(Request(f"{i}", 50)) for i in range(4)]
            usual = loop.create_future
            loop.create_future = lambda: CancelledJustNow(loop=loop)
            interrupted = asyncio.create_task(streams[0].get())
            await asyncio.sleep(0)
            loop.create_future = usual
            with pytest.raises(asyncio.CancelledError):
                await interrupted
            for stream in streams:
                assert [output.token async for output in stream] == list(range(1, 51))

            loop.create_future = lambda: CancelledJustNow(loop=loop)
            call = asyncio.create_task(client.call("state"))
            await asyncio.sleep(0)
            loop.create_future = usual
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await client.call("state") is not None
        assert complaints == []

    run(main())


def test_a_cancelled_get_has_taken_nothing():
    async def main():
        async with AsyncEngineClient.launch(
            CountingCore, {"step_seconds": 0.002}, timeout=60
        ) as client:
            stream = client.add_request(Request("a", 200))
            got = []
            rng = random.Random(1)
            while True:
                try:
                    async with asyncio.timeout(rng.random() * 0.004):
                        got.append((await stream.get()).token)
                except TimeoutError:
                    continue
                except fastipc.Closed:
                    break
            assert got == list(range(1, 201))

    run(main())


def test_many_requests_through_one_async_client():
    """None lost, none twice, and the tables are empty at the end."""
    count = 100_000 if NIGHTLY else 3_000

    async def main():
        async with AsyncEngineClient.launch(CountingCore, timeout=60) as client:
            limit = asyncio.Semaphore(1000)

            async def one(i):
                async with limit:
                    expected = 1 + i % 3
                    got = [o.token async for o in client.generate(Request(f"r{i}", expected))]
                    assert got == list(range(1, expected + 1))

            rss = psutil.Process().memory_info().rss
            async with asyncio.TaskGroup() as group:
                began = time.monotonic()
                for i in range(count):
                    group.create_task(one(i))
            seconds = time.monotonic() - began
            stats = client.stats()
            assert stats["finished"] == stats["sent"] == count
            assert stats["in_flight"] == stats["in_flight_bytes"] == 0
            state = await client.call("state")
            assert state["added"] == count
            assert state["live"] == []
            print(f"{count / seconds:.0f} requests/s, {count} requests", file=sys.stderr)
            # The tasks themselves cost some 3 KiB each.
            assert psutil.Process().memory_info().rss - rss < (64 << 20) + 8192 * count

    run(main())


def test_async_engine_death():
    async def main():
        async with AsyncEngineClient.launch(CountingCore, engines=2, timeout=60) as client:
            streams = [client.add_request(Request(str(i), 1 << 40)) for i in range(10)]
            for stream in streams:
                await stream.get()
            os.kill(client.engines[0].pid, signal.SIGKILL)
            lost = 0
            for stream in streams:
                if stream.engine == 0:
                    with pytest.raises(EngineDeadError, match="engine 0"):
                        async for _ in stream:
                            pass
                    lost += 1
                else:
                    await stream.get()
            assert 0 < lost < 10
            got = [o.token async for o in client.generate(Request("next", 3))]
            assert got == [1, 2, 3]

    run(main())


def test_async_start_up_failures_leave_nothing():
    async def main():
        with pytest.raises(LookupError, match="the model is not there"):
            async with AsyncEngineClient.launch(CountingCore, {"fail_init": 0}, timeout=60):
                pass
        with pytest.raises(fastipc.NotReady, match="of 1 engines 0 was not ready"):
            async with AsyncEngineClient.launch(CountingCore, {"start_seconds": 30}, timeout=0.5):
                pass
        client = AsyncEngineClient.launch(CountingCore)
        with pytest.raises(RuntimeError, match="not open"):
            client.add_request(Request("a"))

    run(main())


# -- the README ------------------------------------------------------------------------------------

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.skipif(not README.exists(), reason="needs the source tree")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_readmes_server(run_child, method):
    text = README.read_text().split("\n## Write your own server in 40 lines\n")[1]
    code = text.split("```python\n")[1].split("```")[0]
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) == 40
    out = run_child(code, env={"FASTIPC_WORKER_MULTIPROC_METHOD": method})
    expected, token = [], 3
    for _ in range(5):
        token = (token * 31 + 7) % 1000
        expected.append(token)
    assert [int(word) for word in out.split()] == expected
