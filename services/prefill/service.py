"""The life of a room on prefill: wait for pages, compute, write each chunk while the next is computed, hand off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from opentelemetry.context import Context

from pd_common.aio import RoomTask, drain_tasks
from pd_common.control.outputs import OutputHub
from pd_common.control.rooms import PoolStatus, TransferReport
from pd_common.engine.engine import Engine
from pd_common.engine.request import Sequence, validate_request
from pd_common.errors import (
    DeadlineExceeded,
    InternalError,
    PdError,
    PeerLost,
    PromptMismatch,
    RoomAborted,
    RoomInUse,
    ShuttingDown,
    TransferFailed,
)
from pd_common.generation import FinishReason, GenerationRequest, Output, Usage
from pd_common.handoff.chunk import ChunkPlanner, PoolBuffers, TransferKVChunk
from pd_common.handoff.destination import Destination, Offer
from pd_common.handoff.digest import PageDigest, digest_prompt
from pd_common.handoff.metadata import HandoffMetadata, MetadataBuffers, Slot
from pd_common.handoff.quarantine import Held
from pd_common.handoff.sender import KVSender
from pd_common.handoff.state import Progress, Transfer, TransferState
from pd_common.handoff.table import TransferTable
from pd_common.telemetry.spans import RoomTrace, SpanName, now_ns
from pd_common.transport.base import WriteReceipt
from pd_common.transport.fake import is_fake, require_fake
from pd_common.types import BootstrapRoom, Instance
from services.prefill.fake import offer_of_nothing
from services.prefill.receivers import Receiver, Receivers
from services.prefill.reports import AGAIN_S, Reports
from services.prefill.scheduler import Job, PrefillScheduler

_REAP_S = 0.1


@dataclass(slots=True)
class _Work:
    """What a room holds while it is computed and sent; given back by `PrefillService._release`."""

    job: Job
    slot: Slot
    sender: KVSender
    planner: ChunkPlanner
    receiver: Receiver


@dataclass(slots=True)
class _Room:
    """A request that is being served; `destination` is set when decode has offered pages."""

    request: GenerationRequest
    trace: RoomTrace
    destination: asyncio.Future[tuple[Destination, Receiver]]
    task: RoomTask | None = None
    work: _Work | None = None
    reports: int = 0
    decode_told: bool = False


class PrefillService:
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
        *,
        new_digest: Callable[[], PageDigest] | None,
        only_fake: bool = False,
    ) -> None:
        self.instance = instance
        self.transfers = transfers
        self._engine = engine
        self._scheduler = scheduler
        self._metadata = metadata
        self._free_slots = asyncio.Semaphore(metadata.free_slots)
        self._hub = hub
        self._new_digest = new_digest
        self._only_fake = only_fake
        self._source = source
        self._rooms: dict[BootstrapRoom, _Room] = {}
        self._offered: dict[BootstrapRoom, tuple[Destination, Receiver]] = {}
        self._stopping = False

    def use(self, receivers: Receivers) -> None:
        """Who offers memory; it calls back into this service, so it is made after it."""
        self._receivers = receivers
        self._reports = Reports(self.instance, receivers)

    def pool_status(self) -> PoolStatus:
        """Prefill has no quarantine: nobody writes here."""
        pages, slots = self._engine.pages, self._metadata
        live = len(self._rooms) + len(self._offered)
        return PoolStatus(pages.num_pages, pages.num_free, 0, slots.num_slots, slots.free_slots, 0, live)

    def quarantined(self) -> tuple[Held, ...]:
        return ()

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
        self._start(leg, parent)

    def _start(self, leg: GenerationRequest, parent: Context, refusal: Coroutine[Any, Any, None] | None = None) -> None:
        number = leg.room
        trace = RoomTrace(SpanName.PREFILL, number, parent, prompt_tokens=len(leg.prompt), rid=leg.rid)
        room = self._rooms[number] = _Room(leg, trace, asyncio.get_running_loop().create_future())
        offered = self._offered.pop(number, None)
        if offered is not None:
            room.destination.set_result(offered)
        room.task = RoomTask(refusal or self._hand_off(room), lambda error: self._conclude(room, error))

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
        room = self._rooms.get(number)
        if known is not None and known.offer is not None:
            return transfer.state
        if room is None:
            self._offered[number] = (destination, receiver)
        elif not room.destination.done():
            room.destination.set_result((destination, receiver))
        return transfer.state

    async def report(self, report: TransferReport) -> Transfer:
        if self.transfers.heard(report.room, report.reporter, report.sequence) and report.state is TransferState.FAILED:
            room = self._rooms.get(report.room)
            if room is not None:
                room.decode_told = True
            self.abandon(report.room, report.failure or TransferFailed("decode gave the room up", room=report.room))
        return self.transfers.get(report.room)

    async def abort(self, room: BootstrapRoom, error: PdError) -> TransferState | None:
        known, offered = self.transfers.find(room), self._offered.get(room)
        if known is None:
            self.transfers.abort(room, error, time.monotonic())
        self.abandon(room, error)
        live = self._rooms.get(room)
        if live is not None and live.task is not None:  # also when its record is gone: what counts is the last write
            await live.task.ended()
        elif offered is not None:
            destination, receiver = offered
            await self._reports.tell_failed(room, receiver, 1, error, destination.offer.ticket)
        ended = self.transfers.find(room)
        return None if known is None or ended is None else ended.state

    def abandon(self, room: BootstrapRoom, error: PdError) -> None:
        self.transfers.fail(room, error, time.monotonic())
        self._offered.pop(room, None)
        self._hub.publish([Output(room, error=error)])
        live = self._rooms.get(room)
        if live is not None and live.task is not None:
            live.task.stop(error)

    def receiver_lost(self, instance: Instance, error: PeerLost) -> None:
        """Ends every room whose pages lie in this process."""
        for transfer in self.transfers.fail_peer(instance, error, time.monotonic()):
            live = self._rooms.get(transfer.room)
            if live is not None:
                live.decode_told = True  # there is nobody left to tell
            self.abandon(transfer.room, error)

    # --- the life of a room ---

    async def _hand_off(self, room: _Room) -> None:
        if is_fake(room.request.bootstrap):
            await self._compute_only(room)
        else:
            await self._meet_and_hand_off(room)
        usage = Usage(len(room.request.prompt), 1)
        self._hub.publish([Output(room.request.room, finish=FinishReason.HANDED_OFF, usage=usage)])

    async def _compute_only(self, room: _Room) -> None:
        """A fake room: what an offer of nothing asks for is computed, and nothing moves."""
        number, now = room.request.room, time.monotonic()
        offer = offer_of_nothing(self.instance, room.request)
        self.transfers.join_offer(number, offer, deadline_s=now + room.request.timeout_s, now=now)
        room.trace.enter(SpanName.COMPUTE_WAIT)
        await self._scheduler.compute_only(Sequence(room.request))
        self.transfers.advance(number, TransferState.SUCCESS, time.monotonic())

    async def _meet_and_hand_off(self, room: _Room) -> None:
        room.trace.enter(SpanName.BOOTSTRAP_WAIT)
        destination, receiver = await room.destination
        room.trace.enter(SpanName.COMPUTE_WAIT)
        room.work = work = await self._begin(room, destination, receiver)
        chunk, metadata = await self._compute_and_send(room, work)
        room.trace.enter(SpanName.COMMIT)
        await self._send(room, work, chunk, metadata)
        await self._agree(room, work)

    async def _begin(self, room: _Room, destination: Destination, receiver: Receiver) -> _Work:
        """Takes a metadata slot and a place in the compute queue."""
        number, offer = room.request.room, destination.offer
        planner = ChunkPlanner(number, offer.prompt_tokens, self._source.page_size, offer.decode_prefix_len)
        await self._free_slots.acquire()
        slot = self._metadata.alloc()
        if slot is None:
            raise InternalError("the semaphore and the metadata slots disagree")
        digest = None if self._new_digest is None else self._new_digest()
        sender = KVSender(number, self._source, destination, self._metadata, slot, digest)
        return _Work(self._scheduler.enqueue(Sequence(room.request)), slot, sender, planner, receiver)

    async def _compute_and_send(self, room: _Room, work: _Work) -> tuple[TransferKVChunk, HandoffMetadata]:
        """Sends every finished chunk while the next is computed; gives the last chunk unsent, with what goes along."""
        try:
            async with asyncio.TaskGroup() as sends:
                return await self._compute(room, work, sends)
        except* PdError as failed:
            raise failed.exceptions[0] from failed

    async def _compute(
        self, room: _Room, work: _Work, sends: asyncio.TaskGroup
    ) -> tuple[TransferKVChunk, HandoffMetadata]:
        while True:
            done = await work.job.next_chunk()
            tokens = done.end - done.start
            room.trace.record(SpanName.CHUNK_COMPUTE, done.began_ns, done.ended_ns, tokens=tokens, end=done.end)
            is_last = done.sampled is not None
            chunk = work.planner.next_chunk(done.end, work.job.sequence.pages, is_last=is_last)
            if chunk is None:
                continue
            if done.sampled is not None:
                covered = len(room.request.prompt)
                return chunk, HandoffMetadata(done.sampled.token_id, covered, logprob=done.sampled.logprob)
            sends.create_task(self._send_and_report(room, work, chunk))

    async def _send_and_report(self, room: _Room, work: _Work, chunk: TransferKVChunk) -> None:
        await self._send(room, work, chunk, None)
        try:
            state, failure = await self._report(room, work.receiver, TransferState.TRANSFERRING, work.sender.progress)
        except (PeerLost, DeadlineExceeded):
            return  # a lost word on progress harms nothing: the last report is repeated until it is answered
        if state is TransferState.FAILED:
            raise self._given_up(room, state, failure)

    async def _send(self, room: _Room, work: _Work, chunk: TransferKVChunk, metadata: HandoffMetadata | None) -> None:
        number, began_ns = room.request.room, now_ns()
        self.transfers.advance(number, TransferState.TRANSFERRING, time.monotonic())
        try:
            receipt = await self._write(work, chunk, metadata)
        except (TransferFailed, PeerLost) as broken:
            # The channel is broken for good: decode has to register again before it can offer pages to this process.
            await self._receivers.drop(work.receiver, broken.message)
            raise
        self.transfers.advance(number, TransferState.TRANSFERRING, time.monotonic(), progress=work.sender.progress)
        room.trace.record(
            SpanName.CHUNK_TRANSFER,
            began_ns,
            now_ns(),
            chunk=chunk.index,
            pages=len(chunk.src_pages),
            descriptors=receipt.descriptors,
            bytes=receipt.bytes,
            gb_per_s=round(receipt.bytes / max(receipt.seconds, 1e-9) / 1e9, 3),
            carrier=work.receiver.channel.carrier,
        )

    async def _write(self, work: _Work, chunk: TransferKVChunk, metadata: HandoffMetadata | None) -> WriteReceipt:
        if metadata is None:
            return await work.sender.send_kv_chunk(chunk)
        return await work.sender.finish(chunk, metadata)

    async def _agree(self, room: _Room, work: _Work) -> None:
        """Success is what decode says after its gate; the report is repeated until there is an answer."""
        while True:
            try:
                state, failure = await self._report(room, work.receiver, TransferState.SUCCESS, work.sender.progress)
            except (PeerLost, DeadlineExceeded):
                await asyncio.sleep(AGAIN_S)
                continue
            if state is TransferState.SUCCESS:
                self.transfers.advance(room.request.room, TransferState.SUCCESS, time.monotonic())
                return
            raise self._given_up(room, state, failure)

    def _given_up(self, room: _Room, state: TransferState, failure: PdError | None) -> PdError:
        room.decode_told = True
        return failure or TransferFailed(f"decode holds the room in state {state.name}", room=room.request.room)

    async def _conclude(self, room: _Room, error: PdError | None) -> None:
        number = room.request.room
        if error is not None:
            self.transfers.fail(number, error, time.monotonic())
            self._hub.publish([Output(number, error=error)])
        await asyncio.gather(self._pass_on(room, error), self._release(room.work))
        room.trace.end(error)
        del self._rooms[number]

    async def _release(self, work: _Work | None) -> None:
        """Waits until nothing is written or read any more, then gives pages and slot back."""
        if work is None:
            return
        await work.sender.abort()
        await self._scheduler.release(work.job)
        self._metadata.free(work.slot)
        self._free_slots.release()

    async def _pass_on(self, room: _Room, error: PdError | None) -> None:
        """Decode learns of a failure from us, unless it knows, or has not been heard of yet."""
        offered = room.destination.done() and not room.destination.cancelled()
        if error is None or room.decode_told or not offered:
            return
        _, receiver = room.destination.result()
        await self._reports.tell_failed(room.request.room, receiver, room.reports + 1, error, room.request.ticket)

    async def _report(
        self, room: _Room, receiver: Receiver, state: TransferState, progress: Progress
    ) -> tuple[TransferState, PdError | None]:
        room.reports += 1
        return await self._reports.say(
            room.request.room, receiver, room.reports, state, progress, ticket=room.request.ticket
        )

    # --- housekeeping ---

    async def reap(self) -> None:
        """Ends what is overdue, by the clock alone (I7); ends only by cancellation."""
        while True:
            now = time.monotonic()
            for transfer in self.transfers.expire(now):
                if transfer.failure is not None:
                    self.abandon(transfer.room, transfer.failure)
            self.transfers.sweep(now)
            await self._receivers.drop_unheld(now)
            await asyncio.sleep(_REAP_S)

    async def close(self, drain_timeout_s: float) -> None:
        """Takes no new room; lets the running ones end for a while, then ends them. Returns when all have concluded."""
        self._stopping = True
        await drain_tasks([room.task for room in self._rooms.values() if room.task is not None], drain_timeout_s)

    def _validated_leg(self, request: GenerationRequest) -> GenerationRequest:
        """Prefill's own leg: one token, whatever the client wants of the answer."""
        validate_request(request, self._engine.limits, holds_answer=False)
        if self._only_fake:
            require_fake(request.bootstrap)
        sampling = replace(request.sampling, max_new_tokens=1)
        return replace(request, sampling=sampling)


async def _refused(error: PdError) -> None:
    raise error
