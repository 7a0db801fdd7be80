"""Importing fastipc brings in little, and changes nothing in the process."""

from __future__ import annotations

import json
import statistics
import sys
import types

import numpy as np
from support import pair

import fastipc

HEAVY = ["torch", "asyncio", "zmq.asyncio", "ray", "cloudpickle", "prometheus_client", "starlette",
         "uvicorn", "multiprocessing", "concurrent.futures", "unittest", "pandas",
         "multiprocessing.resource_tracker"]  # fmt: skip


def test_what_is_not_imported(run_child):
    out = run_child(
        """
        import json, sys
        import numpy
        before = set(sys.modules)
        import fastipc
        print(json.dumps(sorted(set(sys.modules) - before)))
        """
    )
    brought = set(json.loads(out))
    found = {name for name in brought for heavy in HEAVY
             if name == heavy or name.startswith(heavy + ".")}  # fmt: skip
    assert not found
    # fastipc's own: only what a local queue needs.
    own = {name for name in brought if name.startswith("fastipc")}
    assert not own & {
        "fastipc.aio",
        "fastipc.processes",
        "fastipc.engine",
        "fastipc.executor",
        "fastipc.demo",
    }


def test_using_a_local_queue_imports_nothing_more(run_child):
    out = run_child(
        """
        import json, sys
        import numpy
        from fastipc import MessageQueue
        before = set(sys.modules)
        with MessageQueue(1, 1) as writer:
            with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
                writer.enqueue([1, numpy.arange(5)])
                reader.dequeue()
        print(json.dumps(sorted(set(sys.modules) - before)))
        """
    )
    assert not set(json.loads(out)) & set(HEAVY)


def test_importing_changes_nothing_in_the_process(run_child):
    out = run_child(
        """
        import copyreg, logging, os, pickle, signal, sys, threading, warnings
        import numpy

        def state():
            return (
                dict(copyreg.dispatch_table), list(warnings.filters), threading.active_count(),
                [signal.getsignal(s) for s in signal.valid_signals()], sys.excepthook,
                logging.getLogger().handlers[:], len(os.listdir("/proc/self/fd")), dict(os.environ),
            )

        before = state()
        import fastipc
        print(before == state())
        # Without a handler of the user's, nothing is printed.
        logging.getLogger("fastipc").warning("silent")
        """
    )
    assert out == "True\n"


def test_the_time_it_takes(run_child):
    """Reported, not judged: fastipc beyond numpy and pyzmq, which its users import anyway."""
    source = """
        import time
        import numpy, zmq
        began = time.perf_counter()
        import fastipc
        print(time.perf_counter() - began)
    """
    times = [float(run_child(source)) for _ in range(3)]
    print(f"import fastipc: {1000 * statistics.median(times):.1f} ms beyond numpy and pyzmq")
    assert all(t > 0 for t in times)


def test_a_half_imported_torch_does_no_harm(monkeypatch):
    """Another thread may be importing it at the moment."""
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    with pair() as (writer, reader):
        writer.enqueue([np.arange(3), object])
        assert reader.dequeue()[0].tolist() == [0, 1, 2]


def test_the_version():
    assert fastipc.__version__.count(".") == 2
    for name in fastipc.__all__:
        assert hasattr(fastipc, name)
