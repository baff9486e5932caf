from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from pd.v1 import (
    abort_pb2,
    abort_pb2_grpc,
    bootstrap_pb2,
    bootstrap_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    page_allocation_pb2,
    page_allocation_pb2_grpc,
    transfer_status_pb2,
    transfer_status_pb2_grpc,
)
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from pd_common.config import SecurityConfig
from pd_common.control import server
from pd_common.control.abort_servicer import AbortServicer
from pd_common.control.connection import Connection, dial_with
from pd_common.control.generation_client import GenerationClient
from pd_common.control.generation_servicer import EngineGenerationServicer
from pd_common.control.http_server import HttpServer
from pd_common.control.outputs import OutputHub
from pd_common.control.security import Security
from pd_common.control.server import ControlServer
from pd_common.control.tls import Tls, open_tls
from pd_common.errors import InternalError, InvalidRequest, PdError, PeerLost, PermissionDenied
from pd_common.types import BootstrapAddress, Role
from services.router.worker import Worker
from tests.control.certificates import Authority, Files, put
from tests.control.fake_rooms import MODEL, FakeModel, FakeRooms
from tests.control.serving import LOOPBACK
from tests.services.pair import until


@pytest.fixture
async def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
async def decode_files(authority: Authority) -> Files:
    return authority.issue("pd-decode", to="decode")


@pytest.fixture
async def router(authority: Authority) -> Tls:
    return authority.issue("pd-router", to="router").tls()


@pytest.fixture
async def address(decode_files: Files, rooms: FakeRooms, hub: OutputHub) -> AsyncIterator[str]:
    """Where a decode process serves with mutual TLS."""
    async with decode_with(decode_files.tls(), rooms, hub) as address:
        yield address


@asynccontextmanager
async def decode_with(tls: Tls, rooms: FakeRooms, hub: OutputHub, port: int = 0) -> AsyncIterator[str]:
    services = [
        server.abort(AbortServicer(rooms)),
        server.generation(EngineGenerationServicer(rooms, hub, FakeModel())),
    ]
    control = ControlServer(services, tls)
    yield f"{LOOPBACK}:{await control.start(LOOPBACK, port)}"
    await control.stop(grace_s=0.0)


@asynccontextmanager
async def dialled(tls: Tls, address: str, role: Role = Role.DECODE) -> AsyncIterator[Connection]:
    connection = dial_with(tls)(address, role)
    try:
        yield connection
    finally:
        await connection.close()


# --- who may connect ---


async def test_both_sides_prove_who_they_are(router: Tls, address: str) -> None:
    async with dialled(router, address) as connection:
        assert await GenerationClient(connection).get_model() == MODEL


async def test_a_server_of_another_role_is_refused(router: Tls, address: str) -> None:
    async with dialled(router, address, Role.PREFILL) as connection:
        with pytest.raises(PeerLost):
            await GenerationClient(connection).get_model()


async def test_a_server_of_another_authority_is_refused(tmp_path: Path, address: str) -> None:
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other").issue("pd-router", to="router").tls()
    async with dialled(stranger, address) as connection:
        with pytest.raises(PeerLost):
            await GenerationClient(connection).get_model()


async def test_a_caller_without_a_certificate_is_refused_unless_none_is_asked_for(
    address: str, decode_files: Files, rooms: FakeRooms, hub: OutputHub
) -> None:
    credentials = grpc.ssl_channel_credentials(decode_files.ca.read_bytes())
    options = [("grpc.ssl_target_name_override", "pd-decode")]

    async def ask(where: str) -> None:
        connection = Connection(where, grpc.aio.secure_channel(where, credentials, options))
        try:
            assert await GenerationClient(connection).get_model() == MODEL
        finally:
            await connection.close()

    with pytest.raises(PeerLost):
        await ask(address)
    async with decode_with(decode_files.tls(verifies_clients=False), rooms, hub) as open_address:
        await ask(open_address)


async def test_without_tls_nobody_gets_through(address: str) -> None:
    connection = Connection(address)
    with pytest.raises(PeerLost):
        await GenerationClient(connection).get_model()
    await connection.close()


# --- what a certificate may call ---

ALLOWED = {
    "Bootstrap/RegisterRank": "prefill",
    "Bootstrap/RenewLease": "prefill",
    "Bootstrap/UnregisterRank": "prefill",
    "Bootstrap/RegisterDpRank": "prefill",
    "Bootstrap/GetTopology": "decode router",
    "Bootstrap/WatchTopology": "decode router",
    "Bootstrap/QueryDpRanks": "decode router",
    "PageAllocation/RegisterReceiver": "decode",
    "PageAllocation/HoldReceiver": "decode",
    "PageAllocation/SendCanary": "decode",
    "PageAllocation/AllocatePages": "decode",
    "TransferStatus/ReportTransfer": "prefill decode",
    "Generation/Submit": "router",
    "Generation/StreamOutputs": "router",
}
"""Everything else is for everybody who has a certificate."""

