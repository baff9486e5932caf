from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from pd.v1 import generation_pb2, generation_pb2_grpc

from pd_common.control import convert, convert_generation, server
from pd_common.control.connection import Connection
from pd_common.control.generation_client import GenerationClient
from pd_common.errors import InvalidRequest, NoWorkers
from pd_common.generation import ChatMessage, ClientRequest, SamplingParams
from pd_common.types import BootstrapAddress, BootstrapRoom
from services.router.open_requests import OpenRequests
from services.router.servicer import RouterGenerationServicer
from tests.control.serving import serving, typed
from tests.router.scripted_backend import HELLO, MODEL, ROOM, ScriptedBackend

IDS = generation_pb2.TokenIds(ids=[1, 2])


@pytest.fixture
async def backend() -> ScriptedBackend:
    return ScriptedBackend(HELLO)


@pytest.fixture
async def connection(backend: ScriptedBackend) -> AsyncIterator[Connection]:
    async with serving(server.generation(RouterGenerationServicer(backend, OpenRequests()))) as connection:
        yield connection


@pytest.fixture
async def stub(connection: Connection) -> Any:
    return generation_pb2_grpc.GenerationStub(connection.channel)


async def test_an_answer_is_relayed_piece_by_piece(backend: ScriptedBackend, stub: Any) -> None:
    call = stub.Generate(generation_pb2.GenerateRequest(input_ids=IDS))
    assert [convert_generation.output_from(response.output) async for response in call] == list(HELLO)
    assert backend.requests == [ClientRequest((1, 2), SamplingParams(max_new_tokens=128))]


async def test_everything_a_client_may_state_reaches_the_backend(backend: ScriptedBackend, stub: Any) -> None:
    message = generation_pb2.GenerateRequest(
        bootstrap_room=5,
        bootstrap_host="p",
        rid="mine",
        text="a",
        sampling_params=generation_pb2.SamplingParams(max_new_tokens=3, temperature=0.0),
        return_logprob=True,
        top_logprobs_num=2,
        timeout=convert.duration_to(2.5),
        cache_salt=b"tenant",
        priority=-7,
    )
    async for response in stub.Generate(message):
        assert response.output.bootstrap_room == 5
    assert backend.requests == [
        ClientRequest(
            prompt=(0, 97),
            sampling=SamplingParams(max_new_tokens=3, temperature=0.0),
            rid="mine",
            room=BootstrapRoom(5),
            bootstrap=BootstrapAddress("p", 8998),
            return_logprob=True,
            top_logprobs=2,
            timeout_s=2.5,
            cache_salt=b"tenant",
            priority=-7,
        )
    ]


async def test_the_deadline_of_the_call_is_the_requests_too(backend: ScriptedBackend, stub: Any) -> None:
    async for _ in stub.Generate(generation_pb2.GenerateRequest(input_ids=IDS), timeout=100.0):
        pass
    (request,) = backend.requests
    assert 50 < request.timeout_s < 110


async def test_a_failure_is_the_status_of_the_call(backend: ScriptedBackend, connection: Connection, stub: Any) -> None:
    backend.script = [HELLO[0], NoWorkers("no usable decode", role="decode")]
    call = stub.Generate(generation_pb2.GenerateRequest(input_ids=IDS))
    assert convert_generation.output_from((await call.read()).output) == HELLO[0]
    with pytest.raises(NoWorkers, match="no usable decode"):
        await typed(connection, call.read())


async def test_a_client_that_cancels_aborts_its_room(backend: ScriptedBackend, stub: Any) -> None:
    backend.script = [HELLO[0], asyncio.Event()]
    call = stub.Generate(generation_pb2.GenerateRequest(input_ids=IDS))
    await call.read()
    call.cancel()
    await asyncio.wait_for(backend.aborted.wait(), 10)


async def test_a_client_that_does_not_read_aborts_its_room_when_it_goes(backend: ScriptedBackend, stub: Any) -> None:
    """The router is stuck in sending when the call is cancelled."""
    backend.script = [replace(HELLO[0], text="x" * 2**20)] * 64
    call = stub.Generate(generation_pb2.GenerateRequest(input_ids=IDS))
    await call.read()
    call.cancel()
    await asyncio.wait_for(backend.aborted.wait(), 10)


async def test_the_clients_trace_is_the_one_that_goes_on(backend: ScriptedBackend, stub: Any) -> None:
    trace_id = int("c" * 32, 16)
    metadata = (("traceparent", f"00-{trace_id:032x}-{'d' * 16}-01"),)
    async for _ in stub.Generate(generation_pb2.GenerateRequest(input_ids=IDS), metadata=metadata):
        pass
    assert set(backend.trace_ids) == {trace_id}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (generation_pb2.GenerateRequest(), "text"),
        (generation_pb2.GenerateRequest(input_ids=IDS, timeout=convert.duration_to(0)), "timeout"),
    ],
    ids=["no prompt", "no time"],
)
async def test_a_request_that_cannot_be_meant_is_refused_by_its_field(
    backend: ScriptedBackend, connection: Connection, stub: Any, message: generation_pb2.GenerateRequest, field: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await typed(connection, stub.Generate(message).read())
    assert raised.value.metadata == {"field": field}
    assert backend.requests == []


async def test_model_and_tokens_come_from_the_backend(connection: Connection, stub: Any) -> None:
    client = GenerationClient(connection)
    assert await client.get_model() == MODEL
    assert await client.tokenize_text("a") == (0, 97)
    assert await client.tokenize_chat([ChatMessage("user", "a")]) == (97,)
    with pytest.raises(InvalidRequest):
        await typed(connection, stub.Tokenize(generation_pb2.TokenizeRequest()))


async def test_what_is_for_routers_is_not_offered_to_clients(stub: Any) -> None:
    submit = generation_pb2.SubmitRequest(request=generation_pb2.GenerateRequest(input_ids=IDS), subscriber="s")
    calls = [stub.Submit(submit), stub.StreamOutputs(generation_pb2.StreamOutputsRequest(subscriber="s")).read()]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError, match="Generate") as raised:
            await call
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_room_that_the_backend_makes_is_said(stub: Any) -> None:
    response = await stub.Generate(generation_pb2.GenerateRequest(input_ids=IDS)).read()
    assert response.output.bootstrap_room == ROOM
