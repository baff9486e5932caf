"""Several prefill ranks behind one Bootstrap directory, and one decode: everything real but the data plane."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from pd_common.control import server
from pd_common.control.bootstrap_client import BootstrapClient
from pd_common.control.bootstrap_servicer import BootstrapServicer
from pd_common.control.connection import Connection, dial_plain
from pd_common.control.registry import Registry
from pd_common.errors import DeadlineExceeded, LayoutMismatch, PdError, RoomAborted
from pd_common.generation import FinishReason, GenerationRequest, SamplingParams
from pd_common.transport.loopback import LoopbackNetwork
from pd_common.types import BootstrapAddress, BootstrapRoom, DataPlane, Instance, RankInfo, RankPosition, Role
from services.decode.directory import Directory
from services.prefill.membership import Membership
from tests.control.serving import LAYOUT, serving
from tests.services.byte_engine import answer_tokens
from tests.services.lives import DecodeLife, PrefillLife
from tests.services.pair import Node, soon, until
from tests.services.tap import PassOn, lost

RANKS = 2
ROOMS = range(1, 9)


class Rank(Node):
    """A prefill that registers in the directory of `host`, or hosts it."""

    def __init__(self, life: PrefillLife, dp_rank: int, host: Rank | None) -> None:
        super().__init__(life)
        self._position, self._host = RankPosition(dp_rank, RANKS), host
        self._directories: list[Connection] = []
        self._stays: list[asyncio.Task[None]] = []

    async def _begin(self) -> None:
        life = self.life
        assert isinstance(life, PrefillLife)
        plane = DataPlane(life.transport.info.backend, "1", "127.0.0.1")
        own = self.address.target
        rank = RankInfo(life.instance, Role.PREFILL, self._position, own, life.engine.layout, plane)
        membership = Membership(rank, self._connect)
        life.service.announce_with(membership.announced)
        self._stays.append(asyncio.create_task(membership.stay(await soon(membership.join()))))
        self._works += [asyncio.create_task(work) for work in life.works()]

    def _connect(self) -> Connection:
        self._directories.append(directory := Connection((self._host or self).address.target))
        return directory

    async def stop(self) -> None:
        for stay in self._stays:
            stay.cancel()
        await asyncio.gather(*self._stays, return_exceptions=True)
        for directory in self._directories:
            await directory.close()
        await super().stop()


def new_directory(lease_s: float) -> BootstrapServicer:
    return BootstrapServicer(Registry(Role.PREFILL, 10**6, lease_s=lease_s))


class Service:
    """Two prefill ranks of which the first hosts the directory, and a decode."""

    def __init__(self, lease_s: float = 60.0) -> None:
        self._network = LoopbackNetwork()
        self.decode = DecodeLife(self._network, 64, 16, 60.0)
        self.at_decode = Node(self.decode)
        host = self.new_prefill()
        host.servicers["bootstrap"] = new_directory(lease_s)
        first = Rank(host, 0, None)
        self.ranks = [first, *(Rank(self.new_prefill(), dp_rank, first) for dp_rank in range(1, RANKS))]
        self.nodes: list[Node] = [*self.ranks, self.at_decode]

    def new_prefill(self) -> PrefillLife:
        return PrefillLife(self._network, 64, 16, 8, 60.0)

    @property
    def bootstrap(self) -> BootstrapAddress:
        return self.ranks[0].address

    def request(self, room: int, timeout_s: float = 30.0) -> GenerationRequest:
        return GenerationRequest(
            rid=f"r{room}",
            room=BootstrapRoom(room),
            bootstrap=self.bootstrap,
            prompt=tuple(100 * room + place for place in range(10)),
            sampling=SamplingParams(max_new_tokens=4, temperature=0.0),
            timeout_s=timeout_s,
        )

    async def assert_answered(self, room: int, by: Rank) -> None:
        outputs = await self.at_decode.client.outputs(room)
        tokens = tuple(token for output in outputs for token in output.token_ids)
        assert (tokens, outputs[-1].error) == (answer_tokens(10, 4), None)
        assert [output.finish for output in await by.client.outputs(room)] == [FinishReason.HANDED_OFF]

    async def serve(self, room: int, by: Rank) -> None:
        await by.client.submit(self.request(room))
        await self.at_decode.client.submit(self.request(room))
        await self.assert_answered(room, by)


@asynccontextmanager
async def running(service: Service) -> AsyncIterator[Service]:
    """Stops it in the end, and asserts that nothing is left."""
    for node in service.nodes:
        await node.start()
    try:
        yield service
        await until(lambda: all(node.life.service.pool_status().live_rooms == 0 for node in service.nodes))
        for node in service.nodes:
            await soon(asyncio.gather(*node.life.service._tasks))
            node.life.assert_untouched()
    finally:
        for node in reversed(service.nodes):
            await node.stop()


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with running(Service()) as service:
        yield service


async def until_announced(directory: BootstrapClient, room: int) -> None:
    async def look() -> None:
        while not await directory.query_dp_ranks([BootstrapRoom(room)]):
            pass

    await soon(look())


class Questions:
    """A rule for QueryDpRanks: the rooms of each question, as they come."""

    def __init__(self) -> None:
        self.rooms: list[set[int]] = []

    async def __call__(self, request: Any, pass_on: PassOn) -> Any:
        self.rooms.append(set(request.bootstrap_rooms))
        return await pass_on()


def rank_of(service: Service, room: int) -> Rank:
    """Not the rank that follows from the room's number."""
    return service.ranks[(room + 1) % RANKS]


async def test_rooms_reach_the_rank_that_has_them_whatever_their_number(service: Service) -> None:
    for room in ROOMS:
        await rank_of(service, room).client.submit(service.request(room))
        await service.at_decode.client.submit(service.request(room))
    for room in ROOMS:
        await service.assert_answered(room, rank_of(service, room))


