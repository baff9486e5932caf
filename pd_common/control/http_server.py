"""uvicorn inside a process's own event loop, started and stopped by the composition root."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from pd_common.aio import for_ever, why_it_died
from pd_common.control import ports
from pd_common.control.tls import Tls
from pd_common.errors import InternalError

_GRACE_S = 5.0


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
        listening = ports.bind(self._host, self._port, self._option)
        listening.listen()
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

    async def stop(self, grace_s: float = _GRACE_S) -> None:
        """Takes no new request and no longer keeps connections alive; cuts off what still runs after `grace_s` seconds.

        May be called again with less grace.
        """
        self._server.should_exit = True
        if self._serving is not None and not (await asyncio.wait((self._serving,), timeout=grace_s))[0]:
            running = (*self._server.server_state.tasks, self._serving)
            for task in running:
                task.cancel()
            await asyncio.wait(running)

    async def _serve(self, listening: socket.socket) -> None:
        try:
            await self._server.serve([listening])
        finally:  # cut off in the middle, uvicorn goes on listening
            for each in self._server.servers:
                each.close()
