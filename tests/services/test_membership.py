from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from pd.v1 import bootstrap_pb2, bootstrap_pb2_grpc

from pd_common.control import bootstrap_servicer, server
from pd_common.control.bootstrap_client import BootstrapClient
from pd_common.control.bootstrap_servicer import BootstrapServicer
from pd_common.control.connection import Connection
from pd_common.control.registry import Registry
from pd_common.control.server import ControlServer
from pd_common.errors import CapacityExceeded, InvalidRequest, LayoutMismatch, StaleInstance, TopologyIncomplete
from pd_common.types import BootstrapRoom, Instance, RankInfo, RankPosition, Role, Topology
from services.prefill import membership
from services.prefill.membership import Membership
from tests.control.serving import DATA_PLANE, LAYOUT, LOOPBACK
from tests.services.pair import soon, until
from tests.services.tap import PassOn, Tap, lost

ROOM, OTHER = BootstrapRoom(1), BootstrapRoom(2)
LONG_LEASE_S = 3600.0
SHORT_LEASE_S = 0.03
"""Renewed every few milliseconds; the clock of the directory stands still in these tests unless they move it."""

FIRST = RankInfo(Instance("a", 1), Role.PREFILL, RankPosition(0, 2), "a:8998", LAYOUT, DATA_PLANE)
SECOND = replace(FIRST, instance=Instance("b", 1), position=RankPosition(1, 2), control_address="b:8998")
ALONE = replace(FIRST, position=RankPosition())


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of the directory: leases end only when a test lets time pass."""
    clock = Clock()
    monkeypatch.setattr(bootstrap_servicer, "time", clock)
    return clock


class DirectoryServer:
    """A directory that can be stopped, and started again at its address, where it knows nothing."""

    def __init__(self) -> None:
        self.tap = Tap()
        self.port = 0
        self.starts = 0
        self._connections: list[Connection] = []

    async def start(self, lease_s: float = LONG_LEASE_S) -> None:
        self.starts += 1
        registry = Registry(Role.PREFILL, self.starts * 1000, lease_s=lease_s)
        tapped: Any = self.tap.on(BootstrapServicer(registry))
        self._control = ControlServer([server.bootstrap(tapped)])
        self.port = await self._control.start(LOOPBACK, self.port)

    async def stop(self) -> None:
        await self._control.stop(grace_s=0.0)

    def connect(self) -> Connection:
        self._connections.append(connection := Connection(f"{LOOPBACK}:{self.port}"))
        return connection

    def client(self) -> BootstrapClient:
        return BootstrapClient(self.connect())

    def member(self, rank: RankInfo) -> Membership:
        return Membership(rank, self.connect)

    async def complete(self) -> tuple[RankInfo, ...]:
        """The ranks, once they are all there."""
        topology: Topology = await soon(anext(self.client().watch_topology()))
        return topology.ranks

    async def close(self) -> None:
        for connection in self._connections:
            await connection.close()
        await self.stop()


@pytest.fixture
async def directory() -> AsyncIterator[DirectoryServer]:
    directory = DirectoryServer()
    await directory.start()
    yield directory
    await directory.close()


@asynccontextmanager
async def staying(*members: Membership) -> AsyncIterator[list[asyncio.Task[None]]]:
    """They have joined, and keep their leases."""
    leases = [await soon(member.join()) for member in members]
    stays = [asyncio.create_task(member.stay(lease_s)) for member, lease_s in zip(members, leases, strict=True)]
    try:
        yield stays
    finally:
        for stay in stays:
            stay.cancel()
        await asyncio.gather(*stays, return_exceptions=True)


async def test_a_rank_that_comes_before_its_directory_waits_for_it(directory: DirectoryServer) -> None:
    await directory.stop()
    joining = asyncio.create_task(directory.member(ALONE).join())
    await until(lambda: len(directory._connections) == 3)  # each attempt has the certificates of its time
    await directory.start()
    assert await soon(joining) == LONG_LEASE_S
    assert await directory.complete() == (ALONE,)


async def test_the_topology_is_unavailable_until_the_last_rank_has_come(directory: DirectoryServer) -> None:
    stub: Any = bootstrap_pb2_grpc.BootstrapStub(directory.connect().channel)
    await directory.member(SECOND).join()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.GetTopology(bootstrap_pb2.GetTopologyRequest())
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(TopologyIncomplete, match="1 of 2"):
        await directory.client().get_topology()
    await directory.member(FIRST).join()
    assert (await directory.client().get_topology()).ranks == (FIRST, SECOND)


async def test_a_lease_is_renewed_before_it_ends(
    directory: DirectoryServer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory's time passes while the rank sleeps, and only then."""

    async def sleep(seconds: float) -> None:
        clock.now += seconds
        await asyncio.sleep(0)

    monkeypatch.setattr(membership, "asyncio", SimpleNamespace(sleep=sleep))
    async with staying(directory.member(ALONE)):
        joined = await directory.client().get_topology()
        await until(lambda: directory.tap.passed.count("RenewLease") >= 20)
        assert clock.now > 2 * LONG_LEASE_S
        assert await directory.client().get_topology() == joined


