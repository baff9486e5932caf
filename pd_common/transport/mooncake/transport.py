"""Transport over Mooncake's transfer engine: one-sided WRITE between processes, over tcp, or RDMA with `--ib-device`.

Mooncake cannot cut off one peer of an engine, so every port and every channel has an engine of its own.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence

import numpy as np

from pd_common.aio import for_ever
from pd_common.errors import InternalError, PeerLost, TransferFailed, TransportUnavailable
from pd_common.transport.base import MemoryRegion, Puts, TransportInfo, WriteReceipt
from pd_common.transport.handover import repeated
from pd_common.transport.mooncake.address import FRAME, target_of
from pd_common.transport.mooncake.engine import Engine, MooncakeError, Settings
from pd_common.transport.mooncake.library import load_library, own_host
from pd_common.transport.mooncake.outbound import Outbound
from pd_common.transport.mooncake.write import Write
from pd_common.transport.offer import KeylessOffer
from pd_common.transport.rdma import require_present
from pd_common.transport.regions import RegionTable, locate

_PROBE_BYTES = 64 * 1024


class MooncakeTransport:
    """`ib_device`: RDMA devices, with commas; None for tcp."""

    def __init__(self, ib_device: str | None = None) -> None:
        library = load_library()
        if ib_device is not None:
            require_present(ib_device.split(","), "without --ib-device Mooncake uses tcp")
        protocol = "tcp" if ib_device is None else "rdma"
        self._settings = Settings(library, own_host(), protocol, ib_device or "")
        self.info = TransportInfo(
            backend="mooncake",
            library=library.path,
            version=library.version,
            transports=(protocol,),
            devices=tuple(ib_device.split(",")) if ib_device else (self._settings.host,),
            settings=tuple(sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("MC_"))),
        )
        self._probe_memory = np.zeros(_PROBE_BYTES, dtype=np.uint8)
        self._probe = MemoryRegion(self._probe_memory.ctypes.data, _PROBE_BYTES)
        self._registered = RegionTable([self._probe])
        self._ports: set[MooncakePort] = set()
        self._channels: set[MooncakeChannel] = set()
        try:
            Engine(self._settings, [self._probe]).close()
        except MooncakeError as error:
            raise TransportUnavailable(f"Mooncake does not start: {error}", protocol=protocol) from error

    def register(self, region: MemoryRegion) -> None:
        """Mooncake itself learns of it from every port that offers it and every channel that reads it."""
        if not self._registered.holds(region):
            self._registered = RegionTable((*self._registered.regions, region))

    def listen(self, regions: Sequence[MemoryRegion]) -> MooncakePort:
        offered = RegionTable(regions).regions
        if not all(self._registered.holds(region) for region in offered):
            raise InternalError("a region that is not registered cannot be offered")
        try:
            engine = Engine(self._settings, (self._probe, *offered))
        except MooncakeError as error:
            raise TransferFailed(f"no port can be opened: {error}") from error
        address = KeylessOffer(engine.target.encode(), self._probe, offered).pack(FRAME)
        port = MooncakePort(engine, address, self._ports.discard)
        self._ports.add(port)
        return port

    async def connect(self, address: bytes) -> MooncakeChannel:
        port = KeylessOffer.parse(address, FRAME)
        target = target_of(port)
        outbound = Outbound(self._settings, target)
        offered = RegionTable(port.offered)
        size = min(self._probe.length, port.probe.length)
        probe = Puts(*(np.array([value]) for value in (self._probe.base, port.probe.base, size)))
        channel = MooncakeChannel(
            outbound, self._settings.protocol, offered, lambda: self._registered, self._channels.discard
        )
        try:
            await channel.try_out(probe)
        except BaseException as error:
            outbound.close()
            if isinstance(error, PeerLost):
                raise TransferFailed(f"the port cannot be reached: {error}", target=target) from error
            raise
        self._channels.add(channel)
        return channel

    async def watch(self) -> None:
        """No defect breaks all engines at once."""
        await for_ever()

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels), *(port.fence() for port in self._ports))


class MooncakePort:
    """An engine of its own for one peer: closing it ends the peer's connections, and only these."""

    def __init__(self, engine: Engine, address: bytes, forget: Callable[[MooncakePort], None]) -> None:
        self.address = address
        self._engine = engine
        self._forget = forget

    async def fence(self) -> None:
        self._forget(self)
        await asyncio.shield(asyncio.to_thread(self._engine.fence))


class MooncakeChannel:
    """One connection, and the table of what its peer has offered."""

    def __init__(
        self,
        outbound: Outbound,
        carrier: str,
        offered: RegionTable,
        registered: Callable[[], RegionTable],
        forget: Callable[[MooncakeChannel], None],
    ) -> None:
        self.carrier = carrier
        self._forget = forget
        self._outbound = outbound
        self._offered = offered
        self._registered = registered

    async def write(self, *groups: Puts) -> WriteReceipt:
        started = time.perf_counter()
        if self._outbound.error is not None:
            raise repeated(self._outbound.error)
        registered = self._registered()
        for puts in groups:
            locate(puts, registered, self._offered)
        return await self._written(groups, started)

    async def try_out(self, probe: Puts) -> None:
        """Writes where it does not matter, which shows whether the peer can be reached."""
        await self._written((probe,), time.perf_counter())

    async def close(self) -> None:
        self._forget(self)
        await asyncio.shield(asyncio.wrap_future(self._outbound.close()))

    async def _written(self, groups: Sequence[Puts], started: float) -> WriteReceipt:
        done: asyncio.Future[WriteReceipt] = asyncio.get_running_loop().create_future()
        self._outbound.write(Write(groups, self._registered().regions, started, done))
        return await done
