from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf import duration_pb2
from pd.v1 import abort_pb2, abort_pb2_grpc, transfer_status_pb2, transfer_status_pb2_grpc, types_pb2

from pd_common.control import convert
from pd_common.control.connection import Connection
from pd_common.control.generation_client import GenerationClient
from pd_common.control.peer_client import PeerClient
from pd_common.control.rooms import PoolStatus
from pd_common.errors import (
    CapacityExceeded,
    InvalidRequest,
    PeerLost,
    RoomAborted,
    RoomUnknown,
    StaleInstance,
    TransferFailed,
)
from pd_common.handoff.deadlines import Timeouts
from pd_common.handoff.state import Progress, Transfer, TransferState
from pd_common.handoff.table import TransferTable
from pd_common.telemetry import spans
from pd_common.types import BootstrapRoom, Instance, Role
from tests.control.fake_rooms import POOL, FakeRooms
from tests.control.serving import make_request, typed

PEER, OTHER_PEER = Instance("prefill-0", 3), Instance("prefill-1", 3)
ROOM = BootstrapRoom(5)
FAILURE = TransferFailed("a write failed", room=5)


class Listeners(list[Callable[[Transfer], None]]):
    """Tells when one has come and when one has left."""

    def __init__(self) -> None:
        super().__init__()
        self.joined = asyncio.Event()
        self.left = asyncio.Event()

    def append(self, value: Callable[[Transfer], None]) -> None:
        super().append(value)
        self.joined.set()

    def remove(self, value: Callable[[Transfer], None]) -> None:
        super().remove(value)
        self.left.set()


@pytest.fixture
async def peer(engine: Connection) -> PeerClient:
    return PeerClient(engine)


@pytest.fixture
async def stub(engine: Connection) -> Any:
    return transfer_status_pb2_grpc.TransferStatusStub(engine.channel)


def open_room(rooms: FakeRooms, number: int, age_s: float = 0.0) -> BootstrapRoom:
    room, now = BootstrapRoom(number), time.monotonic()
    rooms.transfers.open(room, rid=f"r{number}", prompt_digest=b"", deadline_s=now + 60, now=now - age_s)
    return room


def pair_room(rooms: FakeRooms, room: BootstrapRoom, peer: Instance = PEER) -> None:
    rooms.transfers.advance(room, TransferState.WAITING_FOR_INPUT, time.monotonic(), peer=peer)


def numbers(transfers: Any) -> list[int]:
    return [transfer.bootstrap_room for transfer in transfers]


# --- TransferStatus ---


async def test_a_room_is_shown_as_it_stands(rooms: FakeRooms, stub: Any) -> None:
    room = open_room(rooms, 2**64 - 1)
    pair_room(rooms, room)
    rooms.transfers.advance(room, TransferState.TRANSFERRING, time.monotonic())
    rooms.transfers.advance(room, TransferState.TRANSFERRING, time.monotonic(), progress=Progress(1, 2, 3))
    began_s = time.time()
    request = transfer_status_pb2.GetTransferRequest(bootstrap_room=room)
    shown = (await stub.GetTransfer(request)).transfer
    assert (shown.bootstrap_room, shown.rid, shown.role) == (room, f"r{room}", types_pb2.ROLE_DECODE)
    assert (shown.chunks_done, shown.pages_done, shown.bytes_done) == (1, 2, 3)
    assert convert.instance_from(shown.peer, "peer") == PEER
    assert [convert.state_from(step.state) for step in shown.timeline] == [
        TransferState.BOOTSTRAPPING,
        TransferState.WAITING_FOR_INPUT,
        TransferState.TRANSFERRING,
    ]
    assert abs(shown.timeline[0].time.ToNanoseconds() / 1e9 - began_s) < 60
    assert not shown.HasField("failure")


