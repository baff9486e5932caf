"""An OpenAI-compatible server as the bench calls it: which models it has, and completions as streams."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp

from pd_common.cli.bench.serve.events import EventParser
from pd_common.cli.bench.serve.exchange import Exchange, Failure, failure_of
from pd_common.cli.bench.serve.workload import Request
from pd_common.errors import InvalidRequest, PeerLost

_KEEP_ALIVE_S = 2.0
"""Below what servers keep an idle connection (uvicorn: 5 s), so that none is closed as a request goes out on it."""
_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class Server:
    """Where it is, and how it is spoken to."""

    url: str
    """With or without /v1 at its end."""
    api_key: str | None
    timeout_s: float
    """For a whole answer."""

    def of(self, path: str) -> str:
        return f"{self.url.rstrip('/').removesuffix('/v1')}/v1/{path}"

    def session(self) -> aiohttp.ClientSession:
        """Its connections are opened as they are needed, and no request waits for another's."""
        # A compressed stream would come when the compressor pleases.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=self.timeout_s, sock_connect=_CONNECT_S),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        )


async def model_of(server: Server, session: aiohttp.ClientSession, wanted: str | None) -> str:
    """The model that is wanted, or the server's first.

    Raises:
        PeerLost: nobody answers there, or it is no OpenAI-compatible server.
        InvalidRequest: the server does not have this model.

    """
    url = server.of("models")
    try:
        async with session.get(url) as response:
            status, text = response.status, await response.text(errors="replace")
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        raise PeerLost(f"no answer from {url} ({error}): is the server up, and is this its address?") from error
    if status == HTTPStatus.NOT_FOUND and wanted is not None:
        return wanted  # not every server has a list of its models
    if status != HTTPStatus.OK:
        failure = _failure(status, text)
        hint = "no list of models there: name one with --model, or is this not the server's address?"
        why = hint if status == HTTPStatus.NOT_FOUND else failure.message
        raise PeerLost(f"{url} answers {status}: {why}")
    try:
        known = [str(model["id"]) for model in json.loads(text)["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise PeerLost(f"{url} has no list of models: is this an OpenAI-compatible server?") from error
    if not known or wanted not in {None, *known}:
        raise InvalidRequest(f"the server has no model {wanted or 'at all'}; it has {', '.join(known) or 'none'}")
    return wanted or known[0]


@dataclass(frozen=True, slots=True)
class Completions:
    """POST /v1/completions, with the same fields in every request beside prompt and length."""

    server: Server
    session: aiohttp.ClientSession
    fields: Mapping[str, Any]

    async def complete(self, request: Request, exchange: Exchange) -> None:
        """Sends the request and reads its answer, to its end or its failure, into `exchange`."""
        body = json.dumps({**self.fields, "prompt": request.prompt, "max_tokens": request.output_tokens}).encode()
        exchange.sent_s = time.perf_counter()
        try:
            async with self.session.post(self.server.of("completions"), data=body) as response:
                if response.status == HTTPStatus.OK:
                    await _read(response, exchange)
                else:
                    exchange.failure = _failure(response.status, await response.text(errors="replace"))
        except TimeoutError:
            exchange.failure = Failure(None, "timeout", "no whole answer within --timeout")
        except aiohttp.ClientError as error:
            exchange.failure = Failure(None, type(error).__name__, str(error))


async def _read(response: aiohttp.ClientResponse, exchange: Exchange) -> None:
    """Reads on after [DONE] to the end of the body: only then can the connection carry another request."""
    parser = EventParser()
    async for piece in response.content.iter_any():
        now_s = time.perf_counter()
        for event in parser.feed(piece):
            exchange.take(event, now_s)
    exchange.end()


def _failure(status: int, text: str) -> Failure:
    try:
        return failure_of(status, json.loads(text))
    except ValueError:
        return Failure(status, "unknown", text[:200])
