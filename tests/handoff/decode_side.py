"""Decode around the real table, receiver and quarantine. It repeats what must be heard when its clock moves.

What must never happen is asserted where it would.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_common.errors import PdError, PeerLost, RoomAborted, RoomUnknown, StaleInstance
from pd_common.handoff.chunk import pages_to_transfer
from pd_common.handoff.destination import Offer
from pd_common.handoff.metadata import MetadataBuffers, Slot
from pd_common.handoff.quarantine import Quarantine, Writer
from pd_common.handoff.receiver import KVReceiver
from pd_common.handoff.state import Progress, TransferState
from pd_common.types import BootstrapRoom, Instance, PageIndices, ProcessProof, Role
from tests.handoff.lossy import (
    HOST,
    PAGE_SIZE,
    PAGES,
    REQUEST_S,
    SLOTS,
    Network,
    Write,
)
from tests.handoff.memory import MemoryPool
from tests.handoff.overdue import expire
from tests.handoff.side import Side

if TYPE_CHECKING:
    from tests.handoff.prefill_side import Leg

S = TransferState


@dataclass
class Held:
    """What decode has of one room besides its record."""

    offer: Offer
    receiver: KVReceiver
    prefill: Instance


class DecodeSide(Side):
    """Offers memory, commits, and asks for the drain of what it gave up until it is answered."""

    role = Role.DECODE

    def __init__(self, epoch: int, network: Network, loop: asyncio.AbstractEventLoop, in_flight: list[Write]) -> None:
        super().__init__(epoch, network, loop)
        self.pool = MemoryPool((8,), PAGES, PAGE_SIZE)
        self.rows = MetadataBuffers(SLOTS)
        self.free = list(range(PAGES))
        self.rooms: dict[BootstrapRoom, Held] = {}
        self.set_aside: set[Offer] = set()
        self.in_flight = in_flight
        self.quarantine = Quarantine(self._release, HOST)
        self.lied_to = False
        self.offers: dict[BootstrapRoom, Offer] = {}
        self.legs_of: dict[Offer, list[Leg]] = {}
        """What prefills have made of an offer: a look from above, that decode itself does not have."""
        self.wants: dict[BootstrapRoom, tuple[Instance, int]] = {}

    # --- a room's life ---

    def on_request(self, room: BootstrapRoom, prompt: int, prefill: Instance) -> None:
        if room in self.quarantine or room in self.rooms:
            return
        try:
            self.table.open(room, rid="r", prompt_digest=b"p", deadline_s=self.now + REQUEST_S, now=self.now)
        except PdError:
            return
        self.wants[room] = (prefill, prompt)
        self.offer_what_fits()

    def offer_what_fits(self) -> None:
        for room, (prefill, prompt) in tuple(self.wants.items()):
            transfer, count = self.table.find(room), pages_to_transfer(prompt, 0, PAGE_SIZE)
            if transfer is None or transfer.state.is_final:
                del self.wants[room]
            elif len(self.free) >= count and (slot := self.rows.alloc()) is not None:
                del self.wants[room]
                self._offer(room, prefill, prompt, slot, tuple(self.free.pop() for _ in range(count)))

    def _offer(self, room: BootstrapRoom, prefill: Instance, prompt: int, slot: Slot, pages: PageIndices) -> None:
        offer = Offer(self.instance, pages, slot, 0, prompt, b"p")
        assert all(slot != other.slot for other in self.set_aside), "two owners of one slot (I6)"
        self.rooms[room] = Held(offer, KVReceiver(room, offer, self.pool.buffers, self.rows, None), prefill)
        self.set_aside.add(offer)
        self.offers[room] = offer
        self.table.advance(room, S.WAITING_FOR_INPUT, self.now)
        self._say_offer(room)

    def _say_offer(self, room: BootstrapRoom) -> None:
        held, deadline_s = self.rooms[room], self.table.get(room).deadline_s
        self.send(held.prefill, "offer", room, held.offer, deadline_s - self.now)

    def on_accepted(self, room: BootstrapRoom, offer: Offer, prefill: Instance) -> None:
        known = self.table.find(room)
        if known is not None and not known.state.is_final and self.offers[room] == offer:
            self.table.advance(room, known.state, self.now, peer=prefill)

    def on_refused(self, room: BootstrapRoom, offer: Offer, error: PdError) -> None:
        if room in self.rooms and self.rooms[room].offer == offer:
            self.fail(room, error)

    def on_report(
        self, room: BootstrapRoom, call: Offer, prefill: Instance, number: int, state: S, progress: Progress
    ) -> None:
        """`call` only ties the answer to its question."""
        try:
            newer = self.table.heard(room, prefill, number)
        except (RoomUnknown, StaleInstance):
            self.send(prefill, "unknown", room, call)
            return
        live = room in self.rooms and not self.table.get(room).state.is_final
        if live and state is S.SUCCESS:
            self._commit(room)
        elif live and newer and state is S.FAILED:
            self.fail(room, RoomAborted("prefill gave the room up"), told=True)
        elif live and newer:
            self.table.advance(room, state, self.now, progress=progress)
        self.send(prefill, "answer", room, call, self.table.get(room).state)

    def _commit(self, room: BootstrapRoom) -> None:
        held = self.rooms[room]
        try:
            metadata = self.loop.run_until_complete(held.receiver.commit())
        except PdError as error:
            self.fail(room, error)
            return
        assert metadata.first_token == held.offer.slot.generation * SLOTS + held.offer.slot.index, "another's row (I6)"
        self.table.advance(room, S.SUCCESS, self.now)
        del self.rooms[room]
        self.finished(held)

    def finished(self, held: Held) -> None:
        """The answer is short: memory goes back at once."""
        self._release(BootstrapRoom(0), held.offer.pages, held.offer.slot)

    # --- ends ---

    def abort(self, room: BootstrapRoom) -> None:
        """From the client or the router."""
        self.fail(room, RoomAborted("stop"))
        self.table.abort(room, RoomAborted("stop"), self.now)

    def fail(self, room: BootstrapRoom, error: PdError, *, told: bool = False) -> None:
        if self.table.fail(room, error, self.now) and not told:
            self.quarrels.add(room)
        self._hold(room)

    def _hold(self, room: BootstrapRoom) -> None:
        held = self.rooms.pop(room, None)
        if held is not None:
            writer = Writer(held.prefill, "", _process(held.prefill))
            self.quarantine.hold(room, [writer], held.offer.pages, held.offer.slot, self.now)
            self.send(held.prefill, "abort", room, self.instance)

    def on_drained(self, room: BootstrapRoom, prefill: Instance) -> None:
        self.quarantine.drained(room, prefill)

    def lost(self, prefill: Instance) -> None:
        for transfer in self.table.fail_peer(prefill, PeerLost("gone"), self.now):
            self.quarrels.add(transfer.room)
            self._hold(transfer.room)
        for room in [room for room, held in self.rooms.items() if held.prefill == prefill]:
            self.fail(room, PeerLost("gone"))

    def _release(self, _: BootstrapRoom, pages: PageIndices, slot: Slot) -> None:
        (offer,) = (offer for offer in self.set_aside if offer.slot == slot)
        assert offer.pages == pages
        if not self.lied_to:
            assert all(write.offer != offer for write in self.in_flight), "memory came back under a write (I2)"
            assert not any(leg.may_write for leg in self.legs_of.get(offer, ())), (
                "it came back before its writer is quiet"
            )
        self.set_aside.remove(offer)
        self.free.extend(pages)
        self.rows.free(slot)

    # --- the clock ---

    def tick(self) -> None:
        for transfer in expire(self.table, self.now):
            self.quarrels.add(transfer.room)
            self._hold(transfer.room)
        self.sweep()
        self.offer_what_fits()
        for room in self.rooms:
            if self.table.get(room).peer is None:
                self._say_offer(room)
        for kept in self.quarantine.held:
            for writer in kept.missing:
                self.send(writer.instance, "abort", kept.room, self.instance)


def _process(instance: Instance) -> ProcessProof:
    return ProcessProof(HOST, instance.epoch, 1)
