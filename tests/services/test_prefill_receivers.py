from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pd_common.control import beats
from pd_common.control.connection import dial_plain
from pd_common.errors import (
    InvalidRequest,
    LayoutMismatch,
    PagesInvalid,
    PdError,
    PeerLost,
    ReceiverUnknown,
    StaleInstance,
    TransferFailed,
)
from pd_common.handoff.canary import CanaryMemory, RemoteCanary
from pd_common.handoff.chunk import PoolBuffers
from pd_common.handoff.destination import RemotePool
from pd_common.transport.base import InboundPort, MemoryRegion, Puts, TransportInfo, WriteReceipt
from pd_common.types import Instance, KvLayout
from services.prefill.receivers import Receiver, Receivers, check_register_request
from tests.control.serving import LAYOUT

POOL = RemotePool(PoolBuffers((4096, 8192), (1024, 1024), 4, 16), 65536, 2)
CANARIES = RemoteCanary(131072, 2, LAYOUT.page_bytes)
SEED = bytes(range(16))
HERE, THERE = "127.0.0.1:7001", "127.0.0.1:7002"
FIRST, RESTARTED, OTHER = Instance("d", 1), Instance("d2", 2), Instance("e", 1)


class FakeChannel:
    """Closes when it may; writes to nowhere when it may, unless it is `broken`."""

    carrier = "cma"

    def __init__(self) -> None:
        self.closed = False
        self.closing = asyncio.Event()
        self.may_close = asyncio.Event()
        self.may_close.set()
        self.broken: PdError | None = None
        self.written: list[tuple[int, int]] = []
        self.may_write = asyncio.Event()
        self.may_write.set()

    async def write(self, *groups: Puts) -> WriteReceipt:
        ((remote, length),) = [(int(puts.remote[0]), int(puts.lengths[0])) for puts in groups]
        self.written.append((remote, length))
        await self.may_write.wait()
        if self.broken is not None:
            raise self.broken
        return WriteReceipt(length, 1, 0.0, 0.25)

    async def close(self) -> None:
        self.closing.set()
        await self.may_close.wait()
        self.closed = True


class FakeTransport:
    """Connects at once; to an address that is in `pending` only when its event is set, and never to `unreachable`."""

    info = TransportInfo("fake", "fake", "0", ())

    def __init__(self) -> None:
        self.channels: list[FakeChannel] = []
        self.pending: dict[bytes, asyncio.Event] = {}

    def listen(self, regions: Sequence[MemoryRegion]) -> InboundPort:
        raise TransferFailed(f"prefill offers no memory, and not {regions}")

    def register(self, region: MemoryRegion) -> None:
        raise TransferFailed(f"{region} is not needed here")

    async def connect(self, address: bytes) -> FakeChannel:
        if address == b"unreachable":
            raise TransferFailed("no route")
        if address in self.pending:
            await self.pending[address].wait()
        self.channels.append(FakeChannel())
        return self.channels[-1]

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


class Prefill:
    """Receivers, and who was reported lost."""

    def __init__(self) -> None:
        self.transport = FakeTransport()
        self.lost: list[Instance] = []
        self.canaries = CanaryMemory(LAYOUT.page_bytes)
        self.receivers = Receivers(LAYOUT, self.transport, self.canaries, self._note, dial_plain)

    def _note(self, instance: Instance, error: PeerLost) -> None:
        assert error.metadata["peer"] in (HERE, THERE)
        self.lost.append(instance)

    async def register(
        self,
        instance: Instance,
        address: str = HERE,
        data_address: bytes = b"",
        layout: KvLayout = LAYOUT,
        registration: int = 1,
    ) -> Receiver:
        return await self.receivers.register(instance, registration, address, layout, POOL, CANARIES, data_address)

    @property
    def open_channels(self) -> list[FakeChannel]:
        return [channel for channel in self.transport.channels if not channel.closed]


@pytest.fixture
async def prefill() -> AsyncIterator[Prefill]:
    prefill = Prefill()
    yield prefill
    await prefill.receivers.close()
    assert prefill.open_channels == []


