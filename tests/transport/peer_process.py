"""A process with one transport and one buffer, told over stdin what to do: a JSON object a line, one answer each."""

from __future__ import annotations

import asyncio
import json
import mmap
import sys
import zlib
from typing import Any

import numpy as np

from pd_common.transport.backends import open_transport
from pd_common.transport.base import Channel, InboundPort, MemoryRegion, Puts
from tests.transport.pairs import transport_config


class Peer:
    def __init__(self, backend: str, size_bytes: int) -> None:
        self._mapping = mmap.mmap(-1, size_bytes)
        self._memory = np.frombuffer(self._mapping, dtype=np.uint8)
        self._region = MemoryRegion(self._memory.ctypes.data, size_bytes)
        self._transport = open_transport(transport_config(backend))
        self._transport.register(self._region)
        self._ports: list[InboundPort] = []
        self._writes: list[asyncio.Task[Any]] = []

    def listen(self) -> dict[str, Any]:
        self._ports.append(self._transport.listen([self._region]))
        return {"address": self._ports[-1].address.hex(), "base": self._region.base, "port": len(self._ports) - 1}

    async def fence(self, port: int) -> int:
        """The checksum of the buffer at the moment the fence stands."""
        await self._ports[port].fence()
        return self.checksum()

    def checksum(self) -> int:
        return zlib.crc32(self._memory.data)

    def fill(self, value: int) -> None:
        self._memory.fill(value)

    def read(self, offset: int, length: int) -> str:
        return self._memory[offset : offset + length].tobytes().hex()

    def await_byte(self, offset: int, value: int) -> None:
        """Returns when the byte has the value: seen by this thread while the transport's thread receives."""
        while self._memory[offset] != value:
            pass

    def holds_when_flagged(self, flag_offset: int, value: int, data_offset: int, data_length: int) -> bool:
        """Whether all data has the value at the moment the flag has it."""
        self.await_byte(flag_offset, value)
        return bool((self._memory[data_offset : data_offset + data_length] == value).all())

    def unmap(self) -> None:
        """Takes the memory away from under what was offered."""
        del self._memory
        self._mapping.close()

    async def write_forever(self, address: str, base: int, puts: int = 1) -> str:
        channel = await self._transport.connect(bytes.fromhex(address))
        self._writes.append(asyncio.create_task(self._write_forever(channel, base, puts)))
        return channel.carrier

    async def await_writers_end(self) -> None:
        """Returns when every write that was to go on for ever has failed."""
        await asyncio.wait(self._writes)

    async def _write_forever(self, channel: Channel, base: int, puts: int) -> None:
        length = self._region.length // puts
        offsets = np.arange(puts) * length
        while True:
            await channel.write(Puts(self._region.base + offsets, base + offsets, np.full(puts, length)))


async def serve(backend: str, size_bytes: int) -> None:
    peer = Peer(backend, size_bytes)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        answer = getattr(peer, command.pop("call"))(**command)
        if asyncio.iscoroutine(answer):
            answer = await answer
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
