"""Whether the other side is still there: beats both ways, and canary pages, over real gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from pd.v1 import page_allocation_pb2, page_allocation_pb2_grpc, transfer_status_pb2

from pd_common.control import beats, convert
from pd_common.errors import InvalidRequest, PeerLost, ReceiverUnknown, StaleInstance, TransferFailed
from pd_common.transport.fake import FAKE_BOOTSTRAP_HOST
from pd_common.transport.loopback import Drop
from pd_common.types import BootstrapAddress, BootstrapRoom, Instance
from services.decode import pairing
from services.decode.pairing import Prefill
from tests.services.byte_engine import Gate
from tests.services.lives import PrefillLife
from tests.services.pair import Node, Pair, running, soon, until
from tests.services.tap import answer_held, lost
from tests.services.test_memory_invariants import registration

ROOM, NEXT = 7, 8
SEED = bytes(range(16))


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with running(Pair()) as pair:
        yield pair


@pytest.fixture
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beats, "BEAT_S", 0.02)


@pytest.fixture
def quick_canaries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "CANARY_S", 0.05)


async def paired(pair: Pair) -> Prefill:
    prefill: Prefill = await soon(pair.decode.prefills.pair_with(pair.at_prefill.address, BootstrapRoom(1)))
    return prefill


async def peers_of(node: Node) -> list[Any]:
    stub = node.peer_client._status
    return list((await soon(stub.ListPeers(transfer_status_pb2.ListPeersRequest()))).peers)


# --- first contact ---


async def test_each_side_lists_the_other_with_the_canary_that_went_through_before_the_first_room(pair: Pair) -> None:
    assert await peers_of(pair.at_decode) == await peers_of(pair.at_prefill) == []
    await paired(pair)
    assert pair.prefill.canary_faults.writes == 1
    assert pair.prefill.faults.writes == 0
    (prefill,), (decode,) = await peers_of(pair.at_decode), await peers_of(pair.at_prefill)
    assert prefill.instance.instance_id == pair.prefill.instance.instance_id
    assert prefill.control_address == pair.at_prefill.address.target
    assert decode.instance.instance_id == pair.decode.instance.instance_id
    assert decode.control_address == pair.at_decode.address.target
    for peer in (prefill, decode):
        assert (peer.carrier, peer.live_rooms) == ("loopback", 0)
        assert abs(time.time() - peer.since.ToNanoseconds() / 1e9) < 5
        assert abs(time.time() - peer.canary_time.ToNanoseconds() / 1e9) < 5
        assert peer.canary_took.ToNanoseconds() > 0


async def test_rooms_that_have_not_ended_are_counted_on_both_sides(pair: Pair) -> None:
    gate = pair.faults.hold = Gate()
    requests = [pair.request(room) for room in (ROOM, NEXT)]
    for request in requests:
        await pair.submit(request)
    await soon(gate.reached.wait())
    await until(lambda: all(transfer.peer is not None for transfer in pair.decode.transfers.live()))
    for node in (pair.at_decode, pair.at_prefill):
        assert [peer.live_rooms for peer in await peers_of(node)] == [2]
    gate.set()
    for request in requests:
        await pair.assert_answered(request)


@pytest.mark.usefixtures("quick_beats")
@pytest.mark.parametrize("fault", ["damaged", "dropped"])
async def test_a_pairing_whose_canary_does_not_come_is_refused_with_carrier_and_both_addresses(
    pair: Pair, fault: str
) -> None:
    if fault == "damaged":
        pair.prefill.canary_faults.flip_in_write = 1
    else:
        pair.prefill.canary_faults.drop = Drop.FAIL
    await pair.submit(pair.request(ROOM))
    error = await pair.at_decode.client.failure(ROOM)
    assert isinstance(error, TransferFailed)
    assert error.metadata == {
        "prefill": pair.at_prefill.address.target,
        "decode": pair.at_decode.address.target,
        "carrier": "loopback",
    }
    assert all(fact in error.message for fact in error.metadata.values())
    assert await peers_of(pair.at_decode) == []
    await until(lambda: not pair.prefill.receivers.peers([]))
    pair.prefill.canary_faults.drop = None
    await pair.at_prefill.client.abort(ROOM)
    await pair.serve(NEXT)


@pytest.mark.usefixtures("quick_beats")
async def test_a_canary_that_hangs_ends_the_first_contact_in_bounded_time(pair: Pair) -> None:
    pair.prefill.canary_faults.drop = Drop.HANG
    with pytest.raises(TransferFailed):
        await paired(pair)
    pair.prefill.canary_faults.drop = None
    await pair.serve(NEXT)


async def test_a_canary_is_asked_for_by_whoever_is_registered_here_with_a_whole_seed(pair: Pair) -> None:
    await paired(pair)
    client, mine, theirs = pair.at_prefill.peer_client, pair.decode.instance, pair.prefill.instance
    with pytest.raises(ReceiverUnknown):
        await client.send_canary(Instance("stranger", 1), theirs, 1, 0, SEED)
    with pytest.raises(StaleInstance):
        await client.send_canary(mine, Instance(theirs.instance_id, theirs.epoch + 1), 1, 0, SEED)
    with pytest.raises(InvalidRequest) as raised:
        await client.send_canary(mine, theirs, 1, 0, SEED[:15])
    assert raised.value.metadata == {"field": "seed"}
    with pytest.raises(InvalidRequest) as raised:
        await client.send_canary(mine, Instance("", 0), 1, 0, SEED)
    assert raised.value.metadata == {"field": "sender"}
    with pytest.raises(ReceiverUnknown, match="another registration"):
        await client.send_canary(mine, theirs, 2, 0, SEED)


async def test_a_meeting_that_would_go_well_while_decode_stops_leaves_no_port(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another pairing is being ended meanwhile, and its port takes its time."""
    first = await paired(pair)
    fence, may_fence = first.port.fence, Gate()

    async def slow() -> None:
        await may_fence.wait()
        await fence()

    monkeypatch.setattr(first.port, "fence", slow)
    other, canary = Node(PrefillLife(pair.network, 8, 2, 8, 60.0)), Gate()
    await other.start()
    other.tap.rules["SendCanary"] = answer_held(canary)
    meeting = asyncio.create_task(pair.decode.prefills.pair_with(other.address, BootstrapRoom(1)))
    await soon(canary.reached.wait())
    closing = asyncio.create_task(pair.decode.prefills.close())
    await soon(may_fence.reached.wait())
    canary.set()
    await asyncio.wait([meeting], timeout=10)
    may_fence.set()
    await soon(closing)
    assert (pair.decode.prefills.peers([]), pair.network.ports) == ((), {})
    await other.stop()


