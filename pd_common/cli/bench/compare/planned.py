"""Whether the simulation behind `pdctl plan` says what a pair does: mean TTFT and ITL under load, seen and simulated.

Both are of the same requests. The simulation knows the pair only by the speeds that the probe of `pdctl plan` finds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from pd_common.cli.bench.compare.bench import Bench
from pd_common.cli.bench.compare.model import VOCAB_SIZE
from pd_common.cli.bench.compare.result import Comparison, Row
from pd_common.cli.bench.compare.setups import Setup
from pd_common.cli.bench.compare.shot import Shooter, server_of, warm_up
from pd_common.cli.bench.compare.sizes import Sizes
from pd_common.cli.bench.serve.client import Completions
from pd_common.cli.bench.serve.exchange import Exchange, Log
from pd_common.cli.bench.serve.lengths import Uniform
from pd_common.cli.bench.serve.plan import Arrivals, Plan
from pd_common.cli.bench.serve.run import fields_of, send_to
from pd_common.cli.plan.load import arrivals_of
from pd_common.cli.plan.probe import Probe, ProbeSizes, Seen
from pd_common.errors import PeerLost
from pd_common.planning.simulation import Arrival, Fleet, Served, simulate
from pd_common.planning.speeds import Settings, Speeds, chunks_of, fit

_BUSY = (0.3, 0.5, 0.7)
"""Shares of the time in which prefill computes."""
_PROBE_SEED = 2**33
"""No other prompt begins as the probe's do: other seeds are below this."""
_ANSWERS = 8
"""Side by side in the probe; more are seldom written at once in what is sent."""


def measure(bench: Bench) -> Comparison:
    """One pair: its speeds, then the loads of each round."""
    sizes, spec = bench.sizes, bench.starter.pair()
    with bench.starter.running(spec) as (setup,):
        bench.progress("planned, warming up")
        asyncio.run(_warm_up(setup, sizes))
        seen = asyncio.run(_probe(bench, setup))
        speeds = fit(Settings(kv_cache_tokens=sizes.kv_cache_tokens), seen.singles, seen.bursts, seen.gaps)
        rounds = [_round(bench, setup, speeds, number) for number in range(bench.rounds)]
    about = (
        f"{2 * sizes.load_requests} prompts of {_lengths(sizes)} tokens at random moments, at rates that keep prefill "
        f"busy for a share of the time, beside a simulation of the same requests with measured speeds"
    )
    return Comparison("planned", about, (spec,), ("seen", "simulated"), rows(rounds), {})


async def _warm_up(setup: Setup, sizes: Sizes) -> None:
    shooter = Shooter(setup)
    try:
        await warm_up(shooter, sizes.load_prompt, sizes.kv_cache_tokens)
    finally:
        await shooter.close()


async def _probe(bench: Bench, setup: Setup) -> Seen:
    server, fields = server_of(setup), fields_of(setup.model, ignore_eos=True)
    most_answers = min(_ANSWERS, bench.sizes.streams)
    sizes = ProbeSizes.up_to(bench.sizes.load_prompt, most_answers, bench.sizes.kv_cache_tokens)
    async with server.session() as session:
        probe = Probe(Completions(server, session, fields), VOCAB_SIZE, _PROBE_SEED + bench.seed, sizes, bench.progress)
        return await probe.run()


@dataclass(frozen=True, slots=True)
class Load:
    """One load: what the client saw, and what the simulation says."""

    seen: tuple[Exchange, ...]
    simulated: tuple[Served, ...]


def _round(bench: Bench, setup: Setup, speeds: Speeds, number: int) -> list[Load]:
    loads, requests, seed = [], 2 * bench.sizes.load_requests, bench.seed + number
    for busy in _BUSY:
        bench.progress(f"planned, round {number + 1} of {bench.rounds}: prefill busy {100 * busy:.0f} %")
        plan = _plan(bench.sizes, seed, requests, 1.0)
        computing_s = fmean(_computing_s(speeds, each) for each in arrivals_of(plan.prompts(), 1.0, requests))
        loads.append(_load(setup, speeds, _plan(bench.sizes, seed, requests, busy / computing_s), busy / computing_s))
    return loads


def _plan(sizes: Sizes, seed: int, requests: int, per_s: float) -> Plan:
    return Plan(
        seed=seed,
        arrivals=Arrivals(per_s, None, 0, requests, None),
        prompt=_lengths(sizes),
        output=Uniform(sizes.short, 4 * sizes.short),
        prefix_tokens=0,
        vocab=VOCAB_SIZE,
        background=None,
    )


def _lengths(sizes: Sizes) -> Uniform:
    return Uniform(sizes.load_prompt // 4, sizes.load_prompt)


def _computing_s(speeds: Speeds, arrival: Arrival) -> float:
    return sum(speeds.prefill.took_s((chunk,)) for chunk in chunks_of(arrival.prompt_tokens, speeds.settings))


def _load(setup: Setup, speeds: Speeds, plan: Plan, per_s: float) -> Load:
    log = Log()
    asyncio.run(send_to(server_of(setup), fields_of(setup.model, ignore_eos=True), plan, log))
    for exchange in log.prompts:
        if not exchange.is_answered:
            raise PeerLost(f"{setup.name}: a request has failed: {exchange.failure}")
    arrivals = arrivals_of(plan.prompts(), per_s, len(log.prompts))
    return Load(tuple(log.prompts), simulate(speeds, Fleet(1, 1), arrivals).served)


def rows(rounds: Sequence[Sequence[Load]]) -> tuple[Row, ...]:
    """Of each round the loads, in the order of `_BUSY`."""
    found = []
    for busy, loads in zip(_BUSY, zip(*rounds, strict=True), strict=True):
        name = f"prefill busy {100 * busy:.0f} %"
        found.append(Row.of(f"mean TTFT, {name}", "ms", list(map(_mean_ttft_ms, loads)), "ratio 0.85 - 1.15"))
        found.append(Row.of(f"mean ITL, {name}", "ms", list(map(_mean_itl_ms, loads))))
    return tuple(found)


def _mean_ttft_ms(load: Load) -> tuple[float, float]:
    return 1e3 * fmean(each.ttft_s for each in load.seen), 1e3 * fmean(each.ttft_s for each in load.simulated)


def _mean_itl_ms(load: Load) -> tuple[float, float]:
    seen = fmean(fmean(each.gaps_s) for each in load.seen if each.gaps_s)
    return 1e3 * seen, 1e3 * fmean(each.itl_s for each in load.simulated if each.itl_s is not None)
