"""The life of a room on decode: pair with prefill, set memory aside, offer it, check what arrived, write the answer."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from opentelemetry.context import Context

from pd_common.aio import RoomTask
from pd_common.control.outputs import OutputHub
from pd_common.control.peers import Peer
from pd_common.control.room_keeper import RoomKeeper
from pd_common.control.rooms import PoolStatus, TransferReport
from pd_common.engine.engine import Engine
from pd_common.engine.request import Sequence
from pd_common.errors import (
    DeadlineExceeded,
    PdError,
    PeerLost,
    ReceiverUnknown,
    RoomAborted,
    RoomInUse,
    ShuttingDown,
    StaleInstance,
    TransferFailed,
)
from pd_common.generation import GenerationRequest
from pd_common.handoff.chunk import PoolBuffers
from pd_common.handoff.destination import Offer
from pd_common.handoff.digest import PageDigest, digest_prompt
from pd_common.handoff.metadata import HandoffMetadata, MetadataBuffers
from pd_common.handoff.quarantine import Held
from pd_common.handoff.receiver import KVReceiver
from pd_common.handoff.state import Progress, Transfer, TransferState
from pd_common.handoff.table import TransferTable
from pd_common.telemetry.spans import RoomTrace, SpanName
from pd_common.transport.fake import is_fake
from pd_common.types import BootstrapRoom, Instance
from services.decode.drain import Drain
from services.decode.fake import made_up
from services.decode.gate import agreed
from services.decode.inquiry import SILENT_S, Inquiry
from services.decode.offering import publish
from services.decode.pairing import Prefill
from services.decode.prefills import Prefills
from services.decode.queues import Allocation, PreallocQueue
from services.decode.scheduler import Answer, DecodeScheduler


@dataclass(slots=True, eq=False)
class _Room:
    """A request that is being served, and what it holds.

    `offered_to` is set as soon as a prefill may know the pages; from then on only the drain gives them back, or the
    commit makes them this room's alone; `receiver` goes with it. `concluded` tells the prefill's report how the commit
    went.
    """

    request: GenerationRequest
    prompt_digest: bytes
    deadline_s: float
    trace: RoomTrace
    reported: asyncio.Future[Progress]
    concluded: asyncio.Event
    task: RoomTask | None = None
    prefill: Prefill | None = None
    allocation: Allocation | None = None
    offered_to: Prefill | None = None
    receiver: KVReceiver | None = None
    answer: Answer | None = None


class DecodeService(RoomKeeper[_Room]):
    """All rooms of one decode rank. Memory that was offered and not committed is freed by the drain alone (I2)."""

    def __init__(
        self,
        instance: Instance,
        engine: Engine,
        scheduler: DecodeScheduler,
        prealloc: PreallocQueue,
        drain: Drain,
        pool: PoolBuffers,
        metadata: MetadataBuffers,
        transfers: TransferTable,
        hub: OutputHub,
        *,
        new_digest: Callable[[], PageDigest] | None,
        handshake_only: bool = False,
    ) -> None:
        super().__init__(instance, transfers, hub)
        self._engine = engine
        self._scheduler = scheduler
        self._pool = pool
        self._metadata = metadata
        self._new_digest = new_digest
        self._handshake_only = handshake_only
        self._prealloc = prealloc
        self._drain = drain
        self._inquiry = Inquiry(instance, self._tasks, self._gone)
        self._inquiry_due_s = 0.0

    def use(self, prefills: Prefills) -> None:
        """Where to pair; it calls back into this service, so it is made after it."""
        self._prefills = prefills

    def pool_status(self) -> PoolStatus:
        pages, slots, quarantine = self._engine.pages, self._metadata, self._drain.quarantine
        return PoolStatus(
            pages.num_pages,
            pages.num_free,
            quarantine.held_pages,
            slots.num_slots,
            slots.free_slots,
            quarantine.held_slots,
            len(self._rooms),
        )

    def quarantined(self) -> tuple[Held, ...]:
        return self._drain.quarantine.held

    def peers(self) -> tuple[Peer, ...]:
        return self._prefills.peers(self.transfers.live())

    # --- what comes in ---

    def submit(self, request: GenerationRequest, parent: Context) -> None:
        if self._stopping:
            raise ShuttingDown("this decode is stopping and takes no new request")
        self._engine.validate(request)
        if request.room in self._drain.quarantine:
            raise RoomAborted(f"room {request.room} failed and its memory is not proven quiet", room=request.room)
        if request.room in self._rooms and self.transfers.find(request.room) is None:  # its answer outlives its record
            raise RoomInUse(f"room {request.room} has not ended yet", room=request.room)
        now = time.monotonic()
        deadline_s, digest = now + request.timeout_s, digest_prompt(request.prompt)
        self.transfers.open(request.room, rid=request.rid, prompt_digest=digest, deadline_s=deadline_s, now=now)
        trace = RoomTrace(SpanName.DECODE, request.room, parent, prompt_tokens=len(request.prompt), rid=request.rid)
        reported = asyncio.get_running_loop().create_future()
        room = _Room(request, digest, deadline_s, trace, reported, asyncio.Event())
        self._rooms[request.room] = room
        work, name = self._serve(room), f"room {request.room}"
        room.task = RoomTask(self._tasks, name, work, lambda error: self._conclude(room, error))

    async def report(self, report: TransferReport) -> Transfer:
        newer = self.transfers.heard(report.room, report.reporter, report.sequence)
        room = self._rooms.get(report.room)
        if room is not None and report.state is TransferState.SUCCESS:
            if not room.reported.done():
                room.reported.set_result(report.progress)
            await room.concluded.wait()
        elif newer and report.state is TransferState.FAILED:
            self.abandon(report.room, report.failure or TransferFailed("prefill gave the room up", room=report.room))
        elif newer:
            if room is not None and room.receiver is not None:
                room.receiver.pages_complete(report.progress.pages_done)
                if room.offered_to is not None:
                    room.offered_to.page_came()
            self.transfers.advance(report.room, report.state, time.monotonic(), progress=report.progress)
        return self.transfers.get(report.room)

    async def abort(self, room: BootstrapRoom, error: PdError) -> TransferState | None:
        """This side writes to nobody, so it is quiet at once."""
        known = self.transfers.find(room)
        if known is None and room not in self._rooms:
            self.transfers.abort(room, error, time.monotonic())
            return None
        self.abandon(room, error)
        return None if known is None else self.transfers.get(room).state

    def abandon(self, room: BootstrapRoom, error: PdError) -> None:
        self._fail(room, error)
        self._stop(room, error)

    def prefill_lost(self, prefill: Prefill, error: PeerLost) -> None:
        """Ends every room that waits for this process; answers that are being written go on."""
        for transfer in self.transfers.fail_peer(prefill.instance, error, time.monotonic()):
            self.abandon(transfer.room, error)

    async def proven(self, instance: Instance) -> None:
        """Returns when this lost process can write nothing here: the rooms offered to it are over, its proofs given."""
        for room in tuple(self._rooms.values()):
            if room.task is not None and room.offered_to is not None and room.offered_to.instance == instance:
                await room.task.ended()
        await self._drain.proven(instance)

    # --- the life of a room ---

    async def _serve(self, room: _Room) -> None:
        receive = self._make_up if is_fake(room.request.bootstrap) else self._receive
        allocation, metadata = await receive(room)
        room.trace.enter(SpanName.FIRST_TOKEN)
        await self._write_answer(room, allocation, metadata)

    async def _make_up(self, room: _Room) -> tuple[Allocation, HandoffMetadata]:
        """A fake room: nobody writes it, and it is told to nobody."""
        request = room.request
        room.trace.enter(SpanName.PREALLOC_WAIT)
        room.allocation = allocation = await self._prealloc.acquire(self._pages_for(request))
        room.trace.enter(SpanName.ALLOCATE, pages=len(allocation.pages))
        metadata = await made_up(self._engine, request, allocation.pages)
        for state in (TransferState.WAITING_FOR_INPUT, TransferState.SUCCESS):
            self.transfers.advance(request.room, state, time.monotonic())
        room.concluded.set()
        return allocation, metadata

    async def _receive(self, room: _Room) -> tuple[Allocation, HandoffMetadata]:
        request, trace = room.request, room.trace
        trace.enter(SpanName.PEERING)
        room.prefill = await self._prefills.pair_with(request.bootstrap, request.room)
        trace.enter(SpanName.PREALLOC_WAIT)
        room.allocation = allocation = await self._prealloc.acquire(self._pages_for(request))
        trace.enter(SpanName.ALLOCATE, pages=len(allocation.pages))
        receiver = await self._offer(room, allocation)
        trace.enter(SpanName.TRANSFER_WAIT)
        progress = await room.reported
        trace.enter(SpanName.GATE)
        return allocation, await self._commit(room, receiver, allocation, progress)

    async def _offer(self, room: _Room, allocation: Allocation) -> KVReceiver:
        """Publishes the prompt's pages. A prefill that has restarted, or forgotten this decode, is paired anew once."""
        request, prefill = room.request, room.prefill
        if prefill is None or not self._prefills.is_current(prefill):
            prefill = await self._prefills.pair_with(request.bootstrap, request.room)
        try:
            return await self._offer_to(room, prefill, allocation)
        except (StaleInstance, ReceiverUnknown) as refused:
            # Refused before anything could be written: these pages are known to nobody.
            room.offered_to = None
            await self._prefills.forget(prefill, refused.message)
        prefill = await self._prefills.pair_with(request.bootstrap, request.room)
        return await self._offer_to(room, prefill, allocation)

    async def _offer_to(self, room: _Room, prefill: Prefill, allocation: Allocation) -> KVReceiver:
        request = room.request
        offer = Offer(
            receiver=self.instance,
            pages=allocation.pages[: -(-len(request.prompt) // self._pool.page_size)],
            slot=allocation.slot,
            decode_prefix_len=0,
            prompt_tokens=len(request.prompt),
            prompt_digest=room.prompt_digest,
            ticket=request.ticket,
        )
        digest = None if self._new_digest is None else self._new_digest()
        room.receiver = receiver = KVReceiver(request.room, offer, self._pool, self._metadata, digest)
        room.offered_to = prefill
        # Before the call, whose answer a report may overtake; whose room it is, is settled once the offer is accepted.
        self.transfers.advance(request.room, TransferState.WAITING_FOR_INPUT, time.monotonic())
        await publish(self._prefills, prefill, request.room, offer, room.deadline_s, room.trace.context)
        known = self.transfers.get(request.room)
        if known.failure is not None:
            raise known.failure
        if not self._prefills.is_current(prefill):  # lost before its rooms could be told apart from others
            raise PeerLost(f"prefill {prefill.address.target} is gone", peer=prefill.address.target)
        self.transfers.advance(request.room, known.state, time.monotonic(), peer=prefill.instance)
        return receiver

    async def _commit(
        self, room: _Room, receiver: KVReceiver, allocation: Allocation, progress: Progress
    ) -> HandoffMetadata:
        """Only what passes the gate and the digest is a success; then slot and pages are this room's alone."""
        if self._handshake_only:
            metadata = await made_up(self._engine, room.request, allocation.pages)
        else:
            metadata = await agreed(receiver)
        now = time.monotonic()
        if not self.transfers.advance(room.request.room, TransferState.SUCCESS, now, progress=progress):
            raise RoomAborted("The room ended while its pages were checked", room=room.request.room)
        if room.offered_to is not None:
            room.offered_to.page_came()
        room.offered_to = None
        room.concluded.set()
        return metadata

    async def _write_answer(self, room: _Room, allocation: Allocation, metadata: HandoffMetadata) -> None:
        request = room.request
        sequence = Sequence(request)
        sequence.pages = list(allocation.pages)
        sequence.computed = metadata.covered_tokens
        sequence.append(metadata.first_token)
        builder = self._engine.new_answer(request, metadata.cached_tokens.total)
        piece = builder.accept(metadata.first_token, metadata.logprob)
        self._hub.publish([piece])
        if piece.is_last:
            return
        stage = room.trace.enter(SpanName.DECODE_STEPS)
        room.answer = self._scheduler.start(sequence, builder)
        await room.answer.finished
        stage.set_attribute("tokens", len(sequence.output) - 1)

    async def _conclude(self, room: _Room, error: PdError | None) -> None:
        number = room.request.room
        if error is not None:
            self._fail(number, error)
            if room.prefill is not None and room.offered_to is None and not room.concluded.is_set():
                self._drain.give_up(number, room.prefill, error, room.request.ticket, room.deadline_s)
        room.concluded.set()
        if room.answer is not None:
            await self._scheduler.leave(room.answer)
        if room.receiver is not None:
            await room.receiver.quiet()
        del self._rooms[number]
        if room.allocation is not None:
            self._give_back(room, room.allocation)
        room.trace.end(error)

    def _give_back(self, room: _Room, allocation: Allocation) -> None:
        if room.offered_to is None:
            self._prealloc.release(allocation)
        else:
            self._drain.hold(room.request.room, room.offered_to, allocation, room.request.ticket)

    def _pages_for(self, request: GenerationRequest) -> int:
        """Enough for the prompt and all of the answer but its last token, whose KV nobody needs."""
        tokens = len(request.prompt) + request.sampling.max_new_tokens - 1
        return -(-tokens // self._pool.page_size)

    # --- housekeeping ---

    async def tend(self, now: float) -> None:
        for number in [number for number, room in self._rooms.items() if room.deadline_s <= now]:
            # For the table a room has ended with the handoff; its answer is still to be in time.
            self.abandon(number, DeadlineExceeded("The deadline passed while the answer was written", room=number))
        if self._inquiry_due_s <= now:
            self._inquiry_due_s = now + SILENT_S
            self._inquiry.ask(self._silent(now))

    def _silent(self, now: float) -> dict[Prefill, list[BootstrapRoom]]:
        """Rooms whose offer was taken and that nothing was heard of for a while, by prefill."""
        silent = defaultdict[Prefill, list[BootstrapRoom]](list)
        for number, room in self._rooms.items():
            known = self.transfers.find(number)
            if room.offered_to is None or known is None or known.peer is None or known.state.is_final:
                continue
            if known.updated_s + SILENT_S <= now:
                silent[room.offered_to].append(number)
        return silent

    def _gone(self, prefill: Prefill, number: BootstrapRoom, error: PdError) -> None:
        """Prefill has given the room up; its report was lost."""
        known = self.transfers.find(number)
        if known is not None and known.peer == prefill.instance and not known.state.is_final:
            self.abandon(number, error)
