"""The zombie: a prefill that is stopped while it writes, given up, and continued when its pages have new owners."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from pd_common.types import Role
from tests.chaos.member import Settings
from tests.chaos.members import (
    LOST,
    Member,
    Outcome,
    assert_whole,
    eventually,
    new_request,
    serve,
    serve_until_exact,
    started,
)
from tests.transport.pairs import CARRIERS

DECODE_PAGES = 128
VICTIM_TOKENS, VICTIM_NEW_TOKENS = 240, 4
"""Half of decode's pages."""
WORKERS = 4
MOST_PUTS = 16
LONGEST_RUN_S = 0.08
BEAT_S = 0.4
"""Decode gives up a process that has been silent for five of these: then its port is torn down as well."""
SHORT_DEADLINE_S = 0.4
"""A room that is late is given up before that, with the port still open."""


class Pressure:
    """Other requests that together want more pages than there are: whatever is freed is used again at once."""

    def __init__(self, prefill: Member, decode: Member, rng: random.Random) -> None:
        self._prefill, self._decode, self._rng = prefill, decode, rng
        self._served = 0
        self._more = asyncio.Condition()
        self._stopping = False

    async def served(self, more: int) -> None:
        """Returns when so many more have been answered exactly."""
        async with self._more:
            goal = self._served + more
            await self._more.wait_for(lambda: self._served >= goal)

    async def work(self) -> None:
        while not self._stopping:
            tokens = self._rng.randint(60, 200)
            outcome = await serve(self._prefill, self._decode, new_request(self._prefill, tokens, 6))
            assert outcome.is_exact, outcome
            async with self._more:
                self._served += 1
                self._more.notify_all()

    def stop(self) -> None:
        self._stopping = True


@asynccontextmanager
async def under_pressure(prefill: Member, decode: Member, rng: random.Random) -> AsyncIterator[Pressure]:
    pressure = Pressure(prefill, decode, rng)
    async with asyncio.TaskGroup() as workers:
        for _ in range(WORKERS):
            workers.create_task(pressure.work())
        yield pressure
        pressure.stop()


async def zombie_rounds(rounds: int, carrier: str, seed: int) -> int:
    """Plays it so often; gives how many rooms were really caught in the middle."""
    rng, caught = random.Random(seed), 0
    environment = CARRIERS[carrier]
    prefill = Settings(Role.PREFILL, environment, beat_s=BEAT_S)
    victim = Settings(Role.PREFILL, environment, beat_s=BEAT_S)
    decode = Settings(Role.DECODE, environment, pages=DECODE_PAGES, beat_s=BEAT_S)
    async with started(prefill, victim, decode) as (healthy, zombie, target):
        for each in (healthy, zombie):
            await serve_until_exact(each, target)
        async with under_pressure(healthy, target, rng) as pressure:
            for _ in range(rounds):
                caught += await _round(zombie, target, pressure, rng)
        assert await target.ask("damaged") == []
        await assert_whole(healthy, zombie, target)
    return caught


async def _round(zombie: Member, target: Member, pressure: Pressure, rng: random.Random) -> bool:
    """Whether the room was caught: decode gave it up, and others were served before prefill went on."""
    request = new_request(zombie, VICTIM_TOKENS, VICTIM_NEW_TOKENS)
    by_deadline, in_the_middle = rng.random() < 0.5, rng.random() < 0.7
    on_decode_s = SHORT_DEADLINE_S if by_deadline else request.timeout_s
    if in_the_middle:
        await zombie.arm(rng.randint(1, MOST_PUTS))
    on_prefill = asyncio.create_task(zombie.generate(request))
    on_decode = asyncio.create_task(target.generate(replace(request, timeout_s=on_decode_s)))
    if not in_the_middle:
        await asyncio.sleep(rng.uniform(0, LONGEST_RUN_S))
        zombie.signal(signal.SIGSTOP)
    await on_decode
    stopped = zombie.is_stopped
    if stopped:
        await pressure.served(WORKERS)
    zombie.signal(signal.SIGCONT)
    outcome = Outcome(request, await on_prefill, await on_decode)
    outcome.check(LOST)
    await zombie.arm(0)
    await zombie.settle()
    await eventually(lambda: _is_empty(target), "the quarantine is not emptied")
    assert await target.ask("damaged") == []
    await serve_until_exact(zombie, target)
    return stopped and not outcome.is_exact


async def _is_empty(target: Member) -> bool:
    return not await target.quarantine()
