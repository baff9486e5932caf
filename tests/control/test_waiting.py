from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_common.aio import RoomTask
from pd_common.control import waiting
from pd_common.control.outputs import OutputHub
from pd_common.control.room_keeper import RoomKeeper
from pd_common.control.rooms import PoolStatus
from pd_common.control.waiting import WaitingLimits
from pd_common.errors import CapacityExceeded, PdError
from pd_common.generation import GenerationRequest, Load, SamplingParams
from pd_common.handoff.deadlines import Timeouts
from pd_common.handoff.table import TransferTable
from pd_common.types import BootstrapRoom, Instance, Role

NOW = 1000.0
LIMITS = WaitingLimits(max_queued=3, queue_timeout_s=10.0)


def a_request(room: int, priority: int = 0) -> GenerationRequest:
    return GenerationRequest("test", BootstrapRoom(room), None, (1,), SamplingParams(1), priority=priority)


@dataclass(slots=True, eq=False)
class Room:
    """A room that waits until a test says otherwise."""

    request: GenerationRequest
    has_turn: bool = False
    waiting_since: float | None = None
    task: RoomTask | None = None


def rooms(*priorities: int) -> list[Room]:
    return [Room(a_request(number, priority), waiting_since=NOW) for number, priority in enumerate(priorities, 1)]


# --- the rules ---


def test_nobody_goes_while_one_more_may_wait() -> None:
    assert waiting.who_goes(rooms(0, 0), a_request(9), LIMITS, NOW) is None


def test_without_a_limit_nobody_goes() -> None:
    assert waiting.who_goes(rooms(*[0] * 500), a_request(9), WaitingLimits(0, 10.0), NOW) is None


@pytest.mark.parametrize(
    ("priorities", "newcomer", "goes"),
    [((0, 0, 0), 1, 3), ((5, 0, 0), 1, 3), ((0, 5, 5), 6, 1), ((-1, -2, 3), 0, 2), ((2, 2, 1, 2), 2, 3)],
)
def test_the_newest_of_the_least_urgent_goes(priorities: tuple[int, ...], newcomer: int, goes: int) -> None:
    chosen = waiting.who_goes(rooms(*priorities), a_request(9, newcomer), LIMITS, NOW)
    assert chosen is not None
    assert chosen.request.room == goes


@pytest.mark.parametrize("newcomer", [0, -1])
def test_a_newcomer_that_is_no_more_urgent_is_refused(newcomer: int) -> None:
    waiters = rooms(1, 0, 0)
    waiters[0].waiting_since = NOW - 4.2
    with pytest.raises(CapacityExceeded, match="3 requests wait for their turn, at most 3 may") as refused:
        waiting.who_goes(waiters, a_request(9, newcomer), LIMITS, NOW)
    assert refused.value.metadata == {"limit": "3", "retry_after_s": "5"}


def test_only_waiting_for_capacity_takes_too_long() -> None:
    waiters = [Room(a_request(number), waiting_since=since) for number, since in enumerate((None, 989.9, 990.0, 999.0))]
    assert waiting.overdue(waiters, LIMITS, NOW) == [waiters[1]]


@pytest.mark.parametrize(
    ("since", "expected"),
    [((), 1), ((None,), 1), ((NOW,), 1), ((NOW - 1.5, NOW - 0.1), 2), ((NOW - 3600, None), 60), ((NOW + 5,), 1)],
)
def test_who_is_refused_may_come_back_after_as_long_as_the_oldest_has_waited(
    since: tuple[float | None, ...], expected: int
) -> None:
    waiters = [Room(a_request(1), waiting_since=each) for each in since]
    assert waiting.retry_after_s(waiters, NOW) == expected
    assert waiting.displaced(waiters, LIMITS, NOW).metadata["retry_after_s"] == str(expected)
    assert waiting.waited_too_long(waiters, LIMITS, NOW).metadata["retry_after_s"] == str(expected)


@given(st.lists(st.integers(-2, 2), max_size=30), st.integers(1, 5))
def test_there_are_never_more_than_may_wait_and_the_most_urgent_stay(arriving: list[int], limit: int) -> None:
    limits, line = WaitingLimits(limit, 10.0), list[Room]()
    for number, priority in enumerate(arriving, 1):
        newcomer = a_request(number, priority)
        try:
            goes = waiting.who_goes(line, newcomer, limits, NOW)
        except CapacityExceeded:
            continue
        if goes is not None:
            line.remove(goes)
        line.append(Room(newcomer))
    by_urgency = sorted(enumerate(arriving, 1), key=lambda each: -each[1])  # of equals who came first
    assert {room.request.room for room in line} == {number for number, _ in by_urgency[:limit]}


# --- in a process ---


