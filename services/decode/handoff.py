"""One room's pages on their way from prefill: pair with it, set memory aside, offer it, check what has arrived."""

from __future__ import annotations

import time
from collections.abc import Callable

from pd_common.engine.engine import Engine
from pd_common.errors import InternalError, PeerLost, ReceiverUnknown, RoomAborted, StaleInstance
from pd_common.handoff.chunk import PoolBuffers
from pd_common.handoff.destination import Offer
from pd_common.handoff.digest import PageDigest
from pd_common.handoff.metadata import ROW_BYTES, HandoffMetadata, MetadataBuffers
from pd_common.handoff.receiver import KVReceiver
from pd_common.handoff.state import Progress, TransferState
from pd_common.handoff.table import TransferTable
from pd_common.telemetry.spans import SpanName
from pd_common.types import BootstrapAddress, Instance
from services.decode.fake import made_up
from services.decode.gate import agreed
from services.decode.lookout import Lookout
from services.decode.memory import Allocation
from services.decode.offering import publish
from services.decode.pairing import Prefill
from services.decode.prefills import Prefills
from services.decode.queues import PreallocQueue
from services.decode.rooms import Room, set_memory_aside


class Handoff:
    """Decode's side of every handoff. Pages that this decode has already are not offered, so they are not sent."""

    def __init__(
        self,
        instance: Instance,
        engine: Engine,
        queue: PreallocQueue,
        pool: PoolBuffers,
        metadata: MetadataBuffers,
        lookout: Lookout,
        transfers: TransferTable,
        *,
        new_digest: Callable[[], PageDigest] | None,
        handshake_only: bool = False,
    ) -> None:
        """With `handshake_only` nothing arrives, and nothing is looked for."""
        self._instance = instance
        self._engine = engine
        self._queue = queue
        self._pool = pool
        self._metadata = metadata
        self._lookout = lookout
        self._transfers = transfers
        self._new_digest = new_digest
        self._handshake_only = handshake_only

    def use(self, prefills: Prefills) -> None:
        """Where to pair; made after this."""
        self._prefills = prefills

    async def receive(self, room: Room, bootstrap: BootstrapAddress) -> HandoffMetadata:
        """Returns when the KV of the whole prompt is in the room's pages, which are its alone by then.

        Raises:
            PdError: there is no such prefill, it has given the room up, or what arrived is not what was sent.

        """
        room.trace.enter(SpanName.PEERING)
        room.prefill = await self._prefills.pair_with(bootstrap, room.number)
        allocation = await set_memory_aside(room, self._queue, len(room.request.prompt), slot=True)
        receiver = await self._offer(room, bootstrap, room.prefill, allocation)
        room.trace.enter(SpanName.TRANSFER_WAIT)
        with self._lookout.watching(receiver, room.written):
            await room.written
        room.trace.enter(SpanName.GATE)
        return await self._commit(room, receiver, allocation)

    async def _offer(
        self, room: Room, bootstrap: BootstrapAddress, prefill: Prefill, allocation: Allocation
    ) -> KVReceiver:
        """Publishes the prompt's pages. A prefill that has restarted, or forgotten this decode, is paired anew once."""
        if not self._prefills.is_current(prefill):
            prefill = room.prefill = await self._prefills.pair_with(bootstrap, room.number)
        try:
            return await self._offer_to(room, prefill, allocation)
        except (StaleInstance, ReceiverUnknown) as refused:
            # Refused before anything could be written: these pages are known to nobody.
            room.offered_to = None
            await self._prefills.forget(prefill, refused.message)
        prefill = room.prefill = await self._prefills.pair_with(bootstrap, room.number)
        return await self._offer_to(room, prefill, allocation)

    async def _offer_to(self, room: Room, prefill: Prefill, allocation: Allocation) -> KVReceiver:
        number, offer = room.number, self._offer_of(room, allocation)
        digest = None if self._new_digest is None else self._new_digest()
        room.receiver = receiver = KVReceiver(number, offer, self._pool, self._metadata, digest)
        room.offered_to = prefill
        # Before the call, whose answer a report may overtake; whose room it is, is settled once the offer is accepted.
        self._transfers.advance(number, TransferState.WAITING_FOR_INPUT, time.monotonic())
        await publish(self._prefills, prefill, number, offer, room.deadline_s, room.trace)
        known = self._transfers.get(number)
        if known.failure is not None:
            raise known.failure
        if not self._prefills.is_current(prefill):  # lost before its rooms could be told apart from others
            raise PeerLost(f"prefill {prefill.address.target} is gone", peer=prefill.address.target)
        self._transfers.advance(number, known.state, time.monotonic(), peer=prefill.instance)
        return receiver

    def _offer_of(self, room: Room, allocation: Allocation) -> Offer:
        """The pages of the prompt that are not in the prefix cache; perhaps none, the metadata comes in any case."""
        request, page_size = room.request, self._pool.page_size
        pages = room.sequence.pages[len(allocation.prefix.pages) : -(-len(request.prompt) // page_size)]
        if allocation.slot is None:
            raise InternalError("pages are offered with a metadata slot", room=room.number)
        return Offer(
            receiver=self._instance,
            pages=tuple(pages),
            slot=allocation.slot,
            decode_prefix_len=len(allocation.prefix.pages) * page_size,
            prompt_tokens=len(request.prompt),
            prompt_digest=room.prompt_digest,
            ticket=request.ticket,
        )

    async def _commit(self, room: Room, receiver: KVReceiver, allocation: Allocation) -> HandoffMetadata:
        """Only what passes the gate and the digest is a success; then slot and pages are this room's alone."""
        if self._handshake_only:
            metadata, progress = await made_up(self._engine, room.request, allocation.own_pages), Progress()
        else:
            metadata = await agreed(receiver)
            progress = self._all_of(receiver.offer, metadata)
        now = time.monotonic()
        if not self._transfers.advance(room.number, TransferState.SUCCESS, now, progress=progress):
            raise RoomAborted("The room ended while its pages were checked", room=room.number)
        if room.offered_to is not None:
            room.offered_to.page_came()
        room.offered_to = None
        room.concluded.set()
        room.sequence.computed = metadata.covered_tokens
        self._queue.free_slot(allocation)
        return metadata

    def _all_of(self, offer: Offer, metadata: HandoffMetadata) -> Progress:
        pages = len(offer.pages)
        return Progress(metadata.chunks_done, pages, pages * self._pool.page_bytes + ROW_BYTES)
