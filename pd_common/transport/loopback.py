"""Transport within one process: really copies bytes between registered regions, and can be told what is to go wrong.

Two transports reach each other when they were made with the same `LoopbackNetwork`. All happens on the event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import random
import secrets
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from pd_common.aio import for_ever
from pd_common.errors import InternalError, InvalidRequest, PdError, PeerLost, TransferFailed
from pd_common.transport.base import MemoryRegion, Puts, TransportInfo, WriteReceipt
from pd_common.transport.regions import RegionTable, locate

_ADDRESS = struct.Struct("<4sH16s")
_MAGIC = b"PDLB"
_VERSION = 1
_PUTS_PER_TURN = 256
"""Puts applied before other tasks get a turn."""

Put = tuple[int, int, int]
"""Local address, remote address, length in bytes."""


class Drop(Enum):
    """How a write that never becomes visible ends."""

    FAIL = auto()
    HANG = auto()
    """It fails as well, but only when `Faults.release` is set, the peer is gone or the channel is closed."""


class Reorder(Enum):
    """Which order is not kept."""

    WITHIN_GROUPS = auto()
    """What the contract allows."""
    ACROSS_GROUPS = auto()
    """What the contract forbids: a later group may become visible first."""


@dataclass(slots=True)
class Faults:
    """What is to go wrong with the writes of one transport; a test changes it at will. Writes are counted from 1."""

    hold: asyncio.Event | None = None
    """No byte of a write moves before this is set."""
    hold_group: asyncio.Event | None = None
    """No group but the first of a write moves before this is set."""
    hold_end: dict[int, asyncio.Event] = field(default_factory=dict)
    """By number of a write: all of it is visible, but nobody is told so before this is set."""
    drop: Drop | None = None
    release: asyncio.Event = field(default_factory=asyncio.Event)
    reorder: Reorder | None = None
    seed: int = 0
    fail_write: int | None = None
    """This write fails after half of its puts."""
    flip_in_write: int | None = None
    """One bit of the last byte of this write arrives inverted."""
    writes: int = 0
    """Writes begun so far."""
    peer_gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Once set, writes on their way and all later ones fail with PeerLost."""


class LoopbackNetwork:
    """The ports that can be reached, by the random id that is their address."""

    def __init__(self) -> None:
        self.ports: dict[bytes, LoopbackPort] = {}


class LoopbackTransport:
    """One side in one process. The faults are those of its own writes."""

    def __init__(self, network: LoopbackNetwork, faults: Faults | None = None) -> None:
        self.info = TransportInfo("loopback", "in process", str(_VERSION), ("memmove",))
        self.faults = faults or Faults()
        self._network = network
        self._registered = RegionTable(())
        self._ports: list[LoopbackPort] = []
        self._channels: list[LoopbackChannel] = []
        self._closed = False

    def register(self, region: MemoryRegion) -> None:
        if not self._registered.holds(region):
            self._registered = RegionTable((*self._registered.regions, region))

    def listen(self, regions: Sequence[MemoryRegion]) -> LoopbackPort:
        if not all(self._registered.holds(region) for region in regions):
            raise InternalError("a region that is not registered cannot be offered")
        port = LoopbackPort(self._network, RegionTable(regions))
        self._ports.append(port)
        return port

    async def connect(self, address: bytes) -> LoopbackChannel:
        if len(address) != _ADDRESS.size:
            raise InvalidRequest("not an address of a loopback port: wrong length", bytes=len(address))
        magic, version, port_id = _ADDRESS.unpack(address)
        if magic != _MAGIC or version != _VERSION:
            raise InvalidRequest("not an address of a loopback port, or of another version", version=version)
        port = self._network.ports.get(port_id)
        if port is None or self.faults.peer_gone.is_set() or self._closed:
            raise TransferFailed("the port cannot be reached")
        channel = LoopbackChannel(port, self)
        self._channels.append(channel)
        return channel

    @property
    def registered(self) -> RegionTable:
        """All regions known so far."""
        return self._registered

    async def watch(self) -> None:
        await for_ever()

    async def close(self) -> None:
        self._closed = True
        for channel in self._channels:
            await channel.close()
        for port in self._ports:
            await port.fence()


