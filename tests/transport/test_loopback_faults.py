"""Each fault of the loopback transport does what it says, and respects the fence contract unless it says otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pd_common.errors import PeerLost, TransferFailed
from pd_common.transport.loopback import Drop, Faults, LoopbackNetwork, LoopbackTransport, Reorder
from tests.transport.pairs import BUFFER_BYTES, LocalReceiver, Pair

HALF = BUFFER_BYTES // 2


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
async def pair(faults: Faults) -> AsyncIterator[Pair]:
    network = LoopbackNetwork()
    sender, receiver = LoopbackTransport(network, faults), LoopbackTransport(network)
    yield Pair(sender, LocalReceiver(receiver))
    await sender.close()
    await receiver.close()


async def turns() -> None:
    """Lets every other task run until it waits."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_hold_keeps_every_byte_back(pair: Pair, faults: Faults) -> None:
    faults.hold = asyncio.Event()
    channel = await pair.sender.connect(await pair.receiver.listen())
    writing = asyncio.create_task(channel.write(pair.puts((0, 0, 64))))
    await turns()
    assert not writing.done()
    assert await pair.receiver.read(0, 64) == bytes(64)
    faults.hold.set()
    await writing
    assert await pair.receiver.read(0, 64) == pair.source.bytes[:64].tobytes()


async def test_hold_group_keeps_later_groups_back(pair: Pair, faults: Faults) -> None:
    faults.hold_group = asyncio.Event()
    channel = await pair.sender.connect(await pair.receiver.listen())
    writing = asyncio.create_task(channel.write(pair.puts((0, 0, 64)), pair.puts((0, HALF, 64))))
    await turns()
    assert await pair.receiver.read(0, 64) == pair.source.bytes[:64].tobytes()
    assert await pair.receiver.read(HALF, 64) == bytes(64)
    faults.hold_group.set()
    await writing
    assert await pair.receiver.read(HALF, 64) == pair.source.bytes[:64].tobytes()


@pytest.mark.parametrize("cut", ["fence", "peer", "close"])
async def test_a_held_write_writes_nothing_once_it_is_cut_off(pair: Pair, faults: Faults, cut: str) -> None:
    faults.hold = asyncio.Event()
    address = await pair.receiver.listen()
    channel = await pair.sender.connect(address)
    writing = asyncio.create_task(channel.write(pair.puts((0, 0, 64))))
    await turns()
    if cut == "fence":
        await pair.receiver.fence(address)
    elif cut == "peer":
        faults.peer_gone.set()
    else:
        await channel.close()
    with pytest.raises(TransferFailed if cut == "close" else PeerLost):
        await writing
    faults.hold.set()
    await turns()
    assert await pair.receiver.read(0, BUFFER_BYTES) == bytes(BUFFER_BYTES)


async def test_a_fence_between_two_puts_stops_the_rest(pair: Pair) -> None:
    address = await pair.receiver.listen()
    channel = await pair.sender.connect(address)
    puts = pair.puts(*((at, at, 64) for at in range(0, BUFFER_BYTES, 64)))
    writing = asyncio.create_task(channel.write(puts))
    assert await pair.receiver.holds_when_flagged(0, int(pair.source.bytes[0]), 0, 1)
    await pair.receiver.fence(address)
    before = await pair.receiver.read(0, BUFFER_BYTES)
    with pytest.raises(PeerLost):
        await writing
    assert await pair.receiver.read(0, BUFFER_BYTES) == before
    assert before[-64:] == bytes(64)


async def test_a_dropped_write_fails_and_is_never_visible(pair: Pair, faults: Faults) -> None:
    faults.drop = Drop.FAIL
    channel = await pair.sender.connect(await pair.receiver.listen())
    with pytest.raises(TransferFailed):
        await channel.write(pair.puts((0, 0, 64)))
    assert await pair.receiver.read(0, 64) == bytes(64)


async def test_a_hanging_write_ends_when_it_is_released(pair: Pair, faults: Faults) -> None:
    faults.drop = Drop.HANG
    channel = await pair.sender.connect(await pair.receiver.listen())
    writing = asyncio.create_task(channel.write(pair.puts((0, 0, 64))))
    await turns()
    assert not writing.done()
    faults.release.set()
    with pytest.raises(TransferFailed):
        await writing
    assert await pair.receiver.read(0, 64) == bytes(64)


async def test_the_nth_write_fails_half_way_and_breaks_its_channel(pair: Pair, faults: Faults) -> None:
    faults.fail_write = 2
    address = await pair.receiver.listen()
    channel, other = await pair.sender.connect(address), await pair.sender.connect(address)
    await channel.write(pair.puts((0, 0, 64)))
    with pytest.raises(TransferFailed):
        await channel.write(pair.puts((0, 1000, 64), (0, 2000, 64)))
    assert await pair.receiver.read(1000, 64) == pair.source.bytes[:64].tobytes()
    assert await pair.receiver.read(2000, 64) == bytes(64)
    with pytest.raises(TransferFailed):
        await channel.write(pair.puts((0, 3000, 64)))
    await other.write(pair.puts((0, 3000, 64)))


@pytest.mark.parametrize(("reorder", "first"), [(Reorder.WITHIN_GROUPS, 0), (Reorder.ACROSS_GROUPS, HALF)])
async def test_reordering(pair: Pair, faults: Faults, reorder: Reorder, first: int) -> None:
    faults.reorder = reorder
    faults.hold_group = asyncio.Event()
    channel = await pair.sender.connect(await pair.receiver.listen())
    groups = (pair.puts((0, 0, 64), (64, 64, 64)), pair.puts((0, HALF, 64), (64, HALF + 64, 64)))
    writing = asyncio.create_task(channel.write(*groups))
    await turns()
    shown = pair.source.bytes[:128].tobytes()
    assert await pair.receiver.read(first, 128) == shown
    assert await pair.receiver.read(HALF - first, 128) == bytes(128)
    faults.hold_group.set()
    await writing
    assert await pair.receiver.read(0, 128) + await pair.receiver.read(HALF, 128) == shown * 2


async def test_puts_of_one_group_are_really_shuffled(pair: Pair, faults: Faults) -> None:
    faults.reorder = Reorder.WITHIN_GROUPS
    channel = await pair.sender.connect(await pair.receiver.listen())
    puts = pair.puts(*((at, 0, 1) for at in range(256)))
    last = set()
    for faults.seed in range(8):
        await channel.write(puts)
        last.add(await pair.receiver.read(0, 1))
    assert len(last) > 1


async def test_a_flipped_bit_is_the_only_difference(pair: Pair, faults: Faults) -> None:
    faults.flip_in_write = 1
    channel = await pair.sender.connect(await pair.receiver.listen())
    await channel.write(pair.puts((0, 0, 64)), pair.puts((100, 100, 64)))
    expected = bytearray(pair.source.bytes[100:164].tobytes())
    expected[-1] ^= 1
    assert await pair.receiver.read(0, 64) == pair.source.bytes[:64].tobytes()
    assert await pair.receiver.read(100, 64) == bytes(expected)
