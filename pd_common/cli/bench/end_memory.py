"""The memory of one end: its pool, and a buffer for staging."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pd_common.cli.bench.ends import Regions
from pd_common.cli.bench.memory import Pool
from pd_common.cli.bench.spec import Side, Spec
from pd_common.transport.base import MemoryRegion


class EndMemory:
    """The pool and the staging buffer of one end; a sender's pool is filled."""

    def __init__(self, spec: Spec) -> None:
        self.pool = Pool(spec.work.total_bytes)
        if spec.side is Side.SENDER:
            self.pool.fill()
        self.staging: NDArray[np.uint8] = np.ones(spec.staging_bytes, dtype=np.uint8)

    @property
    def regions(self) -> Regions:
        if not len(self.staging):
            return [self.pool.region]
        return [self.pool.region, self.staging_region]

    @property
    def staging_region(self) -> MemoryRegion:
        return MemoryRegion(self.staging.ctypes.data, self.staging.nbytes)

    def pieces(self, piece_bytes: int, pieces: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """The beginning of the pool and of the staging buffer, as `[pieces, piece_bytes]`."""
        size = piece_bytes * pieces
        shape = (pieces, piece_bytes)
        return self.pool.bytes[:size].reshape(shape), self.staging[:size].reshape(shape)
