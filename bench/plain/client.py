"""The front end, asyncio."""

import asyncio
import multiprocessing
import tempfile

import zmq
import zmq.asyncio

from .engine import ABORT, ADD, main
from .messages import decoder, encoder


class AsyncClient:
    """Starts an engine and streams its outputs, request by request."""

    def __init__(self, core_class, config=None, start_method="spawn"):
        self._folder = tempfile.TemporaryDirectory(prefix="plain-")
        paths = [f"ipc://{self._folder.name}/{name}" for name in ("in", "out")]
        self._context = zmq.asyncio.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._pull = self._context.socket(zmq.PULL)
        # Before it binds: at its limit a ROUTER drops messages.
        self._router.setsockopt(zmq.SNDHWM, 0)
        for socket, path in zip((self._router, self._pull), paths, strict=True):
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(path)
        self._identity = (0).to_bytes(2, "little")
        self._encode = encoder().encode
        self._decode = decoder(list[core_class.output_type]).decode
        self._streams = {}
        self._process = multiprocessing.get_context(start_method).Process(
            target=main, args=(core_class, config, *paths, self._identity)
        )
        self._process.start()
        self._reader = None

    async def ready(self):
        await self._router.recv_multipart()
        self._reader = asyncio.create_task(self._read())

    async def _read(self):
        while True:
            for output in self._decode(await self._pull.recv()):
                stream = self._streams.get(output.request_id)
                if stream is not None:
                    stream.put_nowait(output)

    async def generate(self, request):
        stream = self._streams[request.request_id] = asyncio.Queue()
        finished = False
        try:
            await self._router.send_multipart((self._identity, ADD, self._encode(request)))
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        finally:
            del self._streams[request.request_id]
            if not finished:
                ids = self._encode([request.request_id])
                await self._router.send_multipart((self._identity, ABORT, ids))

    async def close(self):
        await self._router.send_multipart((self._identity, b"\xff"))
        await asyncio.to_thread(self._process.join)
        self._reader.cancel()
        self._router.close()
        self._pull.close()
        self._context.term()
        self._folder.cleanup()
