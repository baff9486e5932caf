"""Aborts, lost clients, killed processes: the client learns of it at once, the other side goes on, nothing leaks."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import grpc
import httpx
import pytest

from demo.cluster import LOOPBACK, Cluster
from pd_common.control.status import from_rpc_error
from pd_common.errors import Reason
from tests.e2e.harness import (
    Client,
    client_of,
    engine_processes,
    eventually,
    long_model,
    running_cluster,
    started_cluster,
)
from tests.engine.oracle import Oracle
from tests.tiny_models import VOCAB_SIZE

TRANSFERRING, SUCCESS, FAILED = 3, 4, 5
NOTICED_S = 3.0
LONG = tuple(random.Random(1).choices(range(1, VOCAB_SIZE), k=6000))
SHORT = LONG[:100]
ROOMS = itertools.count(1000)


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    """Small chunks, so that a long prompt is under way for a while."""
    with running_cluster(chunk=64) as running:
        yield running


@pytest.fixture
async def client(pair: Cluster) -> AsyncIterator[Client]:
    async with client_of(pair) as client:
        yield client


async def expect_error(answer: asyncio.Task[Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    return caught.value


async def not_quarantined(client: Client) -> str:
    """Pages that a frozen writer may still write must not be free once their room has failed."""
    pool = await client.pool("decode")
    accounted = pool.pages_free + pool.pages_cached + pool.pages_quarantined
    is_held = pool.pages_quarantined > 0 and accounted == pool.pages_total
    return "" if is_held else f"the room's pages are not in quarantine: {pool}"


async def still_ready(running: Cluster) -> str:
    """Until the router has noticed that a process is gone, being ready means nothing."""
    return "the router has noticed nothing" if await asyncio.to_thread(running.health) == "ok" else ""


async def assert_serves(client: Client) -> None:
    assert (await client.generate(SHORT)).token_ids == Oracle(long_model("llama")).tokens(SHORT)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("state", [TRANSFERRING, SUCCESS])
async def test_an_abort_on_one_side_ends_the_other_and_the_client(client: Client, side: str, state: int) -> None:
    room = next(ROOMS)
    prompt = LONG if state == TRANSFERRING else SHORT
    answer = asyncio.create_task(client.generate(prompt, max_new_tokens=1000, bootstrap_room=room))
    for each in ("decode", side):
        await client.reached(each, state, room)
    drained = await client.abort(side, room)
    assert drained.drained.instance_id.startswith(side)
    if (side, state) != ("prefill", SUCCESS):
        assert from_rpc_error(await expect_error(answer), "").reason is Reason.ROOM_ABORTED
    else:
        assert len((await answer).token_ids) == 1000, "prefill has no part in it any more"
    await assert_serves(client)


async def test_an_aborted_room_is_refused_afterwards(client: Client) -> None:
    room = next(ROOMS)
    await client.abort("prefill", room)
    error = await expect_error(asyncio.create_task(client.generate(SHORT, bootstrap_room=room)))
    assert from_rpc_error(error, "").reason is Reason.ROOM_ABORTED


@pytest.mark.parametrize("state", [TRANSFERRING, SUCCESS])
async def test_a_grpc_client_that_goes_away_ends_both_sides(client: Client, state: int) -> None:
    room = next(ROOMS)
    prompt = LONG if state == TRANSFERRING else SHORT
    answer = asyncio.create_task(client.generate(prompt, max_new_tokens=2000, bootstrap_room=room))
    await client.reached("decode", state, room)
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    await client.wait_clean()


async def test_an_http_client_that_goes_away_ends_both_sides(client: Client) -> None:
    room = next(ROOMS)
    body = {"input_ids": list(LONG), "sampling_params": {"max_new_tokens": 2000}, "bootstrap_room": room}

    async def ask() -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            await http.post(f"http://{LOOPBACK}:{client.cluster.ports.http}/generate", json=body)

    asking = asyncio.create_task(ask())
    await client.reached("decode", TRANSFERRING, room)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await client.wait_clean()


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_killed_process_is_told_of_at_once_and_the_other_side_serves_its_successor(
    client: Client, victim: str
) -> None:
    running = client.cluster
    process, survivor = engine_processes(running)[victim], {"prefill": "decode", "decode": "prefill"}[victim]
    survivor_pid = engine_processes(running)[survivor].pid
    room = next(ROOMS)
    answer = asyncio.create_task(client.generate(LONG, bootstrap_room=room))
    await client.reached("decode", TRANSFERRING, room)
    process.kill()
    killed = time.monotonic()
    error = await expect_error(answer)
    assert time.monotonic() - killed < 2.0
    assert from_rpc_error(error, "").reason is Reason.PEER_LOST
    while_gone = await expect_error(asyncio.create_task(client.generate(SHORT)))
    assert from_rpc_error(while_gone, "").reason in (Reason.NO_WORKERS, Reason.PEER_LOST)
    process.start()
    await asyncio.to_thread(running.wait_ready)
    await assert_serves(client)
    assert engine_processes(running)[survivor].pid == survivor_pid
    assert engine_processes(running)[survivor].is_alive


async def test_a_restart_of_prefill_at_the_same_address_is_noticed_by_direct_clients(client: Client) -> None:
    """No router to wait for readiness: decode itself must find the new process behind the old address."""
    running = client.cluster
    await client.direct(SHORT, room=next(ROOMS))
    running.prefill.kill()
    await eventually(partial(still_ready, running))
    running.prefill.start()
    await asyncio.to_thread(running.wait_ready)
    _, decode = await client.direct(SHORT, room=next(ROOMS))
    assert decode.token_ids == Oracle(long_model("llama")).tokens(SHORT)


async def test_a_frozen_prefill_is_noticed_and_its_late_writes_are_kept_out(client: Client) -> None:
    """SIGSTOP in mid-transfer: the room fails, its pages wait; SIGCONT: the proof comes, all is free again."""
    running = client.cluster
    room = next(ROOMS)
    answer = asyncio.create_task(client.generate(LONG, bootstrap_room=room))
    await client.reached("decode", TRANSFERRING, room)
    running.prefill.send(signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        assert from_rpc_error(await expect_error(answer), "").reason is Reason.PEER_LOST
        assert time.monotonic() - stopped < NOTICED_S
        await eventually(partial(not_quarantined, client), NOTICED_S)
    finally:
        running.prefill.send(signal.SIGCONT)
    await asyncio.to_thread(running.wait_ready)
    await assert_serves(client)


async def test_a_frozen_decode_is_noticed_by_the_client_and_by_prefill(client: Client) -> None:
    running = client.cluster
    room = next(ROOMS)
    answer = asyncio.create_task(client.generate(LONG, bootstrap_room=room))
    await client.reached("prefill", TRANSFERRING, room)
    running.decode.send(signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        assert from_rpc_error(await expect_error(answer), "").reason is Reason.PEER_LOST
        await client.reached("prefill", FAILED, room)
        assert time.monotonic() - stopped < NOTICED_S
    finally:
        running.decode.send(signal.SIGCONT)
    await asyncio.to_thread(running.wait_ready)
    await assert_serves(client)
    await client.wait_clean()


async def test_sigterm_lets_a_running_answer_end() -> None:
    with running_cluster() as running:
        client = Client(running)
        try:
            room = next(ROOMS)
            answer = asyncio.create_task(client.generate(SHORT, max_new_tokens=300, bootstrap_room=room))
            await client.reached("decode", SUCCESS, room)
            code = await asyncio.to_thread(running.decode.stop)
            assert len((await answer).token_ids) == 300
            assert code == 0, running.decode.log()
        finally:
            await client.close()
        assert running.prefill.stop() == 0, running.prefill.log()
        assert running.router.stop() == 0, running.router.log()


async def test_pools_that_do_not_match_are_refused_with_the_field() -> None:
    """Each process is fine by itself; the pair is not, and says so instead of hanging."""
    with started_cluster(decode_flags=["--page-size", "32"]) as running:
        await asyncio.to_thread(running.prefill.wait_for_log, "pd-prefill serves")
        await asyncio.to_thread(running.decode.wait_for_log, "pd-decode serves")
        client = Client(running)
        try:
            meeting = {"bootstrap_host": LOOPBACK, "bootstrap_port": running.ports.prefill}
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.generate(SHORT, to="decode", bootstrap_room=next(ROOMS), **meeting)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            error = from_rpc_error(caught.value, "")
            assert (error.reason, error.metadata["field"]) == (Reason.LAYOUT_MISMATCH, "page_size")
            await client.wait_clean()
        finally:
            await client.close()
        assert running.prefill.is_alive
        assert running.decode.is_alive
