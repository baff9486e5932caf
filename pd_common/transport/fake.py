"""Rooms without a peer, for warm-up and probes, and a backend that moves nothing, for measuring everything else.

A fake room is one whose bootstrap host is FAKE_BOOTSTRAP_HOST. Any backend takes it: it never comes to the transport.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pd_common.errors import InvalidRequest
from pd_common.transport.base import MemoryRegion, Puts, TransportInfo, WriteReceipt
from pd_common.types import BootstrapAddress

FAKE_BOOTSTRAP_HOST = "2.2.2.2"
FAKE = "fake"
"""Name of the backend, and of its carrier. What stands for an address is the same in bytes."""


def is_fake(bootstrap: BootstrapAddress | None) -> bool:
    """Whether a room that is to meet there has no peer."""
    return bootstrap is not None and bootstrap.host == FAKE_BOOTSTRAP_HOST


class FakeChannel:
    """Says that everything is written."""

    carrier = FAKE

    async def write(self, *groups: Puts) -> WriteReceipt:
        return WriteReceipt(sum(puts.total_bytes for puts in groups), sum(len(puts) for puts in groups), 0.0, 0.0)

    async def close(self) -> None:
        """There is nothing to drop."""


class FakePort:
    """Nothing arrives here."""

    address = FAKE.encode()

    async def fence(self) -> None:
        """There is nothing to tear down."""


class FakeTransport:
    """Pairs with its like, and moves nothing."""

    info = TransportInfo(backend=FAKE, library="none", version="1", transports=())

    def register(self, region: MemoryRegion) -> None:
        """Any memory may be registered; none is ever touched."""

    def listen(self, regions: Sequence[MemoryRegion]) -> FakePort:  # noqa: ARG002  none of it is ever written
        return FakePort()

    async def connect(self, address: bytes) -> FakeChannel:
        if address != FakePort.address:
            raise InvalidRequest(
                "this process runs with --transfer-backend fake, the peer does not", field="data_address"
            )
        return FakeChannel()

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        """There is nothing to release."""
