from __future__ import annotations

import asyncio
import ctypes
from typing import Any

import numpy as np

from pd_common.cli.bench.end_memory import EndMemory
from pd_common.cli.bench.ends import EndSettings, Moved
from pd_common.cli.bench.receiver import Receiver
from pd_common.cli.bench.sender import Sender
from pd_common.cli.bench.spec import Side, Spec
from pd_common.cli.bench.work import Work, piece_lists
from pd_common.transport.base import Puts

WORK = Work(layers=1, pages=16, page_bytes=1024)
PIECES = {"piece_bytes": 1024, "pieces": 16}


class CopyingEnd:
    """Both ends in one process."""

    library = carrier = "memmove"
    address = b""

    async def connect(self, address: bytes) -> None:
        """There is nothing to connect."""

    async def expect(self, puts: Puts) -> None:
        """There is nothing to expect."""

    async def write(self, puts: Puts) -> Moved:
        for local, remote, length in zip(puts.local.tolist(), puts.remote.tolist(), puts.lengths.tolist(), strict=True):
            ctypes.memmove(remote, local, length)
        return Moved(0.0, 0.0)


def memory(side: Side) -> EndMemory:
    return EndMemory(Spec(side, EndSettings("ucx", "", "wheel", "own", None), WORK, WORK.total_bytes))


def moved(*requests: str) -> tuple[Any, Any]:
    """The first pieces of both pools after these requests."""
    ours, theirs, end = memory(Side.SENDER), memory(Side.RECEIVER), CopyingEnd()
    handlers = Sender(WORK, ours, end).handlers | Receiver(WORK, theirs, end).handlers

    async def ask() -> None:
        await handlers["connect"](**await handlers["listen"]())
        for what in requests:
            await handlers[what](**PIECES)

    asyncio.run(ask())
    return ours.pieces(**PIECES)[0], theirs.pieces(**PIECES)[0]


def test_gather_put_and_scatter_bring_every_piece_where_a_put_of_its_own_would() -> None:
    source, destination = piece_lists(16)
    for requests in (["pieces"], ["staged", "scatter"]):
        sent, arrived = moved(*requests)
        assert np.array_equal(arrived[destination], sent[source])
    assert not np.array_equal(sent[0], sent[1])