async def soon(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, 5)


async def test_a_registration_can_be_found_by_its_process_alone(prefill: Prefill) -> None:
    receiver = await prefill.register(FIRST)
    assert prefill.receivers.get(FIRST) is receiver
    assert (receiver.pool, receiver.channel) == (POOL, prefill.transport.channels[0])
    for stranger in (RESTARTED, Instance("d", 2)):
        with pytest.raises(ReceiverUnknown) as raised:
            prefill.receivers.get(stranger)
        assert raised.value.metadata == {"receiver": stranger.instance_id}


async def test_a_pool_that_differs_is_refused_by_its_field_before_anything_is_connected(prefill: Prefill) -> None:
    with pytest.raises(LayoutMismatch) as raised:
        await prefill.register(FIRST, layout=replace(LAYOUT, page_size=64))
    assert raised.value.metadata == {"field": "page_size", "mine": "16", "theirs": "64"}
    assert prefill.transport.channels == []


@pytest.mark.parametrize("again", [FIRST, RESTARTED], ids=["the same process", "a later one"])
async def test_a_registration_replaces_the_one_at_its_address(prefill: Prefill, again: Instance) -> None:
    first = await prefill.register(FIRST)
    other = await prefill.register(OTHER, THERE)
    second = await prefill.register(again)
    assert prefill.lost == [FIRST]
    assert prefill.receivers.get(again) is second
    assert not prefill.receivers.is_current(first)
    assert prefill.receivers.is_current(other)
    assert prefill.open_channels == [other.channel, second.channel]


async def test_a_process_that_registers_from_another_address_has_one_registration(prefill: Prefill) -> None:
    await prefill.register(FIRST, HERE)
    second = await prefill.register(FIRST, THERE)
    assert prefill.lost == [FIRST]
    assert prefill.receivers.get(FIRST) is second
    assert prefill.open_channels == [second.channel]


async def test_an_earlier_process_is_refused(prefill: Prefill) -> None:
    receiver = await prefill.register(RESTARTED)
    with pytest.raises(StaleInstance) as raised:
        await prefill.register(FIRST)
    assert raised.value.metadata == {"expected": "2", "got": "1"}
    assert prefill.receivers.is_current(receiver)
    assert prefill.open_channels == [receiver.channel]


async def test_a_registration_that_arrives_after_a_later_one_of_its_process_is_refused(prefill: Prefill) -> None:
    receiver = await prefill.register(FIRST, registration=2)
    with pytest.raises(StaleInstance):
        await prefill.register(FIRST, registration=1)
    assert prefill.receivers.is_current(receiver)
    assert prefill.open_channels == [receiver.channel]


async def test_a_registration_that_cannot_be_reached_changes_nothing(prefill: Prefill) -> None:
    receiver = await prefill.register(FIRST)
    with pytest.raises(TransferFailed):
        await prefill.register(RESTARTED, data_address=b"unreachable")
    assert prefill.receivers.is_current(receiver)
    assert prefill.lost == []


async def test_a_dropped_registration_is_reported_once(prefill: Prefill) -> None:
    receiver = await prefill.register(FIRST)
    await prefill.receivers.drop(receiver, "its connection ended")
    await prefill.receivers.drop(receiver, "its connection ended")
    assert prefill.lost == [FIRST]
    assert prefill.open_channels == []
    with pytest.raises(ReceiverUnknown):
        prefill.receivers.get(FIRST)


async def test_dropping_a_replaced_registration_does_not_touch_its_successor(prefill: Prefill) -> None:
    first = await prefill.register(FIRST)
    second = await prefill.register(FIRST)
    await prefill.receivers.drop(first, "its connection ended")
    assert prefill.receivers.get(FIRST) is second
    assert prefill.open_channels == [second.channel]


async def test_only_registrations_that_nobody_holds_run_out(prefill: Prefill) -> None:
    unheld, held = await prefill.register(FIRST), await prefill.register(OTHER, THERE)
    held.held = True
    assert prefill.receivers.unheld(unheld.registered_at + beats.patience_s()) == []
    assert prefill.receivers.unheld(held.registered_at + beats.patience_s() + 0.1) == [unheld]


