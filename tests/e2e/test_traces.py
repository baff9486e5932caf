"""One request, one trace: every stage of all three processes, each span with its room; and what they come to."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Sequence

import grpc
import pytest
from pd.v1 import types_pb2

from demo import timeline
from demo.cluster import LOOPBACK, Cluster
from pd_common.control.connection import Connection
from pd_common.inspection.inspector import Inspector
from pd_common.inspection.ttft import account
from pd_common.telemetry.collector import Collector, RecordedSpan
from pd_common.telemetry.spans import ROOM, SpanName
from pd_common.types import BootstrapRoom, Role
from tests.e2e.harness import Client, client_of, make_request, running_cluster
from tests.tiny_models import VOCAB_SIZE

PROMPT = tuple(random.Random(2).choices(range(1, VOCAB_SIZE), k=333))
CHUNK = 100


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


NOT_HERE = {
    *(SpanName.PROMPT_COMPUTE, SpanName.RESTORE, SpanName.REFETCH),
    *(SpanName.ABORT, SpanName.QUARANTINE),
}
"""Of prompts that decode computes alone, of answers that have lost their pages, and of rooms that fail."""


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


# --- the account of the time to first token ---

ABOUT_300_MS = 2500
"""Tokens of a prompt that this machine's engine needs so long for."""


async def first_token_of(client: Client, prompt: Sequence[int]) -> tuple[int, float]:
    """The room, and the milliseconds until the client had its first token."""
    began_ns = time.perf_counter_ns()
    answer = client.generation().Generate(make_request(prompt, max_new_tokens=2), timeout=60)
    first = await anext(aiter(answer))
    took_ms = (time.perf_counter_ns() - began_ns) / 1e6
    async for _ in answer:
        pass
    return first.output.bootstrap_room, took_ms


def dial(address: str, role: Role) -> Connection:
    return Connection(address)


async def test_the_account_is_what_the_client_has_waited_for(pair: Cluster) -> None:
    """Of several requests the one that the machine has disturbed least on its way to the router and back."""
    inspector = Inspector([(f"{LOOPBACK}:{pair.ports.grpc}", Role.ROUTER)], dial)
    off = []
    async with client_of(pair) as client:
        await client.generate(PROMPT, max_new_tokens=1)
        for number in range(4):
            prompt = random.Random(number).choices(range(1, VOCAB_SIZE), k=ABOUT_300_MS)
            room, waited_ms = await first_token_of(client, prompt)
            shares = account(await inspector.room(BootstrapRoom(room)))
            ttft_ms = sum(share.took_ms for share in shares)
            unaccounted_ms = sum(share.took_ms for share in shares if share.span is None)
            assert unaccounted_ms <= 0.01 * ttft_ms
            assert ttft_ms <= waited_ms
            assert {share.role for share in shares} >= {Role.ROUTER, Role.PREFILL, Role.DECODE}
            computing_ms = sum(share.took_ms for share in shares if share.span is SpanName.CHUNK_COMPUTE)
            assert computing_ms > 0.5 * ttft_ms, "most of it is computing, and is said to be"
            off.append((waited_ms - ttft_ms) / max(0.01 * waited_ms, 3.0))
    await inspector.close()
    assert min(off) <= 1, f"times what is allowed: {off}"


# --- rooms that fail, and rooms that wait ---


async def test_an_aborted_room_shows_how_it_came_to_rest_and_how_long_its_memory_was_kept(
    pair: Cluster, collector: Collector
) -> None:
    names = frozenset({*timeline.EXPECTED, SpanName.ABORT, SpanName.QUARANTINE})
    async with client_of(pair) as client:
        prompt = random.Random(77).choices(range(1, VOCAB_SIZE), k=6000)
        answer = asyncio.create_task(client.generate(prompt, max_new_tokens=2, bootstrap_room=4711))
        await client.reached("prefill", types_pb2.TRANSFER_STATE_TRANSFERRING, 4711)
        await client.abort("decode", 4711)
        with pytest.raises(grpc.aio.AioRpcError):
            await answer
        spans = collector.wait_for(4711, names, timeout_s=10)
    [decode], [held] = of_name(spans, SpanName.DECODE), of_name(spans, SpanName.QUARANTINE)
    assert {span.service for span in of_name(spans, SpanName.ABORT)} >= {"pd-decode", "pd-prefill"}
    assert held.attributes["pages"] == 6000 // 16
    assert held.parent_id == decode.span_id
    assert decode.failed
    [waiting] = of_name(spans, SpanName.TRANSFER_WAIT)
    assert (waiting.failed, waiting.attributes["error.type"]) == (True, "ROOM_ABORTED")


async def test_a_room_that_waits_for_memory_says_so(pair: Cluster, collector: Collector) -> None:
    """Two prompts that do not fit beside each other."""
    prompts = [random.Random(seed).choices(range(1, VOCAB_SIZE), k=6500) for seed in (5, 6)]
    async with client_of(pair) as client:
        answers = await asyncio.gather(*(client.generate(prompt, max_new_tokens=1) for prompt in prompts))
        waits = [
            of_name(await trace_of(client, collector, answer.room), SpanName.PREALLOC_WAIT)[0] for answer in answers
        ]
    first, second = sorted(waits, key=lambda span: span.end_ns)
    assert "pd.waited_for" not in first.attributes
    assert second.attributes["pd.waited_for"] == "memory"
    assert float(second.attributes["pd.waited_for_memory_ms"]) > 0.9 * second.milliseconds
