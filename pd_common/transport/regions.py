"""Which of some disjoint memory regions holds an address range: one vectorised look-up for thousands of ranges."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pd_common.errors import InternalError, InvalidRequest, PagesInvalid
from pd_common.transport.base import MemoryRegion, Puts

Addresses = NDArray[np.int64]


class RegionTable:
    """Disjoint regions, sorted by address; never changed once made."""

    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
        """Sorts the regions.

        Raises:
            InvalidRequest: two of them overlap, or one is not a range of addresses.
        """
        self.regions = tuple(sorted(regions, key=lambda region: region.base))
        end = 0
        for region in self.regions:
            if region.base < end or region.length <= 0 or region.base + region.length >= 2**63:
                raise InvalidRequest("regions overlap or are no ranges", base=region.base, length=region.length)
            end = region.base + region.length
        self._bases = np.array([region.base for region in self.regions], dtype=np.int64)
        self._ends = np.array([region.base + region.length for region in self.regions], dtype=np.int64)

    def find(self, addresses: Addresses, lengths: Addresses) -> Addresses | None:
        """Index into `regions` for each range, or None when a range does not lie within one region."""
        if not len(addresses):
            return np.empty(0, dtype=np.int64)
        if not len(self.regions):
            return None
        found = np.searchsorted(self._bases, addresses, side="right") - 1
        room = self._ends[found] - addresses
        inside = (found >= 0) & (lengths >= 0) & (lengths <= room)
        return found if bool(inside.all()) else None

    def holds(self, region: MemoryRegion) -> bool:
        """Whether the region lies within one of these."""
        return self.find(np.array([region.base]), np.array([region.length])) is not None


def locate(puts: Puts, registered: RegionTable, offered: RegionTable) -> tuple[Addresses, Addresses]:
    """Index of the region that holds each put, in `registered` where it reads and in `offered` where it writes.

    Raises:
        PagesInvalid: a put leaves what the peer has offered.
        InternalError: it reads what is not registered, or the arrays are not parallel: a defect of the caller.
    """
    _check_shape(puts)
    targets = offered.find(puts.remote, puts.lengths)
    if targets is None:
        raise PagesInvalid("a write leaves the memory that the peer has offered", descriptors=len(puts))
    sources = registered.find(puts.local, puts.lengths)
    if sources is None:
        raise InternalError("a write reads memory that is not registered", descriptors=len(puts))
    return sources, targets


def _check_shape(puts: Puts) -> None:
    if not len(puts.local) == len(puts.remote) == len(puts.lengths):
        raise InternalError(
            "the arrays of a write differ in length",
            local=len(puts.local),
            remote=len(puts.remote),
            lengths=len(puts.lengths),
        )
