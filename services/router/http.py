"""The router's HTTP front: OpenAI's endpoints, SGLang's /generate, and health.

Knows no worker: it reads a request, relays the backend's pieces, and closes them when the client goes away.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial

from opentelemetry import context as trace_context
from opentelemetry import propagate
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pd_common.errors import InternalError, PdError
from pd_common.generation import Output
from pd_common.telemetry import spans
from services.router.abort_api import abort_request
from services.router.backend import Backend
from services.router.exchange import Answer, Exchange, Json, ReadExchange
from services.router.generate_api import read_generate
from services.router.http_body import read_body
from services.router.http_errors import HANDLERS, problem_of
from services.router.openai_api import read_chat, read_completion

ROOM_HEADER = "X-Bootstrap-Room"
"""The room as a decimal string: a JSON number above 2^53 is not exact everywhere."""

_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_log = logging.getLogger(__name__)


def create_app(backend: Backend, is_live: Callable[[], bool], more: Sequence[Route] = ()) -> Starlette:
    """The ASGI application; serving it is the caller's business. `is_live`: every part of the process lives.

    `more` is served beside the API.
    """
    status = _Status(backend, is_live)
    return Starlette(
        routes=[
            Route("/generate", _Generation(backend, read_generate), methods=["POST"]),
            Route("/v1/completions", _Generation(backend, read_completion), methods=["POST"]),
            Route("/v1/chat/completions", _Generation(backend, read_chat), methods=["POST"]),
            Route("/abort_request", partial(abort_request, backend=backend), methods=["POST"]),
            Route("/v1/models", status.models),
            Route("/health", status.health),
            Route("/livez", status.livez),
            *more,
        ],
        exception_handlers=HANDLERS,
    )


class _Status:
    """The endpoints that generate nothing."""

    def __init__(self, backend: Backend, is_live: Callable[[], bool]) -> None:
        self._backend = backend
        self._is_live = is_live
        self._started = int(time.time())

    async def models(self, _: Request) -> Response:
        model = await self._backend.model()
        entry = {"id": model.name, "object": "model", "created": self._started, "owned_by": "pd-handoff"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def health(self, request: Request) -> Response:
        """Readiness: a request that came now would be served."""
        if not self._backend.is_ready:
            return JSONResponse({"status": "unavailable", "reason": self._backend.not_ready_reason()}, 503)
        return await self.livez(request)

    async def livez(self, _: Request) -> Response:
        """Liveness: whether to leave the process running, whatever its peers and queues do."""
        if self._is_live():
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "dead", "reason": "a part of this process has died"}, 503)


class _Generation:
    """One generation endpoint as an ASGI application: `read` gives it its API's words, all else is the same for all.

    A request is read, generated and sent by one task: the spans that a generator opens and closes must see one context.
    """

    def __init__(self, backend: Backend, read: ReadExchange) -> None:
        self._backend = backend
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        context = _caller_context(request.headers)
        raw = await read_body(request)
        await _while_connected(receive, self._answer(raw, scope, receive, send), context)

    async def _answer(self, raw: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = await self._read(raw, self._backend)
        async with aclosing(self._backend.generate(exchange.request)) as pieces:
            # The head is not sent before the first piece is there: until then a failure has an HTTP status.
            first = await anext(pieces, None)
            if first is None:
                raise InternalError("the answer has no pieces")
            headers = {ROOM_HEADER: str(first.room)}
            all_pieces = _with_first(first, pieces)
            if exchange.stream:
                events = _events(exchange, Answer(first.room), all_pieces)
                headers |= _STREAM_HEADERS
                await StreamingResponse(events, 200, headers, "text/event-stream").stream_response(send)
            else:
                content = exchange.whole(await _collected(Answer(first.room), all_pieces))
                await JSONResponse(content, 200, headers)(scope, receive, send)


async def _while_connected(receive: Receive, work: Coroutine[None, None, None], context: contextvars.Context) -> None:
    """Does the work, in `context`, unless the client goes away first; returns when it is done or undone."""
    working = asyncio.create_task(work, context=context)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))
    if not working.cancelled():
        working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _caller_context(headers: Headers) -> contextvars.Context:
    """A context in which the caller's W3C trace context is the current one, and its request arrives now."""
    context = contextvars.copy_context()
    context.run(trace_context.attach, spans.arrived(propagate.extract(headers)))
    return context


async def _with_first(first: Output, rest: AsyncIterator[Output]) -> AsyncIterator[Output]:
    yield first
    async for piece in rest:
        yield piece


async def _collected(answer: Answer, pieces: AsyncIterator[Output]) -> Answer:
    async for piece in pieces:
        answer.add(piece)
    answer.ended()
    return answer


async def _events(exchange: Exchange, answer: Answer, pieces: AsyncIterator[Output]) -> AsyncIterator[bytes]:
    """The body of a stream. A failure is its last event, without [DONE]: half an answer cannot pass for a whole one."""
    try:
        for content in exchange.opening():
            yield _event(content)
        async for piece in pieces:
            answer.add(piece)
            for content in exchange.events(piece, answer):
                yield _event(content)
        answer.ended()
        for content in exchange.closing(answer):
            yield _event(content)
        yield _DONE
    except Exception as error:  # noqa: BLE001  the head is sent: only an event can still say that it failed
        if not isinstance(error, PdError):
            _log.error("a stream failed unexpectedly", exc_info=error)
        yield _event(problem_of(error).body())


def _event(content: Json) -> bytes:
    # ASCII only: U+2028 and its kind end a line for some clients' readers.
    return b"data: " + json.dumps(content, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"
