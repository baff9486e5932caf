"""Prefill processes that this decode works with: found through their Bootstrap service, paired once, then watched."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from pd_common.addresses import parse_address
from pd_common.aio import Tasks
from pd_common.control.connection import Connection, Dial
from pd_common.control.peer_client import PeerClient
from pd_common.control.peers import Peer
from pd_common.errors import PeerLost, StaleInstance
from pd_common.handoff.metadata import ROW_BYTES
from pd_common.handoff.state import Transfer
from pd_common.telemetry.logs import fields
from pd_common.transport.base import InboundPort, Transport
from pd_common.types import BootstrapAddress, BootstrapRoom, Instance, RankInfo, Role
from services.decode.directory import Directory
from services.decode.pairing import OwnMemory, Prefill, send_canary, until_lost

_log = logging.getLogger(__name__)

_PROOF_PATIENCE_S = 5.0
"""How long rooms wait for a process that owes proofs; one that runs gives them at once."""


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
        self._directory = Directory(transport.info.backend, dial)
        self._watches = Tasks()
        self._registrations = itertools.count(1)

    async def pair_with(self, address: BootstrapAddress, room: BootstrapRoom) -> Prefill:
        """The prefill behind this Bootstrap address that has the room, paired now if it was not.

        Raises:
            PeerLost, TopologyIncomplete: it is not there (yet), or owes proofs.
            LayoutMismatch: it cannot be paired.

        """
        rank = await self._directory.find(address, room)
        try:
            return await self._paired_with(rank)
        except (PeerLost, StaleInstance):
            self._directory.forget(rank.instance)
            successor = await self._directory.find(address, room)
            if successor.instance == rank.instance:
                raise
        return await self._paired_with(successor)

    def is_current(self, prefill: Prefill) -> bool:
        """The pairing has not been lost."""
        return self._paired.get(prefill.instance) is prefill

    def peers(self, live: Iterable[Transfer]) -> tuple[Peer, ...]:
        """Every pairing; `live` are the rooms that have not ended."""
        rooms = Counter(transfer.peer for transfer in live)
        return tuple(
            Peer(
                prefill.instance,
                Role.PREFILL,
                prefill.connection.address,
                prefill.carrier,
                prefill.since_s,
                prefill.canary,
                rooms[prefill.instance],
            )
            for prefill in self._paired.values()
        )

    async def forget(self, prefill: Prefill, why: str) -> None:
        """Ends a pairing; its rooms fail and nothing can arrive from it any more when this returns."""
        if not self.is_current(prefill):
            return
        del self._paired[prefill.instance]
        self._directory.forget(prefill.instance)
        _log.info("prefill %s (%s) is lost: %s", prefill.address.target, prefill.instance.instance_id, why)
        error = PeerLost(f"prefill {prefill.address.target} is gone: {why}", peer=prefill.address.target)
        self._on_lost(prefill, error)
        # The room that asks for it may be stopped meanwhile; memory of others waits for the end of this port.
        await asyncio.shield(_fence(prefill))

    async def watch(self) -> None:
        """Raises InternalError when a task that follows beats has died. Otherwise it never returns."""
        await self._watches.watch()

    async def close(self) -> None:
        """Ends every pairing."""
        meetings = tuple(self._meetings.values())
        for meeting in meetings:  # first: one that goes well would make a pairing that nobody ends
            meeting.cancel()
        await asyncio.gather(*meetings, return_exceptions=True)
        for prefill in tuple(self._paired.values()):
            await self.forget(prefill, "this process stops")
        await self._watches.close()
        await self._directory.close()

    async def _paired_with(self, rank: RankInfo) -> Prefill:
        """Rooms that come at once share one meeting."""
        known = self._paired.get(rank.instance)
        if known is not None:
            return known
        meeting = self._meetings.get(rank.instance)
        if meeting is None:
            meeting = self._meetings[rank.instance] = asyncio.create_task(self._meet(rank))
            meeting.add_done_callback(lambda _: self._meetings.pop(rank.instance, None))
            meeting.add_done_callback(_look_at_failure)
        return await asyncio.shield(meeting)

    async def _meet(self, rank: RankInfo) -> Prefill:
        address = parse_address(rank.control_address, "rank.control_address")
        await self._require_proofs(address, rank.instance)
        connection = self._dial(rank.control_address, Role.PREFILL)
        port = self._transport.listen(self._own.regions)
        try:
            prefill = await self._register(address, rank.instance, connection, port)
            await send_canary(self._own, prefill)
        except BaseException:
            await port.fence()
            await connection.close()
            raise
        self._paired[prefill.instance] = prefill
        self._watches.start(f"beats of prefill {address.target}", self._watch(prefill))
        peer = fields(peer=prefill.instance.instance_id)
        _log.info("paired with prefill %s, pages arrive by %s", address.target, prefill.carrier, extra=peer)
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
        own, client, registration = self._own, PeerClient(connection), next(self._registrations)
        process, carrier = await client.register_receiver(
            receiver=own.instance,
            registration=registration,
            sender=instance,
            control_address=own.control_address,
            layout=own.layout,
            data_address=port.address,
            buffer_bases=own.pool.bases,
            num_pages=own.pool.num_pages,
            metadata_base=own.metadata.region.base,
            metadata_item_len_bytes=ROW_BYTES,
            metadata_slots=own.metadata.num_slots,
            canary_base=own.canaries.region.base,
            canary_pages=own.canaries.num_pages,
        )
        return Prefill(address, instance, registration, client, connection, port, process, carrier)

    async def _watch(self, prefill: Prefill) -> None:
        try:
            await self.forget(prefill, await until_lost(self._own, prefill))
        finally:
            await prefill.connection.close()


async def _fence(prefill: Prefill) -> None:
    await prefill.port.fence()
    prefill.fenced.set()


def _look_at_failure(meeting: asyncio.Task[Prefill]) -> None:
    """A room that waited may have been aborted meanwhile; then nobody else would have asked how it went."""
    if not meeting.cancelled() and meeting.exception() is not None:
        _log.warning("pairing failed: %s", meeting.exception())
