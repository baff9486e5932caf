"""What a router notes of a request's time: from its arrival to its end, without a gap."""

from __future__ import annotations

from itertools import pairwise

import pytest
from opentelemetry import context as otel_context
from opentelemetry.context import Context

from pd_common.errors import RoomAborted
from pd_common.generation import ClientRequest, Output, SamplingParams
from pd_common.telemetry import spans
from pd_common.telemetry.spans import SpanName
from pd_common.telemetry.tracing import RoomTrace, Stage, Tracing
from pd_common.types import BootstrapRoom
from services.router.dispatch import Dispatcher
from tests.services.engine_server import Cluster, EngineServer, ending, piece, soon
from tests.services.pair import until

ROOM = BootstrapRoom(81)
REQUEST = ClientRequest(prompt=(1, 2, 3), sampling=SamplingParams(max_new_tokens=4), room=ROOM, timeout_s=30.0)
ANSWERED = [SpanName.DISPATCH, SpanName.FIRST_TOKEN_WAIT, SpanName.STREAM]


@pytest.fixture
def tracing() -> Tracing:
    return Tracing()


@pytest.fixture
def dispatcher(cluster: Cluster, tracing: Tracing) -> Dispatcher:
    return Dispatcher(cluster.policy, tracing)


async def answered(dispatcher: Dispatcher, decode: EngineServer) -> list[Output]:
    decode.answer_all(piece(ROOM, 5), ending(ROOM))
    return [output async for output in dispatcher.generate(REQUEST)]


def of_name(leg: RoomTrace, name: SpanName) -> Stage:
    [stage] = [stage for stage in leg.stages if stage.name is name]
    return stage


def assert_no_gaps(leg: RoomTrace) -> None:
    assert leg.stages[0].start_ns == leg.root.start_ns
    for before, after in pairwise(leg.stages):
        assert before.end_ns == after.start_ns
    assert leg.stages[-1].end_ns == leg.root.end_ns


async def test_a_request_is_accounted_for_from_its_room_to_its_last_piece(
    dispatcher: Dispatcher, tracing: Tracing, decode: EngineServer
) -> None:
    assert len(await soon(answered(dispatcher, decode))) == 2
    [leg] = tracing.of_room(ROOM)
    assert [stage.name for stage in leg.stages] == ANSWERED
    assert_no_gaps(leg)
    assert leg.first_token_ns is not None
    assert leg.first_token_ns <= of_name(leg, SpanName.STREAM).start_ns


async def test_a_request_whose_arrival_was_noted_counts_from_then(
    dispatcher: Dispatcher, tracing: Tracing, decode: EngineServer
) -> None:
    arrived = spans.arrived(Context())
    token = otel_context.attach(arrived)
    await soon(answered(dispatcher, decode))
    otel_context.detach(token)
    [leg] = tracing.of_room(ROOM)
    assert leg.root.start_ns == spans.arrival_ns(arrived)
    assert [stage.name for stage in leg.stages] == [SpanName.RECEIVE, *ANSWERED]
    assert_no_gaps(leg)


async def test_an_aborted_request_shows_what_it_was_at_and_how_long_its_legs_took_to_end(
    dispatcher: Dispatcher, tracing: Tracing, decode: EngineServer
) -> None:
    outputs = dispatcher.generate(REQUEST)
    decode.answer_all(piece(ROOM, 5))
    await soon(anext(outputs))
    await dispatcher.abort(ROOM, RoomAborted("enough", room=ROOM))
    with pytest.raises(RoomAborted):
        await soon(anext(outputs))
    [leg] = tracing.of_room(ROOM)
    await until(lambda: of_name(leg, SpanName.ABORT).end_ns is not None)
    assert isinstance(of_name(leg, SpanName.STREAM).failure, RoomAborted)
