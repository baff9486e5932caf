"""Time for a table on its own: what the reaper of a process does with overdue rooms, without a process."""

from __future__ import annotations

from pd_common.handoff.state import Transfer
from pd_common.handoff.table import TransferTable


def expire(table: TransferTable, now: float) -> list[Transfer]:
    """Fails the rooms that are overdue; gives them as they are now."""
    rooms = table.overdue(now)
    for room, error in rooms.items():
        table.fail(room, error, now)
    return [table.get(room) for room in rooms]


def next_deadline(table: TransferTable) -> float | None:
    """When a room is overdue next; None when no room is live."""
    first = table._agenda.first(table.find)
    return None if first is None else first[0]
