"""Rooms that are open at this router, and for a while those that were aborted before they came."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from pd_common.errors import RoomAborted, RoomInUse
from pd_common.generation import GenerationRequest, Output
from pd_common.types import BootstrapRoom, Role
from services.router.route import Route
from services.router.worker import Worker

_REFUSED_FOR_S = 60.0
"""How long a request may take to arrive after the abort that overtook it."""
_MOST_REFUSED = 100_000
"""More are forgotten, the oldest first."""


@dataclass(slots=True, eq=False)
class OpenRoom:
    """One request with a leg on each worker of its route.

    `answered` once its last output has come; `left` once nobody reads its outputs any more; `aborts` are the calls that
    end the legs, once it is being aborted; `foreign` are the legs where somebody else has a room of this number;
    `refused` those that have not taken it in, or sent it away before the first output, and for a reason that other
    workers may not have; unless it was aborted meanwhile.
    """

    request: GenerationRequest
    route: Route
    arrivals: asyncio.Queue[tuple[Role, Output]] = field(default_factory=asyncio.Queue)
    answered: bool = False
    left: bool = False
    aborts: tuple[asyncio.Task[None], ...] = ()
    foreign: frozenset[Worker] = frozenset()
    refused: frozenset[Worker] = frozenset()

    @property
    def number(self) -> BootstrapRoom:
        return self.request.room

    @property
    def legs(self) -> tuple[Worker, ...]:
        return self.route.workers


class Rooms:
    """A room is open at most once. Times are seconds of one clock that the caller chooses."""

    def __init__(self) -> None:
        self._open: dict[BootstrapRoom, OpenRoom] = {}
        self._refused: dict[BootstrapRoom, float] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenRoom]:
        return iter(tuple(self._open.values()))

    def add(self, room: OpenRoom, now: float) -> None:
        """Takes a new room in.

        Raises:
            RoomInUse: it is open.
            RoomAborted: it was aborted a moment ago.

        """
        number = room.number
        if number in self._open:
            raise RoomInUse(f"room {number} is in use", room=number)
        if self._refused.get(number, now) > now:
            raise RoomAborted(f"room {number} was aborted before its request came", room=number)
        self._open[number] = room

    def remove_if_over(self, room: OpenRoom) -> None:
        """A room stays until its client has left and its legs are quiet."""
        if room.left and all(abort.done() for abort in room.aborts):
            self._open.pop(room.number, None)

    def find(self, number: BootstrapRoom) -> OpenRoom | None:
        return self._open.get(number)

    def with_rid(self, rid: str) -> list[OpenRoom]:
        """All whose request has exactly this id, which need not be unique."""
        return [room for room in self if room.request.rid == rid]

    def refuse(self, number: BootstrapRoom, now: float) -> None:
        """Refuses a room that may still come."""
        self._refused.pop(number, None)  # the order is that of time
        self._refused[number] = now + _REFUSED_FOR_S
        while len(self._refused) > _MOST_REFUSED or next(iter(self._refused.values()), math.inf) <= now:
            del self._refused[next(iter(self._refused))]
