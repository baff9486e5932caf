"""Real processes whose memory is short, or who serve alone: answers stay `generate`'s, token for token."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import httpx
import pytest
from pd.v1 import transfer_status_pb2, types_pb2

from demo.cluster import LOOPBACK, Cluster, Ports, Process
from tests.e2e.harness import Client, client_of, eventually, long_model, running_cluster
from tests.engine.oracle import Oracle
from tests.tiny_models import VOCAB_SIZE

NEW_TOKENS = 24
PROMPTS = [tuple(random.Random(length).choices(range(1, VOCAB_SIZE), k=length)) for length in (1, 15, 16, 90, 180, 333)]


_slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(long_model("llama"))


async def assert_all_as_generate(client: Client, oracle: Oracle) -> None:
    answers = await asyncio.gather(*(client.generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS))
    assert [answer.token_ids for answer in answers] == [oracle.tokens(prompt, NEW_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("page_size", "flags"),
    [
        (16, ["--test-retract-every", "1"]),
        _slow(1, ["--test-retract-every", "3", "--no-enable-prefix-cache"]),
        (16, ["--test-retract-every", "3", "--host-kv-tokens", "0"]),
        _slow(1, ["--test-retract-every", "7", "--host-kv-tokens", "0", "--no-enable-prefix-cache"]),
        _slow(16, ["--kv-cache-tokens", "480", "--num-reserved-decode-tokens", "0"]),
        (16, ["--kv-cache-tokens", "480", "--num-reserved-decode-tokens", "0", "--host-kv-tokens", "0"]),
    ],
    ids=["by copy", "by copy, no cache", "by prefill", "by prefill, no cache", "small pool", "small pool, by prefill"],
)
async def test_retraction_changes_no_token(oracle: Oracle, page_size: int, flags: Sequence[str]) -> None:
    with running_cluster(page_size=page_size, decode_flags=flags) as running:
        async with client_of(running) as client:
            await assert_all_as_generate(client, oracle)


async def test_optimistic_prefill_changes_no_token(oracle: Oracle) -> None:
    slow = ["--kv-cache-tokens", "480"]  # others' offers come late
    with running_cluster(prefill_flags=["--optimistic-prefill-attempts", "3"], decode_flags=slow) as running:
        async with client_of(running) as client:
            await assert_all_as_generate(client, oracle)
            await assert_all_as_generate(client, oracle)


# --- one engine alone ---


@contextmanager
def another_router(running: Cluster, *flags: str) -> Iterator[str]:
    """Its HTTP address; it is before the same decode."""
    ports = Ports.free()
    own = ["--http-port", str(ports.http), "--grpc-port", str(ports.grpc)]
    command = [sys.executable, "-m", "services.router", "--decode", f"{LOOPBACK}:{running.ports.decode}", *own, *flags]
    router = Process("another router", command, {})
    try:
        yield f"http://{LOOPBACK}:{ports.http}"
    finally:
        router.close()


async def ready(http: httpx.AsyncClient, url: str) -> None:
    async def complaint() -> str:
        try:
            answer = await http.get(f"{url}/health")
        except httpx.TransportError as error:
            return str(error)
        return "" if answer.is_success else answer.text

    await eventually(complaint)


BODIES = [
    {"prompt": list(PROMPTS[3]), "max_tokens": 20, "temperature": 0, "ignore_eos": True},
    {"prompt": list(PROMPTS[4]), "max_tokens": 30, "temperature": 1.3, "top_p": 0.9, "seed": 5, "logprobs": 3},
    {"prompt": list(PROMPTS[2]), "max_tokens": 1, "temperature": 0},
    {"prompt": list(PROMPTS[1]), "max_tokens": 12, "temperature": 0, "stream": True},
    {"prompt": list(PROMPTS[1]), "max_tokens": 9000, "temperature": 0},
]


async def test_a_prompt_has_the_same_answer_alone_and_by_a_pair() -> None:
    """Byte for byte, but for the name and the time of the answer."""
    with running_cluster(chunk=100, decode_flags=["--chunked-prefill-size", "100"]) as running:
        pair = f"http://{LOOPBACK}:{running.ports.http}"
        prefill = ["--prefill", f"{LOOPBACK}:{running.ports.prefill}", "--disaggregation-min-prompt-tokens", "200"]
        with another_router(running) as alone, another_router(running, *prefill) as short_ones_alone:
            async with client_of(running) as client, httpx.AsyncClient(timeout=60) as http:
                for url in (alone, short_ones_alone):
                    await ready(http, url)
                before = await handed_over(client)
                for salt, body in enumerate(BODIES):
                    texts = []
                    for place, url in enumerate((pair, alone, short_ones_alone)):
                        fresh = {**body, "cache_salt": f"{salt}-{place}"}  # each computes all of it
                        texts.append(_without_origin((await http.post(f"{url}/v1/completions", json=fresh)).text))
                    assert texts[0] == texts[1] == texts[2]
                assert await handed_over(client) == before + len(BODIES) - 1  # the last was refused


def _without_origin(text: str) -> list[str]:
    return [part for part in text.split(",") if '"id":' not in part and '"created":' not in part]


async def handed_over(client: Client) -> int:
    """Rooms that have gone from prefill to decode."""
    listed = await client.transfers("prefill").ListTransfers(transfer_status_pb2.ListTransfersRequest())
    return sum(transfer.state == types_pb2.TRANSFER_STATE_SUCCESS for transfer in listed.transfers)
