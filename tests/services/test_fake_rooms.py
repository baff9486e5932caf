"""Rooms whose bootstrap host is 2.2.2.2: both legs run, nothing is paired and nothing moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from pd_common.errors import AllocationConflict, DeadlineExceeded, RoomAborted
from pd_common.generation import FinishReason, GenerationRequest
from pd_common.handoff.state import TransferState
from pd_common.transport.fake import FAKE_BOOTSTRAP_HOST, FakeTransport
from pd_common.types import BootstrapAddress
from tests.services.byte_engine import Gate, answer_tokens
from tests.services.pair import Client, Pair, running, soon, state_reached
from tests.services.tap import held

ROOM, NEXT = 7, 8
CANARY = 0x5A5A5A5A


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with running(Pair()) as pair:
        yield pair


def fake(pair: Pair, room: int, **options: Any) -> GenerationRequest:
    return replace(pair.request(room, **options), bootstrap=BootstrapAddress(FAKE_BOOTSTRAP_HOST, 8998))


async def assert_made_up(client: Client, request: GenerationRequest) -> None:
    outputs = await client.outputs(request.room)
    _, *rest = answer_tokens(len(request.prompt), request.sampling.max_new_tokens)
    assert outputs[-1].error is None
    assert tuple(token for output in outputs for token in output.token_ids) == (request.prompt[-1], *rest)


async def assert_computed(client: Client, request: GenerationRequest) -> None:
    assert [output.finish for output in await client.outputs(request.room)] == [FinishReason.HANDED_OFF]


@pytest.mark.parametrize("prompt_tokens", [1, 4, 9, 30], ids=str)
async def test_both_legs_end_well_and_never_meet(pair: Pair, prompt_tokens: int) -> None:
    request = fake(pair, ROOM, prompt_tokens=prompt_tokens)
    await pair.submit(request)
    await assert_computed(pair.at_prefill.client, request)
    await assert_made_up(pair.at_decode.client, request)
    assert pair.faults.writes == 0
    assert pair.network.ports == {}
    for transfers in (pair.prefill.transfers, pair.decode.transfers):
        assert transfers.get(request.room).state is TransferState.SUCCESS


async def test_each_leg_needs_no_other(pair: Pair) -> None:
    on_prefill, on_decode = fake(pair, ROOM), fake(pair, NEXT)
    await pair.at_prefill.client.submit(on_prefill)
    await pair.at_decode.client.submit(on_decode)
    await assert_computed(pair.at_prefill.client, on_prefill)
    await assert_made_up(pair.at_decode.client, on_decode)


async def test_no_leftovers_are_read(pair: Pair) -> None:
    pool = pair.decode.engine.pool
    pool.fill(range(pool.num_pages), CANARY)
    request = fake(pair, ROOM, prompt_tokens=10, new_tokens=6)
    await pair.at_decode.client.submit(request)
    await assert_made_up(pair.at_decode.client, request)  # the engine reads nothing but zeros and its own marks
    assert sum(not pool.is_filled((page,), CANARY) for page in range(pool.num_pages)) == 4


async def test_real_and_fake_rooms_run_side_by_side(pair: Pair) -> None:
    real = [pair.request(room, prompt_tokens=12) for room in (1, 3, 5)]
    made_up = [fake(pair, room, prompt_tokens=12) for room in (2, 4, 6)]
    for both in zip(real, made_up, strict=True):
        for request in both:
            await pair.submit(request)
    for request in real:
        await pair.assert_answered(request)
    for request in made_up:
        await assert_made_up(pair.at_decode.client, request)


async def test_pages_are_kept_until_they_are_zeros_although_the_room_is_aborted(pair: Pair) -> None:
    gate, pages = pair.decode.engine.shut(), pair.decode.engine.pages
    await pair.at_decode.client.submit(fake(pair, ROOM))
    await soon(gate.reached.wait())
    await pair.at_decode.client.abort(ROOM)
    assert isinstance(await pair.at_decode.client.failure(ROOM), RoomAborted)
    assert pages.num_free < pages.num_pages
    gate.set()
    await pair.settled()


async def test_a_fake_room_is_aborted_on_prefill_as_any_other(pair: Pair) -> None:
    gate = pair.prefill.engine.shut()
    await pair.at_prefill.client.submit(fake(pair, ROOM))
    await soon(gate.reached.wait())
    aborting = asyncio.create_task(pair.at_prefill.client.abort(ROOM))  # answered when the step is over
    assert isinstance(await pair.at_prefill.client.failure(ROOM), RoomAborted)
    gate.set()
    await soon(aborting)
    await pair.settled()
    await pair.serve(NEXT)


async def test_a_fake_room_has_a_deadline(pair: Pair) -> None:
    gate = pair.prefill.engine.shut()
    await pair.at_prefill.client.submit(fake(pair, ROOM, timeout_s=0.01))
    assert isinstance(await pair.at_prefill.client.failure(ROOM), DeadlineExceeded)
    gate.set()


@pytest.mark.parametrize("fake_ends_first", [True, False])
async def test_a_decode_that_means_a_real_room_is_told(pair: Pair, fake_ends_first: bool) -> None:
    """The legs of one room contradict each other: decode must not wait for its deadline."""
    gate = pair.prefill.engine.shut()
    await pair.at_prefill.client.submit(fake(pair, ROOM))
    if fake_ends_first:
        gate.set()
        await assert_computed(pair.at_prefill.client, fake(pair, ROOM))
    await pair.at_decode.client.submit(pair.request(ROOM))
    assert isinstance(await pair.at_decode.client.failure(ROOM), AllocationConflict)
    gate.set()


async def test_a_decode_that_came_first_and_means_a_real_room_is_told(pair: Pair) -> None:
    await pair.at_decode.client.submit(pair.request(ROOM))
    await state_reached(pair.prefill.transfers, ROOM, TransferState.BOOTSTRAPPING)
    await pair.at_prefill.client.submit(fake(pair, ROOM))
    for client in (pair.at_prefill.client, pair.at_decode.client):
        assert isinstance(await client.failure(ROOM), AllocationConflict)
    assert pair.faults.writes == 0


# --- two processes that move nothing ---


@pytest.fixture
async def still_pair() -> AsyncIterator[Pair]:
    still = Pair(new_transport=FakeTransport)
    still.prefill.service._handshake_only = still.decode.handoff._handshake_only = True
    async with running(still) as pair:
        yield pair


@pytest.mark.parametrize("new_tokens", [1, 4])
async def test_a_pair_that_moves_nothing_goes_through_the_whole_handshake(still_pair: Pair, new_tokens: int) -> None:
    still_pair.prefill.engine.shut()  # nothing is computed there
    request = still_pair.request(ROOM, new_tokens=new_tokens)
    await still_pair.submit(request)
    await assert_computed(still_pair.at_prefill.client, request)
    outputs = await still_pair.at_decode.client.outputs(ROOM)
    assert outputs[0].token_ids[0] == request.prompt[-1]
    for transfers in (still_pair.prefill.transfers, still_pair.decode.transfers):
        assert [step.state for step in transfers.get(request.room).timeline][-1] is TransferState.SUCCESS
    assert "AllocatePages" in still_pair.at_prefill.tap.passed
    assert "ReportTransfer" in still_pair.at_decode.tap.passed


async def test_a_pair_that_moves_nothing_can_be_aborted(still_pair: Pair) -> None:
    gate = Gate()
    still_pair.at_prefill.tap.rules["AllocatePages"] = held(gate)
    await still_pair.submit(still_pair.request(ROOM))
    await soon(gate.reached.wait())
    await still_pair.at_prefill.client.abort(ROOM)
    gate.set()
    for client in (still_pair.at_prefill.client, still_pair.at_decode.client):
        assert isinstance(await client.failure(ROOM), RoomAborted)
