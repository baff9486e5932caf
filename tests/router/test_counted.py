"""What is counted of requests at the router is what their clients have met."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from pd_common.errors import CapacityExceeded, PdError, PeerLost
from pd_common.generation import ClientRequest, FinishReason, Output, SamplingParams, Usage
from services.router.counted import CountedErrors, CountedRequests
from services.router.http import create_app
from tests.router.scripted_backend import ROOM, ScriptedBackend

REQUEST = ClientRequest(prompt=(1, 2, 3), sampling=SamplingParams(max_new_tokens=4))
FIRST = Output(ROOM, token_ids=(7,))
LAST = Output(ROOM, token_ids=(8, 9), finish=FinishReason.LENGTH, usage=Usage(3, 3, cached_tokens=2))


def registry_of(collector: Collector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def outcomes(counted: CountedRequests) -> dict[str, float]:
    samples = (sample for metric in counted.collect() for sample in metric.samples)
    return {sample.labels["outcome"]: sample.value for sample in samples if sample.name == "pd_requests_total"}


async def read_all(pieces: AsyncGenerator[Output, None]) -> list[Output]:
    return [piece async for piece in pieces]


async def test_an_answer_is_relayed_as_it_is_and_counted_once() -> None:
    counted = CountedRequests(ScriptedBackend([FIRST, LAST]))
    read = registry_of(counted)
    assert await read_all(counted.generate(REQUEST)) == [FIRST, LAST]
    assert outcomes(counted) == {"SUCCESS": 1}
    counts = ("request_seconds_count", "time_to_first_token_seconds_count", "inter_token_seconds_count")
    assert [read.get_sample_value(f"pd_{name}") for name in counts] == [1, 1, 2]
    tokens = ("prompt", "cached", "generated")
    assert [read.get_sample_value(f"pd_{name}_tokens_total") for name in tokens] == [3, 2, 3]


@pytest.mark.parametrize(("pieces", "outcome"), [([], "CAPACITY"), ([FIRST], "PEER_LOST")], ids=["refused", "broken"])
async def test_a_failure_is_counted_by_its_reason(pieces: list[Output], outcome: str) -> None:
    error: PdError = PeerLost("gone") if pieces else CapacityExceeded("full")
    counted = CountedRequests(ScriptedBackend([*pieces, error]))
    with pytest.raises(type(error)):
        await read_all(counted.generate(REQUEST))
    assert outcomes(counted) == {outcome: 1}


async def test_a_client_that_goes_away_before_the_end_has_cancelled() -> None:
    counted = CountedRequests(ScriptedBackend([FIRST, LAST]))
    async with aclosing(counted.generate(REQUEST)) as pieces:
        await anext(pieces)
    assert outcomes(counted) == {"CLIENT_CANCELLED": 1}


async def test_so_has_one_whose_task_is_cancelled_while_it_waits() -> None:
    counted, begun = CountedRequests(ScriptedBackend([FIRST, asyncio.Event()])), asyncio.Event()

    async def read() -> None:
        async for _ in counted.generate(REQUEST):
            begun.set()

    reading = asyncio.create_task(read())
    await begun.wait()
    reading.cancel()
    await asyncio.wait((reading,))
    assert outcomes(counted) == {"CLIENT_CANCELLED": 1}


async def test_who_has_the_last_piece_may_go() -> None:
    counted = CountedRequests(ScriptedBackend([FIRST, LAST]))
    async with aclosing(counted.generate(REQUEST)) as pieces:
        while not (await anext(pieces)).is_last:
            pass
    assert outcomes(counted) == {"SUCCESS": 1}


async def test_errors_over_http_are_counted_by_path_and_status_and_no_path_that_a_client_makes_up() -> None:
    app = CountedErrors(create_app(ScriptedBackend([CapacityExceeded("full")]), lambda: True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        await client.post("/generate", json={"text": "x"})
        await client.post("/generate", content=b"{")
        for path in ("/made/up", "/as/well"):
            await client.get(path)
        await client.get("/livez")
    errors = {
        (sample.labels["path"], sample.labels["status"]): sample.value
        for metric in app.collect()
        for sample in metric.samples
        if sample.name == "pd_http_errors_total"
    }
    assert errors == {("/generate", "429"): 1, ("/generate", "400"): 1, ("other", "404"): 2}
