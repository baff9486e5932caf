"""The life of a room on prefill: wait for pages, compute, write each chunk while the next is computed, hand off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from opentelemetry.context import Context

from pd_common.aio import RoomTask
from pd_common.control.outputs import OutputHub
from pd_common.control.peers import Peer
from pd_common.control.room_keeper import RoomKeeper
from pd_common.control.rooms import PoolStatus, TransferReport
from pd_common.control.waiting import WaitingLimits
from pd_common.engine.engine import Engine
from pd_common.engine.request import Sequence, validate_request
from pd_common.errors import (
    CapacityExceeded,
    InvalidRequest,
    PdError,
    PeerLost,
    PromptMismatch,
    RoomAborted,
    RoomInUse,
    ShuttingDown,
    TransferFailed,
)
from pd_common.generation import FinishReason, GenerationRequest, Output, Usage
from pd_common.handoff.chunk import PoolBuffers
from pd_common.handoff.destination import Destination, Offer
from pd_common.handoff.digest import PageDigest, digest_prompt
from pd_common.handoff.metadata import MetadataBuffers
from pd_common.handoff.quarantine import Held
from pd_common.handoff.state import Progress, Transfer, TransferState
from pd_common.handoff.table import TransferTable
from pd_common.telemetry.spans import SpanName
from pd_common.telemetry.tracing import Message, Tracing
from pd_common.transport.fake import is_fake
from pd_common.types import BootstrapRoom, Instance
from services.prefill.fake import offer_of_nothing
from services.prefill.handover import Handovers
from services.prefill.receivers import Receiver, Receivers
from services.prefill.reports import Reports
from services.prefill.rooms import Offered, Room, own_leg
from services.prefill.scheduler import PrefillScheduler


class PrefillService(RoomKeeper[Room]):
    """All rooms of one prefill rank. Source pages are freed only when the sender of an ended room is quiet (I3)."""

    def __init__(
        self,
        instance: Instance,
        engine: Engine,
        scheduler: PrefillScheduler,
        source: PoolBuffers,
        metadata: MetadataBuffers,
        transfers: TransferTable,
        hub: OutputHub,
        limits: WaitingLimits,
        tracing: Tracing,
        *,
        new_digest: Callable[[], PageDigest] | None,
        optimistic_attempts: int = 0,
        handshake_only: bool = False,
    ) -> None:
        """`optimistic_attempts`: how often a prompt may be begun before decode has offered memory for it."""
        super().__init__(instance, transfers, hub, limits)
        self._tracing = tracing
        self._engine = engine
        self._scheduler = scheduler
        self._metadata = metadata
        self._handovers = Handovers(source, metadata, transfers, new_digest)
        self._optimistic_attempts = optimistic_attempts
        self._handshake_only = handshake_only
        self._offered: dict[BootstrapRoom, Offered] = {}
        self._announced: Callable[[BootstrapRoom], AbstractAsyncContextManager[object]] = nullcontext

    def use(self, receivers: Receivers) -> None:
        """Who offers memory; it calls back into this service, so it is made after it."""
        self._receivers = receivers
        self._handovers.use(receivers)

    def announce_with(self, announced: Callable[[BootstrapRoom], AbstractAsyncContextManager[object]]) -> None:
        """Entered while a room waits for decode, which cannot find it otherwise among data-parallel ranks."""
        self._announced = announced

    def pool_status(self) -> PoolStatus:
        """Prefill has no quarantine: nobody writes here."""
        pages, slots = self._engine.pages, self._metadata
        return PoolStatus(
            pages_total=pages.num_pages,
            pages_free=pages.num_free,
            pages_quarantined=0,
            slots_total=slots.num_slots,
            slots_free=slots.free_slots,
            slots_quarantined=0,
            live_rooms=len(self._rooms) + len(self._offered),
            pages_cached=self._scheduler.pages_cached,
            requests_queued=len(self._waiting()),
        )

    def quarantined(self) -> tuple[Held, ...]:
        return ()

    def peers(self) -> tuple[Peer, ...]:
        return self._receivers.peers(self.transfers.live())

    # --- what comes in ---

    def submit(self, request: GenerationRequest, parent: Context) -> None:
        if self._stopping:
            raise ShuttingDown("this prefill is stopping and takes no new request")
        leg = self._validated_leg(request)
        if leg.room in self._rooms and self.transfers.find(leg.room) is None:  # its last write outlives its record
            raise RoomInUse(f"room {leg.room} has not ended yet", room=leg.room)
        now = time.monotonic()
        deadline_s = now + request.timeout_s
        digest = digest_prompt(request.prompt)
        try:
            self.transfers.join_request(
                request.room, rid=request.rid, prompt_digest=digest, deadline_s=deadline_s, now=now
            )
        except PromptMismatch as mismatch:
            self._start(leg, parent, _refused(mismatch))  # it is decode that has to be told
            raise
        try:
            self._make_way(leg)
        except CapacityExceeded as full:
            self.abandon(leg.room, full)  # decode hears of it, be its offer here or still to come
            raise
        self._start(leg, parent)

    def _start(self, leg: GenerationRequest, parent: Context, refusal: Coroutine[Any, Any, None] | None = None) -> None:
        number = leg.room
        trace = self._tracing.begin(SpanName.PREFILL, number, parent, prompt_tokens=len(leg.prompt), rid=leg.rid)
        room = self._rooms[number] = Room(leg, trace, asyncio.get_running_loop().create_future())
        offered = self._offered.pop(number, None)
        if offered is not None:
            room.offered.set_result(offered)
        work = refusal or self._hand_off(room)
        room.task = RoomTask(self._tasks, f"room {number}", work, lambda error: self._conclude(room, error))

    def offer(self, number: BootstrapRoom, offer: Offer, receiver: Receiver, time_left_s: float) -> TransferState:
        """Decode's pages for a room; its request may come later. Raises as `join_offer` and `Destination` do."""
        destination = Destination(offer, receiver.pool, receiver.channel)
        now = time.monotonic()
        known = self.transfers.find(number)
        if known is None and number in self._rooms:  # its last write outlives its record
            raise RoomAborted(f"room {number} has failed and not ended yet", room=number)
        try:
            transfer = self.transfers.join_offer(number, offer, deadline_s=now + time_left_s, now=now)
        except PromptMismatch as mismatch:
            self.abandon(number, mismatch)
            raise
        if known is None or known.offer is None:
            reports = Reports(number, self.instance, self._receivers, receiver, offer.ticket)
            self._take_offer(number, Offered(destination, reports, now))
        return transfer.state

    def _take_offer(self, number: BootstrapRoom, offered: Offered) -> None:
        room = self._rooms.get(number)
        if room is None:
            self._offered[number] = offered
        elif not room.offered.done():
            room.offered.set_result(offered)

    async def report(self, report: TransferReport) -> Transfer:
        if self.transfers.heard(report.room, report.reporter, report.sequence) and report.state is TransferState.FAILED:
            self._decode_knows(report.room)
            self.abandon(report.room, report.failure or TransferFailed("decode gave the room up", room=report.room))
        return self.transfers.get(report.room)

    async def abort(self, room: BootstrapRoom, error: PdError) -> TransferState | None:
        known = self.transfers.find(room)
        if known is None:
            self.transfers.abort(room, error, time.monotonic())
        self.abandon(room, error)
        live = self._rooms.get(room)
        if live is not None and live.task is not None:  # also when its record is gone: what counts is the last write
            await live.task.ended()
        ended = self.transfers.find(room)
        return None if known is None or ended is None else ended.state

    def abandon(self, room: BootstrapRoom, error: PdError) -> None:
        live, offered = self._rooms.get(room), self._offered.pop(room, None)
        if live is None or not live.decode_decides:
            self._fail(room, error)
        if offered is not None:
            self._tasks.start(f"report of room {room}", offered.reports.tell(error))
        self._stop(room, error)

    def receiver_lost(self, instance: Instance, error: PeerLost) -> None:
        """Ends every room whose pages lie in this process."""
        for transfer in self.transfers.fail_peer(instance, error, time.monotonic()):
            self._decode_knows(transfer.room)  # there is nobody left to tell
            self.abandon(transfer.room, error)

    def _decode_knows(self, number: BootstrapRoom) -> None:
        room = self._rooms.get(number)
        if room is not None and room.reports is not None:
            room.reports.decode_knows = True

    # --- the life of a room ---

    async def _hand_off(self, room: Room) -> None:
        if is_fake(room.request.bootstrap):
            await self._compute_only(room)
        elif self._handshake_only:
            await self._pretend(room)
        else:
            await self._compute_and_hand_off(room)

    async def _compute_only(self, room: Room) -> None:
        """A fake room: what an offer of nothing asks for is computed, and nothing moves."""
        number, now = room.request.room, time.monotonic()
        offer = offer_of_nothing(self.instance, room.request)
        self.transfers.join_offer(number, offer, deadline_s=now + room.request.timeout_s, now=now)
        room.trace.enter(SpanName.COMPUTE_WAIT)
        room.job = self._scheduler.enqueue(Sequence(room.request))
        await room.job.computed()

    async def _compute_and_hand_off(self, room: Room) -> None:
        """It may be computed before it is known where its pages go; nothing is read of it until then."""
        room.job = self._scheduler.expect(Sequence(room.request), self._optimistic_attempts)
        offered = await self._offer_for(room)
        stage = room.trace.enter(SpanName.COMPUTE_WAIT)
        self._scheduler.promise(room.job)
        await room.job.turn.wait()
        stage.attributes["cached_tokens"] = room.job.cached_tokens
        room.handover = await self._handovers.begin(room.trace, room.job, offered.destination, offered.reports)
        await room.handover.carry_out()

    async def _offer_for(self, room: Room) -> Offered:
        room.trace.enter(SpanName.BOOTSTRAP_WAIT)
        async with self._announced(room.request.room):
            return await room.offered

    async def _pretend(self, room: Room) -> None:
        """Nobody will read these pages: they are neither computed nor written, and said to be there."""
        offered = await self._offer_for(room)
        self.transfers.advance(room.request.room, TransferState.TRANSFERRING, time.monotonic())
        room.trace.enter(SpanName.COMMIT)
        await offered.reports.success(Progress(1, len(offered.destination.offer.pages), 0))

    async def _conclude(self, room: Room, error: PdError | None) -> None:
        if error is None:
            self._end(room, None)
            await self._release(room)
        else:
            room.trace.abort(error)
            if not room.decode_decides:
                self._end(room, error)
            error, _ = await asyncio.gather(self._end_as_agreed(room, error), self._release(room))
        if room.reports is not None:
            room.trace.repeated(Message.REPORT, room.reports.repeated)
        room.trace.end(error)
        del self._rooms[room.request.room]

    async def _end_as_agreed(self, room: Room, error: PdError) -> PdError | None:
        """Decode learns of a failure from us, if it has been heard of; gives how the room has ended on both sides.

        Nobody waits for what is still being written.
        """
        agreed = error if room.reports is None else await room.reports.failure(error)
        self._end(room, agreed)
        return agreed

    def _end(self, room: Room, error: PdError | None) -> None:
        """For the record and for the client; an end that either has seen already stays as it is."""
        number = room.request.room
        if error is not None:
            self._fail(number, error)
            return
        self.transfers.advance(number, TransferState.SUCCESS, time.monotonic())
        cached_tokens = 0 if room.job is None else room.job.cached_tokens
        usage = Usage(len(room.request.prompt), 1, cached_tokens)
        self._hub.publish([Output(number, finish=FinishReason.HANDED_OFF, usage=usage)])

    async def _release(self, room: Room) -> None:
        """What is written first: whoever reads pages must be done before they are given back."""
        if room.handover is not None:
            await self._handovers.end(room.handover)
        if room.job is not None:
            await self._scheduler.release(room.job)

    async def tend(self, now: float) -> None:
        for receiver in self._receivers.unheld(now):
            # Not awaited: closing a channel may wait for a write, and the reaper waits for nobody (I7).
            ending = self._receivers.drop(receiver, "it registered, but does not hold the registration")
            self._tasks.start(f"end of the registration of {receiver.instance.instance_id}", ending)

    def _validated_leg(self, request: GenerationRequest) -> GenerationRequest:
        if request.bootstrap is None:
            raise InvalidRequest(
                "bootstrap_host is required here: the host of the prefill's Bootstrap service (a router fills it in)",
                field="bootstrap_host",
            )
        validate_request(request, self._engine.limits, holds_answer=False)
        return own_leg(request)


async def _refused(error: PdError) -> None:
    raise error
