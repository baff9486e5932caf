"""Requests to the sending end of a transfer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict

import numpy as np

from pd_common.cli.bench.end_memory import EndMemory
from pd_common.cli.bench.ends import SendingEnd
from pd_common.cli.bench.spec import Handler, Reply, case_of
from pd_common.cli.bench.work import Work, piece_lists, plan_pieces
from pd_common.errors import InternalError
from pd_common.transport.base import Puts


class Sender:
    """Requests to the sending end."""

    def __init__(self, work: Work, memory: EndMemory, end: SendingEnd) -> None:
        self._work = work
        self._memory = memory
        self._end = end
        self._destination = self._staging = 0
        self._stream: asyncio.Task[int] | None = None
        self._streaming = False
        self.handlers: dict[str, Handler] = {
            "connect": self._connect,
            "write": self._write,
            "pieces": self._pieces,
            "staged": self._staged,
            "stream_begin": self._stream_begin,
            "stream_end": self._stream_end,
        }

    async def _connect(self, address: str, destination: int, staging: int) -> Reply:
        self._destination, self._staging = destination, staging
        await self._end.connect(bytes.fromhex(address))
        return {"carrier": self._end.carrier, "library": self._end.library}

    def _plan(self, **case: str) -> Puts:
        return self._work.plan(case_of(case), self._memory.pool.region.base, self._destination)

    async def _write(self, **case: str) -> Reply:
        return await self._moved(self._plan(**case))

    async def _pieces(self, piece_bytes: int, pieces: int) -> Reply:
        return await self._moved(
            plan_pieces(piece_bytes, pieces, self._memory.pool.region.base, self._destination),
        )

    async def _staged(self, piece_bytes: int, pieces: int) -> Reply:
        pool, staging = self._memory.pieces(piece_bytes, pieces)
        source, _ = piece_lists(pieces)
        began = time.perf_counter()
        np.take(pool, source, axis=0, out=staging, mode="clip")
        gathered_s = time.perf_counter() - began
        one = (self._memory.staging_region.base, self._staging, staging.nbytes)
        puts = Puts(*(np.array([value], dtype=np.int64) for value in one))
        return await self._moved(puts) | {"gather_s": gathered_s}

    async def _moved(self, puts: Puts) -> Reply:
        return asdict(await self._end.write(puts)) | {"descriptors": len(puts), "bytes": puts.total_bytes}

    async def _stream_begin(self, **case: str) -> Reply:
        self._streaming = True
        self._stream = asyncio.create_task(self._write_on(self._plan(**case)))
        return {}

    async def _write_on(self, puts: Puts) -> int:
        began = time.perf_counter()
        moved = 0
        while self._streaming:
            await self._end.write(puts)
            moved += puts.total_bytes
            await asyncio.sleep(0)  # a write that never waits would keep every other request waiting
        return round(moved / (time.perf_counter() - began))

    async def _stream_end(self) -> Reply:
        """Bytes per second since `stream_begin`."""
        self._streaming = False
        if self._stream is None:
            raise InternalError("no stream was begun")
        return {"bytes_per_s": await self._stream}