MODULES: tuple[Any, ...] = (bootstrap_pb2, page_allocation_pb2, transfer_status_pb2, abort_pb2, generation_pb2)
METHODS = [
    f"{service.name}/{method.name}"
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


@pytest.fixture
async def bare_address(authority: Authority) -> AsyncIterator[str]:
    """Where a process serves every method, none of which does anything: whoever is let in gets INTERNAL."""
    services = [
        server.bootstrap(bootstrap_pb2_grpc.BootstrapServicer()),  # type: ignore[abstract]
        server.page_allocation(page_allocation_pb2_grpc.PageAllocationServicer()),  # type: ignore[abstract]
        server.transfer_status(transfer_status_pb2_grpc.TransferStatusServicer()),  # type: ignore[abstract]
        server.abort(abort_pb2_grpc.AbortServicer()),  # type: ignore[abstract]
        server.generation(generation_pb2_grpc.GenerationServicer()),  # type: ignore[abstract]
    ]
    control = ControlServer(services, authority.issue("pd-prefill", to="bare").tls())
    yield f"{LOOPBACK}:{await control.start(LOOPBACK, 0)}"
    await control.stop(grace_s=0.0)


async def refusal(connection: Connection, method: str) -> PdError:
    """What comes of an empty request."""

    async def one() -> AsyncIterator[bytes]:
        yield b""

    call: Any = connection.channel.stream_stream(f"/pd.v1.{method}")  # type: ignore[call-arg]
    with pytest.raises(PdError) as raised, connection.typed_errors():
        await call(one(), timeout=10).read()
    return raised.value


@pytest.mark.parametrize("role", ["prefill", "decode", "router", "somebody"])
async def test_a_certificate_may_call_the_methods_of_its_role_and_no_others(
    authority: Authority, bare_address: str, role: str
) -> None:
    caller = authority.issue(f"pd-{role}", "host.example", to="caller").tls()
    async with dialled(caller, bare_address, Role.PREFILL) as connection:
        for method in METHODS:
            error = await refusal(connection, method)
            expected = InternalError if role in ALLOWED.get(method, role).split() else PermissionDenied
            assert type(error) is expected, (method, error.message)


async def test_a_refusal_names_the_method_and_the_roles(authority: Authority, bare_address: str) -> None:
    caller = authority.issue("pd-decode", to="caller").tls()
    async with dialled(caller, bare_address, Role.PREFILL) as connection:
        error = await refusal(connection, "Bootstrap/RegisterRank")
    assert error.metadata == {"method": "/pd.v1.Bootstrap/RegisterRank", "allowed": "pd-prefill"}
    assert "pd-decode" in error.message


async def test_only_a_dns_name_speaks_for_a_role(authority: Authority, bare_address: str) -> None:
    caller = authority.issue("not-pd-decode", "pd-decode.example", to="caller", uri="pd-decode").tls()
    async with dialled(caller, bare_address, Role.PREFILL) as connection:
        assert type(await refusal(connection, "PageAllocation/AllocatePages")) is PermissionDenied


async def test_without_client_certificates_there_are_no_roles(authority: Authority) -> None:
    services = [server.generation(generation_pb2_grpc.GenerationServicer())]  # type: ignore[abstract]
    control = ControlServer(services, authority.issue("pd-prefill", to="open").tls(verifies_clients=False))
    address = f"{LOOPBACK}:{await control.start(LOOPBACK, 0)}"
    async with dialled(authority.issue("pd-prefill", to="caller").tls(), address, Role.PREFILL) as connection:
        assert type(await refusal(connection, "Generation/Submit")) is InternalError
    await control.stop(grace_s=0.0)


# --- rotation ---


async def test_a_new_certificate_meets_new_connections_and_breaks_no_old_one(
    authority: Authority, router: Tls, address: str
) -> None:
    async with dialled(router, address) as old:
        await GenerationClient(old).get_model()
        authority.issue("pd-prefill", to="decode")
        async with dialled(router, address) as new, dialled(router, address, Role.PREFILL) as of_the_day:
            with pytest.raises(PeerLost):
                await GenerationClient(new).get_model()
            assert await GenerationClient(of_the_day).get_model() == MODEL
        assert await GenerationClient(old).get_model() == MODEL


async def test_a_new_authority_is_believed_and_the_old_one_no_longer(
    tmp_path: Path, router: Tls, decode_files: Files, address: str
) -> None:
    (tmp_path / "new").mkdir()
    new = Authority(tmp_path / "new")
    files = new.issue("pd-decode", to="decode")
    for kind in ("cert", "key", "ca"):
        put(getattr(decode_files, kind), getattr(files, kind).read_bytes())
    async with dialled(new.issue("pd-router", to="router").tls(), address) as connection:
        assert await GenerationClient(connection).get_model() == MODEL
    async with dialled(router, address) as connection:
        with pytest.raises(PeerLost):
            await GenerationClient(connection).get_model()


async def test_a_caller_dials_with_the_files_of_the_day(authority: Authority, bare_address: str) -> None:
    files = authority.issue("pd-router", to="caller")
    dial = dial_with(files.tls())
    for name, expected in (("pd-router", PermissionDenied), ("pd-decode", InternalError)):
        authority.issue(name, to="caller")
        connection = dial(bare_address, Role.PREFILL)
        assert type(await refusal(connection, "PageAllocation/SendCanary")) is expected
        await connection.close()


async def test_files_that_do_not_fit_together_leave_the_earlier_ones_in_use(
    authority: Authority, router: Tls, decode_files: Files, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As while a rotation is half done."""
    key = decode_files.key.read_bytes()
    for content in (b"", b"no key", authority.issue("pd-decode", to="other").key.read_bytes()):
        put(decode_files.key, content)
        async with dialled(router, address) as connection:
            assert await GenerationClient(connection).get_model() == MODEL
        assert str(decode_files.key) in caplog.records[-1].getMessage()
        assert caplog.records[-1].levelno == logging.ERROR
    decode_files.key.unlink()
    async with dialled(router, address) as connection:
        assert await GenerationClient(connection).get_model() == MODEL
    put(decode_files.key, key)
    async with dialled(router, address) as connection:
        assert await GenerationClient(connection).get_model() == MODEL


async def test_a_router_finds_its_worker_again_after_everybodys_certificates_have_changed(
    tmp_path: Path, authority: Authority, rooms: FakeRooms, hub: OutputHub
) -> None:
    """The worker restarts, and believes only a new authority, as the router does by then."""
    own = authority.issue("pd-router", to="router")
    changed = asyncio.Event()
    async with decode_with(authority.issue("pd-decode", to="decode").tls(), rooms, hub) as address:
        port = int(address.rpartition(":")[2])
        worker = Worker(Role.DECODE, BootstrapAddress(LOOPBACK, port), changed, dial_with(own.tls()))
        running = asyncio.create_task(worker.run())
        await until(lambda: worker.is_live)
    await until(lambda: not worker.is_live)
    (tmp_path / "new").mkdir()
    new = Authority(tmp_path / "new")
    fresh = new.issue("pd-router", to="router")
    for kind in ("cert", "key", "ca"):
        put(getattr(own, kind), getattr(fresh, kind).read_bytes())
    async with decode_with(new.issue("pd-decode", to="decode").tls(), rooms, hub, port):
        await until(lambda: worker.is_live)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await worker.stop()


# --- HTTP ---


@pytest.fixture
async def http_address(decode_files: Files) -> AsyncIterator[str]:
    async def answer(_: object) -> PlainTextResponse:
        return PlainTextResponse("done")

    http = HttpServer(Starlette(routes=[Route("/", answer)]), LOOPBACK, 0, tls=decode_files.tls())
    yield f"https://{LOOPBACK}:{await http.start()}/"
    await http.stop()


def browser(files: Files, name: str, *, with_certificate: bool = True) -> httpx.AsyncClient:
    """Believes only the authority in these files, and only a server of this name."""
    context = ssl.create_default_context(cafile=files.ca)
    if with_certificate:
        context.load_cert_chain(files.cert, files.key)
    transport = httpx.AsyncHTTPTransport(verify=context)
    return httpx.AsyncClient(transport=transport, headers={"host": name})


async def get(client: httpx.AsyncClient, url: str, name: str) -> str:
    return (await client.get(url, extensions={"sni_hostname": name})).text


async def test_http_asks_for_a_certificate_and_serves_the_one_of_the_day(
    authority: Authority, http_address: str
) -> None:
    files = authority.issue("person", to="person")
    async with browser(files, "pd-decode") as old:
        assert await get(old, http_address, "pd-decode") == "done"
        authority.issue("other-name", to="decode")
        async with browser(files, "other-name") as new:
            assert await get(new, http_address, "other-name") == "done"
            assert await get(old, http_address, "pd-decode") == "done"  # on its connection
        async with browser(files, "pd-decode") as late:
            with pytest.raises(httpx.ConnectError):
                await get(late, http_address, "pd-decode")
    async with browser(files, "other-name", with_certificate=False) as nobody:
        with pytest.raises(httpx.TransportError):
            await get(nobody, http_address, "other-name")


async def test_http_believes_a_new_authority_and_the_old_one_no_longer(
    tmp_path: Path, authority: Authority, decode_files: Files, http_address: str
) -> None:
    (tmp_path / "new").mkdir()
    new = Authority(tmp_path / "new")
    files = new.issue("pd-decode", to="decode")
    for kind in ("cert", "key", "ca"):
        put(getattr(decode_files, kind), getattr(files, kind).read_bytes())
    async with browser(new.issue("person", to="person"), "pd-decode") as client:
        assert await get(client, http_address, "pd-decode") == "done"
    old = replace(authority.issue("person", to="person"), ca=files.ca)
    async with browser(old, "pd-decode") as client:
        with pytest.raises(httpx.TransportError):
            await get(client, http_address, "pd-decode")


def handshake(url: str, context: ssl.SSLContext, earlier: ssl.SSLSession | None) -> ssl.SSLSession | None:
    """One request; gives what the client might resume."""
    host, _, port = url.removeprefix("https://").rstrip("/").rpartition(":")
    bare = socket.create_connection((host, int(port)), timeout=5)
    with context.wrap_socket(bare, server_hostname="pd-decode", session=earlier) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: pd-decode\r\nConnection: close\r\n\r\n")
        assert connection.recv(4096)
        assert not connection.session_reused
        return connection.session


async def test_http_resumes_no_session_for_that_would_outlive_its_certificate(
    authority: Authority, http_address: str
) -> None:
    files = authority.issue("person", to="person")
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.cert, files.key)
    session = await asyncio.to_thread(handshake, http_address, context, None)
    await asyncio.to_thread(handshake, http_address, context, session)
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # it resumes by other means
    with pytest.raises(ssl.SSLError):
        await asyncio.to_thread(handshake, http_address, context, None)


# --- settings ---


def settings(
    files: Files | None = None, *, without: str | None = None, ticket_key_file: Path | None = None
) -> SecurityConfig:
    paths = {f"tls_{kind}": getattr(files, kind) if files else None for kind in ("cert", "key", "ca")}
    if without is not None:
        paths[without] = None
    return SecurityConfig(**paths, tls_verify_clients=True, ticket_key_file=ticket_key_file)


@pytest.mark.parametrize("missing", ["tls_cert", "tls_key", "tls_ca"])
def test_a_part_of_the_files_is_refused(decode_files: Files, missing: str) -> None:
    with pytest.raises(InvalidRequest, match=missing.replace("_", "-")) as raised:
        open_tls(settings(decode_files, without=missing))
    assert raised.value.metadata == {"field": missing}


def test_without_files_there_is_no_tls() -> None:
    assert open_tls(settings()) is None


@pytest.mark.parametrize("kind", ["cert", "key", "ca"])
@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN CERTIFICATE-----\n"], ids=["missing", "empty", "half"])
def test_files_that_cannot_be_used_are_refused_at_the_start(
    decode_files: Files, kind: str, content: bytes | None
) -> None:
    path: Path = getattr(decode_files, kind)
    path.unlink() if content is None else put(path, content)
    with pytest.raises(InvalidRequest, match=re.escape(str(path))):
        open_tls(settings(decode_files))


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_password(decode_files: Files) -> None:
    key: Any = serialization.load_pem_private_key(decode_files.key.read_bytes(), None)
    secret = serialization.BestAvailableEncryption(b"secret")
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)
    put(decode_files.key, pem)
    with pytest.raises(InvalidRequest):
        open_tls(settings(decode_files))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "prefill.example"])  # noqa: S104
def test_what_is_open_to_others_is_said_loudly(
    decode_files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k" * 32)
    Security.open(settings(), host)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert all(word in record.getMessage() for word in (host, "--tls-cert", "--ticket-key-file"))
    caplog.clear()
    Security.open(settings(decode_files), host)
    assert "--ticket-key-file" in caplog.text
    assert "--tls-cert" not in caplog.text
    caplog.clear()
    Security.open(settings(ticket_key_file=keys), host)
    assert "--ticket-key-file" not in caplog.text
    assert "--tls-cert" in caplog.text
    caplog.clear()
    closed = settings(decode_files, ticket_key_file=keys)
    Security.open(closed, host)
    assert not caplog.records
    Security.open(replace(closed, tls_verify_clients=False), host)
    assert "--tls-verify-clients" in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "127.1.2.3", "localhost"])
def test_on_this_machine_alone_nothing_is_said(caplog: pytest.LogCaptureFixture, host: str) -> None:
    Security.open(settings(), host)
    assert not caplog.records
