"""Where requests go when workers have too much to do, and requests that a decode serves alone, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.util.types import AttributeValue

from pd_common.control import beats
from pd_common.errors import CapacityExceeded, PromptTooLong, RoomAborted
from pd_common.generation import ClientRequest, GenerationRequest, Output, SamplingParams
from pd_common.telemetry import spans
from pd_common.telemetry.spans import SpanName
from pd_common.telemetry.tracing import Tracing
from pd_common.types import BootstrapRoom
from services.router.dispatch import Dispatcher
from tests.control.fake_rooms import IDLE
from tests.services.engine_server import Cluster, EngineServer, ending, handed_off, piece, soon
from tests.services.pair import until

ROOM = BootstrapRoom(2**60 + 1)
REQUEST = ClientRequest(prompt=(1, 2, 3), sampling=SamplingParams(max_new_tokens=4), rid="mine")
FULL = replace(IDLE, queued=8, max_queued=8, oldest_wait_s=6.5)
REFUSAL = CapacityExceeded("8 requests wait", retry_after_s=5)


class Router:
    """A dispatcher in front of a cluster whose routes are all proven."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.dispatcher = Dispatcher(cluster.policy, Tracing())
        self.decodes = cluster.decode_servers
        self.prefills = cluster.prefill_servers

    def ask(self, request: ClientRequest = REQUEST) -> asyncio.Task[list[Output]]:
        return asyncio.create_task(self._ask(request))

    async def _ask(self, request: ClientRequest) -> list[Output]:
        return [output async for output in self.dispatcher.generate(request)]


Make = Callable[..., Awaitable[Router]]


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    monkeypatch.setattr(beats, "BEAT_S", 0.05)
    made: list[Router] = []

    async def make(prefills: int, decodes: int, min_prompt_tokens: int = 0) -> Router:
        cluster = Cluster(prefills, decodes, min_prompt_tokens)
        await cluster.start()
        cluster.prove_all()
        made.append(Router(cluster))
        return made[-1]

    yield make
    for router in made:
        await router.dispatcher.close()
        await router.cluster.stop()


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Every span that ends from now on."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(spans, "_tracer", provider.get_tracer("pd"))
    return exporter


def routes_of(exporter: InMemorySpanExporter) -> list[dict[str, AttributeValue]]:
    """What the trace says of the way of each room, in the order in which they ended."""
    routes = [span for span in exporter.get_finished_spans() if span.name == SpanName.ROUTE]
    told = {"prefill", "decode", "pd.disaggregated", "pd.route_reason"}
    return [{key: value for key, value in (span.attributes or {}).items() if key in told} for span in routes]


def saw_nothing(*engines: EngineServer) -> bool:
    return all(engine.rooms.submitted.empty() and engine.rooms.aborted.empty() for engine in engines)


# --- too much to do ---


@pytest.mark.parametrize("full", ["prefill", "decode"])
async def test_where_every_pair_is_full_a_request_is_refused_before_any_worker_sees_it(make: Make, full: str) -> None:
    router = await make(1, 2)
    of_role = {"prefill": router.prefills, "decode": router.decodes}
    for engine in of_role[full]:
        engine.rooms.to_do = FULL
    workers = [worker for worker in router.cluster.workers if worker.role.value == full]
    await until(lambda: all(worker.load == FULL for worker in workers))
    with pytest.raises(CapacityExceeded, match="8 requests waiting") as raised:
        await soon(router.ask())
    assert raised.value.metadata == {"retry_after_s": "7"}
    assert saw_nothing(*router.cluster.servers)
    of_role[full][0].rooms.to_do = IDLE
    await until(lambda: workers[0].load == IDLE)
    of_role["decode"][0].answer_all(ending(ROOM))
    assert len(await soon(router.ask())) == 1


@pytest.mark.parametrize("refusing", ["prefill", "decode", "both"])
async def test_a_refusal_for_want_of_room_is_not_the_answer_while_there_is_another_pair(
    make: Make, refusing: str
) -> None:
    router = await make(2, 2)
    prefill, decode = router.prefills[0], router.decodes[0]
    if refusing != "decode":
        prefill.rooms.refusal = REFUSAL
    if refusing != "prefill":
        decode.rooms.refusal = REFUSAL
    for engine in router.decodes:
        engine.answer_all(piece(ROOM, 1), ending(ROOM))
    outputs = await soon(router.ask())
    assert [output.token_ids for output in outputs] == [(1,), (9,)]
    (room,) = {output.room for output in outputs}
    await router.dispatcher.close()
    told = [engine for engine in router.cluster.servers if not engine.rooms.aborted.empty()]
    refused = {(await engine.next_abort())[0] for engine in told}
    assert refused, "the legs of rooms that came to nothing are ended"
    assert room not in refused
    assert [worker.open_rooms for worker in router.cluster.workers] == [0] * 4


async def test_every_pair_is_tried_once_and_then_the_refusal_is_the_answer(make: Make) -> None:
    router = await make(1, 3)
    for number, engine in enumerate(router.decodes):
        engine.rooms.refusal = CapacityExceeded(f"full {number}", retry_after_s=number + 3)
    with pytest.raises(CapacityExceeded, match="full 2") as raised:
        await soon(router.ask())
    assert raised.value.metadata["retry_after_s"] == "5"
    (prefill,) = router.prefills
    rooms = [(await prefill.next_request()).room for _ in router.decodes]
    assert len(set(rooms)) == 3
    assert {(await prefill.next_abort())[0] for _ in rooms} == set(rooms)
    assert prefill.rooms.submitted.empty()


