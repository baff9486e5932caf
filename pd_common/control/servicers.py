"""Bootstrap, TransferStatus and Abort: what more than one role serves.

Messages in, domain calls, messages out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import grpc
from google.rpc import status_pb2
from opentelemetry.context import Context
from pd.v1 import (
    abort_pb2,
    abort_pb2_grpc,
    bootstrap_pb2,
    bootstrap_pb2_grpc,
    transfer_status_pb2,
    transfer_status_pb2_grpc,
    types_pb2,
)

from pd_common.control import convert
from pd_common.control.held import held_to
from pd_common.control.registry import Registry
from pd_common.control.status import from_status, to_status
from pd_common.errors import InvalidRequest, PdError, RoomAborted, StaleInstance
from pd_common.generation import GenerationRequest
from pd_common.handoff.quarantine import Held
from pd_common.handoff.state import Progress, Transfer, TransferState
from pd_common.handoff.table import TransferTable
from pd_common.types import BootstrapRoom, Instance

Call = grpc.aio.ServicerContext[Any, Any]

_PAGE_DEFAULT, _PAGE_MOST = 100, 1000
_PAGE_TOKEN_MOST = 20
"""Digits of the largest sequence number."""


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What the other side says about a room."""

    room: BootstrapRoom
    reporter: Instance
    sequence: int
    state: TransferState
    progress: Progress
    failure: PdError | None


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """What pages and metadata slots are doing."""

    pages_total: int
    pages_free: int
    pages_quarantined: int
    slots_total: int
    slots_free: int
    slots_quarantined: int
    live_rooms: int


class RoomService(Protocol):
    """What prefill and decode have in common in the eyes of the control plane."""

    @property
    def instance(self) -> Instance:
        """Identity of the process's present life."""

    @property
    def transfers(self) -> TransferTable:
        """Every room on record."""

    def pool_status(self) -> PoolStatus: ...

    def quarantined(self) -> tuple[Held, ...]:
        """What failed rooms keep from reuse, oldest first."""

    def submit(self, request: GenerationRequest, parent: Context) -> None:
        """Takes a request in; its outputs go to the hub. Raises PdError when it is refused; then nothing is left."""

    async def abort(self, room: BootstrapRoom, error: PdError) -> TransferState | None:
        """Ends the room, or remembers it if it is unknown; returns when this process will write nothing more of it."""

    def abandon(self, room: BootstrapRoom, error: PdError) -> None:
        """Ends a room whose client is gone; does not wait."""

    async def report(self, report: TransferReport) -> Transfer:
        """Takes in what the other side says; gives the room as it stands here."""


