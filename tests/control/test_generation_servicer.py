from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from pd.v1 import generation_pb2, generation_pb2_grpc

from pd_common.control import beats, convert, convert_generation, generation_servicer, server
from pd_common.control.connection import CALL_TIMEOUT_S, Connection
from pd_common.control.generation_client import GenerationClient
from pd_common.control.generation_servicer import EngineGenerationServicer
from pd_common.control.outputs import OutputHub
from pd_common.errors import ClientCancelled, InvalidRequest, PeerLost, RoomInUse
from pd_common.generation import ChatMessage, FinishReason, Load, Output, Usage
from pd_common.telemetry import spans
from pd_common.types import BootstrapAddress, BootstrapRoom
from tests.control.fake_rooms import IDLE, MODEL, FakeModel, FakeRooms
from tests.control.serving import make_request, serving, typed

ONE, TWO, THREE = BootstrapRoom(1), BootstrapRoom(2), BootstrapRoom(3)
PARENT = spans.of_room(BootstrapRoom(77))


def piece(room: BootstrapRoom, token: int, text: str = "x") -> Output:
    return Output(room, token_ids=(token,), text=text)


def last(room: BootstrapRoom) -> Output:
    return Output(room, token_ids=(9,), text="y", finish=FinishReason.LENGTH, usage=Usage(3, 2))


def trace_id(context: Context) -> int:
    return trace.get_current_span(context).get_span_context().trace_id


async def soon(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, 10)


class Subscription:
    """One StreamOutputs call."""

    def __init__(self, stub: Any, name: str) -> None:
        self._call = stub.StreamOutputs(generation_pb2.StreamOutputsRequest(subscriber=name))

    async def next_message(self) -> tuple[Output, ...]:
        message = await soon(self._call.read())
        return tuple(convert_generation.output_from(output) for output in message.outputs)

    async def next_step(self) -> tuple[Output, ...]:
        """Beats are passed over."""
        while not (outputs := await self.next_message()):
            pass
        return outputs

    def cancel(self) -> None:
        self._call.cancel()


async def subscribed(stub: Any, name: str) -> Subscription:
    subscription = Subscription(stub, name)
    assert await subscription.next_message() == ()
    return subscription


async def abandoned(rooms: FakeRooms, count: int) -> set[BootstrapRoom]:
    """The next rooms that were given up because their client had gone."""
    found = [await soon(rooms.abandoned.get()) for _ in range(count)]
    assert all(isinstance(error, ClientCancelled) for _, error in found)
    return {room for room, _ in found}


@pytest.fixture
async def stub(engine: Connection) -> Any:
    return generation_pb2_grpc.GenerationStub(engine.channel)


# --- text ---


async def test_the_model_is_said(client: GenerationClient) -> None:
    assert await client.get_model() == MODEL


async def test_a_prefill_says_with_which_directory_it_has_registered(hub: OutputHub, rooms: FakeRooms) -> None:
    directory = BootstrapAddress("prefill-0.svc", 8998)
    async with serving(server.generation(EngineGenerationServicer(rooms, hub, FakeModel(), directory))) as connection:
        assert await GenerationClient(connection).get_model() == replace(MODEL, bootstrap=directory)


async def test_texts_and_chats_become_token_ids(client: GenerationClient) -> None:
    assert await client.tokenize_text("ab") == (97, 98)
    assert await client.tokenize_text("") == ()
    assert await client.tokenize_chat([ChatMessage("user", "a")]) == tuple(map(ord, "user:a;"))


async def test_what_cannot_be_tokenized_is_refused(client: GenerationClient, engine: Connection, stub: Any) -> None:
    with pytest.raises(InvalidRequest, match="a chat needs a message"):
        await client.tokenize_chat([])
    with pytest.raises(InvalidRequest) as raised:
        await typed(engine, stub.Tokenize(generation_pb2.TokenizeRequest()))
    assert raised.value.metadata == {"field": "input"}


# --- Submit and StreamOutputs ---


async def test_outputs_come_step_by_step_to_who_submitted(
    rooms: FakeRooms, hub: OutputHub, client: GenerationClient, stub: Any
) -> None:
    a, b = await subscribed(stub, "a"), await subscribed(stub, "b")
    await client.submit(make_request(ONE), "a", PARENT)
    await client.submit(make_request(TWO), "b", PARENT)
    await client.submit(make_request(THREE), "a", PARENT)
    hub.publish([piece(ONE, 1), piece(TWO, 2), piece(THREE, 3)])
    hub.publish([last(THREE), last(ONE)])
    assert await a.next_step() == (piece(ONE, 1), piece(THREE, 3))
    assert await b.next_step() == (piece(TWO, 2),)
    assert await a.next_step() == (last(THREE), last(ONE))
    assert [rooms.submitted.get_nowait()[0] for _ in range(3)] == [make_request(room) for room in (ONE, TWO, THREE)]
    a.cancel()
    b.cancel()
    assert await abandoned(rooms, 1) == {TWO}


