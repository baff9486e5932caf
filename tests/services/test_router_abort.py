"""Abort at the router, over real gRPC on both sides of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pd.v1 import abort_pb2, abort_pb2_grpc, generation_pb2, generation_pb2_grpc, types_pb2

from pd_common.control import convert, server
from pd_common.control.abort_servicer import AbortServicer
from pd_common.control.connection import Connection
from pd_common.errors import PdError, PeerLost, RoomAborted, RoomInUse, StaleInstance
from pd_common.handoff.state import TransferState
from pd_common.types import BootstrapRoom, Instance
from services.router import rooms
from services.router.dispatch import Dispatcher
from services.router.open_requests import OpenRequests
from services.router.servicer import RouterGenerationServicer
from tests.control.serving import serving, typed
from tests.services.engine_server import Cluster, EngineServer, ending, piece, soon

ROOM = BootstrapRoom(2**60 + 1)


class Client:
    """A gRPC client of the router."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._generation: Any = generation_pb2_grpc.GenerationStub(connection.channel)
        self._abort: Any = abort_pb2_grpc.AbortStub(connection.channel)

    def generate(self, room: int, rid: str = "") -> asyncio.Task[int]:
        """Gives the number of pieces."""
        return asyncio.create_task(self._generate(room, rid))

    async def _generate(self, room: int, rid: str) -> int:
        ids = generation_pb2.TokenIds(ids=[1, 2])
        call = self._generation.Generate(generation_pb2.GenerateRequest(bootstrap_room=room, rid=rid, input_ids=ids))
        with self._connection.typed_errors():
            return len([response async for response in call])

    async def abort(self, room: int, recipient: Instance | None = None) -> abort_pb2.AbortRoomResponse:
        meant = None if recipient is None else convert.instance_to(recipient)
        request = abort_pb2.AbortRoomRequest(bootstrap_room=room, message="stop it", recipient=meant)
        response: abort_pb2.AbortRoomResponse = await soon(typed(self._connection, self._abort.AbortRoom(request)))
        return response


class Gate:
    """Holds up what one engine answers to aborts."""

    def __init__(self, engine: EngineServer) -> None:
        self.reached, self.open = asyncio.Event(), asyncio.Event()
        self._answer = engine.rooms.abort
        engine.rooms.abort = self._abort  # type: ignore[method-assign]

    async def _abort(self, room: BootstrapRoom, error: PdError) -> TransferState | None:
        self.reached.set()
        await self.open.wait()
        return await self._answer(room, error)


@pytest.fixture
async def client(dispatcher: Dispatcher) -> AsyncIterator[Client]:
    generation = RouterGenerationServicer(dispatcher, OpenRequests())
    fronts = (server.abort(AbortServicer(dispatcher)), server.generation(generation))
    async with serving(*fronts) as connection:
        yield Client(connection)


async def both_told(cluster: Cluster, room: int) -> None:
    assert [await engine.next_abort() for engine in cluster.servers] == [(room, "stop it")] * 2


async def test_an_abort_ends_the_clients_stream_and_both_legs(
    cluster: Cluster, dispatcher: Dispatcher, client: Client, decode: EngineServer
) -> None:
    answer = client.generate(ROOM)
    await decode.next_request()
    decode.publish(piece(ROOM, 10))
    response = await client.abort(ROOM)
    await both_told(cluster, ROOM)
    assert response.state == types_pb2.TRANSFER_STATE_FAILED
    assert convert.instance_from(response.drained, "drained") == dispatcher.instance
    with pytest.raises(RoomAborted, match="stop it"):
        await soon(answer)
    assert [worker.open_rooms for worker in cluster.workers] == [0, 0]


@pytest.mark.parametrize("slow", [0, 1], ids=["prefill", "decode"])
async def test_it_answers_when_both_legs_have_and_so_does_a_second_one(
    cluster: Cluster, client: Client, decode: EngineServer, slow: int
) -> None:
    gates = [Gate(engine) for engine in cluster.servers]
    answer = client.generate(ROOM)
    await decode.next_request()
    first = asyncio.create_task(client.abort(ROOM))
    for gate in gates:
        await soon(gate.reached.wait())
    with pytest.raises(RoomAborted):  # the client need not wait for either
        await soon(answer)
    second = asyncio.create_task(client.abort(ROOM))
    gates[1 - slow].open.set()
    await cluster.servers[1 - slow].next_abort()
    with pytest.raises(RoomInUse):
        await soon(client.generate(ROOM))
    assert not first.done()
    assert not second.done()
    gates[slow].open.set()
    assert (await first).state == (await second).state == types_pb2.TRANSFER_STATE_FAILED
    assert await cluster.servers[slow].next_abort() == (ROOM, "stop it")
    assert all(engine.rooms.aborted.empty() for engine in cluster.servers)


