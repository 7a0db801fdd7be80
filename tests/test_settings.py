"""The environment: read once, in one place; an argument beats it; nonsense is named."""

from __future__ import annotations

import pytest
from support import pair

from fastipc.settings import Settings, settings

VARIABLES = {
    "FASTIPC_SPIN_US": "spin_us",
    "FASTIPC_RINGBUFFER_WARNING_INTERVAL": "warning_interval",
}


@pytest.fixture(autouse=True)
def read_anew(monkeypatch):
    for name in (*VARIABLES, "FASTIPC_MQ_MAX_CHUNK_BYTES_MB", "FASTIPC_WORKER_MULTIPROC_METHOD"):
        monkeypatch.delenv(name, raising=False)
    settings.cache_clear()
    yield
    settings.cache_clear()


def test_the_defaults():
    assert settings() == Settings(spin_us=None, warning_interval=60.0)


@pytest.mark.parametrize(("name", "field"), VARIABLES.items())
def test_numbers(name, field, monkeypatch):
    for text, value in (("0", 0), ("12.5", 12.5), (" 7 ", 7), ("1e3", 1000)):
        monkeypatch.setenv(name, text)
        settings.cache_clear()
        assert getattr(settings(), field) == value
    for text in ("", "  "):
        monkeypatch.setenv(name, text)
        settings.cache_clear()
        assert getattr(settings(), field) == getattr(Settings(), field)


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", "1,5", "10us"])
def test_what_is_no_number_is_an_error_that_names_the_variable(name, text, monkeypatch):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=name) as caught:
        settings()
    assert repr(text) in str(caught.value)


def test_a_spin_that_is_too_long_is_the_variables_fault(monkeypatch):
    monkeypatch.setenv("FASTIPC_SPIN_US", "60000")
    with pytest.raises(ValueError, match="FASTIPC_SPIN_US=60000"):
        settings()


def test_the_size_of_chunks_is_in_mebibytes(monkeypatch):
    for text, value in (("1", 1 << 20), ("0.5", 1 << 19), ("1048576", 1 << 40), ("", None)):
        monkeypatch.setenv("FASTIPC_MQ_MAX_CHUNK_BYTES_MB", text)
        settings.cache_clear()
        assert settings().mq_max_chunk_bytes == value
    for text in ("0", "-1", "1e9", "lots", "nan"):
        monkeypatch.setenv("FASTIPC_MQ_MAX_CHUNK_BYTES_MB", text)
        settings.cache_clear()
        with pytest.raises(ValueError, match="FASTIPC_MQ_MAX_CHUNK_BYTES_MB"):
            settings()


def test_start_methods(monkeypatch):
    for text in ("fork", "spawn", "forkserver"):
        monkeypatch.setenv("FASTIPC_WORKER_MULTIPROC_METHOD", text)
        settings.cache_clear()
        assert settings().worker_multiproc_method == text
    monkeypatch.setenv("FASTIPC_WORKER_MULTIPROC_METHOD", "Fork")
    settings.cache_clear()
    with pytest.raises(ValueError, match="FASTIPC_WORKER_MULTIPROC_METHOD='Fork'"):
        settings()


def test_they_are_read_once(monkeypatch):
    assert settings().spin_us is None
    monkeypatch.setenv("FASTIPC_SPIN_US", "5")
    assert settings().spin_us is None
    assert settings() is settings()


def test_an_argument_beats_the_variable(monkeypatch):
    monkeypatch.setenv("FASTIPC_SPIN_US", "0")
    with pair() as (writer, reader):
        assert writer.stats()["spin_ns"] == reader.stats()["spin_ns"] == 0
    with pair(spin_us=50) as (writer, reader):
        # (no spinning either when there are more peers than CPUs)
        assert writer.stats()["spin_ns"] in (0, 50_000)
        assert reader.stats()["spin_ns"] == 0


def test_nobody_spins_where_peers_outnumber_cpus(run_child):
    out = run_child(
        """
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        from fastipc import MessageQueue

        with MessageQueue(1, 1, spin_us=100) as writer:
            with MessageQueue.create_from_handle(writer.export_handle(), 0, spin_us=100) as reader:
                writer.wait_until_ready()
                print(writer.stats()["spin_ns"], reader.stats()["spin_ns"])
        """
    )
    assert out.split() == ["0", "0"]


@pytest.mark.parametrize("command", ["clean", "demo", "serve"])
def test_the_commands_say_what_is_nonsense(command, start_child):
    child = start_child(command=["-m", "fastipc", command], env={"FASTIPC_SPIN_US": "quick"})
    assert child.wait() == 2
    assert child.stderr.splitlines() == [
        "fastipc: FASTIPC_SPIN_US='quick' in the environment must be a number of at least 0"
    ]
