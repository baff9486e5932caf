"""All rooms of one rank: who may open, join, advance, fail and forget them. Sans-I/O; the caller brings the clock.

A finished room stays on record for a while: that record is the tombstone that keeps the room from being revived (I4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import Final, TypedDict, Unpack

from pd_common.errors import (
    AllocationConflict,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PdError,
    PromptMismatch,
    RoomAborted,
    RoomInUse,
    RoomUnknown,
    StaleInstance,
)
from pd_common.handoff.deadlines import Agenda, Timeouts
from pd_common.handoff.destination import Offer
from pd_common.handoff.state import ALLOWED, Progress, Transfer, TransferState, Transition
from pd_common.types import MAX_ROOM, BootstrapRoom, Instance, Role

_NO_PROGRESS: Final = Progress()


class _Changes(TypedDict, total=False):
    """What else a change of a record may bring."""

    rid: str
    prompt_digest: bytes
    deadline_s: float
    offer: Offer
    peer: Instance | None
    progress: Progress
    failure: PdError


class TransferTable:
    """Rooms by number. States move forward only; a message that is late, repeated or backward changes nothing (I4).

    Finished rooms are kept for `retention_s` seconds, at most `max_finished` of them. `listeners` are called with the
    new record after each change. All records are ordered by their last change: a watcher can resume from a sequence.
    Changes are numbered from above `sequence`: a process that restarts gives one that its earlier lives did not reach.
    """

    def __init__(
        self, role: Role, retention_s: float, max_finished: int, timeouts: Timeouts, *, sequence: int = 0
    ) -> None:
        self.listeners: list[Callable[[Transfer], None]] = []
        self._role = role
        self._retention_s = retention_s
        self._max_finished = max_finished
        self._timeouts = timeouts
        self._sequence = sequence
        self._forgotten = sequence
        self._by_change: dict[BootstrapRoom, Transfer] = {}
        self._finished: dict[BootstrapRoom, None] = {}
        self._heard: dict[BootstrapRoom, int] = {}
        self._agenda = Agenda(timeouts)

    # --- opening: decode opens; on prefill request and offer join in either order ---

    def open(self, room: BootstrapRoom, *, rid: str, prompt_digest: bytes, deadline_s: float, now: float) -> Transfer:
        """Puts a request's room on record in BOOTSTRAPPING.

        Raises:
            RoomInUse: the room is live or has succeeded.
            RoomAborted: the room has failed, perhaps before its request arrived.

        """
        self.refuse_known(room)
        fresh = self._fresh(room, deadline_s, now)
        return self._put(fresh, TransferState.BOOTSTRAPPING, now, rid=rid, prompt_digest=prompt_digest)

    def join_request(
        self, room: BootstrapRoom, *, rid: str, prompt_digest: bytes, deadline_s: float, now: float
    ) -> Transfer:
        """Prefill's own leg of the room. With the offer there already the room is WAITING_FOR_INPUT.

        Raises:
            RoomInUse, RoomAborted: as for `open`.
            PromptMismatch: the offer was made for another prompt; the room fails.

        """
        known = self.find(room)
        if known is None or known.state.is_final or known.rid is not None:
            return self.open(room, rid=rid, prompt_digest=prompt_digest, deadline_s=deadline_s, now=now)
        self._require_same_prompt(room, prompt_digest, known.prompt_digest, now)
        earlier_s = min(deadline_s, known.deadline_s)
        return self._put(known, TransferState.WAITING_FOR_INPUT, now, rid=rid, deadline_s=earlier_s)

    def join_offer(self, room: BootstrapRoom, offer: Offer, *, deadline_s: float, now: float) -> Transfer:
        """Decode's leg of the room, on prefill. With the request there already the room is WAITING_FOR_INPUT.

        The same offer again changes nothing, whatever the room's state: its record is the answer.

        Raises:
            RoomAborted: the room has failed.
            StaleInstance: the offer comes from an earlier life of the receiver.
            AllocationConflict: the room has another offer.
            PromptMismatch: the request has another prompt; the room fails.

        """
        known = self.find(room)
        if known is None:
            fresh, prompt = self._fresh(room, deadline_s, now), offer.prompt_digest
            heard = TransferState.BOOTSTRAPPING
            return self._put(fresh, heard, now, offer=offer, peer=offer.receiver, prompt_digest=prompt)
        if known.state is TransferState.FAILED:
            raise _aborted(known)
        if known.offer is not None:
            _require_same_offer(room, known.offer, offer)
            return known
        self._require_same_prompt(room, offer.prompt_digest, known.prompt_digest, now)
        earlier_s = min(deadline_s, known.deadline_s)
        met = TransferState.WAITING_FOR_INPUT
        return self._put(known, met, now, offer=offer, peer=offer.receiver, deadline_s=earlier_s)

    # --- moving ---

    def advance(
        self,
        room: BootstrapRoom,
        to: TransferState,
        now: float,
        *,
        progress: Progress = _NO_PROGRESS,
        peer: Instance | None = None,
    ) -> bool:
        """Moves a room forward, or notes progress in the state it is in. False when that changes nothing.

        A room that is unknown, finished or further already is left alone. `peer` names the other side once known.

        Raises:
            InvalidRequest: the step is forward but skips one that must come first (I1); on prefill only the joining of
                request and offer leads out of BOOTSTRAPPING.
            StaleInstance: the room belongs to another `peer`.

        """
        if to is TransferState.FAILED:
            raise InternalError("A room fails with a reason", room=room)
        known = self.find(room)
        if known is None or known.state.is_final or to < known.state:
            return False
        if peer is not None and known.peer not in (None, peer):
            raise StaleInstance("The room belongs to another process", expected=known.peer, got=peer, room=room)
        joining = self._role is Role.PREFILL and known.state is TransferState.BOOTSTRAPPING
        if to is not known.state and (joining or to not in ALLOWED[known.state]):
            raise InvalidRequest(f"A room does not go from {known.state.name} to {to.name}", room=room, field="state")
        merged = known.progress.merged(progress)
        if to is known.state and merged == known.progress and peer in (None, known.peer):
            return False
        self._put(known, to, now, progress=merged, peer=peer or known.peer)
        return True

    def heard(self, room: BootstrapRoom, reporter: Instance, sequence: int) -> bool:
        """Notes the number of a peer's report; False when it is not newer than the last one, or the room is finished.

        Raises:
            RoomUnknown: no record of this room.
            StaleInstance: the report is not from the room's peer.

        """
        known = self.get(room)
        if known.peer is not None and known.peer != reporter:
            raise StaleInstance("The report is not from this room's peer", expected=known.peer, got=reporter, room=room)
        if known.state.is_final or sequence <= self._heard.get(room, 0):
            return False
        self._heard[room] = sequence
        return True

    def fail(self, room: BootstrapRoom, error: PdError, now: float) -> bool:
        """Ends a live room; False when the room is unknown or finished."""
        known = self.find(room)
        if known is None or known.state.is_final:
            return False
        self._put(known, TransferState.FAILED, now, failure=error)
        return True

    def abort(self, room: BootstrapRoom, error: PdError, now: float) -> bool:
        """Like `fail`, but a room that is not known yet is remembered as failed: its request will be refused."""
        if self.find(room) is not None:
            return self.fail(room, error, now)
        self._put(self._fresh(room, now, now), TransferState.FAILED, now, failure=error)
        return True

    def fail_peer(self, peer: Instance, error: PdError, now: float) -> list[Transfer]:
        """Ends every live room of one life of one process; returns them as they are now."""
        lost = [transfer.room for transfer in self.live() if transfer.peer == peer]
        for room in lost:
            self.fail(room, error, now)
        return [self._by_change[room] for room in lost]

    # --- time ---

    def overdue(self, now: float) -> dict[BootstrapRoom, DeadlineExceeded]:
        """Rooms whose deadline or whose state's limit has passed (I7), and which it was: the caller ends them."""
        found = {}
        while (first := self._agenda.first(self.find)) is not None and first[0] <= now:
            self._agenda.drop_first()
            found[first[1]] = self._timeouts.exceeded(self._by_change[first[1]])
        return found

    def sweep(self, now: float) -> list[BootstrapRoom]:
        """Forgets finished rooms: those past their retention, and the oldest beyond `max_finished`."""
        surplus = len(self._finished) - self._max_finished
        old = []
        for place, room in enumerate(self._finished):
            if place >= surplus and self._by_change[room].updated_s + self._retention_s > now:
                break
            old.append(room)
        for room in old:
            self._forgotten = self._by_change[room].sequence
            del self._finished[room], self._by_change[room]
            self._heard.pop(room, None)
        return old

    # --- reading ---

    def find(self, room: BootstrapRoom) -> Transfer | None:
        """The record, or None."""
        return self._by_change.get(room)

    def get(self, room: BootstrapRoom) -> Transfer:
        """The record.

        Raises:
            RoomUnknown: there is none.

        """
        known = self.find(room)
        if known is None:
            raise RoomUnknown(f"Room {room} is not on record", room=room)
        return known

    def live(self) -> list[Transfer]:
        """Rooms that have not ended, oldest change first."""
        return [transfer for transfer in self._by_change.values() if not transfer.state.is_final]

    @property
    def sequence(self) -> int:
        """Number of the latest change; 0 when there was none."""
        return self._sequence

    def require_resumable(self, sequence: int) -> None:
        """A watcher that has seen every change up to `sequence` will miss no room; 0 is one that has seen nothing.

        Raises:
            InvalidRequest: the number is from another life of this process, or rooms that changed later are forgotten.

        """
        if sequence and not self._forgotten <= sequence <= self._sequence:
            raise InvalidRequest(
                "Not every change after this number is on record here: start again with 0",
                field="after_sequence",
                oldest=self._forgotten,
                latest=self._sequence,
            )

    def changes_since(self, sequence: int) -> list[Transfer]:
        """Rooms on record that changed after `sequence`, as they are now, oldest change first."""
        newer = takewhile(lambda transfer: transfer.sequence > sequence, reversed(self._by_change.values()))
        return list(newer)[::-1]

    def select(
        self,
        *,
        states: frozenset[TransferState] = frozenset(TransferState),
        peer_instance_id: str | None = None,
        created_until_s: float = math.inf,
        after_sequence: int = 0,
    ) -> list[Transfer]:
        """Rooms that match every filter, oldest change first; the last one's sequence is where the next page starts."""
        return [
            transfer
            for transfer in self.changes_since(after_sequence)
            if transfer.state in states
            and transfer.created_s <= created_until_s
            and peer_instance_id in (None, transfer.peer and transfer.peer.instance_id)
        ]

    # --- records ---

    def refuse_known(self, room: BootstrapRoom) -> None:
        """Raises as `open` does for a room that is on record."""
        known = self.find(room)
        if known is None:
            return
        if known.state is TransferState.FAILED:
            raise _aborted(known)
        raise RoomInUse(f"Room {room} is in use, or was until a moment ago", room=room, state=known.state.name)

    def _require_same_prompt(self, room: BootstrapRoom, mine: bytes, theirs: bytes | None, now: float) -> None:
        if mine != theirs:
            error = PromptMismatch("The two legs of the room have different prompts", room=room)
            self.fail(room, error, now)
            raise error

    def _fresh(self, room: BootstrapRoom, deadline_s: float, now: float) -> Transfer:
        if not 0 < room <= MAX_ROOM:
            raise InvalidRequest("A room is a non-zero unsigned 64-bit integer", field="bootstrap_room", room=room)
        state = TransferState.BOOTSTRAPPING
        return Transfer(room, self._role, state, self._sequence, now, now, deadline_s, ())

    def _put(self, known: Transfer, to: TransferState, now: float, **changes: Unpack[_Changes]) -> Transfer:
        """The only place where a record enters the table or changes: numbers it and tells the listeners."""
        before = self._by_change.pop(known.room, None)
        self._sequence += 1
        timeline = known.timeline
        if before is None or before.state is not to:
            progress, failure = changes.get("progress", known.progress), changes.get("failure")
            reason = failure.reason if failure else None
            timeline = (*timeline, Transition(to, now, self._sequence, progress, reason))
        record = replace(known, state=to, sequence=self._sequence, updated_s=now, timeline=timeline, **changes)
        self._by_change[record.room] = record
        self._agenda.note(before, record)
        if to.is_final:
            self._finished[record.room] = None
        for listener in self.listeners:
            listener(record)
        return record


def _aborted(known: Transfer) -> RoomAborted:
    return RoomAborted(f"Room {known.room} has failed: {known.failure}", room=known.room, failure=known.failure)


def _require_same_offer(room: BootstrapRoom, known: Offer, new: Offer) -> None:
    same_receiver = known.receiver.instance_id == new.receiver.instance_id
    if same_receiver and new.receiver.epoch < known.receiver.epoch:
        raise StaleInstance("An earlier life of the receiver", expected=known.receiver, got=new.receiver, room=room)
    if known != new:
        raise AllocationConflict(f"Room {room} has other destination pages already", room=room)