async def test_an_abort_that_is_lost_is_said_again(cluster: Cluster, client: Client, decode: EngineServer) -> None:
    answer, calls = decode.rooms.abort, 0

    async def lost_once(room: BootstrapRoom, error: PdError) -> TransferState | None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise PeerLost("the connection broke")
        return await answer(room, error)

    decode.rooms.abort = lost_once  # type: ignore[method-assign]
    generating = client.generate(ROOM)
    await decode.next_request()
    await client.abort(ROOM)
    assert calls == 2
    assert await decode.next_abort() == (ROOM, "stop it")
    with pytest.raises(RoomAborted):
        await soon(generating)


async def test_a_client_that_went_away_is_an_abort_that_another_may_wait_for(
    dispatcher: Dispatcher, client: Client, prefill: EngineServer, decode: EngineServer
) -> None:
    gate = Gate(prefill)
    answer = client.generate(ROOM)
    await decode.next_request()
    answer.cancel()
    await soon(gate.reached.wait())
    abort = asyncio.create_task(dispatcher.abort(ROOM, RoomAborted("stop it")))
    assert (await decode.next_abort()) == (ROOM, "the client went away")
    assert not abort.done()
    gate.open.set()
    assert await soon(abort) is TransferState.FAILED


async def test_a_room_that_comes_after_its_abort_is_refused_for_a_while(
    client: Client, decode: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        assert (await client.abort(ROOM)).state == types_pb2.TRANSFER_STATE_UNSPECIFIED
    with pytest.raises(RoomAborted, match="before its request came"):
        await soon(client.generate(ROOM))
    monkeypatch.setattr(rooms, "_REFUSED_FOR_S", -1.0)
    await client.abort(ROOM)
    answer = client.generate(ROOM)
    await decode.next_request()
    decode.publish(ending(ROOM))
    assert await soon(answer) == 1


async def test_only_exactly_this_room_is_aborted(cluster: Cluster, client: Client, decode: EngineServer) -> None:
    near = (1, 11, 111)
    answers = {room: client.generate(room) for room in near}
    for _ in near:
        await decode.next_request()
    await client.abort(11)
    with pytest.raises(RoomAborted):
        await soon(answers.pop(11))
    for room, answer in answers.items():
        decode.publish(ending(BootstrapRoom(room)))
        assert await soon(answer) == 1
    await both_told(cluster, 11)
    assert all(engine.rooms.aborted.empty() for engine in cluster.servers)


async def test_all_rooms_with_exactly_this_rid_are_aborted(
    cluster: Cluster, dispatcher: Dispatcher, client: Client, decode: EngineServer
) -> None:
    answers = {room: client.generate(room, rid) for room, rid in ((1, "a"), (2, "a"), (3, "ab"), (4, "A"))}
    for _ in answers:
        await decode.next_request()
    assert sorted(await soon(dispatcher.abort_rid("a", "stop it"))) == [1, 2]
    for room in (1, 2):
        with pytest.raises(RoomAborted):
            await soon(answers[room])
    assert await dispatcher.abort_rid("nobody's", "stop it") == []
    for room in (3, 4):
        decode.publish(ending(BootstrapRoom(room)))
        assert await soon(answers[room]) == 1


async def test_an_abort_that_is_meant_for_an_earlier_router_changes_nothing(
    client: Client, dispatcher: Dispatcher, decode: EngineServer
) -> None:
    answer = client.generate(ROOM)
    await decode.next_request()
    with pytest.raises(StaleInstance):
        await client.abort(ROOM, Instance(dispatcher.instance.instance_id, dispatcher.instance.epoch - 1))
    decode.publish(ending(ROOM))
    assert await soon(answer) == 1


async def test_an_abort_during_submission_reaches_a_leg_that_has_not_answered_yet(
    cluster: Cluster, client: Client, prefill: EngineServer, decode: EngineServer
) -> None:
    gate = Gate(decode)
    answer = client.generate(ROOM)
    await prefill.next_request()
    abort = asyncio.create_task(client.abort(ROOM))
    await soon(gate.reached.wait())
    gate.open.set()
    assert (await abort).state == types_pb2.TRANSFER_STATE_FAILED
    with pytest.raises(RoomAborted):
        await soon(answer)


def test_what_is_refused_is_bounded_and_forgotten_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "_MOST_REFUSED", 2)
    refused = rooms.Rooms()
    for number, now in ((1, 0.0), (2, 1.0), (1, 2.0), (3, 3.0)):
        refused.refuse(BootstrapRoom(number), now)
    assert list(refused._refused) == [1, 3]
    refused.refuse(BootstrapRoom(4), 62.5)
    assert list(refused._refused) == [3, 4]
