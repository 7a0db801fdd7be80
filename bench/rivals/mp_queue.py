"""multiprocessing.Queue: one unbounded queue per reader, and one back."""

from . import End, Rival, to_each


def _close(queues):
    def close():
        for queue in queues:
            queue.close()
            # Every message of a round has been received; what a killed peer left is of no use.
            queue.cancel_join_thread()

    return close


class Queue(Rival):
    name = "mp.Queue"

    def __init__(self, setup, context):
        super().__init__(setup, context)
        self._there = [context.Queue() for _ in range(setup.readers)]
        self._back = context.Queue() if setup.replies else None

    def shares(self):
        readers = [(queue, self._back if i == 0 else None) for i, queue in enumerate(self._there)]
        return (self._there, self._back), readers

    def sweep(self):
        # Not earlier: these objects own the names of the semaphores.
        for queue in [*self._there, self._back]:
            if queue is not None:
                queue.close()
        self._there, self._back = [], None
        super().sweep()

    @classmethod
    def open_writer(cls, share, setup):
        there, back = share
        queues = [q for q in [*there, back] if q is not None]
        return End(to_each([q.put for q in there]), back.get if back else None, _close(queues))

    @classmethod
    def open_reader(cls, share, setup, rank, offer):
        there, back = share
        queues = [q for q in [there, back] if q is not None]
        return End(back.put if back else None, there.get, _close(queues))
