"""uvicorn inside a process's own event loop, started and stopped by the composition root."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from pd_common.aio import for_ever, why_it_died
from pd_common.control.tls import Tls
from pd_common.errors import InternalError, InvalidRequest

_STOP_TIMEOUT_S = 5


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves one ASGI application. `option` is what set the port, for the error when it is taken."""

    def __init__(
        self, app: ASGIApp, host: str, port: int, *, tls: Tls | None = None, option: str = "http_port"
    ) -> None:
        self._host, self._port, self._option = host, port, option
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_STOP_TIMEOUT_S,
            ssl_context_factory=None if tls is None else lambda _config, _default: tls.http_context(),
        )
        self._server = _Server(settings)
        self._server.servers = []  # uvicorn itself has none before it listens
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listens from now on; gives the port.

        Raises:
            InvalidRequest: the address cannot be bound.

        """
        listening = self._bind()
        self._serving = asyncio.create_task(self._serve(listening), name=f"HTTP server ({self._option})")
        port: int = listening.getsockname()[1]
        return port

    async def watch(self) -> None:
        """Raises InternalError when serving has ended by itself; otherwise it never returns."""
        if self._serving is not None:
            await asyncio.wait((self._serving,))
            if not self._server.should_exit:
                raise InternalError(f"the HTTP server died: {why_it_died(self._serving) or 'it has ended'}")
        await for_ever()

    async def stop(self) -> None:
        """Lets running requests end for a few seconds."""
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.wait((self._serving,))

    async def _serve(self, listening: socket.socket) -> None:
        try:
            await self._server.serve([listening])
        finally:  # cut off in the middle, uvicorn goes on listening
            for each in self._server.servers:
                each.close()

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        # asyncio turns off delays (TCP_NODELAY) where the protocol is named, and not where it is 0: then every first
        # token on a connection that is used again comes 40 ms late.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((self._host, self._port))
        except OSError as error:
            listening.close()
            raise InvalidRequest(
                f"cannot listen on {self._host}:{self._port}: {error.strerror or error}", field=self._option
            ) from error
        listening.listen()
        return listening
