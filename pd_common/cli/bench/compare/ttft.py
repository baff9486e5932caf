"""How long a prompt takes until its first token when nothing else is going on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from pd_common.cli.bench.compare.bench import Bench
from pd_common.cli.bench.compare.result import Comparison, Row
from pd_common.cli.bench.compare.setups import Setup
from pd_common.cli.bench.compare.shot import Shooter, in_turns, prompts, warm_up

_ROUNDS = 4
"""Of single requests, for each round that is asked for."""


def measure(bench: Bench) -> Comparison:
    """A pair, one engine alone on prefill's core, and one on both cores."""
    starter, cores = bench.starter, bench.starter.cores
    specs = (
        starter.pair(),
        starter.alone("alone, 1 core", frozenset((cores.first,))),
        starter.alone("alone, 2 cores", cores.both),
    )
    with starter.running(*specs) as setups:
        found = asyncio.run(rows(bench, setups))
    about = "one prompt at a time, nothing else; the ratio is to one engine alone that has prefill's core"
    return Comparison("ttft", about, specs, tuple(spec.name for spec in specs), found, {})


async def rows(bench: Bench, setups: Sequence[Setup]) -> tuple[Row, ...]:
    """A row for each length of prompt, a column for each set-up."""
    shooters, numbers = [Shooter(setup) for setup in setups], itertools.count()
    try:
        for shooter in shooters:
            bench.progress(f"ttft, warming up: {shooter.setup.name}")
            await warm_up(shooter, max(bench.sizes.ttft_prompts), bench.sizes.kv_cache_tokens)
        return tuple(
            [
                Row.of(
                    f"TTFT, {tokens:,} tokens", "ms", await _rounds(bench, shooters, tokens, numbers), "ratio <= 1.10"
                )
                for tokens in bench.sizes.ttft_prompts
            ]
        )
    finally:
        for shooter in shooters:
            await shooter.close()


async def _rounds(
    bench: Bench, shooters: Sequence[Shooter], tokens: int, numbers: itertools.count[int]
) -> list[list[float]]:
    workload, found = prompts(bench.seed, tokens, bench.sizes.short), []
    for number in range(_ROUNDS * bench.rounds):
        bench.progress(f"ttft, {tokens} tokens, round {number + 1}")
        request = workload.request(next(numbers))
        ttft_ms = {shooter: (await shooter.shoot(request)).ttft_ms for shooter in in_turns(shooters, number)}
        found.append([ttft_ms[shooter] for shooter in shooters])
    return found
