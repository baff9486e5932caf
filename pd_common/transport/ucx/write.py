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
from pd_common.transport.ucx.interface import OK, Endpoint, Rkey
from pd_common.transport.ucx.sgl import GatheredPuts

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

    @property
    def gatherable(self) -> bool:
        """Whether it is several puts out of one registered range: UCX gathers from one kind of memory only."""
        return len(self.puts) > 1 and bool((self.sources == self.sources[0]).all())

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
    gathered: bool = False
    """Many puts go in one call."""
    posting_seconds: float = 0.0
    _group: int = 0
    _position: int = 0
    _flush: Any = None
    _requests: deque[Any] = field(default_factory=deque)
    _gathered: list[GatheredPuts] = field(default_factory=list)
    """What UCX may still read."""

    @property
    def finished(self) -> bool:
        """All groups are visible remotely."""
        return self._group == len(self.postings)

    @property
    def first_request(self) -> Any:
        """A request that is not freed yet."""
        return self._requests[0] if self._requests else None

    def advance(self, endpoint: Endpoint, rkeys: list[Rkey]) -> bool:
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

    def settle(self, endpoint: Endpoint) -> bool:
        """Takes back finished requests, without posting anything; whether there were any.

        Raises:
            UCXError: one of them failed.
        """
        before = len(self._requests)
        failure = endpoint.reap(self._requests)
        if failure is not None:
            raise failure
        return len(self._requests) != before

    def discard(self, endpoint: Endpoint) -> bool:
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

    def _post(self, posting: Posting, endpoint: Endpoint, rkeys: list[Rkey]) -> bool:
        """Posts the next slice: progress is never far away. False when the window is full."""
        began = time.perf_counter()
        start = self._position
        if self.gathered and posting.gatherable:
            self._post_gathered(posting, endpoint, rkeys)
        else:
            self._post_each(posting, endpoint, rkeys)
        self.posting_seconds += time.perf_counter() - began
        return self._position > start

    def _post_each(self, posting: Posting, endpoint: Endpoint, rkeys: list[Rkey]) -> None:
        start = self._position
        end = min(start + _SLICE, posting.end_of_window(start - len(self._requests)))
        if end <= start:
            return
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

    def _post_gathered(self, posting: Posting, endpoint: Endpoint, rkeys: list[Rkey]) -> None:
        """A window's worth in one call, when at most one such call is outstanding."""
        if len(self._requests) > 1:
            return
        some = slice(self._position, posting.end_of_window(self._position))
        puts, source = posting.puts, posting.put_params[posting.sources[0]]
        handles = [rkey.handle for rkey in rkeys]
        gathered = GatheredPuts.of(
            puts.local[some], puts.remote[some], puts.lengths[some], posting.targets[some], handles, source
        )
        self._gathered.append(gathered)
        endpoint.put_gathered(gathered, self._requests)
        self._position = some.stop
