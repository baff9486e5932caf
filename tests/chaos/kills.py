"""kill -9 of either side while a room stands still in a known place; the other side loses nothing by it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pd_common.types import Role
from tests.chaos.member import Settings
from tests.chaos.members import (
    LOST,
    Member,
    Outcome,
    assert_whole,
    eventually,
    new_request,
    serve_until_exact,
    started,
)
from tests.services.lives import USUAL, Growth

PROMPT_TOKENS, NEW_TOKENS = 240, 8
"""Four chunks."""
COPIED, FETCHED_AGAIN = Growth(retract_every=1), Growth(retract_every=1, host_pages=0)


@dataclass(frozen=True, slots=True)
class Still:
    """Where a room stands still: `role` has been told to stop there, see `Member.stop_at_call` and its neighbours."""

    name: str
    role: Role
    command: str
    number: int = 0
    growth: Growth = USUAL
    optimistic: int = 0
    is_offered: bool = True
    is_decided: bool = False

    async def there(self, prefill: Member, decode: Member) -> bool:
        if self.command == "stop_after_puts":
            return prefill.is_stopped
        if self.command == "stop_at_call":
            return bool(await (prefill if self.role is Role.PREFILL else decode).ask("is_still"))
        waits = (await decode.pool()).requests_queued == 1
        return waits and (not self.optimistic or await prefill.ask("is_parked"))


STILLS = (
    Still("waiting for memory", Role.DECODE, "fill", is_offered=False),
    Still("computed before the offer", Role.DECODE, "fill", optimistic=2, is_offered=False),
    Still("computing", Role.PREFILL, "stop_at_call"),
    Still("computing while pages are written", Role.PREFILL, "stop_at_call", 2),
    Still("writing", Role.PREFILL, "stop_after_puts", 5),
    Still("decoding", Role.DECODE, "stop_at_call", 2, is_decided=True),
    Still("being copied", Role.DECODE, "stop_at_call", 1, COPIED, is_decided=True),
    Still("being loaded", Role.DECODE, "stop_at_call", 2, COPIED, is_decided=True),
    Still("computed again by prefill", Role.PREFILL, "stop_at_call", 4, FETCHED_AGAIN, is_decided=True),
)
FEW = tuple(still for still in STILLS if still.name in {"writing", "being loaded", "computed again by prefill"})


async def kill_rounds(stills: Iterable[Still], environment: Mapping[str, str]) -> None:
    """Each side is killed in each of these places."""
    for still in stills:
        prefill = Settings(Role.PREFILL, environment, optimistic=still.optimistic)
        decode = Settings(Role.DECODE, environment, growth=still.growth)
        async with started(prefill, decode) as members:
            for victim in Role.DECODE, Role.PREFILL:
                await _round(still, victim, *members)
            await assert_whole(*members)


async def _round(still: Still, victim: Role, prefill: Member, decode: Member) -> None:
    await serve_until_exact(prefill, decode)
    holder = prefill if still.role is Role.PREFILL else decode
    dying, survivor = (prefill, decode) if victim is Role.PREFILL else (decode, prefill)
    await holder.ask(still.command, still.number)
    request = new_request(prefill, PROMPT_TOKENS, NEW_TOKENS)
    legs = [asyncio.create_task(each.generate(request)) for each in (prefill, decode)]
    await eventually(lambda: still.there(prefill, decode), still.name)
    await dying.kill()
    if victim is Role.DECODE and not still.is_offered:
        legs[0].cancel()  # prefill has not heard of this decode: it is its client that ends the room
    if survivor is holder:
        await _go_on(holder)
    await asyncio.wait(legs)
    if not legs[0].cancelled():
        outcome = Outcome(request, legs[0].result(), legs[1].result())
        outcome.check(LOST)
        assert outcome.is_exact is (still.is_decided and victim is Role.PREFILL), outcome
    await assert_whole(survivor)
    await dying.restart()
    await serve_until_exact(prefill, decode)


async def _go_on(holder: Member) -> None:
    if holder.is_stopped:
        holder.signal(signal.SIGCONT)
    else:
        await holder.ask("go_on")
