"""The fewest replicas that keep an SLO: a lower bound from the work that there is, then simulations from there on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean

from pd_common.errors import CapacityExceeded
from pd_common.planning.simulation import Arrival, Fleet, Outcome, Served, check_size, simulate
from pd_common.planning.speeds import Chunk, Speeds

_IDLE_PREFILL, _IDLE_DECODE = 0.05, 1.02
"""Share of the time that a prefill computes, and answers in a step of decode: below that more of them do not help."""


class Limit(StrEnum):
    """What keeps a fleet from its SLO."""

    PREFILL_COMPUTE = "prefill's computing"
    DECODE_COMPUTE = "decode's steps"
    DECODE_PAGES = "decode's pages"


@dataclass(frozen=True, slots=True)
class Slo:
    """`share` of the requests have their first token within `ttft_s`, and the p99 of their own gaps within `itl_s`."""

    ttft_s: float
    itl_s: float
    share: float

    def is_ttft_met(self, served: Served) -> bool:
        return served.ttft_s <= self.ttft_s

    def is_itl_met(self, served: Served) -> bool:
        return served.itl_p99_s is None or served.itl_p99_s <= self.itl_s


@dataclass(frozen=True, slots=True)
class Trial:
    """A fleet under the load; `limit` is None when it keeps the SLO."""

    fleet: Fleet
    outcome: Outcome
    good: float
    """Share that is within both limits."""
    ttft_s: float
    """The SLO's share of the requests is within that."""
    itl_s: float
    """And within that, the p99 of their own gaps."""
    limit: Limit | None


@dataclass(frozen=True, slots=True)
class Planned:
    """The fleet, and what becomes of it with one replica less: neither is enough, or there is no smaller one."""

    bound: Fleet
    """No smaller one can have the work done at all."""
    chosen: Trial
    smaller: tuple[Trial, ...]


def plan(
    speeds: Speeds, slo: Slo, arrivals: Sequence[Arrival], warm_up: int, progress: Callable[[str], object]
) -> Planned:
    """The first `warm_up` arrivals are in no share.

    Raises:
        CapacityExceeded: no number of replicas keeps the SLO; it says why.

    """
    check_size(speeds, arrivals)
    _check_unloaded(speeds, slo, arrivals)
    bound = lower_bound(speeds, slo, arrivals)
    tried: dict[Fleet, Trial] = {}

    def attempt(fleet: Fleet) -> Trial:
        if fleet not in tried:
            progress(f"simulating {fleet}")
            tried[fleet] = _judged(fleet, simulate(speeds, fleet, arrivals), slo, warm_up)
        return tried[fleet]

    chosen = attempt(bound)
    while chosen.limit is not None:
        chosen = attempt(_larger(chosen))
    while enough := [each for each in map(attempt, _smaller(chosen.fleet)) if each.limit is None]:
        chosen = enough[0]
    smaller = [_lacking(attempt(fleet), chosen) for fleet in _smaller(chosen.fleet)]
    return Planned(bound, chosen, tuple(smaller))


def lower_bound(speeds: Speeds, slo: Slo, arrivals: Sequence[Arrival]) -> Fleet:
    """By the work alone: as if it came evenly, every step of prefill were full, and decode ran as many as it may."""
    rate_per_s = (len(arrivals) - 1) / max(arrivals[-1].at_s - arrivals[0].at_s, 1e-9)
    prefill_s = fmean(_least_s(speeds, each.prompt_tokens) for each in arrivals)
    steps = fmean(each.output_tokens - 1 for each in arrivals)
    return Fleet(
        max(1, math.ceil(rate_per_s * prefill_s)),
        max(1, math.ceil(rate_per_s * steps / _most_tokens_per_s(speeds, slo, arrivals))),
    )


def _least_s(speeds: Speeds, tokens: int) -> float:
    """A prompt's share of full steps."""
    prefill, whole = speeds.prefill, Chunk(0, tokens)
    return prefill.took_s((whole,)) - prefill.step_s * (1 - min(1.0, tokens / speeds.settings.chunked_prefill_size))


