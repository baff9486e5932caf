"""Answers that are being written while long prompts arrive: how much the prompts disturb them.

A step takes longer the longer the answers are. So each round is sent twice, with prompts and without, and what is
compared are the gaps before the same tokens of the same answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pd_common.cli.bench.compare.bench import Bench
from pd_common.cli.bench.compare.model import VOCAB_SIZE
from pd_common.cli.bench.compare.result import Comparison, Row
from pd_common.cli.bench.compare.setups import Setup
from pd_common.cli.bench.compare.shot import Shooter, in_turns, server_of, warm_up
from pd_common.cli.bench.compare.sizes import Sizes
from pd_common.cli.bench.serve.exchange import Log
from pd_common.cli.bench.serve.figures import Figures, Spread
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
                logs[setup.name] = _twice(setup, sizes, rate_per_s, bench.seed + number)
            found.append({setup.name: logs[setup.name] for setup in setups})
    about = (
        f"{sizes.streams} answers are written all the time, {sizes.load_requests} prompts of {sizes.load_prompt:,} "
        f"tokens arrive at random moments, {rate_per_s:.2f}/s, which keeps the pair's prefill busy for "
        f"{100 * _BUSY:.0f} % of the time"
    )
    last = {name: twice.loaded for name, twice in found[-1].items()}
    return Comparison("itl", about, specs, tuple(last), rows([list(logs.values()) for logs in found]), last)


async def _prefill_s(setup: Setup, sizes: Sizes) -> float:
    """How long one prompt takes while nothing else is going on."""
    shooter = Shooter(setup)
    try:
        return await warm_up(shooter, sizes.load_prompt, sizes.kv_cache_tokens) / 1e3
    finally:
        await shooter.close()


@dataclass(frozen=True, slots=True)
class Twice:
    """The same answers beneath prompts, and by themselves for at least as long."""

    loaded: Log
    alone: Log

    def gaps_s(self) -> tuple[list[float], list[float]]:
        """With prompts and without, each time of the same tokens: all that came while there were prompts."""
        first_s = self.loaded.prompts_from_s or 0.0
        last_s = max((exchange.done_s or 0.0 for exchange in self.loaded.prompts), default=0.0)
        twins = {exchange.number: exchange.arrived_s for exchange in self.alone.background}
        loaded: list[float] = []
        alone: list[float] = []
        for exchange in self.loaded.background:
            gaps = pairwise(exchange.arrived_s)
            for (before, after), (twin_before, twin_after) in zip(
                gaps, pairwise(twins.get(exchange.number, [])), strict=False
            ):
                if first_s <= after <= last_s:
                    loaded.append(after - before)
                    alone.append(twin_after - twin_before)
        return loaded, alone


def _twice(setup: Setup, sizes: Sizes, rate_per_s: float, seed: int) -> Twice:
    loaded = _logged(setup, plan(sizes, rate_per_s, seed, requests=sizes.load_requests, alone_s=sizes.alone_s))
    last_s = max((at_s for exchange in loaded.background for at_s in exchange.arrived_s), default=0.0)
    lasted_s = last_s - (loaded.alone_from_s or last_s)
    return Twice(loaded, _logged(setup, plan(sizes, rate_per_s, seed, requests=0, alone_s=lasted_s)))


def plan(sizes: Sizes, rate_per_s: float, seed: int, *, requests: int, alone_s: float) -> Plan:
    """The load of one round, the same for every set-up."""
    return Plan(
        seed=seed,
        arrivals=Arrivals(rate_per_s, None, 0, requests, None),
        prompt=Uniform(sizes.load_prompt, sizes.load_prompt),
        output=Uniform(sizes.short, sizes.short),
        prefix_tokens=0,
        vocab=VOCAB_SIZE,
        background=Background(sizes.streams, sizes.stream_tokens, alone_s),
    )


def _logged(setup: Setup, load: Plan) -> Log:
    log = Log()
    asyncio.run(send_to(server_of(setup), fields_of(setup.model, ignore_eos=True), load, log))
    for exchange in (*log.prompts, *log.background):
        if exchange.failure is not None:
            raise PeerLost(f"{setup.name}: a request has failed: {exchange.failure}")
    return log


def rows(rounds: Sequence[Sequence[Twice]]) -> tuple[Row, ...]:
    """Of each round the logs, in the order of columns."""
    figures = [[Figures.of(each.loaded, None) for each in columns] for columns in rounds]
    gaps = [[each.gaps_s() for each in columns] for columns in rounds]
    ttft = [[_some(each.ttft) for each in columns] for columns in figures]
    late = [[_some(each.lag) for each in columns] for columns in figures]
    loaded = [[_some(Spread.of(with_prompts)) for with_prompts, _ in columns] for columns in gaps]
    alone = [[_some(Spread.of(without)) for _, without in columns] for columns in gaps]
    return (
        Row.of("ITL p50, no prompts", "ms", [[each.p50_ms for each in columns] for columns in alone]),
        Row.of("ITL p99, no prompts", "ms", [[each.p99_ms for each in columns] for columns in alone]),
        Row.of("ITL p50, prompts arrive", "ms", [[each.p50_ms for each in columns] for columns in loaded]),
        Row.of("ITL p99, prompts arrive", "ms", [[each.p99_ms for each in columns] for columns in loaded]),
        Row.of("ITL worst, prompts arrive", "ms", [[each.worst_ms for each in columns] for columns in loaded]),
        Row.of(
            "ITL p99, with / without prompts",
            "",
            [
                [high.p99_ms / low.p99_ms for high, low in zip(*columns, strict=True)]
                for columns in zip(loaded, alone, strict=True)
            ],
            "pair <= 1.5, alone >= 4",
        ),
        Row.of("TTFT p50 of these prompts", "ms", [[each.p50_ms for each in columns] for columns in ttft]),
        Row.of("TTFT worst of these prompts", "ms", [[each.worst_ms for each in columns] for columns in ttft]),
        Row.of("p99 of what the client itself was late", "ms", [[each.p99_ms for each in columns] for columns in late]),
    )


def _some(spread: Spread | None) -> Spread:
    if spread is None:
        raise PeerLost("a round was too short: nothing was written in it")
    return spread
