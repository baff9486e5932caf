from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from pd_common.control.outputs import OutputHub
from pd_common.engine.engine import Engine
from pd_common.engine.output import AnswerBuilder
from pd_common.engine.request import Sequence
from pd_common.errors import InternalError
from pd_common.generation import FinishReason, Output, TokenLogprob
from pd_common.types import BootstrapRoom
from services.decode.scheduler import Answer, DecodeScheduler
from tests.control.serving import make_request
from tests.services.fake_engine import PAGE_SIZE, FakeEngine

NUM_PAGES = 16
PROMPT = (1, 2, 3)


class BrokenBuilder(AnswerBuilder):
    """Cannot put a token into words."""

    def accept(self, token_id: int, logprob: TokenLogprob | None = None) -> Output:
        raise UnicodeError(f"token {token_id} with {logprob}")


@pytest.fixture
async def engine() -> FakeEngine:
    return FakeEngine(NUM_PAGES)


@pytest.fixture
async def hub() -> OutputHub:
    hub = OutputHub()
    hub.subscribe("s")
    return hub


Start = Callable[[int], DecodeScheduler]


@pytest.fixture
async def start(engine: FakeEngine, hub: OutputHub) -> AsyncIterator[Start]:
    """Runs a scheduler for so many answers at a time; it must outlive everything that a test does to it."""
    loops: list[asyncio.Task[None]] = []

    def start(max_running: int) -> DecodeScheduler:
        scheduler = DecodeScheduler(cast("Engine", engine), hub, max_running)
        loops.append(asyncio.create_task(scheduler.run()))
        return scheduler

    yield start
    died = [loop for loop in loops if loop.done()]
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
    assert died == []


@pytest.fixture
async def scheduler(start: Start) -> DecodeScheduler:
    return start(8)


