"""The end of a router: whoever is being served is served to the end, and the process ends with the last answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pd.v1 import generation_pb2, generation_pb2_grpc
from starlette.types import Receive, Scope, Send

from pd_common.aio import for_ever
from pd_common.control import server
from pd_common.control.connection import Connection
from pd_common.control.http_server import HttpServer
from pd_common.control.server import LIVENESS, ControlServer
from pd_common.errors import InternalError, InvalidRequest, PeerLost, ShuttingDown
from pd_common.telemetry.tracing import Tracing
from pd_common.types import BootstrapRoom
from services.router import __main__ as router_process
from services.router import draining
from services.router.dispatch import Dispatcher
from services.router.draining import drain
from services.router.http import create_app
from services.router.open_requests import HttpDoor, OpenRequests
from services.router.servicer import RouterGenerationServicer
from tests.control.serving import LOOPBACK, typed
from tests.control.test_supervisor import NOT_SERVING, SERVING, Watcher, status_of
from tests.services.engine_server import Cluster, EngineServer, ending, piece, soon
from tests.services.pair import until
from tests.services.test_supervision import free_port, kill_task, options_of

IDS = [1, 2, 3]
STREAM = {"input_ids": IDS, "stream": True}
AT_ONCE_S = 15.0
"""Less than the time to drain, and more than a slow machine takes for what nothing holds up."""


class Router:
    """Both fronts of a router in front of one prefill and one decode, and its end."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        (self.decode,) = cluster.decode_servers
        self.dispatcher = Dispatcher(cluster.policy, Tracing())
        self.requests, self.out_of_patience = OpenRequests(), asyncio.Event()
        self.control = ControlServer([server.generation(RouterGenerationServicer(self.dispatcher, self.requests))])
        self.http = HttpServer(HttpDoor(create_app(self.dispatcher, lambda: True), self.requests), LOOPBACK, 0)

    async def start(self) -> None:
        self.connection = Connection(f"{LOOPBACK}:{await self.control.start(LOOPBACK, 0)}")
        self.generation: Any = generation_pb2_grpc.GenerationStub(self.connection.channel)
        self.client = httpx.AsyncClient(base_url=f"http://{LOOPBACK}:{await self.http.start()}", timeout=20.0)
        await self.control.set_serving(True)

    def begin_to_end(self) -> asyncio.Task[None]:
        async def out_of_patience() -> None:
            await self.out_of_patience.wait()

        return asyncio.create_task(drain(self.requests, self.dispatcher, self.http, self.control, out_of_patience()))

    async def room(self) -> BootstrapRoom:
        """Of the next request that has come to decode."""
        return (await self.decode.next_request()).room

    def ask(self) -> asyncio.Task[httpx.Response]:
        """Over HTTP, for a whole answer."""
        return asyncio.create_task(self.client.post("/generate", json={"input_ids": IDS}))

    async def stop(self) -> None:
        await self.client.aclose()
        await self.connection.close()
        await self.dispatcher.close()
        await self.http.stop(0.0)
        await self.control.stop(grace_s=0.0)


@pytest.fixture
async def router(cluster: Cluster) -> AsyncIterator[Router]:
    router = Router(cluster)
    await router.start()
    yield router
    await router.stop()


def events(body: str) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line.startswith("data: {")]


async def refuses(router: Router) -> None:
    """Nobody listens any more."""
    with pytest.raises(httpx.ConnectError):
        await router.client.get("/livez")
    with pytest.raises(PeerLost):
        await typed(router.connection, router.generation.GetModel(generation_pb2.GetModelRequest(), timeout=2))


async def test_a_router_that_serves_nobody_ends_at_once_whoever_is_connected(router: Router) -> None:
    assert (await router.client.get("/health")).status_code == 200
    _, half_a_request = await asyncio.open_connection(LOOPBACK, router.client.base_url.port)
    watch = Watcher(router.connection, "")  # a call that never ends by itself
    await watch.next()
    await asyncio.wait_for(router.begin_to_end(), AT_ONCE_S)
    await refuses(router)
    half_a_request.close()


