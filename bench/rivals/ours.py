"""fastipc's MessageQueue; and vLLM's, whose names and calls are the same."""

import importlib

from . import End, Rival

# Seconds until everyone has attached. Only a failure takes that long.
_ATTACH_S = 30


class Fastipc(Rival):
    name = "fastipc"
    package = "fastipc"
    module = "fastipc"

    @classmethod
    def missing(cls):
        reason = super().missing()
        if reason is not None:
            return reason
        try:
            importlib.import_module(cls.module).MessageQueue  # noqa: B018
        except Exception as error:
            return f"{cls.module}: {error!r}"
        return None

    @classmethod
    def _queue_class(cls):
        return importlib.import_module(cls.module).MessageQueue

    @classmethod
    def open_writer(cls, share, setup):
        queues = cls._queue_class()
        there = queues(setup.readers, setup.readers)
        end = End(there.enqueue, offer=there.export_handle())
        opened = [there]

        def join(offers):
            there.wait_until_ready(*cls._limit())
            if setup.replies:
                back = queues.create_from_handle(offers[0], 0)
                opened.append(back)
                back.wait_until_ready(*cls._limit())
                end.recv = back.dequeue

        end._join = join
        end._close = lambda: cls._close_all(opened)
        return end

    @classmethod
    def open_reader(cls, share, setup, rank, offer):
        queues = cls._queue_class()
        there = queues.create_from_handle(offer, rank)
        end = End(recv=there.dequeue)
        opened = [there]
        if setup.replies:
            back = queues(1, 1)
            opened.append(back)
            end.send = back.enqueue
            end.offer = back.export_handle()

        def join(_):
            for queue in opened:
                queue.wait_until_ready(*cls._limit())

        end._join = join
        end._close = lambda: cls._close_all(opened)
        return end

    @classmethod
    def _limit(cls):
        return (_ATTACH_S,)

    @classmethod
    def _close_all(cls, queues):
        for queue in queues:
            queue.close()


class Vllm(Fastipc):
    name = "vllm"
    package = "vllm"
    module = "vllm.distributed.device_communicators.shm_broadcast"

    def shares(self):
        return self.folder(), [self.folder()] * self.setup.readers

    @classmethod
    def open_writer(cls, share, setup):
        cls._keep_files_in(share)
        return super().open_writer(share, setup)

    @classmethod
    def open_reader(cls, share, setup, rank, offer):
        cls._keep_files_in(share)
        return super().open_reader(share, setup, rank, offer)

    @staticmethod
    def _keep_files_in(folder):
        import os

        # It leaves socket files behind; here they go with the folder.
        os.environ["VLLM_RPC_BASE_PATH"] = folder

    @classmethod
    def _limit(cls):
        return ()  # its wait_until_ready takes no timeout; the runner's watchdog stands in

    @classmethod
    def _close_all(cls, queues):
        queues.clear()  # it has no close: its finalizers unlink
