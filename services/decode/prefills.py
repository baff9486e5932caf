"""Prefill processes that this decode works with: found through their Bootstrap service, paired once, then watched."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from pd_common.control.clients import BootstrapClient, Connection, PeerClient
from pd_common.errors import LayoutMismatch, PdError, PeerLost
from pd_common.handoff.chunk import PoolBuffers
from pd_common.handoff.metadata import ROW_BYTES, MetadataBuffers
from pd_common.handoff.quarantine import Writer
from pd_common.transport.base import InboundPort, MemoryRegion, Transport
from pd_common.types import BootstrapAddress, Instance, KvLayout, ProcessProof, RankInfo

_log = logging.getLogger(__name__)

_BEAT_PATIENCE = 5
"""A prefill that misses this many beats is taken for dead; long steps of its engine do not stop the beats."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """One paired prefill process. Pages may only be offered to it while it is paired."""

    address: BootstrapAddress
    instance: Instance
    client: PeerClient
    connection: Connection
    port: InboundPort
    process: ProcessProof
    carrier: str
    fenced: asyncio.Event
    """Our port for it is torn down: nothing can arrive through it any more."""

    @property
    def writer(self) -> Writer:
        """As the quarantine knows it."""
        return Writer(self.instance, self.process)


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """What this decode offers to every prefill."""

    instance: Instance
    control_address: str
    layout: KvLayout
    pool: PoolBuffers
    regions: tuple[MemoryRegion, ...]
    metadata: MetadataBuffers


class Prefills:
    """At most one pairing per process, whatever names its Bootstrap address goes by.

    `on_lost` is told when one ends; then its port is fenced.
    """

    def __init__(
        self,
        own: OwnMemory,
        transport: Transport,
        on_lost: Callable[[Prefill, PeerLost], None],
    ) -> None:
        self._own = own
        self._transport = transport
        self._on_lost = on_lost
        self._pairings: dict[BootstrapAddress, asyncio.Task[Prefill]] = {}
        self._watches: set[asyncio.Task[None]] = set()

    async def pair_with(self, address: BootstrapAddress) -> Prefill:
        """The prefill at this address, paired now if it was not.

        Raises:
            PeerLost, TopologyIncomplete: it is not there (yet).
            LayoutMismatch: it cannot be paired.

        """
        pairing = self._pairings.get(address)
        if pairing is None or (pairing.done() and _result(pairing) is None):
            pairing = asyncio.create_task(self._pair(address))
            pairing.add_done_callback(_look_at_failure)
            self._pairings[address] = pairing
        return await asyncio.shield(pairing)

    def is_current(self, prefill: Prefill) -> bool:
        """The pairing has not been lost."""
        return prefill in self._paired()

    async def forget(self, prefill: Prefill, why: str) -> None:
        """Ends a pairing; its rooms fail and nothing can arrive from it any more when this returns."""
        if not self.is_current(prefill):
            return
        names = [name for name, pairing in self._pairings.items() if _result(pairing) is prefill]
        for name in names:
            del self._pairings[name]
        _log.info("prefill %s (%s) is lost: %s", prefill.address.target, prefill.instance.instance_id, why)
        error = PeerLost(f"prefill {prefill.address.target} is gone: {why}", peer=prefill.address.target)
        self._on_lost(prefill, error)
        # The room that asks for it may be stopped meanwhile; memory of others waits for the end of this port.
        await asyncio.shield(_fence(prefill))

    async def close(self) -> None:
        """Ends every pairing."""
        for prefill in self._paired():
            await self.forget(prefill, "this process stops")
        for task in (*self._watches, *self._pairings.values()):
            task.cancel()
        await asyncio.gather(*self._watches, *self._pairings.values(), return_exceptions=True)

    def _paired(self) -> set[Prefill]:
        return {prefill for pairing in self._pairings.values() if (prefill := _result(pairing)) is not None}

    async def _pair(self, address: BootstrapAddress) -> Prefill:
        bootstrap = Connection(address.target)
        try:
            rank = _only_rank(await BootstrapClient(bootstrap).get_topology(), address)
        finally:
            await bootstrap.close()
        for prefill in self._paired():
            if prefill.instance == rank.instance:
                return prefill  # known by another name already
        connection = Connection(rank.control_address)
        port = self._transport.listen(self._own.regions)
        try:
            prefill = await self._register(address, rank.instance, connection, port)
        except BaseException:
            await port.fence()
            await connection.close()
            raise
        watch = asyncio.create_task(self._watch(prefill))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        _log.info("paired with prefill %s, pages arrive by %s", address.target, prefill.carrier)
        return prefill

    async def _register(
        self, address: BootstrapAddress, instance: Instance, connection: Connection, port: InboundPort
    ) -> Prefill:
        own, client = self._own, PeerClient(connection)
        process, carrier = await client.register_receiver(
            receiver=own.instance,
            sender=instance,
            control_address=own.control_address,
            layout=own.layout,
            data_address=port.address,
            buffer_bases=own.pool.bases,
            num_pages=own.pool.num_pages,
            metadata_base=own.metadata.region.base,
            metadata_item_len_bytes=ROW_BYTES,
            metadata_slots=own.metadata.num_slots,
        )
        return Prefill(address, instance, client, connection, port, process, carrier, asyncio.Event())

    async def _watch(self, prefill: Prefill) -> None:
        """Follows the beats until they stop."""
        try:
            why = await self._beats(prefill)
        except PdError as error:
            why = error.message
        await self.forget(prefill, why)
        await prefill.connection.close()

    async def _beats(self, prefill: Prefill) -> str:
        beats = prefill.client.hold_receiver(self._own.instance, prefill.instance)
        patience_s = float(_BEAT_PATIENCE)
        try:
            while True:
                async with asyncio.timeout(patience_s):
                    patience_s = _BEAT_PATIENCE * await anext(beats)
        except TimeoutError:
            return f"no beat for {patience_s:.1f} s"
        except StopAsyncIteration:
            return "it ended the pairing"


def _result(pairing: asyncio.Task[Prefill]) -> Prefill | None:
    """The prefill; None while it is not paired, and when pairing has failed."""
    if not pairing.done() or pairing.cancelled() or pairing.exception() is not None:
        return None
    return pairing.result()


async def _fence(prefill: Prefill) -> None:
    await prefill.port.fence()
    prefill.fenced.set()


def _look_at_failure(pairing: asyncio.Task[Prefill]) -> None:
    """A room that waited may have been aborted meanwhile; then nobody else would have asked how it went."""
    if not pairing.cancelled() and pairing.exception() is not None:
        _log.warning("pairing failed: %s", pairing.exception())


def _only_rank(ranks: tuple[RankInfo, ...], address: BootstrapAddress) -> RankInfo:
    if len(ranks) != 1:
        raise LayoutMismatch(
            f"prefill {address.target} has {len(ranks)} ranks, this decode has 1",
            field="position",
            mine=1,
            theirs=len(ranks),
        )
    return ranks[0]