async def test_every_step_of_a_room_says_what_was_done_by_then_and_the_last_why(rooms: FakeRooms, stub: Any) -> None:
    """A watcher that saw only the last change finds the ones before in it, by number."""
    room = open_room(rooms, 5)
    other = open_room(rooms, 6)
    pair_room(rooms, room)
    rooms.transfers.advance(room, TransferState.TRANSFERRING, time.monotonic(), progress=Progress(1, 2, 3))
    rooms.transfers.advance(room, TransferState.TRANSFERRING, time.monotonic(), progress=Progress(2, 4, 6))
    rooms.transfers.fail(room, FAILURE, time.monotonic())
    request = transfer_status_pb2.WatchTransfersRequest(after_sequence=rooms.transfers.get(other).sequence)
    watch = stub.WatchTransfers(request)
    shown = (await watch.read()).transfer
    watch.cancel()
    assert [
        (convert.state_from(s.state), s.sequence, s.chunks_done, s.pages_done, s.bytes_done, s.reason)
        for s in shown.timeline
    ] == [
        (TransferState.BOOTSTRAPPING, 1, 0, 0, 0, ""),
        (TransferState.WAITING_FOR_INPUT, 3, 0, 0, 0, ""),
        (TransferState.TRANSFERRING, 4, 1, 2, 3, ""),
        (TransferState.FAILED, 6, 2, 4, 6, "TRANSFER_FAILED"),
    ]
    assert shown.sequence == 6


@pytest.mark.parametrize(("room", "error"), [(5, RoomUnknown), (0, InvalidRequest)])
async def test_a_room_that_is_not_there_is_an_error(
    engine: Connection, stub: Any, room: int, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await typed(engine, stub.GetTransfer(transfer_status_pb2.GetTransferRequest(bootstrap_room=room)))


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, [1, 4, 2, 3]),
        ({"states": [types_pb2.TRANSFER_STATE_BOOTSTRAPPING]}, [1, 4]),
        ({"states": [types_pb2.TRANSFER_STATE_FAILED, types_pb2.TRANSFER_STATE_WAITING_FOR_INPUT]}, [2, 3]),
        ({"states": [types_pb2.TRANSFER_STATE_SUCCESS]}, []),
        ({"peer_instance_id": "prefill-0"}, [2]),
        ({"peer_instance_id": "prefill-9"}, []),
        ({"older_than": duration_pb2.Duration(seconds=50)}, [1, 2]),
        ({"older_than": duration_pb2.Duration(seconds=50), "peer_instance_id": "prefill-0"}, [2]),
    ],
    ids=["all", "one state", "two states", "no such state", "peer", "no such peer", "age", "age and peer"],
)
async def test_rooms_are_listed_by_what_is_asked_for(
    rooms: FakeRooms, stub: Any, filters: dict[str, Any], expected: list[int]
) -> None:
    for number, age_s in ((1, 100.0), (2, 100.0), (3, 0.0), (4, 0.0)):
        open_room(rooms, number, age_s)
    pair_room(rooms, BootstrapRoom(2))
    pair_room(rooms, BootstrapRoom(3), OTHER_PEER)
    rooms.transfers.fail(BootstrapRoom(3), FAILURE, time.monotonic())
    listed = await stub.ListTransfers(transfer_status_pb2.ListTransfersRequest(**filters))
    assert numbers(listed.transfers) == expected
    assert listed.next_page_token == ""


async def test_pages_of_a_list_follow_each_other(rooms: FakeRooms, stub: Any) -> None:
    for number in range(1, 6):
        open_room(rooms, number)
    seen, token = [], ""
    for _ in range(3):
        request = transfer_status_pb2.ListTransfersRequest(page_size=2, page_token=token)
        listed = await stub.ListTransfers(request)
        seen.append(numbers(listed.transfers))
        token = listed.next_page_token
    assert seen == [[1, 2], [3, 4], [5]]
    assert token == ""


