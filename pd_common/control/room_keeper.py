"""What the services of prefill and decode have in common: rooms on record, rooms that live, and how they are ended."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from pd_common.aio import RoomTask, Tasks, drain_tasks
from pd_common.control import waiting
from pd_common.control.outputs import OutputHub
from pd_common.control.rooms import PoolStatus
from pd_common.control.waiting import Waiter, WaitingLimits
from pd_common.errors import PdError
from pd_common.generation import GenerationRequest, Load, Output
from pd_common.handoff.table import TransferTable
from pd_common.types import BootstrapRoom, Instance

_REAP_S = 0.1


class LiveRoom(Waiter, Protocol):
    """A room that has not concluded."""

    @property
    def task(self) -> RoomTask | None:
        """Its life; None only while it is being made."""


R = TypeVar("R", bound=LiveRoom)


class RoomKeeper(ABC, Generic[R]):
    """The rooms of one process. A room lives until its task has concluded, perhaps long after its record is final."""

    def __init__(self, instance: Instance, transfers: TransferTable, hub: OutputHub, limits: WaitingLimits) -> None:
        self.instance = instance
        self.transfers = transfers
        self._hub = hub
        self._limits = limits
        self._rooms: dict[BootstrapRoom, R] = {}
        self._tasks = Tasks()
        self._stopping = False

    @abstractmethod
    def pool_status(self) -> PoolStatus:
        """What pages and metadata slots are doing."""

    @abstractmethod
    def abandon(self, room: BootstrapRoom, error: PdError) -> None:
        """Ends a room; does not wait."""

    @abstractmethod
    async def tend(self, now: float) -> None:
        """What else has to be done from time to time."""

    def load(self) -> Load:
        """How much there is to do here, and room for more."""
        waiting_rooms, pool = self._waiting(), self.pool_status()
        return Load(
            queued=len(waiting_rooms),
            max_queued=self._limits.max_queued,
            oldest_wait_s=waiting.oldest_wait_s(waiting_rooms, time.monotonic()),
            running=len(self._rooms) - len(waiting_rooms),
            pages_total=pool.pages_total,
            pages_available=pool.pages_free + pool.pages_cached,
            least_priority=min((room.request.priority for room in waiting_rooms), default=0),
            stopping=self._stopping,
        )

    async def reap(self) -> None:
        """Ends what is overdue, by the clock alone (I7); ends only by cancellation."""
        while True:
            now = time.monotonic()
            for room, error in self.transfers.overdue(now).items():
                self.abandon(room, error)
            self._send_overdue_away(now)
            await self.tend(now)
            self.transfers.sweep(now)
            await asyncio.sleep(_REAP_S)

    async def watch(self) -> None:
        """Raises InternalError when a room could not be concluded: what it holds is lost. Otherwise never ends."""
        await self._tasks.watch()

    async def close(self, drain_timeout_s: float) -> None:
        """Takes no new room; lets the running ones end for a while, then ends them. Returns when all have concluded."""
        self._stopping = True
        self._hub.beat()  # whoever sends requests here hears of it now
        await drain_tasks([room.task for room in self._rooms.values() if room.task is not None], drain_timeout_s)
        await self._tasks.close()

    def _make_way(self, newcomer: GenerationRequest) -> None:
        """Ends a less urgent request if one more may not wait. To be asked last, when nothing else can refuse it.

        Raises:
            CapacityExceeded: as many wait as may, and none is less urgent.

        """
        if not 0 < self._limits.max_queued <= len(self._rooms):
            return  # it is not worth a look who of them waits
        now, waiting_rooms = time.monotonic(), self._waiting()
        goes = waiting.who_goes(waiting_rooms, newcomer, self._limits, now)
        if goes is not None:
            self.abandon(goes.request.room, waiting.displaced(waiting_rooms, self._limits, now))

    def _send_overdue_away(self, now: float) -> None:
        waiting_rooms = self._waiting()
        for room in waiting.overdue(waiting_rooms, self._limits, now):
            self.abandon(room.request.room, waiting.waited_too_long(waiting_rooms, self._limits, now))

    def _waiting(self) -> list[R]:
        """Rooms without a turn, oldest first; not those that are being ended, which take no place any more."""
        rooms = self._rooms.values()
        return [room for room in rooms if not room.has_turn and not (room.task is not None and room.task.is_ending)]

    def _fail(self, room: BootstrapRoom, error: PdError) -> None:
        """For the record and for the client; an end that either has seen already stays as it is."""
        self.transfers.fail(room, error, time.monotonic())
        self._hub.publish([Output(room, error=error)])

    def _stop(self, room: BootstrapRoom, error: PdError) -> None:
        """The room's task concludes with this error, unless it does so already."""
        live = self._rooms.get(room)
        if live is not None and live.task is not None:
            live.task.stop(error)
