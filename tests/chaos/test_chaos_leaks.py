"""Nothing grows: registered memory, endpoints, requests and remote keys are let go of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from pd_common.transport.base import Channel, Puts
from pd_common.transport.ucx.transport import UcxTransport
from tests.transport.pairs import CARRIERS, Memory, ProcessReceiver

RECONNECTS = 100
WRITES = 20
"""After each reconnect: 2,000 in all."""
PUTS = 64
WARM_UP = 20
"""Reconnects before the first look: until then pools of UCX and Python's arenas still fill up."""
GROWTH_BYTES = 2 << 20
"""What may be noise: allocators keep what they will use again. A page lost in each write would be four times this."""


class Use(NamedTuple):
    fds: int
    rss_bytes: int


def use_of(pid: int) -> Use:
    rss_pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return Use(len(list(Path(f"/proc/{pid}/fd").iterdir())), rss_pages * os.sysconf("SC_PAGE_SIZE"))


async def reconnected(sender: UcxTransport, receiver: ProcessReceiver, source: Memory) -> None:
    address = await receiver.listen()
    channel: Channel = await sender.connect(address)
    offsets = np.arange(PUTS, dtype=np.int64) * (source.bytes.nbytes // PUTS)
    puts = Puts(source.base + offsets, receiver.base + offsets[::-1], np.full(PUTS, source.bytes.nbytes // PUTS))
    for _ in range(WRITES):
        await channel.write(puts)
    await channel.close()
    await receiver.fence(address)


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("carrier", CARRIERS)
async def test_transfers_and_reconnects_leave_nothing_behind(carrier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    for name, value in CARRIERS[carrier].items():
        monkeypatch.setenv(name, value)
    receiver, sender, source = ProcessReceiver(CARRIERS[carrier]), UcxTransport(), Memory()
    try:
        sender.register(source.region)
        for _ in range(WARM_UP):
            await reconnected(sender, receiver, source)
        pids = (os.getpid(), receiver._process.pid)
        before = [use_of(pid) for pid in pids]
        for _ in range(RECONNECTS):
            await reconnected(sender, receiver, source)
        after = [use_of(pid) for pid in pids]
    finally:
        await sender.close()
        receiver.kill()
    growth = [(new.fds - old.fds, new.rss_bytes - old.rss_bytes) for old, new in zip(before, after, strict=True)]
    print(f"{carrier}: growth of (file descriptors, bytes) in sender, receiver: {growth}")
    assert all(fds <= 0 and rss <= GROWTH_BYTES for fds, rss in growth), growth
