from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from google.protobuf.descriptor import Descriptor
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.context import Context
from pd.v1 import (
    abort_pb2,
    bootstrap_pb2,
    generation_pb2,
    generation_pb2_grpc,
    page_allocation_pb2,
    page_allocation_pb2_grpc,
    transfer_status_pb2,
    transfer_status_pb2_grpc,
    types_pb2,
)

from pd_common.cli.ticket import ticket as ticket_command
from pd_common.control import server
from pd_common.control.abort_servicer import AbortServicer
from pd_common.control.connection import Connection, dial_plain
from pd_common.control.generation_client import GenerationClient
from pd_common.control.generation_servicer import EngineGenerationServicer
from pd_common.control.outputs import OutputHub
from pd_common.control.server import ControlServer
from pd_common.control.status_servicer import TransferStatusServicer
from pd_common.control.tickets import TicketKeys, check, sign
from pd_common.errors import InvalidRequest, PdError, PermissionDenied
from pd_common.generation import ClientRequest, SamplingParams
from pd_common.telemetry.tracing import Tracing
from pd_common.types import BootstrapAddress, BootstrapRoom, Role
from services.router.dispatch import Dispatcher
from services.router.policy import LeastLoaded
from services.router.route import Route
from services.router.worker import Worker
from tests.control.certificates import put
from tests.control.fake_rooms import FakeModel, FakeRooms
from tests.control.serving import LOOPBACK, make_request, typed

KEY, OTHER = b"k" * 32, b"o" * 32
ROOM = BootstrapRoom(5)
END = 1000
GOOD = sign(KEY, ROOM, END)

rooms64 = st.integers(1, 2**64 - 1).map(BootstrapRoom)
seconds = st.integers(0, 2**64 - 1)


# --- pure ---


@given(room=rooms64, end=seconds.filter(bool))
def test_a_ticket_is_good_for_its_room_until_its_last_second(room: BootstrapRoom, end: int) -> None:
    ticket = sign(KEY, room, end)
    check([KEY], ticket, room, end - 1, may_be_over=False)
    with pytest.raises(PermissionDenied, match="over"):
        check([KEY], ticket, room, end, may_be_over=False)
    check([KEY], ticket, room, end, may_be_over=True)


@given(mine=rooms64, other=rooms64, may_be_over=st.booleans())
def test_a_ticket_is_good_for_no_other_room(mine: BootstrapRoom, other: BootstrapRoom, may_be_over: bool) -> None:
    ticket = sign(KEY, mine, END)
    if mine != other:
        with pytest.raises(PermissionDenied, match=f"room {other} .* room {mine}"):
            check([KEY], ticket, other, 0, may_be_over=may_be_over)


