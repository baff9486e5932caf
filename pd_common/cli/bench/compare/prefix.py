"""A prompt whose beginning both sides still have: how many bytes move, and what that does to its TTFT."""

from __future__ import annotations

import asyncio

from pd_common.cli.bench.compare.bench import Bench
from pd_common.cli.bench.compare.result import Comparison, Row
from pd_common.cli.bench.compare.setups import Setup
from pd_common.cli.bench.compare.shot import Shooter, bytes_moved, prompts, warm_up


def measure(bench: Bench) -> Comparison:
    """One pair; a prompt with a new beginning, and another with the same one."""
    spec = bench.starter.pair()
    with bench.starter.running(spec) as (setup,):
        rows = asyncio.run(_rows(bench, setup))
    about = (
        f"a prompt of {bench.sizes.prefix_prompt:,} tokens, of which both sides have {bench.sizes.prefix:,}, or none"
    )
    return Comparison("prefix", about, (spec,), ("warm", "cold"), rows, {})


async def _rows(bench: Bench, setup: Setup) -> tuple[Row, ...]:
    sizes, prefill, shooter = bench.sizes, setup.addresses["prefill"], Shooter(setup)
    ttft_ms, moved, cached = [], [], []
    try:
        bench.progress("prefix, warming up")
        await warm_up(shooter, sizes.prefix_prompt, sizes.kv_cache_tokens)
        for number in range(bench.rounds):
            bench.progress(f"prefix, round {number + 1} of {bench.rounds}")
            workload = prompts(bench.seed + number, sizes.prefix_prompt, sizes.short, sizes.prefix)
            cold, warm = [await shooter.shoot(workload.request(place)) for place in range(2)]
            pair = warm, cold
            ttft_ms.append([shot.ttft_ms for shot in pair])
            moved.append([await bytes_moved(prefill, shot.room) / 1e6 for shot in pair])
            cached.append([float(shot.cached_tokens) for shot in pair])
    finally:
        await shooter.close()
    return (
        Row.of("KV moved", "MB", moved, "ratio <= 0.13"),
        Row.of("TTFT", "ms", ttft_ms),
        Row.of("tokens that usage calls cached", "", cached),
    )
