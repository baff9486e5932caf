"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

_T = TypeVar("_T")


async def merged(streams: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[_T, None]:
    """What any of them gives, as it comes; ends when all have. What one raises is raised; then, too, all are closed."""
    nexts = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
    try:
        while nexts:
            done, _ = await asyncio.wait(nexts, return_when=asyncio.FIRST_COMPLETED)
            for step in done:
                stream = nexts.pop(step)
                if isinstance(step.exception(), StopAsyncIteration):
                    continue
                given = step.result()
                nexts[asyncio.ensure_future(anext(stream))] = stream
                yield given
    finally:
        for step in nexts:
            step.cancel()
        await asyncio.gather(*nexts, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
