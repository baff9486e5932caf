from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from pd_common.engine.engine import Engine
from pd_common.engine.request import Sequence
from pd_common.engine.sampler import SampledToken
from pd_common.errors import InternalError
from services.prefill.scheduler import ChunkDone, Job, PrefillScheduler
from tests.control.serving import make_request
from tests.services.fake_engine import FakeEngine

NUM_PAGES = 8
CHUNK_TOKENS = 8


@pytest.fixture
async def engine() -> FakeEngine:
    return FakeEngine(NUM_PAGES)


Start = Callable[[int], PrefillScheduler]


@pytest.fixture
async def start(engine: FakeEngine) -> AsyncIterator[Start]:
    """Runs a scheduler for so many prompts at a time; when the test is over every page must be free."""
    loops: list[asyncio.Task[None]] = []

    def start(max_running: int) -> PrefillScheduler:
        scheduler = PrefillScheduler(cast("Engine", engine), CHUNK_TOKENS, max_running)
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
    return scheduler.enqueue(Sequence(make_request(room, tuple(range(num_tokens)), max_new_tokens=1)))


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
