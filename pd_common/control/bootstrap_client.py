"""Bootstrap, as ranks, decode and those who look on use it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from pd.v1 import (
    bootstrap_pb2,
    bootstrap_pb2_grpc,
)

from pd_common.control import convert
from pd_common.control.connection import ATTEMPT_S, Connection
from pd_common.types import BootstrapRoom, Instance, RankInfo, Topology


class BootstrapClient:
    """Bootstrap, as ranks, decode and those who look on use it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stub: Any = bootstrap_pb2_grpc.BootstrapStub(connection.channel)

    async def register_rank(self, rank: RankInfo) -> float:
        """Gives the lease in seconds."""
        request = bootstrap_pb2.RegisterRankRequest(rank=convert.rank_to(rank))
        response = await self._connection.call(self._stub.RegisterRank, request)
        return convert.duration_from(response.lease)

    async def renew_lease(self, instance: Instance) -> float:
        """Gives the lease in seconds."""
        request = bootstrap_pb2.RenewLeaseRequest(instance=convert.instance_to(instance))
        response = await self._connection.call(self._stub.RenewLease, request)
        return convert.duration_from(response.lease)

    async def unregister_rank(self, instance: Instance) -> None:
        request = bootstrap_pb2.UnregisterRankRequest(instance=convert.instance_to(instance))
        await self._connection.call(self._stub.UnregisterRank, request)

    async def get_topology(self) -> Topology:
        request = bootstrap_pb2.GetTopologyRequest()
        response = await self._connection.call(self._stub.GetTopology, request, timeout=ATTEMPT_S)
        return _topology_from(response)

    async def watch_topology(self) -> AsyncGenerator[Topology, None]:
        """What is there when it is complete, then every change; without ranks when it is not complete any more."""
        request = bootstrap_pb2.WatchTopologyRequest()
        async with aclosing(self._connection.stream(self._stub.WatchTopology, request)) as responses:
            async for response in responses:
                yield _topology_from(response)

    async def register_dp_rank(self, room: BootstrapRoom, dp_rank: int) -> None:
        request = bootstrap_pb2.RegisterDpRankRequest(bootstrap_room=room, dp_rank=dp_rank)
        await self._connection.call(self._stub.RegisterDpRank, request)

    async def query_dp_ranks(self, rooms: Sequence[BootstrapRoom]) -> dict[BootstrapRoom, int]:
        """The rooms that are known."""
        request = bootstrap_pb2.QueryDpRanksRequest(bootstrap_rooms=rooms)
        response = await self._connection.call(self._stub.QueryDpRanks, request)
        return {BootstrapRoom(room): dp_rank for room, dp_rank in response.dp_ranks.items()}


def _topology_from(message: bootstrap_pb2.GetTopologyResponse | bootstrap_pb2.WatchTopologyResponse) -> Topology:
    return Topology(tuple(convert.rank_from(rank) for rank in message.ranks), message.epoch)
