"""The latest rooms of a whole system, each with what both sides have on record."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from pd.v1 import types_pb2

from pd_common.errors import PdError
from pd_common.inspection.inspector import Inspector
from pd_common.inspection.process_client import RoomFilter
from pd_common.inspection.views import ClusterView, ProcessView
from pd_common.types import BootstrapRoom, Role


@dataclass(frozen=True, slots=True)
class Seen:
    """A room on one side."""

    view: ProcessView
    transfer: types_pb2.Transfer

    @property
    def opened_ns(self) -> int:
        """When it came there, by our clock."""
        return self.view.ours_ns(self.transfer.timeline[0].time)


@dataclass(frozen=True, slots=True)
class ListedRoom:
    """At least one side has it on record."""

    number: BootstrapRoom
    prefill: Seen | None
    decode: Seen | None

    @property
    def sides(self) -> tuple[Seen, ...]:
        """Those that have it."""
        return tuple(side for side in (self.prefill, self.decode) if side is not None)

    @property
    def opened_ns(self) -> int:
        """When it came to the first of them, by our clock."""
        return min(side.opened_ns for side in self.sides)


@dataclass(frozen=True, slots=True)
class Listing:
    """Rooms, the one that was opened last at the end, and everybody who was asked."""

    rooms: tuple[ListedRoom, ...]
    cluster: ClusterView


async def list_rooms(inspector: Inspector, cluster: ClusterView, wanted: RoomFilter, limit: int) -> Listing:
    """The latest rooms that match on either side; what the other side has on record is there all the same."""
    views = await asyncio.gather(*(inspector.rooms_of(view, wanted, limit) for view in cluster.processes))
    asked = ClusterView(tuple(view for view, _ in views))
    seen = [Seen(view, transfer) for view, transfers in views for transfer in transfers]
    newest = sorted(_by_number(seen), key=lambda room: room.opened_ns)[-limit:]
    return Listing(tuple(await asyncio.gather(*(_whole(inspector, asked, room) for room in newest))), asked)


def _by_number(seen: Iterable[Seen]) -> list[ListedRoom]:
    prefills, decodes = (
        {side.transfer.bootstrap_room: side for side in seen if side.view.role is role}
        for role in (Role.PREFILL, Role.DECODE)
    )
    return [
        ListedRoom(BootstrapRoom(number), prefills.get(number), decodes.get(number))
        for number in dict.fromkeys((*prefills, *decodes))
    ]


async def _whole(inspector: Inspector, asked: ClusterView, room: ListedRoom) -> ListedRoom:
    """Asks the other side if only one was found."""
    if room.prefill is not None and room.decode is not None:
        return room
    other = await _other_side(inspector, asked, room.sides[0])
    return ListedRoom(room.number, room.prefill or other, room.decode or other)


async def _other_side(inspector: Inspector, asked: ClusterView, known: Seen) -> Seen | None:
    """None if nobody knows where it is, or it has forgotten the room, or does not answer any more."""
    other = asked.of_instance(known.transfer.peer.instance_id)
    if other is None:
        return None
    try:
        transfer = await inspector.transfer(other, BootstrapRoom(known.transfer.bootstrap_room))
    except PdError:  # it has answered a moment ago: the listing is worth more than this one cell
        return None
    return None if transfer is None else Seen(other, transfer)
