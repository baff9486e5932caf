from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pd_common.control import server
from pd_common.control.abort_servicer import AbortServicer
from pd_common.control.connection import Connection
from pd_common.control.generation_client import GenerationClient
from pd_common.control.server import ControlServer
from pd_common.errors import InvalidRequest, PeerLost
from pd_common.types import BootstrapAddress
from tests.control.fake_rooms import FakeRooms
from tests.control.servicer_scripts import EndlessServicer
from tests.control.serving import LOOPBACK

BUF = Path(sys.executable).parent / "buf"
NAMES = ("", "pd.v1.Abort", "pd.v1.Generation")

HealthResponse = health_pb2.HealthCheckResponse


@pytest.fixture
async def endless() -> EndlessServicer:
    return EndlessServicer()  # type: ignore[abstract]  # its other methods are not called


@pytest.fixture
async def control(endless: EndlessServicer, rooms: FakeRooms) -> AsyncIterator[ControlServer]:
    control = ControlServer([server.abort(AbortServicer(rooms)), server.generation(endless)])
    yield control
    await control.stop(grace_s=0.0)


@pytest.fixture
async def address(control: ControlServer) -> str:
    return f"{LOOPBACK}:{await control.start(LOOPBACK, 0)}"


@pytest.fixture
async def connection(address: str) -> AsyncIterator[Connection]:
    connection = Connection(address)
    yield connection
    await connection.close()


async def health(connection: Connection, name: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(connection.channel)
    status: int = (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)).status
    return status


@pytest.mark.parametrize("name", NAMES)
async def test_a_service_is_healthy_only_when_it_is_said(
    control: ControlServer, connection: Connection, name: str
) -> None:
    assert await health(connection, name) == HealthResponse.NOT_SERVING
    await control.set_serving(True)
    assert await health(connection, name) == HealthResponse.SERVING
    await control.set_serving(False)
    assert await health(connection, name) == HealthResponse.NOT_SERVING


async def test_the_health_of_a_service_that_is_not_there_is_unknown(connection: Connection) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await health(connection, "pd.v1.Bootstrap")
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_one_who_watches_the_health_sees_each_change(control: ControlServer, connection: Connection) -> None:
    stub: Any = health_pb2_grpc.HealthStub(connection.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=""))
    assert (await watch.read()).status == HealthResponse.NOT_SERVING
    await control.set_serving(True)
    assert (await watch.read()).status == HealthResponse.SERVING
    watch.cancel()


async def buf_curl(address: str, home: Path, *args: str) -> str:
    """What a client that knows nothing of this project gets."""
    process = await asyncio.create_subprocess_exec(
        BUF,
        "curl",
        "--protocol",
        "grpc",
        "--http2-prior-knowledge",
        *args,
        env={"PATH": os.defpath, "HOME": str(home), "XDG_CACHE_HOME": str(home)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.skipif(not BUF.exists(), reason="buf is not installed beside this interpreter")
async def test_a_client_that_knows_only_reflection_finds_and_calls_everything(address: str, tmp_path: Path) -> None:
    listed = await buf_curl(address, tmp_path, f"http://{address}", "--list-services")
    assert set(listed.split()) == {
        *NAMES[1:],
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    answer = await buf_curl(address, tmp_path, "-d", "{}", f"http://{address}/pd.v1.Generation/GetModel")
    assert '"name":"tiny"' in answer.replace(" ", "")


async def test_a_busy_port_is_an_error_and_is_not_shared(address: str, connection: Connection) -> None:
    host, _, port = address.rpartition(":")
    second = ControlServer([])
    with pytest.raises(InvalidRequest, match=re.escape(address)) as raised:
        await second.start(host, int(port))
    assert raised.value.metadata == {"field": "port"}
    await second.stop(grace_s=0.0)
    assert (await GenerationClient(connection).get_model()).name == "tiny"


async def test_a_host_of_another_machine_is_an_error() -> None:
    elsewhere = ControlServer([])
    with pytest.raises(InvalidRequest, match=r"192\.0\.2\.1"):
        await elsewhere.start("192.0.2.1", 0)
    await elsewhere.stop(grace_s=0.0)


@pytest.mark.skipif(not socket.has_ipv6, reason="this host has no IPv6")
async def test_an_ipv6_host_is_written_without_brackets(endless: EndlessServicer) -> None:
    control = ControlServer([server.generation(endless)])
    try:
        port = await control.start("::1", 0)
    except InvalidRequest:
        pytest.skip("this host has no ::1")
    connection = Connection(BootstrapAddress("::1", port).target)
    assert (await GenerationClient(connection).get_model()).name == "tiny"
    await connection.close()
    await control.stop(grace_s=0.0)


async def test_stopping_ends_streams_that_do_not_end_by_themselves(
    control: ControlServer, connection: Connection, endless: EndlessServicer
) -> None:
    outputs = GenerationClient(connection).stream_outputs("s")
    assert await anext(outputs) == ()
    stopping = asyncio.create_task(control.stop(grace_s=0.05))
    with pytest.raises(PeerLost):
        await asyncio.wait_for(anext(outputs), 10)
    await asyncio.wait_for(stopping, 10)
    await asyncio.wait_for(endless.ended.wait(), 10)


async def test_stopping_lets_a_call_end_within_the_grace_and_takes_no_new_one(
    control: ControlServer, connection: Connection, endless: EndlessServicer
) -> None:
    client = GenerationClient(connection)
    endless.may_answer.clear()
    running = asyncio.create_task(client.get_model())
    await endless.asked.wait()
    stopping = asyncio.create_task(control.stop(grace_s=60.0))
    await asyncio.sleep(0)
    endless.may_answer.set()
    assert (await running).name == "tiny"
    await asyncio.wait_for(stopping, 10)
    with pytest.raises(PeerLost):
        await client.get_model()
