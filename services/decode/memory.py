"""What answers hold on decode: pages, the first of them perhaps shared, and a metadata slot until the pages are there.

Owned by the event loop. Knows no queue and no peer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pd_common.engine.request import Sequence
from pd_common.errors import InternalError
from pd_common.handoff.metadata import MetadataBuffers, Slot
from pd_common.kv.prefix import Prefix, PrefixCache
from pd_common.types import PageIndices


@dataclass(slots=True, eq=False)
class Allocation:
    """The pages of one sequence, in `sequence.pages`: those of the prefix, then its own, which nobody else has.

    `slot` is where metadata may be written to; None once it is not wanted any more.
    """

    sequence: Sequence
    prefix: Prefix
    slot: Slot | None

    @property
    def own_pages(self) -> PageIndices:
        """Those after the prefix."""
        return tuple(self.sequence.pages[len(self.prefix.pages) :])


class DecodeMemory:
    """Every allocation that is held: each page of the pool is free, in the prefix cache, of one of them, or written.

    "Written" are the pages and slots that `detach` has handed out and `take_back` has not got back: a writer may not
    be quiet yet. As long as `changes` stays the same, the same pages of a prefix are used.
    """

    def __init__(self, prefixes: PrefixCache, metadata: MetadataBuffers, page_size: int) -> None:
        self.page_size = page_size
        self.changes = 0
        self._prefixes = prefixes
        self._metadata = metadata
        self._held: set[Allocation] = set()
        self._written: dict[Slot, PageIndices] = {}

    @property
    def held(self) -> Collection[Allocation]:
        """What is allocated and not detached."""
        return self._held

    @property
    def slots_total(self) -> int:
        """Metadata slots, free or not."""
        return self._metadata.num_slots

    @property
    def slots_free(self) -> int:
        """Metadata slots that `allocate` could have."""
        return self._metadata.free_slots

    @property
    def pages_total(self) -> int:
        """Pages of the pool."""
        return self._prefixes.num_pages

    @property
    def pages_available(self) -> int:
        """Pages that `allocate` and `grow` could have: free ones, and those that are only kept for later prompts."""
        return self._prefixes.num_available

    @property
    def pages_written(self) -> int:
        """Pages that were detached and may still be written."""
        return sum(len(pages) for pages in self._written.values())

    def matched_pages(self, sequence: Sequence, find: int) -> tuple[int, int]:
        """Pages of the prefix that `allocate` would find, and how many of them nobody uses now: they are available."""
        return self._prefixes.match(sequence.tokens(0, find), sequence.request.cache_salt)

    def allocate(self, sequence: Sequence, find: int, *, slot: bool) -> Allocation | None:
        """Pages for all tokens that `sequence` has; of its first `find` tokens the longest cached prefix is used.

        Whether there should be room for it is for others to say. None, and nothing is taken, when there is not.
        """
        if slot and not self._metadata.free_slots:
            return None
        prefix = self._prefixes.lock(sequence.tokens(0, find), sequence.request.cache_salt)
        sequence.pages = list(prefix.pages)
        own = self._prefixes.alloc(sequence.pages_short(sequence.num_tokens, self.page_size))
        if own is None:
            self._prefixes.release(prefix, (), ())
            sequence.pages = []
            return None
        sequence.pages.extend(own)
        sequence.computed = len(prefix.pages) * self.page_size
        self.changes += 1
        allocation = Allocation(sequence, prefix, self._metadata.alloc() if slot else None)
        self._held.add(allocation)
        return allocation

    def grow(self, allocation: Allocation, end: int) -> bool:
        """Pages for the KV of tokens `[0, end)`; False, and nothing is taken, when there are too few."""
        short = allocation.sequence.pages_short(end, self.page_size)
        if not short:
            return True
        pages = self._prefixes.alloc(short)
        if pages is None:
            return False
        allocation.sequence.pages.extend(pages)
        return True

    def share(self, allocation: Allocation) -> None:
        """Lets later prompts begin with what is computed of this one; nobody writes these pages any more."""
        sequence = allocation.sequence
        tokens = sequence.tokens(0, sequence.computed)
        self.changes += 1
        allocation.prefix = self._prefixes.share(allocation.prefix, tokens, allocation.own_pages)

    def free_slot(self, allocation: Allocation) -> None:
        """Its metadata is read; nobody writes there any more (I2). May be repeated."""
        if allocation.slot is not None:
            self._metadata.free(allocation.slot)
            allocation.slot = None

    def release(self, allocation: Allocation) -> None:
        """Takes everything back; nobody may write it any more (I2). What is computed stays in the prefix cache."""
        sequence, own = allocation.sequence, allocation.own_pages
        self._let_go(allocation)
        self.free_slot(allocation)
        self._prefixes.release(allocation.prefix, sequence.tokens(0, sequence.computed), own)
        sequence.pages = []
        sequence.computed = 0

    def detach(self, allocation: Allocation) -> tuple[PageIndices, Slot]:
        """Ends an allocation whose own pages and slot may still be written; they come back by `take_back`."""
        sequence, own, slot = allocation.sequence, allocation.own_pages, allocation.slot
        if slot is None:
            raise InternalError("only what was offered may be written, and that has a slot")
        self._let_go(allocation)
        allocation.slot = None
        self._written[slot] = own
        self._prefixes.release(allocation.prefix, (), ())
        sequence.pages = []
        sequence.computed = 0
        return own, slot

    def take_back(self, slot: Slot) -> None:
        """What `detach` gave with this slot is quiet now."""
        self._metadata.free(slot)
        self._prefixes.free(self._written.pop(slot))

    def check_integrity(self) -> None:
        """Raises InternalError when a page or a slot has no owner, or two, or a page is locked by nobody."""
        held = (page for allocation in self._held for page in allocation.own_pages)
        written = (page for pages in self._written.values() for page in pages)
        self._prefixes.check_integrity((*held, *written), [allocation.prefix for allocation in self._held])
        slots = sum(allocation.slot is not None for allocation in self._held) + len(self._written)
        if slots + self._metadata.free_slots != self._metadata.num_slots:
            raise InternalError(f"{slots} metadata slots have an owner, {self._metadata.free_slots} are free")

    def _let_go(self, allocation: Allocation) -> None:
        """Before anything of it is given back: what is not held any more may be another's by now."""
        if allocation not in self._held:
            raise InternalError(f"room {allocation.sequence.request.room} gives back pages that it does not hold")
        self.changes += 1
        self._held.remove(allocation)
