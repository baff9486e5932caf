"""Real processes with more to do than they may keep waiting: what is refused is refused soon, all else is right."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2, status_pb2

from demo.cluster import LOOPBACK, Cluster
from tests.e2e.harness import Client, client_of, eventually, long_model, running_cluster
from tests.engine.oracle import Oracle
from tests.tiny_models import VOCAB_SIZE

MOST_QUEUED = 2
QUEUE_TIMEOUT_S = 1.0
SOON_S = 3.0
"""Within this after its limit a request is refused, and its other leg has ended, also on a machine that is busy."""
NEW_TOKENS = 8
FOR_LONG = 8000
"""Tokens of an answer that nobody waits for to the end."""
PROMPTS = [tuple(random.Random(seed).choices(range(1, VOCAB_SIZE), k=40 + seed)) for seed in range(8)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one request: its tokens, or what it was refused with; and after how many seconds."""

    took_s: float
    token_ids: list[int] | None = None
    failure: grpc.aio.AioRpcError | None = None
    retry_after_s: int | None = None

    def is_refused(self) -> bool:
        return self.failure is not None and self.failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture(scope="module")
def one_at_a_time() -> Iterator[Cluster]:
    """Its decode has pages for one request at a time."""
    waiting = ["--max-queued-requests", str(MOST_QUEUED), "--queue-timeout", f"{QUEUE_TIMEOUT_S:g}"]
    with running_cluster(
        decode_flags=["--max-running-requests", "1", "--decode-extra-slots", "0", *waiting]
    ) as running:
        yield running


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(long_model("llama"))


async def ask(client: Client, prompt: Sequence[int], *, tokens: int = NEW_TOKENS, **fields: Any) -> Outcome:
    began = time.monotonic()
    try:
        answer = await client.generate(prompt, max_new_tokens=tokens, **fields)
    except grpc.aio.AioRpcError as failure:
        return Outcome(time.monotonic() - began, failure=failure, retry_after_s=_retry_after_s(failure))
    return Outcome(time.monotonic() - began, token_ids=answer.token_ids)


def _retry_after_s(failure: grpc.aio.AioRpcError) -> int | None:
    status, retry = status_pb2.Status(), error_details_pb2.RetryInfo()
    trailing = cast("Iterable[tuple[str, bytes]]", failure.trailing_metadata())
    status.ParseFromString(dict(trailing)["grpc-status-details-bin"])
    said = any(detail.Unpack(retry) for detail in status.details)
    return retry.retry_delay.seconds if said else None


async def filled(client: Client) -> asyncio.Task[Outcome]:
    """A request that has the only place. The router may refuse it until it hears that nobody waits any more."""
    while True:
        filler = asyncio.create_task(ask(client, PROMPTS[0], tokens=FOR_LONG))
        await eventually(partial(_undecided, client, filler))
        if not filler.done():
            return filler


async def _undecided(client: Client, filler: asyncio.Task[Outcome]) -> str:
    pool = await client.pool("decode")
    has_place = pool.live_rooms == 1 and not pool.requests_queued
    return "" if has_place or filler.done() else f"neither refused nor served: {pool}"


async def left(filler: asyncio.Task[Outcome]) -> None:
    filler.cancel()
    await asyncio.wait([filler])


async def all_wait(client: Client, count: int) -> None:
    async def complaint() -> str:
        pool = await client.pool("decode")
        return "" if pool.requests_queued == count else f"{pool.requests_queued} of {count} wait"

    await eventually(complaint)


async def prefill_is_done(client: Client) -> None:
    async def complaint() -> str:
        pool = await client.pool("prefill")
        return f"prefill still has {pool.live_rooms} rooms" if pool.live_rooms else ""

    await eventually(complaint, SOON_S)


