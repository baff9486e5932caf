"""Requests to the receiving end of a transfer."""

from __future__ import annotations

import time

from pd_common.cli.bench.end_memory import EndMemory
from pd_common.cli.bench.ends import ReceivingEnd
from pd_common.cli.bench.spec import Handler, Reply, case_of
from pd_common.cli.bench.work import Work, piece_lists


class Receiver:
    """Requests to the receiving end."""

    def __init__(self, work: Work, memory: EndMemory, end: ReceivingEnd) -> None:
        self._work = work
        self._memory = memory
        self._end = end
        self.handlers: dict[str, Handler] = {
            "listen": self._listen,
            "expect": self._expect,
            "clear": self._clear,
            "digest": self._digest,
            "scatter": self._scatter,
        }

    async def _listen(self) -> Reply:
        address = self._end.address.hex()
        return {
            "address": address,
            "destination": self._memory.pool.region.base,
            "staging": self._memory.staging_region.base,
        }

    async def _expect(self, **case: str) -> Reply:
        base = self._memory.pool.region.base
        await self._end.expect(self._work.plan(case_of(case), base, base))
        return {}

    async def _clear(self) -> Reply:
        self._memory.pool.clear()
        return {}

    async def _digest(self, **case: str) -> Reply:
        return {"digest": self._memory.pool.destination_digest(self._work, case_of(case))}

    async def _scatter(self, piece_bytes: int, pieces: int) -> Reply:
        pool, staging = self._memory.pieces(piece_bytes, pieces)
        _, destination = piece_lists(pieces)
        began = time.perf_counter()
        pool[destination] = staging
        return {"scatter_s": time.perf_counter() - began}