def check_recipient(message: types_pb2.Instance, own: Instance) -> None:
    """Refuses what is meant for an earlier life of this process (or for another one).

    Raises:
        StaleInstance: always with both names.

    """
    meant = convert.instance_from(message, "recipient")
    if meant != own:
        raise StaleInstance(
            f"meant for {meant.instance_id} (epoch {meant.epoch}); this is {own.instance_id} (epoch {own.epoch})",
            expected=f"{own.instance_id}/{own.epoch}",
            got=f"{meant.instance_id}/{meant.epoch}",
        )


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
        ranks = self._registry.topology(time.monotonic())
        return bootstrap_pb2.GetTopologyResponse(ranks=[convert.rank_to(rank) for rank in ranks])

    async def WatchTopology(
        self, request: bootstrap_pb2.WatchTopologyRequest, context: Call
    ) -> AsyncIterator[bootstrap_pb2.WatchTopologyResponse]:
        shown: tuple[object, ...] | None = None
        while True:
            change = self._change  # taken before the look: what comes while the watcher is being told is not missed
            ranks = self._registry.complete_or_empty(time.monotonic())
            if ranks != shown and (ranks or shown):
                yield bootstrap_pb2.WatchTopologyResponse(ranks=[convert.rank_to(rank) for rank in ranks])
            shown = ranks
            with suppress(TimeoutError):  # a lease may end without anybody saying so
                await asyncio.wait_for(change.wait(), self._registry.lease_s / 2)

    async def RegisterDpRank(
        self, request: bootstrap_pb2.RegisterDpRankRequest, context: Call
    ) -> bootstrap_pb2.RegisterDpRankResponse:
        room = convert.room_from(request.bootstrap_room)
        self._registry.register_dp_rank(room, request.dp_rank, time.monotonic())
        return bootstrap_pb2.RegisterDpRankResponse()

    async def QueryDpRanks(
        self, request: bootstrap_pb2.QueryDpRanksRequest, context: Call
    ) -> bootstrap_pb2.QueryDpRanksResponse:
        rooms = [convert.room_from(room) for room in request.bootstrap_rooms]
        found = self._registry.query_dp_ranks(rooms, time.monotonic())
        return bootstrap_pb2.QueryDpRanksResponse(dp_ranks={int(room): rank for room, rank in found.items()})

    def _announce(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


class TransferStatusServicer(transfer_status_pb2_grpc.TransferStatusServicer):
    """Serves the rooms of one process."""

    def __init__(self, service: RoomService) -> None:
        self._service = service

    async def ReportTransfer(
        self, request: transfer_status_pb2.ReportTransferRequest, context: Call
    ) -> transfer_status_pb2.ReportTransferResponse:
        check_recipient(request.recipient, self._service.instance)
        transfer = await self._service.report(_report_from(request))
        return transfer_status_pb2.ReportTransferResponse(
            state=convert.state_to(transfer.state), failure=_failure_of(transfer)
        )

    async def GetTransfer(
        self, request: transfer_status_pb2.GetTransferRequest, context: Call
    ) -> transfer_status_pb2.GetTransferResponse:
        transfer = self._service.transfers.get(convert.room_from(request.bootstrap_room))
        return transfer_status_pb2.GetTransferResponse(transfer=_transfer_to(transfer))

    async def ListTransfers(
        self, request: transfer_status_pb2.ListTransfersRequest, context: Call
    ) -> transfer_status_pb2.ListTransfersResponse:
        states = frozenset(convert.state_from(state) for state in request.states)
        found = self._service.transfers.select(
            states=states or frozenset(TransferState),
            peer_instance_id=request.peer_instance_id or None,
            created_until_s=time.monotonic() - convert.duration_from(request.older_than),
            after_sequence=_page_token(request.page_token),
        )
        size = min(request.page_size or _PAGE_DEFAULT, _PAGE_MOST)
        return transfer_status_pb2.ListTransfersResponse(
            transfers=[_transfer_to(transfer) for transfer in found[:size]],
            next_page_token=str(found[size - 1].sequence) if len(found) > size else "",
        )

    async def WatchTransfers(
        self, request: transfer_status_pb2.WatchTransfersRequest, context: Call
    ) -> AsyncIterator[transfer_status_pb2.WatchTransfersResponse]:
        seen = request.after_sequence
        with _changes(self._service.transfers) as changed:
            while True:
                changed.clear()
                for transfer in self._service.transfers.changes_since(seen):
                    yield transfer_status_pb2.WatchTransfersResponse(transfer=_transfer_to(transfer))
                    seen = transfer.sequence
                await changed.wait()

    async def GetPool(
        self, request: transfer_status_pb2.GetPoolRequest, context: Call
    ) -> transfer_status_pb2.GetPoolResponse:
        return transfer_status_pb2.GetPoolResponse(**asdict(self._service.pool_status()))

    async def ListQuarantine(
        self, request: transfer_status_pb2.ListQuarantineRequest, context: Call
    ) -> transfer_status_pb2.ListQuarantineResponse:
        now = time.monotonic()
        rooms = [held_to(held, now, time.time() - now) for held in self._service.quarantined()]
        return transfer_status_pb2.ListQuarantineResponse(rooms=rooms)


class AbortServicer(abort_pb2_grpc.AbortServicer):
    """Ends rooms of one process."""

    def __init__(self, service: RoomService) -> None:
        self._service = service

    async def AbortRoom(self, request: abort_pb2.AbortRoomRequest, context: Call) -> abort_pb2.AbortRoomResponse:
        if request.HasField("recipient"):
            check_recipient(request.recipient, self._service.instance)
        room = convert.room_from(request.bootstrap_room)
        error = RoomAborted(request.message or f"room {room} was aborted", room=room)
        state = await self._service.abort(room, error)
        return abort_pb2.AbortRoomResponse(
            state=convert.state_to(state) if state else types_pb2.TRANSFER_STATE_UNSPECIFIED,
            drained=convert.instance_to(self._service.instance),
        )


@contextmanager
def _changes(table: TransferTable) -> Iterator[asyncio.Event]:
    """An event that is set at each change of the table."""
    changed = asyncio.Event()

    def listener(_: Transfer) -> None:
        changed.set()

    table.listeners.append(listener)
    try:
        yield changed
    finally:
        table.listeners.remove(listener)


def _report_from(request: transfer_status_pb2.ReportTransferRequest) -> TransferReport:
    return TransferReport(
        room=convert.room_from(request.bootstrap_room),
        reporter=convert.instance_from(request.reporter, "reporter"),
        sequence=request.sequence,
        state=convert.state_from(request.state),
        progress=Progress(request.chunks_done, request.pages_done, request.bytes_done),
        failure=from_status(request.failure) if request.HasField("failure") else None,
    )


def _failure_of(transfer: Transfer) -> status_pb2.Status | None:
    return to_status(transfer.failure) if transfer.failure else None


def _transfer_to(transfer: Transfer) -> types_pb2.Transfer:
    return convert.transfer_to(transfer, time.time() - time.monotonic())


def _page_token(token: str) -> int:
    if not token:
        return 0
    if not token.isdecimal() or len(token) > _PAGE_TOKEN_MOST:
        raise InvalidRequest("page_token must come from an earlier answer", field="page_token")
    return int(token)
