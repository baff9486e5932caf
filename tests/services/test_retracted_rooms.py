"""Answers that lose their pages and come back, in a whole pair: by a host copy, by prefill, or computed again here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pd_common.errors import RoomAborted, ShuttingDown
from pd_common.types import BootstrapRoom
from tests.services.byte_engine import Gate
from tests.services.lives import Growth
from tests.services.pair import Pair, running, soon, until
from tests.services.tap import held

ROOM, NEXT = 7, 8
BY_COPY, BY_PREFILL = Growth(retract_every=1), Growth(retract_every=1, host_pages=0)
WAYS = pytest.mark.parametrize("growth", [BY_COPY, BY_PREFILL], ids=["host copy", "prefill"])


@WAYS
@pytest.mark.parametrize("prompt_tokens", [1, 4, 10], ids=str)
async def test_retracted_at_every_step_an_answer_stays_what_it_was(growth: Growth, prompt_tokens: int) -> None:
    async with running(Pair(growth=growth)) as pair:
        await pair.serve(ROOM, prompt_tokens=prompt_tokens, new_tokens=9)
        refetched = [number for number in rooms_of(pair) if number != ROOM]
        assert bool(refetched) is (growth is BY_PREFILL)


@WAYS
async def test_an_answer_alone_is_retracted_and_comes_back(growth: Growth) -> None:
    async with running(Pair(growth=growth)) as pair:
        request = replace(pair.request(ROOM, prompt_tokens=10, new_tokens=9), bootstrap=None)
        await pair.at_decode.client.submit(request)
        await pair.assert_decoded(request)
        assert rooms_of(pair) == [ROOM]


@WAYS
async def test_more_answers_than_the_pool_can_hold_all_end(growth: Growth) -> None:
    crowded = replace(growth, retract_every=0, reserved_tokens=0, keeps_prefixes=False)
    async with running(Pair(decode_pages=14, growth=crowded)) as pair:
        requests = [pair.request(room, prompt_tokens=6, new_tokens=30) for room in range(1, 7)]
        for request in requests:
            await pair.submit(request)
        for request in requests:
            await pair.assert_answered(request)


async def test_usage_and_pieces_do_not_tell_of_a_retraction() -> None:
    ends = []
    for growth in (Growth(), BY_COPY, BY_PREFILL):
        async with running(Pair(growth=growth)) as pair:
            await pair.serve(ROOM, new_tokens=6)
            outputs = await pair.at_decode.client.outputs(ROOM)
            ends.append(([output.token_ids for output in outputs], outputs[-1].usage, outputs[-1].finish))
    assert ends[0] == ends[1] == ends[2]


async def test_a_prefill_that_refuses_is_not_needed() -> None:
    async with running(Pair(growth=BY_PREFILL)) as pair:
        gate = pair.decode.engine.shut()
        request = pair.request(ROOM, new_tokens=6)
        await pair.submit(request)
        await soon(gate.reached.wait())
        pair.prefill.service._stopping = True
        gate.set()
        await pair.assert_answered(request)
        refetches = [pair.decode.transfers.get(BootstrapRoom(number)) for number in rooms_of(pair) if number != ROOM]
        assert {type(transfer.failure) for transfer in refetches} == {ShuttingDown}


async def test_a_prefill_that_is_gone_is_not_needed() -> None:
    async with running(Pair(growth=replace(BY_PREFILL, retract_every=3))) as pair:
        gate = pair.decode.engine.shut()
        request = pair.request(ROOM, new_tokens=9)
        await pair.submit(request)
        await soon(gate.reached.wait())
        prefill = next(iter(pair.decode.prefills._paired.values()))
        await pair.decode.prefills.forget(prefill, "a test says so")
        gate.set()
        await pair.assert_decoded(request)


@pytest.mark.parametrize("method", ["AllocatePages", "ReportTransfer"])
async def test_a_room_that_is_aborted_while_it_is_fetched_again_leaves_nothing(method: str) -> None:
    gate = Gate()
    async with running(Pair(growth=replace(BY_PREFILL, retract_every=3))) as pair:
        stepping = pair.decode.engine.shut()
        await pair.submit(pair.request(ROOM, new_tokens=20))
        await soon(stepping.reached.wait())
        node = pair.at_decode if method == "ReportTransfer" else pair.at_prefill
        node.tap.rules[method] = held(gate)
        stepping.set()
        await soon(gate.reached.wait())
        await pair.at_decode.client.abort(ROOM)
        gate.set()
        assert isinstance(await pair.at_decode.client.failure(ROOM), RoomAborted)


async def test_a_room_that_is_aborted_while_its_copy_waits_for_pages_leaves_nothing() -> None:
    async with running(Pair(growth=replace(BY_COPY, retract_every=3))) as pair:
        stepping = pair.decode.engine.shut()
        await pair.submit(pair.request(ROOM, new_tokens=20))
        await soon(stepping.reached.wait())
        give_back = pair.decode.fill()
        stepping.set()
        await until(lambda: pair.decode.queue.returning == 1)
        assert pair.decode.service.pool_status().pages_on_host > 0
        await pair.at_decode.client.abort(ROOM)
        assert isinstance(await pair.at_decode.client.failure(ROOM), RoomAborted)
        give_back()


async def test_a_prefill_that_was_paired_anew_for_a_room_is_asked_again() -> None:
    async with running(Pair(growth=replace(BY_PREFILL, retract_every=3))) as pair:
        give_back = pair.decode.fill()
        request = pair.request(ROOM, new_tokens=9)
        await pair.submit(request)
        await until(lambda: pair.decode.queue.waiting == 1)
        (prefill,) = pair.decode.prefills._paired.values()
        await pair.decode.prefills.forget(prefill, "a test says so")
        give_back()
        await pair.assert_answered(request)
        assert len(rooms_of(pair)) > 1


async def test_a_room_that_is_aborted_while_it_looks_for_prefill_leaves_nothing_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(Pair(growth=replace(BY_PREFILL, retract_every=3))) as pair:
        stepping = pair.decode.engine.shut()
        await pair.submit(pair.request(ROOM, new_tokens=20))
        await soon(stepping.reached.wait())
        await lost_and_looking(pair, stepping, monkeypatch)
        await pair.at_decode.client.abort(ROOM)


async def test_pages_that_nobody_comes_back_for_are_for_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(Pair(decode_pages=8, growth=replace(BY_PREFILL, retract_every=3, reserved_tokens=0))) as pair:
        stepping = pair.decode.engine.shut()
        await pair.submit(pair.request(ROOM, prompt_tokens=16, new_tokens=10))
        await soon(stepping.reached.wait())
        waiting = replace(pair.request(NEXT, prompt_tokens=20), bootstrap=None)
        await pair.at_decode.client.submit(waiting)
        await until(lambda: pair.decode.queue.waiting == 1)
        await lost_and_looking(pair, stepping, monkeypatch)
        await pair.at_decode.client.abort(ROOM)
        await pair.assert_decoded(waiting)


async def lost_and_looking(pair: Pair, stepping: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The room has lost its pages, prefill has its new request, and decode does not find out which rank has it."""
    looking = Gate()

    async def pair_with(*_: object) -> None:
        await looking.wait()

    monkeypatch.setattr(pair.decode.prefills, "pair_with", pair_with)
    stepping.set()
    await soon(looking.reached.wait())
    await until(lambda: len(pair.prefill.service._rooms) == 1)


def rooms_of(pair: Pair) -> list[int]:
    return [transfer.room for transfer in pair.decode.transfers._by_change.values()]
