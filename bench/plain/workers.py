"""An executor: every worker has a queue in and a queue out, and does what it is told."""

import multiprocessing


def _serve(worker_class, rank, inbox, outbox):
    worker = worker_class(rank)
    outbox.put(("ready", None))
    while True:
        item = inbox.get()
        if item is None:
            return
        method, args = item
        try:
            outbox.put(("value", getattr(worker, method)(*args)))
        except Exception as error:
            outbox.put(("error", error))


class Executor:
    """Calls a method of every worker, each in a process of its own."""

    def __init__(self, worker_class, world_size, start_method="spawn"):
        context = multiprocessing.get_context(start_method)
        self._inboxes = [context.Queue() for _ in range(world_size)]
        self._outboxes = [context.Queue() for _ in range(world_size)]
        self._processes = [
            context.Process(target=_serve, args=(worker_class, rank, *queues), daemon=True)
            for rank, queues in enumerate(zip(self._inboxes, self._outboxes, strict=True))
        ]
        for process in self._processes:
            process.start()
        self._replies()

    def collective_rpc(self, method, args=()):
        for inbox in self._inboxes:
            inbox.put((method, args))
        return self._replies()

    def _replies(self):
        values = []
        for outbox in self._outboxes:
            kind, value = outbox.get()
            if kind == "error":
                raise value
            values.append(value)
        return values

    def close(self):
        for inbox in self._inboxes:
            inbox.put(None)
        for process in self._processes:
            process.join()
        for queue in (*self._inboxes, *self._outboxes):
            queue.close()
