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
            self._give_up(num_pages, turn)
            raise

    def release(self, allocation: Allocation) -> None:
        """Takes memory back; nobody may write it any more (I2)."""
        self._metadata.free(allocation.slot)
        self._pages.free(allocation.pages)
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._metadata.free_slots:
            num_pages, turn = self._waiting[0]
            pages = self._pages.alloc(num_pages)
            if pages is None:
                return
            slot = self._metadata.alloc()
            if slot is None:
                self._pages.free(pages)
                return
            self._waiting.popleft()
            turn.set_result(Allocation(pages, slot))

    def _give_up(self, num_pages: int, turn: asyncio.Future[Allocation]) -> None:
        if turn.done() and not turn.cancelled():
            self.release(turn.result())
        else:
            self._waiting.remove((num_pages, turn))
            self._grant()
