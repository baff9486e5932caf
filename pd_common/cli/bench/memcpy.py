"""What one thread of this process needs to copy the same bytes: the yardstick of every transfer."""

from __future__ import annotations

import ctypes
import time

from pd_common.cli.bench.memory import Pool
from pd_common.cli.bench.pair import Sample
from pd_common.cli.bench.work import Case, Work


class Memcpy:
    """Two pools in this process; the source is filled as every sender's is."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._source = Pool(work.total_bytes)
        self._source.fill()
        self._destination = Pool(work.total_bytes)

    def transfer(self, case: Case) -> Sample:
        """Copies source to destination, one memmove for each write that a transfer would make."""
        puts = self._work.plan(case, self._source.region.base, self._destination.region.base)
        copies = list(zip(puts.remote.tolist(), puts.local.tolist(), puts.lengths.tolist(), strict=True))
        began = time.perf_counter()
        for to, at, length in copies:
            ctypes.memmove(to, at, length)
        return Sample(puts.total_bytes, len(copies), 0.0, time.perf_counter() - began)

    def digest(self, case: Case) -> int:
        """Digest of what a transfer of this case delivers."""
        return self._source.source_digest(self._work, case)
