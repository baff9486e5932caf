"""Each trouble is made for real between a prefill and a decode over gRPC, and the doctor names it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from pd_common.control.bootstrap_client import BootstrapClient
from pd_common.errors import DeadlineExceeded
from pd_common.generation import GenerationRequest
from pd_common.handoff.deadlines import Timeouts
from pd_common.handoff.state import Progress, TransferState
from pd_common.inspection.diagnoses.finding import Kind, Severity
from pd_common.transport.loopback import Drop
from pd_common.types import BootstrapRoom, RankPosition
from tests.inspection.inspected import InspectedPair
from tests.services.byte_engine import PAGE_SIZE, Gate
from tests.services.lives import Growth
from tests.services.messages import SUCCESS, be_impatient
from tests.services.pair import running, soon, state_reached, until
from tests.services.tap import PassOn, held

ROOM, OTHER = 7, 8
USUAL_PATIENCE_S = 5.0
SLOW_S = 0.3
"""A wait long enough to be told from what a busy machine does to a room."""


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_impatient(monkeypatch)


@pytest.fixture
async def pair() -> AsyncIterator[InspectedPair]:
    async with running(InspectedPair()) as pair:
        assert isinstance(pair, InspectedPair)
        yield pair


async def submitted_and_held(pair: InspectedPair, room: int = ROOM, **options: Any) -> Gate:
    """The room's first write has begun; no byte of it moves before the gate is set."""
    gate = pair.faults.hold = Gate()
    await pair.submit(pair.request(room, **options))
    await soon(gate.reached.wait())
    return gate


def of_room(request: GenerationRequest, room: int) -> GenerationRequest:
    return replace(request, room=BootstrapRoom(room))


async def test_nothing_is_wrong_with_a_pair_that_serves(pair: InspectedPair) -> None:
    await pair.serve(ROOM)
    assert await pair.findings(patience_s=USUAL_PATIENCE_S) == {}
    assert await pair.findings(ROOM, USUAL_PATIENCE_S) == {}


# --- before anything is written ---


@pytest.mark.parametrize("same_rid", [True, False])
async def test_two_legs_with_different_room_numbers_are_brought_together(pair: InspectedPair, same_rid: bool) -> None:
    request = pair.request(ROOM)
    at_decode = replace(of_room(request, OTHER), rid=request.rid if same_rid else "another")
    await pair.at_prefill.client.submit(request)
    await pair.at_decode.client.submit(at_decode)
    await state_reached(pair.prefill.transfers, OTHER, TransferState.BOOTSTRAPPING)
    found = await pair.findings()
    assert set(found[Kind.ROOM_IDS_DIFFER].rooms) == {ROOM, OTHER}
    assert ("are one request" in found[Kind.ROOM_IDS_DIFFER].why) == same_rid
    assert f"pdctl abort {ROOM}" in " ".join(found[Kind.ROOM_IDS_DIFFER].do)
    assert set((await pair.findings(OTHER))[Kind.ROOM_IDS_DIFFER].rooms) == {OTHER}
    await pair.at_prefill.client.abort(ROOM)
    await pair.at_decode.client.abort(OTHER)


async def test_a_leg_that_never_comes_is_missed_also_when_the_other_has_been_given_up() -> None:
    async with running(InspectedPair(timeouts=Timeouts(0.2, 300.0))) as pair:
        assert isinstance(pair, InspectedPair)
        await pair.at_prefill.client.submit(pair.request(ROOM))
        found = await pair.findings()
        assert found[Kind.LEG_MISSING].severity is Severity.STUCK
        assert isinstance(await pair.at_prefill.client.failure(ROOM), DeadlineExceeded)
        found = await pair.findings()
        assert found[Kind.LEG_MISSING].severity is Severity.FAILED
        assert any("no decode has a request for room 7" in seen for seen in found[Kind.LEG_MISSING].seen)


async def test_a_room_that_waits_for_memory_is_told_from_one_that_waits_for_a_copy(pair: InspectedPair) -> None:
    give_back = pair.decode.fill()
    await pair.submit(pair.request(ROOM))
    await state_reached(pair.prefill.transfers, ROOM, TransferState.BOOTSTRAPPING)
    await until(lambda: pair.decode.queue.waiting == 1)
    finding = (await pair.findings())[Kind.PAGES_NOT_OFFERED]
    assert "0 of 32 pages" in " ".join(finding.seen)
    assert "--kv-cache-tokens" in " ".join(finding.do)
    await asyncio.sleep(SLOW_S)
    give_back()
    await pair.assert_answered(pair.request(ROOM))
    finding = (await pair.findings(patience_s=SLOW_S))[Kind.NO_COPY]
    assert finding.severity is Severity.SLOW
    assert any("had memory" in seen for seen in finding.seen), "it names the wait that took longest"


