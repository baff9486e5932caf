from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from pd_common.control.http_server import HttpServer
from pd_common.errors import InvalidRequest
from tests.control.serving import LOOPBACK


class SlowApp:
    """One route that answers when it may."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.asgi = Starlette(routes=[Route("/", self._answer)])

    async def _answer(self, _: Request) -> PlainTextResponse:
        self.asked.set()
        await self.may_answer.wait()
        return PlainTextResponse("done")


@pytest.fixture
async def app() -> SlowApp:
    return SlowApp()


@pytest.fixture
async def server(app: SlowApp) -> HttpServer:
    return HttpServer(app.asgi, LOOPBACK, 0)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient() as client:
        yield client


async def test_it_listens_when_start_returns_and_stop_lets_a_request_end(
    app: SlowApp, server: HttpServer, client: httpx.AsyncClient
) -> None:
    url = f"http://{LOOPBACK}:{await server.start()}/"
    answer = asyncio.create_task(client.get(url))
    await asyncio.wait_for(app.asked.wait(), 10)
    stopping = asyncio.create_task(server.stop())
    await asyncio.sleep(0)
    app.may_answer.set()
    assert (await answer).text == "done"
    await asyncio.wait_for(stopping, 10)
    with pytest.raises(httpx.ConnectError):
        await client.get(url)


async def test_a_busy_port_is_an_error(app: SlowApp, server: HttpServer) -> None:
    port = await server.start()
    with pytest.raises(InvalidRequest, match=f"{LOOPBACK}:{port}") as raised:
        await HttpServer(app.asgi, LOOPBACK, port).start()
    assert raised.value.metadata == {"field": "http_port"}
    await server.stop()


async def test_a_host_of_another_machine_is_an_error(app: SlowApp) -> None:
    with pytest.raises(InvalidRequest, match=r"192\.0\.2\.1"):
        await HttpServer(app.asgi, "192.0.2.1", 0).start()


async def test_answers_on_a_connection_that_is_used_again_are_not_delayed(app: SlowApp, server: HttpServer) -> None:
    port = await server.start()
    _, writer = await asyncio.open_connection(LOOPBACK, port)
    writer.write(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
    await asyncio.wait_for(app.asked.wait(), 10)
    (connection,) = server._server.server_state.connections
    accepted = connection.transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    app.may_answer.set()
    writer.close()
    await server.stop()
