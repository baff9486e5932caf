"""What decode has of a prompt is not sent to it again; what it serves alone it does not compute again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from pd_common.errors import InvalidRequest, RoomAborted
from pd_common.generation import GenerationRequest, Usage
from pd_common.handoff.state import Transfer
from tests.services.byte_engine import PAGE_SIZE, Gate, answer_tokens
from tests.services.pair import Pair, running, soon, turns, until

FIRST, NEXT, THIRD = 7, 8, 9
SHARED = tuple(range(5000, 5018))
WHOLE_PAGES = len(SHARED) // PAGE_SIZE


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with running(Pair(decode_pages=64)) as pair:
        yield pair


def prompting(pair: Pair, room: int, prompt: tuple[int, ...], salt: bytes = b"") -> GenerationRequest:
    return replace(pair.request(room), prompt=prompt, cache_salt=salt)


async def served(pair: Pair, request: GenerationRequest) -> tuple[int, Usage]:
    """Pages that were written for it, and what its client is told."""
    await pair.submit(request)
    await pair.assert_answered(request)  # no step reads a token whose mark is wrong
    *_, last = await pair.at_decode.client.outputs(request.room)
    assert last.usage is not None
    record: Transfer = pair.decode.transfers.get(request.room)
    assert pair.prefill.transfers.get(request.room).progress.pages_done == record.progress.pages_done
    return record.progress.pages_done, last.usage


@pytest.mark.parametrize(("more", "pages"), [(1, 1), (2, 1), (3, 2), (20, 6)])
async def test_only_what_decode_has_not_is_sent(pair: Pair, more: int, pages: int) -> None:
    assert (await served(pair, prompting(pair, FIRST, (*SHARED, 1))))[0] == WHOLE_PAGES + 1
    tail = tuple(range(100, 100 + more))
    sent, usage = await served(pair, prompting(pair, NEXT, (*SHARED, *tail)))
    assert (sent, usage.cached_tokens) == (pages, WHOLE_PAGES * PAGE_SIZE)


async def test_a_whole_prompt_that_is_there_brings_its_first_token_and_no_page(pair: Pair) -> None:
    prompt = SHARED[: WHOLE_PAGES * PAGE_SIZE]
    assert await served(pair, prompting(pair, FIRST, prompt)) == (WHOLE_PAGES, Usage(16, 4, 0))
    # One engine alone computes the last token again, so it has all pages but the last.
    assert await served(pair, prompting(pair, NEXT, prompt)) == (0, Usage(16, 4, (WHOLE_PAGES - 1) * PAGE_SIZE))


async def test_a_cold_prompt_has_nothing_cached(pair: Pair) -> None:
    _, usage = await served(pair, prompting(pair, FIRST, SHARED))
    assert usage.cached_tokens == 0


async def test_an_answer_is_there_for_the_next_turn(pair: Pair) -> None:
    first = prompting(pair, FIRST, SHARED)
    await served(pair, first)
    conversation = (*SHARED, *answer_tokens(len(SHARED), 4), 1, 2, 3)
    sent, usage = await served(pair, prompting(pair, NEXT, conversation))
    kept = (len(SHARED) + 3) // PAGE_SIZE * PAGE_SIZE  # nobody computes the KV of an answer's last token
    assert (sent, usage.cached_tokens) == (-(-(len(conversation) - kept) // PAGE_SIZE), kept)


async def test_another_salt_shares_nothing(pair: Pair) -> None:
    await served(pair, prompting(pair, FIRST, SHARED))
    sent, usage = await served(pair, prompting(pair, NEXT, SHARED, b"another tenant"))
    assert (sent, usage.cached_tokens) == (WHOLE_PAGES + 1, 0)


async def test_a_prompt_that_is_still_answered_is_there_already(pair: Pair) -> None:
    gate = pair.decode.engine.shut()
    first = prompting(pair, FIRST, SHARED)
    await pair.submit(first)
    await soon(gate.reached.wait())
    second = prompting(pair, NEXT, (*SHARED, 1))
    await pair.submit(second)
    await until(lambda: pair.decode.scheduler.running == 2)
    assert pair.decode.transfers.get(second.room).progress.pages_done == 1
    gate.set()
    await pair.assert_answered(first)
    await pair.assert_answered(second)


async def test_a_room_in_quarantine_keeps_its_own_pages_and_no_shared_ones(pair: Pair) -> None:
    """I2: what was never offered was never written, and is free for others at once."""
    await served(pair, prompting(pair, FIRST, SHARED))
    writing = pair.faults.hold = Gate()
    await pair.submit(prompting(pair, NEXT, (*SHARED, 1, 2, 3)))
    await soon(writing.reached.wait())
    await pair.at_decode.client.abort(NEXT)
    assert isinstance(await pair.at_decode.client.failure(NEXT), RoomAborted)
    await until(lambda: bool(pair.decode.service.quarantined()))
    (held,) = pair.decode.service.quarantined()
    assert len(held.pages) == 2
    await turns()
    pair.decode.memory.check_integrity()
    writing.set()
    sent, _ = await served(pair, prompting(pair, THIRD, (*SHARED, 1, 2, 3)))
    assert sent == 2


async def test_cached_pages_make_way_for_a_prompt_that_needs_them() -> None:
    async with running(Pair(decode_pages=12, prefill_pages=64)) as pair:
        await served(pair, prompting(pair, FIRST, SHARED))
        assert pair.decode.service.pool_status().pages_cached > 0
        await served(pair, prompting(pair, NEXT, tuple(range(44))))
        sent, _ = await served(pair, prompting(pair, THIRD, SHARED))
        assert sent == WHOLE_PAGES + 1


# --- alone ---


def alone(pair: Pair, room: int, prompt: tuple[int, ...]) -> GenerationRequest:
    return replace(prompting(pair, room, prompt), bootstrap=None)


async def served_alone(pair: Pair, request: GenerationRequest) -> Usage:
    await pair.at_decode.client.submit(request)
    await pair.assert_decoded(request)
    *_, last = await pair.at_decode.client.outputs(request.room)
    assert last.usage is not None
    return last.usage


@pytest.mark.parametrize("length", [1, 4, 7, 8, 9, 30], ids=str)
async def test_a_decode_alone_serves_a_prompt_of_any_length(pair: Pair, length: int) -> None:
    assert await served_alone(pair, alone(pair, FIRST, tuple(range(length)))) == Usage(length, 4, 0)
    assert pair.prefill.engine.steps == 0


async def test_alone_as_much_is_cached_as_usage_says(pair: Pair) -> None:
    prompt = SHARED[: WHOLE_PAGES * PAGE_SIZE]
    await served_alone(pair, alone(pair, FIRST, prompt))
    usage = await served_alone(pair, alone(pair, NEXT, prompt))
    assert usage.cached_tokens == (WHOLE_PAGES - 1) * PAGE_SIZE


async def test_what_was_handed_over_is_there_for_a_prompt_that_is_served_alone(pair: Pair) -> None:
    await served(pair, prompting(pair, FIRST, SHARED))
    assert (await served_alone(pair, alone(pair, NEXT, (*SHARED, 1)))).cached_tokens == WHOLE_PAGES * PAGE_SIZE
    assert (await served(pair, prompting(pair, THIRD, (*SHARED, 2))))[0] == 1


async def test_a_room_alone_can_be_aborted_while_its_prompt_is_computed(pair: Pair) -> None:
    gate = pair.decode.engine.shut()
    await pair.at_decode.client.submit(alone(pair, FIRST, SHARED))
    await soon(gate.reached.wait())
    await pair.at_decode.client.abort(FIRST)
    assert isinstance(await pair.at_decode.client.failure(FIRST), RoomAborted)
    gate.set()


async def test_prefill_takes_no_request_without_a_meeting_place(pair: Pair) -> None:
    with pytest.raises(InvalidRequest, match="bootstrap_host is required"):
        await pair.at_prefill.client.submit(alone(pair, FIRST, SHARED))
