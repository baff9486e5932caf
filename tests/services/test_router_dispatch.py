from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace

from pd_common.errors import (
    CapacityExceeded,
    NoWorkers,
    PdError,
    PeerLost,
    PromptTooLong,
    RoomInUse,
    TransferFailed,
)
from pd_common.generation import ChatMessage, ClientRequest, Output, SamplingParams
from pd_common.telemetry import spans
from pd_common.types import BootstrapAddress, BootstrapRoom, Role
from services.router.dispatch import Dispatcher
from tests.control.fake_rooms import MODEL
from tests.services.engine_server import (
    Cluster,
    EngineServer,
    ending,
    handed_off,
    piece,
    soon,
    until_live,
    until_lost,
)
from tests.services.pair import until

REQUEST = ClientRequest(
    prompt=(1, 2, 3),
    sampling=SamplingParams(max_new_tokens=4, temperature=0.0, seed=7),
    rid="mine",
    return_logprob=True,
    top_logprobs=2,
    timeout_s=30.0,
    cache_salt=b"tenant",
    priority=-3,
)
ROOM = BootstrapRoom(2**60 + 1)


class Answer:
    """The pieces of one request's answer, read by a task of its own."""

    def __init__(self, outputs: AsyncGenerator[Output, None]) -> None:
        self.pieces: asyncio.Queue[Output] = asyncio.Queue()
        self.task = asyncio.create_task(self._read(outputs))

    async def _read(self, outputs: AsyncGenerator[Output, None]) -> list[Output]:
        read = []
        async for output in outputs:
            read.append(output)
            self.pieces.put_nowait(output)
        return read

    async def whole(self) -> list[Output]:
        outputs: list[Output] = await soon(self.task)
        return outputs

    async def next_piece(self) -> Output:
        output: Output = await soon(self.pieces.get())
        return output


async def both_aborted(cluster: Cluster, room: BootstrapRoom) -> set[str]:
    """Both legs of the room have been told to end; gives what they were told."""
    told = [await engine.next_abort() for engine in cluster.servers]
    assert [number for number, _ in told] == [room, room]
    return {message for _, message in told}


def nothing_aborted(cluster: Cluster) -> bool:
    return all(engine.rooms.aborted.empty() for engine in cluster.servers)


# --- the way of a request ---


async def test_both_legs_get_the_same_request_and_decodes_answer_is_relayed(
    cluster: Cluster, dispatcher: Dispatcher, prefill: EngineServer, decode: EngineServer
) -> None:
    answer = Answer(dispatcher.generate(REQUEST))
    to_prefill, to_decode = await prefill.next_request(), await decode.next_request()
    assert to_prefill == to_decode
    room = to_prefill.room
    assert to_prefill.bootstrap == prefill.address
    assert (to_prefill.rid, to_prefill.prompt, to_prefill.sampling) == ("mine", (1, 2, 3), REQUEST.sampling)
    assert (to_prefill.return_logprob, to_prefill.top_logprobs, to_prefill.timeout_s) == (True, 2, 30.0)
    assert (to_prefill.cache_salt, to_prefill.priority) == (b"tenant", -3)
    decode.publish(piece(room, 10))
    assert await answer.next_piece() == piece(room, 10)
    prefill.publish(handed_off(room))
    decode.publish(piece(room, 11))
    decode.publish(ending(room))
    assert await answer.whole() == [piece(room, 10), piece(room, 11), ending(room)]
    await dispatcher.close()
    assert nothing_aborted(cluster)
    assert [worker.open_rooms for worker in cluster.workers] == [0, 0]


async def test_decode_is_sent_to_the_directory_that_prefill_has_registered_with(
    cluster: Cluster, dispatcher: Dispatcher, prefill: EngineServer, decode: EngineServer
) -> None:
    (worker,), directory = cluster.prefills, BootstrapAddress("prefill-0.svc", 8998)
    assert worker.model is not None
    worker.model = replace(worker.model, bootstrap=directory)
    answer = Answer(dispatcher.generate(REQUEST))
    to_prefill, to_decode = await prefill.next_request(), await decode.next_request()
    assert to_prefill.bootstrap == to_decode.bootstrap == directory
    decode.publish(ending(to_decode.room))
    await answer.whole()


async def test_requests_do_not_see_each_others_answers(
    dispatcher: Dispatcher, prefill: EngineServer, decode: EngineServer
) -> None:
    answers = {room: Answer(dispatcher.generate(replace(REQUEST, room=BootstrapRoom(room)))) for room in (1, 2)}
    for _ in answers:
        await prefill.next_request()
        await decode.next_request()
    one, two = BootstrapRoom(1), BootstrapRoom(2)
    decode.publish(piece(one, 10), piece(two, 20), piece(BootstrapRoom(3), 30))
    decode.publish(ending(two), ending(one))
    assert await answers[1].whole() == [piece(one, 10), ending(one)]
    assert await answers[2].whole() == [piece(two, 20), ending(two)]


