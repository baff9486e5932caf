"""Prompts that are computed before decode has offered memory for them: they yield, and nothing of them is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from pd_common.engine.engine import Engine
from pd_common.engine.request import Sequence
from pd_common.errors import DeadlineExceeded, InternalError, RoomAborted
from pd_common.handoff.state import TransferState
from pd_common.types import BootstrapRoom
from services.prefill.job import Job
from services.prefill.scheduler import PrefillScheduler
from tests.control.serving import make_request
from tests.services.byte_engine import Gate
from tests.services.fake_engine import PAGE_SIZE, FakeEngine
from tests.services.pair import Pair, running, soon, state_reached, turns, until
from tests.services.tap import held

NUM_PAGES = 16
CHUNK_TOKENS = 7
"""No whole number of pages."""
GUESS, SURE, OTHER = 1, 2, 3
PROMPT = tuple(range(26))
"""Four chunks."""

Start = Callable[[int], PrefillScheduler]


@pytest.fixture
async def engine() -> FakeEngine:
    return FakeEngine(NUM_PAGES)


@pytest.fixture
async def start(engine: FakeEngine) -> AsyncIterator[Start]:
    """Runs an audited scheduler for so many prompts at a time; when the test is over no page may be in use."""
    loops: list[asyncio.Task[None]] = []

    def start(max_running: int) -> PrefillScheduler:
        prefixes = engine.prefixes
        scheduler = PrefillScheduler(cast("Engine", engine), prefixes, CHUNK_TOKENS, max_running, audited=True)
        loops.append(asyncio.create_task(scheduler.run()))
        return scheduler

    yield start
    for loop in loops:
        assert not loop.done()
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
    assert engine.free_pages == NUM_PAGES


def sequence(room: int, num_tokens: int = 0, priority: int = 0) -> Sequence:
    """`PROMPT`, or one of so many tokens that has nothing in common with those of other rooms."""
    tokens = tuple(range(100 * room, 100 * room + num_tokens)) if num_tokens else PROMPT
    return Sequence(replace(make_request(room, tokens), priority=priority))


async def run_steps(engine: FakeEngine, room: int, count: int) -> None:
    """So many steps, each of them with this room alone; the last one's end is still to be noticed."""
    for _ in range(count):
        step = await engine.next_step()
        assert step.rooms == [room]
        step.finish()


async def chunks_of(job: Job) -> list[tuple[int, int]]:
    """All of a prompt that is computed or will be; the last one comes with the token."""
    chunks = []
    while True:
        chunk = await soon(job.next_chunk())
        chunks.append((chunk.start, chunk.end))
        if chunk.sampled is not None:
            assert chunk.sampled.token_id == 1000 + len(job.sequence.request.prompt)
            return chunks


def follow_each_other(chunks: list[tuple[int, int]], tokens: int) -> bool:
    ends = [end for _, end in chunks]
    return [start for start, _ in chunks] == [0, *ends[:-1]] and ends[-1] == tokens


# --- yielding ---


