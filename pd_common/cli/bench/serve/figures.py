"""Figures out of exchanges: pure arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from pd_common.cli.bench.serve.exchange import Exchange, Failure, Log


@dataclass(frozen=True, slots=True)
class Spread:
    """How many there were, their mean, and values that were measured: half of all are at most p50, and so on."""

    count: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    worst_ms: float
    mean_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self | None:
        """None where there is nothing to tell."""
        if not seconds:
            return None
        values = np.asarray(seconds) * 1e3
        quantiles = np.quantile(values, (0.5, 0.9, 0.99, 1.0), method="inverted_cdf")
        return cls(len(values), *(round(float(value), 3) for value in (*quantiles, values.mean())))


@dataclass(frozen=True, slots=True)
class Slo:
    """What a client is content with; None: whatever it is. A request's ITL is the p99 of its own gaps."""

    ttft_ms: float | None
    itl_ms: float | None

    def is_met(self, exchange: Exchange) -> bool:
        itl = Spread.of(exchange.gaps_s)
        return (
            exchange.is_answered
            and (self.ttft_ms is None or 1e3 * exchange.ttft_s <= self.ttft_ms)
            and (self.itl_ms is None or itl is None or itl.p99_ms <= self.itl_ms)
        )

    def __str__(self) -> str:
        wants = (("TTFT", self.ttft_ms), ("ITL p99", self.itl_ms))
        return ", ".join(f"{name} <= {limit_ms:g} ms" for name, limit_ms in wants if limit_ms is not None)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests within the SLO: their share of all that were sent, and how many a second."""

    share: float
    per_s: float


@dataclass(frozen=True, slots=True)
class Failures:
    """Requests that failed in the same way, and what the first of them was told."""

    status: int | None
    code: str
    count: int
    message: str

    @classmethod
    def of(cls, exchanges: Iterable[Exchange]) -> list[Self]:
        failed = [exchange.failure for exchange in exchanges if exchange.failure is not None]
        first: dict[tuple[int | None, str], Failure] = {}
        for failure in failed:
            first.setdefault((failure.status, failure.code), failure)
        counts = Counter((failure.status, failure.code) for failure in failed)
        return [cls(*kind, count, first[kind].message) for kind, count in counts.most_common()]


@dataclass(frozen=True, slots=True)
class BackgroundFigures:
    """The streams beneath the prompts."""

    alone: Spread | None
    """ITL from when all of them had begun until the first prompt was due."""
    under_load: Spread | None
    """ITL from when the first prompt that is measured was sent until the last was answered."""
    failures: list[Failures]

    @property
    def p99_ratio(self) -> float | None:
        """How many times longer the p99 is under load."""
        if self.alone is None or self.under_load is None or not self.alone.p99_ms:
            return None
        return self.under_load.p99_ms / self.alone.p99_ms


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything that one run found. Times and rates are of requests that were answered whole."""

    sent: int
    answered: int
    unfinished: int
    """Cut off by Ctrl-C."""
    seconds: float
    """From the first request that counts to the end of the last."""
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_events: int
    """Fewer than tokens where the server sends several at once: each gap is then one between events."""
    ttft: Spread | None
    itl: Spread | None
    e2e: Spread | None
    goodput: Goodput | None
    failures: list[Failures]
    background: BackgroundFigures | None
    lag: Spread | None
    """How late this client was itself."""

    @classmethod
    def of(cls, log: Log, slo: Slo | None) -> Self:
        answered = [exchange for exchange in log.prompts if exchange.is_answered]
        usages = [exchange.usage for exchange in answered if exchange.usage is not None]
        output_tokens = sum(exchange.output_tokens for exchange in answered)
        seconds = _last_s(log.prompts) - _first_s(log.prompts)
        return cls(
            sent=len(log.prompts),
            answered=len(answered),
            unfinished=sum(exchange.failure is None and not exchange.is_answered for exchange in log.prompts),
            seconds=seconds,
            requests_per_s=_per(len(answered), seconds),
            output_tokens_per_s=_per(output_tokens, seconds),
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
            output_tokens=output_tokens,
            output_events=sum(len(exchange.arrived_s) for exchange in answered),
            ttft=Spread.of([exchange.ttft_s for exchange in answered]),
            itl=Spread.of([gap for exchange in answered for gap in exchange.gaps_s]),
            e2e=Spread.of([exchange.last_s - exchange.sent_s for exchange in answered]),
            goodput=None if slo is None else _goodput(log.prompts, slo, seconds),
            failures=Failures.of(log.prompts),
            background=_background(log) if log.background else None,
            lag=Spread.of(log.late_s),
        )


def _background(log: Log) -> BackgroundFigures:
    from_s, until_s = _first_s(log.prompts), _last_s(log.prompts)
    alone_until_s = _last_s(log.background) if log.prompts_from_s is None else log.prompts_from_s
    gaps = [gap for exchange in log.background for gap in pairwise(exchange.arrived_s)]
    return BackgroundFigures(
        alone=Spread.of([end - begin for begin, end in gaps if log.alone_from_s <= begin and end <= alone_until_s]),
        under_load=Spread.of([end - begin for begin, end in gaps if from_s <= end and begin <= until_s]),
        failures=Failures.of(log.background),
    )


def _goodput(exchanges: Sequence[Exchange], slo: Slo, seconds: float) -> Goodput:
    good = sum(slo.is_met(exchange) for exchange in exchanges)
    return Goodput(_per(good, len(exchanges)), _per(good, seconds))


def _first_s(exchanges: Iterable[Exchange]) -> float:
    return min((exchange.sent_s for exchange in exchanges), default=0.0)


def _last_s(exchanges: Iterable[Exchange]) -> float:
    return max((exchange.last_s for exchange in exchanges), default=0.0)


def _per(count: float, whole: float) -> float:
    return count / whole if whole else 0.0
