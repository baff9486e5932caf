"""A prompt for which decode has no memory yet: prefill waits for it, or computes meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pd_common.cli.bench.compare.bench import Bench
from pd_common.cli.bench.compare.result import Comparison, Row
from pd_common.cli.bench.compare.setups import Setup
from pd_common.cli.bench.compare.shot import Shooter, in_turns, prompts
from pd_common.cli.bench.compare.sizes import Sizes

_ATTEMPTS = 3
_SLACK_TOKENS = 64
"""Pages that are not for tokens of requests, and parts of pages."""


def measure(bench: Bench) -> Comparison:
    """Two pairs whose decode's pool is just large enough for the answers that fill it."""
    sizes = bench.sizes
    context = str(sizes.waiting_prompt + sizes.filler_tokens)
    filled = sizes.fillers * (sizes.filler_prompt + sizes.filler_tokens) + _SLACK_TOKENS
    small = (
        *("--kv-cache-tokens", str(filled), "--context-length", context),
        *("--num-reserved-decode-tokens", str(sizes.filler_tokens)),
    )
    specs = tuple(
        bench.starter.pair(
            f"{attempts} attempts",
            prefill=("--optimistic-prefill-attempts", str(attempts), "--context-length", context),
            decode=small,
        )
        for attempts in (_ATTEMPTS, 0)
    )
    with bench.starter.running(*specs) as setups:
        found = asyncio.run(rows(bench, setups))
    about = (
        f"a prompt of {sizes.waiting_prompt:,} tokens while decode's memory is full of {sizes.fillers} answers that "
        f"end soon ({sizes.filler_prompt:,} + {sizes.filler_tokens} tokens each)"
    )
    return Comparison("optimistic", about, specs, tuple(setup.name for setup in setups), found, {})


async def rows(bench: Bench, setups: Sequence[Setup]) -> tuple[Row, ...]:
    """A column for each set-up; the first round warms up."""
    shooters, full, free = [Shooter(setup) for setup in setups], [], []
    try:
        for number in range(1 + bench.rounds):
            waited, alone = {}, {}
            for shooter in in_turns(shooters, number):
                bench.progress(f"optimistic, round {number} of {bench.rounds}: {shooter.setup.name}")
                waited[shooter] = await _when_full(shooter, bench.sizes, bench.seed + number)
                request = prompts(bench.seed + number, bench.sizes.waiting_prompt, bench.sizes.short).request(1)
                alone[shooter] = (await shooter.shoot(request)).ttft_ms
            full.append([waited[shooter] for shooter in shooters])
            free.append([alone[shooter] for shooter in shooters])
    finally:
        for shooter in shooters:
            await shooter.close()
    return (
        Row.of("TTFT, decode's memory is full", "ms", full[1:]),
        Row.of("TTFT, it is free", "ms", free[1:]),
    )


async def _when_full(shooter: Shooter, sizes: Sizes, seed: int) -> float:
    """TTFT in ms of a prompt that is sent when all the answers that fill the memory have begun."""
    fillers = prompts(seed, sizes.filler_prompt, sizes.filler_tokens)
    flights = [shooter.start(fillers.request(2 + number)) for number in range(sizes.fillers)]
    for flight in flights:
        await flight.begun.wait()
    shot = await shooter.shoot(prompts(seed, sizes.waiting_prompt, sizes.short).request(0))
    for flight in flights:
        await flight.answer()
    return shot.ttft_ms