async def test_an_answer_over_http_is_given_to_its_end(router: Router) -> None:
    request = router.client.build_request("POST", "/generate", json=STREAM)
    asking = asyncio.create_task(router.client.send(request, stream=True))
    room = await router.room()
    router.decode.publish(piece(room, 1))
    response = await soon(asking)
    ending_router = router.begin_to_end()
    await until(lambda: router.requests.are_last)
    router.decode.publish(piece(room, 2))
    router.decode.publish(ending(room))
    body = (await soon(response.aread())).decode()
    assert body.rstrip().endswith("data: [DONE]")
    assert events(body)[-1]["output_ids"] == [1, 2, 9]
    await asyncio.wait_for(ending_router, AT_ONCE_S)
    await refuses(router)


async def test_an_answer_over_grpc_is_given_to_its_end(router: Router) -> None:
    call = router.generation.Generate(generation_pb2.GenerateRequest(input_ids=generation_pb2.TokenIds(ids=IDS)))
    reading = asyncio.create_task(call.read())
    room = await router.room()
    ending_router = router.begin_to_end()
    await until(lambda: router.requests.are_last)
    router.decode.publish(piece(room, 1))
    assert list((await soon(reading)).output.token_ids) == [1]
    router.decode.publish(ending(room))
    assert (await soon(call.read())).output.finish_reason
    await asyncio.wait_for(ending_router, AT_ONCE_S)
    await refuses(router)


async def test_whoever_comes_meanwhile_is_served_and_told_to_connect_elsewhere_next_time(router: Router) -> None:
    first = router.ask()
    room = await router.room()
    ending_router = router.begin_to_end()
    await until(lambda: router.requests.are_last)
    health = await router.client.get("/health")
    assert (health.status_code, health.json()["reason"]) == (503, "this router is stopping")
    assert (await router.client.get("/livez")).status_code == 200
    second = router.ask()
    router.decode.publish(ending(await router.room()))
    late = await soon(second)
    assert (late.status_code, late.headers["connection"]) == (200, "close")
    assert not ending_router.done()
    router.decode.publish(ending(room))
    early = await soon(first)
    assert (early.status_code, early.headers["connection"]) == (200, "close")
    await asyncio.wait_for(ending_router, AT_ONCE_S)


async def test_before_the_end_connections_are_kept(router: Router) -> None:
    assert "connection" not in (await router.client.get("/livez")).headers


async def test_a_request_whose_text_is_being_read_is_served_as_well(router: Router) -> None:
    """It has no room yet."""
    (worker,) = router.cluster.decodes
    tokenizing, may_go_on, tokenize = asyncio.Event(), asyncio.Event(), worker.tokenize_text

    async def slow(text: str) -> tuple[int, ...]:
        tokenizing.set()
        await may_go_on.wait()
        return await tokenize(text)

    worker.tokenize_text = slow  # type: ignore[method-assign]
    over_http = asyncio.create_task(router.client.post("/generate", json={"text": "a"}))
    await soon(tokenizing.wait())
    tokenizing.clear()
    over_grpc = router.generation.Generate(generation_pb2.GenerateRequest(text="a"))
    await soon(tokenizing.wait())
    ending_router = router.begin_to_end()
    await until(lambda: router.requests.are_last)
    may_go_on.set()
    for _ in range(2):
        router.decode.publish(ending(await router.room()))
    assert (await soon(over_http)).status_code == 200
    assert (await soon(over_grpc.read())).output.finish_reason
    await asyncio.wait_for(ending_router, AT_ONCE_S)


