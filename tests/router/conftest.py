from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import httpx
import pytest
import uvicorn
from openai import AsyncOpenAI

from services.router.http import create_app
from tests.router.scripted_backend import HELLO, ScriptedBackend


@pytest.fixture
async def backend() -> ScriptedBackend:
    return ScriptedBackend(HELLO)


@pytest.fixture
async def client(backend: ScriptedBackend) -> AsyncIterator[httpx.AsyncClient]:
    """Calls the application without a network; an exception that is a defect is answered, as a server does it."""
    transport = httpx.ASGITransport(create_app(backend, lambda: backend.live), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        yield client


@pytest.fixture
async def port(backend: ScriptedBackend) -> AsyncIterator[int]:
    """A real server on a port of its own. What `serve` adds to these steps is signals and a slow tick."""
    config = uvicorn.Config(create_app(backend, lambda: backend.live), log_level="warning", lifespan="off", ws="none")
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await server.startup([listener])
        yield listener.getsockname()[1]
        await server.shutdown([listener])


@pytest.fixture
async def openai(port: int) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        yield client
