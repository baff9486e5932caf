from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from pd_common.control import server
from pd_common.control.connection import Connection
from pd_common.control.generation_client import GenerationClient
from pd_common.control.status import CODE_OF_REASON, DOMAIN, from_rpc_error, from_status, to_status
from pd_common.errors import (
    ERROR_OF_REASON,
    CapacityExceeded,
    InternalError,
    LayoutMismatch,
    PdError,
    PeerLost,
    Reason,
    RoomInUse,
)
from tests.control.servicer_scripts import FailingServicer
from tests.control.serving import LOOPBACK, serving


def failing(failure: Exception) -> server.Service:
    """Generation with two of its methods."""
    return server.generation(FailingServicer(failure))  # type: ignore[abstract]


async def unary(client: GenerationClient) -> None:
    await client.get_model()


async def stream(client: GenerationClient) -> None:
    received = [outputs async for outputs in client.stream_outputs("s")]
    raise AssertionError(f"the stream ended well after {received}")


CALLS = [pytest.param(unary, id="unary"), pytest.param(stream, id="stream")]


def test_every_reason_has_a_code_and_a_class() -> None:
    assert set(CODE_OF_REASON) == set(Reason)
    assert set(ERROR_OF_REASON) == set(Reason)
    assert grpc.StatusCode.OK not in CODE_OF_REASON.values()


@pytest.mark.parametrize("cls", ERROR_OF_REASON.values(), ids=lambda cls: cls.__name__)
def test_an_error_survives_the_wire(cls: type[PdError]) -> None:
    sent = cls("what a person reads: ä", field="page_size", mine=16, theirs=64)
    status = status_pb2.Status.FromString(to_status(sent).SerializeToString())
    got = from_status(status)
    assert type(got) is cls
    assert (got.message, got.metadata) == (sent.message, {"field": "page_size", "mine": "16", "theirs": "64"})
    assert status.code == CODE_OF_REASON[cls.reason].value[0]


def status_with(reason: str, domain: str, **metadata: str) -> status_pb2.Status:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata=metadata))
    return status_pb2.Status(code=13, message="boom", details=[detail])


@pytest.mark.parametrize(
    "status",
    [
        pytest.param(status_with("INVENTED_LATER", DOMAIN), id="unknown reason"),
        pytest.param(status_with("ROOM_IN_USE", "example.com"), id="foreign domain"),
        pytest.param(status_pb2.Status(code=13, message="boom"), id="no details"),
    ],
)
def test_what_cannot_be_understood_is_an_internal_error_with_its_message(status: status_pb2.Status) -> None:
    error = from_status(status)
    assert type(error) is InternalError
    assert error.message == "boom"


def retry_delays(status: status_pb2.Status) -> list[float]:
    found = []
    for detail in status.details:
        info = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            found.append(info.retry_delay.ToNanoseconds() / 1e9)
    return found


def test_who_is_refused_for_want_of_capacity_is_told_when_to_come_again() -> None:
    sent = CapacityExceeded("8 requests wait", limit=8, retry_after_s=7)
    status = to_status(sent)
    assert retry_delays(status) == [7.0]
    status.details.reverse()  # the order of details is nobody's promise
    got = from_status(status)
    assert type(got) is CapacityExceeded
    assert got.metadata == {"limit": "8", "retry_after_s": "7"}


@pytest.mark.parametrize("said", ["", "soon", "-1", "1.5", "nan", "9" * 300])
def test_what_is_no_time_to_wait_is_not_passed_on_as_one(said: str) -> None:
    """I11: what a worker says passes through the router."""
    assert retry_delays(to_status(CapacityExceeded("full", retry_after_s=said))) == []


def test_only_want_of_capacity_passes_by_itself() -> None:
    assert retry_delays(to_status(CapacityExceeded("full"))) == []
    assert retry_delays(to_status(RoomInUse("room 5 is in use", retry_after_s=7))) == []
    assert retry_delays(to_status(CapacityExceeded("full", retry_after_s=0))) == [1.0]


def test_no_more_is_kept_of_what_a_peer_says_than_would_be_sent() -> None:
    """I11: a reason to fail stays on record with its room."""
    facts = {f"{number}" + "k" * 300: "v" * 50_000 for number in range(1000)}
    status = status_with("PEER_LOST", DOMAIN, **facts)
    status.message = "m" * 50_000
    error = from_status(status)
    assert len(error.message) == 1000
    assert len(str(error.metadata)) < 5000


def test_a_foreign_detail_does_not_hide_our_own() -> None:
    status = status_with("ROOM_IN_USE", "example.com")
    status.details.extend(to_status(RoomInUse("room 5 is in use", room=5)).details)
    assert type(from_status(status)) is RoomInUse


