"""Requests on their way through a router, prefills and decodes: a discrete-event simulation.

The same arrivals give the same outcome. Times are those that a client sees, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from pd_common.errors import CapacityExceeded
from pd_common.planning.replicas import Clock, Decode, Prefill, Room
from pd_common.planning.speeds import Speeds


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and when it is sent."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many of each there are."""

    prefills: int
    decodes: int

    def __str__(self) -> str:
        return f"{self.prefills} x {self.decodes}"


@dataclass(frozen=True, slots=True)
class Served:
    """What a client has seen of one request, and what it has waited for until its first token."""

    ttft_s: float
    itl_s: float | None
    """The mean gap between its tokens; None where there is only one token."""
    itl_p99_s: float | None
    e2e_s: float
    memory_s: float
    """That it waited for pages of decode."""
    queue_s: float
    """That it then waited for its first chunk."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Every request in the order of arrival, and what the replicas were like from the first arrival to the last end."""

    served: tuple[Served, ...]
    prefill_busy: float
    """Share of the time in which a prefill computes; mean of all."""
    decode_busy: float
    """Share of the time in which a decode is in a step."""
    decode_answers: float
    """In a step of decode; mean of the time in steps."""
    pages_most: float
    """Share of a decode's pool that was in use at most."""
    retractions: int


def simulate(speeds: Speeds, fleet: Fleet, arrivals: Sequence[Arrival]) -> Outcome:
    """Raises CapacityExceeded when a request could not be served if it were the only one."""
    check_size(speeds, arrivals)
    return _Simulation(speeds, fleet).run(arrivals)


def check_size(speeds: Speeds, arrivals: Sequence[Arrival]) -> None:
    """Raises CapacityExceeded as `simulate` does."""
    longest = max(each.prompt_tokens + each.output_tokens for each in arrivals)
    if longest > speeds.settings.kv_cache_tokens:
        raise CapacityExceeded(
            f"prompt and answer of {longest:,} tokens do not fit into a pool of "
            f"{speeds.settings.kv_cache_tokens:,} (--kv-cache-tokens)"
        )


class _Simulation:
    """Sends each request to the prefill and the decode that have fewest of them; it goes from one to the other."""

    def __init__(self, speeds: Speeds, fleet: Fleet) -> None:
        self._clock = Clock()
        self._speeds = speeds
        self._prefills = [Prefill(self._clock, speeds, self._computed) for _ in range(fleet.prefills)]
        self._decodes = [Decode(self._clock, speeds, self._granted, self._ended) for _ in range(fleet.decodes)]
        self._way_of: dict[Room, tuple[Prefill, Decode]] = {}

    def run(self, arrivals: Sequence[Arrival]) -> Outcome:
        rooms = [
            Room(turn, each.prompt_tokens, each.output_tokens, each.at_s, each.prompt_tokens)
            for turn, each in enumerate(arrivals)
        ]
        for room in rooms:
            self._clock.at(room.arrived_s, partial(self._arrive, room))
        self._clock.run()
        seconds = self._clock.now_s - rooms[0].arrived_s
        in_steps_s = sum(each.busy_s for each in self._decodes)
        return Outcome(
            served=tuple(map(_served, rooms)),
            prefill_busy=sum(each.busy_s for each in self._prefills) / (len(self._prefills) * seconds),
            decode_busy=in_steps_s / (len(self._decodes) * seconds),
            decode_answers=sum(each.answers_s for each in self._decodes) / max(in_steps_s, 1e-9),
            pages_most=max(each.pages_most for each in self._decodes) / self._speeds.settings.pages,
            retractions=sum(each.retractions for each in self._decodes),
        )

    def _arrive(self, room: Room) -> None:
        prefill = min(self._prefills, key=lambda each: each.open_rooms)
        decode = min(self._decodes, key=lambda each: (not each.has_pages_for(room.prompt_tokens), each.open_rooms))
        self._way_of[room] = prefill, decode
        prefill.open_rooms += 1
        decode.open_rooms += 1
        decode.acquire(room)

    def _granted(self, room: Room) -> None:
        self._way_of[room][0].enqueue(room)

    def _computed(self, room: Room) -> None:
        self._clock.after(self._speeds.handoff.took_s(room.last_chunk_tokens), partial(self._handed_over, room))

    def _handed_over(self, room: Room) -> None:
        prefill, decode = self._way_of[room]
        room.tokens_at_s.append(self._clock.now_s)
        prefill.open_rooms -= 1
        prefill.release(room)
        decode.start(room)

    def _ended(self, room: Room) -> None:
        self._way_of[room][1].open_rooms -= 1


def _served(room: Room) -> Served:
    tokens_s = room.tokens_at_s
    gaps_s = sorted(later - earlier for earlier, later in pairwise(tokens_s))
    return Served(
        ttft_s=tokens_s[0] - room.arrived_s,
        itl_s=sum(gaps_s) / len(gaps_s) if gaps_s else None,
        itl_p99_s=gaps_s[math.ceil(0.99 * len(gaps_s)) - 1] if gaps_s else None,
        e2e_s=tokens_s[-1] - room.arrived_s,
        memory_s=room.granted_s - room.arrived_s,
        queue_s=room.began_s - room.granted_s,
    )
