from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from pd.v1 import bootstrap_pb2, bootstrap_pb2_grpc, types_pb2

from pd_common.control import bootstrap_servicer, convert, server
from pd_common.control.bootstrap_client import BootstrapClient
from pd_common.control.bootstrap_servicer import BootstrapServicer
from pd_common.control.connection import Connection
from pd_common.control.registry import MAX_QUERY_ROOMS, Registry
from pd_common.errors import InvalidRequest, LayoutMismatch, StaleInstance, TopologyIncomplete
from pd_common.types import BootstrapRoom, Instance, RankInfo, RankPosition, Role
from tests.control.serving import DATA_PLANE, LAYOUT, serving, typed

LEASE_S = 3600.0
FIRST_EPOCH = 1_000

ALONE = RankInfo(Instance("a", 1), Role.PREFILL, RankPosition(), "a:8998", LAYOUT, DATA_PLANE)
RESTARTED = replace(ALONE, instance=Instance("a2", 2))
FIRST = replace(ALONE, position=RankPosition(tp_rank=0, tp_size=2))
SECOND = replace(
    FIRST, instance=Instance("b", 1), position=RankPosition(tp_rank=1, tp_size=2), control_address="b:8998"
)


def new_registry(lease_s: float = LEASE_S) -> Registry:
    return Registry(Role.PREFILL, FIRST_EPOCH, lease_s=lease_s)


@pytest.fixture
async def connection() -> AsyncIterator[Connection]:
    async with serving(server.bootstrap(BootstrapServicer(new_registry()))) as connection:
        yield connection


@pytest.fixture
async def client(connection: Connection) -> BootstrapClient:
    return BootstrapClient(connection)


@pytest.fixture
async def stub(connection: Connection) -> Any:
    return bootstrap_pb2_grpc.BootstrapStub(connection.channel)


async def soon(awaitable: Any) -> Any:
    """Its result; a test that would wait for ever fails instead."""
    return await asyncio.wait_for(awaitable, 10)


def ranks_of(message: bootstrap_pb2.WatchTopologyResponse) -> tuple[RankInfo, ...]:
    return tuple(convert.rank_from(rank) for rank in message.ranks)


async def test_ranks_find_each_other(client: BootstrapClient) -> None:
    with pytest.raises(TopologyIncomplete, match="0 of 1"):
        await client.get_topology()
    assert await client.register_rank(SECOND) == LEASE_S
    with pytest.raises(TopologyIncomplete, match="1 of 2"):
        await client.get_topology()
    await client.register_rank(FIRST)
    assert (await client.get_topology()).ranks == (FIRST, SECOND)
    assert await client.renew_lease(FIRST.instance) == LEASE_S
    await client.unregister_rank(FIRST.instance)
    with pytest.raises(TopologyIncomplete):
        await client.get_topology()
    await client.unregister_rank(FIRST.instance)


async def test_refusals_arrive_typed(client: BootstrapClient, stub: Any) -> None:
    with pytest.raises(StaleInstance):
        await client.renew_lease(ALONE.instance)
    await client.register_rank(RESTARTED)
    with pytest.raises(StaleInstance):
        await client.register_rank(ALONE)
    with pytest.raises(LayoutMismatch):
        await client.register_rank(SECOND)
    with pytest.raises(InvalidRequest):
        await client.register_rank(replace(ALONE, position=RankPosition(dp_rank=2)))
    with pytest.raises(InvalidRequest):
        await client.unregister_rank(Instance("", 1))
    assert (await client.get_topology()).ranks == (RESTARTED,)


async def test_watchers_see_the_topology_and_every_change(client: BootstrapClient) -> None:
    early = client.watch_topology()
    first = asyncio.create_task(anext(early))
    await client.register_rank(FIRST)
    await client.register_rank(SECOND)
    late = client.watch_topology()
    seen = [await soon(first)]
    assert seen == [await soon(anext(late))] == [await client.get_topology()]
    assert seen[0].ranks == (FIRST, SECOND)
    restarted = replace(SECOND, instance=Instance("b2", 2))
    for change, ranks in (
        (client.register_rank(restarted), (FIRST, restarted)),
        (client.unregister_rank(FIRST.instance), ()),
        (client.register_rank(FIRST), (FIRST, restarted)),
    ):
        await change
        seen.append(await soon(anext(early)))
        assert seen[-1] == await soon(anext(late))
        assert seen[-1].ranks == ranks
    epochs = [topology.epoch for topology in seen]
    assert epochs == sorted(set(epochs))
    assert epochs[0] > FIRST_EPOCH
    await early.aclose()
    await late.aclose()


