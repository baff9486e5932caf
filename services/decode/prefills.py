"""Prefill processes that this decode works with: found through their Bootstrap service, paired once, then watched."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pd_common.control.clients import BootstrapClient, Connection, Dial, PeerClient
from pd_common.errors import LayoutMismatch, PdError, PeerLost
from pd_common.handoff.chunk import PoolBuffers
from pd_common.handoff.metadata import ROW_BYTES, MetadataBuffers
from pd_common.handoff.quarantine import Writer
from pd_common.transport.base import InboundPort, MemoryRegion, Transport
from pd_common.types import BootstrapAddress, Instance, KvLayout, ProcessProof, RankInfo, Role

_log = logging.getLogger(__name__)

_BEAT_PATIENCE = 5
"""A prefill that misses this many beats is taken for dead; long steps of its engine do not stop the beats."""
_PROOF_PATIENCE_S = 5.0
"""How long rooms wait for a process that owes proofs; one that runs gives them at once."""


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
        return Writer(self.instance, self.connection.address, self.process)


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

    `on_lost` is told when one ends; then its port is fenced. `proven` returns when a process owes no proof for memory
    in quarantine: before that it is not paired again, so that no process can bring more and more memory there.
    """

    def __init__(
        self,
        own: OwnMemory,
        transport: Transport,
        on_lost: Callable[[Prefill, PeerLost], None],
        proven: Callable[[Instance], Awaitable[None]],
        dial: Dial,
    ) -> None:
        self._own = own
        self._transport = transport
        self._on_lost = on_lost
        self._proven = proven
        self._dial = dial
        self._paired: dict[Instance, Prefill] = {}
        self._meetings: dict[Instance, asyncio.Task[Prefill]] = {}
        self._pairings: dict[BootstrapAddress, asyncio.Task[Prefill]] = {}
        self._watches: set[asyncio.Task[None]] = set()

    async def pair_with(self, address: BootstrapAddress) -> Prefill:
        """The prefill at this address, paired now if it was not.

        Raises:
            PeerLost, TopologyIncomplete: it is not there (yet), or owes proofs.
            LayoutMismatch: it cannot be paired.

        """
        pairing = self._pairings.get(address)
        if pairing is None or (pairing.done() and not self._is_valid(pairing)):
            pairing = asyncio.create_task(self._pair(address))
            pairing.add_done_callback(_look_at_failure)
            self._pairings[address] = pairing
        return await asyncio.shield(pairing)

    def is_current(self, prefill: Prefill) -> bool:
        """The pairing has not been lost."""
        return self._paired.get(prefill.instance) is prefill

    async def forget(self, prefill: Prefill, why: str) -> None:
        """Ends a pairing; its rooms fail and nothing can arrive from it any more when this returns."""
        if not self.is_current(prefill):
            return
        del self._paired[prefill.instance]
        for name in [
            name for name, pairing in self._pairings.items() if pairing.done() and not self._is_valid(pairing)
        ]:
            del self._pairings[name]
        _log.info("prefill %s (%s) is lost: %s", prefill.address.target, prefill.instance.instance_id, why)
        error = PeerLost(f"prefill {prefill.address.target} is gone: {why}", peer=prefill.address.target)
        self._on_lost(prefill, error)
        # The room that asks for it may be stopped meanwhile; memory of others waits for the end of this port.
        await asyncio.shield(_fence(prefill))

    async def close(self) -> None:
        """Ends every pairing."""
        for prefill in tuple(self._paired.values()):
            await self.forget(prefill, "this process stops")
        tasks = (*self._watches, *self._meetings.values(), *self._pairings.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_valid(self, pairing: asyncio.Task[Prefill]) -> bool:
        prefill = _result(pairing)
        return prefill is not None and self.is_current(prefill)

    async def _pair(self, address: BootstrapAddress) -> Prefill:
        bootstrap = self._dial(address.target, Role.PREFILL)
        try:
            rank = _only_rank(await BootstrapClient(bootstrap).get_topology(), address)
        finally:
            await bootstrap.close()
        known = self._paired.get(rank.instance)
        if known is not None:
            return known  # by another name
        meeting = self._meetings.get(rank.instance)
        if meeting is None:
            meeting = self._meetings[rank.instance] = asyncio.create_task(self._meet(address, rank))
            meeting.add_done_callback(lambda _: self._meetings.pop(rank.instance, None))
        return await asyncio.shield(meeting)

    async def _meet(self, address: BootstrapAddress, rank: RankInfo) -> Prefill:
        await self._require_proofs(address, rank.instance)
        connection = self._dial(rank.control_address, Role.PREFILL)
        port = self._transport.listen(self._own.regions)
        try:
            prefill = await self._register(address, rank.instance, connection, port)
        except BaseException:
            await port.fence()
            await connection.close()
            raise
        self._paired[prefill.instance] = prefill
        watch = asyncio.create_task(self._watch(prefill))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        _log.info("paired with prefill %s, pages arrive by %s", address.target, prefill.carrier)
        return prefill

    async def _require_proofs(self, address: BootstrapAddress, instance: Instance) -> None:
        try:
            async with asyncio.timeout(_PROOF_PATIENCE_S):
                await self._proven(instance)
        except TimeoutError:
            peer = address.target
            raise PeerLost(f"prefill {peer} has not said that it is quiet for rooms that failed", peer=peer) from None

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