async def test_a_stream_beats_while_there_is_nothing_to_say_and_loses_nothing(
    hub: OutputHub, client: GenerationClient, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beats, "BEAT_S", 0.01)
    outputs = await subscribed(stub, "a")
    await client.submit(make_request(ONE), "a", PARENT)
    for token in range(3):
        assert [await outputs.next_message() for _ in range(3)] == [(), (), ()]
        hub.publish([piece(ONE, token)])
        assert await outputs.next_step() == (piece(ONE, token),)
    outputs.cancel()


async def test_a_process_says_what_it_has_to_do_at_once_and_again_while_it_is_busy(
    rooms: FakeRooms, hub: OutputHub, client: GenerationClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beats, "BEAT_S", 1000.0)
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(generation_servicer, "time", clock)
    said: list[Load] = []
    outputs = client.stream_outputs("a", said.append)
    assert await soon(anext(outputs)) == ()
    assert said == [IDLE]
    await client.submit(make_request(ONE), "a", PARENT)
    rooms.to_do = replace(IDLE, queued=5, oldest_wait_s=1.5, pages_available=2)
    for now_s, times_said in ((1.0, 1), (999.0, 1), (1000.0, 2), (1999.0, 2), (2100.0, 3)):
        clock.monotonic = partial(float, now_s)
        hub.publish([piece(ONE, 1)])
        assert await soon(anext(outputs)) == (piece(ONE, 1),)
        assert len(said) == times_said
    assert said == [IDLE, rooms.to_do, rooms.to_do]
    await outputs.aclose()


async def test_a_process_that_has_nothing_to_send_says_so_with_every_beat(
    client: GenerationClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beats, "BEAT_S", 0.01)
    monkeypatch.setattr(generation_servicer, "time", SimpleNamespace(monotonic=lambda: 0.0))  # a timer may be early
    said: list[Load] = []
    outputs = client.stream_outputs("a", said.append)
    for _ in range(4):
        assert await soon(anext(outputs)) == ()
    assert said == [IDLE] * 4
    await outputs.aclose()


async def test_a_failed_output_arrives_typed(hub: OutputHub, client: GenerationClient, stub: Any) -> None:
    outputs = await subscribed(stub, "a")
    await client.submit(make_request(ONE), "a", PARENT)
    hub.publish([Output(ONE, error=PeerLost("prefill is gone", peer="p"))])
    (output,) = await outputs.next_step()
    assert type(output.error) is PeerLost
    assert (output.error.message, output.error.metadata) == ("prefill is gone", {"peer": "p"})
    outputs.cancel()


