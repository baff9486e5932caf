"""How long and how many rooms may wait on prefill, what it says of that, and what it does not take at all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from pd_common.control.waiting import WaitingLimits
from pd_common.errors import CapacityExceeded, InvalidRequest, RoomAborted
from pd_common.generation import GenerationRequest, Load
from pd_common.handoff.state import TransferState
from tests.services.byte_engine import PAGE_SIZE, Gate
from tests.services.pair import Pair, running, soon, state_reached, turns, until

LARGE, ROOM, NEXT, LAST = 7, 8, 9, 10
PAGES = 6


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """One room of `LARGE` holds every page of prefill until the gate is opened."""
    async with running(Pair(prefill_pages=PAGES)) as pair:
        yield pair


async def fill(pair: Pair) -> Gate:
    gate = pair.prefill.engine.shut()
    await pair.submit(pair.request(LARGE, prompt_tokens=PAGES * PAGE_SIZE))
    await soon(gate.reached.wait())
    return gate


def limit(pair: Pair, max_queued: int = 0, queue_timeout_s: float = 300.0) -> None:
    pair.prefill.service._limits = WaitingLimits(max_queued, queue_timeout_s)


async def offered(pair: Pair, request: GenerationRequest) -> None:
    await pair.submit(request)
    await state_reached(pair.prefill.transfers, request.room, TransferState.WAITING_FOR_INPUT)
    await turns()


async def test_a_room_that_waits_too_long_for_pages_is_sent_away_on_both_sides(pair: Pair) -> None:
    gate = await fill(pair)
    limit(pair, queue_timeout_s=0.05)
    await offered(pair, pair.request(ROOM))
    for client in (pair.at_prefill.client, pair.at_decode.client):
        error = await client.failure(ROOM)
        assert isinstance(error, CapacityExceeded)
        assert error.metadata["retry_after_s"] == "1"
    gate.set()
    await pair.assert_answered(pair.request(LARGE, prompt_tokens=PAGES * PAGE_SIZE))


async def test_a_room_that_waits_for_decode_is_not_sent_away(pair: Pair) -> None:
    limit(pair, queue_timeout_s=0.001)
    request = pair.request(ROOM)
    await pair.at_prefill.client.submit(request)
    await turns()
    pair.prefill.service._send_overdue_away(1e9)
    limit(pair)
    await pair.at_decode.client.submit(request)
    await pair.assert_answered(request)


async def test_one_more_than_may_wait_is_refused_and_a_more_urgent_one_takes_the_place_of_another(pair: Pair) -> None:
    gate = await fill(pair)
    limit(pair, max_queued=1)
    await offered(pair, pair.request(ROOM))
    with pytest.raises(CapacityExceeded):
        await pair.at_prefill.client.submit(pair.request(NEXT))
    urgent = replace(pair.request(LAST), priority=1)
    await pair.submit(urgent)
    for client in (pair.at_prefill.client, pair.at_decode.client):
        assert isinstance(await client.failure(ROOM), CapacityExceeded)
    gate.set()
    await pair.assert_answered(urgent)


async def test_decode_learns_of_a_refusal_though_its_offer_came_first(pair: Pair) -> None:
    gate = await fill(pair)
    limit(pair, max_queued=1)
    await offered(pair, pair.request(ROOM))
    await pair.at_decode.client.submit(pair.request(NEXT))
    await state_reached(pair.prefill.transfers, NEXT, TransferState.BOOTSTRAPPING)
    with pytest.raises(CapacityExceeded):
        await pair.at_prefill.client.submit(pair.request(NEXT))
    assert isinstance(await pair.at_decode.client.failure(NEXT), CapacityExceeded)
    gate.set()
    await pair.assert_answered(pair.request(ROOM))


async def test_decode_is_refused_at_once_when_its_offer_comes_for_a_request_that_was_refused(pair: Pair) -> None:
    gate = await fill(pair)
    limit(pair, max_queued=1)
    await offered(pair, pair.request(ROOM))
    with pytest.raises(CapacityExceeded):
        await pair.at_prefill.client.submit(pair.request(NEXT))
    await pair.at_decode.client.submit(pair.request(NEXT))
    assert isinstance(await pair.at_decode.client.failure(NEXT), RoomAborted)
    gate.set()
    await pair.assert_answered(pair.request(ROOM))


async def test_a_request_that_is_refused_for_another_reason_takes_nobodys_place(pair: Pair) -> None:
    gate = await fill(pair)
    limit(pair, max_queued=1)
    await offered(pair, pair.request(ROOM))
    await pair.at_prefill.client.abort(NEXT)
    with pytest.raises(RoomAborted):
        await pair.at_prefill.client.submit(replace(pair.request(NEXT), priority=1))
    gate.set()
    await pair.assert_answered(pair.request(ROOM))


async def test_load_says_what_waits_and_what_could_be_had(pair: Pair) -> None:
    service = pair.prefill.service
    limit(pair, max_queued=5)
    assert service.load() == Load(0, 5, 0.0, 0, PAGES, PAGES)
    gate = await fill(pair)
    await offered(pair, pair.request(ROOM))
    await pair.at_prefill.client.submit(pair.request(NEXT))
    load = service.load()
    assert (load.queued, load.running, load.pages_available) == (2, 1, 0)
    assert load.oldest_wait_s > 0.0
    assert service.pool_status().requests_queued == 2
    gate.set()
    await pair.assert_answered(pair.request(ROOM))
    await until(lambda: service.load().queued == 1)
    assert service.load().oldest_wait_s == 0.0  # for its other leg, that is not for capacity
    await pair.at_decode.client.submit(pair.request(NEXT))
    await pair.assert_answered(pair.request(NEXT))


async def test_a_request_for_one_decode_alone_is_not_for_prefill(pair: Pair) -> None:
    with pytest.raises(InvalidRequest, match="bootstrap_host is required here") as refused:
        await pair.at_prefill.client.submit(replace(pair.request(ROOM), bootstrap=None))
    assert refused.value.metadata["field"] == "bootstrap_host"
