"""One request is found by its room and by its rid in the logs of all three processes and in their traces."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from pd.v1 import inspection_pb2, inspection_pb2_grpc

from demo.cluster import LOOPBACK, Cluster
from pd_common.telemetry.spans import ROOM
from tests.e2e.harness import Client, eventually, running_cluster

pytestmark = pytest.mark.slow

TEXT = "the heron eats at noon"
PROMPT = tuple(range(201, 251))
RID = "order 66"


@pytest.fixture(scope="module")
def pair() -> Any:
    with running_cluster(environment={"PD_LOG_PROMPTS": "1"}) as running:
        yield running


def lines_of(running: Cluster, room: int) -> dict[str, list[str]]:
    """What each process has said of the room."""
    return {
        process.name: [line for line in process.log().splitlines() if f"{ROOM}={room}" in line]
        for process in running.processes
    }


async def said(running: Cluster, room: int) -> dict[str, list[str]]:
    """The same, once each has said how the room ended."""

    async def missing() -> str:
        lines = lines_of(running, room)
        ended = [any(" done " in line for line in found) for found in lines.values()]
        return "" if all(ended) else f"the room's end is not said by all: {lines}"

    await eventually(missing)
    return lines_of(running, room)


async def legs_of(port: int, room: int) -> list[inspection_pb2.RoomSpans]:
    async with grpc.aio.insecure_channel(f"{LOOPBACK}:{port}") as channel:
        stub: Any = inspection_pb2_grpc.InspectionStub(channel)
        answer = await stub.GetSpans(inspection_pb2.GetSpansRequest(bootstrap_room=room), timeout=10)
        return list(answer.legs)


async def test_room_rid_and_trace_are_the_same_in_every_log_and_every_trace(pair: Cluster, client: Client) -> None:
    answer = await client.generate(PROMPT, rid=RID, max_new_tokens=3)
    lines = await said(pair, answer.room)
    ports = (pair.ports.grpc, pair.ports.prefill, pair.ports.decode)
    legs = [leg for port in ports for leg in await legs_of(port, answer.room)]
    (trace_id,) = {leg.trace_id for leg in legs}
    assert [leg.root.name for leg in legs] == ["pd.route", "pd.prefill", "pd.decode"]
    assert {leg.root.attributes["rid"] for leg in legs} == {RID}
    for found in lines.values():
        assert all(f'rid="{RID}"' in line for line in found)
        assert any(f"trace_id={trace_id}" in line for line in found)


async def test_with_log_prompts_each_process_says_the_prompt_once(pair: Cluster, client: Client) -> None:
    answer = await client.generate(PROMPT, rid=RID, max_new_tokens=3)
    ids = f"prompt_token_ids=[{','.join(map(str, PROMPT))}]"
    for found in (await said(pair, answer.room)).values():
        assert sum(line.endswith(ids) for line in found) == 1


async def test_with_log_prompts_a_text_is_said_where_it_came_as_text(pair: Cluster, client: Client) -> None:
    await client.direct(TEXT, room=66, max_new_tokens=3)
    lines = lines_of(pair, 66)
    assert all(any(f'prompt_text="{TEXT}"' in line for line in lines[name]) for name in ("pd-prefill", "pd-decode"))
