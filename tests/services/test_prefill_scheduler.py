from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest

from pd_common.engine.engine import Engine
from pd_common.engine.request import Sequence
from pd_common.engine.sampler import SampledToken
from pd_common.errors import InternalError
from services.prefill.job import ChunkDone, Job
from services.prefill.scheduler import PrefillScheduler
from tests.control.serving import make_request
from tests.services.fake_engine import PAGE_SIZE, FakeEngine

NUM_PAGES = 8
CHUNK_TOKENS = 8


@pytest.fixture
async def engine() -> FakeEngine:
    return FakeEngine(NUM_PAGES)


Start = Callable[..., PrefillScheduler]


@pytest.fixture
async def start(engine: FakeEngine) -> AsyncIterator[Start]:
    """Runs a scheduler for so many prompts at a time; when the test is over every page must be free."""
    loops: list[asyncio.Task[None]] = []

    def start(max_running: int, last_chunk_tokens: int | None = None) -> PrefillScheduler:
        scheduler = PrefillScheduler(
            cast("Engine", engine),
            engine.prefixes,
            CHUNK_TOKENS,
            max_running,
            last_chunk_tokens=last_chunk_tokens,
        )
        loops.append(asyncio.create_task(scheduler.run()))
        return scheduler

    yield start
    for loop in loops:
        assert not loop.done()
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
    assert engine.free_pages == NUM_PAGES


@pytest.fixture
async def scheduler(start: Start) -> PrefillScheduler:
    return start(4)


def enqueue(scheduler: PrefillScheduler, room: int, num_tokens: int) -> Job:
    """A prompt that has nothing in common with those of other rooms."""
    return enqueue_tokens(scheduler, room, tuple(range(100 * room, 100 * room + num_tokens)))


def enqueue_tokens(scheduler: PrefillScheduler, room: int, tokens: tuple[int, ...], salt: bytes = b"") -> Job:
    return scheduler.enqueue(Sequence(replace(make_request(room, tokens), cache_salt=salt)))


async def soon(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, 5)


async def spans_of(job: Job, count: int) -> list[tuple[int, int, SampledToken | None]]:
    chunks: list[ChunkDone] = [await soon(job.next_chunk()) for _ in range(count)]
    assert all(chunk.began_ns <= chunk.ended_ns for chunk in chunks)
    return [(chunk.start, chunk.end, chunk.sampled) for chunk in chunks]


async def test_a_prompt_is_computed_in_chunks_and_gives_its_first_token(
    engine: FakeEngine, scheduler: PrefillScheduler
) -> None:
    job = enqueue(scheduler, 1, 19)
    for expected in ([(1, 0, 8, False)], [(1, 8, 16, False)], [(1, 16, 19, True)]):
        step = await engine.next_step()
        assert step.spans == expected
        step.finish()
    assert await spans_of(job, 3) == [(0, 8, None), (8, 16, None), (16, 19, SampledToken(1019))]
    assert job.sequence.output == [1019]
    assert engine.free_pages == NUM_PAGES - 5
    await scheduler.release(job)


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [(3, [3]), (8, [8]), (9, [8, 9]), (11, [8, 11]), (12, [8, 10, 12]), (16, [8, 13, 16]), (19, [8, 16, 19])],
)
async def test_the_last_of_several_chunks_is_a_short_one(
    engine: FakeEngine, start: Start, tokens: int, ends: list[int]
) -> None:
    """Its pages are sent when there is nothing left to compute meanwhile."""
    scheduler = start(4, last_chunk_tokens=3)
    job = enqueue(scheduler, 1, tokens)
    for begin, end in pairwise([0, *ends]):
        step = await engine.next_step()
        assert step.spans == [(1, begin, end, end == tokens)]
        step.finish()
    assert len(await spans_of(job, len(ends))) == len(ends)
    await scheduler.release(job)


async def test_a_step_holds_chunks_of_several_prompts_within_the_budget(
    engine: FakeEngine, scheduler: PrefillScheduler
) -> None:
    jobs = [enqueue(scheduler, room, tokens) for room, tokens in ((1, 5), (2, 6), (3, 4))]
    step = await engine.next_step()
    assert step.spans == [(1, 0, 5, True), (2, 0, 3, False)]
    step.finish()
    step = await engine.next_step()
    assert step.spans == [(2, 3, 6, True), (3, 0, 4, True)]
    step.finish()
    assert [len(await spans_of(job, count)) for job, count in zip(jobs, (1, 2, 1), strict=True)] == [1, 2, 1]
    assert await engine.is_idle()
    for job in jobs:
        await scheduler.release(job)


