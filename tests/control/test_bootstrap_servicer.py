from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from pd.v1 import bootstrap_pb2, bootstrap_pb2_grpc, types_pb2

from pd_common.control import bootstrap_servicer, convert, server
from pd_common.control.bootstrap_servicer import BootstrapServicer
from pd_common.control.clients import BootstrapClient, Connection
from pd_common.control.registry import Registry
from pd_common.errors import InvalidRequest, LayoutMismatch, StaleInstance, TopologyIncomplete
from pd_common.types import Instance, RankInfo, RankPosition, Role
from tests.control.serving import DATA_PLANE, LAYOUT, serving, typed

LEASE_S = 3600.0

ALONE = RankInfo(Instance("a", 1), Role.PREFILL, RankPosition(), "a:8998", LAYOUT, DATA_PLANE)
RESTARTED = replace(ALONE, instance=Instance("a2", 2))
FIRST = replace(ALONE, position=RankPosition(tp_rank=0, tp_size=2))
SECOND = replace(FIRST, instance=Instance("b", 1), position=RankPosition(tp_rank=1, tp_size=2))


@pytest.fixture
async def connection() -> AsyncIterator[Connection]:
    async with serving(server.bootstrap(BootstrapServicer(Registry(LEASE_S)))) as connection:
        yield connection


@pytest.fixture
async def client(connection: Connection) -> BootstrapClient:
    return BootstrapClient(connection)


@pytest.fixture
async def stub(connection: Connection) -> Any:
    return bootstrap_pb2_grpc.BootstrapStub(connection.channel)


def ranks_of(message: bootstrap_pb2.WatchTopologyResponse) -> tuple[RankInfo, ...]:
    return tuple(convert.rank_from(rank) for rank in message.ranks)


async def test_ranks_find_each_other(client: BootstrapClient) -> None:
    with pytest.raises(TopologyIncomplete, match="0 of 1"):
        await client.get_topology()
    assert await client.register_rank(SECOND) == LEASE_S
    with pytest.raises(TopologyIncomplete, match="1 of 2"):
        await client.get_topology()
    await client.register_rank(FIRST)
    assert await client.get_topology() == (FIRST, SECOND)
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
    assert await client.get_topology() == (RESTARTED,)


async def test_a_watcher_sees_the_topology_and_every_change(client: BootstrapClient, stub: Any) -> None:
    early = stub.WatchTopology(bootstrap_pb2.WatchTopologyRequest())
    await client.register_rank(FIRST)
    await client.register_rank(SECOND)
    assert ranks_of(await early.read()) == (FIRST, SECOND)
    late = stub.WatchTopology(bootstrap_pb2.WatchTopologyRequest())
    assert ranks_of(await late.read()) == (FIRST, SECOND)
    await client.unregister_rank(SECOND.instance)
    for watch in (early, late):
        assert ranks_of(await watch.read()) == ()
    restarted = replace(SECOND, instance=Instance("b2", 2))
    await client.register_rank(restarted)
    for watch in (early, late):
        assert ranks_of(await watch.read()) == (FIRST, restarted)
        watch.cancel()


async def test_a_watcher_sees_the_end_of_a_lease_although_nobody_says_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(bootstrap_servicer, "time", clock)
    async with serving(server.bootstrap(BootstrapServicer(Registry(lease_s=0.02)))) as connection:
        await BootstrapClient(connection).register_rank(ALONE)
        stub: Any = bootstrap_pb2_grpc.BootstrapStub(connection.channel)
        watch = stub.WatchTopology(bootstrap_pb2.WatchTopologyRequest())
        assert ranks_of(await watch.read()) == (ALONE,)
        clock.now = 1.0
        assert ranks_of(await asyncio.wait_for(watch.read(), 10)) == ()
        watch.cancel()


async def test_a_change_that_comes_while_a_watcher_is_being_told_is_not_missed() -> None:
    servicer = BootstrapServicer(Registry(LEASE_S))
    context: Any = None  # not looked at
    register = bootstrap_pb2.RegisterRankRequest
    await servicer.RegisterRank(register(rank=convert.rank_to(ALONE)), context)
    watch = servicer.WatchTopology(bootstrap_pb2.WatchTopologyRequest(), context)
    assert ranks_of(await anext(watch)) == (ALONE,)
    await servicer.RegisterRank(register(rank=convert.rank_to(RESTARTED)), context)
    assert ranks_of(await asyncio.wait_for(anext(watch), 1)) == (RESTARTED,)


async def test_data_parallel_ranks_are_asked_for_by_room(connection: Connection, stub: Any) -> None:
    for room, dp_rank in ((1, 0), (2**64 - 1, 3)):
        await stub.RegisterDpRank(bootstrap_pb2.RegisterDpRankRequest(bootstrap_room=room, dp_rank=dp_rank))
    answer = await stub.QueryDpRanks(bootstrap_pb2.QueryDpRanksRequest(bootstrap_rooms=[1, 2, 2**64 - 1]))
    assert dict(answer.dp_ranks) == {1: 0, 2**64 - 1: 3}
    with pytest.raises(InvalidRequest, match="bootstrap_room"):
        await typed(connection, stub.RegisterDpRank(bootstrap_pb2.RegisterDpRankRequest(dp_rank=1)))
    with pytest.raises(InvalidRequest, match="bootstrap_room"):
        await typed(connection, stub.QueryDpRanks(bootstrap_pb2.QueryDpRanksRequest(bootstrap_rooms=[1, 0])))


async def test_a_missing_instance_is_refused_by_its_field(connection: Connection, stub: Any) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await typed(connection, stub.RenewLease(bootstrap_pb2.RenewLeaseRequest(instance=types_pb2.Instance(epoch=3))))
    assert raised.value.metadata == {"field": "instance"}
