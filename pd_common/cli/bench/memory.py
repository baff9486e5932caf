"""A pool of the bench: memory as the engine's KV pool has it, with content that can be checked."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import xxhash
from numpy.typing import NDArray

from pd_common.cli.bench.work import Case, Work, page_lists
from pd_common.transport.base import MemoryRegion


class Pool:
    """Memory for one pool, in huge pages where the kernel has them, every page of it touched."""

    def __init__(self, size: int) -> None:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages is only slower
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        self.clear()

    @property
    def region(self) -> MemoryRegion:
        """Where it lies in this process."""
        return MemoryRegion(self.bytes.ctypes.data, self.bytes.nbytes)

    def fill(self) -> None:
        """Random bytes, the same in every run and different in every page."""
        words = self.bytes.view(np.uint64)
        words[:] = np.random.default_rng(0).integers(0, 2**64, len(words), dtype=np.uint64)

    def clear(self) -> None:
        """Bytes that no transfer brings, so that an earlier transfer cannot pass for a later one."""
        self.bytes.fill(1)

    def source_digest(self, work: Work, case: Case) -> int:
        """Digest of what a transfer reads, in the order of the source list."""
        return self._digest(work, case, page_lists(case.order, work.pages)[0].tolist())

    def destination_digest(self, work: Work, case: Case) -> int:
        """Digest of what a transfer wrote, in the order of the destination list: equal when every byte arrived."""
        return self._digest(work, case, page_lists(case.order, work.pages)[1].tolist())

    def _digest(self, work: Work, case: Case, pages: list[int]) -> int:
        digest = xxhash.xxh3_64()
        buffers = work.buffers(case.layout, 0)
        for base, item_len in zip(buffers.bases, buffers.item_lens, strict=True):
            for page in pages:
                digest.update(self.bytes[base + page * item_len : base + (page + 1) * item_len].data)
        return digest.intdigest()