@given(place=st.integers(0, 8 * len(GOOD) - 1), may_be_over=st.booleans())
def test_no_bit_of_a_ticket_can_be_changed(place: int, may_be_over: bool) -> None:
    forged = bytearray(GOOD)
    forged[place // 8] ^= 1 << place % 8
    with pytest.raises(PermissionDenied, match="forged"):
        check([KEY], bytes(forged), ROOM, 0, may_be_over=may_be_over)


@given(ticket=st.one_of(st.binary(min_size=1), st.just(GOOD[:-1]), st.just(GOOD + b"\0"), st.just(GOOD * 2)))
def test_no_other_bytes_are_a_ticket(ticket: bytes) -> None:
    with pytest.raises(PermissionDenied, match="forged"):
        check([KEY], ticket, ROOM, 0, may_be_over=True)


def test_a_missing_ticket_is_called_missing() -> None:
    with pytest.raises(PermissionDenied, match="needs a ticket") as raised:
        check([KEY], b"", ROOM, 0, may_be_over=True)
    assert raised.value.metadata == {"field": "ticket", "room": "5"}


def test_any_of_the_keys_may_have_signed() -> None:
    check([OTHER, KEY], GOOD, ROOM, 0, may_be_over=False)
    with pytest.raises(PermissionDenied, match="another key"):
        check([OTHER], GOOD, ROOM, 0, may_be_over=False)


@pytest.mark.parametrize("body", [b"", GOOD[:17] + b"\0", b"\2" + GOOD[1:17]], ids=["none", "long", "version"])
def test_what_the_key_has_signed_for_another_purpose_is_no_ticket(body: bytes) -> None:
    for signed in (body, b"pd.v1 room ticket\0" + body):
        with pytest.raises(PermissionDenied):
            check([KEY], body + hmac.digest(KEY, signed, "sha256"), ROOM, 0, may_be_over=False)
    with pytest.raises(PermissionDenied):
        check([KEY], GOOD[:17] + hmac.digest(KEY, GOOD[:17], "sha256"), ROOM, 0, may_be_over=False)


# --- the file of keys ---


@pytest.fixture
async def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_bytes(KEY + b"\n\n" + OTHER + b"\r\n")
    return path


@pytest.fixture
async def keys(key_file: Path) -> TicketKeys:
    return TicketKeys.read(key_file)


def test_the_first_key_signs_and_every_key_verifies(keys: TicketKeys) -> None:
    assert keys.sign(ROOM, 1000.9) == sign(KEY, ROOM, 1000)
    keys.check(sign(OTHER, ROOM, END), ROOM, 0, may_be_over=False)


def test_keys_are_changed_without_a_restart(key_file: Path, keys: TicketKeys) -> None:
    new = b"n" * 40
    put(key_file, new + b"\n" + KEY)
    assert keys.sign(ROOM, END) == sign(new, ROOM, END)
    keys.check(GOOD, ROOM, 0, may_be_over=False)
    put(key_file, new)
    with pytest.raises(PermissionDenied):
        keys.check(GOOD, ROOM, 0, may_be_over=False)


@pytest.mark.parametrize("content", [None, b"", b"\n", b"short\n" + KEY, b"k" * 31])
def test_a_file_that_cannot_be_used_is_refused_at_the_start_and_changes_nothing_later(
    key_file: Path, keys: TicketKeys, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    key_file.unlink() if content is None else put(key_file, content)
    with pytest.raises(InvalidRequest, match=str(key_file)) as raised:
        TicketKeys.read(key_file)
    assert raised.value.metadata == {"field": "ticket_key_file"}
    for _ in range(2):
        assert keys.sign(ROOM, END) == GOOD
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert KEY.decode() not in caplog.text


def test_a_person_gets_a_ticket_from_pdctl(key_file: Path, keys: TicketKeys) -> None:
    result = CliRunner().invoke(ticket_command, ["18446744073709551615", "--ticket-key-file", str(key_file)])
    assert result.exit_code == 0, result.output
    keys.check(base64.b64decode(result.output), 2**64 - 1, 0, may_be_over=False)
    failed = CliRunner().invoke(ticket_command, ["5", "--ticket-key-file", f"{key_file}.not"])
    assert failed.exit_code == 1
    assert "keys.not" in failed.output


# --- where they are asked for ---


@pytest.fixture
async def guarded(rooms: FakeRooms, hub: OutputHub, keys: TicketKeys) -> AsyncIterator[Connection]:
    """A process with keys; its PageAllocation answers INTERNAL to whoever is let in."""
    services = [
        server.page_allocation(page_allocation_pb2_grpc.PageAllocationServicer()),  # type: ignore[abstract]
        server.transfer_status(TransferStatusServicer(rooms)),
        server.abort(AbortServicer(rooms)),
        server.generation(EngineGenerationServicer(rooms, hub, FakeModel())),
    ]
    control = ControlServer(services, None, keys)
    connection = Connection(f"{LOOPBACK}:{await control.start(LOOPBACK, 0)}")
    yield connection
    await connection.close()
    await control.stop(grace_s=0.0)


NOW = int(time.time())
GOOD_NOW, OVER = sign(KEY, ROOM, NOW + 600), sign(KEY, ROOM, NOW - 1)
FAILED, SUCCESS = types_pb2.TRANSFER_STATE_FAILED, types_pb2.TRANSFER_STATE_SUCCESS

Ask = Callable[[Connection, bytes], Awaitable[object]]


def generate(connection: Connection, ticket: bytes) -> Awaitable[object]:
    stub: Any = generation_pb2_grpc.GenerationStub(connection.channel)
    return stub.Generate(generation_pb2.GenerateRequest(bootstrap_room=ROOM, ticket=ticket), timeout=10).read()  # type: ignore[no-any-return]


def submit(connection: Connection, ticket: bytes) -> Awaitable[object]:
    return GenerationClient(connection).submit(replace(make_request(ROOM), ticket=ticket), "nobody", Context())


def allocate(connection: Connection, ticket: bytes) -> Awaitable[object]:
    stub: Any = page_allocation_pb2_grpc.PageAllocationStub(connection.channel)
    return stub.AllocatePages(page_allocation_pb2.AllocatePagesRequest(bootstrap_room=ROOM, ticket=ticket), timeout=10)  # type: ignore[no-any-return]


def report(state: types_pb2.TransferState) -> Ask:
    def ask(connection: Connection, ticket: bytes) -> Awaitable[object]:
        request = transfer_status_pb2.ReportTransferRequest(bootstrap_room=ROOM, state=state, ticket=ticket)
        stub: Any = transfer_status_pb2_grpc.TransferStatusStub(connection.channel)
        return stub.ReportTransfer(request, timeout=10)  # type: ignore[no-any-return]

    return ask


def abort(connection: Connection, ticket: bytes) -> Awaitable[object]:
    return GenerationClient(connection).abort_room(ROOM, "stop", ticket)


ASKS = {
    "Generate": generate,
    "Submit": submit,
    "AllocatePages": allocate,
    "ReportTransfer success": report(SUCCESS),
    "ReportTransfer failed": report(FAILED),
    "AbortRoom": abort,
}
STOPPING = {"ReportTransfer failed", "AbortRoom"}


async def outcome(connection: Connection, ask: Ask, ticket: bytes) -> str:
    """Why it is not let in; what happens inside is of no interest here."""
    try:
        await typed(connection, ask(connection, ticket))
    except PermissionDenied as error:
        return error.message
    except PdError:
        pass
    return "let in"


def carries_a_ticket(message: Descriptor) -> bool:
    return any(
        field.name == "ticket" or (field.message_type is not None and carries_a_ticket(field.message_type))
        for field in message.fields
    )


def test_every_method_whose_request_carries_a_ticket_is_tried_below() -> None:
    modules: tuple[Any, ...] = (bootstrap_pb2, page_allocation_pb2, transfer_status_pb2, abort_pb2, generation_pb2)
    methods = [
        method
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    carrying = {method.name for method in methods if carries_a_ticket(method.input_type)}
    assert {name.partition(" ")[0] for name in ASKS} == carrying


@pytest.mark.parametrize("name", ASKS)
async def test_a_method_on_a_room_needs_the_rooms_ticket(guarded: Connection, name: str) -> None:
    ask = ASKS[name]
    assert "needs a ticket" in await outcome(guarded, ask, b"")
    assert "forged" in await outcome(guarded, ask, sign(b"x" * 32, ROOM, NOW + 600))
    assert "ticket of room 6" in await outcome(guarded, ask, sign(KEY, BootstrapRoom(6), NOW + 600))
    assert await outcome(guarded, ask, GOOD_NOW) == "let in"


@pytest.mark.parametrize("name", ASKS)
async def test_only_stopping_works_with_a_ticket_that_is_over(guarded: Connection, name: str) -> None:
    answer = await outcome(guarded, ASKS[name], OVER)
    assert answer == "let in" if name in STOPPING else "is over" in answer


@pytest.mark.parametrize("name", ASKS)
async def test_a_process_without_keys_asks_for_none(engine: Connection, name: str) -> None:
    assert await outcome(engine, ASKS[name], b"") == "let in"


async def test_who_is_refused_changes_nothing(guarded: Connection, rooms: FakeRooms) -> None:
    for ask in ASKS.values():
        await outcome(guarded, ask, b"")
    assert rooms.transfers.find(ROOM) is None
    assert (rooms.submitted.empty(), rooms.aborted.empty(), rooms.reports) == (True, True, [])


async def test_reading_needs_no_ticket(guarded: Connection) -> None:
    stub: Any = transfer_status_pb2_grpc.TransferStatusStub(guarded.channel)
    assert (await stub.ListTransfers(transfer_status_pb2.ListTransfersRequest(), timeout=10)).transfers == []
    assert (await GenerationClient(guarded).get_model()).name == "tiny"


async def test_the_router_signs_what_the_engines_check(guarded: Connection, rooms: FakeRooms, keys: TicketKeys) -> None:
    """Both legs and their aborts, with the keys of the same file."""
    target = guarded.address.rpartition(":")
    address = BootstrapAddress(target[0], int(target[2]))
    changed = asyncio.Event()
    workers = [Worker(role, address, changed, dial_plain) for role in (Role.PREFILL, Role.DECODE)]
    running = [asyncio.create_task(worker.run()) for worker in workers]
    while not all(worker.is_live for worker in workers):
        await asyncio.wait_for(changed.wait(), 10)
        changed.clear()
    dispatcher = Dispatcher(LeastLoaded(workers[:1], workers[1:]), Tracing(), keys)
    prompt = ClientRequest(prompt=(1, 2), sampling=SamplingParams(max_new_tokens=4), timeout_s=30.0, room=ROOM)
    client = asyncio.create_task(anext(dispatcher.generate_through(Route(workers[0], workers[1]), prompt, "test")))
    request, _ = await asyncio.wait_for(rooms.submitted.get(), 10)
    keys.check(request.ticket, ROOM, time.time() + 80, may_be_over=False)
    with pytest.raises(PermissionDenied):
        keys.check(request.ticket, ROOM, time.time() + 100, may_be_over=False)
    with pytest.raises(PdError):  # its other leg finds the room in use here
        await client
    aborted, _ = await asyncio.wait_for(rooms.aborted.get(), 10)
    assert aborted == ROOM
    await dispatcher.close()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for worker in workers:
        await worker.stop()