async def test_a_list_of_pages_that_does_not_reach_prefill_is_told_from_one_that_is_not_made(
    pair: InspectedPair,
) -> None:
    gate = Gate()
    pair.at_prefill.tap.rules["AllocatePages"] = held(gate)
    await pair.submit(pair.request(ROOM))
    await soon(gate.reached.wait())
    finding = (await pair.findings())[Kind.PAGES_NOT_OFFERED]
    assert finding.title == "Decode's list of pages does not reach prefill"
    gate.set()
    await pair.assert_answered(pair.request(ROOM))


async def test_a_prefill_that_cannot_be_paired_is_named(pair: InspectedPair) -> None:
    pair.prefill.canary_faults.hold = gate = Gate()
    await pair.submit(pair.request(ROOM))
    await soon(gate.reached.wait())
    finding = (await pair.findings())[Kind.NOT_REGISTERED]
    assert "in pd.peering" in " ".join(finding.seen)
    gate.set()
    await pair.assert_answered(pair.request(ROOM))


async def test_a_directory_with_an_empty_place_is_named_by_itself_and_by_the_rooms_that_met_it(
    pair: InspectedPair,
) -> None:
    bootstrap = BootstrapClient(pair.at_prefill.connection)
    (rank,) = (await bootstrap.get_topology()).ranks
    await bootstrap.unregister_rank(rank.instance)
    await bootstrap.register_rank(replace(rank, position=RankPosition(0, 2)))
    await pair.at_decode.client.submit(pair.request(ROOM))
    await pair.at_decode.client.failure(ROOM)
    finding = (await pair.findings())[Kind.NOT_REGISTERED]
    assert finding.severity is Severity.DOWN
    assert finding.seen == (
        f"directory of prefill {pair.at_prefill.address.target}: 1 of 2 ranks have registered",
        f"room {ROOM}: 1 of 2 ranks have registered",
    )


# --- on the way ---


async def test_a_write_that_does_not_end_is_seen_and_so_is_the_memory_that_it_keeps() -> None:
    async with running(InspectedPair(prefill_pages=8)) as pair:
        assert isinstance(pair, InspectedPair)
        gate = await submitted_and_held(pair, prompt_tokens=20)
        found = await pair.findings()
        assert found[Kind.TRANSFER_STALLED].title == "Pages have stopped moving"
        assert any("carried" in seen or "pages travel by" in seen for seen in found[Kind.TRANSFER_STALLED].seen)
        assert found[Kind.PREFILL_MEMORY].rooms == (ROOM,)
        assert "of 8 pages in use, about 5 of them by rooms that do not end" in found[Kind.PREFILL_MEMORY].seen[0]
        assert Kind.PREFILL_MEMORY in await pair.findings(ROOM)
        gate.set()
        await pair.assert_answered(pair.request(ROOM, prompt_tokens=20))


async def test_a_write_that_outlives_its_room_keeps_memory_too() -> None:
    async with running(InspectedPair(prefill_pages=8)) as pair:
        assert isinstance(pair, InspectedPair)
        pair.faults.drop = Drop.HANG
        await pair.submit(pair.request(ROOM, prompt_tokens=20))
        await state_reached(pair.prefill.transfers, ROOM, TransferState.TRANSFERRING)
        aborting = asyncio.create_task(pair.at_decode.client.abort(ROOM))
        await state_reached(pair.prefill.transfers, ROOM, TransferState.FAILED)
        found = await pair.findings()
        assert found[Kind.PREFILL_MEMORY].rooms == (ROOM,)
        assert Kind.QUARANTINE in found, "nor can decode use its pages again"
        pair.faults.release.set()
        await soon(aborting)


async def test_a_decode_that_does_not_answer_is_told_from_a_link_that_stands_still(pair: InspectedPair) -> None:
    gate = Gate()
    pair.at_decode.tap.rules["ReportTransfer"] = held(gate, applies=SUCCESS.applies)
    await pair.submit(pair.request(ROOM))
    await soon(gate.reached.wait())
    finding = (await pair.findings())[Kind.TRANSFER_STALLED]
    assert finding.title == "Decode does not confirm what was written"
    gate.set()
    await pair.assert_answered(pair.request(ROOM))


async def test_a_room_that_was_given_up_in_a_stalled_write_is_no_mere_deadline(pair: InspectedPair) -> None:
    gate = await submitted_and_held(pair, timeout_s=0.3)
    assert isinstance(await pair.at_decode.client.failure(ROOM), DeadlineExceeded)
    await state_reached(pair.prefill.transfers, ROOM, TransferState.FAILED)
    finding = (await pair.findings(ROOM))[Kind.TRANSFER_STALLED]
    assert finding.severity is Severity.FAILED
    gate.set()


async def test_a_write_that_fails_is_the_data_planes(pair: InspectedPair) -> None:
    pair.faults.drop = Drop.FAIL
    await pair.submit(pair.request(ROOM))
    await pair.at_decode.client.failure(ROOM)
    assert Kind.TRANSFER_BROKEN in await pair.findings()


async def test_a_slow_room_is_told_from_others_between_the_same_two(pair: InspectedPair) -> None:
    for room in (1, 2, 3):
        await pair.serve(room)
    gate = await submitted_and_held(pair)
    await asyncio.sleep(1.1)  # less would be no slow link
    gate.set()
    await pair.assert_answered(pair.request(ROOM))
    finding = (await pair.findings(patience_s=USUAL_PATIENCE_S))[Kind.SLOW_WRITES]
    assert finding.rooms == (ROOM,)
    assert any("3 other rooms" in seen for seen in finding.seen)


