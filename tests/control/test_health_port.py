from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from pd_common.control import health_port, ports, server
from pd_common.control.abort_servicer import AbortServicer
from pd_common.control.connection import Connection
from pd_common.control.server import LIVENESS, ControlServer
from pd_common.control.tls import Tls
from pd_common.errors import InvalidRequest
from services.decode import __main__ as decode
from services.prefill import __main__ as prefill
from services.router import __main__ as router
from tests.control.certificates import Authority
from tests.control.fake_rooms import FakeRooms
from tests.control.serving import LOOPBACK
from tests.control.test_supervisor import NOT_SERVING, SERVING, status_of
from tests.services.test_supervision import free_port, interpreter, options_of, running  # noqa: F401  a fixture is one
from tests.tiny_models import tiny_model

CHECK = "/grpc.health.v1.Health/Check"


@pytest.fixture
async def tls(tmp_path: Path) -> Tls:
    return Authority(tmp_path).issue("pd-decode", to="decode").tls()


@pytest.fixture
async def control(tls: Tls, rooms: FakeRooms) -> ControlServer:
    """Its own port asks for certificates."""
    return ControlServer([server.abort(AbortServicer(rooms))], tls)


@asynccontextmanager
async def plain(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Connection]:
    """To the health port that the log names, without a certificate."""
    (said,) = [record.getMessage() for record in caplog.records if record.name == health_port.__name__]
    connection = Connection(said.removeprefix("health on ").removesuffix(", without TLS"))
    try:
        yield connection
    finally:
        await connection.close()


@pytest.fixture
async def probe(control: ControlServer, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Connection]:
    caplog.set_level(logging.INFO)
    async with control.listening(LOOPBACK, 0, 0), plain(caplog) as connection:
        yield connection


async def answer_to(connection: Connection, method: str, request: bytes = b"") -> grpc.StatusCode:
    """As bytes: what is not served has no stub."""
    channel: Any = connection.channel
    code: grpc.StatusCode = await channel.unary_unary(method)(request, timeout=5).code()
    return code


async def test_a_probe_without_a_certificate_is_told_of_readiness_and_of_life(
    control: ControlServer, probe: Connection
) -> None:
    async def told() -> list[int]:
        return [await status_of(probe, name) for name in ("", "pd.v1.Abort", LIVENESS)]

    assert await told() == [NOT_SERVING, NOT_SERVING, SERVING]
    await control.set_serving(True)
    assert await told() == [SERVING, SERVING, SERVING]
    await control.withdraw()
    assert await told() == [NOT_SERVING, NOT_SERVING, SERVING]
    await control.fail()
    assert await told() == [NOT_SERVING, NOT_SERVING, NOT_SERVING]


@pytest.mark.parametrize(
    "method",
    [
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/pd.v1.Abort/AbortRoom",
    ],
)
async def test_nothing_but_check_is_served(probe: Connection, method: str) -> None:
    assert await answer_to(probe, method) is grpc.StatusCode.UNIMPLEMENTED
    assert await answer_to(probe, CHECK) is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("request_bytes", "code"),
    [
        (b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        (bytes(2000), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (health_pb2.HealthCheckRequest(service="nobody").SerializeToString(), grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_what_makes_no_sense_is_refused_and_not_logged(
    probe: Connection, caplog: pytest.LogCaptureFixture, request_bytes: bytes, code: grpc.StatusCode
) -> None:
    assert await answer_to(probe, CHECK, request_bytes) is code
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_it_answers_while_the_server_has_stopped_and_until_the_end(
    control: ControlServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with control.listening(LOOPBACK, 0, 0):
        await control.stop(grace_s=0.0)
        async with plain(caplog) as connection:
            assert await status_of(connection, LIVENESS) == SERVING
    async with plain(caplog) as connection:
        assert await answer_to(connection, CHECK) is grpc.StatusCode.UNAVAILABLE


async def test_without_the_option_there_is_none(control: ControlServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with control.listening(LOOPBACK, 0):
        assert health_port.__name__ not in {record.name for record in caplog.records}


async def test_a_taken_port_is_an_error_that_names_the_option_and_leaves_nothing_behind(control: ControlServer) -> None:
    own = free_port()
    with socket.create_server((LOOPBACK, 0)) as busy:
        taken: int = busy.getsockname()[1]
        with pytest.raises(InvalidRequest, match=rf"{LOOPBACK}:{taken} \(--health-port\)") as raised:
            await control.listening(LOOPBACK, own, taken).__aenter__()
    assert raised.value.metadata == {"field": "health_port"}
    ports.require_free(LOOPBACK, port=own)


@pytest.mark.parametrize("module", [router, prefill, decode])
async def test_every_process_answers_there(module: Any) -> None:
    port, probes_port = free_port(), free_port()
    flags = ["--health-port", str(probes_port), "--grpc-port" if module is router else "--port", str(port)]
    if module is router:
        work = router.serve(
            **options_of(router.main, *flags, "--decode", f"{LOOPBACK}:{free_port()}", "--http-port", "0")
        )
    else:
        sizes = ["--page-size", "16", "--kv-cache-tokens", "512", "--threads", "1"]
        work = module.serve(options_of(module.main, *flags, "--model", str(tiny_model()), *sizes))
    async with running(work, port):
        connection = Connection(f"{LOOPBACK}:{probes_port}")
        await connection.channel.channel_ready()
        assert await status_of(connection, LIVENESS) == SERVING
        await connection.close()


@pytest.mark.parametrize("option", ["port", "metrics_port", "health_port"])
@pytest.mark.parametrize("module", [prefill, decode])
async def test_a_taken_port_is_noticed_before_the_model_is_looked_at(module: Any, option: str) -> None:
    with socket.create_server((LOOPBACK, 0)) as busy:
        flag, taken = f"--{option.replace('_', '-')}", str(busy.getsockname()[1])
        options = module.main.make_context("test", ["--model", "/nowhere", flag, taken]).params
        with pytest.raises(InvalidRequest, match=flag) as raised:
            await module.serve(options)
    assert raised.value.metadata == {"field": option}


def test_ports_that_are_free_or_not_wanted_are_no_error() -> None:
    with socket.create_server((LOOPBACK, 0)) as was_busy:
        port: int = was_busy.getsockname()[1]
        with socket.create_connection((LOOPBACK, port)):
            was_busy.accept()[0].close()  # this side closes first: the port waits for late packets for a minute
    ports.require_free(LOOPBACK, port=port, health_port=0, metrics_port=None)
