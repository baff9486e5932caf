"""A task that serves one room: it can be stopped with a reason, and always concludes exactly once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from pd_common.errors import InternalError, PdError, ShuttingDown

_log = logging.getLogger(__name__)


class RoomTask:
    """Runs `work`, then `conclude(error)`: what work raised or was stopped with, None when it went well.

    Stopping cancels only `work`; `conclude`, which frees what the room holds, is never cut short.
    """

    def __init__(self, work: Coroutine[Any, Any, None], conclude: Callable[[PdError | None], Awaitable[None]]) -> None:
        self._reason: PdError | None = None
        self._concluding = False
        self._task = asyncio.create_task(self._run(work, conclude))

    def stop(self, error: PdError) -> None:
        """Ends the work with this error. Does nothing when it has ended or is being stopped already."""
        if self._concluding or self._reason is not None:
            return
        self._reason = error
        # Not now: a task that is cancelled before its first step never runs at all, and would never conclude.
        asyncio.get_running_loop().call_soon(self._cancel)

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
            _log.exception("a room failed unexpectedly")
            error = InternalError(f"internal error: {type(defect).__name__}")
        self._concluding = True
        try:
            await conclude(error)
        except Exception:
            _log.exception("a room could not be concluded")
            raise


async def finished_even_if_cancelled(work: Coroutine[Any, Any, None]) -> None:
    """Awaits work that must not outlive its caller: cancelling the caller takes effect when the work has ended."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
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
