"""A decode scheduler over an engine whose steps a test ends, and what the owner of its answers does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

from pd_common.control.outputs import OutputHub
from pd_common.engine.engine import Engine
from pd_common.engine.output import AnswerBuilder
from pd_common.engine.request import Sequence
from pd_common.generation import FinishReason
from pd_common.handoff.metadata import MetadataBuffers
from pd_common.types import BootstrapRoom
from services.decode.answers import Answer, Retracted
from services.decode.host_copies import HostCopies
from services.decode.memory import DecodeMemory
from services.decode.scheduler import DecodeScheduler
from tests.control.serving import make_request
from tests.services.fake_engine import PAGE_SIZE, FakeEngine


async def soon(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, 5)


class DecodeRig:
    def __init__(
        self,
        num_pages: int = 16,
        host_pages: int = 16,
        *,
        max_running: int = 8,
        chunk_tokens: int = 8,
        retract_every: int = 0,
        audit: Callable[[], None] | None = None,
    ) -> None:
        self.engine = FakeEngine(num_pages)
        engine = cast("Engine", self.engine)
        self.hub = OutputHub()
        self.hub.subscribe("s")
        self._outputs = self.hub.stream("s")
        self.memory = DecodeMemory(self.engine.prefixes, MetadataBuffers(8), PAGE_SIZE)
        self.copies = HostCopies(engine, host_pages)
        self.scheduler = DecodeScheduler(
            engine,
            self.memory,
            self.hub,
            self.copies,
            max_running=max_running,
            chunk_tokens=chunk_tokens,
            retract_every=retract_every,
            audit=audit,
        )

    def join(
        self,
        room: int,
        tokens: int,
        *,
        prompt_tokens: int = 3,
        alone: bool = False,
        priority: int = 0,
        builder: type[AnswerBuilder] = AnswerBuilder,
    ) -> Answer:
        """An answer of `tokens` tokens in all, the first of which, 7, and the prompt's KV are there, unless alone."""
        prompt = tuple(range(room * 100, room * 100 + prompt_tokens))
        request = replace(make_request(room, prompt, max_new_tokens=tokens), priority=priority)
        allocation = self.memory.allocate(Sequence(request), find=0, slot=False)
        assert allocation is not None
        answer_builder = builder(request, frozenset(), None)
        if not alone:
            allocation.sequence.computed = prompt_tokens
            allocation.sequence.append(7)
            AnswerBuilder.accept(answer_builder, 7)
        self.hub.own(BootstrapRoom(room), "s")
        return self.scheduler.start(allocation, answer_builder)

    def come_back(self, answer: Answer, *, computed: bool) -> Answer:
        """A retracted answer starts again in new pages, which hold what it had, or nothing."""
        allocation = self.memory.allocate(answer.sequence, find=0, slot=False)
        assert allocation is not None
        answer.sequence.computed = answer.sequence.num_tokens - 1 if computed else 0
        return self.scheduler.start(allocation, answer.builder)

    async def retracted(self, answer: Answer) -> Retracted:
        """What it was retracted with, which must happen soon; its pages are gone."""
        retracted = await soon(answer.ended)
        assert isinstance(retracted, Retracted)
        assert answer.allocation not in self.memory.held
        assert answer.sequence.pages == []
        return retracted

    async def next_outputs(self) -> list[tuple[int, tuple[int, ...], FinishReason | None]]:
        """What the subscriber gets of one step."""
        outputs = await soon(anext(self._outputs))
        return [(output.room, output.token_ids, output.finish) for output in outputs]

    async def steps(self, count: int) -> None:
        for _ in range(count):
            (await self.engine.next_step()).finish()

    @property
    def pages_used(self) -> int:
        return self.engine.pages.num_pages - self.memory.pages_available


@asynccontextmanager
async def deciding(rig: DecodeRig) -> AsyncIterator[DecodeRig]:
    """Runs its loop, which must outlive everything that a test does to it."""
    loop = asyncio.create_task(rig.scheduler.run())
    try:
        yield rig
        rig.memory.check_integrity()
        assert not loop.done()
    finally:
        loop.cancel()
        await asyncio.wait([loop])