async def test_pages_in_many_small_pieces_are_noticed() -> None:
    """Every second page of decode is in other hands: rooms of one page, half of which have been answered."""
    growth = Growth(reserved_tokens=0, keeps_prefixes=False)
    sizes = {"prefill_pages": 80, "decode_pages": 44, "prefill_slots": 48, "decode_slots": 48, "chunk_tokens": 64}
    pair = InspectedPair(**sizes, growth=growth)
    async with running(pair):
        gates: dict[int, Gate] = {}
        for room in range(101, 141):
            gates[room] = await submitted_and_held(pair, room, prompt_tokens=PAGE_SIZE - 1, new_tokens=1)
        pair.faults.hold = None
        for room in range(101, 141, 2):
            gates[room].set()
            await pair.at_decode.client.outputs(room)
        await pair.serve(ROOM, prompt_tokens=20 * PAGE_SIZE)
        finding = (await pair.findings(ROOM))[Kind.FRAGMENTED]
        assert "20 pages" in finding.seen[0]
        for gate in gates.values():
            gate.set()


# --- how rooms end ---


@pytest.mark.parametrize("write", [1, 2])
async def test_pages_that_arrive_changed_come_first(pair: InspectedPair, write: int) -> None:
    pair.faults.flip_in_write = write
    await pair.submit(pair.request(ROOM, prompt_tokens=20))
    await pair.at_decode.client.failure(ROOM)
    kind, finding = next(iter((await pair.findings()).items()))
    assert (kind, finding.title) == (Kind.WRONG_DATA, "Pages arrived changed")


async def test_a_slot_that_holds_another_room_is_told_from_changed_pages(pair: InspectedPair) -> None:
    gate = await submitted_and_held(pair)
    liar = pair.prefill.instance
    await soon(
        pair.at_decode.peer_client.report_transfer(
            BootstrapRoom(ROOM),
            reporter=liar,
            recipient=pair.decode.instance,
            sequence=99,
            state=TransferState.SUCCESS,
            progress=Progress(1, 1, 1),
            ticket=b"",
        )
    )
    finding = (await pair.findings())[Kind.WRONG_DATA]
    assert finding.title == "The metadata slot is not this room's"
    gate.set()


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_whoever_aborted_a_room_is_named(pair: InspectedPair, side: str) -> None:
    gate = await submitted_and_held(pair)
    node = getattr(pair, f"at_{side}")
    aborting = asyncio.create_task(node.client.abort(ROOM))
    for life in (pair.prefill, pair.decode):
        await state_reached(life.transfers, ROOM, TransferState.FAILED)
    gate.set()
    await soon(aborting)
    finding = (await pair.findings(ROOM))[Kind.ABORTED]
    assert finding.severity is Severity.NOTE
    assert f"room {ROOM}: it was aborted at {side} {node.address.target}: AbortRoom by hand" in finding.seen
    assert f"room {ROOM}: rid r{ROOM}" in finding.seen
    assert Kind.ABORTED not in await pair.findings(), "one is everyday"


async def test_who_owes_a_proof_is_named_as_long_as_pages_are_in_quarantine(pair: InspectedPair) -> None:
    proof, writing = Gate(), await submitted_and_held(pair)
    pair.at_prefill.tap.rules["AbortRoom"] = held(proof)
    await pair.decode.prefills.forget(pair.decode.prefills._paired[pair.prefill.instance], "no beat")
    await pair.at_decode.client.failure(ROOM)
    await until(lambda: BootstrapRoom(ROOM) in pair.decode.drain.quarantine)
    finding = (await pair.findings(ROOM))[Kind.QUARANTINE]
    assert finding.rooms == (ROOM,)
    assert pair.prefill.instance.instance_id in " ".join(finding.seen)
    proof.set()
    writing.set()
    await until(lambda: not pair.decode.drain.quarantine.held)
    assert Kind.QUARANTINE not in await pair.findings()


# --- what is no room's ---


@pytest.mark.parametrize(("ahead_s", "words"), [(3.0, "ahead of"), (-3.0, "behind")])
async def test_a_clock_that_is_apart_is_measured(pair: InspectedPair, ahead_s: float, words: str) -> None:
    async def apart(_: Any, pass_on: PassOn) -> Any:
        answer = await pass_on()
        answer.now.FromNanoseconds(time.time_ns() + round(ahead_s * 1e9))
        return answer

    pair.at_decode.tap.rules["GetProcess"] = apart
    finding = (await pair.findings())[Kind.CLOCKS_DIFFER]
    (seen,) = finding.seen
    measured = re.fullmatch(rf"decode {pair.at_decode.address.target} is (\d\.\d+) s {words} this host \(.*\)", seen)
    assert measured is not None, seen
    assert float(measured[1]) == pytest.approx(3.0, abs=0.1)
