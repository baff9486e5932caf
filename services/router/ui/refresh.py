"""One value for all who ask, made anew only when somebody does: many browsers cost the workers what one does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Shared(Generic[_T]):
    """What `make` gives, at most `max_age_s` old when it is asked for. It is never made twice at the same time."""

    def __init__(
        self, make: Callable[[], Awaitable[_T]], max_age_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._make = make
        self._max_age_s = max_age_s
        self._now = now
        self._made_s = 0.0
        self._making: asyncio.Task[_T] | None = None

    async def get(self) -> _T:
        """Raises whatever making it has raised; the next one who asks tries again."""
        if self._making is None or self._is_over(self._making):
            self._making = asyncio.create_task(self._made(), name="refresh of the status page")
        # Shielded: a browser that goes away takes nothing from the others.
        return await asyncio.shield(self._making)

    async def _made(self) -> _T:
        value = await self._make()
        self._made_s = self._now()
        return value

    def _is_over(self, making: asyncio.Task[_T]) -> bool:
        if not making.done():
            return False
        failed = making.cancelled() or making.exception() is not None
        return failed or self._now() - self._made_s >= self._max_age_s