class LoopbackPort:
    """Open until it is fenced; every copy looks first."""

    def __init__(self, network: LoopbackNetwork, offered: RegionTable) -> None:
        self.offered = offered
        self.fenced = asyncio.Event()
        self._network = network
        self._id = secrets.token_bytes(16)
        network.ports[self._id] = self

    @property
    def address(self) -> bytes:
        return _ADDRESS.pack(_MAGIC, _VERSION, self._id)

    async def fence(self) -> None:
        self.fenced.set()
        self._network.ports.pop(self._id, None)


class LoopbackChannel:
    """Broken for good by its first failure."""

    carrier = "loopback"

    def __init__(self, port: LoopbackPort, transport: LoopbackTransport) -> None:
        self._port = port
        self._transport = transport
        self._faults = transport.faults
        self._error: PdError | None = None
        self._closed = asyncio.Event()
        self._writes: set[asyncio.Task[WriteReceipt]] = set()

    async def write(self, *groups: Puts) -> WriteReceipt:
        self._raise_if_broken()
        for puts in groups:
            locate(puts, self._transport.registered, self._port.offered)
        # A task of its own: whoever waits may be cancelled, what is posted goes on.
        task = asyncio.create_task(self._run(groups))
        self._writes.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    async def close(self) -> None:
        self._error = self._error or TransferFailed("the channel was closed")
        self._closed.set()
        if self._writes:
            await asyncio.wait(self._writes)

    def _forget(self, task: asyncio.Task[WriteReceipt]) -> None:
        self._writes.discard(task)
        if not task.cancelled():
            task.exception()  # seen: whoever waits has it too, unless it was cancelled

    async def _run(self, groups: tuple[Puts, ...]) -> WriteReceipt:
        started = time.perf_counter()
        self._faults.writes += 1
        number = self._faults.writes
        try:
            await self._apply(groups, number)
        except PdError as error:
            self._error = self._error or error
            raise
        return WriteReceipt(
            bytes=sum(puts.total_bytes for puts in groups),
            descriptors=sum(len(puts) for puts in groups),
            posting_seconds=0.0,
            seconds=time.perf_counter() - started,
        )

    async def _apply(self, groups: tuple[Puts, ...], number: int) -> None:
        await self._pass(self._faults.hold)
        if self._faults.drop is not None:
            await self._pass(self._faults.release if self._faults.drop is Drop.HANG else None)
            raise TransferFailed("the write was dropped")
        left = sum(len(puts) for puts in groups)
        fail_at = left - left // 2 if number == self._faults.fail_write else -1
        for index, group in enumerate(self._ordered(groups)):
            await self._pass(self._faults.hold_group if index else None)
            for turn in range(0, len(group), _PUTS_PER_TURN):
                for local, remote, length in group[turn : turn + _PUTS_PER_TURN]:
                    if left == fail_at:
                        raise TransferFailed("the write failed on its way")
                    ctypes.memmove(remote, local, length)
                    left -= 1
                await asyncio.sleep(0)
                self._raise_if_broken()
        if left == fail_at:
            raise TransferFailed("the write failed on its way")
        if number == self._faults.flip_in_write:
            _flip_last_byte(groups)
        await self._pass(self._faults.hold_end.get(number))

    async def _pass(self, event: asyncio.Event | None) -> None:
        if event is not None:
            await _first_of(event, self._faults.peer_gone, self._port.fenced, self._closed)
        self._raise_if_broken()

    def _raise_if_broken(self) -> None:
        if self._error is None and (self._port.fenced.is_set() or self._faults.peer_gone.is_set()):
            self._error = PeerLost("the peer is gone")
        if self._error is not None:
            raise type(self._error)(self._error.message, **self._error.metadata)

    def _ordered(self, groups: tuple[Puts, ...]) -> Iterator[list[Put]]:
        listed = [list(zip(g.local.tolist(), g.remote.tolist(), g.lengths.tolist(), strict=True)) for g in groups]
        if self._faults.reorder is Reorder.WITHIN_GROUPS:
            order = random.Random(self._faults.seed)  # noqa: S311 - a reproducible order, no secret
            for group in listed:
                order.shuffle(group)
        if self._faults.reorder is Reorder.ACROSS_GROUPS:
            listed.reverse()
        return iter(listed)


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _flip_last_byte(groups: tuple[Puts, ...]) -> None:
    puts = next(puts for puts in reversed(groups) if puts.total_bytes)
    at = int((puts.remote + puts.lengths)[puts.lengths > 0][-1]) - 1
    byte = ctypes.c_ubyte.from_address(at)
    byte.value ^= 1
