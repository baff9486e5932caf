"""One request, one trace: every stage of all three processes, each span with its room."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from demo import timeline
from demo.cluster import Cluster
from pd_common.telemetry.collector import Collector, RecordedSpan
from pd_common.telemetry.spans import ROOM, SpanName
from tests.e2e.harness import Client, client_of, running_cluster
from tests.tiny_models import VOCAB_SIZE

PROMPT = tuple(random.Random(2).choices(range(1, VOCAB_SIZE), k=333))
CHUNK = 100


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


NOT_HERE = {SpanName.PROMPT_COMPUTE, SpanName.RESTORE, SpanName.REFETCH}
"""Of prompts that decode computes alone, and of answers that have lost their pages."""


@pytest.fixture(scope="module")
def pair(collector: Collector) -> Iterator[Cluster]:
    everything_is_sent = ["--no-enable-prefix-cache"]
    with running_cluster(chunk=CHUNK, decode_flags=everything_is_sent, environment=collector.environment) as running:
        yield running


def of_name(spans: list[RecordedSpan], name: SpanName) -> list[RecordedSpan]:
    return [span for span in spans if span.name == name]


async def trace_of(client: Client, collector: Collector, room: int) -> list[RecordedSpan]:
    spans = collector.wait_for(room, timeline.EXPECTED, timeout_s=10)
    assert {span.name for span in spans} >= timeline.EXPECTED
    return spans


async def test_one_trace_tells_every_stage(pair: Cluster, collector: Collector) -> None:
    async with client_of(pair) as client:
        answer = await client.generate(PROMPT, max_new_tokens=8)
        spans = await trace_of(client, collector, answer.room)
    assert {span.service for span in spans} == {"pd-router", "pd-prefill", "pd-decode"}
    assert len({span.trace_id for span in spans}) == 1
    assert {span.attributes[ROOM] for span in spans} == {str(answer.room)}
    assert {span.name for span in spans} == set(SpanName) - NOT_HERE
    assert not any(span.failed for span in spans)
    by_id = {span.span_id: span for span in spans}
    roots = [span for span in spans if span.parent_id not in by_id]
    assert [span.name for span in roots] == [SpanName.ROUTE]


async def test_the_chunks_add_up_and_overlap(pair: Cluster, collector: Collector) -> None:
    async with client_of(pair) as client:
        prompt = PROMPT[::-1]  # of which prefill has nothing yet
        answer = await client.generate(prompt, max_new_tokens=2)
        spans = await trace_of(client, collector, answer.room)
    computed, written = of_name(spans, SpanName.CHUNK_COMPUTE), of_name(spans, SpanName.CHUNK_TRANSFER)
    assert sum(int(span.attributes["tokens"]) for span in computed) == len(prompt)
    assert sum(int(span.attributes["pages"]) for span in written) == -(-len(prompt) // 16)
    assert len(computed) == len(written) == -(-len(prompt) // CHUNK)
    for compute, write in zip(computed, written, strict=True):
        assert write.start_ns >= compute.end_ns, "a page is read only after the step that wrote it"
    for write, next_compute in zip(written, computed[1:], strict=False):
        assert write.start_ns < next_compute.end_ns, "a chunk is written while the next one is computed"
    assert {span.attributes["carrier"] for span in written} == {"cma"}


async def test_what_prefill_has_of_a_prompt_is_written_first_and_not_computed(
    pair: Cluster, collector: Collector
) -> None:
    cached_tokens = (len(PROMPT) - 1) // 16 * 16
    async with client_of(pair) as client:
        await client.generate(PROMPT, max_new_tokens=1)
        answer = await client.generate(PROMPT, max_new_tokens=2)
        spans = await trace_of(client, collector, answer.room)
    assert answer.last.usage.cached_tokens == cached_tokens
    computed, written = of_name(spans, SpanName.CHUNK_COMPUTE), of_name(spans, SpanName.CHUNK_TRANSFER)
    assert [int(span.attributes["tokens"]) for span in computed] == [len(PROMPT) - cached_tokens]
    assert [int(span.attributes["pages"]) for span in written] == [cached_tokens // 16, 1]
    assert written[0].start_ns < computed[0].end_ns


async def test_decodes_stages_follow_each_other_without_a_gap(pair: Cluster, collector: Collector) -> None:
    async with client_of(pair) as client:
        answer = await client.generate(PROMPT, max_new_tokens=4)
        spans = await trace_of(client, collector, answer.room)
    [root] = of_name(spans, SpanName.DECODE)
    stages = [span for span in spans if span.parent_id == root.span_id]
    names = ["PEERING", "PREALLOC_WAIT", "ALLOCATE", "TRANSFER_WAIT", "GATE", "FIRST_TOKEN", "DECODE_STEPS"]
    assert [span.name for span in stages] == [SpanName[name] for name in names]
    for before, after in itertools.pairwise(stages):
        assert before.end_ns == after.start_ns


async def test_two_legs_of_a_direct_client_meet_in_the_rooms_own_trace(pair: Cluster, collector: Collector) -> None:
    async with client_of(pair) as client:
        await client.direct(PROMPT, room=31337, max_new_tokens=2)
        spans = collector.wait_for(31337, frozenset({SpanName.PREFILL, SpanName.DECODE}), timeout_s=10)
    assert {span.service for span in spans} == {"pd-prefill", "pd-decode"}
    assert len({span.trace_id for span in spans}) == 1
