"""A loopback transport on which what goes wrong with the writes of rooms does not go wrong with canaries, and so on."""

from __future__ import annotations

from pd_common.transport.base import MemoryRegion, Puts, WriteReceipt
from pd_common.transport.loopback import Faults, LoopbackChannel, LoopbackNetwork, LoopbackTransport


class TwoWays(LoopbackTransport):
    """What is written from the canary region takes a way of its own, with faults of its own."""

    def __init__(self, network: LoopbackNetwork, faults: Faults, canary_faults: Faults, canaries: MemoryRegion) -> None:
        super().__init__(network, faults)
        self._for_canaries = LoopbackTransport(network, canary_faults)
        self._for_canaries.register(canaries)
        self._canaries = canaries

    async def connect(self, address: bytes) -> LoopbackChannel:
        channel = await super().connect(address)
        return _Forked(channel, await self._for_canaries.connect(address), self._canaries)

    async def close(self) -> None:
        await super().close()
        await self._for_canaries.close()


class _Forked(LoopbackChannel):
    def __init__(self, rooms: LoopbackChannel, canaries: LoopbackChannel, region: MemoryRegion) -> None:
        self._rooms, self._canaries, self._region = rooms, canaries, region

    async def write(self, *groups: Puts) -> WriteReceipt:
        local = int(groups[0].local[0]) if groups and len(groups[0]) else 0
        is_canary = 0 <= local - self._region.base < self._region.length
        return await (self._canaries if is_canary else self._rooms).write(*groups)

    async def close(self) -> None:
        await self._rooms.close()
        await self._canaries.close()