async def over_http(running: Cluster, path: str, body: Mapping[str, Any]) -> tuple[int, float]:
    """Seconds after which to come back, and seconds until that was said."""
    began = time.monotonic()
    async with httpx.AsyncClient(timeout=30) as http:
        answer = await http.post(f"http://{LOOPBACK}:{running.ports.http}{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "CAPACITY")
    return int(answer.headers["Retry-After"]), time.monotonic() - began


COMPLETION = {"prompt": list(PROMPTS[1]), "max_tokens": NEW_TOKENS}
GENERATE = {"input_ids": list(PROMPTS[2]), "sampling_params": {"max_new_tokens": NEW_TOKENS}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_who_waits_too_long_is_refused_with_429_also_before_a_stream_begins(
    one_at_a_time: Cluster, stream: bool
) -> None:
    async with client_of(one_at_a_time) as client:
        filler = await filled(client)
        said = await asyncio.gather(
            over_http(one_at_a_time, "/v1/completions", {**COMPLETION, "stream": stream}),
            over_http(one_at_a_time, "/generate", {**GENERATE, "stream": stream}),
        )
        for retry_after_s, took_s in said:
            assert 1 <= retry_after_s <= 2
            assert QUEUE_TIMEOUT_S <= took_s < QUEUE_TIMEOUT_S + SOON_S
        await prefill_is_done(client)
        assert not filler.done()
        await left(filler)


async def test_over_grpc_it_is_resource_exhausted_with_retry_info(one_at_a_time: Cluster) -> None:
    async with client_of(one_at_a_time) as client:
        filler = await filled(client)
        outcome = await ask(client, PROMPTS[3])
        assert outcome.is_refused()
        assert outcome.retry_after_s in {1, 2}
        assert QUEUE_TIMEOUT_S <= outcome.took_s < QUEUE_TIMEOUT_S + SOON_S
        await prefill_is_done(client)
        await left(filler)


async def test_one_more_than_may_wait_is_refused_at_once_and_a_more_urgent_one_takes_a_place(
    one_at_a_time: Cluster, oracle: Oracle
) -> None:
    async with client_of(one_at_a_time) as client:
        filler = await filled(client)
        waiting = [asyncio.create_task(ask(client, prompt, priority=-1)) for prompt in PROMPTS[1:3]]
        await all_wait(client, MOST_QUEUED)
        late = await ask(client, PROMPTS[3], priority=-1)
        assert late.is_refused()
        assert late.retry_after_s == 1
        assert late.took_s < QUEUE_TIMEOUT_S
        urgent = asyncio.create_task(ask(client, PROMPTS[4]))
        displaced, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert [outcome.result().is_refused() for outcome in displaced] == [True]
        assert [outcome.result().took_s < QUEUE_TIMEOUT_S for outcome in displaced] == [True]
        await left(filler)
        assert (await urgent).token_ids == oracle.tokens(PROMPTS[4], NEW_TOKENS)
        await asyncio.wait(waiting)


async def test_in_a_burst_every_request_is_answered_right_or_refused_soon(
    one_at_a_time: Cluster, oracle: Oracle
) -> None:
    async with client_of(one_at_a_time) as client:
        await left(await filled(client))

        async def some(first: int) -> list[tuple[Sequence[int], Outcome]]:
            return [(prompt, await ask(client, prompt)) for prompt in PROMPTS[first:] + PROMPTS[:first]]

        turns = await asyncio.gather(*(some(first) for first in range(len(PROMPTS))))
        verdicts = Counter(_verdict(outcome, oracle, prompt) for turn in turns for prompt, outcome in turn)
        assert set(verdicts) == {"right", "refused"}
        assert verdicts["right"] >= MOST_QUEUED


def _verdict(outcome: Outcome, oracle: Oracle, prompt: Sequence[int]) -> str:
    if outcome.is_refused():
        return "refused" if outcome.took_s < QUEUE_TIMEOUT_S + SOON_S else "refused late"
    return "right" if outcome.token_ids == oracle.tokens(prompt, NEW_TOKENS) else f"wrong: {outcome}"


async def test_without_a_router_both_legs_say_so(one_at_a_time: Cluster) -> None:
    meeting: dict[str, Any] = {
        "bootstrap_room": 77,
        "bootstrap_host": LOOPBACK,
        "bootstrap_port": one_at_a_time.ports.prefill,
    }
    async with client_of(one_at_a_time) as client:
        filler = await filled(client)
        legs = (ask(client, PROMPTS[5], to=name, **meeting) for name in ("prefill", "decode"))
        for outcome in await asyncio.gather(*legs):
            assert outcome.is_refused()
            assert outcome.retry_after_s in {1, 2}
            assert outcome.took_s < QUEUE_TIMEOUT_S + SOON_S
        await left(filler)
