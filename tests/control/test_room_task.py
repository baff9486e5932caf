from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from pd_common.aio import RoomTask, Tasks, drain_tasks
from pd_common.errors import InternalError, PdError, PeerLost, RoomAborted, ShuttingDown


class Conclusion:
    """Counts how a room ended; its end can be held up."""

    def __init__(self) -> None:
        self.errors: list[PdError | None] = []
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.done = False

    async def __call__(self, error: PdError | None) -> None:
        self.errors.append(error)
        self.begun.set()
        await self.may_end.wait()
        self.done = True

    @property
    def error(self) -> PdError | None:
        """How the one conclusion went."""
        assert self.done
        (error,) = self.errors
        return error


@pytest.fixture
async def conclusion() -> Conclusion:
    return Conclusion()


Conclude = Callable[[PdError | None], Awaitable[None]]

ABORTED = RoomAborted("room 5 was aborted")


async def quick() -> None:
    await asyncio.sleep(0)


async def until(event: asyncio.Event) -> None:
    await event.wait()


def room_task(work: Coroutine[Any, Any, None], conclude: Conclude, tasks: Tasks | None = None) -> RoomTask:
    return RoomTask(tasks or Tasks(), "room 5", work, conclude)


async def ended(task: RoomTask) -> None:
    await asyncio.wait_for(task.ended(), 5)


async def test_work_that_goes_well_concludes_without_an_error(conclusion: Conclusion) -> None:
    await ended(room_task(quick(), conclusion))
    assert conclusion.error is None


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(PeerLost("gone"), PeerLost), (ZeroDivisionError("of a prompt"), InternalError)],
    ids=["typed", "defect"],
)
async def test_work_that_raises_concludes_with_a_typed_error(
    conclusion: Conclusion, raised: Exception, expected: type[PdError]
) -> None:
    async def work() -> None:
        raise raised

    await ended(room_task(work(), conclusion))
    assert type(conclusion.error) is expected
    assert "of a prompt" not in str(conclusion.error)


async def test_a_task_stopped_before_its_first_step_concludes(conclusion: Conclusion) -> None:
    task = room_task(until(asyncio.Event()), conclusion)
    task.stop(ABORTED)
    await ended(task)
    assert conclusion.error is ABORTED


async def test_a_task_stopped_during_its_work_concludes_with_the_first_reason(conclusion: Conclusion) -> None:
    started, cleaned_up = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned_up.set()

    task = room_task(work(), conclusion)
    await started.wait()
    task.stop(ABORTED)
    task.stop(PeerLost("later"))
    await ended(task)
    assert conclusion.error is ABORTED
    assert cleaned_up.is_set()


async def test_an_error_of_the_clean_up_is_not_lost(conclusion: Conclusion) -> None:
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise PeerLost("while cleaning up")

    task = room_task(work(), conclusion)
    await started.wait()
    task.stop(ABORTED)
    await ended(task)
    assert type(conclusion.error) is PeerLost


async def test_stopping_does_not_cut_the_conclusion_short(conclusion: Conclusion) -> None:
    conclusion.may_end.clear()
    task = room_task(quick(), conclusion)
    await conclusion.begun.wait()
    task.stop(ABORTED)
    await asyncio.sleep(0)
    conclusion.may_end.set()
    await ended(task)
    assert conclusion.error is None


async def test_work_that_ends_in_the_same_moment_as_the_stop_concludes_once(conclusion: Conclusion) -> None:
    """`stop` acts a moment later; by then the work has ended by itself, and the conclusion is under way."""
    go = asyncio.Event()
    conclusion.may_end.clear()
    task = room_task(until(go), conclusion)
    await asyncio.sleep(0)
    go.set()
    await asyncio.sleep(0)
    task.stop(ABORTED)
    await conclusion.begun.wait()
    conclusion.may_end.set()
    await ended(task)
    assert conclusion.done
    assert len(conclusion.errors) == 1


async def test_stopping_after_the_end_changes_nothing(conclusion: Conclusion) -> None:
    task = room_task(quick(), conclusion)
    await ended(task)
    task.stop(ABORTED)
    await ended(task)
    assert conclusion.error is None


async def test_one_who_waits_for_the_end_may_give_up_without_touching_the_room(conclusion: Conclusion) -> None:
    go = asyncio.Event()
    task = room_task(until(go), conclusion)
    waiting = asyncio.create_task(task.ended())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert conclusion.errors == []
    go.set()
    await ended(task)
    assert conclusion.error is None


async def test_work_cancelled_from_within_concludes_too(conclusion: Conclusion) -> None:
    """What the room awaits may be cancelled by somebody else; the room must not vanish with what it holds."""
    shared: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        await asyncio.shield(shared)

    task = room_task(work(), conclusion)
    await asyncio.sleep(0)
    shared.cancel()
    await ended(task)
    assert isinstance(conclusion.error, PdError)


async def test_a_room_that_cannot_be_concluded_is_a_death_that_is_heard_of() -> None:
    async def conclude(_: PdError | None) -> None:
        raise ZeroDivisionError("of pages")

    tasks = Tasks()
    await ended(room_task(quick(), conclude, tasks))
    with pytest.raises(InternalError, match="room 5 died: ZeroDivisionError: of pages"):
        await asyncio.wait_for(tasks.watch(), 5)


@pytest.mark.parametrize("raised", [PeerLost("gone"), ZeroDivisionError("of a prompt")], ids=["typed", "defect"])
async def test_a_room_whose_work_fails_is_no_death(conclusion: Conclusion, raised: Exception) -> None:
    async def work() -> None:
        raise raised

    tasks = Tasks()
    watch = asyncio.create_task(tasks.watch())
    await ended(room_task(work(), conclusion, tasks))
    await asyncio.sleep(0)
    assert not watch.done()
    watch.cancel()


async def test_draining_lets_rooms_end_by_themselves() -> None:
    first, second = Conclusion(), Conclusion()
    go = asyncio.Event()
    tasks = [room_task(until(go), first), room_task(until(go), second)]
    draining = asyncio.create_task(drain_tasks(tasks, timeout_s=60.0))
    await asyncio.sleep(0)
    go.set()
    await asyncio.wait_for(draining, 5)
    assert (first.error, second.error) == (None, None)


async def test_draining_ends_what_does_not_end_by_itself_and_waits_for_its_conclusion() -> None:
    good, stuck = Conclusion(), Conclusion()
    stuck.may_end.clear()
    tasks = [room_task(quick(), good), room_task(until(asyncio.Event()), stuck)]
    draining = asyncio.create_task(drain_tasks(tasks, timeout_s=0.0))
    await asyncio.wait_for(stuck.begun.wait(), 5)
    await asyncio.sleep(0)
    assert not draining.done()
    stuck.may_end.set()
    await asyncio.wait_for(draining, 5)
    assert type(stuck.error) is ShuttingDown


async def test_draining_nothing_is_over_at_once() -> None:
    await asyncio.wait_for(drain_tasks([], timeout_s=60.0), 5)
