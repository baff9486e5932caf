"""Canaries: pages of known content in memory of their own, written as real pages are before anybody relies on the way.

No room ever uses this memory, so nothing that arrives late in it can do harm.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pd_common.errors import PagesInvalid
from pd_common.handoff.chunk import ADDRESS_END
from pd_common.transport.base import MemoryRegion, Puts

SEED_BYTES = 16

_PAGES = 4
"""So many canaries at once; more of them wait for their turn."""


@dataclass(frozen=True, slots=True)
class Canary:
    """One that went through: when, by the monotonic clock, and how long until it was visible; seconds."""

    at_s: float
    took_s: float


@dataclass(frozen=True, slots=True)
class RemoteCanary:
    """Where another process keeps its canary pages, of `page_bytes` each.

    Raises:
        PagesInvalid: that is no memory (I11).

    """

    base: int
    num_pages: int
    page_bytes: int

    def __post_init__(self) -> None:
        end = self.base + self.num_pages * self.page_bytes
        if self.base < 0 or self.num_pages < 1 or end > ADDRESS_END:
            raise PagesInvalid("The canary pages are none, or leave the address space", base=self.base, end=end)

    def address_of(self, page: int) -> int:
        """Raises PagesInvalid when there is no such page."""
        if not 0 <= page < self.num_pages:
            raise PagesInvalid("The canary page is not registered", page=page, pages=self.num_pages)
        return self.base + page * self.page_bytes


class CanaryMemory:
    """A few pages as large as one of the pool. Whoever has `page` is the only one to use it."""

    def __init__(self, page_bytes: int) -> None:
        self._memory = mmap.mmap(-1, _PAGES * page_bytes)
        self._pages: NDArray[np.uint8] = np.frombuffer(self._memory, dtype=np.uint8).reshape(_PAGES, page_bytes)
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for page in range(_PAGES):
            self._free.put_nowait(page)

    @property
    def region(self) -> MemoryRegion:
        """All pages, to be registered with the transport."""
        return MemoryRegion(self._pages.ctypes.data, self._pages.nbytes)

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return len(self._pages)

    @asynccontextmanager
    async def page(self) -> AsyncIterator[int]:
        """The page that has been free for longest, waited for if need be."""
        page = await self._free.get()
        try:
            yield page
        finally:
            self._free.put_nowait(page)

    def fill(self, page: int, seed: bytes) -> None:
        """Makes the page what follows from the seed."""
        self._pages[page] = self._content(seed)

    def holds(self, page: int, seed: bytes) -> bool:
        """Every byte of the page is what follows from the seed."""
        return bool(np.array_equal(self._pages[page], self._content(seed)))

    def puts(self, page: int, remote_address: int) -> Puts:
        """The write of one page."""
        page_bytes = self._pages.shape[1]
        values = (self.region.base + page * page_bytes, remote_address, page_bytes)
        return Puts(*(np.array([value], dtype=np.int64) for value in values))

    def _content(self, seed: bytes) -> NDArray[np.uint8]:
        """Words that all differ, from a start and an odd step that the seed gives: nothing may be missing or moved."""
        page_bytes = self._pages.shape[1]
        start, step = np.frombuffer(seed, dtype="<u8")
        words: NDArray[np.uint64] = start + np.arange(-(-page_bytes // 8), dtype=np.uint64) * (step | np.uint64(1))
        content: NDArray[np.uint8] = words.astype("<u8", copy=False).view(np.uint8)
        return content[:page_bytes]
