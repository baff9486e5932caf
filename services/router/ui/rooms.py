"""Rooms as the page lists them: one entry a room, with what each side says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pd.v1 import types_pb2

from pd_common.control.status import from_status
from pd_common.errors import PdError
from pd_common.inspection.views import ProcessView
from pd_common.types import Role
from services.router.exchange import Json
from services.router.ui.values import failure_to, state_name, time_ms

_TRANSFERRING = types_pb2.TRANSFER_STATE_TRANSFERRING
LIVE = (types_pb2.TRANSFER_STATE_BOOTSTRAPPING, types_pb2.TRANSFER_STATE_WAITING_FOR_INPUT, _TRANSFERRING)
SUCCESS = types_pb2.TRANSFER_STATE_SUCCESS
FAILED = types_pb2.TRANSFER_STATE_FAILED


@dataclass(frozen=True, slots=True)
class Side:
    """One side's record of a room, in milliseconds of this router's clock; `now_ms` is when it was asked."""

    view: ProcessView
    transfer: types_pb2.Transfer
    now_ms: float

    @property
    def is_live(self) -> bool:
        return self.transfer.state in LIVE

    @property
    def opened_ms(self) -> float:
        return time_ms(self.view, self.transfer.timeline[0].time)

    @property
    def until_ms(self) -> float:
        """When it ended, or now."""
        return self.now_ms if self.is_live else time_ms(self.view, self.transfer.timeline[-1].time)

    @property
    def bytes_per_s(self) -> float | None:
        """Average since its first page was on its way; None while nothing is done."""
        began = next((step.time for step in self.transfer.timeline if step.state == _TRANSFERRING), None)
        if began is None or not self.transfer.bytes_done:
            return None
        return 1e3 * self.transfer.bytes_done / max(self.until_ms - time_ms(self.view, began), 0.001)

    @property
    def failure(self) -> PdError | None:
        """Why it failed."""
        return from_status(self.transfer.failure) if self.transfer.HasField("failure") else None

    def shown(self) -> Json:
        transfer = self.transfer
        return {
            "address": self.view.address,
            "state": state_name(transfer.state),
            "chunks_done": transfer.chunks_done,
            "pages_done": transfer.pages_done,
            "bytes_done": transfer.bytes_done,
            "bytes_per_s": self.bytes_per_s,
            "peer": transfer.peer.instance_id or None,
        }


@dataclass(slots=True)
class Room:
    """One room on all sides that have it on record; at least one."""

    number: int
    sides: dict[Role, Side] = field(default_factory=dict)

    @property
    def is_live(self) -> bool:
        """The handoff goes on somewhere."""
        return any(side.is_live for side in self.sides.values())

    @property
    def opened_ms(self) -> float:
        return min(side.opened_ms for side in self.sides.values())

    @property
    def until_ms(self) -> float:
        """When it ended on the last side, or now."""
        return max(side.until_ms for side in self.sides.values())

    @property
    def failure(self) -> PdError | None:
        """Why it failed where it failed first: the other side has only been told."""
        failed = [side for side in self.sides.values() if side.failure is not None]
        return min(failed, key=lambda side: side.until_ms).failure if failed else None

    def shown(self) -> Json:
        failure = self.failure
        return {
            "room": str(self.number),
            "rid": next((side.transfer.rid for side in self.sides.values() if side.transfer.rid), ""),
            "live": self.is_live,
            "opened_ms": self.opened_ms,
            "until_ms": self.until_ms,
            "failure": None if failure is None else failure_to(failure),
            "sides": {role.value: side.shown() for role, side in self.sides.items()},
        }


def merged(listed: Iterable[tuple[ProcessView, Sequence[types_pb2.Transfer]]], now_ms: float) -> list[Room]:
    """What each process has listed, perhaps in several parts, room by room."""
    found: dict[int, Room] = {}
    for view, transfers in listed:
        for transfer in transfers:
            room = found.setdefault(transfer.bootstrap_room, Room(transfer.bootstrap_room))
            room.sides[view.role] = Side(view, transfer, now_ms)
    return list(found.values())


def oldest_live(rooms: Iterable[Room]) -> list[Room]:
    """Those whose handoff goes on; first the one that has waited longest."""
    return sorted((room for room in rooms if room.is_live), key=lambda room: room.opened_ms)


def latest_ended(rooms: Iterable[Room]) -> list[Room]:
    """Those whose handoff is over; first the one that ended last."""
    return sorted((room for room in rooms if not room.is_live), key=lambda room: room.until_ms, reverse=True)


def failures_to(rooms: Iterable[Room]) -> list[Json]:
    """How many of these have failed for which reason, the most frequent first."""
    reasons = Counter(failure.reason.value for room in rooms if (failure := room.failure) is not None)
    return [{"reason": reason, "count": count} for reason, count in reasons.most_common()]
