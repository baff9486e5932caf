"""What one rank asks of a rank on the other side: PageAllocation, TransferStatus and Abort."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from opentelemetry.context import Context
from pd.v1 import (
    abort_pb2,
    abort_pb2_grpc,
    page_allocation_pb2,
    page_allocation_pb2_grpc,
    transfer_status_pb2,
    transfer_status_pb2_grpc,
    types_pb2,
)

from pd_common.control import beats, convert
from pd_common.control.connection import ATTEMPT_S, Connection
from pd_common.control.status import from_status, to_status
from pd_common.errors import PdError, StaleInstance
from pd_common.handoff.destination import Offer
from pd_common.handoff.state import Progress, TransferState
from pd_common.telemetry import spans
from pd_common.types import BootstrapRoom, Instance, KvLayout, ProcessProof


class PeerClient:
    """What one rank asks of a rank on the other side: PageAllocation, TransferStatus and Abort."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pages: Any = page_allocation_pb2_grpc.PageAllocationStub(connection.channel)
        self._status: Any = transfer_status_pb2_grpc.TransferStatusStub(connection.channel)
        self._abort: Any = abort_pb2_grpc.AbortStub(connection.channel)

    async def register_receiver(
        self,
        *,
        receiver: Instance,
        registration: int,
        sender: Instance,
        control_address: str,
        layout: KvLayout,
        data_address: bytes,
        buffer_bases: Sequence[int],
        num_pages: int,
        metadata_base: int,
        metadata_item_len_bytes: int,
        metadata_slots: int,
        canary_base: int,
        canary_pages: int,
    ) -> tuple[ProcessProof, str]:
        """Gives the sender's process and the transport that will carry the pages."""
        request = page_allocation_pb2.RegisterReceiverRequest(
            receiver=convert.instance_to(receiver),
            registration=registration,
            sender=convert.instance_to(sender),
            control_address=control_address,
            layout=convert.layout_to(layout),
            data_address=data_address,
            buffer_bases=buffer_bases,
            num_pages=num_pages,
            metadata_base=metadata_base,
            metadata_item_len_bytes=metadata_item_len_bytes,
            metadata_slots=metadata_slots,
            canary_base=canary_base,
            canary_pages=canary_pages,
        )
        response = await self._connection.call(self._pages.RegisterReceiver, request)
        return convert.process_from(response.process), response.carrier

    async def hold_receiver(
        self, receiver: Instance, sender: Instance, registration: int
    ) -> AsyncGenerator[None, None]:
        """Sends beats, and gives the sender's as they come; ends, or raises, when the sender is gone."""
        first = page_allocation_pb2.HoldReceiverRequest(
            receiver=convert.instance_to(receiver), sender=convert.instance_to(sender), registration=registration
        )

        async def own_beats() -> AsyncIterator[page_allocation_pb2.HoldReceiverRequest]:
            yield first
            while True:
                await asyncio.sleep(beats.BEAT_S)
                yield page_allocation_pb2.HoldReceiverRequest()

        async with aclosing(self._connection.stream(self._pages.HoldReceiver, own_beats())) as responses:
            async for _ in responses:
                yield

    async def send_canary(
        self, receiver: Instance, sender: Instance, registration: int, page: int, seed: bytes
    ) -> float:
        """Returns when the canary is in the receiver's page; gives the seconds that its way took."""
        request = page_allocation_pb2.SendCanaryRequest(
            receiver=convert.instance_to(receiver),
            sender=convert.instance_to(sender),
            registration=registration,
            page=page,
            seed=seed,
        )
        response = await self._connection.call(self._pages.SendCanary, request)
        return convert.duration_from(response.took)

    async def allocate_pages(
        self,
        room: BootstrapRoom,
        sender: Instance,
        registration: int,
        offer: Offer,
        time_left_s: float,
        parent: Context,
    ) -> TransferState:
        """Offers pages, once; gives the room's state on the other side. The same offer may be made again."""
        request = page_allocation_pb2.AllocatePagesRequest(
            bootstrap_room=room,
            receiver=convert.instance_to(offer.receiver),
            sender=convert.instance_to(sender),
            registration=registration,
            page_ids=offer.pages,
            metadata_slot={"index": offer.slot.index, "generation": offer.slot.generation},
            decode_prefix_len=offer.decode_prefix_len,
            prompt_tokens=offer.prompt_tokens,
            prompt_digest=offer.prompt_digest,
            ticket=offer.ticket,
            time_left=convert.duration_to(time_left_s),
            state_indices=[{"indices": indices} for indices in offer.state_indices],
        )
        metadata = spans.carried(parent)
        response = await self._connection.call(self._pages.AllocatePages, request, metadata=metadata, timeout=ATTEMPT_S)
        return convert.state_from(response.state)

    async def report_transfer(
        self,
        room: BootstrapRoom,
        *,
        reporter: Instance,
        recipient: Instance,
        sequence: int,
        state: TransferState,
        progress: Progress,
        ticket: bytes,
        failure: PdError | None = None,
    ) -> tuple[TransferState, PdError | None]:
        """Gives the room's state on the other side, and why it failed there. The same report may be made again."""
        request = transfer_status_pb2.ReportTransferRequest(
            bootstrap_room=room,
            reporter=convert.instance_to(reporter),
            recipient=convert.instance_to(recipient),
            sequence=sequence,
            state=convert.state_to(state),
            chunks_done=progress.chunks_done,
            pages_done=progress.pages_done,
            bytes_done=progress.bytes_done,
            failure=to_status(failure) if failure else None,
            ticket=ticket,
        )
        return _outcome(await self._connection.call(self._status.ReportTransfer, request, timeout=ATTEMPT_S))

    async def abort_room(self, room: BootstrapRoom, error: PdError, recipient: Instance, *, ticket: bytes) -> None:
        """Returns when `recipient` will write nothing more of the room: the answer is its proof. May be repeated.

        There the room ends with this error.

        Raises:
            StaleInstance: the answer is another process's, and proves nothing.

        """
        request = abort_pb2.AbortRoomRequest(
            bootstrap_room=room,
            message=error.message,
            recipient=convert.instance_to(recipient),
            ticket=ticket,
            failure=to_status(error),
        )
        response = await self._connection.call(self._abort.AbortRoom, request, timeout=ATTEMPT_S)
        if convert.instance_from(response.drained, "drained") != recipient:
            raise StaleInstance("Another process has said that it is quiet", expected=recipient, got=response.drained)

    async def get_transfer(self, room: BootstrapRoom) -> tuple[TransferState, PdError | None]:
        """The room's state on the other side, and why it failed there.

        Raises:
            RoomUnknown: it is not on record there.

        """
        request = transfer_status_pb2.GetTransferRequest(bootstrap_room=room)
        response = await self._connection.call(self._status.GetTransfer, request, timeout=ATTEMPT_S)
        return _outcome(response.transfer)

    async def list_failed(self, peer: Instance, page_token: str) -> tuple[dict[BootstrapRoom, PdError], str]:
        """Rooms with `peer` that have failed on the other side since `page_token` was given, and the next token.

        An empty token asks for all that are on record there.
        """
        request = transfer_status_pb2.ListTransfersRequest(
            states=[convert.state_to(TransferState.FAILED)],
            peer_instance_id=peer.instance_id,
            page_size=1000,
            page_token=page_token,
        )
        response = await self._connection.call(self._status.ListTransfers, request, timeout=ATTEMPT_S)
        failed = {convert.room_from(found.bootstrap_room): from_status(found.failure) for found in response.transfers}
        return failed, response.next_page_token or str(response.sequence)


def _outcome(
    message: transfer_status_pb2.ReportTransferResponse | types_pb2.Transfer,
) -> tuple[TransferState, PdError | None]:
    failure = from_status(message.failure) if message.HasField("failure") else None
    return convert.state_from(message.state), failure
