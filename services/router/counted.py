"""What Prometheus reads of the router's requests, as clients see them: counted as they pass, and none of them kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing

from prometheus_client import Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from pd_common.errors import PdError, Reason
from pd_common.generation import ChatMessage, ClientRequest, ModelInfo, Output
from pd_common.handoff.state import TransferState
from pd_common.telemetry.answers import AnswerMetrics
from pd_common.telemetry.metrics import SUCCESS
from pd_common.types import BootstrapRoom
from services.router.backend import Backend

_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class CountedRequests(Collector):
    """A backend whose requests are counted, however many routes each of them tries; probes do not come this way."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._answers = AnswerMetrics("pd")
        self._ended = Counter("pd_requests", "Requests of clients that have ended.", ["outcome"], registry=None)
        self._took = Histogram(
            "pd_request_seconds",
            "From a request to the end of its answer, whatever it was.",
            registry=None,
            buckets=_REQUEST_S,
        )

    def collect(self) -> Iterator[Metric]:
        for metric in (self._ended, self._took, self._answers):
            yield from metric.collect()

    async def generate(self, request: ClientRequest) -> AsyncGenerator[Output, None]:
        clock, began_s, outcome = self._answers.begin(), time.monotonic(), str(Reason.INTERNAL)
        try:
            async with aclosing(self._backend.generate(request)) as pieces:
                async for piece in pieces:
                    clock.note(piece)
                    if piece.is_last:
                        outcome = SUCCESS
                    yield piece
        except PdError as error:
            outcome = error.reason.value
            raise
        except (GeneratorExit, asyncio.CancelledError):
            if outcome != SUCCESS:  # whoever has had the last piece may go
                outcome = Reason.CLIENT_CANCELLED.value
            raise
        finally:
            self._ended.labels(outcome).inc()
            self._took.observe(time.monotonic() - began_s)

    # --- not counted ---

    async def tokenize_text(self, text: str) -> tuple[int, ...]:
        return await self._backend.tokenize_text(text)

    async def tokenize_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        return await self._backend.tokenize_chat(messages)

    async def model(self) -> ModelInfo:
        return await self._backend.model()

    async def abort(self, room: BootstrapRoom, error: PdError) -> TransferState | None:
        return await self._backend.abort(room, error)

    async def abort_rid(self, rid: str, message: str) -> Sequence[BootstrapRoom]:
        return await self._backend.abort_rid(rid, message)

    @property
    def is_ready(self) -> bool:
        return self._backend.is_ready

    def not_ready_reason(self) -> str:
        return self._backend.not_ready_reason()


class CountedErrors(Collector):
    """An ASGI application whose answers of 400 and above are counted. Paths that it does not have count as one."""

    def __init__(self, app: Starlette) -> None:
        self._app = app
        self._paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
        self._errors = Counter(
            "pd_http_errors", "Requests over HTTP answered with an error.", ["path", "status"], registry=None
        )

    def collect(self) -> Iterator[Metric]:
        yield from self._errors.collect()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._errors.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted)