@pytest.mark.parametrize("message", ["RegisterRank", "RenewLease"])
async def test_a_message_that_is_lost_is_sent_again(directory: DirectoryServer, message: str) -> None:
    await directory.stop()
    await directory.start(SHORT_LEASE_S)
    directory.tap.rules[message] = lost()
    async with staying(directory.member(ALONE)):
        await until(lambda: directory.tap.passed.count("RenewLease") > 2)
        assert await directory.complete() == (ALONE,)


async def test_a_directory_that_has_too_much_to_do_is_asked_again(directory: DirectoryServer) -> None:
    await directory.stop()
    await directory.start(SHORT_LEASE_S)
    refused = 0

    async def busy_once(_: Any, pass_on: PassOn) -> Any:
        nonlocal refused
        refused += 1
        if refused == 1:
            raise CapacityExceeded("too many calls")
        return await pass_on()

    directory.tap.rules["RenewLease"] = busy_once
    async with staying(directory.member(ALONE)):
        await until(lambda: refused > 2)


async def test_ranks_register_again_with_a_directory_that_has_restarted(directory: DirectoryServer) -> None:
    await directory.stop()
    await directory.start(SHORT_LEASE_S)
    async with staying(directory.member(FIRST), directory.member(SECOND)):
        before = await directory.client().get_topology()
        await directory.stop()
        await directory.start(SHORT_LEASE_S)
        assert await directory.complete() == (FIRST, SECOND)
        assert (await directory.client().get_topology()).epoch > before.epoch


async def test_a_lease_that_has_ended_is_taken_again(directory: DirectoryServer, clock: Clock) -> None:
    await directory.stop()
    await directory.start(SHORT_LEASE_S)
    async with staying(directory.member(ALONE)):
        clock.now += 10.0
        assert await directory.complete() == (ALONE,)


async def test_a_rank_that_restarts_at_its_address_replaces_its_earlier_life_and_nobody_else(
    directory: DirectoryServer,
) -> None:
    await directory.stop()
    await directory.start(SHORT_LEASE_S)
    restarted = replace(SECOND, instance=Instance("b again", 2))
    async with staying(directory.member(FIRST), directory.member(SECOND)) as (first_stays, second_stays):
        before = await directory.client().get_topology()
        async with staying(directory.member(restarted)) as (restarted_stays,):
            after = await directory.client().get_topology()
            assert after.ranks == (FIRST, restarted)
            assert after.epoch > before.epoch
            with pytest.raises(StaleInstance):
                await soon(second_stays)
            renewed = directory.tap.passed.count("RenewLease") + 10
            await until(lambda: directory.tap.passed.count("RenewLease") > renewed)
            assert not first_stays.done()
            assert not restarted_stays.done()
            assert await directory.client().get_topology() == after


async def test_a_refusal_for_good_is_not_tried_again(directory: DirectoryServer) -> None:
    await directory.member(FIRST).join()
    other_layout = replace(SECOND, layout=replace(LAYOUT, page_size=64))
    for rank, refusal in (
        (other_layout, LayoutMismatch),
        (replace(SECOND, role=Role.DECODE), InvalidRequest),
        (replace(FIRST, instance=Instance("a at the same time", 1)), StaleInstance),
    ):
        with pytest.raises(refusal):
            await soon(directory.member(rank).join())


async def test_who_leaves_is_gone_and_a_directory_that_is_gone_needs_no_telling(directory: DirectoryServer) -> None:
    member = directory.member(ALONE)
    await member.join()
    await member.leave()
    with pytest.raises(TopologyIncomplete):
        await directory.client().get_topology()
    await directory.stop()
    await soon(member.leave())
    await directory.start()


async def test_a_room_is_announced_while_it_waits(directory: DirectoryServer) -> None:
    """Also to a directory that has restarted meanwhile."""
    member, client = directory.member(SECOND), directory.client()
    await member.join()
    directory.tap.rules["RegisterDpRank"] = lost()
    async with member.announced(ROOM):
        assert await client.query_dp_ranks([ROOM, OTHER]) == {ROOM: 1}
        async with member.announced(OTHER):
            pass
        await directory.stop()
        await directory.start()
        await soon(member.join())
        assert await client.query_dp_ranks([ROOM, OTHER]) == {ROOM: 1}


async def test_a_rank_that_is_alone_announces_nothing(directory: DirectoryServer) -> None:
    member = directory.member(ALONE)
    await member.join()
    async with member.announced(ROOM):
        assert "RegisterDpRank" not in directory.tap.passed
