"""What is wrong with a system, or with one room, and what to do: every diagnosis over what was found.

A diagnosis is a function of values; only `look` asks anybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from pd.v1 import types_pb2

from pd_common.errors import RoomUnknown
from pd_common.inspection.diagnoses import ends, meeting, memory, moving, system
from pd_common.inspection.diagnoses.finding import Finding, Kind, grouped
from pd_common.inspection.diagnoses.reading import FAILED, PATIENCE_S, SUCCESS, Case, case_of
from pd_common.inspection.diagnoses.system import System
from pd_common.inspection.inspector import Inspector
from pd_common.inspection.process_client import RoomFilter
from pd_common.inspection.views import ClusterView, RoomView
from pd_common.types import BootstrapRoom

_OF_ROOMS = (
    ends.wrong_data,
    ends.layouts_differ,
    ends.aborted,
    ends.refused,
    meeting.one_leg,
    meeting.no_prefill_found,
    meeting.pages_not_offered,
    moving.stalled,
    moving.peer_lost,
    moving.pairing_broke,
    meeting.no_copy,
    moving.overdue,
    ends.otherwise_failed,
    moving.fragmented,
    moving.slow,
)
"""The most telling first: a room has one trouble, the first that fits."""

_OF_SYSTEMS = (
    system.unreachable,
    system.no_route,
    system.ranks_missing,
    system.canary_old,
    memory.prefill_memory,
    memory.quarantine,
    memory.long_queue,
    system.clocks_differ,
)

_LOOKED_AT = 40
"""Rooms: those that live, then the latest that have failed, then the latest that have not."""
_LISTED = 200
"""Latest rooms of each process among which they are chosen."""
_MANY_ABORTS = 5
"""Rooms ended by somebody's wish: fewer are everyday."""
_PROBE = "probe"
"""The rid of the router's own requests. Those that failed while processes came up say nothing about a proven route."""


async def look(inspector: Inspector, room: BootstrapRoom | None = None) -> tuple[ClusterView, tuple[RoomView, ...]]:
    """The system, and the rooms that say most about it; with `room` that one as well, and first.

    Raises:
        RoomUnknown: nobody knows `room`.

    """
    asked = () if room is None else (await inspector.room(room),)
    cluster = await inspector.cluster()
    listed = await asyncio.gather(*(inspector.rooms_of(view, RoomFilter(), _LISTED) for view in cluster.processes))
    chosen = _chosen(transfer for _, transfers in listed for transfer in transfers)
    views = await asyncio.gather(*(_view_of(inspector, number) for number in chosen if number != room))
    return cluster, (*asked, *(view for view in views if view is not None))


def examine(
    cluster: ClusterView, rooms: tuple[RoomView, ...], room: BootstrapRoom | None = None, patience_s: float = PATIENCE_S
) -> tuple[Finding, ...]:
    """What is wrong, the most severe first; with `room`, with that one."""
    proven = any(route.proven for view in cluster.processes if view.process for route in view.process.routes)
    cases = (case_of(view, cluster, rooms, patience_s) for view in rooms)
    told = tuple(case for case in cases if case.room == room or not (proven and _is_probe(case)))
    whole = System(cluster, told, patience_s)
    of_system = [finding for diagnosis in _OF_SYSTEMS if (finding := diagnosis(whole)) is not None]
    if room is not None:
        its_own = [finding for case in told if case.room == room for finding in _first_of(case)]
        return grouped([*its_own, *(finding for finding in of_system if room in finding.rooms)])
    found = grouped([*of_system, *(finding for case in told for finding in _first_of(case))])
    return tuple(finding for finding in found if finding.kind is not Kind.ABORTED or len(finding.rooms) >= _MANY_ABORTS)


def _first_of(case: Case) -> Iterable[Finding]:
    return [finding for diagnosis in _OF_ROOMS if (finding := diagnosis(case)) is not None][:1]


def _is_probe(case: Case) -> bool:
    return any(leg.transfer.rid == _PROBE for leg in case.legs)


def _chosen(transfers: Iterable[types_pb2.Transfer]) -> list[BootstrapRoom]:
    """The live ones that are oldest, then the latest failures, then the latest others."""
    ordered = sorted(transfers, key=_urgency)
    return list(dict.fromkeys(BootstrapRoom(transfer.bootstrap_room) for transfer in ordered))[:_LOOKED_AT]


def _urgency(transfer: types_pb2.Transfer) -> tuple[int, int]:
    changed = transfer.timeline[-1].time.ToNanoseconds()
    if transfer.state == FAILED:
        return 1, -changed
    return (2, -changed) if transfer.state == SUCCESS else (0, changed)


async def _view_of(inspector: Inspector, number: BootstrapRoom) -> RoomView | None:
    """None if it has been forgotten meanwhile."""
    try:
        return await inspector.room(number)
    except RoomUnknown:
        return None
