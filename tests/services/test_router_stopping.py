"""Workers that are about to end, or end at the wrong moment: they get no new request, and none is lost to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.context import Context

from pd_common.control import beats
from pd_common.control.generation_client import GenerationClient
from pd_common.errors import (
    DigestMismatch,
    NoWorkers,
    PdError,
    PeerLost,
    ShuttingDown,
)
from pd_common.generation import ChatMessage, ClientRequest, GenerationRequest, Load, Output, SamplingParams
from pd_common.telemetry.tracing import Tracing
from pd_common.types import BootstrapRoom
from services.router.describe import describe
from services.router.dispatch import Dispatcher
from services.router.worker import Worker
from tests.control.fake_rooms import IDLE, MODEL
from tests.services.byte_engine import Gate
from tests.services.engine_server import Cluster, EngineServer, ending, piece, soon, until_live
from tests.services.pair import Pair, running, until

ROOM = BootstrapRoom(2**60 + 1)
REQUEST = ClientRequest(prompt=(1, 2, 3), sampling=SamplingParams(max_new_tokens=4), rid="mine")
STOPPING = replace(IDLE, stopping=True)
REFUSAL = ShuttingDown("this process is stopping and takes no new request")


class Router:
    """A dispatcher in front of a cluster whose routes are all proven."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.dispatcher = Dispatcher(cluster.policy, Tracing())
        self.prefills, self.decodes = cluster.prefill_servers, cluster.decode_servers

    def ask(self, request: ClientRequest = REQUEST) -> asyncio.Task[list[Output]]:
        return asyncio.create_task(self._ask(request))

    async def _ask(self, request: ClientRequest) -> list[Output]:
        return [output async for output in self.dispatcher.generate(request)]

    async def answer(self, room: BootstrapRoom) -> None:
        """With one piece, as soon as decode has its leg."""
        await until(lambda: any(engine.rooms.transfers.find(room) is not None for engine in self.decodes))
        for engine in self.decodes:
            engine.publish(ending(room))

    async def says_it_stops(self, engine: EngineServer) -> None:
        """From now on the router knows it."""
        engine.rooms.to_do = STOPPING
        engine.hub.beat()
        worker = self.worker_of(engine)
        await until(lambda: worker.is_stopping)

    def worker_of(self, engine: EngineServer) -> Worker:
        (worker,) = (worker for worker in self.cluster.workers if worker.address == engine.address)
        return worker

    @property
    def is_any_doubted(self) -> bool:
        return not all(route.is_proven for route in self.cluster.policy.routes if route.lives is not None)


