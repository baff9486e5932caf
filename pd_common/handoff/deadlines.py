"""When a room is overdue, and by which of its limits (I7): the request's own deadline, or how long a state may last."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pd_common.errors import DeadlineExceeded
from pd_common.handoff.state import Transfer, TransferState
from pd_common.types import BootstrapRoom


class Limit(StrEnum):
    """Which clock ran out."""

    DEADLINE = "deadline"
    """The one deadline of the request, the same on both sides."""
    BOOTSTRAP_TIMEOUT = "bootstrap_timeout"
    WAITING_TIMEOUT = "waiting_timeout"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds that a room may be in BOOTSTRAPPING, and that it may go without progress once pages are offered.

    Every finished chunk begins the second wait anew: a prompt that takes long is no reason to give its room up.
    """

    bootstrap_s: float
    waiting_s: float

    def due(self, transfer: Transfer) -> tuple[float, Limit]:
        """When the room is overdue by the table's clock, and by which limit; for rooms that have not ended."""
        state_ends = (
            (transfer.created_s + self.bootstrap_s, Limit.BOOTSTRAP_TIMEOUT)
            if transfer.state is TransferState.BOOTSTRAPPING
            else (transfer.updated_s + self.waiting_s, Limit.WAITING_TIMEOUT)
        )
        return min((transfer.deadline_s, Limit.DEADLINE), state_ends, key=lambda end: end[0])

    def exceeded(self, transfer: Transfer) -> DeadlineExceeded:
        """What an overdue room fails with: the limit and the state it was met in."""
        _, limit = self.due(transfer)
        state = transfer.state.name
        messages = {
            Limit.DEADLINE: f"The deadline passed in state {state}",
            Limit.BOOTSTRAP_TIMEOUT: f"The other side was not met within {self.bootstrap_s:g} s",
            Limit.WAITING_TIMEOUT: f"Nothing moved for {self.waiting_s:g} s in state {state}",
        }
        return DeadlineExceeded(messages[limit], room=transfer.room, state=state, limit=limit)


class Agenda:
    """Which live room is overdue next. Putting a room off, as every chunk does, costs nothing until its turn comes."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._planned: list[tuple[float, BootstrapRoom]] = []

    def note(self, before: Transfer | None, transfer: Transfer) -> None:
        """Takes a change of a room in. Each live room has an entry that is not later than its end."""
        due_s, planned_s = self._due(transfer), self._due(before)
        if due_s is not None and (planned_s is None or due_s < planned_s):
            heapq.heappush(self._planned, (due_s, transfer.room))

    def first(self, find: Callable[[BootstrapRoom], Transfer | None]) -> tuple[float, BootstrapRoom] | None:
        """The room that is overdue first, and when; None when no room is live. `find` gives a room as it is now."""
        while self._planned:
            planned_s, room = self._planned[0]
            due_s = self._due(find(room))
            if due_s == planned_s:
                return due_s, room
            heapq.heappop(self._planned)
            if due_s is not None and due_s > planned_s:
                heapq.heappush(self._planned, (due_s, room))
        return None

    def drop_first(self) -> None:
        """Takes the room that `first` has given off the agenda."""
        heapq.heappop(self._planned)

    def _due(self, transfer: Transfer | None) -> float | None:
        return None if transfer is None or transfer.state.is_final else self._timeouts.due(transfer)[0]