def join(
    scheduler: DecodeScheduler,
    hub: OutputHub,
    engine: FakeEngine,
    room: int,
    tokens: int,
    builder: type[AnswerBuilder] = AnswerBuilder,
) -> Answer:
    """An answer of `tokens` tokens in all whose prompt is computed and whose first token is known."""
    request = make_request(room, PROMPT, max_new_tokens=tokens)
    sequence = Sequence(request)
    pages = engine.pages.alloc(-(-(len(PROMPT) + tokens - 1) // PAGE_SIZE))
    assert pages is not None
    sequence.pages, sequence.computed = list(pages), len(PROMPT)
    sequence.append(7)
    answer_builder = builder(request, frozenset(), None)
    AnswerBuilder.accept(answer_builder, 7)
    hub.own(BootstrapRoom(room), "s")
    return scheduler.start(sequence, answer_builder)


async def soon(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, 5)


class Reader:
    """What the subscriber gets, step by step."""

    def __init__(self, hub: OutputHub) -> None:
        self._stream = hub.stream("s")

    async def next_step(self) -> list[tuple[int, tuple[int, ...], FinishReason | None]]:
        outputs = await soon(anext(self._stream))
        return [(output.room, output.token_ids, output.finish) for output in outputs]


@pytest.fixture
async def reader(hub: OutputHub) -> Reader:
    return Reader(hub)


async def test_every_answer_gets_a_token_a_step_in_one_message(
    engine: FakeEngine, hub: OutputHub, scheduler: DecodeScheduler, reader: Reader
) -> None:
    short, long = join(scheduler, hub, engine, 1, tokens=2), join(scheduler, hub, engine, 2, tokens=3)
    step = await engine.next_step()
    assert step.spans == [(1, 3, 4, True), (2, 3, 4, True)]
    step.finish()
    assert await reader.next_step() == [(1, (1004,), FinishReason.LENGTH), (2, (1004,), None)]
    await soon(short.finished)
    assert not long.finished.done()
    step = await engine.next_step()
    assert step.spans == [(2, 4, 5, True)]
    step.finish()
    assert await reader.next_step() == [(2, (1005,), FinishReason.LENGTH)]
    await soon(long.finished)
    assert long.sequence.output == [7, 1004, 1005]
    assert await engine.is_idle()


async def test_an_answer_that_comes_during_a_step_joins_the_next(
    engine: FakeEngine, hub: OutputHub, scheduler: DecodeScheduler
) -> None:
    join(scheduler, hub, engine, 1, tokens=4)
    step = await engine.next_step()
    join(scheduler, hub, engine, 2, tokens=4)
    step.finish()
    assert (await engine.next_step()).rooms == [1, 2]


async def test_answers_beyond_the_limit_wait_in_order(engine: FakeEngine, hub: OutputHub, start: Start) -> None:
    scheduler = start(2)
    for room, tokens in ((1, 3), (2, 2), (3, 2), (4, 2)):
        join(scheduler, hub, engine, room, tokens)
    for rooms in ([1, 2], [1, 3], [4]):
        step = await engine.next_step()
        assert step.rooms == rooms
        step.finish()
    assert await engine.is_idle()


async def test_who_leaves_between_steps_is_not_computed_further(
    engine: FakeEngine, hub: OutputHub, start: Start
) -> None:
    scheduler = start(1)
    running, waiting = join(scheduler, hub, engine, 1, tokens=2), join(scheduler, hub, engine, 2, tokens=2)
    step = await engine.next_step()
    await soon(scheduler.leave(waiting))
    step.finish()
    await soon(running.finished)
    assert await engine.is_idle()
    assert not waiting.finished.done()


async def test_leaving_waits_for_the_step_that_uses_the_pages(
    engine: FakeEngine, hub: OutputHub, scheduler: DecodeScheduler, reader: Reader
) -> None:
    leaver, stayer = join(scheduler, hub, engine, 1, tokens=4), join(scheduler, hub, engine, 2, tokens=2)
    step = await engine.next_step()
    leaving = asyncio.create_task(scheduler.leave(leaver))
    assert await engine.is_idle()
    assert not leaving.done()
    step.finish()
    await soon(leaving)
    assert await reader.next_step() == [(2, (1004,), FinishReason.LENGTH)]
    await soon(stayer.finished)
    assert await engine.is_idle()
    await soon(scheduler.leave(leaver))


async def test_leaving_waits_for_a_step_that_fails_too(
    engine: FakeEngine, hub: OutputHub, scheduler: DecodeScheduler
) -> None:
    leaver = join(scheduler, hub, engine, 1, tokens=4)
    step = await engine.next_step()
    leaving = asyncio.create_task(scheduler.leave(leaver))
    await asyncio.sleep(0)
    step.fail(RuntimeError("broken"))
    await soon(leaving)
    assert not leaver.finished.done()


async def test_a_failed_step_fails_its_answers_and_no_other(
    engine: FakeEngine, hub: OutputHub, start: Start, reader: Reader
) -> None:
    scheduler = start(2)
    failing = [join(scheduler, hub, engine, room, tokens=3) for room in (1, 2)]
    waiting = join(scheduler, hub, engine, 3, tokens=2)
    (await engine.next_step()).fail(RuntimeError("out of memory"))
    for answer in failing:
        with pytest.raises(InternalError, match="RuntimeError: out of memory"):
            await soon(answer.finished)
    step = await engine.next_step()
    assert step.rooms == [3]
    step.finish()
    assert await reader.next_step() == [(3, (1004,), FinishReason.LENGTH)]
    await soon(waiting.finished)


async def test_a_room_that_stops_waiting_as_its_last_step_ends_harms_no_other(
    engine: FakeEngine, hub: OutputHub, scheduler: DecodeScheduler, reader: Reader
) -> None:
    """Both in one turn of the event loop: the room has not left yet, but nobody waits for it any more."""
    stopped, other = join(scheduler, hub, engine, 1, tokens=2), join(scheduler, hub, engine, 2, tokens=3)
    step = await engine.next_step()
    stopped.finished.cancel()
    step.finish()
    assert (2, (1004,), None) in await reader.next_step()
    await soon(scheduler.leave(stopped))
    (await engine.next_step()).finish()
    await soon(other.finished)


async def test_a_room_that_stops_waiting_as_the_engine_fails_harms_no_other(
    engine: FakeEngine, hub: OutputHub, scheduler: DecodeScheduler
) -> None:
    stopped, other = join(scheduler, hub, engine, 1, tokens=2), join(scheduler, hub, engine, 2, tokens=3)
    step = await engine.next_step()
    stopped.finished.cancel()
    step.fail(RuntimeError("broken"))
    with pytest.raises(InternalError):
        await soon(other.finished)
    await soon(scheduler.leave(stopped))
    later = join(scheduler, hub, engine, 3, tokens=2)
    (await engine.next_step()).finish()
    await soon(later.finished)


async def test_an_answer_that_is_finished_has_been_sent_whatever_becomes_of_its_neighbour(
    engine: FakeEngine, hub: OutputHub, scheduler: DecodeScheduler, reader: Reader
) -> None:
    good = join(scheduler, hub, engine, 1, tokens=2)
    bad = join(scheduler, hub, engine, 2, tokens=3, builder=BrokenBuilder)
    (await engine.next_step()).finish()
    with pytest.raises(InternalError):
        await soon(bad.finished)
    await soon(good.finished)
    assert await reader.next_step() == [(1, (1004,), FinishReason.LENGTH)]
