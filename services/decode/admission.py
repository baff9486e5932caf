"""Whether one more request may have pages: a rule that counts whole pages, and knows neither queue nor pool.

Requests get pages for what they have, and more as they grow. When there are none left, others have to give theirs up.
So everybody may grow a little before that happens, and whoever grows most can go on for long when it does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pd_common.engine.request import Sequence
from services.decode.memory import DecodeMemory

_RESERVES_OF_ONE = 4
"""By how many reserves one request can grow when all others give up what they can: 2048 tokens by default.

What it cannot have even then is still being written, and can be given up soon. To keep a longest answer free for it
instead would let nobody in beside it where the pool holds little more than one.
"""


@dataclass(frozen=True, slots=True)
class Demand:
    """Pages of one request: for the tokens that it has, more for its reserve, and all that it has as the only one."""

    pages: int
    growth: int
    alone: int


def demand_of(sequence: Sequence, pages: int, page_size: int, reserved_tokens: int) -> Demand:
    """What a request that has `pages` may come to; nobody needs the KV of an answer's last token."""
    tokens = sequence.num_tokens
    longest = len(sequence.request.prompt) + sequence.request.sampling.max_new_tokens - 1
    soon = -(-min(tokens + reserved_tokens, longest) // page_size)
    alone = -(-min(tokens + _RESERVES_OF_ONE * reserved_tokens, longest) // page_size)
    return Demand(pages, max(soon - pages, 0), max(alone, pages))


@dataclass(frozen=True, slots=True)
class Held:
    """What a request that has pages may come to, and whether it could give them up: not while they are written."""

    demand: Demand
    retractable: bool


@dataclass(frozen=True, slots=True)
class Budget:
    """What newcomers may have: of `available` pages all but those that others are `promised`, or that one may need.

    `retractable` pages become available when all give up what they can. Then one of those that have pages may still
    need `single` of those that are available now.
    """

    available: int
    retractable: int
    promised: int
    single: int

    @classmethod
    def of(cls, held: Iterable[Held], *, available: int, used: int) -> Budget:
        """Of a pool in which `used` pages are held by somebody. Prefixes are shared, so the sum may be larger."""
        promised, written, most_written, running = 0, 0, 0, list[Demand]()
        for each in held:
            demand = each.demand
            promised += demand.growth
            if each.retractable:
                running.append(demand)
            else:
                written += demand.pages
                most_written = max(most_written, demand.alone - demand.pages)
        # What is shared with one that is written counts as written: fewer pages may seem retractable than are.
        retractable = max(used - written, 0)
        most_running = max((demand.alone - max(demand.pages, retractable) for demand in running), default=0)
        return cls(available, retractable, promised, max(most_written - retractable, most_running, 0))

    def admits(self, newcomer: Demand, locked: int) -> bool:
        """Whether there is room for a request that shares `locked` of its pages with others that use them now."""
        takes = newcomer.pages - locked
        return (
            takes + newcomer.growth + self.promised <= self.available
            and takes + self.single <= self.available
            and newcomer.alone - max(locked, self.retractable) <= self.available
        )


def budget_of(memory: DecodeMemory, reserved_tokens: int) -> Budget:
    """As things stand. What has a slot is being written."""
    held = (
        Held(
            demand_of(each.sequence, len(each.sequence.pages), memory.page_size, reserved_tokens),
            retractable=each.slot is None,
        )
        for each in memory.held
    )
    available = memory.pages_available
    return Budget.of(held, available=available, used=memory.pages_total - available - memory.pages_written)
