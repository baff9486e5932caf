"""The two ends of a transfer as the bench sees them, whatever library is behind: which there are, and how one opens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pd_common.transport.base import MemoryRegion, Puts

BACKENDS = ("ucx", "nixl", "mooncake")
"""Carried by this project's transport."""
NIXL_PUBLISHED = "nixl-published"
NIXL_TUNED = "nixl-tuned"
SOCKET = "socket"
RIVALS = (NIXL_PUBLISHED, NIXL_TUNED, SOCKET)
"""Carried by others, without this project's transport."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What one write took, in seconds: until the last descriptor was handed over, and until all was visible."""

    posting_s: float
    total_s: float


class SendingEnd(Protocol):
    """Writes from its regions into the receiving end's."""

    @property
    def library(self) -> str:
        """Name and version of what carries the bytes."""

    @property
    def carrier(self) -> str:
        """The transport that carries large writes, once connected."""

    async def connect(self, address: bytes) -> None:
        """Connects to a receiving end."""

    async def write(self, puts: Puts) -> Moved:
        """Returns when everything is visible on the other side."""


class ReceivingEnd(Protocol):
    """Offers its regions."""

    @property
    def address(self) -> bytes:
        """For the sending end's `connect`."""

    async def expect(self, puts: Puts) -> None:
        """Announces the next write to ends that have to take part in it; one-sided ends need nothing."""


@dataclass(frozen=True, slots=True)
class EndSettings:
    """Which end is to be opened, its own host, and the options of this project's transport."""

    contender: str
    host: str
    ucx_library: str
    ucx_binding: str
    ib_device: str | None


Regions = Sequence[MemoryRegion]
