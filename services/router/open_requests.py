"""Requests that are being served, and what the last ones of a process are told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class OpenRequests:
    """Requests of clients, on either front, from their arrival until all of their answer is handed over."""

    def __init__(self) -> None:
        self.are_last = False
        """The process is about to end."""
        self._open = 0
        self._ended = asyncio.Event()

    @contextmanager
    def one(self) -> Iterator[None]:
        """The time in which one is open."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            self._ended.set()

    async def none(self) -> None:
        """Returns when there is none."""
        while self._open:
            self._ended.clear()
            await self._ended.wait()


class HttpDoor:
    """An ASGI application whose requests are counted as open.

    The last ones take their connections with them: what a client sent on such a one later might meet nobody.
    """

    def __init__(self, app: ASGIApp, requests: OpenRequests) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if self._requests.are_last and message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        with self._requests.one():
            await self._app(scope, receive, sent)
