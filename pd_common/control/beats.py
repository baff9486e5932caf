"""Heartbeats of our own: one interval for everybody who streams, and the patience of whoever listens."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

BEAT_S = 0.5
"""Whoever has nothing to say for this long says so."""
PATIENCE_BEATS = 5
"""Who is silent for this many beats is taken for dead. A long engine step does not stop beats: it runs in a thread."""


def patience_s() -> float:
    """How long silence is borne, in seconds."""
    return PATIENCE_BEATS * BEAT_S


class Patience:
    """A block that ends with TimeoutError when `PATIENCE_BEATS` of our own beats have passed without a call of `heard`.

    It counts beats and does not look at the clock: a process that was itself stopped for a while goes on where it was,
    and takes in what has arrived meanwhile before it gives anybody up.
    """

    def __init__(self) -> None:
        self._silent_beats = 0
        self._limit = asyncio.timeout(None)

    def heard(self) -> None:
        """There is life on the other side."""
        self._silent_beats = 0

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_later(BEAT_S, self._beat)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._next.cancel()
        await self._limit.__aexit__(kind, error, trace)

    def _beat(self) -> None:
        self._silent_beats += 1
        if self._silent_beats >= PATIENCE_BEATS:
            self._limit.reschedule(self._loop.time())
        else:
            self._next = self._loop.call_later(BEAT_S, self._beat)