async def test_a_watcher_sees_the_end_of_a_lease_although_nobody_says_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(bootstrap_servicer, "time", clock)
    async with serving(server.bootstrap(BootstrapServicer(new_registry(lease_s=0.02)))) as connection:
        await BootstrapClient(connection).register_rank(ALONE)
        stub: Any = bootstrap_pb2_grpc.BootstrapStub(connection.channel)
        watch = stub.WatchTopology(bootstrap_pb2.WatchTopologyRequest())
        assert ranks_of(await watch.read()) == (ALONE,)
        clock.now = 1.0
        assert ranks_of(await asyncio.wait_for(watch.read(), 10)) == ()
        watch.cancel()


async def test_a_slow_watcher_sees_what_is_there_and_not_what_has_been() -> None:
    servicer = BootstrapServicer(new_registry())
    context: Any = None  # not looked at
    register = bootstrap_pb2.RegisterRankRequest
    await servicer.RegisterRank(register(rank=convert.rank_to(ALONE)), context)
    watch: Any = servicer.WatchTopology(bootstrap_pb2.WatchTopologyRequest(), context)
    assert ranks_of(await anext(watch)) == (ALONE,)
    lives = [replace(ALONE, instance=Instance(f"a{epoch}", epoch)) for epoch in (2, 3, 4)]
    for life in lives:  # while the watcher is being told
        await servicer.RegisterRank(register(rank=convert.rank_to(life)), context)
    assert ranks_of(await soon(anext(watch))) == (lives[-1],)
    next_one = asyncio.create_task(anext(watch))
    await servicer.RegisterRank(register(rank=convert.rank_to(lives[-1])), context)  # nothing new
    await servicer.UnregisterRank(
        bootstrap_pb2.UnregisterRankRequest(instance=convert.instance_to(lives[-1].instance)), context
    )
    assert ranks_of(await soon(next_one)) == ()
    await watch.aclose()


async def test_data_parallel_ranks_are_asked_for_by_room(client: BootstrapClient) -> None:
    first, unknown, last = BootstrapRoom(1), BootstrapRoom(2), BootstrapRoom(2**64 - 1)
    with pytest.raises(TopologyIncomplete):
        await client.register_dp_rank(first, 0)
    await client.register_rank(replace(ALONE, position=RankPosition(dp_rank=0, dp_size=4)))
    for room, dp_rank in ((first, 0), (last, 3)):
        await client.register_dp_rank(room, dp_rank)
    assert await client.query_dp_ranks([first, unknown, last]) == {first: 0, last: 3}
    assert await client.query_dp_ranks([]) == {}
    with pytest.raises(InvalidRequest, match="dp_rank 4"):
        await client.register_dp_rank(first, 4)
    with pytest.raises(InvalidRequest, match="bootstrap_room"):
        await client.register_dp_rank(BootstrapRoom(0), 1)
    with pytest.raises(InvalidRequest, match="bootstrap_room"):
        await client.query_dp_ranks([first, BootstrapRoom(0)])


async def test_one_question_names_so_many_rooms_and_no_more(client: BootstrapClient) -> None:
    rooms = [BootstrapRoom(number) for number in range(1, MAX_QUERY_ROOMS + 2)]
    assert await client.query_dp_ranks(rooms[1:]) == {}
    with pytest.raises(InvalidRequest) as raised:
        await client.query_dp_ranks(rooms)
    assert raised.value.metadata == {"field": "bootstrap_rooms"}


async def test_a_missing_instance_is_refused_by_its_field(connection: Connection, stub: Any) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await typed(connection, stub.RenewLease(bootstrap_pb2.RenewLeaseRequest(instance=types_pb2.Instance(epoch=3))))
    assert raised.value.metadata == {"field": "instance"}