async def test_an_earlier_process_that_connects_slowly_does_not_displace_its_successor(prefill: Prefill) -> None:
    prefill.transport.pending[b"slow"] = connected = asyncio.Event()
    late = asyncio.create_task(prefill.register(FIRST, data_address=b"slow"))
    await asyncio.sleep(0)
    receiver = await prefill.register(RESTARTED)
    connected.set()
    with pytest.raises(StaleInstance):
        await soon(late)
    assert prefill.receivers.get(RESTARTED) is receiver
    assert prefill.open_channels == [receiver.channel]


async def test_registrations_at_the_same_time_leave_one_and_no_open_channel_of_another(prefill: Prefill) -> None:
    await prefill.register(FIRST)
    (old,) = prefill.transport.channels
    old.may_close.clear()
    one = asyncio.create_task(prefill.register(FIRST))
    await soon(old.closing.wait())
    other = asyncio.create_task(prefill.register(FIRST))
    for _ in range(5):
        await asyncio.sleep(0)
    old.may_close.set()
    registered = [await soon(one), await soon(other)]
    current = [receiver for receiver in registered if prefill.receivers.is_current(receiver)]
    assert len(current) == 1
    assert prefill.open_channels == [current[0].channel]


# --- canaries ---


async def test_a_canary_is_one_page_written_into_the_page_that_was_asked_for(prefill: Prefill) -> None:
    receiver = await prefill.register(FIRST)
    canary = await prefill.receivers.send_canary(receiver, 1, SEED)
    assert prefill.transport.channels[0].written == [(131072 + LAYOUT.page_bytes, LAYOUT.page_bytes)]
    assert canary.took_s == 0.25
    assert [peer.canary for peer in prefill.receivers.peers([])] == [canary]


async def test_a_canary_page_that_was_not_offered_is_refused_and_harms_nothing(prefill: Prefill) -> None:
    receiver = await prefill.register(FIRST)
    with pytest.raises(PagesInvalid):
        await prefill.receivers.send_canary(receiver, CANARIES.num_pages, SEED)
    assert prefill.transport.channels[0].written == []
    assert prefill.receivers.is_current(receiver)


@pytest.mark.parametrize("broken", [TransferFailed("no route"), PeerLost("gone")], ids=str)
async def test_a_canary_that_cannot_be_written_ends_the_registration(prefill: Prefill, broken: PdError) -> None:
    receiver = await prefill.register(FIRST)
    prefill.transport.channels[0].broken = broken
    with pytest.raises(TransferFailed, match=broken.message):
        await prefill.receivers.send_canary(receiver, 0, SEED)
    assert prefill.lost == [FIRST]
    assert prefill.open_channels == []


async def test_a_canary_whose_caller_is_gone_keeps_its_page_until_it_is_written(prefill: Prefill) -> None:
    receiver = await prefill.register(FIRST)
    (channel,) = prefill.transport.channels
    channel.may_write.clear()
    at_once = prefill.canaries.num_pages
    sends = [asyncio.create_task(prefill.receivers.send_canary(receiver, 0, SEED)) for _ in range(at_once + 1)]
    await turns()
    assert len(channel.written) == at_once, "the last one waits for its turn"
    sends[0].cancel()
    await turns()
    assert len(channel.written) == at_once, "the page is still read by a write that nobody waits for"
    channel.may_write.set()
    await soon(asyncio.gather(*sends[1:]))
    assert len(channel.written) == at_once + 1


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("buffers", "bases", "slots", "field"),
    [(2, 1, 1, "buffer_bases"), (0, 1, 1, "buffer_bases"), (2, 2, 0, "metadata_slots")],
)
def test_a_registration_that_describes_no_memory_is_refused_by_its_field(
    buffers: int, bases: int, slots: int, field: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_register_request(buffers, bases, slots)
    assert raised.value.metadata == {"field": field}
