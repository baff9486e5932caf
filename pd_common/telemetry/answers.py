"""What Prometheus reads of answers while they pass: time to the first token, gaps between tokens, tokens in and out.

Every token comes by here, so this is plain arithmetic: prometheus_client's own metrics take a lock for each number.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pd_common.generation import Output, Usage

_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ITL_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)


class Distribution:
    """A histogram for one thread."""

    def __init__(self, name: str, what: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._what = what
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """The same value, perhaps several times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(str, self._bounds), "+Inf"]
        family = HistogramMetricFamily(self._name, self._what)
        family.add_metric([], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        yield family


class AnswerMetrics(Collector):
    """The answers that pass one place. They are timed from `begin` on; nothing is kept of one that has ended.

    Names begin with `prefix`: an answer passes an engine and a router, and is not to be counted twice.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._first_s = Distribution(
            f"{prefix}_time_to_first_token_seconds", "From a request to the first token of its answer.", _TTFT_S
        )
        self._between_s = Distribution(
            f"{prefix}_inter_token_seconds", "From one token of an answer to the next.", _ITL_S
        )
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0

    def collect(self) -> Iterator[Metric]:
        yield from self._first_s.collect()
        yield from self._between_s.collect()
        for name, what, value in (
            ("prompt", "Tokens of prompts that were served.", self._prompt_tokens),
            ("cached", "Prompt tokens that the prefix cache had.", self._cached_tokens),
            ("generated", "Tokens of answers, as they come.", self._generated_tokens),
        ):
            yield CounterMetricFamily(f"{self._prefix}_{name}_tokens", what, value)

    def begin(self) -> AnswerClock:
        """A request is there."""
        return AnswerClock(self, time.monotonic())

    def note_first(self, tokens: int, waited_s: float) -> None:
        self._generated_tokens += tokens
        self._first_s.add(waited_s)

    def note_next(self, tokens: int, gap_s: float) -> None:
        """Tokens that come together have shared the time since those before."""
        self._generated_tokens += tokens
        self._between_s.add(gap_s / tokens, tokens)

    def note_usage(self, usage: Usage) -> None:
        self._prompt_tokens += usage.prompt_tokens
        self._cached_tokens += usage.cached_tokens


@dataclass(slots=True, eq=False)
class AnswerClock:
    """One answer, while its pieces come by."""

    _metrics: AnswerMetrics
    _last_s: float
    _has_tokens: bool = False

    def note(self, piece: Output) -> None:
        if tokens := len(piece.token_ids):
            now = time.monotonic()
            note = self._metrics.note_next if self._has_tokens else self._metrics.note_first
            note(tokens, now - self._last_s)
            self._last_s, self._has_tokens = now, True
        if piece.usage is not None:
            self._metrics.note_usage(piece.usage)
