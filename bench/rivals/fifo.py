"""faster-fifo: one queue per reader, and one back, with the package's own pickling."""

from . import End, Rival, to_each

# put and get time out by default, after 10 s; here nobody gives up before the runner does.
_NO_LIMIT_S = 1e6


class FasterFifo(Rival):
    name = "faster-fifo"
    package = "faster_fifo"

    def __init__(self, setup, context):
        super().__init__(setup, context)
        from faster_fifo import Queue

        # The package's default, unless messages are large: then room for four.
        size = 4 * setup.largest if setup.arrays else 1_000_000
        self._there = [Queue(size) for _ in range(setup.readers)]
        self._back = Queue(size) if setup.replies else None

    def shares(self):
        readers = [(queue, self._back if i == 0 else None) for i, queue in enumerate(self._there)]
        return (self._there, self._back), readers

    def sweep(self):
        # Not earlier: multiprocessing would give the same shared memory to the next one who asks.
        self._there, self._back = [], None
        super().sweep()

    @classmethod
    def open_writer(cls, share, setup):
        there, back = share
        return End(to_each([_put(q) for q in there]), _get(back) if back else None)

    @classmethod
    def open_reader(cls, share, setup, rank, offer):
        there, back = share
        return End(_put(back) if back else None, _get(there))


def _put(queue):
    put = queue.put
    return lambda obj: put(obj, True, _NO_LIMIT_S)


def _get(queue):
    get = queue.get
    return lambda: get(True, _NO_LIMIT_S)
