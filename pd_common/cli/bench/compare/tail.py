"""Where the time until the first token goes: before prefill computes, computing, and after its last chunk.

Prefill's own part is taken from its spans, which are on the same clock as the client. Writing them costs a little time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import pairwise

from pd_common.cli.bench.compare.bench import Bench
from pd_common.cli.bench.compare.result import Comparison, Row
from pd_common.cli.bench.compare.setups import Setup
from pd_common.cli.bench.compare.shot import Shooter, Shot, prompts, warm_up
from pd_common.errors import TransferFailed
from pd_common.telemetry.collector import Collector, RecordedSpan
from pd_common.telemetry.spans import SpanName

_ROUNDS = 4
_SPANS_S = 10.0
_TARGETS = {1024: "<= 8 ms", 4096: "<= 20 ms"}
_ALL = frozenset({SpanName.CHUNK_COMPUTE, SpanName.PREFILL})
"""Prefill's whole part is the last of its spans to end."""


def measure(bench: Bench) -> Comparison:
    """A pair that writes spans."""
    with Collector() as collector:
        spec = bench.starter.pair("pair, traced", environment=collector.environment)
        with bench.starter.running(spec) as (setup,):
            rows = asyncio.run(_rows(bench, setup, collector))
    about = "where the time until the first token goes, by prefill's own spans"
    return Comparison("tail", about, (spec,), (spec.name,), rows, {})


async def _rows(bench: Bench, setup: Setup, collector: Collector) -> tuple[Row, ...]:
    shooter, rows = Shooter(setup), []
    try:
        bench.progress("tail, warming up")
        await warm_up(shooter, max(bench.sizes.ttft_prompts), bench.sizes.kv_cache_tokens)
        for place, tokens in enumerate(bench.sizes.ttft_prompts):
            bench.progress(f"tail, {tokens} tokens")
            workload = prompts(bench.seed + place, tokens, bench.sizes.short)
            shots = [await shooter.shoot(workload.request(number)) for number in range(_ROUNDS * bench.rounds)]
            rows += parts(tokens, [(shot, _computed(collector, shot)) for shot in shots])
    finally:
        await shooter.close()
    return tuple(rows)


def _computed(collector: Collector, shot: Shot) -> list[RecordedSpan]:
    spans = collector.wait_for(shot.room, _ALL, _SPANS_S)
    if _ALL - {span.name for span in spans}:
        raise TransferFailed(f"the spans of room {shot.room} have not come")
    return [span for span in spans if span.name == SpanName.CHUNK_COMPUTE]


def parts(tokens: int, shots: Iterable[tuple[Shot, Sequence[RecordedSpan]]]) -> list[Row]:
    """The three parts of each shot, whose sum is its TTFT; with each come the chunks that prefill computed for it."""
    rounds = []
    for shot, chunks in shots:
        began_ns, ended_ns = min(chunk.start_ns for chunk in chunks), max(chunk.end_ns for chunk in chunks)
        edges_ns = (shot.sent_ns, began_ns, ended_ns, shot.first_ns)
        rounds.append([(later - earlier) / 1e6 for earlier, later in pairwise(edges_ns)])
    before, computing, after = zip(*rounds, strict=True)
    return [
        Row.of(f"{tokens:,} tokens: until prefill computes", "ms", [[value] for value in before]),
        Row.of(f"{tokens:,} tokens: prefill computes", "ms", [[value] for value in computing]),
        Row.of(
            f"{tokens:,} tokens: after its last chunk",
            "ms",
            [[value] for value in after],
            _TARGETS.get(tokens, ""),
        ),
    ]
