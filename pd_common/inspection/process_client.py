"""What one process is asked by whoever looks on: Inspection, TransferStatus, Bootstrap and Abort, as messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pd.v1 import (
    abort_pb2,
    abort_pb2_grpc,
    bootstrap_pb2,
    bootstrap_pb2_grpc,
    inspection_pb2,
    inspection_pb2_grpc,
    transfer_status_pb2,
    transfer_status_pb2_grpc,
    types_pb2,
)

from pd_common.control import convert
from pd_common.control.connection import Connection
from pd_common.errors import DeadlineExceeded, PdError, PeerLost, PermissionDenied, RoomUnknown, TopologyIncomplete
from pd_common.inspection.views import ROLE_OF, Clock, ProcessView
from pd_common.types import BootstrapRoom, Role

ANSWER_S = 2.0
"""A process that says nothing for so long is shown as one that does not answer."""
QUIET_S = 30.0
"""Ending a room may mean to tear a connection down."""

_PAGE_ROOMS = 1000


@dataclass(frozen=True, slots=True)
class RoomFilter:
    """Which rooms; empty fields ask for all."""

    states: tuple[types_pb2.TransferState, ...] = ()
    peer_instance_id: str = ""
    older_than_s: float = 0.0


class ProcessClient:
    """One process. Failures are PdErrors; one that does not answer in time is PeerLost."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inspection: Any = inspection_pb2_grpc.InspectionStub(connection.channel)
        self._status: Any = transfer_status_pb2_grpc.TransferStatusStub(connection.channel)
        self._bootstrap: Any = bootstrap_pb2_grpc.BootstrapStub(connection.channel)
        self._abort: Any = abort_pb2_grpc.AbortStub(connection.channel)

    async def close(self) -> None:
        await self._connection.close()

    async def look(self, supposed: Role) -> ProcessView:
        """All that it says of itself; if it does not answer, that and the role which it is `supposed` to have."""
        address = self._connection.address
        try:
            asked_s = time.time()
            process = await self._ask(self._inspection.GetProcess, inspection_pb2.GetProcessRequest())
            clock = _clock(process, asked_s, time.time())
            role = ROLE_OF.get(process.role, supposed)
            if role is Role.ROUTER:
                return ProcessView(address, role, process=process, clock=clock)
            pool, peers, quarantine, (topology, topology_trouble) = await asyncio.gather(
                self._ask(self._status.GetPool, transfer_status_pb2.GetPoolRequest()),
                self._ask(self._status.ListPeers, transfer_status_pb2.ListPeersRequest()),
                self._ask(self._status.ListQuarantine, transfer_status_pb2.ListQuarantineRequest()),
                self._directory(role),
            )
        except PdError as error:
            return ProcessView(address, supposed, trouble=error)
        return ProcessView(
            address,
            role,
            process=process,
            pool=pool,
            peers=tuple(peers.peers),
            quarantine=tuple(quarantine.rooms),
            topology=topology,
            topology_trouble=topology_trouble,
            clock=clock,
        )

    async def latest(self, wanted: RoomFilter, limit: int) -> tuple[types_pb2.Transfer, ...]:
        """The rooms that have changed last, oldest change first.

        They are looked for among the latest changes first: a process may have a hundred thousand rooms on record.
        """
        newest = await self.sequence()
        for changes in (8 * limit, 64 * limit, 512 * limit, newest):
            found = await self._changed_after(newest - min(changes, newest), wanted)
            if len(found) >= limit:
                break
        return tuple(found[-limit:])

    async def transfer(self, number: BootstrapRoom) -> types_pb2.Transfer | None:
        """None if it is not on record."""
        try:
            answer = await self._ask(
                self._status.GetTransfer, transfer_status_pb2.GetTransferRequest(bootstrap_room=number)
            )
        except RoomUnknown:
            return None
        found: types_pb2.Transfer = answer.transfer
        return found

    async def legs(self, number: BootstrapRoom) -> tuple[inspection_pb2.RoomSpans, ...]:
        """Empty if nothing is noted."""
        try:
            answer = await self._ask(self._inspection.GetSpans, inspection_pb2.GetSpansRequest(bootstrap_room=number))
        except RoomUnknown:
            return ()
        return tuple(answer.legs)

    async def sequence(self) -> int:
        """Number of the latest change."""
        answer = await self._ask(self._status.ListTransfers, transfer_status_pb2.ListTransfersRequest(page_size=1))
        newest: int = answer.sequence
        return newest

    async def changes(self, after: int) -> AsyncGenerator[types_pb2.Transfer, None]:
        """Each one as it happens."""
        request = transfer_status_pb2.WatchTransfersRequest(after_sequence=after)
        async with aclosing(self._connection.stream(self._status.WatchTransfers, request)) as answers:
            async for answer in answers:
                yield answer.transfer

    async def abort(self, number: BootstrapRoom, message: str, ticket: bytes) -> None:
        """Returns when the process is quiet for the room."""
        request = abort_pb2.AbortRoomRequest(bootstrap_room=number, message=message, ticket=ticket)
        await self._ask(self._abort.AbortRoom, request, QUIET_S)

    async def _changed_after(self, sequence: int, wanted: RoomFilter) -> list[types_pb2.Transfer]:
        found: list[types_pb2.Transfer] = []
        token = str(sequence)
        while token:
            request = transfer_status_pb2.ListTransfersRequest(
                states=wanted.states,
                peer_instance_id=wanted.peer_instance_id,
                older_than=convert.duration_to(wanted.older_than_s),
                page_size=_PAGE_ROOMS,
                page_token=token,
            )
            answer = await self._ask(self._status.ListTransfers, request)
            found += answer.transfers
            token = answer.next_page_token
        return found

    async def _directory(self, role: Role) -> tuple[bootstrap_pb2.GetTopologyResponse | None, PdError | None]:
        if role is not Role.PREFILL:
            return None, None
        try:
            return await self._ask(self._bootstrap.GetTopology, bootstrap_pb2.GetTopologyRequest()), None
        except (TopologyIncomplete, PermissionDenied) as error:
            return None, error

    async def _ask(self, method: Any, request: object, timeout_s: float = ANSWER_S) -> Any:
        try:
            return await self._connection.call(method, request, timeout=timeout_s)
        except DeadlineExceeded as error:
            address = self._connection.address
            raise PeerLost(f"{address}: nothing came within {timeout_s:g} s", peer=address) from error


def _clock(process: inspection_pb2.GetProcessResponse, asked_s: float, answered_s: float) -> Clock:
    return Clock(process.now.ToNanoseconds() / 1e9 - (asked_s + answered_s) / 2, answered_s - asked_s)
