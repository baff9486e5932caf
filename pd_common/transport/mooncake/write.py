"""One write in batches of bounded size: each is with the peer before the next is begun."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pd_common.transport.base import MemoryRegion, Puts, WriteReceipt

_BATCH_PUTS = 1024
"""Mooncake refuses more than about 2,000 at once over tcp."""
_BATCH_BYTES = 64 << 20
"""One put may be more. What is posted cannot be taken back, so this bounds how long it takes to break a write off."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one call writes: local address -> remote address, length in bytes."""

    local: list[int]
    remote: list[int]
    lengths: list[int]


def split(puts: Puts) -> Iterator[Batch]:
    """The puts in batches; those of no length are left out."""
    kept = puts.lengths > 0
    local, remote, lengths = puts.local[kept], puts.remote[kept], puts.lengths[kept]
    bytes_before = np.concatenate(([0], np.cumsum(lengths)))
    start = 0
    while start < len(lengths):
        by_bytes = int(np.searchsorted(bytes_before, bytes_before[start] + _BATCH_BYTES, side="right")) - 1
        end = min(max(by_bytes, start + 1), start + _BATCH_PUTS)
        yield Batch(local[start:end].tolist(), remote[start:end].tolist(), lengths[start:end].tolist())
        start = end


class Write:
    """Invariant: between two calls of `next_batch` all that was given out is with the peer."""

    def __init__(
        self,
        groups: Sequence[Puts],
        sources: Sequence[MemoryRegion],
        started: float,
        done: asyncio.Future[WriteReceipt],
    ) -> None:
        """`sources` are the regions that have to be registered before the first batch."""
        self.sources = sources
        self.done = done
        self._started = started
        self._bytes = sum(puts.total_bytes for puts in groups)
        self._descriptors = sum(len(puts) for puts in groups)
        self._batches = (batch for puts in groups for batch in split(puts))

    def next_batch(self) -> Batch | None:
        """What to write next; None when all is written."""
        return next(self._batches, None)

    def receipt(self) -> WriteReceipt:
        """Mooncake's calls return when the bytes are there: nothing of the time is posting alone."""
        seconds = time.perf_counter() - self._started
        return WriteReceipt(bytes=self._bytes, descriptors=self._descriptors, posting_seconds=0.0, seconds=seconds)
