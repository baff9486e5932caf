"""What the pair answers is what transformers' own generate answers, token for token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from demo import timeline
from pd_common.telemetry.collector import Collector
from pd_common.telemetry.spans import SpanName
from tests.e2e.harness import client_of, long_model, running_cluster
from tests.engine.oracle import Oracle
from tests.tiny_models import VOCAB_SIZE

NEW_TOKENS = 12

# family, page size, chunk: no chunk divides a prompt or is a multiple of the page
SHAPES = [
    ("llama", 16, 100),
    pytest.param("qwen2", 1, 37, marks=pytest.mark.slow),
    ("qwen3", 64, 150),
    pytest.param("mistral", 16, 77, marks=pytest.mark.slow),
    pytest.param("llama", 1, 61, marks=pytest.mark.slow),
    pytest.param("mistral", 64, 90, marks=pytest.mark.slow),
]


def _lengths(page_size: int, chunk: int) -> list[int]:
    edges = {1, 2, max(page_size - 1, 1), page_size, page_size + 1, chunk - 1, chunk, chunk + 1, 3 * chunk + 5}
    return sorted(edges) + [random.Random(page_size * chunk).randrange(2, 5 * chunk) for _ in range(8)] + [2311]


def _prompts(page_size: int, chunk: int) -> list[tuple[int, ...]]:
    rng = random.Random(f"{page_size}-{chunk}")
    return [tuple(rng.choices(range(1, VOCAB_SIZE), k=length)) for length in _lengths(page_size, chunk)]


@pytest.mark.parametrize(("family", "page_size", "chunk"), SHAPES)
async def test_greedy_answers_equal_generate(family: str, page_size: int, chunk: int) -> None:
    oracle = Oracle(long_model(family))
    prompts = _prompts(page_size, chunk)
    expected = [oracle.tokens(prompt, NEW_TOKENS) for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) > len(prompts) // 2, "the oracle hardly reacts to its prompt"
    with running_cluster(family, page_size=page_size, chunk=chunk) as running:
        async with client_of(running) as client:
            together = await asyncio.gather(
                *(client.generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in _sixteen(prompts))
            )
            by_prompt = dict(zip(prompts, expected, strict=True))
            assert [answer.token_ids for answer in together] == [by_prompt[prompt] for prompt in _sixteen(prompts)]
            # Prefill has most of these prompts by now.
            one_by_one = [(await client.generate(prompt, max_new_tokens=NEW_TOKENS)).token_ids for prompt in prompts]
            assert one_by_one == expected


def _sixteen(prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [prompts[index % len(prompts)] for index in range(16)]


async def test_pages_travel_by_tcp_as_well() -> None:
    """As between two hosts without RDMA; on one host CMA would be chosen."""
    oracle = Oracle(long_model("llama"))
    prompts = _prompts(16, 100)[::4]
    with Collector() as collector:
        environment = {**collector.environment, "UCX_TLS": "tcp,self"}
        with running_cluster(environment=environment) as running:
            async with client_of(running) as client:
                answers = await asyncio.gather(*(client.generate(p, max_new_tokens=NEW_TOKENS) for p in prompts))
                spans = collector.wait_for(answers[0].room, timeline.EXPECTED, timeout_s=10)
    assert [answer.token_ids for answer in answers] == [oracle.tokens(prompt, NEW_TOKENS) for prompt in prompts]
    carriers = {str(span.attributes["carrier"]) for span in spans if span.name == SpanName.CHUNK_TRANSFER}
    assert {carrier.partition("/")[0] for carrier in carriers} == {"tcp"}
