from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pd_common.control.clients import Connection, dial_plain
from pd_common.control.server import ControlServer
from pd_common.errors import CapacityExceeded, InvalidRequest, NoWorkers, TransferFailed
from pd_common.generation import ClientRequest, SamplingParams
from pd_common.types import BootstrapAddress, BootstrapRoom, Role
from services.router.dispatch import Dispatcher
from services.router.policy import LeastRooms
from services.router.probe import Prober
from services.router.worker import Worker
from tests.control.fake_rooms import MODEL
from tests.control.serving import LOOPBACK
from tests.services.engine_server import Cluster, EngineServer, ending, piece, soon

ROOM = BootstrapRoom(1)
REQUEST = ClientRequest(prompt=(1, 2, 3), sampling=SamplingParams(max_new_tokens=4))


class Router:
    """A cluster behind a dispatcher, with the prober and the health that a client of the router sees."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.policy = LeastRooms(cluster.prefills, cluster.decodes)
        self.dispatcher = Dispatcher(self.policy)
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


Make = Callable[[int, int], Awaitable[Router]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[Router] = []

    async def make(prefills: int, decodes: int) -> Router:
        cluster = Cluster(prefills, decodes)
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


# --- LeastRooms ---


async def test_the_worker_with_the_fewest_rooms_is_picked_and_the_first_among_equals(make: Make) -> None:
    router = await make(2, 2)
    cluster, policy = router.cluster, router.policy
    cluster.prove_all()
    assert policy.pick(None).prefill is cluster.prefills[0]
    cluster.prefills[0].open(ROOM, lambda _: None)
    pair = policy.pick(None)
    assert (pair.prefill, pair.decode) == (cluster.prefills[1], cluster.decodes[0])
    cluster.prefills[0].close(ROOM)
    assert policy.pick(None).prefill is cluster.prefills[0]


async def test_a_worker_that_is_not_proven_is_not_picked(make: Make) -> None:
    router = await make(2, 1)
    cluster, policy = router.cluster, router.policy
    cluster.prefills[1].proven = cluster.decodes[0].proven = True
    assert policy.pick(None).prefill is cluster.prefills[1]
    with pytest.raises(NoWorkers, match=f"no usable prefill: {cluster.prefills[0].address.target}: not proven yet"):
        policy.pick(cluster.prefills[0].address)
    cluster.decodes[0].proven = False
    with pytest.raises(NoWorkers, match="no usable decode"):
        policy.pick(None)


async def test_a_prefill_can_be_asked_for_by_its_address(make: Make) -> None:
    router = await make(2, 1)
    router.cluster.prove_all()
    wanted = router.cluster.prefills[1]
    assert router.policy.pick(wanted.address).prefill is wanted
    with pytest.raises(InvalidRequest) as raised:
        router.policy.pick(BootstrapAddress("elsewhere", 1))
    assert raised.value.metadata == {"field": "bootstrap_host"}


# --- nobody there ---


async def test_without_workers_the_error_says_what_is_the_matter_with_each() -> None:
    changed = asyncio.Event()
    prefill = Worker(Role.PREFILL, BootstrapAddress("p", 1), changed, dial_plain)
    decode = Worker(Role.DECODE, BootstrapAddress("d", 2), changed, dial_plain)
    dispatcher = Dispatcher(LeastRooms([prefill], [decode]))
    assert not dispatcher.is_ready
    assert dispatcher.not_ready_reason() == "p:1: not connected yet; d:2: not connected yet"
    with pytest.raises(NoWorkers, match="no usable prefill: p:1: not connected yet") as raised:
        await anext(dispatcher.generate(REQUEST))
    assert raised.value.metadata == {"role": "prefill"}
    calls: list[Any] = [dispatcher.model(), dispatcher.tokenize_text("a")]
    for call in calls:
        with pytest.raises(NoWorkers, match="d:2: not connected yet"):
            await call
    for worker in (prefill, decode):
        await worker.stop()


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


async def test_every_worker_is_proven(make: Make) -> None:
    router = await make(2, 3)
    answer_all(*router.cluster.decode_servers)
    router.probe()
    assert await router.next_health() is True
    await soon(_all_usable(router))


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
    decode.publish(replace(ending(probe.room), finish=None, usage=None, error=TransferFailed("no route to memory")))
    second = await decode.next_request()
    assert second.room != probe.room
    assert "no route to memory" in router.dispatcher.not_ready_reason()
    decode.publish(ending(second.room))
    assert await router.next_health() is True
    assert router.dispatcher.not_ready_reason() == ""


async def test_a_worker_that_came_back_is_not_described_by_its_old_trouble(make: Make) -> None:
    router = await make(1, 1)
    (decode,) = router.cluster.decode_servers
    await decode.stop()
    await decode.start()
    router.probe()
    await decode.next_request()
    target = decode.address.target
    assert f"{target}: not proven yet" in router.dispatcher.not_ready_reason()


async def test_one_broken_worker_does_not_keep_the_others_from_being_proven(make: Make) -> None:
    router = await make(2, 2)
    broken_prefill, broken_decode = router.cluster.prefill_servers[0], router.cluster.decode_servers[0]
    for broken in (broken_prefill, broken_decode):
        broken.rooms.refusal = CapacityExceeded("always full")
    answer_all(router.cluster.decode_servers[1])
    router.probe()
    assert await router.next_health() is True
    assert router.cluster.prefills[1].is_usable
    assert router.cluster.decodes[1].is_usable
    assert not router.cluster.prefills[0].is_usable
    assert not router.cluster.decodes[0].is_usable


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


async def _all_usable(router: Router) -> None:
    while not all(worker.is_usable for worker in router.cluster.workers):  # noqa: ASYNC110  nothing tells of it
        await asyncio.sleep(0)


async def _all_of(router: Router, request: ClientRequest) -> list[object]:
    return [output async for output in router.dispatcher.generate(request)]
