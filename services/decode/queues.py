"""PreallocQueue: rooms wait here, first come first served, until decode has pages and a metadata slot for them."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from pd_common.handoff.metadata import MetadataBuffers, Slot
from pd_common.kv.pages import PageAllocator
from pd_common.types import PageIndices


@dataclass(frozen=True, slots=True)
class Allocation:
    """Pages for a prompt and its whole answer, and the slot that its metadata will land in."""

    pages: PageIndices
    slot: Slot


class PreallocQueue:
    """Hands out pages and slots in order of arrival; a cancelled waiter leaves nothing behind."""

    def __init__(self, pages: PageAllocator, metadata: MetadataBuffers) -> None:
        self._pages = pages
        self._metadata = metadata
        self._waiting: deque[tuple[int, asyncio.Future[Allocation]]] = deque()

    async def acquire(self, num_pages: int) -> Allocation:
        """Waits for its turn and for memory."""
        turn: asyncio.Future[Allocation] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_pages, turn))
        self._grant()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._grant()  # it may have been first in line
            else:
                self.release(turn.result())
            raise

    def release(self, allocation: Allocation) -> None:
        """Takes memory back; nobody may write it any more (I2)."""
        self._metadata.free(allocation.slot)
        self._pages.free(allocation.pages)
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            num_pages, turn = self._waiting[0]
            if not turn.cancelled():
                allocation = self._allocate(num_pages)
                if allocation is None:
                    return
                turn.set_result(allocation)
            self._waiting.popleft()

    def _allocate(self, num_pages: int) -> Allocation | None:
        if not self._metadata.free_slots:
            return None
        pages, slot = self._pages.alloc(num_pages), None
        if pages is not None:
            slot = self._metadata.alloc()
        return None if pages is None or slot is None else Allocation(pages, slot)
