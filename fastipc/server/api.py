"""The HTTP side of an API server: completions, health and metrics, over one engine client.

``POST /v1/completions`` takes and gives what OpenAI's endpoint of that name does, as far as the
demo's model has it: ``prompt``, ``max_tokens``, ``temperature``, ``seed``, ``stream``. Beyond it
there is ``image``: ``{"shape": [3, height, width], "data": base64 of the bytes}``.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from fastipc.demo import model
from fastipc.demo.core import Generate, Tokens
from fastipc.errors import EngineDeadError, RequestFailed, TooManyRequests

__all__ = ["Service", "application"]

MODEL = "fastipc-demo"
# An image of 2,048 x 2,048 in base64, and the prompt.
MAX_BODY_BYTES = 32 << 20
MAX_TOKENS = 4096

Stream = AsyncIterator[Tokens]


class Image(msgspec.Struct):
    shape: tuple[int, int, int]
    data: str

    def array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        try:
            data = base64.b64decode(self.data, validate=True)
            array = np.frombuffer(data, np.uint8).reshape(self.shape)
        except (binascii.Error, ValueError) as error:
            raise BadRequest(f"image: {error}") from None
        try:
            model.check_image(array)
        except ValueError as error:
            raise BadRequest(f"image: {error}") from None
        return array


class Completion(msgspec.Struct):
    """The body of a request. Unknown fields are ignored, as clients send all kinds of them."""

    prompt: str
    max_tokens: int = 16
    temperature: float = 1.0
    seed: int | None = None
    stream: bool = False
    model: str = MODEL
    image: Image | None = None

    def request(self, request_id: str) -> Generate:
        if not 1 <= self.max_tokens <= MAX_TOKENS:
            raise BadRequest(f"max_tokens must be 1 to {MAX_TOKENS}, not {self.max_tokens}")
        if not 0 <= self.temperature <= 2:
            raise BadRequest(f"temperature must be 0 to 2, not {self.temperature}")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise BadRequest(f"seed must be 0 to 2^63 - 1, not {self.seed}")
        return Generate(
            request_id,
            model.tokenize(self.prompt),
            self.max_tokens,
            secrets.randbits(63) if self.seed is None else self.seed,
            round(self.temperature * model.TEMPERATURE_ONE),
            None if self.image is None else self.image.array(),
        )


class BadRequest(Exception):
    """The request can't be understood; the text says why."""


class Draining(Exception):
    """The server ends, and takes no more requests."""


_decode_body = msgspec.json.Decoder(Completion).decode
_encode = msgspec.json.Encoder().encode


class Service:
    """What the handlers share. ``client`` is an `AsyncEngineClient`.

    ``metrics`` returns the text of /metrics, or None without its extra.
    """

    def __init__(
        self,
        client: Any,
        metrics: Callable[[], Awaitable[bytes | None]],
    ) -> None:
        self.client = client
        self.metrics = metrics
        self.draining = False
        self.open = 0
        self._reading: set[asyncio.Timeout] = set()
        self._prefix = secrets.token_hex(4)
        self._count = 0

    def request_id(self) -> str:
        """Unique among all API servers of a group."""
        self._count += 1
        return f"cmpl-{self._prefix}-{self._count}"

    def drain(self) -> None:
        """From now on only requests are answered whose body has come: a client may take any time
        for the rest."""
        self.draining = True
        now = asyncio.get_running_loop().time()
        for bound in self._reading:
            bound.reschedule(now)

    async def body(self, request: Request) -> bytes:
        try:
            async with asyncio.timeout(0 if self.draining else None) as bound:
                self._reading.add(bound)
                try:
                    return await _body(request)
                finally:
                    self._reading.discard(bound)
        except TimeoutError:
            raise Draining("the server is ending, and has not got the whole request") from None


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encode(value), status, headers, "application/json")