async def test_a_prompt_that_arrives_during_a_step_is_in_the_next(
    engine: FakeEngine, scheduler: PrefillScheduler
) -> None:
    first = enqueue(scheduler, 1, 12)
    step = await engine.next_step()
    second = enqueue(scheduler, 2, 2)
    step.finish()
    step = await engine.next_step()
    assert step.spans == [(1, 8, 12, True), (2, 0, 2, True)]
    step.finish()
    await spans_of(first, 2)
    await spans_of(second, 1)
    await scheduler.release(first)
    await scheduler.release(second)


async def test_a_computed_prompt_keeps_its_pages_but_takes_no_more_steps(
    engine: FakeEngine, scheduler: PrefillScheduler
) -> None:
    job = enqueue(scheduler, 1, 4)
    (await engine.next_step()).finish()
    await spans_of(job, 1)
    assert await engine.is_idle()
    assert engine.free_pages == NUM_PAGES - 1
    await scheduler.release(job)
    await scheduler.release(job)
    assert engine.free_pages == NUM_PAGES


async def test_a_small_prompt_does_not_overtake_one_that_waits_for_pages(
    engine: FakeEngine, scheduler: PrefillScheduler
) -> None:
    first, large, small = enqueue(scheduler, 1, 24), enqueue(scheduler, 2, 20), enqueue(scheduler, 3, 1)
    for _ in range(3):
        step = await engine.next_step()
        assert step.rooms == [1]
        step.finish()
    await spans_of(first, 3)
    assert await engine.is_idle()
    await scheduler.release(first)
    step = await engine.next_step()
    assert step.rooms == [2]
    releasing = asyncio.create_task(scheduler.release(large))
    await asyncio.sleep(0)
    step.finish()
    await soon(releasing)
    step = await engine.next_step()
    assert step.rooms == [3]
    step.finish()
    await spans_of(small, 1)
    await scheduler.release(small)


async def test_no_more_prompts_than_allowed_have_pages(engine: FakeEngine, start: Start) -> None:
    scheduler = start(1)
    first, second = enqueue(scheduler, 1, 4), enqueue(scheduler, 2, 4)
    (await engine.next_step()).finish()
    await spans_of(first, 1)
    assert await engine.is_idle()
    assert engine.free_pages == NUM_PAGES - 1
    await scheduler.release(first)
    (await engine.next_step()).finish()
    await spans_of(second, 1)
    await scheduler.release(second)


async def test_releasing_a_prompt_that_waits_lets_those_behind_it_in(
    engine: FakeEngine, scheduler: PrefillScheduler
) -> None:
    first, large, small = enqueue(scheduler, 1, 24), enqueue(scheduler, 2, 20), enqueue(scheduler, 3, 1)
    step = await engine.next_step()
    await scheduler.release(large)
    step.finish()
    for expected in ([(1, 8, 16, False)], [(1, 16, 24, True)]):
        step = await engine.next_step()
        assert step.spans == expected
        step.finish()
    step = await engine.next_step()
    assert step.rooms == [3]
    step.finish()
    await spans_of(small, 1)
    await scheduler.release(first)
    await scheduler.release(small)


async def test_pages_are_not_freed_while_a_step_uses_them(engine: FakeEngine, scheduler: PrefillScheduler) -> None:
    leaving, staying = enqueue(scheduler, 1, 5), enqueue(scheduler, 2, 12)
    step = await engine.next_step()
    assert step.rooms == [1, 2]
    releasing = asyncio.create_task(scheduler.release(leaving))
    assert await engine.is_idle()
    assert not releasing.done()
    assert engine.free_pages == NUM_PAGES - 5
    step.finish()
    await soon(releasing)
    assert engine.free_pages == NUM_PAGES - 3
    step = await engine.next_step()
    assert step.spans == [(2, 3, 11, False)]
    step.finish()
    (await engine.next_step()).finish()
    assert len(await spans_of(staying, 3)) == 3
    await scheduler.release(staying)


