"""kill -9 of either side in the middle of transfers, and its successor at the same address."""

from __future__ import annotations

import asyncio
import random

from pd_common.types import Role
from tests.chaos.member import Settings
from tests.chaos.members import (
    LOST,
    Member,
    Outcome,
    assert_whole,
    new_request,
    serve,
    serve_until_exact,
    started,
)
from tests.transport.pairs import CARRIERS

ROOMS = 4
LONGEST_RUN_S = 0.1
TIMEOUT_S = 3.0
"""For a decode that died before prefill heard of the room: there is no router here to end prefill's leg."""


async def restart_rounds(rounds: int, carrier: str, seed: int) -> int:
    """Kills one side in each round; gives how many rooms were lost by that. The other side's process never changes."""
    rng, lost = random.Random(seed), 0
    environment = CARRIERS[carrier]
    async with started(Settings(Role.PREFILL, environment), Settings(Role.DECODE, environment)) as (prefill, decode):
        for _ in range(rounds):
            await serve_until_exact(prefill, decode)
            lost += await _round(prefill, decode, rng)
        await serve_until_exact(prefill, decode)
        await assert_whole(prefill, decode)
    return lost


async def _round(prefill: Member, decode: Member, rng: random.Random) -> int:
    dying, surviving = rng.sample((prefill, decode), 2)
    requests = [new_request(prefill, rng.randint(1, 240), 8, TIMEOUT_S) for _ in range(ROOMS)]
    rooms = [asyncio.create_task(serve(prefill, decode, request)) for request in requests]
    await asyncio.sleep(rng.uniform(0, LONGEST_RUN_S))
    await dying.kill()
    outcomes: list[Outcome] = await asyncio.gather(*rooms)
    for outcome in outcomes:
        outcome.check(LOST)
    assert surviving.exit_code is None
    await dying.restart()
    return sum(not outcome.is_exact for outcome in outcomes)
