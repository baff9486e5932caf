"""uvicorn inside a process's own event loop, started and stopped by the composition root."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from pd_common.errors import InvalidRequest

_STOP_TIMEOUT_S = 5


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves one ASGI application. `option` is what set the port, for the error when it is taken."""

    def __init__(self, app: ASGIApp, host: str, port: int, *, option: str = "http_port") -> None:
        self._host, self._port, self._option = host, port, option
        settings = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=_STOP_TIMEOUT_S
        )
        self._server = _Server(settings)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listens from now on; gives the port.

        Raises:
            InvalidRequest: the address cannot be bound.

        """
        listening = self._bind()
        self._serving = asyncio.create_task(self._server.serve([listening]))
        port: int = listening.getsockname()[1]
        return port

    async def stop(self) -> None:
        """Lets running requests end for a few seconds."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
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