@pytest.mark.parametrize("subscriber", ["", "nobody"])
async def test_a_submit_for_nobody_is_refused_and_leaves_nothing(
    rooms: FakeRooms, client: GenerationClient, subscriber: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await client.submit(make_request(ONE), subscriber, PARENT)
    assert raised.value.metadata == {"field": "subscriber"}
    assert rooms.submitted.empty()
    assert rooms.transfers.find(ONE) is None


async def test_a_second_submit_of_a_room_is_refused_and_the_first_keeps_its_outputs(
    hub: OutputHub, client: GenerationClient, stub: Any
) -> None:
    a, b = await subscribed(stub, "a"), await subscribed(stub, "b")
    await client.submit(make_request(ONE), "a", PARENT)
    with pytest.raises(RoomInUse):
        await client.submit(make_request(ONE), "b", PARENT)
    hub.publish([piece(ONE, 1)])
    assert await a.next_step() == (piece(ONE, 1),)
    a.cancel()
    b.cancel()


async def test_a_second_stream_of_a_subscriber_is_refused_and_the_first_goes_on(
    rooms: FakeRooms, hub: OutputHub, client: GenerationClient, stub: Any
) -> None:
    outputs = await subscribed(stub, "a")
    await client.submit(make_request(ONE), "a", PARENT)
    with pytest.raises(InvalidRequest, match="already streaming"):
        await anext(client.stream_outputs("a"))
    hub.publish([piece(ONE, 1)])
    assert await outputs.next_step() == (piece(ONE, 1),)
    assert rooms.abandoned.empty()
    outputs.cancel()


async def test_the_end_of_the_stream_abandons_every_room_that_has_not_ended(
    rooms: FakeRooms, hub: OutputHub, client: GenerationClient, stub: Any
) -> None:
    outputs = await subscribed(stub, "a")
    for room in (ONE, TWO, THREE):
        await client.submit(make_request(room), "a", PARENT)
    hub.publish([last(TWO)])
    assert await outputs.next_step() == (last(TWO),)
    outputs.cancel()
    assert await abandoned(rooms, 2) == {ONE, THREE}
    with pytest.raises(InvalidRequest, match="no StreamOutputs call"):
        await client.submit(make_request(4), "a", PARENT)


async def test_a_subscriber_that_vanishes_abandons_its_rooms(
    rooms: FakeRooms, engine: Connection, client: GenerationClient
) -> None:
    own_connection = Connection(engine.address)
    await subscribed(generation_pb2_grpc.GenerationStub(own_connection.channel), "a")
    await client.submit(make_request(ONE), "a", PARENT)
    await own_connection.close()
    assert await abandoned(rooms, 1) == {ONE}


async def test_a_subscriber_that_does_not_read_abandons_its_rooms_when_it_goes(
    rooms: FakeRooms, hub: OutputHub, client: GenerationClient, stub: Any
) -> None:
    """The server is stuck in sending when the call is cancelled."""
    outputs = await subscribed(stub, "a")
    await client.submit(make_request(ONE), "a", PARENT)
    for _ in range(64):
        hub.publish([piece(ONE, 1, "x" * 2**20)])
    await outputs.next_step()
    outputs.cancel()
    assert await abandoned(rooms, 1) == {ONE}


async def test_a_client_that_closes_its_stream_ends_the_call(rooms: FakeRooms, client: GenerationClient) -> None:
    outputs = client.stream_outputs("a")
    assert await anext(outputs) == ()
    await client.submit(make_request(ONE), "a", PARENT)
    await outputs.aclose()
    room, _ = await asyncio.wait_for(rooms.abandoned.get(), 2)
    assert room == ONE


# --- Generate ---


def message_of(room: int, **changes: Any) -> generation_pb2.GenerateRequest:
    message = convert_generation.request_to(make_request(room))
    for field in changes:
        message.ClearField(field)
    message.MergeFrom(generation_pb2.GenerateRequest(**changes))
    return message


async def test_generate_gives_the_answer_and_ends(rooms: FakeRooms, hub: OutputHub, stub: Any) -> None:
    call = stub.Generate(message_of(ONE))
    request, _ = await soon(rooms.submitted.get())
    assert request == make_request(ONE)
    hub.publish([piece(ONE, 1), piece(TWO, 2)])
    hub.publish([last(ONE)])
    assert [convert_generation.output_from(response.output) async for response in call] == [piece(ONE, 1), last(ONE)]
    assert rooms.abandoned.empty()


async def test_an_answer_that_takes_its_time_is_not_disturbed_by_beats(
    rooms: FakeRooms, hub: OutputHub, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beats, "BEAT_S", 0.01)
    call = stub.Generate(message_of(ONE))
    await soon(rooms.submitted.get())
    await asyncio.sleep(10 * beats.BEAT_S)
    hub.publish([last(ONE)])
    assert [convert_generation.output_from(response.output) async for response in call] == [last(ONE)]


@pytest.mark.parametrize(
    ("asked_s", "call_s", "least_s", "most_s"),
    [(20.0, None, 20.0, 20.0), (20.0, 600.0, 20.0, 20.0), (200.0, 100.0, 50.0, 110.0)],
    ids=["call without a deadline", "call ends later", "call ends first"],
)
async def test_the_deadline_of_the_call_is_the_requests_too(
    rooms: FakeRooms, stub: Any, asked_s: float, call_s: float | None, least_s: float, most_s: float
) -> None:
    call = stub.Generate(message_of(ONE, timeout=convert.duration_to(asked_s)), timeout=call_s)
    request, _ = await soon(rooms.submitted.get())
    assert least_s <= request.timeout_s <= most_s
    call.cancel()


async def test_a_submit_does_not_end_with_its_call(rooms: FakeRooms, client: GenerationClient, stub: Any) -> None:
    """The call is answered at once, within a deadline of its own."""
    outputs = await subscribed(stub, "a")
    await client.submit(make_request(ONE), "a", PARENT)
    request, _ = await soon(rooms.submitted.get())
    assert request.timeout_s == make_request(ONE).timeout_s > CALL_TIMEOUT_S
    outputs.cancel()


async def test_a_request_without_a_prefill_is_one_for_this_process_alone(rooms: FakeRooms, stub: Any) -> None:
    call = stub.Generate(message_of(ONE, bootstrap_host=None, bootstrap_port=None, priority=-4))
    request, _ = await soon(rooms.submitted.get())
    assert request == replace(make_request(ONE), bootstrap=None, priority=-4)
    call.cancel()


async def test_generate_takes_text(rooms: FakeRooms, stub: Any) -> None:
    call = stub.Generate(message_of(ONE, input_ids=None, text="ab"))
    request, _ = await soon(rooms.submitted.get())
    assert request.prompt == (97, 98)
    call.cancel()
    assert await abandoned(rooms, 1) == {ONE}


async def test_a_failure_while_generating_ends_the_call_with_that_error(
    rooms: FakeRooms, hub: OutputHub, engine: Connection, stub: Any
) -> None:
    call = stub.Generate(message_of(ONE))
    await soon(rooms.submitted.get())
    hub.publish([piece(ONE, 1)])
    assert convert_generation.output_from((await call.read()).output) == piece(ONE, 1)
    hub.publish([Output(ONE, error=PeerLost("prefill is gone"))])
    with pytest.raises(PeerLost, match="prefill is gone"):
        await typed(engine, call.read())
    assert rooms.abandoned.empty()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": None}, "text"),
    ({"bootstrap_room": 0}, "bootstrap_room"),
    ({"bootstrap_host": ""}, "bootstrap_host"),
]


