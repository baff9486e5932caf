"""Digests that show that what arrived is what was sent: of pages, read where they lie, of rows, and of prompts.

Knows page ids and how to read pages, no channel. Both sides must hash the same buffers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from pd_common.handoff.chunk import Int64s, contiguous_runs

DIGEST_BYTES = 16

ReadPages = Callable[[int, int], memoryview]
"""Reads one buffer of a pool: (first page, number of pages) -> their bytes, in order. May be called in a thread."""


class PageDigest:
    """A running 128-bit digest of pages in prompt order, read through one `ReadPages` for each buffer.

    Each buffer has its own state, so it does not matter how pages were cut into chunks and runs on either side.
    `update` releases the GIL while it hashes and may run in a thread; one at a time per object.
    """

    def __init__(self, readers: Sequence[ReadPages]) -> None:
        self._readers = tuple(readers)
        self._states = [xxhash.xxh3_128() for _ in self._readers]

    def update(self, pages: Int64s) -> None:
        """Hashes the bytes that `pages`, ids of the pool, hold now."""
        for first, count in contiguous_runs(pages):
            for read_pages, state in zip(self._readers, self._states, strict=True):
                state.update(read_pages(first, count))

    def digest(self) -> bytes:
        """16 bytes over everything so far."""
        return xxhash.xxh3_128_digest(b"".join(state.digest() for state in self._states))


def digest_row(row: bytes) -> bytes:
    """16 bytes over a metadata row."""
    return xxhash.xxh3_128_digest(row)


def digest_prompt(tokens: Sequence[int]) -> bytes:
    """16 bytes that name a prompt, so that both legs of a room are known to mean the same one."""
    return xxhash.xxh3_128_digest(np.asarray(tokens, dtype="<i8").tobytes())