# --- a pairing that nobody uses ---


@pytest.mark.usefixtures("quick_canaries")
async def test_an_idle_pairing_is_tried_again_and_again_and_kept_while_pages_come(pair: Pair) -> None:
    prefill = await paired(pair)
    await until(lambda: pair.prefill.canary_faults.writes >= 4)
    assert pair.decode.prefills.is_current(prefill)
    await pair.serve(ROOM)


@pytest.mark.usefixtures("quick_canaries")
@pytest.mark.parametrize("fault", ["damaged", "dropped"])
async def test_a_broken_way_under_a_living_control_plane_is_found_before_a_room_needs_it(
    pair: Pair, fault: str
) -> None:
    prefill = await paired(pair)
    faults = pair.prefill.canary_faults
    if fault == "damaged":
        faults.flip_in_write = faults.writes + 2
    else:
        faults.drop = Drop.FAIL
    await until(lambda: not pair.decode.prefills.is_current(prefill))
    await soon(prefill.fenced.wait())
    await until(lambda: not pair.prefill.receivers.peers([]))
    faults.drop = None
    await pair.serve(ROOM)
    assert pair.decode.prefills.peers([])[0].since_s > prefill.since_s


@pytest.mark.usefixtures("quick_canaries", "quick_beats")
async def test_a_canary_call_that_is_lost_is_no_sign_of_a_broken_way_and_is_made_again(pair: Pair) -> None:
    prefill = await paired(pair)
    first = prefill.canary
    pair.at_prefill.tap.rules["SendCanary"] = lost(2)
    await until(lambda: prefill.canary is not first)
    assert pair.decode.prefills.is_current(prefill)