async def test_out_of_patience_it_ends_what_still_runs_and_says_why(router: Router, prefill: EngineServer) -> None:
    streamed = asyncio.create_task(router.client.post("/generate", json=STREAM))
    begun = await router.room()
    router.decode.publish(piece(begun, 1))
    whole, call = (
        router.ask(),
        router.generation.Generate(generation_pb2.GenerateRequest(input_ids=generation_pb2.TokenIds(ids=IDS))),
    )
    rooms = {begun, await router.room(), await router.room()}
    ending_router = router.begin_to_end()
    await until(lambda: router.requests.are_last)
    router.out_of_patience.set()
    response = await soon(whole)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "SHUTTING_DOWN")
    body = (await soon(streamed)).text
    assert events(body)[-1]["error"]["code"] == "SHUTTING_DOWN"
    assert "[DONE]" not in body
    with pytest.raises(ShuttingDown, match="this router is stopping"):
        await typed(router.connection, call.read())
    await asyncio.wait_for(ending_router, AT_ONCE_S)
    for engine in (prefill, router.decode):
        assert {(await engine.next_abort())[0] for _ in rooms} == rooms


async def test_a_client_that_does_not_read_does_not_hold_it_up_for_ever(router: Router) -> None:
    _, writer = await asyncio.open_connection(LOOPBACK, router.client.base_url.port, limit=1024)
    body = json.dumps(STREAM).encode()
    writer.write(b"POST /generate HTTP/1.1\r\nHost: router\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    room = await router.room()
    for _ in range(300):  # every event of /generate is the whole answer so far: megabytes
        router.decode.publish(*[piece(room, 1)] * 10)
    connection: Any
    (connection,) = router.http._server.server_state.connections
    await until(lambda: connection.flow.write_paused)
    ending_router = router.begin_to_end()
    await until(lambda: router.requests.are_last)
    router.out_of_patience.set()
    await asyncio.wait_for(ending_router, AT_ONCE_S)
    writer.close()


async def test_a_client_that_reads_slowly_gets_all_of_an_answer_that_has_ended(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the process still has to send is a part of the answer."""
    monkeypatch.setattr(draining, "_LAST_WORDS_S", 0.01)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not unsent():
            await send({"type": "http.response.body", "body": b"x" * 30_000, "more_body": True})
        await send({"type": "http.response.body", "body": b"the end"})

    def unsent() -> int:
        connection: Any
        (connection,) = http._server.server_state.connections
        size: int = connection.transport.get_write_buffer_size()
        return size

    requests, control = OpenRequests(), ControlServer([])
    http = HttpServer(HttpDoor(app, requests), LOOPBACK, 0)
    await control.start(LOOPBACK, 0)
    reader, writer = await asyncio.open_connection(LOOPBACK, await http.start(), limit=1024)
    writer.write(b"GET / HTTP/1.1\r\nHost: router\r\n\r\n")
    await soon(reader.readuntil(b"\r\n\r\n"))
    await soon(requests.none())
    assert unsent()
    ending_router = asyncio.create_task(
        drain(requests, Dispatcher(cluster.policy, Tracing()), http, control, for_ever())
    )
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(ending_router), 0.5)
    assert b"the end" in (await soon(reader.read()))[-50:]
    await asyncio.wait_for(ending_router, AT_ONCE_S)
    writer.close()


async def test_who_slips_in_while_the_doors_are_being_closed_is_served(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_LAST_WORDS_S", 0.01)
    stop, slipped_in = router.control.stop, asyncio.Event()
    call = None

    async def slow_stop(grace_s: float) -> None:
        nonlocal call
        if call is None:
            message = generation_pb2.GenerateRequest(input_ids=generation_pb2.TokenIds(ids=IDS))
            call = router.generation.Generate(message)
            slipped_in.set()
            await until(lambda: router.dispatcher.open_rooms == 1)
        await stop(grace_s)

    monkeypatch.setattr(router.control, "stop", slow_stop)
    ending_router = router.begin_to_end()
    await soon(slipped_in.wait())
    room = await router.room()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(ending_router), 0.5)
    router.decode.publish(ending(room))
    assert call is not None
    assert (await soon(call.read())).output.finish_reason
    await asyncio.wait_for(ending_router, AT_ONCE_S)


# --- the process ---


@dataclass(frozen=True)
class Process:
    """A router's own `serve`, running."""

    serving: asyncio.Task[None]
    client: httpx.AsyncClient
    connection: Connection

    def ask(self) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.client.post("/generate", json={"input_ids": IDS}))

    async def signal(self, number: signal.Signals) -> None:
        """Returns when it has been heard."""
        os.kill(os.getpid(), number)
        while (await self.client.get("/health")).status_code != 503:
            pass


@asynccontextmanager
async def process(cluster: Cluster, *flags: str) -> AsyncIterator[Process]:
    """In front of a cluster, ready."""
    http, grpc = free_port(), free_port()
    addresses = [("--prefill", cluster.prefill_servers[0]), ("--decode", cluster.decode_servers[0])]
    workers = [word for flag, engine in addresses for word in (flag, f"dns+localhost:{engine.port}")]
    options = options_of(router_process.main, *workers, "--http-port", str(http), "--grpc-port", str(grpc), *flags)
    serving = asyncio.create_task(router_process.serve(**options))
    (decode,) = cluster.decode_servers
    decode.publish(ending((await decode.next_request()).room))  # the probe
    connection = Connection(f"{LOOPBACK}:{grpc}")
    stub: Any = health_pb2_grpc.HealthStub(connection.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=""))
    while (await soon(watch.read())).status != health_pb2.HealthCheckResponse.SERVING:
        pass
    async with httpx.AsyncClient(base_url=f"http://{LOOPBACK}:{http}", timeout=20.0) as client:
        yield Process(serving, client, connection)
    await connection.close()
    if not serving.done():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.gather(serving, return_exceptions=True)


