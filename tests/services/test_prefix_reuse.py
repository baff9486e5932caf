"""Prompts that begin as an earlier one did: what prefill has of them is not computed again, and leaves at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from pd_common.errors import RoomAborted
from pd_common.generation import GenerationRequest
from pd_common.handoff.state import Progress, Transfer, TransferState
from pd_common.transport.fake import FAKE_BOOTSTRAP_HOST
from pd_common.types import BootstrapAddress, BootstrapRoom
from tests.services.byte_engine import PAGE_SIZE, Gate
from tests.services.lives import Growth
from tests.services.pair import Pair, running, soon, state_reached, turns

FIRST, NEXT, LARGE = 7, 8, 9
SHARED = tuple(range(5000, 5018))
WHOLE_PAGES = len(SHARED) // PAGE_SIZE
FORGETFUL = Growth(keeps_prefixes=False)
"""A decode that remembers no prompt, so that everything is sent to it."""


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with running(Pair(growth=FORGETFUL)) as pair:
        yield pair


def sharing(pair: Pair, room: int, more: int = 5) -> GenerationRequest:
    """A prompt that begins with `SHARED`, and goes on in its own way."""
    request = pair.request(room, prompt_tokens=more)
    return replace(request, prompt=(*SHARED, *request.prompt))


async def served(pair: Pair, request: GenerationRequest) -> int:
    """The room's cached tokens, of which both sides must say the same."""
    await pair.submit(request)
    await pair.assert_answered(request)  # no step reads a token whose mark is wrong, on either side
    cached = set()
    for client in (pair.at_prefill.client, pair.at_decode.client):
        *_, last = await client.outputs(request.room)
        assert last.usage is not None
        cached.add(last.usage.cached_tokens)
    (tokens,) = cached
    return tokens


async def test_usage_says_how_much_was_there(pair: Pair) -> None:
    assert await served(pair, sharing(pair, FIRST)) == 0
    assert await served(pair, sharing(pair, NEXT)) == WHOLE_PAGES * PAGE_SIZE
    await pair.settled()
    status = pair.prefill.service.pool_status()
    assert (status.pages_total - status.pages_free, status.pages_cached) == (6, 6)


async def test_prompts_of_another_salt_are_computed(pair: Pair) -> None:
    await served(pair, sharing(pair, FIRST))
    assert await served(pair, replace(sharing(pair, NEXT), cache_salt=b"somebody else")) == 0


async def test_many_rooms_with_the_same_prompt_at_once() -> None:
    async with running(Pair(prefill_pages=14, decode_pages=40, growth=FORGETFUL)) as pair:
        prompt = sharing(pair, FIRST).prompt
        requests = [replace(pair.request(room), prompt=prompt) for room in range(1, 8)]
        for request in requests:
            await pair.submit(request)
        for request in requests:
            await pair.assert_answered(request)
        await pair.settled()
        assert pair.prefill.service.pool_status().pages_cached == len(prompt) // PAGE_SIZE


async def test_what_was_there_leaves_before_anything_is_computed(pair: Pair) -> None:
    await served(pair, sharing(pair, FIRST))
    gate = pair.prefill.engine.shut()
    request = sharing(pair, NEXT)
    sent = asyncio.create_task(progress_reached(pair, NEXT, WHOLE_PAGES))
    await pair.submit(request)
    progress = await sent
    assert (progress.chunks_done, progress.pages_done) == (1, WHOLE_PAGES)
    assert pair.prefill.transfers.get(request.room).state is TransferState.TRANSFERRING
    gate.set()
    await pair.assert_answered(request)


async def progress_reached(pair: Pair, room: int, pages: int) -> Progress:
    reached: asyncio.Future[Progress] = asyncio.get_running_loop().create_future()

    def look(transfer: Transfer) -> None:
        if transfer.room == room and transfer.progress.pages_done >= pages and not reached.done():
            reached.set_result(transfer.progress)

    pair.prefill.transfers.listeners.append(look)
    progress: Progress = await soon(reached)
    pair.prefill.transfers.listeners.remove(look)
    return progress


async def test_shared_pages_that_are_being_read_are_not_given_up() -> None:
    """I3: the room is aborted, its write of cached pages is slow, and the next prompt wants the whole pool."""
    async with running(Pair(prefill_pages=8, decode_pages=40, growth=FORGETFUL)) as pair:
        await served(pair, sharing(pair, FIRST))
        writing = pair.faults.hold = Gate()
        await pair.submit(sharing(pair, NEXT))
        await soon(writing.reached.wait())
        await pair.at_decode.client.abort(NEXT)
        assert isinstance(await pair.at_prefill.client.failure(NEXT), RoomAborted)
        large = pair.request(LARGE, prompt_tokens=8 * PAGE_SIZE)
        await pair.submit(large)
        await state_reached(pair.prefill.transfers, BootstrapRoom(LARGE), TransferState.WAITING_FOR_INPUT)
        await turns()
        assert [job.sequence.request.room for job in pair.prefill.scheduler._waiting] == [LARGE]
        writing.set()
        await pair.assert_answered(large)


async def test_fake_rooms_leave_and_find_prefixes_as_well(pair: Pair) -> None:
    nowhere = BootstrapAddress(FAKE_BOOTSTRAP_HOST, 8998)
    fake = replace(sharing(pair, FIRST), bootstrap=nowhere)
    await pair.at_prefill.client.submit(fake)
    await pair.at_prefill.client.outputs(FIRST)
    assert await served(pair, sharing(pair, NEXT)) == WHOLE_PAGES * PAGE_SIZE
    await pair.at_prefill.client.submit(replace(sharing(pair, LARGE), bootstrap=nowhere))
    await pair.at_prefill.client.outputs(LARGE)
