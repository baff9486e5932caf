"""Rooms without a peer, for warm-up and probes, and the backend that serves nothing else.

A fake room is one whose bootstrap host is FAKE_BOOTSTRAP_HOST. Any backend takes it: it never comes to the transport.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NoReturn

from pd_common.errors import InvalidRequest
from pd_common.transport.base import MemoryRegion, TransportInfo
from pd_common.types import BootstrapAddress

FAKE_BOOTSTRAP_HOST = "2.2.2.2"


def is_fake(bootstrap: BootstrapAddress) -> bool:
    """Whether a room that is to meet there has no peer."""
    return bootstrap.host == FAKE_BOOTSTRAP_HOST


def require_fake(bootstrap: BootstrapAddress) -> None:
    """For a process that moves no pages.

    Raises:
        InvalidRequest: the room has a peer.
    """
    if not is_fake(bootstrap):
        raise _moves_nothing("bootstrap_host", bootstrap_host=bootstrap.host)


class FakeTransport:
    """Moves nothing: it can neither be written to nor write."""

    info = TransportInfo(backend="fake", library="none", version="1", transports=())

    def register(self, region: MemoryRegion) -> None:
        """Any memory may be registered; none is ever touched."""

    def listen(self, regions: Sequence[MemoryRegion]) -> NoReturn:
        raise _moves_nothing("transfer_backend", regions=len(regions))

    async def connect(self, address: bytes) -> NoReturn:
        raise _moves_nothing("data_address", bytes=len(address))

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        """There is nothing to release."""


def _moves_nothing(field: str, **facts: object) -> InvalidRequest:
    return InvalidRequest(
        "this process runs with --transfer-backend fake and moves no pages: "
        f"send bootstrap_host {FAKE_BOOTSTRAP_HOST}, or start it with another backend",
        field=field,
        **facts,
    )
