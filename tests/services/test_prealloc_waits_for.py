"""What a request in line is told that it waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from pd_common.telemetry import spans
from pd_common.telemetry.spans import SpanName
from pd_common.telemetry.tracing import Stage, Tracing
from pd_common.types import BootstrapRoom
from services.decode import rooms
from services.decode.memory import Allocation
from services.decode.queues import PreallocQueue, WaitsFor
from tests.services.decode_memory import NUM_PAGES, NUM_SLOTS, PAGE_SIZE, a_memory, a_sequence

TURN, ROW, MEMORY, SLOT = WaitsFor


class Line:
    """Requests that share nothing and do not grow; what each is told is kept."""

    def __init__(self, rows: int = 6, num_slots: int = NUM_SLOTS) -> None:
        self.queue = PreallocQueue(a_memory(num_slots=num_slots), rows, reserved_tokens=0)
        self.told: list[list[WaitsFor]] = []

    async def ask(self, pages: int, *, slot: bool = True, returning: bool = False) -> asyncio.Task[Allocation]:
        told: list[WaitsFor] = []
        self.told.append(told)
        sequence = a_sequence([100 + len(self.told)] * (pages * PAGE_SIZE))
        find = pages * PAGE_SIZE
        acquire = self.queue.acquire(sequence, find, slot=slot, returning=returning, told=told.append)
        waiter = asyncio.create_task(acquire)
        await asyncio.sleep(0)
        return waiter


async def test_who_need_not_wait_is_told_nothing() -> None:
    line = Line()
    await (await line.ask(3))
    assert line.told == [[]]


async def test_pages_are_named_and_those_behind_wait_for_their_turn_or_for_pages_too() -> None:
    line = Line()
    held = await (await line.ask(NUM_PAGES))
    waiters = [await line.ask(2), await line.ask(3)]
    assert line.told == [[], [MEMORY], [MEMORY]]
    line.queue.release(held)
    await asyncio.gather(*waiters)
    assert line.told == [[], [MEMORY], [MEMORY]]


async def test_a_slot_is_named() -> None:
    line = Line(num_slots=1)
    await (await line.ask(1))
    await line.ask(1)
    assert line.told[1] == [SLOT]


async def test_the_first_in_line_waits_for_a_row_and_the_others_for_their_turn() -> None:
    line = Line(rows=1)
    held = await (await line.ask(1))
    first, _ = await line.ask(1), await line.ask(1)
    assert line.told == [[], [ROW], [TURN]]
    line.queue.release(held)
    await first
    assert line.told == [[], [ROW], [TURN, ROW]]


async def test_newcomers_wait_for_their_turn_behind_one_that_has_lost_its_pages() -> None:
    line = Line()
    held = await (await line.ask(NUM_PAGES - 1))
    returning, new = await line.ask(4, returning=True), await line.ask(1)
    assert line.told[1:] == [[MEMORY], [TURN]]
    line.queue.release(held)
    await asyncio.gather(returning, new)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time by which waiting is measured."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


def a_stage() -> Stage:
    room = BootstrapRoom(1)
    return Tracing().begin(SpanName.DECODE, room, spans.of_room(room)).enter(SpanName.PREALLOC_WAIT)


def test_a_stage_says_what_it_waits_for_and_how_long_it_has_waited_for_each(clock: Callable[[float], None]) -> None:
    stage = a_stage()
    wait = rooms._Wait(stage)
    wait.goes_on(TURN)
    assert stage.attributes == {"pd.waited_for": "turn"}
    for seconds, what in ((1, MEMORY), (3, TURN), (4, MEMORY)):
        clock(seconds)
        wait.goes_on(what)
    clock(10)
    wait.note()
    assert stage.attributes == {
        "pd.waited_for": "memory",
        "pd.waited_for_turn_ms": 2000.0,
        "pd.waited_for_memory_ms": 8000.0,
    }


def test_a_stage_that_need_not_wait_says_nothing(clock: Callable[[float], None]) -> None:
    stage = a_stage()
    rooms._Wait(stage).note()
    assert stage.attributes == {}
