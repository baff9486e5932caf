"""What only real processes and a real NIXL can show: death, stops, fences in the middle, idleness, no leaks."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pd_common.errors import PeerLost, TransferFailed
from pd_common.transport.base import Puts
from pd_common.transport.nixl.transport import NixlChannel, NixlTransport
from tests.transport.conftest import skip_unless_importable
from tests.transport.pairs import CARRIERS, Memory, ProcessReceiver
from tests.transport.test_transport_conformance import write_until_it_fails

pytestmark = pytest.mark.nixl

Start = Callable[[], ProcessReceiver]
LOST = (PeerLost, TransferFailed)
SIZE = 16 << 20
LONG = 512
"""Puts of SIZE bytes in a write that is meant not to be over soon: 8 GiB."""


@pytest.fixture(autouse=True)
def _needs_nixl() -> None:
    skip_unless_importable("nixl")


@pytest.fixture(params=list(CARRIERS))
def carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = str(request.param)
    for variable, value in CARRIERS[name].items():
        monkeypatch.setenv(variable, value)
    return name


@pytest.fixture
async def sender(carrier: str) -> AsyncIterator[NixlTransport]:
    transport = NixlTransport()
    yield transport
    await transport.close()


@pytest.fixture
def source(sender: NixlTransport) -> Memory:
    memory = Memory(SIZE)
    memory.bytes.fill(9)
    sender.register(memory.region)
    return memory


@pytest.fixture
def start(carrier: str) -> Iterator[Start]:
    """Starts processes, which a test may kill or stop."""
    started: list[ProcessReceiver] = []

    def start_one() -> ProcessReceiver:
        started.append(ProcessReceiver(CARRIERS[carrier], SIZE, "nixl"))
        return started[-1]

    yield start_one
    for each in started:
        each.kill()


def whole(source: Memory, receiver: ProcessReceiver, times: int = 1) -> Puts:
    """The whole buffer, `times` over."""
    ones = np.ones(times, dtype=np.int64)
    return Puts(ones * source.base, ones * receiver.base, ones * SIZE)


async def begun(channel: NixlChannel, puts: Puts, receiver: ProcessReceiver) -> asyncio.Task[object]:
    """A write whose first byte has arrived."""
    writing = asyncio.create_task(channel.write(puts))
    await asyncio.sleep(0)
    receiver.call("await_byte", offset=0, value=9)
    return writing


async def test_what_it_says_of_itself(sender: NixlTransport, start: Start) -> None:
    channel = await sender.connect(await start().listen())
    assert channel.carrier == "ucx"
    assert (sender.info.backend, sender.info.transports) == ("nixl", ("ucx",))
    assert "nixl_cu12" in sender.info.library
    assert [part.isdigit() for part in sender.info.version.split(".")] == [True] * 3


async def test_a_killed_receiver_fails_its_write_and_no_other(
    sender: NixlTransport, source: Memory, start: Start
) -> None:
    dying, living = start(), start()
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


async def test_a_receiver_killed_while_the_channel_is_idle(sender: NixlTransport, source: Memory, start: Start) -> None:
    dying = start()
    channel = await sender.connect(await dying.listen())
    await channel.write(whole(source, dying))
    dying.kill()
    with pytest.raises(LOST):
        await asyncio.wait_for(channel.write(whole(source, dying)), 20)


async def test_a_killed_sender_leaves_the_receiver_working(sender: NixlTransport, source: Memory, start: Start) -> None:
    receiver, dying = start(), start()
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
async def test_not_one_byte_changes_after_a_fence(sender: NixlTransport, source: Memory, start: Start) -> None:
    source.bytes[:] = np.random.default_rng(4).integers(0, 256, SIZE, dtype=np.uint8)
    source.bytes[0] = 9
    receiver = start()
    for _ in range(5):
        address = await receiver.listen()
        channel = await sender.connect(address)
        writing = await begun(channel, whole(source, receiver, LONG), receiver)
        checksum = receiver.fence_and_checksum(address)
        with pytest.raises(LOST):
            await asyncio.wait_for(writing, 20)
        assert receiver.call("checksum") == checksum


async def test_large_writes_that_are_done_at_once_learn_of_a_fence(
    sender: NixlTransport, source: Memory, start: Start
) -> None:
    receiver = start()
    address = await receiver.listen()
    channel = await sender.connect(address)
    await receiver.fence(address)
    with pytest.raises(LOST):
        await write_until_it_fails(channel, whole(source, receiver))


async def test_a_stopped_receiver_stops_nobody_else(
    carrier: str, sender: NixlTransport, source: Memory, start: Start
) -> None:
    stopped, living = start(), start()
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
async def test_memory_that_is_gone_fails_the_write(sender: NixlTransport, source: Memory, start: Start) -> None:
    receiver, living = start(), start()
    channel = await sender.connect(await receiver.listen())
    receiver.call("unmap")
    with pytest.raises(LOST):
        await asyncio.wait_for(channel.write(whole(source, receiver), whole(source, receiver)), 20)
    other = await sender.connect(await living.listen())
    await other.write(whole(source, living))


async def test_closing_in_the_middle_of_a_write_fails_it(sender: NixlTransport, source: Memory, start: Start) -> None:
    receiver = start()
    channel = await sender.connect(await receiver.listen())
    writing = await begun(channel, whole(source, receiver, LONG), receiver)
    await sender.close()
    with pytest.raises(TransferFailed):
        await writing


async def test_waiting_for_work_does_not_spin(sender: NixlTransport, source: Memory) -> None:
    """One thread that spins takes all of the time in which nothing happens."""
    receiver = NixlTransport()
    receiver.register(source.region)
    channel = await sender.connect(receiver.listen([source.region]).address)
    await channel.write(Puts(*(np.array([value]) for value in (source.base, source.base, 64))))
    wall_s, cpu_s = time.monotonic(), time.process_time()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sender.watch(), 0.4)
    wall_s, cpu_s = time.monotonic() - wall_s, time.process_time() - cpu_s
    assert cpu_s < wall_s / 2
    await receiver.close()


async def test_nothing_is_left_behind(carrier: str) -> None:
    def left(what: str) -> int:
        return len(list(Path("/proc/self", what).iterdir()))

    held: list[object] = []
    """What was closed must be gone even while somebody still holds it."""

    async def round_trip() -> None:
        sender, receiver = NixlTransport(), NixlTransport()
        source, destination = Memory(), Memory()
        sender.register(source.region)
        receiver.register(destination.region)
        for number in range(4):
            port = receiver.listen([destination.region])
            channel = await sender.connect(port.address)
            held.extend((sender, receiver, port, channel))
            await channel.write(Puts(*(np.array([value]) for value in (source.base, destination.base, 1000))))
            if number % 2:
                await channel.close()
            if number % 3:
                await port.fence()
        await sender.close()
        await receiver.close()

    await round_trip()
    before = left("fd"), threading.active_count(), left("task")
    for _ in range(2):
        await round_trip()
    assert (left("fd"), threading.active_count()) == before[:2]
    async with asyncio.timeout(20):
        while left("task") > before[2]:  # noqa: ASYNC110 - the kernel forgets a joined thread a moment later
            await asyncio.sleep(0)