async def test_rooms_that_the_router_makes_are_new_and_exact_in_json(
    dispatcher: Dispatcher, prefill: EngineServer, decode: EngineServer
) -> None:
    answers = [Answer(dispatcher.generate(replace(REQUEST, rid=None))) for _ in range(8)]
    requests = [await decode.next_request() for _ in answers]
    rooms = {request.room for request in requests}
    assert len(rooms) == len({request.rid for request in requests}) == len(answers)
    assert all(0 < room < 2**53 for room in rooms)
    for room in rooms:
        decode.publish(ending(room))
    for answer in answers:
        await answer.whole()


async def test_a_clients_own_room_is_kept(dispatcher: Dispatcher, prefill: EngineServer, decode: EngineServer) -> None:
    answer = Answer(dispatcher.generate(replace(REQUEST, room=ROOM)))
    assert (await prefill.next_request()).room == (await decode.next_request()).room == ROOM
    decode.publish(ending(ROOM))
    assert await answer.whole() == [ending(ROOM)]


async def test_a_room_in_use_is_refused_and_its_request_goes_on(
    cluster: Cluster, dispatcher: Dispatcher, decode: EngineServer
) -> None:
    request = replace(REQUEST, room=ROOM)
    first = Answer(dispatcher.generate(request))
    await decode.next_request()
    with pytest.raises(RoomInUse):
        await anext(dispatcher.generate(request))
    decode.publish(piece(ROOM, 10))
    assert await first.next_piece() == piece(ROOM, 10)
    decode.publish(ending(ROOM))
    await first.whole()
    assert nothing_aborted(cluster)


async def test_a_room_that_ended_is_the_engines_to_refuse(dispatcher: Dispatcher, decode: EngineServer) -> None:
    request = replace(REQUEST, room=ROOM)
    first = Answer(dispatcher.generate(request))
    await decode.next_request()
    decode.publish(ending(ROOM))
    await first.whole()
    with pytest.raises(RoomInUse, match="until a moment ago"):
        await anext(dispatcher.generate(request))


@pytest.mark.parametrize("own", [True, False], ids=["of the caller", "of the room"])
async def test_both_legs_are_in_one_trace(
    dispatcher: Dispatcher, prefill: EngineServer, decode: EngineServer, own: bool
) -> None:
    parent = spans.of_room(BootstrapRoom(77) if own else ROOM)
    token = otel_context.attach(parent) if own else None
    answer = Answer(dispatcher.generate(replace(REQUEST, room=ROOM)))
    for engine in (prefill, decode):
        _, received = await soon(engine.rooms.submitted.get())
        expected = trace.get_current_span(parent).get_span_context().trace_id
        assert trace.get_current_span(received).get_span_context().trace_id == expected
    decode.publish(ending(ROOM))
    await answer.whole()
    if token is not None:
        otel_context.detach(token)


# --- failures ---

REFUSALS: list[tuple[PdError | None, PdError | None, type[PdError]]] = [
    (CapacityExceeded("prefill is full"), None, CapacityExceeded),
    (None, PromptTooLong("too long for decode"), PromptTooLong),
    (CapacityExceeded("prefill is full"), PromptTooLong("too long for decode"), PromptTooLong),
]


@pytest.mark.parametrize(("by_prefill", "by_decode", "expected"), REFUSALS, ids=["prefill", "decode", "both"])
async def test_a_refusal_by_either_leg_is_the_answer_and_both_legs_end(
    cluster: Cluster,
    dispatcher: Dispatcher,
    prefill: EngineServer,
    decode: EngineServer,
    by_prefill: PdError | None,
    by_decode: PdError | None,
    expected: type[PdError],
) -> None:
    prefill.rooms.refusal, decode.rooms.refusal = by_prefill, by_decode
    with pytest.raises(expected) as raised:
        await anext(dispatcher.generate(replace(REQUEST, room=ROOM)))
    assert await both_aborted(cluster, ROOM) == {raised.value.message}
    assert [worker.open_rooms for worker in cluster.workers] == [0, 0]


async def test_a_room_that_an_engine_has_of_somebody_else_goes_on_there(
    dispatcher: Dispatcher, prefill: EngineServer, decode: EngineServer
) -> None:
    """As when a client of another router has chosen the same number."""
    decode.rooms.refusal = RoomInUse("room 5 is in use")
    with pytest.raises(RoomInUse):
        await anext(dispatcher.generate(replace(REQUEST, room=ROOM)))
    assert await prefill.next_abort() == (ROOM, "room 5 is in use")
    await dispatcher.close()
    assert decode.rooms.aborted.empty()


