"""A receiver with one tensor on a given device: prints where it lies and its address, then its sum for every line."""

from __future__ import annotations

import asyncio
import json
import sys

import torch

from pd_common.transport.base import MemoryRegion
from pd_common.transport.ucx.transport import UcxTransport


async def receive(device: str, size_bytes: int) -> None:
    tensor = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    transport = UcxTransport()
    region = MemoryRegion(tensor.data_ptr(), size_bytes)
    transport.register(region)
    port = transport.listen([region])
    print(json.dumps({"base": region.base, "address": port.address.hex()}), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(int(tensor.to(torch.int64).sum()), flush=True)
    await transport.close()


if __name__ == "__main__":
    asyncio.run(receive(sys.argv[1], int(sys.argv[2])))
