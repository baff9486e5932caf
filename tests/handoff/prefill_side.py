"""Prefill around the real table, planner and sender. It repeats what must be heard when its clock moves.

What must never happen is asserted where it would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from pd_common.errors import PdError, PeerLost, RoomAborted, RoomUnknown, StaleInstance
from pd_common.handoff.chunk import ChunkPlanner, PoolBuffers
from pd_common.handoff.destination import Destination, Offer, RemotePool
from pd_common.handoff.lockstep import common_state
from pd_common.handoff.metadata import HandoffMetadata, MetadataBuffers, Slot
from pd_common.handoff.sender import KVSender
from pd_common.handoff.state import TransferState
from pd_common.transport.base import Puts, WriteReceipt
from pd_common.types import BootstrapRoom, Instance, Role
from tests.handoff.decode_side import DecodeSide
from tests.handoff.lossy import (
    PAGE_SIZE,
    PAGES,
    PREFILL_SLOTS,
    REQUEST_S,
    RETENTION_S,
    SLOTS,
    Network,
    Write,
)
from tests.handoff.memory import MemoryPool, owned
from tests.handoff.overdue import expire
from tests.handoff.side import Side

S = TransferState


class Link:
    """The way of one room's writes, which are only ever posted into memory that decode has set aside for it (I1)."""

    carrier = "memory"

    def __init__(self, writer: PrefillSide, offer: Offer, decode: DecodeSide, in_flight: list[Write]) -> None:
        self._writer, self._offer, self._decode, self._in_flight = writer, offer, decode, in_flight

    async def write(self, *groups: Puts) -> WriteReceipt:
        if self._writer.dead:
            raise PeerLost("the dead do not write")
        stands = self._decode.lied_to or self._offer in self._decode.set_aside
        assert stands, "a write without an offer that stands (I1)"
        write = Write(self._writer.instance, self._offer, groups, asyncio.get_running_loop().create_future())
        self._in_flight.append(write)
        await write.landed
        return WriteReceipt(sum(group.total_bytes for group in groups), len(groups), 0.0, 0.0)

    async def close(self) -> None:
        return


@dataclass(eq=False)
class Leg:
    """What prefill has of one room besides its record, from the offer to the last quiet write."""

    offer: Offer
    sender: KVSender
    slot: Slot
    planner: ChunkPlanner
    owner: PrefillSide
    computed: int = 0
    reports: int = 0
    written: bool = False
    stopped: bool = False

    @property
    def may_write(self) -> bool:
        return not (self.written or self.stopped or self.owner.dead)


