"""The thread of a Mooncake connection, without Mooncake."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from pd_common.errors import TransferFailed
from pd_common.transport.base import MemoryRegion, Puts
from pd_common.transport.mooncake import outbound
from pd_common.transport.mooncake.engine import Settings
from pd_common.transport.mooncake.outbound import Outbound
from pd_common.transport.mooncake.write import Write


class FakeEngine:
    """Writes nothing. `dies` ends the thread that calls it."""

    def __init__(self, *_: Any) -> None:
        self.dies = False
        self.writes = 0
        self.closed = 0

    def register(self, _: Any) -> None:
        """Any memory will do."""

    def write(self, *_: Any) -> None:
        self.writes += 1
        if self.dies:
            raise SystemExit

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine()
    monkeypatch.setattr(outbound, "Engine", lambda *_: engine)
    return engine


@pytest.fixture
async def connection() -> Outbound:
    return Outbound(Settings(None, "host", "tcp", ""), "peer:1")  # type: ignore[arg-type]  # no library


def write(puts: int) -> Write:
    one = np.ones(puts, dtype=np.int64)
    done = asyncio.get_running_loop().create_future()
    return Write([Puts(one, one, one)], (MemoryRegion(0, 2),), time.perf_counter(), done)


async def test_a_write_of_several_batches_ends_and_so_does_the_connection(
    engine: FakeEngine, connection: Outbound
) -> None:
    several = write(3000)
    connection.write(several)
    receipt = await asyncio.wait_for(several.done, 10)
    assert (receipt.bytes, receipt.descriptors, engine.writes) == (3000, 3000, 3)
    await asyncio.wait_for(asyncio.wrap_future(connection.close()), 10)
    assert engine.closed == 1
    with pytest.raises(TransferFailed, match="closed"):
        connection.write(write(1))


async def test_when_the_thread_dies_every_write_fails_after_the_engine_is_closed(
    engine: FakeEngine, connection: Outbound
) -> None:
    engine.dies = True
    writes = [write(1) for _ in range(3)]
    for each in writes:
        connection.write(each)
    failures = await asyncio.wait_for(asyncio.gather(*(each.done for each in writes), return_exceptions=True), 10)
    assert [type(failure) for failure in failures] == [TransferFailed] * 3
    assert (engine.writes, engine.closed > 0) == (1, True)
    with pytest.raises(TransferFailed, match="lost its thread"):
        connection.write(write(1))