def _most_tokens_per_s(speeds: Speeds, slo: Slo, arrivals: Sequence[Arrival]) -> float:
    """Of one decode with as many answers as have memory and a place, and as are within the ITL; one in any case."""
    settings = speeds.settings
    context = fmean(each.prompt_tokens + each.output_tokens / 2 for each in arrivals)
    most = max(1, min(settings.max_running_requests, int(settings.kv_cache_tokens // context)))
    took_s = [(running, speeds.decode.took_s(running, round(running * context))) for running in range(1, most + 1)]
    return max(running / seconds for running, seconds in took_s if running == 1 or seconds <= slo.itl_s)


def _check_unloaded(speeds: Speeds, slo: Slo, arrivals: Sequence[Arrival]) -> None:
    """More replicas make no request faster than it is alone."""
    ttft_s = at_share([speeds.ttft_s(each.prompt_tokens) for each in arrivals], slo.share)
    if ttft_s > slo.ttft_s:
        raise CapacityExceeded(
            f"no number of replicas keeps this SLO: {100 * slo.share:g} % of the prompts shall have their first token "
            f"within {1e3 * slo.ttft_s:,.0f} ms, but with nothing else to do it takes {1e3 * ttft_s:,.0f} ms already"
        )
    step_s = at_share(
        [
            speeds.decode.took_s(1, each.prompt_tokens + each.output_tokens) if each.output_tokens > 1 else 0.0
            for each in arrivals
        ],
        slo.share,
    )
    if step_s > slo.itl_s:
        raise CapacityExceeded(
            f"no number of replicas keeps this SLO: {100 * slo.share:g} % of the answers shall have at most "
            f"{1e3 * slo.itl_s:,.1f} ms between tokens, but one that is alone has {1e3 * step_s:,.1f} ms already"
        )


def _judged(fleet: Fleet, outcome: Outcome, slo: Slo, warm_up: int) -> Trial:
    served = outcome.served[warm_up:]
    good = fmean(slo.is_ttft_met(each) and slo.is_itl_met(each) for each in served)
    ttft_s = at_share([each.ttft_s for each in served], slo.share)
    itl_s = at_share([each.itl_p99_s or 0.0 for each in served], slo.share)
    limit = None if good >= slo.share else _limit(served, slo)
    return Trial(fleet, outcome, good, ttft_s, itl_s, limit)


def _limit(served: Sequence[Served], slo: Slo) -> Limit:
    """By the limit that fewer requests keep, and by what they wait for."""
    if sum(map(slo.is_itl_met, served)) < sum(map(slo.is_ttft_met, served)):
        return Limit.DECODE_COMPUTE
    waits_for_memory = sum(each.memory_s for each in served) > sum(each.queue_s for each in served)
    return Limit.DECODE_PAGES if waits_for_memory else Limit.PREFILL_COMPUTE


def at_share(values: Sequence[float], share: float) -> float:
    """The smallest of them that so large a share is not above."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


def _lacking(trial: Trial, chosen: Trial) -> Trial:
    """By the replica that it has less than the chosen one: that makes the difference, whatever else is short too."""
    if trial.fleet.prefills < chosen.fleet.prefills:
        return replace(trial, limit=Limit.PREFILL_COMPUTE)
    return trial if trial.limit is Limit.DECODE_PAGES else replace(trial, limit=Limit.DECODE_COMPUTE)


def _larger(trial: Trial) -> Fleet:
    """One more of what it lacks."""
    fleet, outcome = trial.fleet, trial.outcome
    if trial.limit is Limit.PREFILL_COMPUTE:
        idle, larger = outcome.prefill_busy < _IDLE_PREFILL, Fleet(fleet.prefills + 1, fleet.decodes)
    else:
        idle, larger = outcome.decode_answers < _IDLE_DECODE, Fleet(fleet.prefills, fleet.decodes + 1)
    if idle:
        raise CapacityExceeded(
            f"more replicas do not help: {fleet} (prefills x decodes) are nearly idle, and {100 * trial.good:.1f} % of "
            "the requests are within the SLO"
        )
    return larger


def _smaller(fleet: Fleet) -> list[Fleet]:
    fewer = (Fleet(fleet.prefills - 1, fleet.decodes), Fleet(fleet.prefills, fleet.decodes - 1))
    return [each for each in fewer if each.prefills and each.decodes]