Make = Callable[..., Awaitable[Router]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[Router] = []

    async def make(prefills: int, decodes: int) -> Router:
        cluster = Cluster(prefills, decodes)
        await cluster.start()
        cluster.prove_all()
        made.append(Router(cluster))
        return made[-1]

    yield make
    for router in made:
        await router.dispatcher.close()
        await router.cluster.stop()


# --- one that says it ---


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_is_stopping_gets_no_new_request_and_its_own_go_on(make: Make, role: str) -> None:
    router = await make(2, 2)
    stopping, lasting = router.prefills if role == "prefill" else router.decodes
    first = router.ask()
    room = (await stopping.next_request()).room
    await router.says_it_stops(stopping)
    second = router.ask()
    other = (await lasting.next_request()).room
    await router.answer(room)
    await router.answer(other)
    assert await soon(first) == [ending(room)]
    assert await soon(second) == [ending(other)]
    assert stopping.rooms.submitted.empty()
    await router.dispatcher.close()
    assert all(engine.rooms.aborted.empty() for engine in router.cluster.servers)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_where_all_are_stopping_the_router_is_not_ready_and_says_of_whom(make: Make, role: str) -> None:
    router = await make(1, 1)
    (stopping,) = router.prefills if role == "prefill" else router.decodes
    await router.says_it_stops(stopping)
    assert not router.dispatcher.is_ready
    shown = describe(router.dispatcher, router.cluster.policy).workers
    assert [worker.control_address for worker in shown if worker.stopping] == [stopping.address.target]
    said = f"{role} {stopping.address.target}: it is stopping and takes no new request"
    assert router.dispatcher.not_ready_reason() == said
    with pytest.raises(NoWorkers, match=f"no usable pair: {said}"):
        await soon(router.ask())
    assert all(engine.rooms.submitted.empty() for engine in router.cluster.servers)


async def test_the_router_hears_of_it_at_once_and_tells_its_own_clients(make: Make) -> None:
    router = await make(1, 1)
    router.cluster.changed.clear()
    await router.says_it_stops(router.decodes[0])
    assert router.cluster.changed.is_set(), "whoever keeps health true is woken"


@pytest.mark.parametrize("announced", [True, False])
async def test_the_end_of_a_worker_is_a_warning_unless_it_has_said_it(
    make: Make, announced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    router = await make(1, 1)
    (decode,) = router.decodes
    worker = router.worker_of(decode)
    if announced:
        await router.says_it_stops(decode)
    await decode.stop()
    await until(lambda: not worker.is_live)
    before = worker.why_not
    await until(lambda: worker.why_not != before)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([said for said in warnings if decode.address.target in said]) == (0 if announced else 2)
    await decode.start()


async def test_a_worker_that_is_stopping_is_not_probed(make: Make) -> None:
    router = await make(1, 1)
    (decode,) = router.decodes
    (route,) = router.cluster.policy.routes
    await router.says_it_stops(decode)
    route.note_probe(route.lives or (), "an earlier one has failed")
    assert not route.needs_probe
    await decode.stop()
    await until(lambda: not router.worker_of(decode).is_live)
    await decode.start()
    await until_live(router.worker_of(decode), router.cluster.changed)
    assert route.needs_probe, "it has come back as another process"


# --- one that refuses, or is gone, when it is asked ---


async def break_off(engine: EngineServer, worker: Worker) -> None:
    await engine.stop()


async def lose(engine: EngineServer, worker: Worker) -> None:
    worker._lost(PeerLost("its stream has just broken"))


async def refuse(engine: EngineServer, worker: Worker) -> None:
    engine.rooms.refusal = REFUSAL


async def not_answer(engine: EngineServer, worker: Worker) -> None:
    """As a server that has said goodbye to its connections, and whose calls have not ended."""
    raise PeerLost(f"{worker} takes no more calls")


def before_submit(worker: Worker, happening: Callable[[], Awaitable[object]]) -> None:
    """It happens when the router has chosen this worker and before the request reaches it."""
    submit = worker.submit

    async def submitted(request: GenerationRequest, parent: Context) -> None:
        await happening()
        await submit(request, parent)

    worker.submit = submitted  # type: ignore[method-assign]


ENDS = {
    "it refuses": refuse,
    "its connection breaks": break_off,
    "its stream has broken": lose,
    "it takes no more calls": not_answer,
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_request_that_was_not_taken_in_goes_to_others_in_a_new_room(make: Make, role: str, end: Any) -> None:
    router = await make(2, 2)
    engines, partners = (router.prefills, router.decodes) if role == "prefill" else (router.decodes, router.prefills)
    worker = router.worker_of(engines[0])
    before_submit(worker, lambda: end(engines[0], worker))
    answer = router.ask()
    given_up = await partners[0].next_request()
    taken = await engines[1].next_request()
    assert (await partners[0].next_request()).room == taken.room != given_up.room
    assert 0 < taken.timeout_s <= given_up.timeout_s
    assert (await partners[0].next_abort())[0] == given_up.room
    for engine in router.decodes:
        engine.publish(piece(taken.room, 1))
        engine.publish(ending(taken.room))
    assert await soon(answer) == [piece(taken.room, 1), ending(taken.room)]
    assert not router.is_any_doubted
    if end is break_off:
        await engines[0].start()


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
async def test_a_client_that_has_chosen_its_room_is_told(make: Make, end: Any) -> None:
    router = await make(1, 2)
    first, second = router.decodes
    worker = router.worker_of(first)
    before_submit(worker, lambda: end(first, worker))
    with pytest.raises((ShuttingDown, PeerLost, NoWorkers)):
        await soon(router.ask(replace(REQUEST, room=ROOM)))
    assert second.rooms.submitted.empty()
    if end is break_off:
        await first.start()


async def test_where_there_is_no_other_the_refusal_is_the_answer_and_no_reason_to_doubt(make: Make) -> None:
    router = await make(1, 1)
    router.decodes[0].rooms.refusal = REFUSAL
    with pytest.raises(ShuttingDown, match="takes no new request"):
        await soon(router.ask())
    assert not router.is_any_doubted


async def test_each_worker_is_asked_once(make: Make) -> None:
    router = await make(2, 3)
    for engine in router.decodes:
        engine.rooms.refusal = REFUSAL
    with pytest.raises(ShuttingDown):
        await soon(router.ask())
    assert sum(engine.rooms.submitted.qsize() for engine in router.prefills) == 3


async def test_an_abort_in_between_ends_the_request(make: Make) -> None:
    router = await make(1, 2)
    first, second = router.decodes
    first.rooms.refusal = REFUSAL
    before_submit(router.worker_of(first), lambda: router.dispatcher.abort_rid("mine", "stop it"))
    with pytest.raises(PdError):
        await soon(router.ask())
    assert second.rooms.submitted.empty()


# --- one whose time to drain is over ---


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_request_that_waited_there_to_the_end_goes_to_others(make: Make, role: str) -> None:
    router = await make(2, 2)
    stopping, lasting = router.prefills if role == "prefill" else router.decodes
    answer = router.ask()
    room = (await stopping.next_request()).room
    await until(lambda: router.decodes[0].rooms.transfers.find(room) is not None)
    await router.says_it_stops(stopping)
    # Decode may be the first that tells of the end of a prefill.
    router.decodes[0].publish(Output(room, error=ShuttingDown("this process is stopping")))
    again = await lasting.next_request()
    assert again.room != room
    assert 0 < again.timeout_s < REQUEST.timeout_s
    await router.answer(again.room)
    assert await soon(answer) == [ending(again.room)]


async def test_whoever_has_a_part_of_the_answer_gets_no_other(make: Make) -> None:
    router = await make(1, 2)
    first, second = router.decodes
    answer = router.ask()
    room = (await first.next_request()).room
    await router.says_it_stops(first)
    first.publish(piece(room, 1))
    first.publish(Output(room, error=ShuttingDown("this process is stopping")))
    with pytest.raises(ShuttingDown):
        await soon(answer)
    assert second.rooms.submitted.empty()


@pytest.mark.parametrize("error", [ShuttingDown("of nobody that is known"), PeerLost("gone"), DigestMismatch("other")])
async def test_what_ends_a_room_that_was_taken_in_is_the_answer_otherwise(make: Make, error: PdError) -> None:
    router = await make(1, 2)
    first, second = router.decodes
    answer = router.ask()
    first.publish(Output((await first.next_request()).room, error=error))
    with pytest.raises(type(error)):
        await soon(answer)
    assert second.rooms.submitted.empty()


# --- text ---


async def test_text_goes_to_another_worker_when_the_first_is_gone(make: Make) -> None:
    router = await make(1, 2)
    first = router.decodes[0]
    worker = router.worker_of(first)

    async def gone(*_: object) -> tuple[int, ...]:
        raise PeerLost(f"{worker} is gone")

    worker.tokenize_text = worker.tokenize_chat = gone  # type: ignore[method-assign, assignment]
    assert await router.dispatcher.tokenize_text("ab") == (97, 98)
    assert await router.dispatcher.tokenize_chat([ChatMessage("user", "a")]) == tuple(map(ord, "user:a;"))
    for other in router.cluster.workers:
        other.tokenize_text = gone  # type: ignore[method-assign, assignment]
    with pytest.raises(PeerLost, match="is gone"):
        await router.dispatcher.tokenize_text("ab")


async def test_text_goes_to_a_worker_that_lasts(make: Make) -> None:
    router = await make(1, 2)
    asked: list[Worker] = []
    for worker in router.cluster.decodes:
        tokenize = worker.tokenize_text

        async def noted(text: str, worker: Worker = worker, tokenize: Any = tokenize) -> tuple[int, ...]:
            asked.append(worker)
            ids: tuple[int, ...] = await tokenize(text)
            return ids

        worker.tokenize_text = noted  # type: ignore[method-assign]
    await router.says_it_stops(router.decodes[0])
    assert await router.dispatcher.tokenize_text("ab") == (97, 98)
    assert asked == [router.cluster.decodes[1]]
    await router.says_it_stops(router.decodes[1])
    assert await router.dispatcher.model() == MODEL, "better than nobody"


# --- what an engine says and does ---


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_says_at_once_that_it_is_stopping(monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    monkeypatch.setattr(beats, "BEAT_S", 60.0)
    async with running(Pair()) as pair:
        node = pair.at_prefill if role == "prefill" else pair.at_decode
        loads: list[Load] = []
        stream = GenerationClient(node.connection).stream_outputs("another router", loads.append)
        await soon(anext(stream))
        assert not loads[-1].stopping
        await node.life.service.close(0.0)
        await soon(anext(stream))
        assert loads[-1].stopping
        await stream.aclose()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_whoever_waits_in_an_engine_that_is_stopping_keeps_the_place(role: str) -> None:
    """The pool holds one room: the second waits until the first has ended, and is served then."""
    async with running(Pair(prefill_pages=6, decode_pages=6)) as pair:
        node = pair.at_prefill if role == "prefill" else pair.at_decode
        gate = pair.faults.hold = Gate()
        requests = [pair.request(number, prompt_tokens=14) for number in (1, 2)]
        await pair.submit(requests[0])
        await soon(gate.reached.wait())
        await pair.submit(requests[1])
        await until(lambda: node.life.service.load().queued == 1)
        closing = asyncio.create_task(node.life.service.close(30.0))
        await until(lambda: node.life.service.load().stopping)
        with pytest.raises(ShuttingDown):
            await node.client.submit(pair.request(3))
        pair.faults.hold = None
        gate.set()
        for request in requests:
            await pair.assert_answered(request)
        await soon(closing)
