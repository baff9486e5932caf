"""Answers that retract each other, come back and are cancelled at random moments: no page and no copy is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import cast

import pytest
import torch

from pd_common.control.outputs import OutputHub
from pd_common.engine.batch import Batch
from pd_common.engine.engine import Engine
from pd_common.engine.request import Sequence as Tokens
from pd_common.engine.sampler import SampledToken
from pd_common.errors import InternalError
from pd_common.handoff.metadata import MetadataBuffers
from services.decode.answers import Answer, Retracted
from services.decode.host_copies import HostCopies, HostCopy
from services.decode.memory import Allocation, DecodeMemory
from services.decode.scheduler import DecodeScheduler
from tests.control.serving import make_request
from tests.services.byte_engine import PAGE_SIZE, ByteEngine, answer_tokens


class SlowEngine(ByteEngine):
    """Others have their turn while it works, and one step in forty fails."""

    def __init__(self, num_pages: int, rng: random.Random) -> None:
        super().__init__(num_pages)
        self._rng = rng

    async def step(self, batch: Batch) -> tuple[SampledToken, ...]:
        await self._work()
        if self._rng.random() < 1 / 40:
            raise RuntimeError("broken")
        return await super().step(batch)

    async def save_pages(self, pages: Sequence[int]) -> torch.Tensor:
        await self._work()
        return await super().save_pages(pages)

    async def load_pages(self, copy: torch.Tensor, pages: Sequence[int]) -> None:
        await self._work()
        await super().load_pages(copy, pages)

    async def _work(self) -> None:
        for _ in range(self._rng.randrange(4)):
            await asyncio.sleep(0)


class Room:
    """What the owner of an answer does: it starts it, brings it back, and takes it out when it is cancelled."""

    def __init__(self, world: World, number: int, prompt: tuple[int, ...], new_tokens: int) -> None:
        self.world = world
        self.sequence = Tokens(make_request(number, prompt, new_tokens))
        self.builder = world.byte_engine.new_answer(self.sequence.request)
        self.allocation: Allocation | None = None
        self.answer: Answer | None = None
        self.copy: HostCopy | None = None

    async def serve(self) -> None:
        world, sequence = self.world, self.sequence
        try:
            while True:
                self.allocation = await world.acquire(sequence)
                if self.copy is not None:
                    await self._restore(self.copy, self.allocation)
                self.answer = world.scheduler.start(self.allocation, self.builder)
                await asyncio.shield(self.answer.ended)
                if not self._settle():
                    return
        finally:
            await self._conclude()

    async def _restore(self, copy: HostCopy, allocation: Allocation) -> None:
        await asyncio.shield(self.world.load(copy, allocation))
        self.sequence.computed = self.sequence.num_tokens - 1
        self.world.copies.drop(copy)
        self.copy = None

    def _settle(self) -> bool:
        """Whether the pages are gone."""
        answer, self.answer = self.answer, None
        if answer is None or answer.ended.cancelled() or answer.ended.exception() is not None:
            return False
        retracted = answer.ended.result()
        if not isinstance(retracted, Retracted):
            return False
        self.allocation, self.copy = None, retracted.copy
        self.world.retractions += 1
        self.world.freed.set()
        return True

    async def _conclude(self) -> None:
        if self.answer is not None:
            await self.world.scheduler.leave(self.answer)
            self._settle()
        await self.world.loads_over()
        if self.copy is not None:
            self.world.copies.drop(self.copy)
        if self.allocation is not None:
            self.world.memory.release(self.allocation)
            self.world.freed.set()


class World:
    def __init__(self, rng: random.Random) -> None:
        self.byte_engine = SlowEngine(12, rng)
        engine = cast("Engine", self.byte_engine)
        self.memory = DecodeMemory(self.byte_engine.prefixes, MetadataBuffers(1), PAGE_SIZE)
        self.copies = HostCopies(engine, rng.choice([0, 6, 30]))
        self.scheduler = DecodeScheduler(
            engine,
            self.memory,
            OutputHub(),
            self.copies,
            max_running=rng.choice([2, 8]),
            chunk_tokens=rng.choice([3, 30]),
            retract_every=rng.choice([0, 1, 5]),
            audit=self.memory.check_integrity,
        )
        self.freed = asyncio.Event()
        self.retractions = 0
        self._loads: set[asyncio.Task[None]] = set()

    async def acquire(self, sequence: Tokens) -> Allocation:
        while (allocation := self.memory.allocate(sequence, sequence.num_tokens - 1, slot=False)) is None:
            self.freed.clear()
            await self.freed.wait()
        return allocation

    def load(self, copy: HostCopy, allocation: Allocation) -> asyncio.Task[None]:
        load = asyncio.create_task(self.copies.load(copy, len(allocation.prefix.pages), allocation.own_pages))
        self._loads.add(load)
        load.add_done_callback(self._loads.discard)
        return load

    async def loads_over(self) -> None:
        """Nothing is written any more by what was cancelled."""
        if self._loads:
            await asyncio.wait(self._loads)


@pytest.mark.parametrize("seed", range(25))
async def test_nothing_is_lost_whoever_goes_away_when(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng)
    loop = asyncio.create_task(world.scheduler.run())
    common = tuple(range(500, 510))
    rooms = []
    for number in range(1, 25):
        own = tuple(range(number * 1000, number * 1000 + rng.randrange(1, 12)))
        rooms.append(Room(world, number, common[: rng.choice([0, 0, 10])] + own, rng.randrange(1, 25)))
    tasks = [asyncio.create_task(room.serve()) for room in rooms]
    cancelled = set()
    while not all(task.done() for task in tasks):
        for _ in range(rng.randrange(40)):
            await asyncio.sleep(0)
        victim = rng.randrange(3 * len(rooms))
        if victim < len(rooms):
            tasks[victim].cancel()
            cancelled.add(victim)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert not loop.done()
    loop.cancel()
    await asyncio.wait([loop])

    for number, (room, result) in enumerate(zip(rooms, results, strict=True)):
        if result is None:
            sequence = room.sequence
            expected = answer_tokens(len(sequence.request.prompt), sequence.request.sampling.max_new_tokens)
            assert tuple(sequence.output) == expected
        else:
            assert number in cancelled or (isinstance(result, InternalError) and "broken" in result.message)
    assert (list(world.memory.held), world.copies.pages_held, world.scheduler.running) == ([], 0, 0)
    world.memory.check_integrity()
    assert world.memory.pages_available == world.memory.pages_total
    assert world.retractions