@pytest.mark.parametrize("done", [1, 2, 3, 4], ids="rolled back after chunk {}".format)
async def test_a_rollback_after_any_chunk_loses_only_the_page_that_is_not_full(
    engine: FakeEngine, start: Start, done: int
) -> None:
    scheduler = start(1)
    job = scheduler.expect(sequence(GUESS), attempts=2)
    await run_steps(engine, GUESS, done)
    sure = scheduler.enqueue(sequence(SURE, 3))
    await run_steps(engine, SURE, 1)
    assert (job.sequence.pages, job.sequence.computed, job.sequence.output) == ([], 0, [])
    assert (job.turn.is_set(), job.cached_tokens) == (False, 0)
    await scheduler.release(sure)
    scheduler.promise(job)
    cached = min(done * CHUNK_TOKENS, len(PROMPT) - 1) // PAGE_SIZE * PAGE_SIZE
    await run_steps(engine, GUESS, -(-(len(PROMPT) - cached) // CHUNK_TOKENS))
    chunks = await chunks_of(job)
    assert chunks[0] == (0, cached)
    assert follow_each_other(chunks, len(PROMPT))
    assert job.cached_tokens == 0, "nobody else had computed it"
    await scheduler.release(job)


async def test_what_others_had_computed_of_it_counts_as_cached_and_what_it_had_left_itself_does_not(
    engine: FakeEngine, start: Start
) -> None:
    scheduler = start(1)
    earlier = scheduler.enqueue(Sequence(make_request(9, PROMPT[: 2 * PAGE_SIZE])))
    await run_steps(engine, 9, -(-2 * PAGE_SIZE // CHUNK_TOKENS))
    await scheduler.release(earlier)
    job = scheduler.expect(sequence(GUESS), attempts=2)
    await run_steps(engine, GUESS, 1)
    sure = scheduler.enqueue(sequence(SURE, 3))
    await run_steps(engine, SURE, 1)
    await scheduler.release(sure)
    scheduler.promise(job)
    left = (2 * PAGE_SIZE + CHUNK_TOKENS) // PAGE_SIZE * PAGE_SIZE
    assert left > 2 * PAGE_SIZE
    await run_steps(engine, GUESS, -(-(len(PROMPT) - left) // CHUNK_TOKENS))
    assert (await chunks_of(job))[0] == (0, left)
    assert job.cached_tokens == 2 * PAGE_SIZE
    await scheduler.release(job)


async def test_a_rollback_at_every_chunk_of_one_prompt(engine: FakeEngine, start: Start) -> None:
    scheduler = start(1)
    job = scheduler.expect(sequence(GUESS), attempts=10)
    step = await engine.next_step()
    starts = []
    for number in range(4):
        starts.append(step.spans[0][1])
        sure = scheduler.enqueue(sequence(10 + number, 3))
        step.finish()
        await run_steps(engine, 10 + number, 1)
        assert (job.cached_tokens, job.attempts_left) == (0, 9 - number)
        await scheduler.release(sure)
        step = await engine.next_step()
    assert starts == [0, 4, 8, 12]
    scheduler.promise(job)
    step.finish()
    await run_steps(engine, GUESS, 1)
    assert await chunks_of(job) == [(0, 16), (16, 23), (23, 26)]
    await scheduler.release(job)


async def test_promised_prompts_have_the_next_step_and_others_keep_their_pages_if_there_is_room(
    engine: FakeEngine, start: Start
) -> None:
    scheduler = start(4)
    job = scheduler.expect(sequence(GUESS), attempts=1)
    step = await engine.next_step()
    sure = scheduler.enqueue(sequence(SURE, 20))
    step.finish()
    await run_steps(engine, SURE, 3)
    assert (job.sequence.computed, len(job.sequence.pages)) == (CHUNK_TOKENS, 7)
    await run_steps(engine, GUESS, 3)
    scheduler.promise(job)
    assert follow_each_other(await chunks_of(job), len(PROMPT))
    await scheduler.release(sure)
    await scheduler.release(job)


async def test_who_yields_pages_is_the_last_in_order_and_no_more_than_are_needed(
    engine: FakeEngine, start: Start
) -> None:
    scheduler = start(4)
    urgent = scheduler.expect(sequence(GUESS, 20, priority=1), attempts=1)
    first, last = (scheduler.expect(sequence(room, 20), attempts=1) for room in (OTHER, OTHER + 1))
    step = await engine.next_step()
    assert [len(job.sequence.pages) for job in (urgent, first, last)] == [5, 5, 5]
    sure = scheduler.enqueue(sequence(SURE, 20))
    step.finish()
    await run_steps(engine, SURE, 3)
    assert [len(job.sequence.pages) for job in (urgent, first, last)] == [5, 5, 0]
    step = await engine.next_step()
    leaving = [asyncio.create_task(scheduler.release(job)) for job in (sure, last, first, urgent)]
    await turns(1)
    step.finish()
    await soon(asyncio.gather(*leaving))


async def test_one_that_is_promised_meanwhile_keeps_its_pages_and_an_earlier_one_that_is_not_yields(
    engine: FakeEngine, start: Start
) -> None:
    scheduler = start(4)
    guess, promised = (scheduler.expect(sequence(room, 24), attempts=1) for room in (GUESS, OTHER))
    step = await engine.next_step()
    scheduler.promise(promised)
    sure = scheduler.enqueue(sequence(SURE, 24))
    step.finish()
    step = await engine.next_step()
    assert [len(job.sequence.pages) for job in (guess, promised, sure)] == [0, 6, 6]
    leaving = [asyncio.create_task(scheduler.release(job)) for job in (guess, promised, sure)]
    await turns(1)
    step.finish()
    await soon(asyncio.gather(*leaving))


async def test_nothing_is_begun_on_a_guess_while_promised_prompts_are_computed(
    engine: FakeEngine, start: Start
) -> None:
    scheduler = start(4)
    sure = scheduler.enqueue(sequence(SURE, 20))
    step = await engine.next_step()
    job = scheduler.expect(sequence(GUESS), attempts=1)
    step.finish()
    await run_steps(engine, SURE, 1)
    assert job.sequence.pages == []
    await run_steps(engine, SURE, 1)
    await run_steps(engine, GUESS, 4)
    await scheduler.release(sure)
    await scheduler.release(job)


@pytest.mark.parametrize("attempts", [0, 1, 3])
async def test_a_prompt_without_attempts_left_waits_for_its_offer(
    engine: FakeEngine, start: Start, attempts: int
) -> None:
    scheduler = start(1)
    job = scheduler.expect(sequence(GUESS), attempts)
    for number in range(attempts):
        step = await engine.next_step()
        assert step.rooms == [GUESS]
        sure = scheduler.enqueue(sequence(10 + number, 3))
        step.finish()
        await run_steps(engine, 10 + number, 1)
        await scheduler.release(sure)
    assert await engine.is_idle()
    scheduler.promise(job)
    while not job.sequence.output:
        await run_steps(engine, GUESS, 1)
        await turns()
    assert follow_each_other(await chunks_of(job), len(PROMPT))
    await scheduler.release(job)


# --- parked, promised, released ---


async def test_a_parked_prompt_gives_everything_at_once_when_it_is_promised(engine: FakeEngine, start: Start) -> None:
    scheduler = start(4)
    job = scheduler.expect(sequence(GUESS), attempts=1)
    await run_steps(engine, GUESS, 4)
    assert await engine.is_idle()
    scheduler.promise(job)
    assert await chunks_of(job) == [(0, 7), (7, 14), (14, 21), (21, 26)]
    await scheduler.release(job)


async def test_a_parked_prompt_yields_its_place(engine: FakeEngine, start: Start) -> None:
    scheduler = start(1)
    job = scheduler.expect(sequence(GUESS), attempts=2)
    await run_steps(engine, GUESS, 4)
    assert await engine.is_idle()
    sure = scheduler.enqueue(sequence(SURE, 3))
    await run_steps(engine, SURE, 1)
    await scheduler.release(sure)
    step = await engine.next_step()
    assert step.spans == [(GUESS, 24, 26, True)]  # its whole pages were kept
    step.finish()
    await scheduler.release(job)


async def test_an_offer_in_the_middle_of_a_chunk_ends_the_yielding(engine: FakeEngine, start: Start) -> None:
    scheduler = start(1)
    job = scheduler.expect(sequence(GUESS), attempts=1)
    step = await engine.next_step()
    sure = scheduler.enqueue(sequence(SURE, 3))
    scheduler.promise(job)
    step.finish()
    await run_steps(engine, GUESS, 3)
    assert follow_each_other(await chunks_of(job), len(PROMPT))
    assert sure.sequence.pages == []
    await scheduler.release(job)
    await run_steps(engine, SURE, 1)
    await scheduler.release(sure)


@pytest.mark.parametrize("when", ["in a step", "parked", "rolled back"])
async def test_a_prompt_whose_offer_never_comes_leaves_nothing_in_use(
    engine: FakeEngine, start: Start, when: str
) -> None:
    scheduler = start(1)
    job = scheduler.expect(sequence(GUESS), attempts=5)
    step = await engine.next_step()
    if when == "in a step":
        releasing = asyncio.create_task(scheduler.release(job))
        assert await engine.is_idle()
        assert engine.free_pages == NUM_PAGES - 7
        step.finish()
        await soon(releasing)
        return
    sure = scheduler.enqueue(sequence(SURE, 3)) if when == "rolled back" else None
    step.finish()
    if sure is None:
        await run_steps(engine, GUESS, 3)
    else:
        await run_steps(engine, SURE, 1)
    await scheduler.release(job)
    if sure is not None:
        await scheduler.release(sure)
    assert await engine.is_idle()


async def test_a_step_that_fails_before_the_offer_is_computed_again_after_it(engine: FakeEngine, start: Start) -> None:
    """Nobody has asked yet for what has failed; nothing of it is kept."""
    scheduler = start(4)
    job = scheduler.expect(sequence(GUESS), attempts=5)
    await run_steps(engine, GUESS, 1)
    (await engine.next_step()).fail(InternalError("the model's logits are not finite"))
    assert await engine.is_idle()
    assert engine.pages.num_free == NUM_PAGES
    scheduler.promise(job)
    await run_steps(engine, GUESS, 4)
    assert (await chunks_of(job))[0] == (0, 7)
    await scheduler.release(job)


async def test_a_step_that_fails_after_the_offer_came_fails_its_prompt(engine: FakeEngine, start: Start) -> None:
    scheduler = start(4)
    job = scheduler.expect(sequence(GUESS), attempts=5)
    step = await engine.next_step()
    scheduler.promise(job)
    step.fail(InternalError("the model's logits are not finite"))
    with pytest.raises(InternalError, match="not finite"):
        await soon(job.next_chunk())
    await scheduler.release(job)


@pytest.mark.parametrize("seed", range(30))
async def test_whatever_happens_promised_prompts_are_computed_and_no_page_is_lost(
    engine: FakeEngine, start: Start, seed: int
) -> None:
    """Prompts come, are promised and given up between and during steps; every step is audited."""
    dice = random.Random(seed)
    scheduler = start(3)
    open_jobs: list[Job] = []
    leaving: list[asyncio.Task[None]] = []
    for room in range(1, 40):
        job = scheduler.expect(sequence(room, dice.randint(1, 40), priority=dice.randint(0, 2)), dice.randint(0, 3))
        open_jobs.append(job)
        if dice.random() < 0.5:
            scheduler.promise(dice.choice([job for job in open_jobs if not job.promised] or [job]))
        if dice.random() < 0.3:
            given_up = open_jobs.pop(dice.randrange(len(open_jobs)))
            leaving.append(asyncio.create_task(scheduler.release(given_up)))
        while not await engine.is_idle() and dice.random() < 0.8:
            (await engine.next_step()).finish()
    for job in open_jobs:
        if not job.promised:
            scheduler.promise(job)
    finishing = [asyncio.create_task(finish(scheduler, job)) for job in open_jobs]
    while not all(task.done() for task in finishing):
        while not await engine.is_idle():
            (await engine.next_step()).finish()
    await soon(asyncio.gather(*leaving))
    for task in finishing:
        assert follow_each_other(*await task)


async def finish(scheduler: PrefillScheduler, job: Job) -> tuple[list[tuple[int, int]], int]:
    """As a room does: it takes what there is, and lets go."""
    chunks = await chunks_of(job)
    await scheduler.release(job)
    return chunks, len(job.sequence.request.prompt)


# --- with decode ---


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with running(optimistic()) as pair:
        yield pair


def optimistic(**options: Any) -> Pair:
    pair = Pair(chunk_tokens=CHUNK_TOKENS, **options)
    pair.prefill.service._optimistic_attempts = 2
    return pair


async def parked(pair: Pair, room: int) -> Job:
    """The room's prompt is computed."""
    live = pair.prefill.service._rooms[BootstrapRoom(room)]
    await until(lambda: live.job is not None and bool(live.job.sequence.output))
    assert live.job is not None
    return live.job


@pytest.mark.parametrize("tokens", [1, PAGE_SIZE, CHUNK_TOKENS, 20, 30], ids="{} tokens".format)
async def test_what_is_computed_before_the_offer_arrives_as_it_is(pair: Pair, tokens: int) -> None:
    """The digest that decode checks is over every page, and no step reads a token whose mark is wrong."""
    offer = Gate()
    pair.at_prefill.tap.rules["AllocatePages"] = held(offer)
    request = pair.request(GUESS, prompt_tokens=tokens)
    await pair.submit(request)
    await soon(offer.reached.wait())
    await parked(pair, GUESS)
    steps = pair.prefill.engine.steps
    offer.set()
    await pair.assert_answered(request)
    assert pair.prefill.engine.steps == steps


async def test_an_offer_that_comes_while_a_chunk_is_computed(pair: Pair) -> None:
    offer, step = Gate(), pair.prefill.engine.shut()
    pair.at_prefill.tap.rules["AllocatePages"] = held(offer)
    request = pair.request(GUESS, prompt_tokens=20)
    await pair.submit(request)
    await soon(step.reached.wait())
    offer.set()
    await state_reached(pair.prefill.transfers, GUESS, TransferState.WAITING_FOR_INPUT)
    step.set()
    await pair.assert_answered(request)


@pytest.mark.parametrize("aborter", ["prefill", "decode"])
async def test_a_parked_prompt_that_is_aborted_leaves_nothing(pair: Pair, aborter: str) -> None:
    offer = Gate()
    pair.at_prefill.tap.rules["AllocatePages"] = held(offer)
    await pair.submit(pair.request(GUESS, prompt_tokens=20))
    await soon(offer.reached.wait())
    await parked(pair, GUESS)
    node = pair.at_prefill if aborter == "prefill" else pair.at_decode
    await soon(node.client.abort(GUESS))
    offer.set()
    for client in (pair.at_prefill.client, pair.at_decode.client):
        assert isinstance(await client.failure(GUESS), RoomAborted)


async def test_a_parked_prompt_whose_offer_never_comes_ends_with_its_deadline(pair: Pair) -> None:
    await pair.at_prefill.client.submit(pair.request(GUESS, prompt_tokens=20, timeout_s=0.2))
    await parked(pair, GUESS)
    assert isinstance(await pair.at_prefill.client.failure(GUESS), DeadlineExceeded)


async def test_rooms_that_are_offered_pages_push_a_parked_one_out_and_it_is_still_answered() -> None:
    async with running(optimistic(prefill_pages=8)) as pair:
        first, others = pair.request(GUESS, prompt_tokens=20), [pair.request(room, prompt_tokens=20) for room in (5, 6)]
        await pair.at_prefill.client.submit(first)
        job = await parked(pair, GUESS)
        for request in others:
            await pair.submit(request)
        for request in others:
            await pair.assert_answered(request)
        assert job.attempts_left == 1
        await pair.at_decode.client.submit(first)
        await pair.assert_answered(first)


async def test_many_rooms_before_their_offers_in_a_small_pool() -> None:
    async with running(optimistic(prefill_pages=8, prefill_slots=2)) as pair:
        requests = [pair.request(room, prompt_tokens=3 * room) for room in range(1, 9)]
        for request in requests:
            await pair.at_prefill.client.submit(request)
        for request in reversed(requests):
            await pair.at_decode.client.submit(request)
        for request in requests:
            await pair.assert_answered(request)