class Keeper(RoomKeeper[Room]):
    """Rooms that do nothing."""

    def __init__(self) -> None:
        table = TransferTable(Role.DECODE, 60.0, 100, Timeouts(300.0, 300.0))
        super().__init__(Instance("decode-0", 7), table, OutputHub(), LIMITS)
        self.ended: dict[int, PdError | None] = {}
        self.may_conclude = asyncio.Event()
        self.may_conclude.set()

    def pool_status(self) -> PoolStatus:
        return PoolStatus(64, 40, 8, 6, 3, 1, live_rooms=len(self._rooms), pages_cached=5)

    def abandon(self, room: BootstrapRoom, error: PdError) -> None:
        self._fail(room, error)
        self._stop(room, error)

    async def tend(self, now: float) -> None:
        """Nothing."""

    def submit(self, room: Room) -> Room:
        self._make_way(room.request)
        number = room.request.room
        self._rooms[number] = room
        room.task = RoomTask(
            self._tasks, f"room {number}", asyncio.sleep(1e6), lambda error: self.conclude(room, error)
        )
        return room

    async def conclude(self, room: Room, error: PdError | None) -> None:
        await self.may_conclude.wait()
        self.ended[room.request.room] = error
        del self._rooms[room.request.room]

    async def ends(self, room: Room) -> PdError | None:
        assert room.task is not None
        await asyncio.wait_for(room.task.ended(), 5)
        return self.ended[room.request.room]


@pytest.fixture
async def keeper() -> AsyncIterator[Keeper]:
    keeper = Keeper()
    yield keeper
    keeper.may_conclude.set()
    await keeper.close(0)


async def test_a_less_urgent_room_makes_way_and_is_told_why(keeper: Keeper) -> None:
    held = [keeper.submit(room) for room in rooms(1, 0, 0)]
    urgent = keeper.submit(Room(a_request(4, priority=2)))
    error = await keeper.ends(held[2])
    assert isinstance(error, CapacityExceeded)
    assert "more urgent" in error.message
    assert keeper.load().queued == 3
    assert urgent.task is not None
    assert not urgent.task.is_ending


async def test_rooms_that_are_being_ended_take_no_place_in_line(keeper: Keeper) -> None:
    """Each of several that come at once displaces another one."""
    keeper.may_conclude.clear()
    held = [keeper.submit(room) for room in rooms(0, 0, 0)]
    for number in (4, 5):
        keeper.submit(Room(a_request(number, priority=1)))
    ending = [room.request.room for room in held if room.task is not None and room.task.is_ending]
    assert ending == [2, 3]
    assert keeper.load().queued == 3


async def test_rooms_that_have_had_their_turn_do_not_wait(keeper: Keeper) -> None:
    for room in rooms(0, 0, 0):
        keeper.submit(room).has_turn = True
    keeper.submit(Room(a_request(4)))
    load = keeper.load()
    assert load == Load(queued=1, max_queued=3, oldest_wait_s=0.0, running=3, pages_total=64, pages_available=45)
    assert not load.is_full


async def test_a_refused_room_leaves_nothing(keeper: Keeper) -> None:
    for room in rooms(0, 0, 0):
        keeper.submit(room)
    assert keeper.load().is_full
    with pytest.raises(CapacityExceeded):
        keeper.submit(Room(a_request(4)))
    assert keeper.load().queued == 3


async def test_a_room_that_waits_too_long_is_ended_and_the_others_are_not(keeper: Keeper) -> None:
    runs, old, other_leg, young = rooms(0, 0, 0, 0)
    now = time.monotonic()
    runs.has_turn, runs.waiting_since = True, now - 60
    old.waiting_since, other_leg.waiting_since, young.waiting_since = now - 10, None, now
    for room in (runs, old, other_leg, young):
        keeper.submit(room)
    reaper = asyncio.create_task(keeper.reap())
    error = await keeper.ends(old)
    assert isinstance(error, CapacityExceeded)
    assert "10 seconds" in error.message
    assert [room.task is not None and room.task.is_ending for room in (other_leg, runs, young)] == [False] * 3
    reaper.cancel()
    await asyncio.wait([reaper])


async def test_the_load_tells_how_long_the_oldest_has_waited(keeper: Keeper) -> None:
    keeper.submit(Room(a_request(1), waiting_since=time.monotonic() - 7))
    keeper.submit(Room(a_request(2), waiting_since=time.monotonic() - 3))
    assert 7 <= keeper.load().oldest_wait_s < 60


async def test_the_load_tells_which_request_would_be_refused(keeper: Keeper) -> None:
    for room in rooms(3, -2):
        keeper.submit(room)
    assert not keeper.load().refuses(-9)
    keeper.submit(Room(a_request(3, 1)))
    assert [keeper.load().refuses(priority) for priority in (-3, -2, -1, 0)] == [True, True, False, False]
