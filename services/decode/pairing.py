"""One paired prefill process, and what shows that it is still there: its beats, and pages that come from it."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field

from pd_common.aio import why_it_died
from pd_common.control import beats
from pd_common.control.connection import Connection
from pd_common.control.peer_client import PeerClient
from pd_common.errors import DeadlineExceeded, PeerLost, TransferFailed
from pd_common.handoff.canary import SEED_BYTES, Canary, CanaryMemory
from pd_common.handoff.chunk import PoolBuffers
from pd_common.handoff.metadata import MetadataBuffers
from pd_common.handoff.quarantine import Writer
from pd_common.transport.base import InboundPort, MemoryRegion
from pd_common.transport.fake import FAKE
from pd_common.types import BootstrapAddress, Instance, KvLayout, ProcessProof

CANARY_S = 10.0
"""When no page has come from a prefill for this long, a canary shows whether one still would."""


@dataclass(slots=True, eq=False)
class Prefill:
    """One paired prefill process. Pages may only be offered to it while it is paired.

    `registration` numbers it among those of this decode. `since_s` and `page_s` are times of the monotonic clock: of
    the pairing, and of the last page that came.
    """

    address: BootstrapAddress
    instance: Instance
    registration: int
    client: PeerClient
    connection: Connection
    port: InboundPort
    process: ProcessProof
    carrier: str
    fenced: asyncio.Event = field(default_factory=asyncio.Event)
    """Our port for it is torn down: nothing can arrive through it any more."""
    canary: Canary | None = None
    since_s: float = field(default_factory=time.monotonic)
    page_s: float = field(default_factory=time.monotonic)

    @property
    def writer(self) -> Writer:
        """As the quarantine knows it."""
        return Writer(self.instance, self.connection.address, self.process)

    def page_came(self) -> None:
        """The way from it works: a room has got its pages, or a canary has."""
        self.page_s = time.monotonic()


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """What this decode offers to every prefill."""

    instance: Instance
    control_address: str
    layout: KvLayout
    pool: PoolBuffers
    regions: tuple[MemoryRegion, ...]
    metadata: MetadataBuffers
    canaries: CanaryMemory


async def send_canary(own: OwnMemory, prefill: Prefill) -> None:
    """Has one page written by the way that real pages take, and looks at what came.

    Raises:
        TransferFailed: another page, or none in time.
        PdError: prefill does not answer, or has forgotten this decode.

    """
    if prefill.carrier == FAKE:
        prefill.page_came()  # nothing ever comes, and nobody waits for it
        return
    seed = secrets.token_bytes(SEED_BYTES)
    async with own.canaries.page() as page:
        try:
            took_s = await prefill.client.send_canary(own.instance, prefill.instance, prefill.registration, page, seed)
        except (TransferFailed, DeadlineExceeded) as error:
            raise _no_way(own, prefill, error.message) from error
        if not own.canaries.holds(page, seed):
            raise _no_way(own, prefill, "the page that came is not the page that was sent")
    prefill.canary = Canary(time.monotonic(), took_s)
    prefill.page_came()


async def until_lost(own: OwnMemory, prefill: Prefill) -> str:
    """Returns when the beats stop or a canary does not come, and says why. Nobody looking is as bad as no sign."""
    target = prefill.address.target
    signs = (
        asyncio.create_task(_follow_beats(own, prefill), name=f"beats of {target}"),
        asyncio.create_task(_keep_trying(own, prefill), name=f"canaries of {target}"),
    )
    try:
        await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
        ended = next(sign for sign in signs if sign.done())
        return why_it_died(ended) or "it has ended the pairing"
    finally:
        for sign in signs:
            sign.cancel()
        await asyncio.gather(*signs, return_exceptions=True)


async def _follow_beats(own: OwnMemory, prefill: Prefill) -> None:
    """Returns when prefill ends the pairing.

    Raises:
        PeerLost: its beats have stopped.

    """
    coming = prefill.client.hold_receiver(own.instance, prefill.instance, prefill.registration)
    try:
        async with beats.Patience() as patience:
            async for _ in coming:
                patience.heard()
    except TimeoutError:
        raise PeerLost(f"no beat for {beats.patience_s():.1f} s", peer=prefill.connection.address) from None


async def _keep_trying(own: OwnMemory, prefill: Prefill) -> None:
    """A canary whenever no page has come for a while, so that a broken way is found before a room needs it.

    Raises:
        PdError: the way is broken, or prefill has forgotten this decode.

    """
    while True:
        quiet_s = time.monotonic() - prefill.page_s
        if quiet_s < CANARY_S:
            await asyncio.sleep(CANARY_S - quiet_s)
            continue
        try:
            await send_canary(own, prefill)
        except PeerLost:
            await asyncio.sleep(beats.BEAT_S)  # whether the call was lost or prefill is, the beats say


def _no_way(own: OwnMemory, prefill: Prefill, why: str) -> TransferFailed:
    mine, theirs, carrier = own.control_address, prefill.connection.address, prefill.carrier
    message = f"no page comes from prefill {theirs} to decode {mine} by {carrier}: {why}"
    return TransferFailed(message, prefill=theirs, decode=mine, carrier=carrier)