async def test_a_prompt_released_during_its_step_is_not_computed_further(
    engine: FakeEngine, scheduler: PrefillScheduler
) -> None:
    job = enqueue(scheduler, 1, 24)
    step = await engine.next_step()
    releasing = asyncio.create_task(scheduler.release(job))
    await asyncio.sleep(0)
    step.finish()
    await soon(releasing)
    assert await engine.is_idle()


async def test_a_failed_step_fails_its_prompts_and_no_other(engine: FakeEngine, start: Start) -> None:
    scheduler = start(2)
    failing = [enqueue(scheduler, 1, 4), enqueue(scheduler, 2, 12)]
    waiting = enqueue(scheduler, 3, 4)
    step = await engine.next_step()
    assert step.rooms == [1, 2]
    step.fail(InternalError("the model's logits are not finite"))
    for job in failing:
        with pytest.raises(InternalError, match="logits are not finite"):
            await soon(job.next_chunk())
    step = await engine.next_step()
    assert step.spans == [(3, 0, 4, True)]
    step.finish()
    assert await spans_of(waiting, 1) == [(0, 4, SampledToken(1004))]
    assert engine.free_pages == NUM_PAGES - 5
    for job in (*failing, waiting):
        await scheduler.release(job)


async def test_a_prompt_that_was_computed_before_a_failure_keeps_its_result(
    engine: FakeEngine, scheduler: PrefillScheduler
) -> None:
    done = enqueue(scheduler, 1, 4)
    (await engine.next_step()).finish()
    failing = enqueue(scheduler, 2, 4)
    (await engine.next_step()).fail(RuntimeError("out of memory"))
    assert await spans_of(done, 1) == [(0, 4, SampledToken(1004))]
    with pytest.raises(InternalError, match="RuntimeError: out of memory"):
        await soon(failing.next_chunk())
    await scheduler.release(done)
    await scheduler.release(failing)


async def test_releasing_during_a_step_that_fails(engine: FakeEngine, scheduler: PrefillScheduler) -> None:
    job = enqueue(scheduler, 1, 4)
    step = await engine.next_step()
    releasing = asyncio.create_task(scheduler.release(job))
    await asyncio.sleep(0)
    step.fail(RuntimeError("broken"))
    await soon(releasing)


# --- prompts that begin in the same way ---


async def compute(engine: FakeEngine, job: Job) -> list[tuple[int, int]]:
    """Until it has its first token; gives what steps have computed."""
    spans = []
    while not job.sequence.output:
        step = await engine.next_step()
        ((room, start, end, _),) = step.spans
        assert room == job.sequence.request.room
        spans.append((start, end))
        step.finish()
        while (await soon(job.next_chunk())).end < end:
            pass
    return spans


async def leave(engine: FakeEngine, scheduler: PrefillScheduler, room: int, tokens: tuple[int, ...]) -> list[int]:
    """A prompt that is computed and released; gives the pages that it had."""
    job = enqueue_tokens(scheduler, room, tokens)
    await compute(engine, job)
    pages = list(job.sequence.pages)
    await scheduler.release(job)
    return pages