async def test_after_sigterm_a_process_ends_when_its_last_answer_has(cluster: Cluster) -> None:
    (decode,) = cluster.decode_servers
    async with process(cluster) as router:
        answer = router.ask()
        room = (await decode.next_request()).room
        await router.signal(signal.SIGTERM)
        assert await status_of(router.connection, "") == NOT_SERVING
        assert await status_of(router.connection, LIVENESS) == SERVING
        assert not router.serving.done()
        decode.publish(ending(room))
        assert (await soon(answer)).status_code == 200
        await asyncio.wait_for(router.serving, AT_ONCE_S)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(cluster: Cluster, second: signal.Signals) -> None:
    (decode,) = cluster.decode_servers
    async with process(cluster) as router:
        answer = router.ask()
        await decode.next_request()
        await router.signal(signal.SIGTERM)
        os.kill(os.getpid(), second)
        assert (await soon(answer)).json()["error"]["code"] == "SHUTTING_DOWN"
        await asyncio.wait_for(router.serving, AT_ONCE_S)


async def test_a_process_drains_for_as_long_as_it_is_told(cluster: Cluster) -> None:
    (decode,) = cluster.decode_servers
    async with process(cluster, "--drain-timeout", "0.2") as router:
        answer = router.ask()
        await decode.next_request()
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await soon(answer)).json()["error"]["code"] == "SHUTTING_DOWN"
        await asyncio.wait_for(router.serving, AT_ONCE_S)


async def test_a_process_of_which_a_part_dies_meanwhile_ends_at_once(cluster: Cluster) -> None:
    (decode,) = cluster.decode_servers
    async with process(cluster) as router:
        answer = router.ask()
        await decode.next_request()
        await router.signal(signal.SIGTERM)
        kill_task("prober")
        assert (await soon(answer)).json()["error"]["code"] == "SHUTTING_DOWN"
        with pytest.raises(InternalError, match="prober died"):
            await asyncio.wait_for(router.serving, AT_ONCE_S)


@pytest.mark.parametrize("seconds", ["-1", "inf"])
async def test_a_time_to_drain_ends_some_day(seconds: str) -> None:
    options = options_of(router_process.main, "--decode", "d:1", "--drain-timeout", seconds)
    with pytest.raises(InvalidRequest, match="--drain-timeout must be at least 0 seconds and end some day"):
        await router_process.serve(**options)