async def test_a_full_last_page_says_that_it_is_the_last(rooms: FakeRooms, stub: Any) -> None:
    for number in range(1, 101):
        open_room(rooms, number)
    assert (await stub.ListTransfers(transfer_status_pb2.ListTransfersRequest())).next_page_token == ""
    open_room(rooms, 101)
    listed = await stub.ListTransfers(transfer_status_pb2.ListTransfersRequest())
    assert len(listed.transfers) == 100
    assert listed.next_page_token != ""


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (transfer_status_pb2.ListTransfersRequest(page_token="next"), "page_token"),  # noqa: S106
        (transfer_status_pb2.ListTransfersRequest(page_token="-1"), "page_token"),  # noqa: S106
        (transfer_status_pb2.ListTransfersRequest(page_token="9" * 5000), "page_token"),
        (transfer_status_pb2.ListTransfersRequest(states=[77]), "state"),  # type: ignore[list-item]
    ],
    ids=["text", "negative", "endless", "state"],
)
async def test_a_list_that_cannot_be_meant_is_refused_by_its_field(
    engine: Connection, stub: Any, request_: transfer_status_pb2.ListTransfersRequest, field: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await typed(engine, stub.ListTransfers(request_))
    assert raised.value.metadata["field"] == field


async def test_a_watcher_sees_what_is_there_then_each_change_and_can_resume(rooms: FakeRooms, stub: Any) -> None:
    rooms.transfers.listeners = listeners = Listeners()
    first, second = open_room(rooms, 1), open_room(rooms, 2)
    watch = stub.WatchTransfers(transfer_status_pb2.WatchTransfersRequest())
    shown = [(await watch.read()).transfer for _ in range(2)]
    assert numbers(shown) == [first, second]
    pair_room(rooms, first)
    change = (await watch.read()).transfer
    assert (change.bootstrap_room, change.state) == (first, types_pb2.TRANSFER_STATE_WAITING_FOR_INPUT)
    watch.cancel()
    await asyncio.wait_for(listeners.left.wait(), 10)
    assert listeners == []

    rooms.transfers.fail(second, FAILURE, time.monotonic())
    resumed = stub.WatchTransfers(transfer_status_pb2.WatchTransfersRequest(after_sequence=change.sequence))
    missed = (await resumed.read()).transfer
    assert (missed.bootstrap_room, missed.state) == (second, types_pb2.TRANSFER_STATE_FAILED)
    third = open_room(rooms, 3)
    assert (await resumed.read()).transfer.bootstrap_room == third
    resumed.cancel()


async def test_a_watcher_of_an_empty_table_sees_the_first_room(rooms: FakeRooms, stub: Any) -> None:
    rooms.transfers.listeners = listeners = Listeners()
    watch = stub.WatchTransfers(transfer_status_pb2.WatchTransfersRequest())
    await asyncio.wait_for(listeners.joined.wait(), 10)
    open_room(rooms, 9)
    assert (await watch.read()).transfer.bootstrap_room == 9
    watch.cancel()


@pytest.mark.parametrize("after", [1, 1000, 1010], ids=["from an earlier life", "since forgotten", "not reached yet"])
async def test_a_watcher_that_would_miss_rooms_is_told_to_start_again(
    rooms: FakeRooms, engine: Connection, stub: Any, after: int
) -> None:
    rooms.transfers = TransferTable(Role.DECODE, 60.0, 1, Timeouts(300.0, 300.0), sequence=1000)
    for number in (1, 2, 3):
        rooms.transfers.fail(open_room(rooms, number), FAILURE, time.monotonic())
    rooms.transfers.sweep(time.monotonic())
    watch = stub.WatchTransfers(transfer_status_pb2.WatchTransfersRequest(after_sequence=after))
    with pytest.raises(InvalidRequest) as raised:
        await typed(engine, watch.read())
    assert raised.value.metadata == {"field": "after_sequence", "oldest": "1004", "latest": "1006"}
    again = stub.WatchTransfers(transfer_status_pb2.WatchTransfersRequest())
    assert (await again.read()).transfer.bootstrap_room == 3
    again.cancel()


async def test_a_watcher_that_does_not_read_is_cut_off_when_it_has_missed_a_room(
    rooms: FakeRooms, engine: Connection, stub: Any
) -> None:
    """What it has not read is kept in the table and nowhere else."""
    rooms.transfers = TransferTable(Role.DECODE, 60.0, 1, Timeouts(300.0, 300.0))
    rooms.transfers.listeners = listeners = Listeners()
    failure = TransferFailed("x" * 2**20)
    for number in range(1, 17):  # more than the connection takes in unread
        rooms.transfers.fail(open_room(rooms, number), failure, time.monotonic())
    watch = stub.WatchTransfers(transfer_status_pb2.WatchTransfersRequest())
    await asyncio.wait_for(listeners.joined.wait(), 10)
    seen = [(await watch.read()).transfer.bootstrap_room]
    for number in range(17, 20):
        rooms.transfers.fail(open_room(rooms, number), failure, time.monotonic())
    rooms.transfers.sweep(time.monotonic())
    seen += [(await watch.read()).transfer.bootstrap_room for _ in range(15)]
    assert seen == list(range(1, 17))
    with pytest.raises(InvalidRequest, match="start again"):
        await typed(engine, watch.read())
    assert listeners == []


async def test_a_report_says_where_the_room_stands_afterwards(rooms: FakeRooms, peer: PeerClient) -> None:
    room = open_room(rooms, 5)
    pair_room(rooms, room)
    state, failure = await peer.report_transfer(
        room,
        reporter=PEER,
        recipient=rooms.instance,
        sequence=1,
        state=TransferState.TRANSFERRING,
        progress=Progress(1, 2, 3),
        ticket=b"",
    )
    assert (state, failure) == (TransferState.TRANSFERRING, None)
    assert rooms.transfers.get(room).progress == Progress(1, 2, 3)
    state, failure = await peer.report_transfer(
        room,
        reporter=PEER,
        recipient=rooms.instance,
        sequence=2,
        state=TransferState.FAILED,
        progress=Progress(),
        ticket=b"",
        failure=FAILURE,
    )
    assert state is TransferState.FAILED
    assert type(failure) is TransferFailed
    assert failure.message == FAILURE.message
    assert [(report.room, report.reporter, report.sequence) for report in rooms.reports] == [(5, PEER, 1), (5, PEER, 2)]


@pytest.mark.parametrize("recipient", [Instance("decode-0", 6), Instance("decode-1", 7)], ids=["earlier", "other"])
async def test_a_report_for_another_life_is_refused_and_not_looked_at(
    rooms: FakeRooms, peer: PeerClient, recipient: Instance
) -> None:
    room = open_room(rooms, 5)
    with pytest.raises(StaleInstance) as raised:
        await peer.report_transfer(
            room,
            reporter=PEER,
            recipient=recipient,
            sequence=1,
            state=TransferState.TRANSFERRING,
            progress=Progress(),
            ticket=b"",
        )
    assert raised.value.metadata["expected"] == "decode-0/7"
    assert rooms.reports == []


async def test_the_pools_are_shown(stub: Any) -> None:
    shown = await stub.GetPool(transfer_status_pb2.GetPoolRequest())
    assert PoolStatus(**{field.name: value for field, value in shown.ListFields()}) == POOL


# --- Abort ---


async def test_aborting_a_live_room_ends_it_and_proves_who_is_quiet(rooms: FakeRooms, engine: Connection) -> None:
    room = open_room(rooms, 5)
    stub: Any = abort_pb2_grpc.AbortStub(engine.channel)
    answer = await stub.AbortRoom(abort_pb2.AbortRoomRequest(bootstrap_room=room, message="enough"))
    assert answer.state == types_pb2.TRANSFER_STATE_FAILED
    assert convert.instance_from(answer.drained, "drained") == rooms.instance
    failure = rooms.transfers.get(room).failure
    assert type(failure) is RoomAborted
    assert failure.message == "enough"


async def test_aborting_a_room_before_its_request_comes_keeps_it_out(
    rooms: FakeRooms, engine: Connection, client: GenerationClient
) -> None:
    stub: Any = abort_pb2_grpc.AbortStub(engine.channel)
    answer = await stub.AbortRoom(abort_pb2.AbortRoomRequest(bootstrap_room=ROOM))
    assert answer.state == types_pb2.TRANSFER_STATE_UNSPECIFIED
    outputs = client.stream_outputs("s")
    await anext(outputs)
    with pytest.raises(RoomAborted):
        await client.submit(make_request(ROOM), "s", spans.of_room(ROOM))
    await outputs.aclose()


async def test_an_abort_is_for_one_life_and_says_why(rooms: FakeRooms, peer: PeerClient) -> None:
    room = open_room(rooms, 5)
    with pytest.raises(StaleInstance):
        await peer.abort_room(room, PeerLost("gone"), Instance("decode-0", 6), ticket=b"")
    assert not rooms.transfers.get(room).state.is_final
    await peer.abort_room(room, CapacityExceeded("full", retry_after_s=7), rooms.instance, ticket=b"")
    failure = rooms.transfers.get(room).failure
    assert isinstance(failure, CapacityExceeded)
    assert (failure.message, failure.metadata) == ("full", {"retry_after_s": "7"})


async def test_an_abort_names_a_room(client: GenerationClient) -> None:
    with pytest.raises(InvalidRequest, match="bootstrap_room"):
        await client.abort_room(BootstrapRoom(0), "enough")