@pytest.mark.parametrize("failing", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("pieces_before", [0, 1])
async def test_a_leg_that_fails_ends_the_answer_with_its_error_and_the_other_leg(
    cluster: Cluster,
    dispatcher: Dispatcher,
    prefill: EngineServer,
    decode: EngineServer,
    failing: Role,
    pieces_before: int,
) -> None:
    answer = Answer(dispatcher.generate(replace(REQUEST, room=ROOM)))
    await prefill.next_request()
    await decode.next_request()
    for token in range(pieces_before):
        decode.publish(piece(ROOM, token))
        await answer.next_piece()
    leg = prefill if failing is Role.PREFILL else decode
    leg.publish(Output(ROOM, error=TransferFailed("a write failed", room=ROOM)))
    with pytest.raises(TransferFailed, match="a write failed"):
        await answer.whole()
    assert await both_aborted(cluster, ROOM) == {"a write failed"}


@pytest.mark.parametrize("dying", [Role.PREFILL, Role.DECODE])
async def test_a_process_that_dies_fails_its_rooms_and_is_used_again_when_it_is_back(
    cluster: Cluster, dispatcher: Dispatcher, prefill: EngineServer, decode: EngineServer, dying: Role
) -> None:
    answer = Answer(dispatcher.generate(replace(REQUEST, room=ROOM)))
    await prefill.next_request()
    await decode.next_request()
    dead, other = (prefill, decode) if dying is Role.PREFILL else (decode, prefill)
    worker = cluster.prefills[0] if dying is Role.PREFILL else cluster.decodes[0]
    await dead.stop()
    with pytest.raises(PeerLost, match=str(dead.port)):
        await answer.whole()
    assert (await other.next_abort())[0] == ROOM
    assert not dispatcher.is_ready
    with pytest.raises(NoWorkers, match=rf"no usable pair: {dying.value} 127.0.0.1:{dead.port}: (?!127)"):
        await anext(dispatcher.generate(REQUEST))

    await dead.start()
    await until_live(worker, cluster.changed)
    assert not dispatcher.is_ready
    cluster.prove_all()
    again = Answer(dispatcher.generate(REQUEST))
    room = (await prefill.next_request()).room
    await decode.next_request()
    decode.publish(ending(room))
    assert await again.whole() == [ending(room)]


async def test_a_process_that_dies_takes_every_one_of_its_rooms_along(
    dispatcher: Dispatcher, decode: EngineServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    answers = [Answer(dispatcher.generate(REQUEST)) for _ in range(3)]
    for _ in answers:
        await decode.next_request()
    await decode.stop()
    for answer in answers:
        with pytest.raises(PeerLost):
            await answer.whole()
    await dispatcher.close()
    assert "not aborted" not in caplog.text  # nobody wants a line for each of a thousand rooms
    await decode.start()


async def test_what_prefill_has_handed_off_survives_its_end(
    cluster: Cluster, dispatcher: Dispatcher, prefill: EngineServer, decode: EngineServer
) -> None:
    answer = Answer(dispatcher.generate(replace(REQUEST, room=ROOM)))
    await prefill.next_request()
    await decode.next_request()
    prefill.publish(handed_off(ROOM))
    decode.publish(piece(ROOM, 1))
    await answer.next_piece()
    await until(lambda: cluster.prefills[0].open_rooms == 0)
    await prefill.stop()
    await until_lost(cluster.prefills[0], cluster.changed)
    decode.publish(ending(ROOM))
    assert await answer.whole() == [piece(ROOM, 1), ending(ROOM)]
    assert nothing_aborted(cluster)


@pytest.mark.parametrize("pieces_before", [0, 1])
async def test_a_client_that_goes_away_ends_both_legs(
    cluster: Cluster, dispatcher: Dispatcher, prefill: EngineServer, decode: EngineServer, pieces_before: int
) -> None:
    answer = Answer(dispatcher.generate(replace(REQUEST, room=ROOM)))
    await prefill.next_request()
    await decode.next_request()
    for token in range(pieces_before):
        decode.publish(piece(ROOM, token))
        await answer.next_piece()
    answer.task.cancel()
    assert await both_aborted(cluster, ROOM) == {"the client went away"}
    assert [worker.open_rooms for worker in cluster.workers] == [0, 0]


async def test_closing_the_generator_ends_both_legs(
    cluster: Cluster, dispatcher: Dispatcher, decode: EngineServer
) -> None:
    outputs = dispatcher.generate(replace(REQUEST, room=ROOM))
    first = asyncio.ensure_future(anext(outputs))
    await decode.next_request()
    decode.publish(piece(ROOM, 10))
    assert await soon(first) == piece(ROOM, 10)
    await outputs.aclose()
    assert await both_aborted(cluster, ROOM) == {"the client went away"}
    again = Answer(dispatcher.generate(replace(REQUEST, room=ROOM)))
    with pytest.raises(PdError):
        await again.whole()


# --- text ---


async def test_text_is_any_workers_business(dispatcher: Dispatcher) -> None:
    assert await dispatcher.tokenize_text("ab") == (97, 98)
    assert await dispatcher.tokenize_chat([ChatMessage("user", "a")]) == tuple(map(ord, "user:a;"))
    assert await dispatcher.model() == MODEL


async def test_text_needs_only_one_live_worker(cluster: Cluster, dispatcher: Dispatcher, decode: EngineServer) -> None:
    await decode.stop()
    await until_lost(cluster.decodes[0], cluster.changed)
    assert await dispatcher.tokenize_text("ab") == (97, 98)
    await decode.start()
