"""What the bench moves: the shape of the pool, its layouts, the orders of its pages, and the writes that follow.

Pure; both processes of a transfer derive the same plan from the same `Work`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from pd_common.handoff.chunk import Int64s, PoolBuffers, group_concurrent_contiguous, plan_puts
from pd_common.transport.base import Puts

PAGE_TOKENS = 16
FRAGMENTED_SHARE = 0.3
_SEED = 20240


class Layout(StrEnum):
    """How a pool lays out its pages."""

    PAGES = "pages"
    """One buffer; K and V of all layers of a page lie together: one item per page."""
    LAYERS = "layers"
    """One buffer for K and one for V of each layer: an item per page in each of them."""


class Order(StrEnum):
    """Which pages of the source go to which pages of the destination."""

    CONTIGUOUS = "contiguous"
    """Every page in order on both sides."""
    SHUFFLED = "shuffled"
    """Source list and destination list are two different random orders of all pages."""
    FRAGMENTED = "fragmented"
    """30 % of the places in the two lists, drawn at random, hold pages shuffled among these places, on each side by a
    shuffle of its own; the other 70 % are in order.
    """


@dataclass(frozen=True, slots=True)
class Case:
    """One way to move the whole pool."""

    layout: Layout
    order: Order


@dataclass(frozen=True, slots=True)
class Work:
    """A pool: K and V of `layers` layers, `pages` pages, `page_bytes` bytes for a page of K or of V of one layer."""

    layers: int
    pages: int
    page_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole pool, which is what one transfer moves."""
        return 2 * self.layers * self.pages * self.page_bytes

    def buffers(self, layout: Layout, base: int) -> PoolBuffers:
        """The pool that begins at address `base`."""
        if layout is Layout.PAGES:
            return PoolBuffers((base,), (2 * self.layers * self.page_bytes,), self.pages, PAGE_TOKENS)
        bases = tuple(base + each * self.pages * self.page_bytes for each in range(2 * self.layers))
        return PoolBuffers(bases, (self.page_bytes,) * len(bases), self.pages, PAGE_TOKENS)

    def plan(self, case: Case, source: int, destination: int) -> Puts:
        """The writes of one transfer between the pools at two addresses."""
        ours, theirs = self.buffers(case.layout, source), self.buffers(case.layout, destination)
        runs = group_concurrent_contiguous(*page_lists(case.order, self.pages))
        return plan_puts(runs, ours.bases, theirs.bases, ours.item_lens)


def page_lists(order: Order, pages: int) -> tuple[Int64s, Int64s]:
    """Source and destination page ids, place by place; the same in every process."""
    random = np.random.default_rng(_SEED)
    source, destination = np.arange(pages), np.arange(pages)
    if order is Order.SHUFFLED:
        return random.permutation(source), random.permutation(destination)
    if order is Order.FRAGMENTED:
        places = random.choice(pages, size=round(FRAGMENTED_SHARE * pages), replace=False)
        source[places], destination[places] = random.permutation(places), random.permutation(places)
    return source, destination


def piece_lists(pieces: int) -> tuple[Int64s, Int64s]:
    """Two random orders of `pieces` pieces: where each is read and where it is to lie in the end."""
    return page_lists(Order.SHUFFLED, pieces)


def plan_pieces(piece_bytes: int, pieces: int, source: int, destination: int) -> Puts:
    """One write for each of many small pieces, in random order on both sides."""
    runs = group_concurrent_contiguous(*piece_lists(pieces))
    return plan_puts(runs, (source,), (destination,), (piece_bytes,))
