"""What only real processes and a real Mooncake can show: death, stops, fences in the middle, ports that are used up."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from pd_common.errors import InvalidRequest, PeerLost, TransferFailed, TransportUnavailable
from pd_common.transport.base import Puts
from pd_common.transport.mooncake import ports
from pd_common.transport.mooncake.transport import MooncakeChannel, MooncakePort, MooncakeTransport
from tests.transport.conftest import skip_unless_importable
from tests.transport.pairs import Memory, ProcessReceiver

pytestmark = pytest.mark.mooncake

LOST = (PeerLost, TransferFailed)
LOOPBACK = {"MC_TCP_BIND_ADDRESS": "127.0.0.1"}
SIZE = 16 << 20
LONG = 512
"""Puts of SIZE bytes in a write that is meant not to be over soon: 8 GiB."""


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_importable("mooncake")
    for variable, value in LOOPBACK.items():
        monkeypatch.setenv(variable, value)


@pytest.fixture
async def transport() -> AsyncIterator[MooncakeTransport]:
    made = MooncakeTransport()
    yield made
    await made.close()


@pytest.fixture
def memory(transport: MooncakeTransport) -> Memory:
    memory = Memory(SIZE)
    transport.register(memory.region)
    return memory


@pytest.fixture
def peer() -> Iterator[ProcessReceiver]:
    """A process that a test may kill or stop."""
    started = ProcessReceiver(LOOPBACK, SIZE, "mooncake")
    yield started
    started.kill()


def whole(source: Memory, receiver: ProcessReceiver, times: int = 1) -> Puts:
    """The whole buffer, `times` over."""
    ones = np.ones(times, dtype=np.int64)
    return Puts(ones * source.base, ones * receiver.base, ones * SIZE)


async def begun(channel: MooncakeChannel, source: Memory, receiver: ProcessReceiver) -> asyncio.Task[object]:
    """A write whose first byte has arrived."""
    writing: asyncio.Task[object] = asyncio.create_task(channel.write(whole(source, receiver, LONG)))
    await asyncio.to_thread(receiver.call, "await_byte", offset=0, value=9)
    return writing


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_killed_receiver_fails_its_write(
    transport: MooncakeTransport, memory: Memory, peer: ProcessReceiver
) -> None:
    memory.bytes.fill(9)
    channel = await transport.connect(await peer.listen())
    writing = await begun(channel, memory, peer)
    peer.kill()
    with pytest.raises(LOST):
        await asyncio.wait_for(writing, 20)
    with pytest.raises(LOST):
        await channel.write()


async def test_not_one_byte_changes_after_a_fence(
    transport: MooncakeTransport, memory: Memory, peer: ProcessReceiver
) -> None:
    memory.bytes[:] = np.random.default_rng(4).integers(0, 256, SIZE, dtype=np.uint8)
    memory.bytes[0] = 9
    for _ in range(3):
        address = await peer.listen()
        writing = await begun(await transport.connect(address), memory, peer)
        checksum = peer.fence_and_checksum(address)
        with pytest.raises(LOST):
            await asyncio.wait_for(writing, 20)
        assert peer.call("checksum") == checksum


@pytest.fixture
def few_ports() -> Iterator[ProcessReceiver]:
    """A process whose engines have few ports to choose from: soon a later one would have those of an earlier one."""
    first = random.randrange(20_000, 30_000)
    lowest = dict.fromkeys(("MC_MIN_PRC_PORT", "MC_MIN_RPC_PORT"), str(first))
    highest = dict.fromkeys(("MC_MAX_PRC_PORT", "MC_MAX_RPC_PORT"), str(first + 7))
    started = ProcessReceiver(LOOPBACK | lowest | highest, SIZE, "mooncake")
    yield started
    started.kill()


@pytest.mark.parametrize("stopped", [True, False])
async def test_a_writer_that_is_cut_off_writes_nothing_into_later_ports(
    few_ports: ProcessReceiver, peer: ProcessReceiver, stopped: bool
) -> None:
    """Mooncake connects again by itself, in the middle of a batch."""
    address = await few_ports.listen()
    peer.call("fill", value=9)
    peer.call("write_forever", address=address.hex(), base=few_ports.base, puts=512)
    few_ports.call("await_byte", offset=SIZE - 1, value=9)
    if stopped:
        peer.signal(signal.SIGSTOP)
    few_ports.fence_and_checksum(address)
    few_ports.call("listen")
    few_ports.call("fill", value=1)
    peer.signal(signal.SIGCONT)
    await asyncio.to_thread(peer.call, "await_writers_end")
    assert few_ports.call("checksum") == zlib.crc32(bytes([1]) * SIZE)


async def test_a_receiver_that_stands_still_is_given_up(
    monkeypatch: pytest.MonkeyPatch, memory: Memory, transport: MooncakeTransport, peer: ProcessReceiver
) -> None:
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "1")
    memory.bytes.fill(9)
    channel = await transport.connect(await peer.listen())
    writing = await begun(channel, memory, peer)
    peer.signal(signal.SIGSTOP)
    with pytest.raises(TransferFailed, match="Mooncake"):
        await asyncio.wait_for(writing, 20)


async def test_the_ports_of_a_fenced_engine_are_never_used_again(transport: MooncakeTransport, memory: Memory) -> None:
    port: MooncakePort = transport.listen([memory.region])
    used = port._engine._ports
    assert len(used) == 2
    assert used <= ports.listening_ports()
    await asyncio.gather(port.fence(), port.fence())
    assert not used & ports.listening_ports()
    for number in used:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", number), 5)
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("", number))  # takes a port that is only winding down


async def test_channels_leave_nothing_open(transport: MooncakeTransport, memory: Memory, peer: ProcessReceiver) -> None:
    address = await peer.listen()

    async def connect_and_leave() -> None:
        channel = await transport.connect(address)
        await channel.write(whole(memory, peer))
        await channel.close()

    await connect_and_leave()
    before = open_files()
    for _ in range(10):
        await connect_and_leave()
    assert open_files() <= before + 1


async def test_the_carrier_is_shown(transport: MooncakeTransport, peer: ProcessReceiver) -> None:
    channel = await transport.connect(await peer.listen())
    assert channel.carrier == "tcp"
    assert transport.info.transports == ("tcp",)
    assert transport.info.devices == ("127.0.0.1",)
    assert "MC_TCP_BIND_ADDRESS=127.0.0.1" in transport.info.settings
    assert os.path.basename(transport.info.library) == "engine.so"  # noqa: PTH119


def test_an_rdma_device_that_is_not_there_is_refused_and_tcp_is_not_taken_for_it() -> None:
    with pytest.raises(InvalidRequest, match="no RDMA device 'mlx5_77'") as refused:
        MooncakeTransport("mlx5_77")
    assert refused.value.metadata["field"] == "ib_device"


def test_a_missing_library_of_the_system_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(TransportUnavailable, match=r"libibverbs1, libnl-3-200 and libnl-route-3-200"):
        MooncakeTransport()


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'mooncake'")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(TransportUnavailable, match="extra `mooncake`"):
        MooncakeTransport()
