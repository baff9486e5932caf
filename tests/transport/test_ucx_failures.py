"""What only real processes and a real UCX can show: death, stops, fences in the middle, carriers, no leaks."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from pd_common.errors import PeerLost, TransferFailed, TransportUnavailable
from pd_common.transport.base import Puts
from pd_common.transport.ucx.transport import UcxChannel, UcxTransport
from tests.transport.pairs import CARRIERS, Memory, ProcessReceiver

LOST = (PeerLost, TransferFailed)
SIZE = 16 << 20
LONG = 512
"""Puts of SIZE bytes in a write that is meant not to be over soon: 8 GiB."""


@pytest.fixture(params=list(CARRIERS))
def carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = str(request.param)
    for variable, value in CARRIERS[name].items():
        monkeypatch.setenv(variable, value)
    return name


@pytest.fixture
async def sender(carrier: str) -> AsyncIterator[UcxTransport]:
    transport = UcxTransport()
    yield transport
    await transport.close()


@pytest.fixture
def source(sender: UcxTransport) -> Memory:
    memory = Memory(SIZE)
    memory.bytes.fill(9)
    sender.register(memory.region)
    return memory


@pytest.fixture
def receivers(carrier: str) -> Iterator[list[ProcessReceiver]]:
    """Two processes; a test may kill or stop them."""
    started = [ProcessReceiver(CARRIERS[carrier], SIZE) for _ in range(2)]
    yield started
    for receiver in started:
        receiver.kill()


def whole(source: Memory, receiver: ProcessReceiver, times: int = 1) -> Puts:
    """The whole buffer, `times` over."""
    ones = np.ones(times, dtype=np.int64)
    return Puts(ones * source.base, ones * receiver.base, ones * SIZE)


async def begun(channel: UcxChannel, puts: Puts, receiver: ProcessReceiver) -> asyncio.Task[object]:
    """A write whose first byte has arrived."""
    writing = asyncio.create_task(channel.write(puts))
    await asyncio.sleep(0)
    receiver.call("await_byte", offset=0, value=9)
    return writing


async def test_the_carrier_is_the_one_that_really_carries(
    carrier: str, sender: UcxTransport, receivers: list[ProcessReceiver]
) -> None:
    channel = await sender.connect(await receivers[0].listen())
    assert channel.carrier == {"cma": "cma", "tcp": "tcp/lo"}[carrier]
    assert carrier in sender.info.transports
    assert ("cma" in sender.info.transports) == (carrier == "cma")
    assert sender.info.backend == "ucx"
    assert "libucp.so" in sender.info.library
    assert [part.isdigit() for part in sender.info.version.split(".")] == [True] * 3
    assert sender.info.devices == ("lo",)
    assert {"UCX_NET_DEVICES=lo", "RNDV_THRESH=inf"} < set(sender.info.settings)


async def test_a_killed_receiver_fails_its_write_and_no_other(
    sender: UcxTransport, source: Memory, receivers: list[ProcessReceiver]
) -> None:
    dying, living = receivers
    channel = await sender.connect(await dying.listen())
    writing = await begun(channel, whole(source, dying, LONG), dying)
    dying.kill()
    with pytest.raises(LOST):
        await asyncio.wait_for(writing, 20)
    with pytest.raises(LOST):
        await channel.write(whole(source, dying))
    other = await sender.connect(await living.listen())
    await other.write(whole(source, living))
    assert await living.read(SIZE - 64, 64) == bytes([9]) * 64


async def test_a_receiver_killed_while_the_channel_is_idle(
    sender: UcxTransport, source: Memory, receivers: list[ProcessReceiver]
) -> None:
    dying, _ = receivers
    channel = await sender.connect(await dying.listen())
    await channel.write(whole(source, dying))
    dying.kill()
    with pytest.raises(LOST):
        await asyncio.wait_for(channel.write(whole(source, dying)), 20)


async def test_a_killed_sender_leaves_the_receiver_working(
    sender: UcxTransport, source: Memory, receivers: list[ProcessReceiver]
) -> None:
    receiver, dying = receivers
    address = await receiver.listen()
    dying.call("fill", value=9)
    dying.call("write_forever", address=address.hex(), base=receiver.base)
    receiver.call("await_byte", offset=SIZE - 1, value=9)
    dying.kill()
    source.bytes.fill(7)
    channel = await sender.connect(await receiver.listen())
    await channel.write(whole(source, receiver))
    assert await receiver.read(0, 64) == bytes([7]) * 64


@pytest.mark.parametrize("carrier", ["tcp"], indirect=True)
async def test_not_one_byte_changes_after_a_fence(
    sender: UcxTransport, source: Memory, receivers: list[ProcessReceiver]
) -> None:
    source.bytes[:] = np.random.default_rng(4).integers(0, 256, SIZE, dtype=np.uint8)
    source.bytes[0] = 9
    receiver, _ = receivers
    for _ in range(5):
        address = await receiver.listen()
        channel = await sender.connect(address)
        writing = await begun(channel, whole(source, receiver, LONG), receiver)
        checksum = receiver.fence_and_checksum(address)
        with pytest.raises(LOST):
            await asyncio.wait_for(writing, 20)
        assert receiver.call("checksum") == checksum


async def test_a_stopped_receiver_stops_nobody_else(
    carrier: str, sender: UcxTransport, source: Memory, receivers: list[ProcessReceiver]
) -> None:
    stopped, living = receivers
    channel = await sender.connect(await stopped.listen())
    other = await sender.connect(await living.listen())
    stopped.signal(signal.SIGSTOP)
    writing = asyncio.create_task(channel.write(whole(source, stopped), whole(source, stopped)))
    await other.write(whole(source, living), whole(source, living))
    assert not writing.done() or carrier == "cma"
    await asyncio.wait_for(channel.close(), 20)
    if carrier == "tcp":
        with pytest.raises(TransferFailed):
            await writing
    await other.write(whole(source, living))
    stopped.signal(signal.SIGCONT)


@pytest.mark.parametrize("carrier", ["cma"], indirect=True)
async def test_memory_that_is_gone_fails_the_write(
    sender: UcxTransport, source: Memory, receivers: list[ProcessReceiver]
) -> None:
    receiver, living = receivers
    channel = await sender.connect(await receiver.listen())
    receiver.call("unmap")
    with pytest.raises(LOST):
        await asyncio.wait_for(channel.write(whole(source, receiver), whole(source, receiver)), 20)
    other = await sender.connect(await living.listen())
    await other.write(whole(source, living))


async def test_closing_in_the_middle_of_a_write_fails_it(
    sender: UcxTransport, source: Memory, receivers: list[ProcessReceiver]
) -> None:
    receiver, _ = receivers
    channel = await sender.connect(await receiver.listen())
    writing = await begun(channel, whole(source, receiver, LONG), receiver)
    await sender.close()
    with pytest.raises(TransferFailed):
        await writing


async def test_nothing_is_left_behind(carrier: str) -> None:
    def left() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    async def round_trip() -> None:
        sender, receiver = UcxTransport(), UcxTransport()
        source, destination = Memory(), Memory()
        sender.register(source.region)
        receiver.register(destination.region)
        for number in range(6):
            port = receiver.listen([destination.region])
            channel = await sender.connect(port.address)
            await channel.write(Puts(*(np.array([value]) for value in (source.base, destination.base, 1000))))
            if number % 2:
                await channel.close()
            if number % 3:
                await port.fence()
        await sender.close()
        await receiver.close()

    await round_trip()
    before = left()
    for _ in range(3):
        await round_trip()
    assert left() == before


def test_a_library_that_is_not_there(tmp_path: Path) -> None:
    for choice in (tmp_path / "libucp.so", Path(__file__)):
        with pytest.raises(TransportUnavailable):
            UcxTransport(str(choice))
