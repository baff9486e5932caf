"""One write on its way through one endpoint: groups posted in slices, each group flushed before the next is begun.

A flush stands between two groups and not `ucp_worker_fence`: UCX waits inside that call until the peer has answered
(tcp, UCX 1.22), so that one peer that is stopped would stop the progress thread for all.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pd_common.transport.base import Puts, WriteReceipt
from pd_common.transport.ucx.binding import OK, UCXEndpoint, UCXRkey

_SLICE = 256
"""Puts posted between two calls of progress."""
_WINDOW = 1024
_WINDOW_BYTES = 64 << 20
"""Puts of one write, and their bytes, that may be outstanding (one put always may): what is outstanding cannot be taken
back, so this bounds how long it takes to break a write off."""


@dataclass(frozen=True, slots=True, eq=False)
class Posting:
    """One group, resolved: `targets` are indices of remote keys, `sources` of local regions in `put_params`."""

    puts: Puts
    targets: NDArray[np.int64]
    sources: NDArray[np.int64]
    put_params: tuple[Any, ...]
    bytes_before: NDArray[np.int64]
    """Bytes of the first n puts, for n from 0 to all."""

    @staticmethod
    def of(puts: Puts, targets: NDArray[np.int64], sources: NDArray[np.int64], put_params: tuple[Any, ...]) -> Posting:
        return Posting(puts, targets, sources, put_params, np.concatenate(([0], np.cumsum(puts.lengths))))

    def end_of_window(self, oldest: int) -> int:
        """The put before which posting must stop while put number `oldest` is outstanding."""
        limit = self.bytes_before[oldest] + _WINDOW_BYTES
        by_bytes = int(np.searchsorted(self.bytes_before, limit, side="right")) - 1
        return min(max(by_bytes, oldest + 1), oldest + _WINDOW, len(self.puts))


@dataclass(slots=True, eq=False)
class Write:
    """Invariant: what is posted and not finished is in `_requests` or covered by `_flush`."""

    postings: tuple[Posting, ...]
    started: float
    done: asyncio.Future[WriteReceipt]
    posting_seconds: float = 0.0
    _group: int = 0
    _position: int = 0
    _flush: int | None = None
    _requests: deque[int] = field(default_factory=deque)

    @property
    def finished(self) -> bool:
        """All groups are visible remotely."""
        return self._group == len(self.postings)

    @property
    def first_request(self) -> int | None:
        """A request that is not freed yet."""
        return self._requests[0] if self._requests else None

    def advance(self, endpoint: UCXEndpoint, rkeys: list[UCXRkey]) -> bool:
        """Posts or flushes what can be now; whether there was something to do. Only for a whole endpoint.

        Raises:
            UCXError: a put or the flush failed.
        """
        settled = self.settle(endpoint)
        posting = self.postings[self._group]
        if self._position < len(posting.puts):
            return self._post(posting, endpoint, rkeys) or settled
        if self._flush is None:
            self._flush = endpoint.flush_nbx()
            settled = True
        if self._requests or (status := endpoint.take(self._flush)) is None:
            return settled
        self._group, self._position, self._flush = self._group + 1, 0, None
        if status != OK:
            raise endpoint.error(status, "a flush failed")
        return True

    def settle(self, endpoint: UCXEndpoint) -> bool:
        """Takes back finished requests, without posting anything; whether there were any.

        Raises:
            UCXError: one of them failed.
        """
        before = len(self._requests)
        failure = endpoint.reap(self._requests)
        if failure is not None:
            raise failure
        return len(self._requests) != before

    def discard(self, endpoint: UCXEndpoint) -> bool:
        """Takes back requests whose failure is known already; whether none is left."""
        endpoint.reap(self._requests)
        if self._flush is not None and endpoint.take(self._flush) is not None:
            self._flush = None
        return not self._requests and self._flush is None

    def receipt(self) -> WriteReceipt:
        puts = [posting.puts for posting in self.postings]
        return WriteReceipt(
            bytes=sum(each.total_bytes for each in puts),
            descriptors=sum(len(each) for each in puts),
            posting_seconds=self.posting_seconds,
            seconds=time.perf_counter() - self.started,
        )

    def _post(self, posting: Posting, endpoint: UCXEndpoint, rkeys: list[UCXRkey]) -> bool:
        """Posts the next slice: progress is never far away. False when the window is full."""
        start = self._position
        end = min(start + _SLICE, posting.end_of_window(start - len(self._requests)))
        if end <= start:
            return False
        began = time.perf_counter()
        endpoint.put_nbx(
            zip(
                posting.puts.local[start:end].tolist(),
                posting.puts.lengths[start:end].tolist(),
                posting.puts.remote[start:end].tolist(),
                [rkeys[index].handle for index in posting.targets[start:end].tolist()],
                [posting.put_params[index] for index in posting.sources[start:end].tolist()],
                strict=True,
            ),
            self._requests,
        )
        self._position = end
        self.posting_seconds += time.perf_counter() - began
        return True
