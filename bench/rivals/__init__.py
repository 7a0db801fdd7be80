"""The channels that the runner compares, behind one interface.

A `Rival` is made in the runner, which only hands out what processes inherit when they are started
(a pipe's ends, a folder's name). The writer and each reader open their `End` in processes of their
own, so that a rival that blocks for ever, or crashes, takes nobody else with it. Opening takes
three steps, because some channels need to be told where the other side is:

    runner        shares = rival.shares()
    writer        end = Rival.open_writer(share, setup)           ->  end.offer
    each reader   end = Rival.open_reader(share, setup, rank, offer of the writer)  ->  end.offer
    writer        end.join(offers of all readers)
    each reader   end.join(None)

An adapter is lossless, and what it receives is owned and writable: where a rival hands out a view
of memory that it will use again, the adapter copies. The installed packages do all the rest.
"""

import importlib
import importlib.util
import shutil
import tempfile
from dataclasses import dataclass


@dataclass(frozen=True)
class Setup:
    """What a channel is needed for."""

    readers: int = 1
    replies: bool = False  # reader 0 answers: a second channel leads back
    arrays: bool = False  # large arrays, instead of small objects
    largest: int = 1 << 16  # bytes in the largest message


class End:
    """One process's end of a channel. `send` reaches every reader; `recv` waits for as long as it
    takes. Both are attributes, so that the measured loop calls the rival as directly as it can."""

    offer = None

    def __init__(self, send=None, recv=None, close=None, offer=None, join=None):
        self.send = send
        self.recv = recv
        self.offer = offer
        self._close = close
        self._join = join

    def join(self, offers):
        if self._join is not None:
            self._join(offers)

    def close(self):
        if self._close is not None:
            self._close()


def to_each(sends):
    """One send that goes to every reader, one after the other."""
    if len(sends) == 1:
        return sends[0]

    def send(obj):
        for each in sends:
            each(obj)

    return send


class Rival:
    name = ""
    package = ""  # what has to be importable, and whose version is reported
    cases_left_out = frozenset()

    @classmethod
    def missing(cls):
        """Why this rival cannot run here, or None."""
        if cls.package and importlib.util.find_spec(cls.package) is None:
            return f"{cls.package} is not installed"
        return None

    def __init__(self, setup, context):
        self.setup = setup
        self._folder = None

    def folder(self):
        """A private folder that is removed with everything in it, also when processes died."""
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="fastipc-bench-")
        return self._folder

    def shares(self):
        """What the writer inherits, and a list of what each reader inherits."""
        return None, [None] * self.setup.readers

    def release(self):
        """Every process is started: drop the runner's own copies."""

    def sweep(self):
        """Every process has ended, perhaps killed: remove what is left."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    @classmethod
    def open_writer(cls, share, setup):
        raise NotImplementedError

    @classmethod
    def open_reader(cls, share, setup, rank, offer):
        raise NotImplementedError


# Name -> module and class. mp.Pipe is first, because several targets compare with it, and what runs
# first in a round runs right beside fastipc.
RIVALS = {
    "mp.Pipe": ("mp_pipe", "Pipe"),
    "mp.Queue": ("mp_queue", "Queue"),
    "pyzmq": ("zmq_ipc", "ZmqIpc"),
    "faster-fifo": ("fifo", "FasterFifo"),
    "iceoryx2-poll": ("iox2", "Iceoryx2Polling"),
    "iceoryx2-event": ("iox2", "Iceoryx2Event"),
    "vllm": ("ours", "Vllm"),
}
SUBJECT = ("ours", "Fastipc")


def load(place):
    module, name = place
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
