"""TransferStatus: what a process knows of its rooms, memory and peers, and what the other side says of a room."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from google.rpc import status_pb2
from pd.v1 import transfer_status_pb2, transfer_status_pb2_grpc, types_pb2

from pd_common.control import convert
from pd_common.control.held import held_to
from pd_common.control.peers import peer_to
from pd_common.control.rooms import Call, RoomService, TransferReport, check_recipient
from pd_common.control.status import from_status, to_status
from pd_common.errors import InvalidRequest
from pd_common.handoff.state import Progress, Transfer, TransferState
from pd_common.handoff.table import TransferTable

_PAGE_DEFAULT, _PAGE_MOST = 100, 1000
_PAGE_TOKEN_MOST = 20
"""Digits of the largest sequence number."""


class TransferStatusServicer(transfer_status_pb2_grpc.TransferStatusServicer):
    """Serves the rooms of one process."""

    def __init__(self, service: RoomService) -> None:
        self._service = service
        # Taken once: the same event has the same time in every answer.
        self._wall_offset_s = time.time() - time.monotonic()

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
        return transfer_status_pb2.GetTransferResponse(transfer=self._shown(transfer))

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
            transfers=[self._shown(transfer) for transfer in found[:size]],
            next_page_token=str(found[size - 1].sequence) if len(found) > size else "",
            sequence=self._service.transfers.sequence,
        )

    async def WatchTransfers(
        self, request: transfer_status_pb2.WatchTransfersRequest, context: Call
    ) -> AsyncIterator[transfer_status_pb2.WatchTransfersResponse]:
        seen = request.after_sequence
        with _changes(self._service.transfers) as changed:
            while True:
                changed.clear()
                self._service.transfers.require_resumable(seen)
                for transfer in self._service.transfers.changes_since(seen):
                    yield transfer_status_pb2.WatchTransfersResponse(transfer=self._shown(transfer))
                    seen = transfer.sequence
                await changed.wait()

    async def GetPool(
        self, request: transfer_status_pb2.GetPoolRequest, context: Call
    ) -> transfer_status_pb2.GetPoolResponse:
        return transfer_status_pb2.GetPoolResponse(**asdict(self._service.pool_status()))

    async def ListPeers(
        self, request: transfer_status_pb2.ListPeersRequest, context: Call
    ) -> transfer_status_pb2.ListPeersResponse:
        peers = [peer_to(peer, self._wall_offset_s) for peer in self._service.peers()]
        return transfer_status_pb2.ListPeersResponse(peers=peers)

    async def ListQuarantine(
        self, request: transfer_status_pb2.ListQuarantineRequest, context: Call
    ) -> transfer_status_pb2.ListQuarantineResponse:
        now = time.monotonic()
        rooms = [held_to(held, now, self._wall_offset_s) for held in self._service.quarantined()]
        return transfer_status_pb2.ListQuarantineResponse(rooms=rooms)

    def _shown(self, transfer: Transfer) -> types_pb2.Transfer:
        return convert.transfer_to(transfer, self._wall_offset_s)


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


def _page_token(token: str) -> int:
    if not token:
        return 0
    if not token.isdecimal() or len(token) > _PAGE_TOKEN_MOST:
        raise InvalidRequest("page_token must come from an earlier answer", field="page_token")
    return int(token)
