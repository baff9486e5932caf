from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from pd.v1 import transfer_status_pb2, types_pb2

from pd_common.errors import InternalError, RoomAborted
from pd_common.handoff.state import TransferState
from pd_common.types import BootstrapAddress
from tests.services import stages
from tests.services.pair import Pair, running, soon, state_reached, until
from tests.services.stages import Arrange
from tests.services.tap import Rule, answer_lost, lost, twice

ROOM, NEXT = 7, 8
ONE_CHUNK, THREE_CHUNKS = 6, 20


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with running(Pair()) as pair:
        yield pair


@pytest.mark.parametrize("prompt_tokens", [1, 4, 7, 8, 9, 30], ids=str)
async def test_a_room_is_answered_whatever_its_length(pair: Pair, prompt_tokens: int) -> None:
    await pair.serve(ROOM, prompt_tokens=prompt_tokens)


async def test_an_answer_of_one_token_needs_no_step_of_decode(pair: Pair) -> None:
    await pair.serve(ROOM, new_tokens=1)
    assert pair.decode.engine.steps == 0


async def test_rooms_that_run_at_once_do_not_mix(pair: Pair) -> None:
    requests = [pair.request(room, prompt_tokens=3 * room, new_tokens=3) for room in range(1, 6)]
    for request in requests:
        await pair.submit(request)
    for request in requests:
        await pair.assert_answered(request)


async def test_rooms_wait_for_metadata_slots_and_none_is_lost() -> None:
    async with running(Pair(prefill_slots=1, decode_slots=2)) as pair:
        requests = [pair.request(room) for room in range(1, 7)]
        for request in requests:
            await pair.submit(request)
        for request in requests:
            await pair.assert_answered(request)


async def test_rooms_wait_for_pages_and_none_is_lost() -> None:
    async with running(Pair(prefill_pages=4, decode_pages=7)) as pair:
        requests = [pair.request(room, prompt_tokens=10, new_tokens=6) for room in range(1, 7)]
        for request in requests:
            await pair.submit(request)
        for request in requests:
            await pair.assert_answered(request)


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_either_leg_may_come_first(pair: Pair, first: str) -> None:
    request = pair.request(ROOM)
    if first == "prefill":
        await pair.at_prefill.client.submit(request)
        await state_reached(pair.prefill.transfers, ROOM, TransferState.BOOTSTRAPPING)
        await pair.at_decode.client.submit(request)
    else:
        await pair.at_decode.client.submit(request)
        await state_reached(pair.prefill.transfers, ROOM, TransferState.BOOTSTRAPPING)
        await pair.at_prefill.client.submit(request)
    await pair.assert_answered(request)


def reports(state: types_pb2.TransferState) -> Callable[[Any], bool]:
    """Picks the reports of this state."""

    def applies(request: transfer_status_pb2.ReportTransferRequest) -> bool:
        return request.state == state

    return applies


# --- aborted at every stage: who is told of it, and when; that nothing is left is for test_leaks.py ---


async def test_a_prefill_with_two_names_is_one_prefill(pair: Pair) -> None:
    gate = pair.prefill.engine.shut()
    first = pair.request(ROOM)
    await pair.submit(first)
    await soon(gate.reached.wait())
    second = pair.request(NEXT)
    second = replace(second, bootstrap=BootstrapAddress("localhost", pair.at_prefill.port))
    await pair.submit(second)
    await state_reached(pair.prefill.transfers, NEXT, TransferState.WAITING_FOR_INPUT)
    gate.set()
    await pair.assert_answered(first)
    await pair.assert_answered(second)


async def test_a_room_that_fails_before_the_offer_does_not_keep_prefill_waiting(pair: Pair) -> None:
    go_on = await stopped_at(stages.waiting_for_memory, pair, ONE_CHUNK)
    await pair.at_decode.client.abort(ROOM)
    assert isinstance(await pair.at_decode.client.failure(ROOM), RoomAborted)
    assert isinstance(await pair.at_prefill.client.failure(ROOM), RoomAborted)
    go_on()


BEFORE_THE_OFFER = (stages.pairing, stages.waiting_for_memory)
KNOWN_TO_BOTH = (
    stages.offer_answered_late,
    stages.computing,
    stages.first_write,
    stages.last_write,
    stages.success_on_its_way,
)
AFTER_SUCCESS = (stages.success_answered_late, stages.decoding)
STAGES = (*BEFORE_THE_OFFER, stages.offer_on_its_way, *KNOWN_TO_BOTH, *AFTER_SUCCESS)


