"""Answers that are being written while long prompts arrive: how much the prompts disturb them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pd_common.cli.bench.compare.bench import Bench
from pd_common.cli.bench.compare.model import VOCAB_SIZE
from pd_common.cli.bench.compare.result import Comparison, Row
from pd_common.cli.bench.compare.setups import Setup
from pd_common.cli.bench.compare.shot import Shooter, in_turns, server_of, warm_up
from pd_common.cli.bench.compare.sizes import Sizes
from pd_common.cli.bench.serve.exchange import Log
from pd_common.cli.bench.serve.figures import BackgroundFigures, Figures, Spread
from pd_common.cli.bench.serve.lengths import Uniform
from pd_common.cli.bench.serve.plan import Arrivals, Background, Plan
from pd_common.cli.bench.serve.run import fields_of, send_to
from pd_common.errors import PeerLost

_BUSY = 0.7
"""Share of the time in which the pair's prefill computes. Clearly more than one gap in a hundred of one engine alone
then has a prompt in it: at half the time it is about one, and the p99 would depend on chance."""


def measure(bench: Bench) -> Comparison:
    """A pair, one engine alone with as many cores, and one on the core that no client and no router uses."""
    starter, sizes = bench.starter, bench.sizes
    specs = (
        starter.pair(),
        starter.alone("alone, 2 cores", starter.cores.both),
        starter.alone("alone, 1 core", frozenset((starter.cores.second,))),
    )
    with starter.running(*specs) as setups:
        bench.progress("itl, warming up")
        prefill_s = [asyncio.run(_prefill_s(setup, sizes)) for setup in setups]
        rate_per_s = _BUSY / prefill_s[0]
        found = []
        for number in range(bench.rounds):
            logs = {}
            for setup in in_turns(setups, number):
                bench.progress(f"itl, round {number + 1} of {bench.rounds}: {setup.name}")
                logs[setup.name] = _logged(setup, plan(sizes, rate_per_s, bench.seed + number))
            found.append({setup.name: logs[setup.name] for setup in setups})
    about = (
        f"{sizes.streams} answers are written all the time, {sizes.load_requests} prompts of {sizes.load_prompt:,} "
        f"tokens arrive at random moments, {rate_per_s:.2f}/s, which keeps the pair's prefill busy for "
        f"{100 * _BUSY:.0f} % of the time"
    )
    return Comparison("itl", about, specs, tuple(found[-1]), rows([list(logs.values()) for logs in found]), found[-1])


async def _prefill_s(setup: Setup, sizes: Sizes) -> float:
    """How long one prompt takes while nothing else is going on."""
    shooter = Shooter(setup)
    try:
        return await warm_up(shooter, sizes.load_prompt, sizes.kv_cache_tokens) / 1e3
    finally:
        await shooter.close()


def plan(sizes: Sizes, rate_per_s: float, seed: int) -> Plan:
    """The load of one round, the same for every set-up."""
    return Plan(
        seed=seed,
        arrivals=Arrivals(rate_per_s, None, 1, sizes.load_requests, None),
        prompt=Uniform(sizes.load_prompt, sizes.load_prompt),
        output=Uniform(sizes.short, sizes.short),
        prefix_tokens=0,
        vocab=VOCAB_SIZE,
        background=Background(sizes.streams, sizes.stream_tokens, sizes.alone_s),
    )


def _logged(setup: Setup, load: Plan) -> Log:
    log = Log()
    asyncio.run(send_to(server_of(setup), fields_of(setup.model, ignore_eos=True), load, log))
    for exchange in (*log.prompts, *log.background):
        if exchange.failure is not None:
            raise PeerLost(f"{setup.name}: a request has failed: {exchange.failure}")
    return log


def rows(rounds: Sequence[Sequence[Log]]) -> tuple[Row, ...]:
    """Of each round the logs, in the order of columns."""
    figures = [[Figures.of(log, None) for log in logs] for logs in rounds]
    streams = [[_streams(each) for each in columns] for columns in figures]
    ttft = [[_some(each.ttft) for each in columns] for columns in figures]
    late = [[_some(each.lag) for each in columns] for columns in figures]
    alone = [[_some(each.alone) for each in columns] for columns in streams]
    loaded = [[_some(each.under_load) for each in columns] for columns in streams]
    return (
        Row.of("ITL p50, no prompts", "ms", [[each.p50_ms for each in columns] for columns in alone]),
        Row.of("ITL p99, no prompts", "ms", [[each.p99_ms for each in columns] for columns in alone]),
        Row.of("ITL p50, prompts arrive", "ms", [[each.p50_ms for each in columns] for columns in loaded]),
        Row.of("ITL p99, prompts arrive", "ms", [[each.p99_ms for each in columns] for columns in loaded]),
        Row.of("ITL worst, prompts arrive", "ms", [[each.worst_ms for each in columns] for columns in loaded]),
        Row.of(
            "ITL p99, with / without prompts",
            "",
            [[each.p99_ratio or 0.0 for each in columns] for columns in streams],
            "pair <= 1.5, alone >= 4",
        ),
        Row.of("TTFT p50 of these prompts", "ms", [[each.p50_ms for each in columns] for columns in ttft]),
        Row.of("TTFT worst of these prompts", "ms", [[each.worst_ms for each in columns] for columns in ttft]),
        Row.of("p99 of what the client itself was late", "ms", [[each.p99_ms for each in columns] for columns in late]),
    )


def _streams(figures: Figures) -> BackgroundFigures:
    if figures.background is None:
        raise PeerLost("there were no answers beneath the prompts")
    return figures.background


def _some(spread: Spread | None) -> Spread:
    if spread is None:
        raise PeerLost("a round was too short: nothing was written in it")
    return spread
