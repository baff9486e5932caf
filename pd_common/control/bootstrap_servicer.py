"""Bootstrap: the directory of a prefill service's ranks. Messages in, calls of the Registry, messages out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

from pd.v1 import bootstrap_pb2, bootstrap_pb2_grpc

from pd_common.control import convert
from pd_common.control.registry import MAX_QUERY_ROOMS, Registry
from pd_common.control.rooms import Call
from pd_common.errors import InvalidRequest


class BootstrapServicer(bootstrap_pb2_grpc.BootstrapServicer):
    """Serves a Registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._change = asyncio.Event()

    async def RegisterRank(
        self, request: bootstrap_pb2.RegisterRankRequest, context: Call
    ) -> bootstrap_pb2.RegisterRankResponse:
        self._registry.register(convert.rank_from(request.rank), time.monotonic())
        self._announce()
        return bootstrap_pb2.RegisterRankResponse(lease=convert.duration_to(self._registry.lease_s))

    async def RenewLease(
        self, request: bootstrap_pb2.RenewLeaseRequest, context: Call
    ) -> bootstrap_pb2.RenewLeaseResponse:
        self._registry.renew(convert.instance_from(request.instance, "instance"), time.monotonic())
        return bootstrap_pb2.RenewLeaseResponse(lease=convert.duration_to(self._registry.lease_s))

    async def UnregisterRank(
        self, request: bootstrap_pb2.UnregisterRankRequest, context: Call
    ) -> bootstrap_pb2.UnregisterRankResponse:
        self._registry.unregister(convert.instance_from(request.instance, "instance"))
        self._announce()
        return bootstrap_pb2.UnregisterRankResponse()

    async def GetTopology(
        self, request: bootstrap_pb2.GetTopologyRequest, context: Call
    ) -> bootstrap_pb2.GetTopologyResponse:
        topology = self._registry.complete_topology(time.monotonic())
        return bootstrap_pb2.GetTopologyResponse(
            ranks=[convert.rank_to(rank) for rank in topology.ranks], epoch=topology.epoch
        )

    async def WatchTopology(
        self, request: bootstrap_pb2.WatchTopologyRequest, context: Call
    ) -> AsyncIterator[bootstrap_pb2.WatchTopologyResponse]:
        """A watcher that is slow to read sees what is there when it reads, not all that has been."""
        shown_epoch, is_shown = 0, False
        while True:
            topology = self._registry.topology(time.monotonic())
            if topology.epoch != shown_epoch and (topology.ranks or is_shown):
                yield bootstrap_pb2.WatchTopologyResponse(
                    ranks=[convert.rank_to(rank) for rank in topology.ranks], epoch=topology.epoch
                )
                shown_epoch, is_shown = topology.epoch, bool(topology.ranks)
            else:
                await self._next_change()

    async def RegisterDpRank(
        self, request: bootstrap_pb2.RegisterDpRankRequest, context: Call
    ) -> bootstrap_pb2.RegisterDpRankResponse:
        room = convert.room_from(request.bootstrap_room)
        self._registry.register_dp_rank(room, request.dp_rank, time.monotonic())
        return bootstrap_pb2.RegisterDpRankResponse()

    async def QueryDpRanks(
        self, request: bootstrap_pb2.QueryDpRanksRequest, context: Call
    ) -> bootstrap_pb2.QueryDpRanksResponse:
        if len(request.bootstrap_rooms) > MAX_QUERY_ROOMS:
            raise InvalidRequest(
                f"{len(request.bootstrap_rooms)} rooms are more than {MAX_QUERY_ROOMS}", field="bootstrap_rooms"
            )
        rooms = [convert.room_from(room) for room in request.bootstrap_rooms]
        found = self._registry.query_dp_ranks(rooms, time.monotonic())
        return bootstrap_pb2.QueryDpRanksResponse(dp_ranks={int(room): rank for room, rank in found.items()})

    def _announce(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _next_change(self) -> None:
        """Returns when something is announced, or when a lease ends, of which nobody tells."""
        ends_at = self._registry.next_end()
        with suppress(TimeoutError):
            await asyncio.wait_for(
                self._change.wait(), None if ends_at is None else max(0.0, ends_at - time.monotonic())
            )
