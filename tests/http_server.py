"""A real HTTP server in the test's own event loop."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[str]:
    """Its URL. What `serve` adds to these steps is signals and a slow tick."""
    config = uvicorn.Config(app, log_level="warning", lifespan="off", ws="none")
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await server.startup([listener])
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        await server.shutdown([listener])
