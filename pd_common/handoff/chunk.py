"""Pages as the unit of a transfer: which pages go now, which runs they form, and which writes that makes.

Pure functions over page ids and addresses; knows no channel, no state and no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pd_common.errors import PagesInvalid
from pd_common.transport.base import Puts
from pd_common.types import BootstrapRoom

Int64s = NDArray[np.int64]

ADDRESS_END = 2**63


@dataclass(frozen=True, slots=True)
class PoolBuffers:
    """Where a pool lies: page `p` of buffer `i` is `item_lens[i]` bytes at `bases[i] + p * item_lens[i]`.

    One page holds `page_size` tokens. All pages together stay within the address space, so no page id below
    `num_pages` can overflow an address (I11).
    """

    bases: tuple[int, ...]
    item_lens: tuple[int, ...]
    num_pages: int
    page_size: int

    def __post_init__(self) -> None:
        if len(self.bases) != len(self.item_lens) or not self.bases:
            raise PagesInvalid("A pool has one item length per buffer", buffers=len(self.bases))
        if self.num_pages < 1 or self.page_size < 1:
            raise PagesInvalid("A pool has pages, and pages hold tokens", num_pages=self.num_pages)
        for base, item_len in zip(self.bases, self.item_lens, strict=True):
            if base < 0 or item_len < 1 or base + item_len * self.num_pages > ADDRESS_END:
                raise PagesInvalid("A buffer leaves the address space", base=base, item_len=item_len)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all buffers (B_page)."""
        return sum(self.item_lens)


@dataclass(frozen=True, slots=True, eq=False)
class TransferKVChunk:
    """One send of one room: source pages for the destination list's entries from `dst_offset_pages` on."""

    room: BootstrapRoom
    index: int
    src_pages: Int64s
    dst_offset_pages: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Runs:
    """Stretches in which source and destination ids both step by one, as parallel int64 arrays."""

    src_start: Int64s
    dst_start: Int64s
    count: Int64s

    def __len__(self) -> int:
        return len(self.count)


def prefix_pages(prompt_tokens: int, decode_prefix_len: int, page_size: int) -> int:
    """Whole pages that decode has already.

    Raises:
        PagesInvalid: the prefix is no multiple of the page size or longer than the prompt.

    """
    if decode_prefix_len % page_size or not 0 <= decode_prefix_len <= prompt_tokens:
        raise PagesInvalid(
            "A decode prefix is whole pages of the prompt",
            decode_prefix_len=decode_prefix_len,
            prompt_tokens=prompt_tokens,
            page_size=page_size,
        )
    return decode_prefix_len // page_size


def pages_to_transfer(prompt_tokens: int, decode_prefix_len: int, page_size: int) -> int:
    """Length of the destination page list of a prompt."""
    return -(-prompt_tokens // page_size) - prefix_pages(prompt_tokens, decode_prefix_len, page_size)


def pages_due(
    *, tokens_computed: int, page_size: int, pages_sent: int, prefix_pages: int, is_last: bool
) -> range | None:
    """Which pages of the prompt go now, counted from the prompt's start; None when there is nothing to send.

    Before the end only whole pages go and the remainder rides with the next send. The last send always happens, with
    no pages if need be, because the metadata travels with it.
    """
    start = prefix_pages + pages_sent
    complete = -(-tokens_computed // page_size) if is_last else tokens_computed // page_size
    if complete <= start and not is_last:
        return None
    return range(start, max(start, complete))


class ChunkPlanner:
    """Cuts one room's page table into chunks as the prompt is computed. Every page is planned once, in order."""

    def __init__(self, room: BootstrapRoom, prompt_tokens: int, page_size: int, decode_prefix_len: int) -> None:
        self._room = room
        self._prompt_tokens = prompt_tokens
        self._page_size = page_size
        self._prefix_pages = prefix_pages(prompt_tokens, decode_prefix_len, page_size)
        self._pages_sent = 0
        self._chunks = 0

    def next_chunk(self, tokens_computed: int, page_table: Sequence[int], *, is_last: bool) -> TransferKVChunk | None:
        """The chunk that is due once `tokens_computed` tokens of the prompt have KV in the pages of `page_table`.

        None when no new page is complete. The last chunk may be asked for, once, when the whole prompt is computed.

        Raises:
            PagesInvalid: more tokens than the prompt has, fewer at the end, or a page table that does not hold them.

        """
        if tokens_computed > self._prompt_tokens or (is_last and tokens_computed < self._prompt_tokens):
            raise PagesInvalid("Not the prompt's tokens", computed=tokens_computed, prompt_tokens=self._prompt_tokens)
        due = pages_due(
            tokens_computed=tokens_computed,
            page_size=self._page_size,
            pages_sent=self._pages_sent,
            prefix_pages=self._prefix_pages,
            is_last=is_last,
        )
        if due is None:
            return None
        if due.stop > len(page_table):
            raise PagesInvalid("The page table is too short", pages=len(page_table), needed=due.stop)
        src_pages = np.array(page_table[due.start : due.stop], dtype=np.int64)
        chunk = TransferKVChunk(self._room, self._chunks, src_pages, self._pages_sent, is_last)
        self._pages_sent += len(due)
        self._chunks += 1
        return chunk


def group_concurrent_contiguous(src: Int64s, dst: Int64s) -> Runs:
    """Merges neighbours as long as both ids step by one.

    Raises:
        PagesInvalid: the lists differ in length.

    """
    if len(src) != len(dst):
        raise PagesInvalid("Source and destination page lists differ in length", source=len(src), destination=len(dst))
    if len(src) == 0:
        empty = np.empty(0, dtype=np.int64)
        return Runs(empty, empty, empty)
    breaks = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    count = np.diff(np.concatenate((starts, [len(src)])))
    return Runs(src[starts], dst[starts], count)


def plan_puts(runs: Runs, src_bases: Sequence[int], dst_bases: Sequence[int], item_lens: Sequence[int]) -> Puts:
    """One write per buffer and run, buffer by buffer."""
    lens = np.asarray(item_lens, dtype=np.int64)[:, None]
    local = np.asarray(src_bases, dtype=np.int64)[:, None] + runs.src_start * lens
    remote = np.asarray(dst_bases, dtype=np.int64)[:, None] + runs.dst_start * lens
    return Puts(local.ravel(), remote.ravel(), (runs.count * lens).ravel())


def contiguous_runs(pages: Int64s) -> Iterator[tuple[int, int]]:
    """(first page, count) of every stretch of one list."""
    runs = group_concurrent_contiguous(pages, pages)
    return zip(runs.src_start.tolist(), runs.count.tolist(), strict=True)


def check_pages(pages: Sequence[int], num_pages: int, expected: int) -> Int64s:
    """A page list from the network as an array that is safe to turn into addresses (I11).

    Raises:
        PagesInvalid: not exactly `expected` pages, a page outside the pool, or a page twice.

    """
    if len(pages) != expected:
        raise PagesInvalid("The page list has the wrong length", expected=expected, got=len(pages))
    if len(pages) and not (min(pages) >= 0 and max(pages) < num_pages):
        raise PagesInvalid("A page lies outside the pool", num_pages=num_pages, lowest=min(pages), highest=max(pages))
    if len(set(pages)) != expected:
        raise PagesInvalid("The page list names a page twice", pages=expected)
    return np.array(pages, dtype=np.int64)