async def test_a_room_that_succeeds_shows_that_pages_come_and_a_fake_room_shows_nothing(pair: Pair) -> None:
    prefill = await paired(pair)
    before = prefill.page_s
    fake = replace(pair.request(ROOM), bootstrap=BootstrapAddress(FAKE_BOOTSTRAP_HOST, 1))
    await pair.at_decode.client.submit(fake)
    assert (await pair.at_decode.client.outputs(ROOM))[-1].error is None
    assert prefill.page_s == before
    await pair.serve(NEXT)
    assert prefill.page_s > before


# --- beats ---


@pytest.mark.usefixtures("quick_beats")
async def test_a_pairing_in_which_nothing_happens_lasts_while_both_sides_beat(pair: Pair) -> None:
    prefill = await paired(pair)
    await asyncio.sleep(4 * beats.patience_s())
    assert pair.decode.prefills.is_current(prefill)
    assert len(pair.prefill.receivers.peers([])) == 1


@pytest.mark.usefixtures("quick_beats")
async def test_a_step_of_any_length_does_not_stop_the_beats(pair: Pair) -> None:
    gate = pair.prefill.engine.shut()
    request = pair.request(ROOM)
    await pair.submit(request)
    await soon(gate.reached.wait())
    await asyncio.sleep(4 * beats.patience_s())
    gate.set()
    await pair.assert_answered(request)


@pytest.mark.usefixtures("quick_beats")
async def test_a_decode_whose_beats_stop_is_dropped_though_its_connection_stands(pair: Pair) -> None:
    """As when its event loop hangs, and the library goes on answering pings."""
    await paired(pair)
    mute, port = Instance("mute", 1), pair.decode.transport.listen(pair.decode.regions)
    stub: Any = page_allocation_pb2_grpc.PageAllocationStub(pair.at_prefill.connection.channel)
    await stub.RegisterReceiver(
        registration(pair, receiver=convert.instance_to(mute), control_address="127.0.0.1:9", data_address=port.address)
    )

    async def one_beat() -> AsyncIterator[page_allocation_pb2.HoldReceiverRequest]:
        yield page_allocation_pb2.HoldReceiverRequest(
            receiver=convert.instance_to(mute), sender=convert.instance_to(pair.prefill.instance)
        )
        await asyncio.Event().wait()

    call = stub.HoldReceiver(one_beat())
    await soon(_end_of(call))
    with pytest.raises(ReceiverUnknown):
        pair.prefill.receivers.get(mute)
    assert pair.prefill.receivers.get(pair.decode.instance).held, "the other one is not touched"
    await port.fence()


@pytest.mark.usefixtures("quick_beats")
@pytest.mark.parametrize("beats_before", [0, 1], ids=str)
async def test_a_prefill_whose_beats_stop_is_forgotten_and_its_rooms_fail(pair: Pair, beats_before: int) -> None:
    async def falls_silent(request: Any, context: Any) -> AsyncIterator[page_allocation_pb2.HoldReceiverResponse]:
        pair.prefill.receivers.get(pair.decode.instance).held = True
        for _ in range(beats_before):
            yield page_allocation_pb2.HoldReceiverResponse()
        await asyncio.Event().wait()

    gate = pair.faults.hold = Gate()
    servicer = pair.prefill.servicers["page_allocation"]
    speaking, servicer.HoldReceiver = servicer.HoldReceiver, falls_silent
    await pair.submit(pair.request(ROOM))
    error = await pair.at_decode.client.failure(ROOM)
    assert isinstance(error, PeerLost)
    assert f"no beat for {beats.patience_s():.1f} s" in error.message
    servicer.HoldReceiver = speaking
    gate.set()
    await until(lambda: not pair.unfinished())
    await pair.serve(NEXT)


async def _end_of(call: Any) -> None:
    async for _ in call:
        pass
