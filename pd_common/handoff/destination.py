"""Where prefill may write for one room: decode's offer, checked against the memory that decode registered (I1, I11)."""

from __future__ import annotations

from dataclasses import dataclass

from pd_common.errors import PagesInvalid
from pd_common.handoff.chunk import ADDRESS_END, Int64s, PoolBuffers, check_pages, pages_to_transfer
from pd_common.handoff.metadata import ROW_BYTES, Slot
from pd_common.transport.base import Channel
from pd_common.types import Instance, PageIndices


@dataclass(frozen=True, slots=True)
class Offer:
    """What decode publishes for one room: pages in prompt order after the prefix it has already, and a metadata slot.

    `receiver` is the decode process; `decode_prefix_len` counts tokens; `state_indices` has one entry for each of the
    layout's state kinds, in that order; `ticket` is the right to the room, shown with every word on it.
    """

    receiver: Instance
    pages: PageIndices
    slot: Slot
    decode_prefix_len: int
    prompt_tokens: int
    prompt_digest: bytes
    state_indices: tuple[tuple[int, ...], ...] = ()
    ticket: bytes = b""


@dataclass(frozen=True, slots=True)
class RemotePool:
    """What one decode process has registered: its KV pool and its metadata rows, by remote address.

    `num_state_kinds` is the number of lists of state indices that its layout asks of every offer.
    """

    buffers: PoolBuffers
    metadata_base: int
    num_slots: int
    num_state_kinds: int = 0

    def __post_init__(self) -> None:
        end = self.metadata_base + self.num_slots * ROW_BYTES
        if self.metadata_base < 0 or self.num_slots < 1 or end > ADDRESS_END:
            raise PagesInvalid("The metadata rows leave the address space", base=self.metadata_base, end=end)


@dataclass(frozen=True, slots=True)
class Destination:
    """An offer with the way to it. There is none that is not valid: every index lies in the remote pool.

    Raises:
        PagesInvalid: wrong number of pages or of lists of state indices, a page or the slot outside the pool, a page
            twice, a prefix that is no whole pages.

    """

    offer: Offer
    pool: RemotePool
    channel: Channel

    def __post_init__(self) -> None:
        check_offer(self.offer, self.pool)


def check_offer(offer: Offer, pool: RemotePool) -> Int64s:
    """The offer's pages as an array that is safe to turn into addresses of `pool`.

    Raises:
        PagesInvalid: see Destination.

    """
    expected = pages_to_transfer(offer.prompt_tokens, offer.decode_prefix_len, pool.buffers.page_size)
    if not 0 <= offer.slot.index < pool.num_slots:
        raise PagesInvalid("The metadata slot is not registered", index=offer.slot.index, slots=pool.num_slots)
    kinds, lists = pool.num_state_kinds, len(offer.state_indices)
    if lists != kinds:
        raise PagesInvalid("One list of state indices for each state kind", expected=kinds, got=lists)
    return check_pages(offer.pages, pool.buffers.num_pages, expected)