@pytest.mark.parametrize(
    ("tokens", "cached"),
    [(11, 8), (12, 8), (10, 8), (9, 8), (8, 4), (5, 4), (4, 0), (1, 0)],
    ids=str,
)
async def test_whole_pages_of_an_earlier_prompt_are_not_computed_again(
    engine: FakeEngine, scheduler: PrefillScheduler, tokens: int, cached: int
) -> None:
    """One token is always left to compute: the first token follows from it."""
    earlier = await leave(engine, scheduler, 1, tuple(range(11)))
    job = enqueue_tokens(scheduler, 2, tuple(range(tokens)))
    step = await engine.next_step()
    assert step.spans == [(2, cached, tokens, True)]
    assert job.cached_tokens == cached
    assert job.sequence.pages[: cached // PAGE_SIZE] == earlier[: cached // PAGE_SIZE]
    step.finish()
    chunks = [(0, cached, None)] if cached else []
    assert await spans_of(job, len(chunks) + 1) == [*chunks, (cached, tokens, SampledToken(1000 + tokens))]
    await scheduler.release(job)


async def test_prompts_of_another_salt_are_computed(engine: FakeEngine, scheduler: PrefillScheduler) -> None:
    await leave(engine, scheduler, 1, tuple(range(8)))
    job = enqueue_tokens(scheduler, 2, tuple(range(8)), b"somebody else")
    assert await compute(engine, job) == [(0, 8)]
    assert job.cached_tokens == 0
    await scheduler.release(job)


async def test_two_of_the_same_prompt_at_once_are_both_computed(
    engine: FakeEngine, scheduler: PrefillScheduler
) -> None:
    first, second = (enqueue_tokens(scheduler, room, tuple(range(4))) for room in (1, 2))
    step = await engine.next_step()
    assert step.spans == [(1, 0, 4, True), (2, 0, 4, True)]
    assert not set(first.sequence.pages) & set(second.sequence.pages)
    step.finish()
    for job in (first, second):
        await spans_of(job, 1)
        await scheduler.release(job)
    assert engine.prefixes.num_idle == 1


async def test_what_is_used_by_another_is_not_given_up_nor_freed(
    engine: FakeEngine, scheduler: PrefillScheduler
) -> None:
    earlier = await leave(engine, scheduler, 1, tuple(range(16)))
    sharing = []
    for room in (2, 3):
        sharing.append(enqueue_tokens(scheduler, room, (*range(16), room)))
        await compute(engine, sharing[-1])
        assert sharing[-1].sequence.pages[:4] == earlier
    assert engine.free_pages == NUM_PAGES - 6
    await scheduler.release(sharing[0])
    large = enqueue(scheduler, 4, 13)
    assert await engine.is_idle()  # it needs four pages; the four shared ones are still in use
    await scheduler.release(sharing[1])
    step = await engine.next_step()
    assert step.rooms == [4]
    step.finish()
    await scheduler.release(large)


async def test_a_prompt_that_waits_for_pages_locks_none(engine: FakeEngine, scheduler: PrefillScheduler) -> None:
    await leave(engine, scheduler, 1, tuple(range(8)))
    other = enqueue(scheduler, 2, 21)
    for _ in range(3):
        (await engine.next_step()).finish()
    waiting = enqueue_tokens(scheduler, 3, tuple(range(12)))
    assert await engine.is_idle()
    assert (engine.pages.num_free, engine.prefixes.num_idle, waiting.sequence.pages) == (0, 2, [])
    await scheduler.release(waiting)
    await scheduler.release(other)


async def test_cached_pages_make_room_for_a_prompt_that_needs_them(
    engine: FakeEngine, scheduler: PrefillScheduler
) -> None:
    await leave(engine, scheduler, 1, tuple(range(12)))
    await leave(engine, scheduler, 2, tuple(range(100, 112)))
    assert engine.pages.num_free == 2
    everything = enqueue(scheduler, 3, NUM_PAGES * PAGE_SIZE)
    await compute(engine, everything)
    assert engine.free_pages == 0
    await scheduler.release(everything)


async def test_only_finished_steps_leave_something_behind(engine: FakeEngine, scheduler: PrefillScheduler) -> None:
    aborted = enqueue_tokens(scheduler, 1, tuple(range(20)))
    (await engine.next_step()).finish()
    step = await engine.next_step()
    assert step.spans == [(1, 8, 16, False)]
    failing = asyncio.create_task(scheduler.release(aborted))
    assert await engine.is_idle()
    assert engine.prefixes.num_idle == 0
    step.finish()
    await soon(failing)
    assert engine.prefixes.num_idle == 4
    later = enqueue_tokens(scheduler, 2, tuple(range(20)))
    assert await compute(engine, later) == [(16, 20)]
    await scheduler.release(later)


async def test_a_prompt_whose_step_failed_leaves_nothing_behind(
    engine: FakeEngine, scheduler: PrefillScheduler
) -> None:
    job = enqueue_tokens(scheduler, 1, tuple(range(12)))
    (await engine.next_step()).finish()
    (await engine.next_step()).fail(InternalError("the model's logits are not finite"))
    await spans_of(job, 1)
    with pytest.raises(InternalError):
        await soon(job.next_chunk())
    await scheduler.release(job)
    assert engine.pages.num_free == NUM_PAGES