@pytest.mark.parametrize(("changes", "field"), REFUSED, ids=[field for _, field in REFUSED])
@pytest.mark.parametrize("method", ["Generate", "Submit"])
async def test_a_request_that_is_incomplete_is_refused_by_its_field(
    rooms: FakeRooms, client: GenerationClient, engine: Connection, stub: Any, method: str, changes: Any, field: str
) -> None:
    message = message_of(ONE, **changes)
    outputs = await subscribed(stub, "a")
    calls: dict[str, Callable[[], Any]] = {
        "Generate": lambda: stub.Generate(message).read(),
        "Submit": lambda: stub.Submit(generation_pb2.SubmitRequest(request=message, subscriber="a")),
    }
    with pytest.raises(InvalidRequest) as raised:
        await typed(engine, calls[method]())
    assert raised.value.metadata["field"] == field
    assert rooms.submitted.empty()
    outputs.cancel()


async def test_a_refused_generate_leaves_nothing(rooms: FakeRooms, engine: Connection, stub: Any) -> None:
    first = stub.Generate(message_of(ONE))
    await soon(rooms.submitted.get())
    with pytest.raises(RoomInUse):
        await typed(engine, stub.Generate(message_of(ONE)).read())
    assert rooms.abandoned.empty()
    first.cancel()
    assert await abandoned(rooms, 1) == {ONE}


@pytest.mark.parametrize("after_a_piece", [False, True])
async def test_cancelling_generate_abandons_its_room(
    rooms: FakeRooms, hub: OutputHub, stub: Any, after_a_piece: bool
) -> None:
    call = stub.Generate(message_of(ONE))
    await soon(rooms.submitted.get())
    if after_a_piece:
        hub.publish([piece(ONE, 1)])
        await soon(call.read())
    call.cancel()
    assert await abandoned(rooms, 1) == {ONE}


async def test_a_room_in_generate_sees_nothing_of_its_neighbours(
    rooms: FakeRooms, hub: OutputHub, engine: Connection, stub: Any
) -> None:
    calls = {room: stub.Generate(message_of(room)) for room in (ONE, TWO)}
    for _ in calls:
        await soon(rooms.submitted.get())
    hub.publish([last(ONE), Output(TWO, error=PeerLost("gone"))])
    assert [convert_generation.output_from(response.output) async for response in calls[ONE]] == [last(ONE)]
    with pytest.raises(PeerLost, match="gone"):
        await typed(engine, calls[TWO].read())


# --- traces ---


async def test_the_callers_trace_reaches_the_room(rooms: FakeRooms, client: GenerationClient, stub: Any) -> None:
    outputs = await subscribed(stub, "a")
    await client.submit(make_request(ONE), "a", PARENT)
    call = stub.Generate(message_of(TWO), metadata=spans.carried(PARENT))
    for _ in range(2):
        _, parent = await soon(rooms.submitted.get())
        assert trace_id(parent) == trace_id(PARENT)
    call.cancel()
    outputs.cancel()
    assert await abandoned(rooms, 2) == {ONE, TWO}


async def test_a_caller_without_a_trace_gets_the_rooms(rooms: FakeRooms, stub: Any) -> None:
    call = stub.Generate(message_of(ONE))
    _, parent = await soon(rooms.submitted.get())
    assert trace_id(parent) == trace_id(spans.of_room(ONE))
    call.cancel()
    assert await abandoned(rooms, 1) == {ONE}
