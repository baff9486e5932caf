"""What must live as long as its process: when any of it dies the process stops serving, and ends in good order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from pd_common.aio import why_it_died
from pd_common.control.server import ControlServer
from pd_common.errors import InternalError

_log = logging.getLogger(__name__)

_ENDS_WITHIN_S = 10.0
"""After a death. What still holds the process up then will hold it up for ever: a thread that hangs, for one."""

Work = Coroutine[Any, Any, None]


class Supervisor:
    """Runs the endless works of a process. The first that ends, in whatever way, is a death: health tells at once."""

    def __init__(self, control: ControlServer) -> None:
        self._control = control
        self._ending = asyncio.Event()
        self._in_a_hurry = asyncio.Event()
        self._death: InternalError | None = None
        self._told: asyncio.Task[None] | None = None
        self._overdue: asyncio.TimerHandle | None = None
        self._over = False

    @asynccontextmanager
    async def running(self, **works: Work) -> AsyncIterator[None]:
        """Runs the works beside the block and cancels them after it. Their names are for the log."""
        tasks = [asyncio.create_task(work, name=name.replace("_", " ")) for name, work in works.items()]
        for task in tasks:
            task.add_done_callback(self._ended)
        try:
            yield
        finally:
            self._over = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def until_end(self) -> None:
        """Returns on SIGTERM or SIGINT, or when something has died. Then the process is not ready any more."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        await self._ending.wait()
        _log.info("stopping")
        await self._control.withdraw()

    def _signalled(self) -> None:
        if self._ending.is_set():
            self._in_a_hurry.set()
        self._ending.set()

    def patience_s(self, drain_timeout_s: float) -> float:
        """How long rooms may go on at the end: not at all after a death."""
        return drain_timeout_s if self._death is None else 0.0

    async def out_of_patience(self, drain_timeout_s: float) -> None:
        """Returns when what still runs may go on no longer: after this time, or at a second signal or a death."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.patience_s(drain_timeout_s)):
                await self._in_a_hurry.wait()

    async def close(self, *closings: Work) -> None:
        """Closes the parts of the process, in this order; one that fails does not stop the others.

        Raises:
            InternalError: what has died; otherwise the first failure of a part, as it is.

        """
        failures: list[Exception] = []
        for closing in closings:
            try:
                await closing
            except Exception as failure:  # noqa: BLE001  the others are closed all the same; it is raised below
                _log.exception("a part of the process did not close")
                failures.append(failure)
        if self._told is not None:
            await self._told
        if self._overdue is not None:
            self._overdue.cancel()
        if self._death is not None:
            raise self._death
        if failures:
            raise failures[0]

    def _ended(self, task: asyncio.Task[None]) -> None:
        why = why_it_died(task) if not (task.cancelled() and self._over) else None
        if self._over or self._death is not None:
            return
        self._death = InternalError(f"this process cannot go on: {task.get_name()} died: {why or 'it has ended'}")
        _log.critical("%s", self._death.message)
        self._in_a_hurry.set()
        self._told = asyncio.create_task(self._control.fail())
        self._overdue = asyncio.get_running_loop().call_later(_ENDS_WITHIN_S, _give_up)
        self._ending.set()


def _give_up() -> None:
    _log.critical("the process does not end by itself %.0f s after a death: it is cut off", _ENDS_WITHIN_S)
    os._exit(1)