@pytest.mark.parametrize("prompt_tokens", [ONE_CHUNK, THREE_CHUNKS], ids=["one chunk", "three chunks"])
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
async def test_abort_on_decode_at_any_stage(pair: Pair, stage: Arrange, prompt_tokens: int) -> None:
    go_on = await stopped_at(stage, pair, prompt_tokens)
    await soon(pair.at_decode.client.abort(ROOM))
    assert isinstance(await pair.at_decode.client.failure(ROOM), RoomAborted)
    if stage in BEFORE_THE_OFFER:  # prefill has not heard of this decode: it is the router that ends this leg
        await soon(pair.at_prefill.client.abort(ROOM))
    go_on()
    if stage not in AFTER_SUCCESS:
        assert isinstance(await pair.at_prefill.client.failure(ROOM), RoomAborted)
    await served_on(pair)


@pytest.mark.parametrize("prompt_tokens", [ONE_CHUNK, THREE_CHUNKS], ids=["one chunk", "three chunks"])
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
async def test_abort_on_prefill_at_any_stage(pair: Pair, stage: Arrange, prompt_tokens: int) -> None:
    go_on = await stopped_at(stage, pair, prompt_tokens)
    aborting = asyncio.create_task(pair.at_prefill.client.abort(ROOM))
    if stage in AFTER_SUCCESS:  # decode has decided: the room stays as it is
        await soon(aborting)
        go_on()
        await pair.assert_answered(pair.request(ROOM, prompt_tokens=prompt_tokens))
        return await served_on(pair)
    assert isinstance(await pair.at_prefill.client.failure(ROOM), RoomAborted)
    if stage in KNOWN_TO_BOTH:  # decode is told at once, however long a write may take to end
        assert isinstance(await pair.at_decode.client.failure(ROOM), RoomAborted)
    go_on()
    await soon(aborting)
    assert isinstance(await pair.at_decode.client.failure(ROOM), RoomAborted)
    return await served_on(pair)


async def stopped_at(stage: Arrange, pair: Pair, prompt_tokens: int) -> Callable[[], None]:
    """Submits the room to both sides and waits until it stands still."""
    hold = stage(pair)
    await pair.submit(pair.request(ROOM, prompt_tokens=prompt_tokens))
    await until(hold.there)
    return hold.go_on


async def served_on(pair: Pair) -> None:
    """What happened is over, nothing is left of it, and it does no harm to the next room."""
    await pair.settled()
    await pair.serve(NEXT)


# --- messages that are lost, late or delivered twice ---


@pytest.mark.parametrize(
    "fate", [partial(lost, 2), partial(answer_lost, 2), twice], ids=["lost", "answer lost", "twice"]
)
@pytest.mark.parametrize("state", [types_pb2.TRANSFER_STATE_TRANSFERRING, types_pb2.TRANSFER_STATE_SUCCESS], ids=str)
async def test_reports_may_be_lost_or_doubled(
    pair: Pair, fate: Callable[..., Rule], state: types_pb2.TransferState
) -> None:
    pair.at_decode.tap.rules["ReportTransfer"] = fate(applies=reports(state))
    await pair.serve(ROOM, prompt_tokens=20)


@pytest.mark.parametrize("fate", [lost, answer_lost], ids=["lost", "answer lost"])
async def test_decode_learns_of_a_failure_though_a_message_is_lost(pair: Pair, fate: Callable[..., Rule]) -> None:
    failed = reports(types_pb2.TRANSFER_STATE_FAILED)
    pair.at_decode.tap.rules["ReportTransfer"] = fate(2, applies=failed)
    pair.prefill.engine.failure = RuntimeError("broken")
    await pair.submit(pair.request(ROOM))
    assert isinstance(await pair.at_prefill.client.failure(ROOM), InternalError)
    assert isinstance(await pair.at_decode.client.failure(ROOM), InternalError)


async def test_an_offer_that_is_delivered_twice_is_one_offer(pair: Pair) -> None:
    pair.at_prefill.tap.rules["AllocatePages"] = twice()
    await pair.serve(ROOM)


@pytest.mark.parametrize("prefill_first", [True, False], ids=["request first", "offer first"])
async def test_an_offer_whose_answer_is_lost_is_repeated(pair: Pair, prefill_first: bool) -> None:
    pair.at_prefill.tap.rules["AllocatePages"] = answer_lost(2)
    request = pair.request(ROOM)
    if prefill_first:
        await pair.submit(request)
    else:
        await pair.at_decode.client.submit(request)
        await state_reached(pair.prefill.transfers, ROOM, TransferState.BOOTSTRAPPING)
        await pair.at_prefill.client.submit(request)
    await pair.assert_answered(request)
    assert pair.at_prefill.tap.passed.count("AllocatePages") == 3
