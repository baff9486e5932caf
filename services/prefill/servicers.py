"""PageAllocation: decode processes register their memory, hold on, and offer pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from pd.v1 import page_allocation_pb2, page_allocation_pb2_grpc

from pd_common.control import beats, convert
from pd_common.control.rooms import Call, check_recipient
from pd_common.errors import InvalidRequest, ReceiverUnknown
from pd_common.handoff.canary import SEED_BYTES, RemoteCanary
from pd_common.handoff.chunk import PoolBuffers
from pd_common.handoff.destination import Offer, RemotePool
from pd_common.handoff.metadata import ROW_BYTES, Slot
from pd_common.handoff.process import own_process_proof
from services.prefill.receivers import Receiver, Receivers, check_register_request
from services.prefill.service import PrefillService

_FromReceiver = (
    page_allocation_pb2.HoldReceiverRequest
    | page_allocation_pb2.SendCanaryRequest
    | page_allocation_pb2.AllocatePagesRequest
)


class PageAllocationServicer(page_allocation_pb2_grpc.PageAllocationServicer):
    """Serves the receivers and the rooms of one prefill rank."""

    def __init__(self, service: PrefillService, receivers: Receivers) -> None:
        self._service = service
        self._receivers = receivers
        self._process = own_process_proof()

    async def RegisterReceiver(
        self, request: page_allocation_pb2.RegisterReceiverRequest, context: Call
    ) -> page_allocation_pb2.RegisterReceiverResponse:
        check_recipient(request.sender, self._service.instance, "sender")
        layout = convert.layout_from(request.layout)
        receiver = await self._receivers.register(
            convert.instance_from(request.receiver, "receiver"),
            request.registration,
            request.control_address,
            layout,
            _remote_pool(request),
            RemoteCanary(request.canary_base, request.canary_pages, layout.page_bytes),
            request.data_address,
        )
        return page_allocation_pb2.RegisterReceiverResponse(
            sender=convert.instance_to(self._service.instance),
            process=convert.process_to(self._process),
            carrier=receiver.channel.carrier,
        )

    async def HoldReceiver(
        self, request_iterator: AsyncIterator[page_allocation_pb2.HoldReceiverRequest], context: Call
    ) -> AsyncIterator[page_allocation_pb2.HoldReceiverResponse]:
        first = await anext(request_iterator, page_allocation_pb2.HoldReceiverRequest())
        receiver = self._registered(first)
        receiver.held = True
        listening = asyncio.create_task(self._listen(receiver, request_iterator))
        try:
            while self._receivers.is_current(receiver) and not listening.done():
                yield page_allocation_pb2.HoldReceiverResponse(interval=convert.duration_to(beats.BEAT_S))
                await asyncio.sleep(beats.BEAT_S)
        finally:
            listening.cancel()
            await self._receivers.drop(receiver, "its connection ended")
            await asyncio.wait([listening])

    async def SendCanary(
        self, request: page_allocation_pb2.SendCanaryRequest, context: Call
    ) -> page_allocation_pb2.SendCanaryResponse:
        receiver = self._registered(request)
        if len(request.seed) != SEED_BYTES:
            raise InvalidRequest(f"a seed has {SEED_BYTES} bytes, not {len(request.seed)}", field="seed")
        canary = await self._receivers.send_canary(receiver, request.page, request.seed)
        return page_allocation_pb2.SendCanaryResponse(took=convert.duration_to(canary.took_s))

    async def AllocatePages(
        self, request: page_allocation_pb2.AllocatePagesRequest, context: Call
    ) -> page_allocation_pb2.AllocatePagesResponse:
        receiver = self._registered(request)
        offer = Offer(
            receiver=receiver.instance,
            pages=tuple(request.page_ids),
            slot=Slot(request.metadata_slot.index, request.metadata_slot.generation),
            decode_prefix_len=request.decode_prefix_len,
            prompt_tokens=request.prompt_tokens,
            prompt_digest=request.prompt_digest,
            state_indices=tuple(tuple(kind.indices) for kind in request.state_indices),
            ticket=request.ticket,
        )
        room = convert.room_from(request.bootstrap_room)
        time_left_s = convert.time_limit_from(request.time_left, "time_left")
        state = self._service.offer(room, offer, receiver, time_left_s)
        return page_allocation_pb2.AllocatePagesResponse(state=convert.state_to(state))

    def _registered(self, message: _FromReceiver) -> Receiver:
        """The registration that is spoken of.

        Raises:
            StaleInstance: another prefill process is meant.
            ReceiverUnknown: there is no such registration (any more). Memory that was offered under an earlier one may
                be in other hands by now, and the fence of that one does not keep out who writes by this one (I2).

        """
        check_recipient(message.sender, self._service.instance, "sender")
        receiver = self._receivers.get(convert.instance_from(message.receiver, "receiver"))
        if receiver.registration != message.registration:
            name = receiver.instance.instance_id
            raise ReceiverUnknown(f"{name} has another registration than {message.registration} here", receiver=name)
        return receiver

    async def _listen(
        self, receiver: Receiver, requests: AsyncIterator[page_allocation_pb2.HoldReceiverRequest]
    ) -> None:
        """Ends the registration when decode's beats stop."""
        why = "it has ended the pairing"
        try:
            async with beats.Patience() as patience:
                async for _ in requests:
                    patience.heard()
        except TimeoutError:
            why = f"no beat for {beats.patience_s():.1f} s"
        await self._receivers.drop(receiver, why)


def _remote_pool(request: page_allocation_pb2.RegisterReceiverRequest) -> RemotePool:
    """The offered memory.

    Raises:
        InvalidRequest, PagesInvalid: it does not describe memory (I11).

    """
    if request.metadata_item_len_bytes != ROW_BYTES:
        raise InvalidRequest(
            f"a metadata slot has {ROW_BYTES} bytes here, not {request.metadata_item_len_bytes}",
            field="metadata_item_len_bytes",
        )
    if not request.control_address:
        raise InvalidRequest("control_address must be host:port", field="control_address")
    buffers = request.layout.buffers
    check_register_request(len(buffers), len(request.buffer_bases), request.metadata_slots)
    pool = PoolBuffers(
        tuple(request.buffer_bases),
        tuple(buffer.item_len_bytes for buffer in buffers),
        request.num_pages,
        request.layout.page_size,
    )
    return RemotePool(pool, request.metadata_base, request.metadata_slots, len(request.layout.state_kinds))