async def test_all_rooms_that_wait_are_asked_for_at_once(service: Service) -> None:
    questions = service.ranks[0].tap.rules["QueryDpRanks"] = Questions()
    for room in ROOMS:
        await service.at_decode.client.submit(service.request(room))
    await until(lambda: set(ROOMS) in questions.rooms)
    for room in ROOMS:
        await rank_of(service, room).client.submit(service.request(room))
    for room in ROOMS:
        await service.assert_answered(room, rank_of(service, room))
    questions.rooms.clear()
    await service.serve(9, by=service.ranks[1])
    assert all(rooms == {9} for rooms in questions.rooms)


@pytest.mark.parametrize("message", ["RegisterDpRank", "QueryDpRanks", "GetTopology"])
async def test_a_message_to_the_directory_that_is_lost_costs_no_room_but_the_one_that_asks_who_is_there(
    service: Service, message: str
) -> None:
    service.ranks[0].tap.rules[message] = lost()
    await service.ranks[1].client.submit(service.request(1))
    await service.at_decode.client.submit(service.request(1))
    if message == "GetTopology":
        assert isinstance(await service.at_decode.client.failure(1), PdError)
        await service.ranks[1].client.abort(1)
    else:
        await service.assert_answered(1, service.ranks[1])
    await service.serve(2, by=service.ranks[1])


async def test_a_room_that_no_rank_announces_ends_with_its_deadline(service: Service) -> None:
    await service.at_decode.client.submit(service.request(1, timeout_s=0.3))
    assert isinstance(await service.at_decode.client.failure(1), DeadlineExceeded)
    (rooms,) = service.decode.prefills._directory._rooms.values()
    await until(lambda: rooms._asking is None)
    await service.serve(2, by=service.ranks[1])


async def test_a_room_that_is_aborted_while_it_is_looked_for_is_not_asked_for_any_more(service: Service) -> None:
    questions = service.ranks[0].tap.rules["QueryDpRanks"] = Questions()
    for room in (1, 2):
        await service.at_decode.client.submit(service.request(room))
    await until(lambda: {1, 2} in questions.rooms)
    await service.at_decode.client.abort(1)
    assert isinstance(await service.at_decode.client.failure(1), RoomAborted | PdError)
    await until(lambda: {2} in questions.rooms)
    await service.ranks[0].client.submit(service.request(2))
    await service.assert_answered(2, service.ranks[0])


async def test_a_rank_that_restarts_leaves_the_others_alone(service: Service) -> None:
    for room, rank in enumerate(service.ranks, start=1):
        await service.serve(room, by=rank)
    first, second = service.ranks
    assert isinstance(first.life, PrefillLife)
    paired = service.decode.prefills._paired[first.life.instance]
    before = await second.replace(service.new_prefill())
    await second.renew_client()
    await service.serve(3, by=second)
    await service.serve(4, by=first)
    assert service.decode.prefills.is_current(paired)
    assert before.instance not in service.decode.prefills._paired
    await before.service.close(0.0)
    await before.close()


async def test_a_rank_that_restarts_before_decode_has_ever_met_it_costs_no_room(service: Service) -> None:
    """Decode knows its earlier life from the topology that it asked for when it met the first rank."""
    first, second = service.ranks
    await service.serve(1, by=first)
    before = await second.replace(service.new_prefill())
    await second.renew_client()
    await service.serve(2, by=second)
    await before.service.close(0.0)
    await before.close()


async def test_rooms_that_wait_survive_a_restart_of_the_directory() -> None:
    """Every rank registers again, and says again which rooms it has."""
    async with running(Service(lease_s=1.0)) as service:
        directory, second = BootstrapClient(service.ranks[0].connection), service.ranks[1]
        await second.client.submit(service.request(1))
        await until_announced(directory, 1)
        service.ranks[0]._taps["bootstrap"].servicer = new_directory(lease_s=60.0)
        await soon(anext(directory.watch_topology()))
        await service.at_decode.client.submit(service.request(1))
        await service.assert_answered(1, second)


@pytest.mark.parametrize(
    ("changes", "field", "theirs"),
    [
        ({"data_plane": DataPlane("nixl", "1", "127.0.0.1")}, "transfer_backend", "nixl"),
        ({"position": RankPosition(tp_size=1, pp_size=2, pp_rank=1)}, "position", "tp 1 x pp 2"),
    ],
    ids=["another library", "a pipeline"],
)
async def test_a_rank_that_this_decode_cannot_work_with_is_refused_by_the_field(
    changes: dict[str, Any], field: str, theirs: str
) -> None:
    registry = Registry(Role.PREFILL, 1)
    async with serving(server.bootstrap(BootstrapServicer(registry))) as connection:
        plane = DataPlane("loopback", "1", "127.0.0.1")
        rank = RankInfo(Instance("p", 1), Role.PREFILL, RankPosition(), "127.0.0.1:1", LAYOUT, plane)
        unusable = replace(rank, **changes)
        for pp_rank in range(unusable.position.pp_size):
            position = replace(unusable.position, pp_rank=pp_rank)
            each = replace(
                unusable, instance=Instance(f"p{pp_rank}", 1), position=position, control_address=f"h:{pp_rank + 1}"
            )
            registry.register(each, time.monotonic())
        directory = Directory("loopback", dial_plain)
        host, _, port = connection.address.rpartition(":")
        with pytest.raises(LayoutMismatch) as raised:
            await soon(directory.find(BootstrapAddress(host, int(port)), BootstrapRoom(1)))
        assert (raised.value.metadata["field"], raised.value.metadata["theirs"]) == (field, theirs)
        await directory.close()
