"""Decode processes that have offered their memory: how to reach each, and for how long."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pd_common.aio import finished_even_if_cancelled
from pd_common.control import beats
from pd_common.control.connection import Connection, Dial
from pd_common.control.peer_client import PeerClient
from pd_common.control.peers import Peer
from pd_common.errors import InvalidRequest, LayoutMismatch, PeerLost, ReceiverUnknown, StaleInstance, TransferFailed
from pd_common.handoff.canary import Canary, CanaryMemory, RemoteCanary
from pd_common.handoff.destination import RemotePool
from pd_common.handoff.state import Transfer
from pd_common.transport.base import Channel, Puts, Transport
from pd_common.types import Instance, KvLayout, Role

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Receiver:
    """One registration of one decode process; `registration` is its number there."""

    instance: Instance
    registration: int
    control_address: str
    pool: RemotePool
    canary_memory: RemoteCanary
    channel: Channel
    connection: Connection
    client: PeerClient
    registered_at: float = field(default_factory=time.monotonic)
    held: bool = False
    canary: Canary | None = None
    """The last one that went through."""


class Receivers:
    """At most one registration per control address, and one per process. `on_lost` is told when one ends."""

    def __init__(
        self,
        layout: KvLayout,
        transport: Transport,
        canaries: CanaryMemory,
        on_lost: Callable[[Instance, PeerLost], None],
        dial: Dial,
    ) -> None:
        self._layout = layout
        self._canaries = canaries
        self._transport = transport
        self._on_lost = on_lost
        self._dial = dial
        self._by_instance: dict[Instance, Receiver] = {}
        self._registering = asyncio.Lock()

    async def register(
        self,
        instance: Instance,
        registration: int,
        control_address: str,
        layout: KvLayout,
        pool: RemotePool,
        canary_memory: RemoteCanary,
        data_address: bytes,
    ) -> Receiver:
        """Connects to the receiver. The same instance again, or a later one at its address, replaces the registration.

        Raises:
            LayoutMismatch: with the first field that differs (I10).
            StaleInstance: a later process has registered from this address, or this one has registered again since.
            TransferFailed: its memory cannot be reached.

        """
        check_layout(self._layout, layout, control_address)
        self._refuse_stale(instance, registration, control_address)
        channel = await self._transport.connect(data_address)
        try:
            receiver = await self._take_in(instance, registration, control_address, pool, canary_memory, channel)
        except BaseException:
            await channel.close()
            raise
        _log.info(
            "decode %s registered from %s, pages travel by %s", instance.instance_id, control_address, channel.carrier
        )
        return receiver

    async def _take_in(
        self,
        instance: Instance,
        registration: int,
        control_address: str,
        pool: RemotePool,
        canary_memory: RemoteCanary,
        channel: Channel,
    ) -> Receiver:
        """One at a time: whoever has connected meanwhile is looked at again."""
        async with self._registering:
            self._refuse_stale(instance, registration, control_address)
            for other in (*self._at(control_address), *self._elsewhere(instance, control_address)):
                await self.drop(other, "it registered again" if other.instance == instance else "it has restarted")
            connection = self._dial(control_address, Role.DECODE)
            client = PeerClient(connection)
            receiver = Receiver(
                instance, registration, control_address, pool, canary_memory, channel, connection, client
            )
            self._by_instance[instance] = receiver
            return receiver

    def get(self, instance: Instance) -> Receiver:
        """The registration.

        Raises:
            ReceiverUnknown: there is none (any more).

        """
        receiver = self._by_instance.get(instance)
        if receiver is None:
            raise ReceiverUnknown(f"{instance.instance_id} has to register first", receiver=instance.instance_id)
        return receiver

    def is_current(self, receiver: Receiver) -> bool:
        """The registration has been neither replaced nor dropped."""
        return self._by_instance.get(receiver.instance) is receiver

    async def drop(self, receiver: Receiver, why: str) -> None:
        """Ends a registration; a second time does nothing. Its rooms fail."""
        if not self.is_current(receiver):
            return
        del self._by_instance[receiver.instance]
        _log.info("decode %s is gone: %s", receiver.instance.instance_id, why)
        error = PeerLost(f"decode {receiver.control_address} is gone: {why}", peer=receiver.control_address)
        self._on_lost(receiver.instance, error)
        # Whoever ends it may be stopped meanwhile, for one a room of this decode: both planes are closed all the same.
        await asyncio.shield(_disconnect(receiver))

    async def send_canary(self, receiver: Receiver, page: int, seed: bytes) -> Canary:
        """Writes what follows from the seed into this page of the receiver's canary memory.

        Raises:
            PagesInvalid: the receiver has not offered such a page.
            TransferFailed: it cannot be written; the registration has ended, for its channel is broken for good.

        """
        remote_address = receiver.canary_memory.address_of(page)
        async with self._canaries.page() as own_page:
            self._canaries.fill(own_page, seed)
            # Nobody else has the page before nothing reads it any more, whatever becomes of the caller.
            took_s = await finished_even_if_cancelled(
                self._write(receiver, self._canaries.puts(own_page, remote_address))
            )
        receiver.canary = Canary(time.monotonic(), took_s)
        return receiver.canary

    async def _write(self, receiver: Receiver, puts: Puts) -> float:
        """Gives the seconds until the page was visible."""
        try:
            receipt = await receiver.channel.write(puts)
        except (TransferFailed, PeerLost) as broken:
            await self.drop(receiver, broken.message)
            raise TransferFailed(broken.message, **broken.metadata) from broken
        return receipt.seconds

    def peers(self, live: Iterable[Transfer]) -> tuple[Peer, ...]:
        """Every registration; `live` are the rooms that have not ended."""
        rooms = Counter(transfer.peer for transfer in live)
        return tuple(
            Peer(
                receiver.instance,
                Role.DECODE,
                receiver.control_address,
                receiver.channel.carrier,
                receiver.registered_at,
                receiver.canary,
                rooms[receiver.instance],
            )
            for receiver in self._by_instance.values()
        )

    def unheld(self, now: float) -> list[Receiver]:
        """Registrations that nobody holds: decode does so as soon as it has had its canary, unless it died."""
        return [
            receiver
            for receiver in self._by_instance.values()
            if not receiver.held and now - receiver.registered_at > beats.patience_s()
        ]

    async def close(self) -> None:
        for receiver in tuple(self._by_instance.values()):
            await self.drop(receiver, "this process stops")

    def _refuse_stale(self, instance: Instance, registration: int, control_address: str) -> None:
        known = self._by_instance.get(instance)
        if known is not None and known.registration > registration:
            raise StaleInstance(
                f"{instance.instance_id} has registered again since", expected=known.registration, got=registration
            )
        for other in self._at(control_address):
            if other.instance.epoch > instance.epoch:
                raise StaleInstance(
                    f"{control_address} has restarted since", expected=other.instance.epoch, got=instance.epoch
                )

    def _at(self, control_address: str) -> list[Receiver]:
        return [receiver for receiver in self._by_instance.values() if receiver.control_address == control_address]

    def _elsewhere(self, instance: Instance, control_address: str) -> list[Receiver]:
        """The same process's registration under another address."""
        known = self._by_instance.get(instance)
        return [] if known is None or known.control_address == control_address else [known]


async def _disconnect(receiver: Receiver) -> None:
    await receiver.channel.close()
    await receiver.connection.close()


def check_layout(mine: KvLayout, theirs: KvLayout, address: str) -> None:
    """Raises LayoutMismatch naming the first field in which the pools differ."""
    mismatch = mine.first_mismatch(theirs)
    if mismatch is not None:
        field_name, own, other = mismatch
        raise LayoutMismatch(
            f"prefill's {field_name} is {own}, that of decode {address} is {other}: they cannot be paired",
            field=field_name,
            mine=own,
            theirs=other,
        )


def check_register_request(buffers: int, bases: int, slots: int) -> None:
    """Raises InvalidRequest when a registration does not describe memory."""
    if buffers != bases:
        raise InvalidRequest(f"{bases} base addresses for {buffers} buffers", field="buffer_bases")
    if slots < 1:
        raise InvalidRequest("metadata_slots must be at least 1", field="metadata_slots")
