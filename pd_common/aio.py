"""Tasks that are never lost: all are held, one that dies is heard of, and a room's task concludes exactly once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from pd_common.errors import InternalError, PdError, ShuttingDown

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Tasks:
    """Holds tasks until they end. They end by returning: one that raises, or is cancelled other than here, has died."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._first_death: InternalError | None = None
        self._died = asyncio.Event()

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs the work; `name` says for a person what it is."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def __iter__(self) -> Iterator[asyncio.Task[None]]:
        return iter(tuple(self._tasks))

    async def watch(self) -> None:
        """Raises InternalError, naming the first task that has died; otherwise it never returns."""
        await self._died.wait()
        if self._first_death is not None:
            raise self._first_death

    async def end(self, task: asyncio.Task[None]) -> None:
        """Cancels this one, which is no death; returns when it has ended."""
        task.remove_done_callback(self._ended)
        task.cancel()
        await asyncio.wait((task,))
        self._tasks.discard(task)

    async def close(self) -> None:
        """Cancels what still runs; returns when all has ended."""
        self._closing = True
        for task in self:
            task.cancel()
        await asyncio.gather(*self, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        why = why_it_died(task)
        if why is not None and not self._closing:
            self._first_death = self._first_death or InternalError(f"{task.get_name()} died: {why}")
            self._died.set()


def why_it_died(task: asyncio.Task[None]) -> str | None:
    """What a task that has ended died of; None when it has returned. A defect goes into the log with its traceback."""
    if task.cancelled():
        return "it was cancelled"
    error = task.exception()
    if error is None or isinstance(error, PdError):
        return None if error is None else error.message
    _log.error("%s failed", task.get_name(), exc_info=error)
    return f"{type(error).__name__}: {error}"


async def for_ever() -> None:
    """Never returns: what to await for a failure that cannot come."""
    await asyncio.Event().wait()


class RoomTask:
    """Runs `work`, then `conclude(error)`: what work raised or was stopped with, None when it went well.

    Stopping cancels only `work`; `conclude`, which frees what the room holds, is never cut short. `tasks` holds it: a
    conclusion that fails is the death of the task.
    """

    def __init__(
        self,
        tasks: Tasks,
        name: str,
        work: Coroutine[Any, Any, None],
        conclude: Callable[[PdError | None], Awaitable[None]],
    ) -> None:
        self._reason: PdError | None = None
        self._concluding = False
        self._task = tasks.start(name, self._run(work, conclude))

    def stop(self, error: PdError) -> None:
        """Ends the work with this error. Does nothing when it has ended or is being stopped already."""
        if self.is_ending:
            return
        self._reason = error
        # Not now: a task that is cancelled before its first step never runs at all, and would never conclude.
        asyncio.get_running_loop().call_soon(self._cancel)

    @property
    def is_ending(self) -> bool:
        """It is being stopped or has been, or its work is over."""
        return self._concluding or self._reason is not None

    async def ended(self) -> None:
        """Returns when the room has concluded; cancelling the caller changes nothing here."""
        await asyncio.wait([self._task])

    def _cancel(self) -> None:
        if not self._concluding:
            self._task.cancel()

    async def _run(
        self, work: Coroutine[Any, Any, None], conclude: Callable[[PdError | None], Awaitable[None]]
    ) -> None:
        error: PdError | None = None
        try:
            await work
        except asyncio.CancelledError:
            error = self._reason or InternalError("what the room was waiting for was cancelled")
        except PdError as raised:
            error = raised
        except Exception as defect:  # noqa: BLE001  a defect in one room ends this room, not the process
            _log.exception("%s failed unexpectedly", self._task.get_name())
            error = InternalError(f"internal error: {type(defect).__name__}")
        self._concluding = True
        await conclude(error)


async def finished_even_if_cancelled(work: Coroutine[Any, Any, _T]) -> _T:
    """Awaits work that must not outlive its caller: cancelling the caller takes effect when the work has ended."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    finally:
        await task


async def drain_tasks(tasks: Sequence[RoomTask], timeout_s: float) -> None:
    """Lets rooms end by themselves for `timeout_s` seconds, then ends them; returns when every one has concluded."""
    ends = [asyncio.create_task(task.ended()) for task in tasks]
    if not ends:
        return
    await asyncio.wait(ends, timeout=timeout_s)
    for task in tasks:
        task.stop(ShuttingDown("this process is stopping"))
    await asyncio.wait(ends)
