"""The logs of three real processes: every line in the format asked for, every step of a room, and never a prompt."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from pd.v1 import types_pb2

from demo.cluster import Cluster, Process
from pd_common.telemetry.spans import ROOM
from tests.e2e.harness import Client, eventually, running_cluster
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.slow

TRANSFERRING, SUCCESS = types_pb2.TRANSFER_STATE_TRANSFERRING, types_pb2.TRANSFER_STATE_SUCCESS
PROMPT = random.Random(7).choices(range(100, VOCAB_SIZE), k=120)
TEXT = "the heron eats at noon by the mill"
HOSTILE_RID = 'heron-9\n{"level":"critical","message":"all is lost"}\n12:00:00.000 C router pd: lost\x1b[31m\u2028'
WRONG_TOKEN = VOCAB_SIZE + 987654
PROCESSES = ("router", "prefill", "decode")


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with running_cluster(environment={"PD_LOG_FORMAT": "json", "PD_LOG_LEVEL": "debug"}) as running:
        yield running


def process(running: Cluster, name: str) -> Process:
    found: Process = getattr(running, name)
    return found


def lines(running: Cluster, name: str) -> list[dict[str, Any]]:
    """Raises when any line that the process has printed is not JSON."""
    return [json.loads(line) for line in process(running, name).log().splitlines()]


def messages(running: Cluster, name: str, room: int) -> list[str]:
    return [line["message"] for line in lines(running, name) if line.get(ROOM) == str(room)]


async def said(running: Cluster, name: str, room: int, last: str) -> list[dict[str, Any]]:
    """The lines of the room, once the last of them is there."""

    async def missing() -> str:
        found = messages(running, name, room)
        return "" if last in found else f"{name} has said only {found} of room {room}"

    await eventually(missing)
    return [line for line in lines(running, name) if line.get(ROOM) == str(room)]


def assert_unsaid(running: Cluster, token_ids: list[int]) -> None:
    """Not in any form in which somebody writes a list."""
    some = re.compile(r"\W+".join(map(str, token_ids[:3])))
    assert not any(some.search(process(running, name).log()) for name in PROCESSES)


async def test_each_process_says_every_step_of_a_room_once(pair: Cluster, client: Client) -> None:
    answer = await client.generate(PROMPT, max_new_tokens=4, rid="heron-1")
    router = await said(pair, "router", answer.room, "request done")
    prefill = await said(pair, "prefill", answer.room, "handoff done")
    decode = await said(pair, "decode", answer.room, "answer done")
    assert [line["message"] for line in router] == ["request accepted", "first token", "request done"]
    steps = ["room opened", "memory set aside", "transfer begun", "handoff done"]
    assert [line["message"] for line in prefill] == steps
    heard = [line["message"] for line in decode if line["message"] != "transfer begun"]  # that report may be overtaken
    assert heard == ["room opened", "memory set aside", "handoff done", "answer done"]
    assert {line["rid"] for line in (*router, *prefill, *decode)} == {"heron-1"}
    assert router[0]["pd.route_reason"]
    assert 0 < router[1]["ttft_ms"] <= router[2]["took_ms"]
    assert prefill[-1]["pages"] == decode[-2]["pages"] == 8
    assert prefill[-1]["peer"] == decode[-1]["instance_id"]
    assert decode[-2]["peer"] == prefill[-1]["instance_id"]
    assert_unsaid(pair, answer.token_ids)


async def test_a_hostile_request_id_makes_no_line_of_its_own(pair: Cluster, client: Client) -> None:
    answer = await client.generate(PROMPT, max_new_tokens=1, rid=HOSTILE_RID)
    for name in PROCESSES:
        found = await said(pair, name, answer.room, "handoff done" if name != "router" else "request done")
        assert {line["rid"] for line in found} == {HOSTILE_RID}
        assert "critical" not in {line["level"] for line in lines(pair, name)}


async def test_requests_that_end_otherwise_are_said_with_their_reason(pair: Cluster, client: Client) -> None:
    room = 4711
    for words in ({"max_new_tokens": 10**6}, {"sampling": {"top_p": 7.0, "stop": [TEXT]}}):
        with pytest.raises(grpc.aio.AioRpcError):
            await client.generate(TEXT, **words)
    with pytest.raises(grpc.aio.AioRpcError):
        await client.generate([*PROMPT, WRONG_TOKEN])
    running = asyncio.create_task(client.generate(PROMPT, bootstrap_room=room, max_new_tokens=4000))
    await client.reached("decode", SUCCESS, room)
    await client.abort("decode", room)
    with pytest.raises(grpc.aio.AioRpcError):
        await running
    reasons = [line["reason"] for line in lines(pair, "router") if line["message"] == "request failed"]
    assert reasons == ["PROMPT_TOO_LONG", "INVALID_REQUEST", "INVALID_REQUEST", "ROOM_ABORTED"]
    failed = (await said(pair, "decode", room, "answer failed"))[-1]
    assert (failed["level"], failed["reason"]) == ("info", "ROOM_ABORTED")


async def test_a_lost_prefill_is_a_warning_on_both_that_are_left(pair: Cluster) -> None:
    room, client = 4712, Client(pair)
    running = asyncio.create_task(client.generate(PROMPT * 50, bootstrap_room=room, rid="heron-5"))
    await client.reached("decode", TRANSFERRING, room)
    pair.prefill.kill()
    with pytest.raises(grpc.aio.AioRpcError):
        await running
    await client.close()
    for name, last in (("router", "request failed"), ("decode", "room failed")):
        failed = (await said(pair, name, room, last))[-1]
        assert (failed["level"], failed["reason"], failed["rid"]) == ("warning", "PEER_LOST", "heron-5")
        assert "prefill" in failed["error"]


def test_nothing_of_a_prompt_is_in_any_line_of_all_that(pair: Cluster) -> None:
    assert_unsaid(pair, PROMPT)
    printed = "".join(process(pair, name).log() for name in PROCESSES)
    assert TEXT not in printed
    assert str(WRONG_TOKEN) not in printed