class PrefillSide(Side):
    """Writes what is computed, repeats its last word until it is answered, and is quiet before it says so."""

    role = Role.PREFILL

    def __init__(
        self,
        epoch: int,
        network: Network,
        loop: asyncio.AbstractEventLoop,
        in_flight: list[Write],
        lives: Mapping[Instance, DecodeSide],
        receiver: Instance,
    ) -> None:
        super().__init__(epoch, network, loop)
        self.pool = MemoryPool((8,), PAGES, PAGE_SIZE, seed=1)
        self.rows = MetadataBuffers(PREFILL_SLOTS)
        self.legs: dict[BootstrapRoom, Leg] = {}
        self.untold: dict[BootstrapRoom, tuple[Leg, float]] = {}
        self.in_flight = in_flight
        self.lives = lives
        self.receiver = receiver
        """The life of decode that is registered here; the memory of the others is still where it was."""

    # --- a room's life ---

    def on_request(self, room: BootstrapRoom, _: int, prefill: Instance) -> None:
        if room in self.legs or prefill != self.instance:
            return
        try:
            self.table.join_request(room, rid="r", prompt_digest=b"p", deadline_s=self.now + REQUEST_S, now=self.now)
        except PdError:
            return
        self._begin(room)

    def on_offer(self, room: BootstrapRoom, offer: Offer, time_left_s: float) -> None:
        if offer.receiver.epoch > self.receiver.epoch:  # it registers before it offers
            self.lost(self.receiver)
            self.receiver = offer.receiver
        if offer.receiver != self.receiver or (room in self.legs and self.table.find(room) is None):
            self.send(offer.receiver, "refused", room, offer, StaleInstance("an earlier life"))
            return
        try:
            self.table.join_offer(room, offer, deadline_s=self.now + time_left_s, now=self.now)
        except PdError as error:
            self.send(offer.receiver, "refused", room, offer, error)
            return
        self._begin(room)
        self.send(offer.receiver, "accepted", room, offer, self.instance)

    def _begin(self, room: BootstrapRoom) -> None:
        transfer = self.table.get(room)
        if transfer.state is not S.WAITING_FOR_INPUT or room in self.legs:
            return
        assert transfer.offer is not None, "pages may be sent and nobody has offered any (I1)"
        offer, decode = transfer.offer, self.lives[transfer.offer.receiver]
        pool: PoolBuffers = decode.pool.buffers
        link = Link(self, offer, decode, self.in_flight)
        destination = Destination(offer, RemotePool(pool, decode.rows.region.base, SLOTS), link)
        slot = owned(self.rows)
        sender = KVSender(room, self.pool.buffers, destination, self.rows, slot, None)
        leg = self.legs[room] = Leg(offer, sender, slot, ChunkPlanner(room, offer.prompt_tokens, PAGE_SIZE, 0), self)
        decode.legs_of.setdefault(offer, []).append(leg)

    def compute(self, room: BootstrapRoom, tokens: int) -> None:
        """The next step of the engine: its pages are posted."""
        leg = self.legs[room]
        known = self.table.find(room)
        if leg.computed == leg.offer.prompt_tokens or known is None or known.state.is_final:
            return
        leg.computed = min(leg.computed + tokens, leg.offer.prompt_tokens)
        is_last = leg.computed == leg.offer.prompt_tokens
        chunk = leg.planner.next_chunk(leg.computed, tuple(range(PAGES)), is_last=is_last)
        if chunk is not None:
            token = leg.offer.slot.generation * SLOTS + leg.offer.slot.index
            metadata = HandoffMetadata(token, leg.offer.prompt_tokens)
            sending = leg.sender.finish(chunk, metadata) if is_last else leg.sender.send_kv_chunk(chunk)
            self.start(self._send(room, leg, sending, is_last=is_last))

    async def _send(
        self, room: BootstrapRoom, leg: Leg, sending: Coroutine[Any, Any, WriteReceipt], *, is_last: bool
    ) -> None:
        try:
            await sending
        except PdError as error:
            self.fail(room, error)
            return
        self.table.advance(room, S.TRANSFERRING, self.now, progress=leg.sender.progress)
        leg.written = is_last
        self._report(room, leg, S.SUCCESS if is_last else S.TRANSFERRING)

    def _report(self, room: BootstrapRoom, leg: Leg, state: S) -> None:
        leg.reports += 1
        args = (leg.offer, self.instance, leg.reports, state, leg.sender.progress)
        self.send(leg.offer.receiver, "report", room, *args)

    def on_answer(self, room: BootstrapRoom, call: Offer, state: S) -> None:
        self.untold.pop(room, None)
        leg = self.legs.get(room)
        if leg is None or leg.offer != call:
            return
        common = common_state([state])
        if common is S.SUCCESS and leg.written:
            self.table.advance(room, S.SUCCESS, self.now)
            self.start(self._stop(room, leg))
        elif common is S.FAILED:
            self.fail(room, RoomAborted("decode gave the room up"), told=True)

    def on_unknown(self, room: BootstrapRoom, call: Offer) -> None:
        self.untold.pop(room, None)
        if room in self.legs and self.legs[room].offer == call:
            self.fail(room, RoomUnknown("decode has no such room"), told=True)

    # --- ends ---

    def abort(self, room: BootstrapRoom) -> None:
        """From the client or the router."""
        self.fail(room, RoomAborted("stop"))
        self.table.abort(room, RoomAborted("stop"), self.now)

    def fail(self, room: BootstrapRoom, error: PdError, *, told: bool = False) -> None:
        leg = self.legs.get(room)
        if self.table.fail(room, error, self.now) and not told:
            self.quarrels.add(room)
            if leg is not None:
                self.untold[room] = (leg, self.now + RETENTION_S)
                self._report(room, leg, S.FAILED)
        if leg is not None:
            self.start(self._stop(room, leg))

    async def _stop(self, room: BootstrapRoom, leg: Leg) -> None:
        await leg.sender.abort()
        leg.stopped = True
        if self.legs.get(room) is leg and not self.dead:
            mine = [write for write in self.in_flight if (write.writer, write.offer) == (self.instance, leg.offer)]
            assert not mine, "source pages came back under a write (I3)"
            del self.legs[room]
            self.rows.free(leg.slot)

    def on_abort(self, room: BootstrapRoom, decode: Instance) -> None:
        """Decode gives the room up; the answer is the proof that nothing will be written any more."""
        leg = self.legs.get(room)
        self.fail(room, RoomAborted("decode aborts"), told=True)
        self.table.abort(room, RoomAborted("decode aborts"), self.now)
        assert self.table.get(room).state.is_final, "no tombstone (I4)"
        self.start(self._drain(room, leg, decode))

    async def _drain(self, room: BootstrapRoom, leg: Leg | None, decode: Instance) -> None:
        if leg is not None:
            await self._stop(room, leg)
        self.send(decode, "drained", room, self.instance)

    def lost(self, decode: Instance) -> None:
        for transfer in self.table.fail_peer(decode, PeerLost("gone"), self.now):
            self.quarrels.add(transfer.room)
            if transfer.room in self.legs:
                self.start(self._stop(transfer.room, self.legs[transfer.room]))

    # --- the clock ---

    def tick(self) -> None:
        for transfer in expire(self.table, self.now):
            self.quarrels.add(transfer.room)
            if transfer.room in self.legs:
                self.untold[transfer.room] = (self.legs[transfer.room], self.now + RETENTION_S)
                self.start(self._stop(transfer.room, self.legs[transfer.room]))
        self.sweep()
        for room, leg in self.legs.items():
            if leg.written and self.table.find(room) is not None and not self.table.get(room).state.is_final:
                self._report(room, leg, S.SUCCESS)
        self.untold = {room: (leg, end_s) for room, (leg, end_s) in self.untold.items() if end_s > self.now}
        for room, (leg, _) in self.untold.items():
            self._report(room, leg, S.FAILED)
