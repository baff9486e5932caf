from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pd.v1 import generation_pb2

from pd_common.control import beats, server
from pd_common.control.connection import Connection, dial_plain
from pd_common.control.generation_servicer import EngineGenerationServicer
from pd_common.control.outputs import OutputHub
from pd_common.control.rooms import Call
from pd_common.control.server import ControlServer
from pd_common.errors import (
    CapacityExceeded,
    InvalidRequest,
    LayoutMismatch,
    NoWorkers,
    PdError,
    PeerLost,
    TopologyIncomplete,
    TransferFailed,
)
from pd_common.generation import ClientRequest, Output, SamplingParams
from pd_common.telemetry.tracing import Tracing
from pd_common.types import BootstrapAddress, BootstrapRoom, Role
from services.router import probe as probes
from services.router import worker as workers
from services.router.dispatch import Dispatcher
from services.router.policy import LeastLoaded
from services.router.probe import Prober
from services.router.route import Route
from services.router.worker import Worker
from tests.control.fake_rooms import IDLE, MODEL, FakeModel, FakeRooms
from tests.control.serving import LOOPBACK, serving
from tests.services.engine_server import Cluster, EngineServer, ending, piece, prove, soon, until_live, until_lost
from tests.services.pair import until

ROOM = BootstrapRoom(1)
REQUEST = ClientRequest(prompt=(1, 2, 3), sampling=SamplingParams(max_new_tokens=4))


