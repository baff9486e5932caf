"""A server of completions that plays a script: pieces of a body as they are, and events that it waits for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

DONE = b"data: [DONE]\n\n"


def event(text: str = "a", finish: str | None = None, **fields: Any) -> bytes:
    document = {"choices": [{"index": 0, "text": text, "finish_reason": finish}], **fields}
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def usage(prompt: int, output: int, cached: int = 0) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": cached}}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


@dataclass
class ScriptedOpenAI:
    """Answers every completion with the script (all but the first with `later`, if given), or with `refusal`."""

    script: Sequence[bytes | asyncio.Event] = (event(), event(), usage(3, 2), DONE)
    later: Sequence[bytes | asyncio.Event] | None = None
    refusal: Response | None = None
    models: Response = field(default_factory=lambda: JSONResponse({"data": [{"id": "tiny"}]}))
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    peers: set[Any] = field(default_factory=set)
    """Connections that requests came on."""
    stuck: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request waits for an event of the script."""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ]
        )

    async def _models(self, _: Request) -> Response:
        return self.models

    async def _complete(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        self.peers.add(request.client)
        script = self.script if self.later is None or len(self.bodies) == 1 else self.later
        return self.refusal or StreamingResponse(self._play(script), media_type="text/event-stream")

    async def _play(self, script: Sequence[bytes | asyncio.Event]) -> AsyncIterator[bytes]:
        for step in script:
            if isinstance(step, bytes):
                yield step
            else:
                self.stuck.set()
                await step.wait()
