"""The seam of the data plane: one-sided writes into memory that another process has offered.

A receiver listens once per peer and hands out opaque address bytes; a sender connects to such an address and writes.
Nothing here knows rooms, pages or layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """`length` bytes of this process's memory, from address `base`, that stay valid while the transport lives."""

    base: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Puts:
    """Writes in parallel arrays (int64, same length): local address -> remote address, length in bytes."""

    local: NDArray[np.int64]
    remote: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @property
    def total_bytes(self) -> int:
        """Sum of all lengths."""
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, slots=True)
class WriteReceipt:
    """What one `Channel.write` moved. Times are seconds; `seconds` runs from the call to remote visibility."""

    bytes: int
    descriptors: int
    posting_seconds: float
    seconds: float

    def without(self, puts: Sequence[Puts]) -> WriteReceipt:
        """As if these had not been among what was written."""
        return replace(
            self,
            bytes=self.bytes - sum(each.total_bytes for each in puts),
            descriptors=self.descriptors - sum(len(each) for each in puts),
        )

    def __add__(self, after: WriteReceipt) -> WriteReceipt:
        """Both, one after the other."""
        return WriteReceipt(
            self.bytes + after.bytes,
            self.descriptors + after.descriptors,
            self.posting_seconds + after.posting_seconds,
            self.seconds + after.seconds,
        )


@dataclass(frozen=True, slots=True)
class TransportInfo:
    """What carries the data, for logs and status: library, its version and file, transports it offers.

    `devices` are the network devices that it may use, `settings` what is not the library's default, as `NAME=value`.
    """

    backend: str
    library: str
    version: str
    transports: tuple[str, ...]
    devices: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


class Channel(Protocol):
    """The way from a sender into one receiver's offered memory.

    After a failed write the channel is broken for good: every later write raises at once.
    """

    @property
    def carrier(self) -> str:
        """What carries large writes, for example `cma`, `rc_mlx5/mlx5_0:1`, or `tcp/eth0+tcp/eth1` over two rails."""

    async def write(self, *groups: Puts) -> WriteReceipt:
        """Writes all groups, each visible only after the one before; returns when all of it is visible remotely.

        When this returns, or raises after a failed write, nothing of these groups is written any more, except what a
        network still holds of a connection that was cut off: only the receiver's fence stops that. Cancelling the
        awaiting task does not stop what is posted: the caller must shield and await it (that is the drain of a room).

        Raises:
            PagesInvalid: a remote range lies outside the offered regions (nothing was written).
            TransferFailed: the receiver's memory could not be written.
            PeerLost: the receiver is gone.

        """

    async def close(self) -> None:
        """Drops the connection; outstanding writes fail with TransferFailed."""


class InboundPort(Protocol):
    """A receiver's end for exactly one peer, so that one peer can be cut off without touching the others."""

    @property
    def address(self) -> bytes:
        """Opaque bytes for the peer's `connect`: how to reach this port, the offered regions and their keys."""

    async def fence(self) -> None:
        """Tears the port down. When it returns nothing more can arrive through it (for CMA: unless the writer's process
        still lives on this host, see handoff/quarantine.py).
        """


class Transport(Protocol):
    """One data-plane backend in one process. Thread-safe towards the event loop it was made in."""

    @property
    def info(self) -> TransportInfo:
        """Library, version, transports, devices and settings."""

    def listen(self, regions: Sequence[MemoryRegion]) -> InboundPort:
        """Offers regions (registered by `register`) to one peer."""

    def register(self, region: MemoryRegion) -> None:
        """Makes a region known to the transport as source or destination. Idempotent."""

    async def connect(self, address: bytes) -> Channel:
        """Connects to a peer's port.

        Raises:
            InvalidRequest: the bytes are not an address of this backend.
            TransferFailed: the port cannot be reached.

        """

    async def watch(self) -> None:
        """Waits for a defect that has broken the transport as a whole, and raises it; otherwise it never returns."""

    async def close(self) -> None:
        """Releases every endpoint, worker, region and thread."""