# What went wrong: its status, and the type by which OpenAI's clients tell errors apart.
_STATUS: dict[type[Exception], tuple[int, str]] = {
    BadRequest: (400, "invalid_request_error"),
    Draining: (503, "server_draining"),
    TooManyRequests: (429, "rate_limit_error"),
    RequestFailed: (500, "server_error"),
    EngineDeadError: (503, "engine_dead"),
}


def _problem(error: Exception) -> tuple[int, dict[str, Any]]:
    for kind, (status, name) in _STATUS.items():
        if isinstance(error, kind):
            return status, {"error": {"message": str(error), "type": name}}
    raise error


class _Answer(Response):
    """One JSON object when all tokens are there; or each token at once, as server-sent events.

    In both cases a client that goes away ends the request in the engine.
    """

    def __init__(self, service: Service, completion: Completion, request: Generate) -> None:
        self._service = service
        self._completion = completion
        self._request = request
        self._created = int(time.time())
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(
            self._stream(send) if self._completion.stream else self._whole(scope, receive, send)
        )
        gone = asyncio.create_task(_disconnected(receive))
        self._service.open += 1
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._service.open -= 1
            gone.cancel()
            work.cancel()  # which has the engine abort the request, if it is under way still
            results = await asyncio.gather(work, gone, return_exceptions=True)
        if isinstance(results[0], Exception) and not isinstance(results[0], OSError):
            raise results[0]

    def _object(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {
            "id": self._request.request_id,
            "object": "text_completion",
            "created": self._created,
            "model": MODEL,
            "choices": [
                {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
            ],
        }

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        said = bytearray()
        prompt_tokens = len(self._request.prompt)
        try:
            async for output in self._service.client.generate(self._request):
                said += output.tokens
        except tuple(_STATUS) as error:
            status, problem = _problem(error)
            await _json(problem, status)(scope, receive, send)
            return
        answer = self._object(model.detokenize(bytes(said)), "length")
        answer["usage"] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(said),
            "total_tokens": prompt_tokens + len(said),
        }
        await _json(answer)(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        begun = False

        async def begin(status: int) -> None:
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": status, "headers": headers})

        async def event(data: bytes) -> None:
            body = b"data: " + data + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})

        try:
            async for output in self._service.client.generate(self._request):
                if not begun:
                    begun = True
                    await begin(200)
                text = model.detokenize(output.tokens)
                await event(_encode(self._object(text, "length" if output.finished else None)))
            await event(b"[DONE]")
        except tuple(_STATUS) as error:
            status, problem = _problem(error)
            if not begun:
                # Nothing has been said: the status can still tell.
                await begin(status)
            await event(_encode(problem))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()


async def _body(request: Request) -> bytes:
    size = 0
    parts = []
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise BadRequest(f"the body has more than {MAX_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def application(service: Service) -> Starlette:
    """The ASGI application of one API server."""

    async def completions(request: Request) -> Response:
        try:
            try:
                completion = _decode_body(await service.body(request))
            except msgspec.MsgspecError as error:
                raise BadRequest(str(error)) from None
            return _Answer(service, completion, completion.request(service.request_id()))
        except BadRequest as error:
            status, problem = _problem(error)
            return _json(problem, status)
        except Draining as error:
            status, problem = _problem(error)
            return _json(problem, status, {"connection": "close"})
        except ClientDisconnect:
            return Response(status_code=400)

    async def health(request: Request) -> Response:
        engines = {
            f"engine {index}": "ready" if engine.alive else f"dead: {engine.reason}"
            for index, engine in sorted(service.client.engines.items())
        }
        if service.draining:
            return _json({"status": "draining", "engines": engines}, 503)
        dead = [name for name, state in engines.items() if state != "ready"]
        if dead:
            return _json({"status": f"{', '.join(dead)} dead", "engines": engines}, 503)
        return _json({"status": "ok", "engines": engines})

    async def metrics(request: Request) -> Response:
        text = await service.metrics()
        if text is None:
            return Response(
                "/metrics needs the package prometheus-client: "
                "pip install 'fastipc-core[metrics]'\n",
                501,
                media_type="text/plain",
            )
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/health", health),
            Route("/metrics", metrics),
        ]
    )
