"""Digests that show that what arrived is what was sent: of pages, read where they lie, and of prompts.

Knows addresses and page ids, no channel. Both sides must hash the same buffers in the same order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import xxhash

from pd_common.handoff.chunk import Int64s, PoolBuffers, contiguous_runs


class PageDigest:
    """A running 128-bit digest of pages in prompt order.

    Each buffer has its own state, so it does not matter how pages were cut into chunks and runs on either side.
    `update` releases the GIL while it hashes and may run in a thread; one at a time per object.
    """

    def __init__(self, pool: PoolBuffers) -> None:
        self._item_lens = pool.item_lens
        self._views = [
            _view(base, item_len * pool.num_pages) for base, item_len in zip(pool.bases, pool.item_lens, strict=True)
        ]
        self._states = [xxhash.xxh3_128() for _ in pool.bases]

    def update(self, pages: Int64s) -> None:
        """Hashes the bytes that `pages`, ids below the pool's `num_pages`, hold now."""
        runs = list(contiguous_runs(pages))
        for view, item_len, state in zip(self._views, self._item_lens, self._states, strict=True):
            for first, count in runs:
                state.update(view[first * item_len : (first + count) * item_len])

    def digest(self) -> bytes:
        """16 bytes over everything so far."""
        return xxhash.xxh3_128_digest(b"".join(state.digest() for state in self._states))


def digest_pages(pool: PoolBuffers, pages: Int64s) -> bytes:
    """The digest of `pages` as one piece; may run in a thread."""
    whole = PageDigest(pool)
    whole.update(pages)
    return whole.digest()


def digest_prompt(tokens: Sequence[int]) -> bytes:
    """16 bytes that name a prompt, so that both legs of a room are known to mean the same one."""
    return xxhash.xxh3_128_digest(np.asarray(tokens, dtype="<i8").tobytes())


def _view(base: int, length: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * length).from_address(base)).cast("B")
