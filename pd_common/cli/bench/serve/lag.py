"""How late this process itself is: what its event loop adds to every time that it takes."""

from __future__ import annotations

import asyncio
import time

_TICK_S = 0.01


async def watch_lag(late_s: list[float]) -> None:
    """Wants to be woken every 10 ms, and notes by how much it was later; until it is cancelled."""
    while True:
        before_s = time.perf_counter()
        await asyncio.sleep(_TICK_S)
        late_s.append(max(0.0, time.perf_counter() - before_s - _TICK_S))
