"""multiprocessing.Pipe: one pipe per reader, and one back."""

from . import End, Rival, to_each


class Pipe(Rival):
    name = "mp.Pipe"

    def __init__(self, setup, context):
        super().__init__(setup, context)
        self._there = [context.Pipe(duplex=False) for _ in range(setup.readers)]
        self._back = context.Pipe(duplex=False) if setup.replies else (None, None)

    def shares(self):
        writer = [send for _, send in self._there], self._back[0]
        readers = [
            (recv, self._back[1] if rank == 0 else None)
            for rank, (recv, _) in enumerate(self._there)
        ]
        return writer, readers

    def release(self):
        for pair in [*self._there, self._back]:
            for connection in pair:
                if connection is not None:
                    connection.close()

    @classmethod
    def open_writer(cls, share, setup):
        sends, back = share

        def close():
            for connection in [*sends, back]:
                if connection is not None:
                    connection.close()

        return End(to_each([s.send for s in sends]), back.recv if back else None, close)

    @classmethod
    def open_reader(cls, share, setup, rank, offer):
        recv, back = share

        def close():
            recv.close()
            if back is not None:
                back.close()

        return End(back.send if back else None, recv.recv, close)