async def test_a_worker_that_has_refused_is_not_asked_again_with_another_partner(make: Make) -> None:
    router = await make(2, 2)
    router.prefills[0].rooms.refusal = REFUSAL
    first, second = router.decodes
    answer = router.ask()
    refused = (await first.next_request()).room
    room = (await first.next_request()).room
    assert room != refused
    assert saw_nothing(second)
    first.publish(ending(room))
    assert [output.room for output in await soon(answer)] == [room]


async def test_a_room_that_the_client_has_chosen_is_not_moved(make: Make) -> None:
    router = await make(1, 2)
    router.decodes[0].rooms.refusal = REFUSAL
    with pytest.raises(CapacityExceeded, match="8 requests wait"):
        await soon(router.ask(replace(REQUEST, room=ROOM)))
    assert saw_nothing(router.decodes[1])


async def test_any_other_refusal_is_the_answer_at_once(make: Make) -> None:
    router = await make(1, 2)
    router.decodes[0].rooms.refusal = PromptTooLong("too long")
    with pytest.raises(PromptTooLong):
        await soon(router.ask())
    assert saw_nothing(router.decodes[1])


@pytest.mark.parametrize("pieces_before", [0, 1])
async def test_a_request_that_was_taken_in_and_sent_away_later_is_not_tried_again(
    make: Make, pieces_before: int
) -> None:
    """It may have waited for as long as it may, or its client has a part of the answer."""
    router = await make(1, 2)
    answer = router.ask()
    room = (await router.decodes[0].next_request()).room
    router.decodes[0].publish(*[piece(room, 1)] * pieces_before, Output(room, error=REFUSAL))
    with pytest.raises(CapacityExceeded, match="8 requests wait"):
        await soon(answer)
    assert saw_nothing(router.decodes[1])


async def test_a_request_that_is_aborted_while_it_is_refused_is_not_tried_again(make: Make) -> None:
    router = await make(1, 2)
    first, second = router.decodes
    reached, gate = asyncio.Event(), asyncio.Event()
    submit = router.cluster.decodes[0].submit

    async def held_up(request: GenerationRequest, parent: Context) -> None:
        reached.set()
        await gate.wait()
        await submit(request, parent)

    router.cluster.decodes[0].submit = held_up  # type: ignore[method-assign]
    first.rooms.refusal = REFUSAL
    answer = router.ask()
    await soon(reached.wait())
    assert len(await soon(router.dispatcher.abort_rid("mine", "stop it"))) == 1
    gate.set()
    with pytest.raises(CapacityExceeded):
        await soon(answer)
    assert saw_nothing(second)


# --- decode alone ---


async def test_a_router_without_prefills_has_decode_serve_everything(
    make: Make, exported: InMemorySpanExporter
) -> None:
    router = await make(0, 1)
    (decode,) = router.decodes
    answer = router.ask()
    request = await decode.next_request()
    assert request.bootstrap is None
    decode.publish(piece(request.room, 1))
    decode.publish(ending(request.room))
    assert await soon(answer) == [piece(request.room, 1), ending(request.room)]
    await router.dispatcher.close()
    assert decode.rooms.aborted.empty()
    assert routes_of(exported) == [
        {
            "decode": decode.address.target,
            "pd.disaggregated": False,
            "pd.route_reason": "this router has no prefill",
        }
    ]


async def test_only_short_prompts_go_to_decode_alone(make: Make, exported: InMemorySpanExporter) -> None:
    router = await make(1, 1, 4)
    (prefill,), (decode,) = router.prefills, router.decodes
    short = router.ask()
    request = await decode.next_request()
    assert request.bootstrap is None
    decode.publish(ending(request.room))
    await soon(short)
    assert saw_nothing(prefill)
    long = router.ask(replace(REQUEST, prompt=(1, 2, 3, 4)))
    request = await decode.next_request()
    assert request == await prefill.next_request()
    assert request.bootstrap == prefill.address
    prefill.publish(handed_off(request.room))
    decode.publish(ending(request.room))
    await soon(long)
    routes = routes_of(exported)
    assert [route["pd.disaggregated"] for route in routes] == [False, True]
    assert [route["pd.route_reason"] for route in routes] == [
        "prompt of 3 tokens, fewer than --disaggregation-min-prompt-tokens 4",
        "prompt of 4 tokens, pair with least to do",
    ]
    assert routes[1]["prefill"] == prefill.address.target


async def test_a_client_that_names_the_prefill_has_its_prompt_computed_there(make: Make) -> None:
    router = await make(1, 1, 64)
    (prefill,), (decode,) = router.prefills, router.decodes
    answer = router.ask(replace(REQUEST, bootstrap=prefill.address))
    request = await prefill.next_request()
    assert request.bootstrap == prefill.address
    decode.publish(ending((await decode.next_request()).room))
    await soon(answer)


async def test_the_one_leg_of_a_lone_decode_ends_with_its_client(make: Make) -> None:
    router = await make(0, 1)
    (decode,) = router.decodes
    answer = router.ask(replace(REQUEST, room=ROOM))
    await decode.next_request()
    answer.cancel()
    assert await decode.next_abort() == (ROOM, "the client went away")
    again = router.ask()
    room = (await decode.next_request()).room
    assert len(await soon(router.dispatcher.abort_rid("mine", "stop it"))) == 1
    assert await decode.next_abort() == (room, "stop it")
    with pytest.raises(RoomAborted, match="stop it"):
        await soon(again)


async def test_a_lone_decode_that_is_full_passes_the_prompt_on_to_the_next(make: Make) -> None:
    router = await make(0, 2)
    first, second = router.decodes
    first.rooms.refusal = REFUSAL
    second.answer_all(ending(ROOM))
    assert len(await soon(router.ask())) == 1
