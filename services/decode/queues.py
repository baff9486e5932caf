"""PreallocQueue: rooms wait here until decode has pages for them, and a metadata slot if they need one."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

from pd_common.engine.request import Sequence
from pd_common.handoff.metadata import Slot
from pd_common.types import PageIndices
from services.decode.admission import Budget, Demand, budget_of, demand_of
from services.decode.memory import Allocation, DecodeMemory

_MOST_PASSES = 16
"""Smaller requests that may go before one that does not fit yet: they fill what it cannot use, and do not starve it."""


class WaitsFor(StrEnum):
    """What keeps a request in line."""

    TURN = "turn"
    """Those before it; it has not been looked at yet."""
    ROW = "row"
    """As many hold pages as may."""
    MEMORY = "memory"
    """Pages."""
    SLOT = "slot"
    """A place for metadata."""


def _nobody_asks(_: WaitsFor) -> None:
    pass


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request in line; `place` is lower for those that come first: who has lost its pages, then who is more urgent.

    `demand` is for the tokens that it has now. `passed` counts those that went before it although they stood behind it.
    `locked` are its pages that others used when `DecodeMemory.changes` was `locked_at`. `told` hears what it waits for,
    whenever that is another thing than before.
    """

    sequence: Sequence
    find: int
    slot: bool
    returning: bool
    place: tuple[bool, int, int]
    demand: Demand
    granted: asyncio.Future[Allocation]
    told: Callable[[WaitsFor], None]
    passed: int = 0
    locked: int = 0
    locked_at: int | None = None
    waits_for: WaitsFor | None = None

    def kept_by(self, what: WaitsFor) -> None:
        if self.waits_for is not what:
            self.waits_for = what
            self.told(what)


class PreallocQueue:
    """Lets requests in, in order, as far as `Budget` admits them; a cancelled waiter leaves nothing behind.

    At most `rows` hold pages at once. As long as one waits that has lost its pages, nobody new is let in. When nobody
    holds any, the first in line is let in as soon as it fits as it is.
    """

    def __init__(self, memory: DecodeMemory, rows: int, reserved_tokens: int) -> None:
        self._memory = memory
        self._rows = rows
        self._reserved_tokens = reserved_tokens
        self._line: list[_Waiter] = []
        self._turns = count()

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._line)

    @property
    def returning(self) -> int:
        """Those of them that had pages before."""
        return sum(waiter.returning for waiter in self._line)

    async def acquire(
        self,
        sequence: Sequence,
        find: int,
        *,
        slot: bool,
        returning: bool = False,
        told: Callable[[WaitsFor], None] = _nobody_asks,
    ) -> Allocation:
        """Waits for its turn, then as `DecodeMemory.allocate`; one that is `returning` has its old place in line.

        `told` hears what it waits for; not at all if it need not wait.
        """
        waiter = self._waiter(sequence, find, slot, returning, told)
        insort(self._line, waiter, key=lambda each: each.place)
        self.grant()
        if not waiter.granted.done() and waiter.waits_for is None:
            waiter.kept_by(WaitsFor.TURN)
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.cancelled():
                self.grant()  # others may have waited for it
            else:
                self.release(waiter.granted.result())
            raise

    def release(self, allocation: Allocation) -> None:
        """As `DecodeMemory.release`; then whoever fits now is let in."""
        self._memory.release(allocation)
        self.grant()

    def free_slot(self, allocation: Allocation) -> None:
        """As `DecodeMemory.free_slot`; then whoever fits now is let in."""
        self._memory.free_slot(allocation)
        self.grant()

    def share(self, allocation: Allocation) -> None:
        """As `DecodeMemory.share`; then whoever fits now is let in: it may need fewer pages of its own."""
        self._memory.share(allocation)
        self.grant()

    def detach(self, allocation: Allocation) -> tuple[PageIndices, Slot]:
        """As `DecodeMemory.detach`; then whoever fits now is let in: its row and its prefix are free at once."""
        detached = self._memory.detach(allocation)
        self.grant()
        return detached

    def take_back(self, slot: Slot) -> None:
        """As `DecodeMemory.take_back`; then whoever fits now is let in."""
        self._memory.take_back(slot)
        self.grant()

    def grant(self) -> None:
        """Lets in whoever fits now: after something has come free."""
        self._line = [waiter for waiter in self._line if not waiter.granted.done()]
        while self._let_one_in():
            pass

    def _let_one_in(self) -> bool:
        """The first in line that fits."""
        if not self._line:
            return False
        if len(self._memory.held) >= self._rows:
            self._line[0].kept_by(WaitsFor.ROW)
            return False
        budget = budget_of(self._memory, self._reserved_tokens)
        for place, waiter in enumerate(self._line):
            if waiter.returning < self._line[0].returning:
                return False
            kept_by = self._let_in(waiter) if self._fits(waiter, budget) else WaitsFor.MEMORY
            if kept_by is None:
                for passed in self._line[:place]:
                    passed.passed += 1
                del self._line[place]
                return True
            waiter.kept_by(kept_by)
            if waiter.passed >= _MOST_PASSES:
                return False
        return False

    def _fits(self, waiter: _Waiter, budget: Budget) -> bool:
        """Only the first in line is looked for in the prefix cache, and only if what is found there decides.

        Looking for a prompt of 100,000 tokens takes milliseconds, and a thousand may wait: those behind the first one
        go before it only if they fit without anything from the cache.
        """
        if budget.admits(waiter.demand, locked=0):
            return True
        if waiter is not self._line[0]:
            return False
        if not self._memory.held:
            return True
        if not budget.admits(waiter.demand, locked=waiter.find // self._memory.page_size):
            return False
        if waiter.locked_at != self._memory.changes:
            found, idle = self._memory.matched_pages(waiter.sequence, waiter.find)
            waiter.locked, waiter.locked_at = found - idle, self._memory.changes
        return budget.admits(waiter.demand, waiter.locked)

    def _let_in(self, waiter: _Waiter) -> WaitsFor | None:
        """What is missing, if it has to wait: there are too few pages as it is, or no slot."""
        if waiter.slot and not self._memory.slots_free:
            return WaitsFor.SLOT
        allocation = self._memory.allocate(waiter.sequence, waiter.find, slot=waiter.slot)
        if allocation is None:
            return WaitsFor.MEMORY
        waiter.granted.set_result(allocation)
        return None

    def _waiter(
        self, sequence: Sequence, find: int, slot: bool, returning: bool, told: Callable[[WaitsFor], None]
    ) -> _Waiter:
        page_size = self._memory.page_size
        demand = demand_of(sequence, -(-sequence.num_tokens // page_size), page_size, self._reserved_tokens)
        if sequence.turn is None:
            sequence.turn = next(self._turns)
        place = not returning, -sequence.request.priority, sequence.turn
        granted: asyncio.Future[Allocation] = asyncio.get_running_loop().create_future()
        return _Waiter(sequence, find, slot, returning, place, demand, granted, told)
