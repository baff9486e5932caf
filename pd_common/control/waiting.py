"""Which of the requests that wait for their turn have to go: the rules of prefill and decode alike, without a clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pd_common.errors import CapacityExceeded
from pd_common.generation import GenerationRequest

_LONGEST_ADVICE_S = 60
"""Whoever is told to come back later is told no more than this: a queue may be empty again by then."""


@dataclass(frozen=True, slots=True)
class WaitingLimits:
    """At most `max_queued` requests wait for their turn (0: no limit), and none longer than `queue_timeout_s`."""

    max_queued: int
    queue_timeout_s: float


class Waiter(Protocol):
    """A request that is being served, as far as waiting goes."""

    @property
    def request(self) -> GenerationRequest:
        """What it asks for."""

    @property
    def has_turn(self) -> bool:
        """False until it has memory and may be computed. Once it has had its turn it is never sent away for waiting."""

    @property
    def waiting_since(self) -> float | None:
        """When it began to wait for capacity, monotonic; None while it waits for something else, as the other leg."""


W = TypeVar("W", bound=Waiter)


def who_goes(waiting: Sequence[W], newcomer: GenerationRequest, limits: WaitingLimits, now: float) -> W | None:
    """Who of `waiting`, oldest first, has to go so that one more may wait: the newest of the least urgent, or nobody.

    Raises:
        CapacityExceeded: as many wait as may, and none is less urgent than the newcomer.

    """
    if not 0 < limits.max_queued <= len(waiting):
        return None
    least = min(reversed(waiting), key=lambda waiter: waiter.request.priority)
    if least.request.priority < newcomer.priority:
        return least
    raise CapacityExceeded(
        f"{len(waiting)} requests wait for their turn, at most {limits.max_queued} may",
        limit=limits.max_queued,
        retry_after_s=retry_after_s(waiting, now),
    )


def displaced(waiting: Iterable[Waiter], limits: WaitingLimits, now: float) -> CapacityExceeded:
    """What is said to the one who goes."""
    return CapacityExceeded(
        f"a more urgent request took this one's place: at most {limits.max_queued} requests may wait for their turn",
        limit=limits.max_queued,
        retry_after_s=retry_after_s(waiting, now),
    )


def overdue(waiting: Iterable[W], limits: WaitingLimits, now: float) -> list[W]:
    """Those who have waited for capacity for too long."""
    return [waiter for waiter in waiting if waited_s(waiter, now) > limits.queue_timeout_s]


def waited_too_long(waiting: Iterable[Waiter], limits: WaitingLimits, now: float) -> CapacityExceeded:
    """What is said to those who are overdue."""
    return CapacityExceeded(
        f"no capacity came free within {limits.queue_timeout_s:g} seconds, the longest that a request may wait",
        limit_s=f"{limits.queue_timeout_s:g}",
        retry_after_s=retry_after_s(waiting, now),
    )


def waited_s(waiter: Waiter, now: float) -> float:
    """Seconds that it has waited for capacity by now."""
    return 0.0 if waiter.waiting_since is None else max(now - waiter.waiting_since, 0.0)


def oldest_wait_s(waiting: Iterable[Waiter], now: float) -> float:
    """Seconds that the one who has waited longest has waited by now; 0 when nobody waits for capacity."""
    return max((waited_s(waiter, now) for waiter in waiting), default=0.0)


def retry_after_s(waiting: Iterable[Waiter], now: float) -> int:
    """When to come back: a newcomer would wait about as long as the one that has waited longest."""
    return advice_s(oldest_wait_s(waiting, now))


def advice_s(wait_s: float) -> int:
    """What somebody is told who would wait about so long: whole seconds, at least one."""
    return min(max(math.ceil(wait_s), 1), _LONGEST_ADVICE_S)
