"""All rooms of one decode rank: what comes in about them, and how each is served and concluded."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

from opentelemetry.context import Context

from pd_common.aio import RoomTask
from pd_common.control.outputs import OutputHub
from pd_common.control.peers import Peer
from pd_common.control.room_keeper import RoomKeeper
from pd_common.control.rooms import PoolStatus, TransferReport
from pd_common.control.waiting import WaitingLimits
from pd_common.engine.engine import Engine
from pd_common.engine.request import Sequence
from pd_common.errors import DeadlineExceeded, PdError, PeerLost, RoomAborted, RoomInUse, ShuttingDown, TransferFailed
from pd_common.generation import GenerationRequest
from pd_common.handoff.digest import digest_prompt
from pd_common.handoff.quarantine import Held
from pd_common.handoff.state import Transfer, TransferState
from pd_common.handoff.table import TransferTable
from pd_common.telemetry.spans import SpanName
from pd_common.telemetry.tracing import Tracing
from pd_common.transport.fake import is_fake
from pd_common.types import BootstrapRoom, Instance
from services.decode.answering import Answering
from services.decode.drain import Drain
from services.decode.fake import made_up, unfindable
from services.decode.handoff import Handoff
from services.decode.host_copies import HostCopies
from services.decode.inquiry import SILENT_S, Inquiry
from services.decode.memory import DecodeMemory
from services.decode.pairing import Prefill
from services.decode.prefills import Prefills
from services.decode.queues import PreallocQueue
from services.decode.rooms import Room, set_memory_aside

_LOOK_AGAIN_S = 0.01
"""Until a lost prefill is offered nothing any more: its rooms end, or take their offers back, within a few turns."""

_Work = Coroutine[Any, Any, None]


class DecodeService(RoomKeeper[Room]):
    """All rooms of one decode rank. Memory that was offered and not committed is freed by the drain alone (I2)."""

    def __init__(
        self,
        instance: Instance,
        engine: Engine,
        memory: DecodeMemory,
        queue: PreallocQueue,
        handoff: Handoff,
        answering: Answering,
        drain: Drain,
        copies: HostCopies,
        transfers: TransferTable,
        hub: OutputHub,
        limits: WaitingLimits,
        tracing: Tracing,
    ) -> None:
        super().__init__(instance, transfers, hub, limits)
        self._tracing = tracing
        self._engine = engine
        self._memory = memory
        self._queue = queue
        self._handoff = handoff
        self._answering = answering
        self._drain = drain
        self._copies = copies
        self._inquiry = Inquiry(instance, self._tasks, self._gone)
        self._inquiry_due_s = 0.0

    def use(self, prefills: Prefills) -> None:
        """Where to pair; it calls back into this service, so it is made after it."""
        self._prefills = prefills
        self._handoff.use(prefills)

    def pool_status(self) -> PoolStatus:
        memory, quarantine, pages_free = self._memory, self._drain.quarantine, self._engine.pages.num_free
        return PoolStatus(
            pages_total=memory.pages_total,
            pages_free=pages_free,
            pages_quarantined=quarantine.held_pages,
            slots_total=memory.slots_total,
            slots_free=memory.slots_free,
            slots_quarantined=quarantine.held_slots,
            live_rooms=len(self._rooms),
            pages_cached=memory.pages_available - pages_free,
            requests_queued=len(self._waiting()),
            requests_retracted=self._queue.returning,
            pages_on_host=self._copies.pages_held,
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
        if is_fake(request.bootstrap):
            request = unfindable(request)
        self.transfers.refuse_known(request.room)  # before it takes another's place
        self._make_way(request)
        self.open(request, Sequence(request), SpanName.DECODE, parent, self._serve)

    def open(
        self,
        request: GenerationRequest,
        sequence: Sequence,
        span: SpanName,
        parent: Context,
        serve: Callable[[Room], _Work],
    ) -> Room:
        """Puts a room on record and begins to serve it.

        Raises:
            RoomInUse, RoomAborted: as the table's `open`.
        """
        now = time.monotonic()
        deadline_s, digest = now + request.timeout_s, digest_prompt(request.prompt)
        self.transfers.open(request.room, rid=request.rid, prompt_digest=digest, deadline_s=deadline_s, now=now)
        trace = self._tracing.begin(span, request.room, parent, prompt_tokens=len(request.prompt), rid=request.rid)
        written = asyncio.get_running_loop().create_future()
        room = Room(request, sequence, digest, deadline_s, trace, written, asyncio.Event())
        self._rooms[request.room] = room
        name = f"room {request.room}"
        room.task = RoomTask(self._tasks, name, serve(room), lambda error: self._conclude(room, error))
        return room

    async def report(self, report: TransferReport) -> Transfer:
        newer = self.transfers.heard(report.room, report.reporter, report.sequence)
        room = self._rooms.get(report.room)
        if room is not None and report.state is TransferState.SUCCESS:
            if not room.written.done():
                room.written.set_result(None)
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
        """Returns when this lost process can write nothing here: no room is offered to it, and its proofs are given.

        A room whose offer it has refused may be among those that wait for this.
        """
        while self._is_offered_to(instance):  # noqa: ASYNC110  a room ends, or its offer was refused
            await asyncio.sleep(_LOOK_AGAIN_S)
        await self._drain.proven(instance)

    def _is_offered_to(self, instance: Instance) -> bool:
        offered = (room.offered_to for room in self._rooms.values())
        return any(prefill is not None and prefill.instance == instance for prefill in offered)

    # --- the life of a room ---

    async def _serve(self, room: Room) -> None:
        bootstrap = room.request.bootstrap
        if bootstrap is None:
            await self._serve_alone(room)
        elif is_fake(bootstrap):
            await self._serve_fake(room)
        else:
            await self._answering.go_on(room, await self._handoff.receive(room, bootstrap))

    async def _serve_alone(self, room: Room) -> None:
        """Nothing is handed over. The last token of a prompt is computed in any case: the answer follows from it."""
        await set_memory_aside(room, self._queue, len(room.request.prompt) - 1, slot=False)
        self._nothing_to_wait_for(room)
        await self._answering.alone(room)

    async def _serve_fake(self, room: Room) -> None:
        """Nobody writes these pages, and the room is told to nobody."""
        await set_memory_aside(room, self._queue, 0, slot=False)
        metadata = await made_up(self._engine, room.request, room.sequence.pages)
        room.sequence.computed = metadata.covered_tokens
        self._nothing_to_wait_for(room)
        await self._answering.go_on(room, metadata)

    def _nothing_to_wait_for(self, room: Room) -> None:
        for state in (TransferState.WAITING_FOR_INPUT, TransferState.SUCCESS):
            self.transfers.advance(room.number, state, time.monotonic())
        room.concluded.set()

    async def _conclude(self, room: Room, error: PdError | None) -> None:
        number = room.number
        if error is not None:
            room.trace.abort(error)
            self._fail(number, error)
            if room.prefill is not None and room.offered_to is None and not room.concluded.is_set():
                self._drain.give_up(number, room.prefill, error, room.request.ticket, room.deadline_s)
        room.concluded.set()
        await self._answering.leave(room)
        if room.receiver is not None:
            await room.receiver.quiet()
        del self._rooms[number]
        self._give_back(room)
        room.trace.end(error)

    def _give_back(self, room: Room) -> None:
        if room.allocation is None:
            return
        if room.offered_to is None:
            self._queue.release(room.allocation)
        else:
            pages, slot = self._queue.detach(room.allocation)
            self._drain.hold(room.number, room.offered_to, pages, slot, room.request.ticket, room.trace)

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
