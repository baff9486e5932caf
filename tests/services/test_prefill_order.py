"""Who is computed first, what prompts of a burst have of each other, and what an audit finds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import cast

import pytest

from pd_common.engine.engine import Engine
from pd_common.engine.request import Sequence
from pd_common.errors import InternalError
from pd_common.kv.prefix import Prefix
from services.prefill.job import Job
from services.prefill.scheduler import PrefillScheduler
from tests.control.serving import make_request
from tests.services.fake_engine import PAGE_SIZE, FakeEngine
from tests.services.pair import soon

NUM_PAGES = 8
CHUNK_TOKENS = 8
MAX_RUNNING = 2


@pytest.fixture
async def engine() -> FakeEngine:
    return FakeEngine(NUM_PAGES)


@pytest.fixture
async def scheduler(engine: FakeEngine) -> AsyncIterator[PrefillScheduler]:
    scheduler = audited(engine)
    loop = asyncio.create_task(scheduler.run())
    yield scheduler
    assert not loop.done()
    loop.cancel()
    await asyncio.wait([loop])
    assert engine.free_pages == NUM_PAGES


def audited(engine: FakeEngine) -> PrefillScheduler:
    return PrefillScheduler(cast("Engine", engine), engine.prefixes, CHUNK_TOKENS, MAX_RUNNING, audited=True)


def enqueue(scheduler: PrefillScheduler, room: int, tokens: int = 3, *, priority: int = 0, shared: int = 0) -> Job:
    """A prompt that has its first `shared` tokens in common with others, and no token more."""
    prompt = (*range(shared), *(100 * room + place for place in range(shared, tokens)))
    return scheduler.enqueue(Sequence(replace(make_request(room, prompt), priority=priority)))


async def compute(engine: FakeEngine, *jobs: Job) -> None:
    """These are the next to be computed, in this order, and together."""
    while not all(job.sequence.output for job in jobs):
        step = await engine.next_step()
        assert step.rooms == [job.sequence.request.room for job in jobs]
        step.finish()
        await soon(jobs[-1].next_chunk())


# --- priorities ---


async def test_those_that_wait_come_by_priority_and_then_as_they_arrived(
    engine: FakeEngine, scheduler: PrefillScheduler
) -> None:
    jobs = {room: enqueue(scheduler, room) for room in (1, 2)}
    step = await engine.next_step()
    jobs |= {room: enqueue(scheduler, room, priority=room // 10) for room in (10, 20, 11, 21, 3)}
    computed: list[int] = []
    while len(computed) < len(jobs):
        computed += step.rooms
        step.finish()
        for room in step.rooms:
            await soon(jobs[room].next_chunk())
            await scheduler.release(jobs[room])
        step = step if len(computed) == len(jobs) else await engine.next_step()
    assert computed == [1, 2, 20, 21, 10, 11, 3]


async def test_a_prompt_of_higher_priority_has_the_next_step_before_those_that_run(
    engine: FakeEngine, scheduler: PrefillScheduler
) -> None:
    long = enqueue(scheduler, 1, 20)
    step = await engine.next_step()
    urgent = enqueue(scheduler, 2, 6, priority=1)
    step.finish()
    step = await engine.next_step()
    assert step.spans == [(2, 0, 6, True), (1, 8, 10, False)]
    step.finish()
    for _ in range(2):
        (await engine.next_step()).finish()
    assert [job.sequence.num_tokens for job in (urgent, long)] == [7, 20]
    for job in (urgent, long):
        await scheduler.release(job)


async def test_one_of_higher_priority_that_comes_later_does_not_wait_for_the_pages_of_one_that_waits(
    engine: FakeEngine, scheduler: PrefillScheduler
) -> None:
    first, large = enqueue(scheduler, 1, 20), enqueue(scheduler, 2, 16)
    step = await engine.next_step()
    urgent = enqueue(scheduler, 3, 4, priority=1)
    step.finish()
    step = await engine.next_step()
    assert step.rooms == [3, 1]
    step.finish()
    await soon(urgent.next_chunk())
    for job in (large, urgent):
        await scheduler.release(job)
    (await engine.next_step()).finish()
    await scheduler.release(first)


# --- prompts of a burst ---


async def test_a_prompt_begins_with_the_pages_of_one_that_is_computed_and_not_released_yet(
    engine: FakeEngine, scheduler: PrefillScheduler
) -> None:
    first = enqueue(scheduler, 1, 10, shared=8)
    await compute(engine, first)
    second = enqueue(scheduler, 2, 10, shared=8)
    step = await engine.next_step()
    assert step.spans == [(2, 8, 10, True)]
    assert second.sequence.pages[:2] == first.sequence.pages[:2]
    await scheduler.release(first)
    assert engine.prefixes.num_idle == 0  # its pages are in use still
    step.finish()
    await soon(second.next_chunk())
    await scheduler.release(second)


async def test_a_prompt_that_waits_for_pages_needs_fewer_when_another_with_the_same_beginning_is_computed(
    engine: FakeEngine, scheduler: PrefillScheduler
) -> None:
    first = enqueue(scheduler, 1, 24, shared=20)
    step = await engine.next_step()
    second = enqueue(scheduler, 2, 24, shared=20)  # six pages, and two are left
    for _ in range(2):
        step.finish()
        step = await engine.next_step()
        assert step.rooms == [1]
    step.finish()
    step = await engine.next_step()
    assert step.spans == [(2, 20, 24, True)]
    step.finish()
    await soon(second.next_chunk())
    for job in (first, second):
        await scheduler.release(job)


async def test_a_prompt_that_does_not_fit_is_not_looked_up_at_every_step(
    engine: FakeEngine, scheduler: PrefillScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, looked_up = engine.prefixes.lock, []

    def counted(tokens: tuple[int, ...], salt: bytes) -> Prefix:
        looked_up.append(tokens)
        return lock(tokens, salt)

    monkeypatch.setattr(engine.prefixes, "lock", counted)
    first = enqueue(scheduler, 1, 28)
    step = await engine.next_step()
    large = enqueue(scheduler, 2, 2 * PAGE_SIZE)
    for _ in range(3):
        step.finish()
        step = await engine.next_step()
    assert len(looked_up) == 2
    step.finish()
    await soon(first.next_chunk())
    await scheduler.release(first)
    await compute(engine, large)
    await scheduler.release(large)


# --- the audit ---


@pytest.mark.parametrize("harm", ["lost", "taken twice"])
async def test_a_page_without_an_owner_or_with_two_ends_the_loop(engine: FakeEngine, harm: str) -> None:
    scheduler = audited(engine)
    loop = asyncio.create_task(scheduler.run())
    jobs = [enqueue(scheduler, room) for room in (1, 2)]
    step = await engine.next_step()
    if harm == "lost":
        assert engine.pages.alloc(1)
    else:
        jobs[1].sequence.pages[0] = jobs[0].sequence.pages[0]
    step.finish()
    with pytest.raises(InternalError, match="have an owner"):
        await soon(loop)
