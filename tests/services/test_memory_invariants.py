"""I3 and I11 with real services: pages that are being read stay, and no number from outside becomes an address."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from pd.v1 import page_allocation_pb2, page_allocation_pb2_grpc, transfer_status_pb2, types_pb2

from pd_common.control import convert
from pd_common.errors import InvalidRequest, PagesInvalid, PdError
from pd_common.handoff.metadata import ROW_BYTES
from pd_common.handoff.state import TransferState
from pd_common.types import BootstrapRoom
from tests.control.serving import typed
from tests.services.byte_engine import Gate
from tests.services.pair import Pair, running, soon, state_reached, turns

ROOM, OTHER, NEXT = 7, 8, 9


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with running(Pair()) as pair:
        yield pair


@pytest.mark.parametrize("aborted", [False, True], ids=["slow", "slow and aborted"])
async def test_pages_of_a_write_that_is_under_way_have_no_other_owner(aborted: bool) -> None:
    """I3: the sender is slow, and the next prompt wants more pages than are left."""
    async with running(Pair(prefill_pages=8)) as pair:
        gate = pair.faults.hold = Gate()
        slow, small, large = (
            pair.request(room, prompt_tokens=tokens) for room, tokens in ((ROOM, 20), (OTHER, 8), (NEXT, 24))
        )
        await pair.submit(slow)
        await soon(gate.reached.wait())
        pages = tuple(pair.prefill.service._rooms[BootstrapRoom(ROOM)].handover.job.sequence.pages)  # type: ignore[union-attr]
        await pair.submit(small)
        await pair.submit(large)
        await state_reached(pair.prefill.transfers, NEXT, TransferState.WAITING_FOR_INPUT)
        if aborted:
            await pair.at_decode.client.abort(ROOM)
            await pair.at_prefill.client.failure(ROOM)
        await turns()
        (waiting,) = pair.prefill.scheduler._waiting
        assert waiting.sequence.request.room == NEXT
        owned = [page for job in pair.prefill.scheduler._running for page in job.sequence.pages]
        assert len(owned) == len(set(owned)) == 7
        assert set(pages) <= set(owned)
        assert pair.prefill.engine.pages.num_free == 1
        assert pair.prefill.engine.pool.holds(np.array(pages), slow.prompt)
        gate.set()
        for request in (small, large) if aborted else (slow, small, large):
            await pair.assert_answered(request)


# --- I11: what comes from the network ---


def registration(pair: Pair, **changes: Any) -> page_allocation_pb2.RegisterReceiverRequest:
    life = pair.decode
    buffers = life.engine.pool.buffers
    fields: dict[str, Any] = {
        "receiver": convert.instance_to(life.instance),
        "sender": convert.instance_to(pair.prefill.instance),
        "control_address": pair.at_decode.address.target,
        "layout": convert.layout_to(life.engine.layout),
        "data_address": b"",
        "buffer_bases": buffers.bases,
        "num_pages": buffers.num_pages,
        "metadata_base": life.metadata.region.base,
        "metadata_item_len_bytes": ROW_BYTES,
        "metadata_slots": life.metadata.num_slots,
        "canary_base": life.canaries.region.base,
        "canary_pages": life.canaries.num_pages,
    }
    return page_allocation_pb2.RegisterReceiverRequest(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"buffer_bases": [4096]}, InvalidRequest),
        ({"buffer_bases": [4096, 4096, 4096]}, InvalidRequest),
        ({"buffer_bases": [4096, 2**63 - 8]}, PagesInvalid),
        ({"buffer_bases": [4096, 2**64 - 1]}, PagesInvalid),
        ({"num_pages": 0}, PagesInvalid),
        ({"metadata_base": 2**64 - 1}, PagesInvalid),
        ({"metadata_base": 2**63 - ROW_BYTES}, PagesInvalid),
        ({"metadata_slots": 0}, InvalidRequest),
        ({"canary_base": 2**64 - 1}, PagesInvalid),
        ({"canary_pages": 0}, PagesInvalid),
        ({"canary_pages": 2**32 - 1, "canary_base": 2**63 - 64}, PagesInvalid),
        ({"metadata_item_len_bytes": ROW_BYTES - 1}, InvalidRequest),
        ({"control_address": ""}, InvalidRequest),
        ({"data_address": b"no address"}, InvalidRequest),
    ],
    ids=str,
)
async def test_memory_that_cannot_be_is_not_registered(
    pair: Pair, changes: dict[str, Any], error: type[PdError]
) -> None:
    stub: Any = page_allocation_pb2_grpc.PageAllocationStub(pair.at_prefill.connection.channel)
    with pytest.raises(error):
        await typed(pair.at_prefill.connection, stub.RegisterReceiver(registration(pair, **changes)))
    assert pair.prefill.receivers._by_instance == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"page_ids": [0, 1]},
        {"page_ids": [0, 1, 2, 3]},
        {"page_ids": [0, 1, 32]},
        {"page_ids": [0, 1, 2**32 - 1]},
        {"page_ids": [0, 1, 1]},
        {"prompt_tokens": 2**32 - 1},
        {"decode_prefix_len": 3},
        {"decode_prefix_len": 16},
        {"metadata_slot": types_pb2.MetadataSlot(index=8, generation=1)},
        {"metadata_slot": types_pb2.MetadataSlot(index=2**32 - 1, generation=1)},
    ],
    ids=str,
)
async def test_pages_that_were_not_registered_are_not_written(pair: Pair, changes: dict[str, Any]) -> None:
    """The room is not touched by such an offer: a right one may follow."""
    await pair.serve(OTHER)
    writes = pair.faults.writes
    fields: dict[str, Any] = {
        "bootstrap_room": ROOM,
        "receiver": convert.instance_to(pair.decode.instance),
        "sender": convert.instance_to(pair.prefill.instance),
        "registration": 1,
        "page_ids": [0, 1, 2],
        "metadata_slot": types_pb2.MetadataSlot(index=0, generation=1),
        "prompt_tokens": 10,
        "prompt_digest": b"x",
        "time_left": convert.duration_to(10.0),
    }
    stub: Any = page_allocation_pb2_grpc.PageAllocationStub(pair.at_prefill.connection.channel)
    request = page_allocation_pb2.AllocatePagesRequest(**{**fields, **changes})
    with pytest.raises(PagesInvalid):
        await typed(pair.at_prefill.connection, stub.AllocatePages(request))
    assert pair.prefill.transfers.find(BootstrapRoom(ROOM)) is None
    assert pair.faults.writes == writes
    await pair.serve(ROOM)


async def test_more_pages_than_were_offered_are_not_reported_as_done(pair: Pair) -> None:
    gate = pair.faults.hold = Gate()
    request = pair.request(ROOM, prompt_tokens=10)
    await pair.submit(request)
    await soon(gate.reached.wait())
    stub: Any = pair.at_decode.peer_client._status
    report = transfer_status_pb2.ReportTransferRequest(
        bootstrap_room=ROOM,
        reporter=convert.instance_to(pair.prefill.instance),
        recipient=convert.instance_to(pair.decode.instance),
        sequence=1,
        state=types_pb2.TRANSFER_STATE_TRANSFERRING,
        pages_done=4,
    )
    with pytest.raises(PagesInvalid):
        await typed(pair.at_decode.connection, stub.ReportTransfer(report))
    gate.set()
    await pair.assert_answered(request)
