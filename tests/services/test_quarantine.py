"""The quarantine as it is seen from outside, and why it cannot grow: who owes a proof is not paired again."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from pd.v1 import transfer_status_pb2, transfer_status_pb2_grpc

from pd_common.control import convert
from pd_common.errors import PeerLost, ReceiverUnknown
from pd_common.types import BootstrapAddress, BootstrapRoom
from services.decode import prefills
from services.decode.pairing import Prefill
from tests.services.byte_engine import Gate
from tests.services.pair import Pair, running, soon, turns, until
from tests.services.tap import PassOn, held

ROOM, NEXT, LATER = 7, 8, 9
PATIENCE_S = 0.05


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with running(Pair()) as pair:
        yield pair


def paired(pair: Pair) -> Prefill:
    return pair.decode.prefills._paired[pair.prefill.instance]


async def lost_in_the_middle(pair: Pair, room: int, proof: Gate) -> None:
    """Prefill is lost while it writes; it will not say that it is quiet before `proof` is set."""
    gate = pair.faults.hold = Gate()
    pair.at_prefill.tap.rules["AbortRoom"] = held(proof)
    await pair.submit(pair.request(room))
    await soon(gate.reached.wait())
    pair.faults.hold = None
    await pair.decode.prefills.forget(paired(pair), "no beat")
    for client in (pair.at_prefill.client, pair.at_decode.client):
        assert isinstance(await client.failure(room), PeerLost)
    await until(lambda: BootstrapRoom(room) in pair.decode.drain.quarantine)


async def listed(pair: Pair, at: str = "decode") -> list[transfer_status_pb2.QuarantinedRoom]:
    node = pair.at_decode if at == "decode" else pair.at_prefill
    stub: Any = transfer_status_pb2_grpc.TransferStatusStub(node.connection.channel)
    return list((await stub.ListQuarantine(transfer_status_pb2.ListQuarantineRequest())).rooms)


async def test_it_can_be_listed_with_everything_that_is_waited_for(pair: Pair) -> None:
    proof = Gate()
    assert await listed(pair) == []
    await lost_in_the_middle(pair, ROOM, proof)
    (room,) = await listed(pair)
    (writer,) = room.writers
    kept = pair.decode.drain.quarantine.held[0]
    assert (room.bootstrap_room, tuple(room.page_ids)) == (ROOM, kept.pages)
    assert (room.metadata_slot.index, room.metadata_slot.generation) == (kept.slot.index, kept.slot.generation)
    assert abs(room.since.ToNanoseconds() / 1e9 - time.time()) < 60
    assert convert.instance_from(writer.instance, "writer") == pair.prefill.instance
    assert writer.address == pair.at_prefill.address.target
    assert transfer_status_pb2.QUIET_PROOF_PROCESS_GONE in writer.missing
    assert f"room {ROOM} keeps {len(kept.pages)} pages" in room.description
    assert f"{pair.prefill.instance.instance_id} at {writer.address} says that it is quiet" in room.description
    assert await listed(pair, at="prefill") == []
    proof.set()
    await pair.settled()
    assert await listed(pair) == []


async def test_who_needs_none_of_it_does_not_wait_until_it_is_quiet() -> None:
    """The only place is free as soon as the room has ended."""
    async with running(Pair(decode_slots=1)) as pair:
        proof, writing = Gate(), Gate()
        pair.faults.hold = writing
        pair.at_prefill.tap.rules["AbortRoom"] = held(proof)
        await pair.submit(pair.request(ROOM))
        await soon(writing.reached.wait())
        alone = replace(pair.request(NEXT), bootstrap=None)
        await pair.at_decode.client.submit(alone)
        await until(lambda: pair.decode.queue.waiting == 1)
        await pair.at_decode.client.abort(ROOM)
        await pair.assert_decoded(alone)
        assert len(pair.decode.drain.quarantine.held) == 1
        writing.set()
        proof.set()


async def test_who_owes_a_proof_is_not_paired_before_it_is_given(pair: Pair) -> None:
    proof = Gate()
    await lost_in_the_middle(pair, ROOM, proof)
    request = pair.request(NEXT)
    await pair.submit(request)
    await until(lambda: pair.prefill.instance in pair.decode.prefills._meetings)
    assert pair.at_prefill.tap.passed.count("RegisterReceiver") == 1
    proof.set()
    await pair.assert_answered(request)
    assert pair.at_prefill.tap.passed.count("RegisterReceiver") == 2


async def test_however_often_a_prefill_is_lost_it_keeps_no_more_than_it_had_been_offered(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefills, "_PROOF_PATIENCE_S", PATIENCE_S)
    proof = Gate()
    await lost_in_the_middle(pair, ROOM, proof)
    outstanding = pair.decode.service.pool_status().pages_quarantined
    for room in range(20, 25):
        await pair.at_decode.client.submit(pair.request(room))
        failure = await pair.at_decode.client.failure(room)
        assert (type(failure), "has not said that it is quiet" in failure.message) == (PeerLost, True)
        assert pair.decode.service.pool_status().pages_quarantined == outstanding
    proof.set()
    await pair.settled()
    await pair.serve(LATER)


async def test_a_process_that_owes_nothing_is_paired_though_another_owes(pair: Pair) -> None:
    """Debts are by process: a successor at the same address starts with none."""
    proof = Gate()
    await lost_in_the_middle(pair, ROOM, proof)
    stranger = replace(pair.prefill.instance, epoch=pair.prefill.instance.epoch + 1)
    await soon(pair.decode.drain.proven(stranger))
    proof.set()


async def test_two_names_of_one_prefill_that_are_met_at_once_make_one_pairing(pair: Pair) -> None:
    gate = Gate()
    pair.at_prefill.tap.rules["RegisterReceiver"] = held(gate)
    first, second = pair.request(ROOM), pair.request(NEXT)
    second = replace(second, bootstrap=BootstrapAddress("localhost", pair.at_prefill.port))
    await pair.submit(first)
    await pair.submit(second)
    await soon(gate.reached.wait())
    await until(lambda: pair.at_prefill.tap.passed.count("GetTopology") == 2)
    await turns()
    gate.set()
    await pair.assert_answered(first)
    await pair.assert_answered(second)
    assert pair.at_prefill.tap.passed.count("RegisterReceiver") == 1


async def test_pages_are_hashed_while_the_next_ones_travel(pair: Pair) -> None:
    """Two chunks: the first is hashed before the second is even computed."""
    request = pair.request(ROOM, prompt_tokens=16)
    first = pair.prefill.engine.shut()
    await pair.submit(request)
    await soon(first.reached.wait())
    second = pair.prefill.engine.shut()
    first.set()
    await soon(second.reached.wait())
    receiver = pair.decode.service._rooms[BootstrapRoom(ROOM)].receiver
    assert receiver is not None
    await until(lambda: receiver._hashed == 2)
    assert pair.faults.writes == 1
    second.set()
    await pair.assert_answered(request)


async def test_rooms_whose_offers_are_refused_do_not_wait_for_each_other(pair: Pair) -> None:
    """The first of them makes a new pairing, which waits only for memory that prefill may know."""
    await pair.serve(LATER)
    gates = {room: Gate() for room in (ROOM, NEXT)}

    async def refused(request: Any, pass_on: PassOn) -> Any:
        gate = gates.pop(request.bootstrap_room, None)
        if gate is None:
            return await pass_on()
        await gate.wait()
        raise ReceiverUnknown("this prefill has forgotten the registration")

    pair.at_prefill.tap.rules["AllocatePages"] = refused
    first, second = gates.values()
    requests = [pair.request(room) for room in gates]
    for request in requests:
        await pair.submit(request)
    for gate in (first, second):
        await soon(gate.reached.wait())
    first.set()
    await until(lambda: pair.prefill.instance in pair.decode.prefills._meetings)
    second.set()
    for request in requests:
        await pair.assert_answered(request)
