"""An engine whose steps and copies end when a test says so, over real pages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import torch

from pd_common.engine.batch import Batch
from pd_common.engine.sampler import SampledToken
from pd_common.kv.pages import PageAllocator
from pd_common.kv.prefix import PrefixCache

PAGE_SIZE = 4


class Step:
    """One step that runs. Tokens are 1000 and the position that they are drawn for."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.result: asyncio.Future[tuple[SampledToken, ...]] = asyncio.get_running_loop().create_future()

    @property
    def spans(self) -> list[tuple[int, int, int, bool]]:
        """Of each item: room, first token, end, whether a token is drawn."""
        return [(item.sequence.request.room, item.start, item.end, item.samples) for item in self.batch.items]

    @property
    def rooms(self) -> list[int]:
        return [room for room, *_ in self.spans]

    def finish(self) -> None:
        self.result.set_result(tuple(SampledToken(1000 + draw.position) for draw in self.batch.draws))

    def fail(self, error: Exception) -> None:
        self.result.set_exception(error)


class FakeEngine:
    """What a scheduler uses of an engine."""

    def __init__(self, num_pages: int) -> None:
        self.pages = PageAllocator(num_pages)
        self.prefixes = PrefixCache(self.pages, PAGE_SIZE)
        self.pool = SimpleNamespace(page_size=PAGE_SIZE)
        self.may_copy = asyncio.Event()
        self.may_copy.set()
        self.copy_failure: Exception | None = None
        self.loaded: list[tuple[list[int], list[int]]] = []
        """Of each copy that came back: the pages it was made of, and those it went to."""
        self._steps: asyncio.Queue[Step] = asyncio.Queue()

    async def step(self, batch: Batch) -> tuple[SampledToken, ...]:
        step = Step(batch)
        self._steps.put_nowait(step)
        return await step.result

    async def save_pages(self, pages: Sequence[int]) -> torch.Tensor:
        await self.may_copy.wait()
        if self.copy_failure is not None:
            raise self.copy_failure
        return torch.tensor(pages)

    async def load_pages(self, copy: torch.Tensor, pages: Sequence[int]) -> None:
        await self.may_copy.wait()
        self.loaded.append((copy.tolist(), list(pages)))

    async def next_step(self) -> Step:
        """The step that the scheduler has begun, or begins next."""
        return await asyncio.wait_for(self._steps.get(), 5)

    async def is_idle(self) -> bool:
        """No step runs and none is about to begin."""
        for _ in range(5):
            await asyncio.sleep(0)
        return self._steps.empty()

    @property
    def free_pages(self) -> int:
        """Pages that a prompt can have."""
        self.prefixes.check_integrity()
        return self.pages.num_free + self.prefixes.num_idle