class Router:
    """A cluster behind a dispatcher, with the prober and the health that a client of the router sees."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.policy = cluster.policy
        self.dispatcher = Dispatcher(self.policy, Tracing())
        self.control = ControlServer([])

    async def start(self) -> None:
        self.connection = Connection(f"{LOOPBACK}:{await self.control.start(LOOPBACK, 0)}")
        stub: Any = health_pb2_grpc.HealthStub(self.connection.channel)
        self._watch = stub.Watch(health_pb2.HealthCheckRequest(service=""))
        assert await self.next_health() is False
        self._probing: asyncio.Task[None] | None = None

    def probe(self) -> None:
        """Lets the prober run."""
        prober = Prober(self.dispatcher, self.policy, self.cluster.changed, self.control)
        self._probing = asyncio.create_task(prober.run())

    async def next_health(self) -> bool:
        """What health changes to."""
        status = (await soon(self._watch.read())).status
        return bool(status == health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> None:
        if self._probing is not None:
            assert not self._probing.done()
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        await self.dispatcher.close()
        self._watch.cancel()
        await self.connection.close()
        await self.control.stop(grace_s=0.0)


Make = Callable[..., Awaitable[Router]]


def picked(policy: LeastLoaded, bootstrap: BootstrapAddress | None = None) -> Route:
    return policy.choose(replace(REQUEST, bootstrap=bootstrap)).routes[0]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[Router] = []

    async def make(prefills: int, decodes: int, min_prompt_tokens: int = 0) -> Router:
        cluster = Cluster(prefills, decodes, min_prompt_tokens)
        await cluster.start()
        router = Router(cluster)
        await router.start()
        made.append(router)
        return router

    yield make
    for router in made:
        await router.stop()
        await router.cluster.stop()


def answer_all(*engines: EngineServer) -> None:
    for engine in engines:
        engine.answer_all(piece(ROOM, 1), ending(ROOM, 2))


# --- which pair is picked ---


async def test_the_worker_with_the_fewest_rooms_is_picked_and_the_first_among_equals(make: Make) -> None:
    router = await make(2, 2)
    cluster, policy = router.cluster, router.policy
    cluster.prove_all()
    assert picked(policy).prefill is cluster.prefills[0]
    cluster.prefills[0].open(ROOM, lambda _: None)
    pair = picked(policy)
    assert (pair.prefill, pair.decode) == (cluster.prefills[1], cluster.decodes[0])
    cluster.decodes[0].open(ROOM, lambda _: None)
    pair = picked(policy)
    assert (pair.prefill, pair.decode) == (cluster.prefills[1], cluster.decodes[1])
    cluster.prefills[0].close(ROOM)
    cluster.decodes[0].close(ROOM)
    assert picked(policy).prefill is cluster.prefills[0]


async def test_only_a_pair_that_is_proven_is_picked_however_few_rooms_others_have(make: Make) -> None:
    router = await make(2, 2)
    cluster, policy = router.cluster, router.policy
    unproven, proven, *_ = policy.routes
    with pytest.raises(NoWorkers, match="no usable pair"):
        picked(policy)
    prove(proven)
    for worker in proven.workers:
        worker.open(ROOM, lambda _: None)
    assert picked(policy) is proven
    other = cluster.prefills[1].address
    with pytest.raises(NoWorkers, match=f"no usable pair: {other.target} with .*: not proven yet"):
        picked(policy, other)
    assert str(unproven) in router.dispatcher.not_ready_reason()
    assert str(proven) not in router.dispatcher.not_ready_reason()


async def test_what_was_shown_for_one_life_does_not_hold_for_the_next(make: Make) -> None:
    router = await make(1, 1)
    (pair,), (decode,) = router.policy.routes, router.cluster.decode_servers
    before = pair.lives
    assert before is not None
    await decode.stop()
    await until_lost(pair.decode, router.cluster.changed)
    assert not pair.needs_probe, "nobody is there to be probed"
    await decode.start()
    await until_live(pair.decode, router.cluster.changed)
    pair.note_probe(before, None)  # a probe that ends late
    assert not pair.is_proven
    assert pair.needs_probe


async def test_a_prefill_can_be_asked_for_by_its_address(make: Make) -> None:
    router = await make(2, 1)
    router.cluster.prove_all()
    wanted = router.cluster.prefills[1]
    assert picked(router.policy, wanted.address).prefill is wanted
    with pytest.raises(InvalidRequest) as raised:
        picked(router.policy, BootstrapAddress("elsewhere", 1))
    assert raised.value.metadata == {"field": "bootstrap_host"}


# --- nobody there ---


async def test_without_workers_the_error_says_what_is_the_matter_with_each() -> None:
    changed = asyncio.Event()
    prefill = Worker(Role.PREFILL, BootstrapAddress("p", 1), changed, dial_plain)
    decode = Worker(Role.DECODE, BootstrapAddress("d", 2), changed, dial_plain)
    dispatcher = Dispatcher(LeastLoaded([prefill], [decode]), Tracing())
    assert not dispatcher.is_ready
    assert dispatcher.not_ready_reason() == "prefill p:1: not connected yet; decode d:2: not connected yet"
    with pytest.raises(
        NoWorkers, match="no usable pair: prefill p:1: not connected yet; decode d:2: not connected yet"
    ):
        await anext(dispatcher.generate(REQUEST))
    calls: list[Any] = [dispatcher.model(), dispatcher.tokenize_text("a")]
    for call in calls:
        with pytest.raises(NoWorkers, match="d:2: not connected yet"):
            await call
    for worker in (prefill, decode):
        await worker.stop()


async def test_a_request_goes_elsewhere_where_a_rank_beside_its_prefill_is_missing(make: Make) -> None:
    router = await make(2, 1)
    router.cluster.prove_all()
    (decode,), lacking = router.cluster.decode_servers, picked(router.policy)
    answer = asyncio.create_task(_all_of(router, REQUEST))
    first = await decode.next_request()
    decode.publish(failed(first.room, TopologyIncomplete("1 of 2 ranks have registered")))
    second = await decode.next_request()
    assert (second.room, second.bootstrap) != (first.room, first.bootstrap)
    decode.publish(ending(second.room))
    assert await soon(answer) == [ending(second.room)]
    assert lacking.is_doubted
    assert picked(router.policy) is not lacking


# --- Prober ---


async def test_the_router_is_ready_only_when_a_real_room_has_gone_through(make: Make) -> None:
    router = await make(1, 1)
    (prefill,), (decode,) = router.cluster.prefill_servers, router.cluster.decode_servers
    router.probe()
    probe = await decode.next_request()
    assert (await prefill.next_request()) == probe
    assert len(probe.prompt) == MODEL.page_size + 1
    assert max(probe.prompt) < MODEL.vocab_size
    assert not router.dispatcher.is_ready
    decode.publish(piece(probe.room, 1))
    decode.publish(ending(probe.room, 2))
    assert await router.next_health() is True
    assert router.dispatcher.is_ready


async def test_every_pair_is_proven_by_a_room_of_its_own(make: Make) -> None:
    router = await make(2, 3)
    answer_all(*router.cluster.decode_servers)
    router.probe()
    assert await router.next_health() is True
    await soon(_all_proven(router.policy.routes))
    assert [prefill.rooms.submitted.qsize() for prefill in router.cluster.prefill_servers] == [3, 3]


async def test_a_router_without_prefills_is_ready_when_a_decode_alone_has_served_a_probe(make: Make) -> None:
    router = await make(0, 1)
    (decode,) = router.cluster.decode_servers
    router.probe()
    probe = await decode.next_request()
    assert probe.bootstrap is None
    assert not router.dispatcher.is_ready
    assert router.dispatcher.not_ready_reason() == f"{decode.address.target} alone: not proven yet"
    with pytest.raises(NoWorkers, match=r"no usable decode: .* alone: not proven yet"):
        picked(router.policy)
    decode.publish(ending(probe.room))
    assert await router.next_health() is True


async def test_a_decode_is_probed_alone_only_where_prompts_may_go_to_it(make: Make) -> None:
    every = await make(1, 1)
    assert [route.prefill is None for route in every.policy.routes] == [False]
    router = await make(1, 1, 64)
    (prefill,), (decode,) = router.cluster.prefill_servers, router.cluster.decode_servers
    router.probe()
    probes = [await decode.next_request() for _ in range(2)]
    assert {probe.bootstrap for probe in probes} == {None, prefill.address}
    (through_both,) = [probe for probe in probes if probe.bootstrap is not None]
    decode.publish(ending(through_both.room))
    assert await router.next_health() is True, "what takes every prompt is proven"
    assert picked(router.policy).prefill is not None, "until a decode is proven alone"
    (alone,) = [probe for probe in probes if probe.bootstrap is None]
    decode.publish(ending(alone.room))
    await soon(_all_proven(router.policy.routes))
    assert picked(router.policy).prefill is None


async def test_a_probe_does_not_wait_behind_clients(make: Make) -> None:
    router = await make(1, 1)
    router.probe()
    assert (await router.cluster.decode_servers[0].next_request()).priority == 2**31 - 1


async def test_no_more_than_eight_pairs_are_probed_at_a_time_and_all_get_their_turn(make: Make) -> None:
    router = await make(3, 4)
    decodes = router.cluster.decode_servers
    router.probe()
    asked = [await soon(_any_request(decodes)) for _ in range(8)]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(_any_request(decodes), 0.1)
    for decode, room in asked:
        decode.publish(ending(room))
    for decode, room in [await soon(_any_request(decodes)) for _ in range(4)]:
        decode.publish(ending(room))
    await soon(_all_proven(router.policy.routes))


async def test_losing_the_last_worker_of_a_role_is_not_ready_until_it_is_proven_again(make: Make) -> None:
    router = await make(1, 1)
    (decode,) = router.cluster.decode_servers
    answer_all(decode)
    router.probe()
    assert await router.next_health() is True
    await decode.stop()
    assert await router.next_health() is False
    assert not router.dispatcher.is_ready
    await decode.start()
    probe = await decode.next_request()
    assert not router.dispatcher.is_ready
    decode.publish(ending(probe.room))
    assert await router.next_health() is True


async def test_a_probe_that_fails_says_why_and_is_tried_again(make: Make) -> None:
    router = await make(1, 1)
    (decode,) = router.cluster.decode_servers
    router.probe()
    probe = await decode.next_request()
    decode.publish(failed(probe.room, TransferFailed("no route to memory")))
    second = await decode.next_request()
    assert second.room != probe.room
    assert "no route to memory" in router.dispatcher.not_ready_reason()
    decode.publish(ending(second.room))
    assert await router.next_health() is True
    assert router.dispatcher.not_ready_reason() == ""


async def test_a_pair_that_does_not_fit_together_is_left_alone_until_something_changes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_FIRST_AGAIN_S", 0.0)
    monkeypatch.setattr(probes, "_LAST_AGAIN_S", 0.0)
    router = await make(1, 1)
    (decode,) = router.cluster.decode_servers
    router.probe()
    unlike = LayoutMismatch("page_size differs")
    decode.publish(failed((await decode.next_request()).room, unlike))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(_any_request([decode]), 0.1)
    router.cluster.changed.set()
    decode.publish(failed((await decode.next_request()).room, unlike))
    monkeypatch.setattr(probes, "_UNLIKE_AGAIN_S", 0.0)
    router.cluster.changed.set()
    decode.publish(failed((await decode.next_request()).room, unlike))
    await decode.next_request()  # nothing has changed, and time has passed


async def test_a_worker_that_came_back_is_not_described_by_its_old_trouble(make: Make) -> None:
    router = await make(1, 1)
    (decode,) = router.cluster.decode_servers
    await decode.stop()
    await decode.start()
    router.probe()
    await decode.next_request()
    (pair,) = router.policy.routes
    assert router.dispatcher.not_ready_reason() == f"{pair}: not proven yet"


async def test_one_broken_worker_does_not_keep_the_others_from_being_proven(make: Make) -> None:
    router = await make(2, 2)
    broken_prefill, broken_decode = router.cluster.prefill_servers[0], router.cluster.decode_servers[0]
    for broken in (broken_prefill, broken_decode):
        broken.rooms.refusal = CapacityExceeded("always full")
    answer_all(router.cluster.decode_servers[1])
    router.probe()
    assert await router.next_health() is True
    *broken_pairs, whole = router.policy.routes
    assert whole.is_proven
    assert not any(pair.is_proven for pair in broken_pairs)
    assert picked(router.policy) is whole
    reason = router.dispatcher.not_ready_reason()
    await soon(_all_said(router, [f"{pair}: the probe failed: always full" for pair in broken_pairs]))
    assert str(whole) not in reason


async def test_one_pair_that_hangs_does_not_keep_others_from_being_tried_again(make: Make) -> None:
    router = await make(1, 2)
    silent, failing = router.cluster.decode_servers
    router.probe()
    await silent.next_request()
    for _ in range(2):
        probe = await failing.next_request()
        failing.publish(failed(probe.room, TransferFailed("no route to memory")))
    failing.publish(ending((await failing.next_request()).room))
    assert await router.next_health() is True


async def test_a_pair_through_which_a_room_has_failed_is_probed_again_before_it_is_used(make: Make) -> None:
    router = await make(1, 2)
    first, second = router.cluster.decode_servers
    router.probe()
    for decode in (first, second):
        decode.publish(ending((await decode.next_request()).room))
    await soon(_all_proven(router.policy.routes))
    request = asyncio.create_task(_all_of(router, REQUEST))
    room = (await first.next_request()).room
    first.publish(failed(room, TransferFailed("no route to memory")))
    with pytest.raises(TransferFailed, match="no route to memory"):
        await soon(request)
    assert picked(router.policy).decode.address == second.address
    first.publish(ending((await first.next_request()).room))
    await soon(_all_proven(router.policy.routes))
    assert picked(router.policy).decode.address == first.address


async def test_the_only_pair_is_used_while_in_doubt_and_not_when_its_probe_has_failed(make: Make) -> None:
    router = await make(1, 1)
    router.cluster.prove_all()
    (pair,) = router.policy.routes
    (decode,) = router.cluster.decode_servers
    request = asyncio.create_task(_all_of(router, REQUEST))
    decode.publish(failed((await decode.next_request()).room, TransferFailed("a write failed")))
    with pytest.raises(TransferFailed):
        await soon(request)
    assert not pair.is_proven
    assert picked(router.policy) is pair
    assert router.dispatcher.is_ready
    router.probe()
    decode.publish(failed((await decode.next_request()).room, TransferFailed("no route to memory")))
    await soon(_all_said(router, ["no route to memory"]))
    assert not router.dispatcher.is_ready
    with pytest.raises(NoWorkers, match="no route to memory"):
        picked(router.policy)


async def test_a_probe_that_fails_in_the_same_way_again_is_logged_once(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = quick_probes(monkeypatch)
    router = await make(1, 1)
    (decode,) = router.cluster.decode_servers
    router.probe()
    for reason in ("first", "first", "first", "second"):
        decode.publish(failed((await decode.next_request()).room, TransferFailed(reason)))
    await decode.next_request()
    said = [record.getMessage() for record in caplog.records if record.name == probes.__name__]
    assert [message.rpartition(": ")[2] for message in said] == ["first", "second"]
    assert waits == [0.5, 1.0, 2.0, 2.0]


async def test_a_room_that_fails_by_its_own_fault_is_no_reason_to_doubt_the_pair(make: Make) -> None:
    router = await make(1, 1)
    router.cluster.prove_all()
    (decode,) = router.cluster.decode_servers
    request = asyncio.create_task(_all_of(router, REQUEST))
    decode.publish(failed((await decode.next_request()).room, CapacityExceeded("too long")))
    with pytest.raises(CapacityExceeded):
        await soon(request)
    assert router.dispatcher.is_ready


async def test_a_request_may_use_the_pair_that_was_proven_while_another_is_probed(make: Make) -> None:
    router = await make(1, 2)
    first, second = router.cluster.decode_servers
    router.probe()
    probe = await first.next_request()
    first.publish(ending(probe.room))
    assert await router.next_health() is True
    await second.next_request()
    request = asyncio.create_task(_all_of(router, REQUEST))
    room = (await first.next_request()).room
    first.publish(ending(room))
    assert await soon(request) == [ending(room)]


# --- workers that say nothing ---


@pytest.fixture
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beats, "BEAT_S", 0.02)


async def test_a_worker_that_cannot_be_reached_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_RECONNECT_S", 0.0)
    dials = asyncio.Semaphore(0)

    def dial(address: str, role: Role) -> Connection:
        dials.release()
        return dial_plain(address, role)

    with socket.socket() as bound:  # and nobody listens
        bound.bind((LOOPBACK, 0))
        address = BootstrapAddress(LOOPBACK, bound.getsockname()[1])
        unreachable = Worker(Role.PREFILL, address, asyncio.Event(), dial)
        running = asyncio.create_task(unreachable.run())
        for _ in range(4):
            await soon(dials.acquire())
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await unreachable.stop()
    assert [record.levelname for record in caplog.records if record.name == workers.__name__] == ["WARNING"]
    assert f"prefill {address.target} cannot be reached, trying again: failed to connect" in caplog.text


@pytest.mark.usefixtures("quick_beats")
async def test_a_worker_that_has_nothing_to_say_is_live_as_long_as_it_beats(make: Make) -> None:
    router = await make(1, 1)
    lives = router.policy.routes[0].lives
    await asyncio.sleep(3 * beats.patience_s())
    assert router.policy.routes[0].lives == lives


@pytest.mark.usefixtures("quick_beats")
async def test_a_worker_says_how_much_it_has_to_do_as_long_as_it_lives(make: Make) -> None:
    router = await make(1, 1)
    (worker,), (decode,) = router.cluster.decodes, router.cluster.decode_servers
    assert worker.load == IDLE
    decode.rooms.to_do = replace(IDLE, queued=3)
    await until(lambda: worker.load is not None and worker.load.queued == 3)
    await decode.stop()
    await until_lost(worker, router.cluster.changed)
    assert worker.load is None


class Mute(EngineGenerationServicer):
    """The subscription stands, and that is the last word; no call breaks."""

    async def StreamOutputs(  # noqa: N802  as gRPC names it
        self,
        request: generation_pb2.StreamOutputsRequest,  # noqa: ARG002
        context: Call,  # noqa: ARG002
    ) -> AsyncIterator[generation_pb2.StreamOutputsResponse]:
        yield generation_pb2.StreamOutputsResponse()
        await asyncio.Event().wait()


@pytest.mark.usefixtures("quick_beats")
async def test_a_worker_that_beats_no_more_is_lost_with_its_rooms() -> None:
    hub, changed = OutputHub(), asyncio.Event()
    async with serving(server.generation(Mute(FakeRooms(hub), hub, FakeModel()))) as connection:
        host, port = connection.address.split(":")
        worker = Worker(Role.DECODE, BootstrapAddress(host, int(port)), changed, dial_plain)
        running = asyncio.create_task(worker.run())
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        worker.open(ROOM, outputs.put_nowait)
        await until_live(worker, changed)
        error = (await soon(outputs.get())).error
        assert isinstance(error, PeerLost)
        assert "no beat for 0.1 s" in error.message
        assert not worker.is_live
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await worker.stop()


def quick_probes(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Probes are tried again at once; gives the waits that were left out."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(probes, "asyncio", SimpleNamespace(sleep=sleep, Semaphore=asyncio.Semaphore))
    return waits


def failed(room: BootstrapRoom, error: PdError) -> Output:
    return Output(room, error=error)


async def _any_request(servers: Sequence[EngineServer]) -> tuple[EngineServer, BootstrapRoom]:
    while True:
        for engine in servers:
            if not engine.rooms.submitted.empty():
                return engine, engine.rooms.submitted.get_nowait()[0].room
        await asyncio.sleep(0.001)


async def _all_proven(routes: Sequence[Route]) -> None:
    while not all(route.is_proven for route in routes):  # noqa: ASYNC110  nothing tells of it
        await asyncio.sleep(0)


async def _all_said(router: Router, texts: Sequence[str]) -> None:
    while not all(text in router.dispatcher.not_ready_reason() for text in texts):  # noqa: ASYNC110  as above
        await asyncio.sleep(0)


async def _all_of(router: Router, request: ClientRequest) -> list[object]:
    return [output async for output in router.dispatcher.generate(request)]