@pytest.mark.parametrize("key", ["message", "self"])
def test_no_metadata_key_of_a_peer_breaks_the_error(key: str) -> None:
    """I11: names of metadata come from the network, they are not names of our parameters."""
    error = from_status(status_with("PEER_LOST", DOMAIN, **{key: "value"}))
    assert type(error) is PeerLost


@pytest.mark.parametrize("call", CALLS)
async def test_a_typed_error_arrives_as_the_same_type(call: Callable[[GenerationClient], Any]) -> None:
    failure = LayoutMismatch("page_size is 16 here", field="page_size", mine=16, theirs=64)
    async with serving(failing(failure)) as connection:
        with pytest.raises(LayoutMismatch, match="page_size is 16 here") as raised:
            await call(GenerationClient(connection))
    assert raised.value.metadata == {"field": "page_size", "mine": "16", "theirs": "64"}


@pytest.mark.parametrize("letter", ["x", "ä", "\N{GRINNING FACE}"])
@pytest.mark.parametrize("call", CALLS)
async def test_an_error_arrives_however_much_it_has_to_say(
    call: Callable[[GenerationClient], Any], letter: str
) -> None:
    """It may repeat what a caller has sent; gRPC replaces an error whose trailers are too long by one of its own."""
    async with serving(failing(RoomInUse(letter * 50_000, field=letter * 50_000))) as connection:
        with pytest.raises(RoomInUse, match=letter * 100) as raised:
            await call(GenerationClient(connection))
        assert raised.value.__cause__ is not None
        assert raised.value.__cause__.code() is grpc.StatusCode.ALREADY_EXISTS  # type: ignore[attr-defined]


@pytest.mark.parametrize("call", CALLS)
async def test_a_defect_is_answered_without_its_text_and_logged_with_its_traceback(
    call: Callable[[GenerationClient], Any], caplog: pytest.LogCaptureFixture
) -> None:
    secret = "the prompt was: my password"  # noqa: S105
    async with serving(failing(KeyError(secret))) as connection:
        with pytest.raises(InternalError) as raised:
            await call(GenerationClient(connection))
    assert "KeyError" in raised.value.message
    assert "password" not in str(raised.value) + str(raised.value.metadata)
    logged = [record for record in caplog.records if record.name.startswith("pd_common") and record.exc_info]
    assert [record.levelno for record in logged] == [logging.ERROR]
    assert [type(record.exc_info[1]) for record in logged if record.exc_info] == [KeyError]


@pytest.mark.parametrize("call", CALLS)
async def test_an_address_where_nobody_listens_is_a_lost_peer(call: Callable[[GenerationClient], Any]) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        address = f"{LOOPBACK}:{taken.getsockname()[1]}"
    connection = Connection(address)
    with pytest.raises(PeerLost, match=address) as raised:
        await call(GenerationClient(connection))
    assert raised.value.metadata == {"peer": address}
    await connection.close()


@pytest.mark.parametrize("call", CALLS)
async def test_a_call_on_a_closed_connection_is_a_lost_peer(call: Callable[[GenerationClient], Any]) -> None:
    connection = Connection(f"{LOOPBACK}:1")
    await connection.close()
    with pytest.raises(PeerLost, match="closed"):
        await call(GenerationClient(connection))


class _Silent(FailingServicer):
    """Notes that it was called, and never answers."""

    def __init__(self) -> None:
        super().__init__(InternalError("unused"))
        self.called = asyncio.Event()

    async def GetModel(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802  generated name
        self.called.set()
        await asyncio.Event().wait()


async def test_a_connection_that_is_closed_under_a_call_is_a_lost_peer_and_no_cancellation() -> None:
    silent = _Silent()  # type: ignore[abstract]
    async with serving(server.generation(silent)) as connection:
        call = asyncio.create_task(GenerationClient(connection).get_model())
        await asyncio.wait_for(silent.called.wait(), 5)
        await connection.close()
        with pytest.raises(PeerLost, match="closed"):
            await call


async def test_a_caller_that_is_cancelled_stays_cancelled() -> None:
    silent = _Silent()  # type: ignore[abstract]
    async with serving(server.generation(silent)) as connection:
        call = asyncio.create_task(GenerationClient(connection).get_model())
        await asyncio.wait_for(silent.called.wait(), 5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


def test_details_that_cannot_be_read_leave_the_status_code_to_speak() -> None:
    """I11: also an error may come from anybody."""
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    malformed = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailing, "no route", "")
    error = from_rpc_error(malformed, "h:1")
    assert type(error) is PeerLost
    assert error.message == "h:1: no route"


async def test_a_method_that_does_not_exist_is_an_error_too() -> None:
    async with serving() as connection:
        with pytest.raises(InternalError, match="is it a process of another role"):
            await GenerationClient(connection).get_model()
