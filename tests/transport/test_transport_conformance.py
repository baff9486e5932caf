"""What the data plane promises, for every transport alike."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pd_common.errors import InternalError, InvalidRequest, PagesInvalid, PeerLost, TransferFailed
from pd_common.transport.base import Channel, Puts
from tests.transport.pairs import BUFFER_BYTES, Memory, Pair

LOST = (PeerLost, TransferFailed)


async def write_until_it_fails(channel: Channel, puts: Puts) -> None:
    """CMA needs no help from the receiver, so a writer may learn of a fence a moment later."""
    async with asyncio.timeout(20):
        while True:
            await channel.write(puts)


async def test_bytes_arrive_exactly_and_nowhere_else(pair: Pair) -> None:
    channel = await pair.sender.connect(await pair.receiver.listen())
    ranges = [(0, 5000, 1), (17, 9001, 4095), (40_000, 100_000, 32_768), (500_000, 200_003, 300_001)]
    receipt = await channel.write(pair.puts(*ranges))
    expected = np.zeros(BUFFER_BYTES, dtype=np.uint8)
    for source, destination, length in ranges:
        expected[destination : destination + length] = pair.source.bytes[source : source + length]
    assert await pair.receiver.read(0, BUFFER_BYTES) == expected.tobytes()
    assert (receipt.descriptors, receipt.bytes) == (4, sum(length for *_, length in ranges))
    assert receipt.seconds > receipt.posting_seconds >= 0


async def test_many_small_scattered_puts_arrive(pair: Pair) -> None:
    channel = await pair.sender.connect(await pair.receiver.listen())
    count, length = 8192, 64
    order = np.random.default_rng(2).permutation(count)
    offsets = np.arange(count) * length
    puts = Puts(offsets + pair.source.base, order * length + pair.receiver.base, np.full(count, length))
    await channel.write(puts)
    expected = np.zeros((count, length), dtype=np.uint8)
    expected[order] = pair.source.bytes[: count * length].reshape(count, length)
    assert await pair.receiver.read(0, count * length) == expected.tobytes()


async def test_writes_at_the_same_time_may_overtake_each_other(pair: Pair) -> None:
    """A small write that is done before a large one that began earlier harms neither."""
    channel = await pair.sender.connect(await pair.receiver.listen())
    half = BUFFER_BYTES // 2
    many = pair.puts(*((at, at, 32) for at in range(0, 2048 * 32, 32)))
    few = [pair.puts((at, at, 32), (at + 32, at + 32, 32)) for at in range(half, half + 640, 64)]
    for _ in range(2):
        receipts = await asyncio.gather(channel.write(many, many, many), *(channel.write(each) for each in few))
        assert [receipt.bytes for receipt in receipts] == [3 * many.total_bytes, *[64] * len(few)]
        receipts = await asyncio.gather(*(channel.write(many, each, each) for each in few))
        assert {receipt.bytes for receipt in receipts} == {many.total_bytes + 128}
    assert await pair.receiver.read(half, 640) == pair.source.bytes[half : half + 640].tobytes()
    assert await pair.receiver.read(0, many.total_bytes) == pair.source.bytes[: many.total_bytes].tobytes()


async def test_a_group_is_visible_only_after_the_one_before(pair: Pair) -> None:
    channel = await pair.sender.connect(await pair.receiver.listen())
    data_bytes = 400_000
    for value in range(1, 40):
        pair.source.bytes[: data_bytes + 1] = value
        data = pair.puts(*((start, start, 8000) for start in range(0, data_bytes, 8000)))
        flag = pair.puts((data_bytes, BUFFER_BYTES - 1, 1))
        writing = asyncio.create_task(channel.write(data, flag))
        assert await pair.receiver.holds_when_flagged(BUFFER_BYTES - 1, value, 0, data_bytes)
        await writing


@pytest.mark.parametrize(
    ("offset", "length"),
    [(-1, 1), (BUFFER_BYTES, 1), (BUFFER_BYTES - 10, 11), (0, BUFFER_BYTES + 1), (0, -1), (0, 2**62), (-(2**40), 1)],
)
async def test_a_put_outside_the_offer_is_refused_and_nothing_is_written(pair: Pair, offset: int, length: int) -> None:
    channel = await pair.sender.connect(await pair.receiver.listen())
    with pytest.raises(PagesInvalid):
        await channel.write(pair.puts((0, 0, 64)), pair.puts((0, 64, 64), (0, offset, length)))
    assert await pair.receiver.read(0, BUFFER_BYTES) == bytes(BUFFER_BYTES)
    await channel.write(pair.puts((0, 0, 64)))
    assert await pair.receiver.read(0, 64) == pair.source.bytes[:64].tobytes()


async def test_memory_that_is_not_registered_is_not_read(pair: Pair) -> None:
    channel = await pair.sender.connect(await pair.receiver.listen())
    stranger = Memory()
    puts = Puts(*(np.array([value]) for value in (stranger.base, pair.receiver.base, 64)))
    with pytest.raises(InternalError):
        await channel.write(puts)


async def test_memory_that_is_not_registered_is_not_offered(pair: Pair) -> None:
    with pytest.raises(InternalError):
        pair.sender.listen([Memory().region])


async def test_registering_twice_is_harmless(pair: Pair) -> None:
    pair.sender.register(pair.source.region)
    channel = await pair.sender.connect(await pair.receiver.listen())
    assert (await channel.write(pair.puts((0, 0, 64)))).bytes == 64


async def test_nothing_to_write(pair: Pair) -> None:
    channel = await pair.sender.connect(await pair.receiver.listen())
    for groups in ((), (pair.puts(),), (pair.puts(), pair.puts())):
        receipt = await channel.write(*groups)
        assert (receipt.bytes, receipt.descriptors) == (0, 0)
    assert (await channel.write(pair.puts((0, 0, 0), (0, 0, 1)))).bytes == 1


async def test_several_writes_share_a_channel(pair: Pair) -> None:
    channel = await pair.sender.connect(await pair.receiver.listen())
    length = 8192
    writes = [channel.write(pair.puts((at, at, length))) for at in range(0, BUFFER_BYTES, length)]
    await asyncio.gather(*writes)
    assert await pair.receiver.read(0, BUFFER_BYTES) == pair.source.bytes.tobytes()


async def test_hostile_address_bytes_are_refused(pair: Pair) -> None:
    address = await pair.receiver.listen()
    noise = np.random.default_rng(3)
    hostile = [b"", b"\0", address[:-1], address + b"\0", noise.bytes(len(address)), noise.bytes(5_000_000)]
    for mutant in hostile:
        with pytest.raises(InvalidRequest):
            await pair.sender.connect(mutant)
    for position in range(6):
        damaged = bytearray(address)
        damaged[position] ^= 0x40
        with pytest.raises(InvalidRequest):
            await pair.sender.connect(bytes(damaged))
    await pair.sender.connect(address)


async def test_a_fence_cuts_off_one_peer_and_no_other(pair: Pair) -> None:
    first, second = await pair.receiver.listen(), await pair.receiver.listen()
    cut, kept = await pair.sender.connect(first), await pair.sender.connect(second)
    await cut.write(pair.puts((0, 0, 64)))
    await pair.receiver.fence(first)
    await pair.receiver.fence(first)
    with pytest.raises(LOST):
        await write_until_it_fails(cut, pair.puts((64, 64, 64)))
    with pytest.raises(LOST):
        await cut.write(pair.puts((0, 0, 64)))
    with pytest.raises(LOST):
        await cut.write()
    with pytest.raises(TransferFailed):
        await pair.sender.connect(first)
    await kept.write(pair.puts((0, 1000, 64)))
    assert await pair.receiver.read(1000, 64) == pair.source.bytes[:64].tobytes()


async def test_a_closed_channel_refuses_and_disturbs_no_other(pair: Pair) -> None:
    address = await pair.receiver.listen()
    closed, kept = await pair.sender.connect(address), await pair.sender.connect(address)
    await closed.close()
    await closed.close()
    with pytest.raises(TransferFailed):
        await closed.write(pair.puts((0, 0, 64)))
    await kept.write(pair.puts((0, 1000, 64)))
    assert await pair.receiver.read(1000, 64) == pair.source.bytes[:64].tobytes()


async def test_cancelling_who_waits_does_not_stop_what_is_posted(pair: Pair) -> None:
    channel = await pair.sender.connect(await pair.receiver.listen())
    pair.source.bytes[-1] = 77
    writing = asyncio.create_task(
        channel.write(pair.puts((0, 0, BUFFER_BYTES - 1)), pair.puts((BUFFER_BYTES - 1,) * 2 + (1,)))
    )
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert await pair.receiver.holds_when_flagged(BUFFER_BYTES - 1, 77, BUFFER_BYTES - 1, 1)
    assert await pair.receiver.read(0, BUFFER_BYTES) == pair.source.bytes.tobytes()


async def test_closing_the_transport_ends_everything_and_may_be_repeated(pair: Pair) -> None:
    channel = await pair.sender.connect(await pair.receiver.listen())
    await pair.sender.close()
    await pair.sender.close()
    await channel.close()
    with pytest.raises(TransferFailed):
        await channel.write(pair.puts((0, 0, 64)))
