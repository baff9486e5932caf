"""One write on its way through one agent: NIXL transfers of bounded size, each begun when the one before is visible."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pd_common.transport.base import Puts, WriteReceipt
from pd_common.transport.nixl.binding import Descriptors, NixlAgent

_TRANSFER_BYTES = 64 << 20
_TRANSFER_PUTS = 2048
"""Bytes and puts of one transfer (one put always may be). What is posted cannot be taken back, so this bounds how long
it takes to break a write off; and while bytes stream in without a gap, the receiver's agent cannot be closed."""


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """What one NIXL request writes: rows of the same number, the same length and another address."""

    local: Descriptors
    remote: Descriptors


def split(puts: Puts) -> Iterator[Transfer]:
    """The puts in transfers of bounded size; those of no length are left out, which NIXL refuses."""
    kept = puts.lengths > 0
    lengths = puts.lengths[kept]
    zeros = np.zeros_like(lengths)
    local, remote = (np.stack([each[kept], lengths, zeros], axis=1) for each in (puts.local, puts.remote))
    bytes_before = np.concatenate(([0], np.cumsum(lengths)))
    start = 0
    while start < len(lengths):
        by_bytes = int(np.searchsorted(bytes_before, bytes_before[start] + _TRANSFER_BYTES, side="right")) - 1
        end = min(max(by_bytes, start + 1), start + _TRANSFER_PUTS)
        yield Transfer(local[start:end], remote[start:end])
        start = end


class Write:
    """Invariant: at most one transfer is posted; all those before it are visible remotely."""

    def __init__(self, groups: Sequence[Puts], started: float, done: asyncio.Future[WriteReceipt]) -> None:
        self.done = done
        self._started = started
        self._bytes = sum(puts.total_bytes for puts in groups)
        self._descriptors = sum(len(puts) for puts in groups)
        self._posting_seconds = 0.0
        self._transfers = [transfer for puts in groups for transfer in split(puts)][::-1]
        self._handle: int | None = None

    @property
    def finished(self) -> bool:
        """All of it is visible remotely."""
        return self._handle is None and not self._transfers

    def advance(self, agent: NixlAgent, peer: str) -> bool:
        """Posts the next transfer, or looks after the posted one; whether there was something to do.

        Raises:
            NixlError: a transfer failed.
        """
        if self._handle is None:
            done = self._post(agent, peer)
        else:
            done = agent.is_done(self._handle)
            if not done:
                return False
        if done:
            self.release(agent)
        return True

    def release(self, agent: NixlAgent) -> None:
        """Lets go of the posted transfer, which is done or is not waited for any more."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            agent.release(handle)

    def receipt(self) -> WriteReceipt:
        return WriteReceipt(
            bytes=self._bytes,
            descriptors=self._descriptors,
            posting_seconds=self._posting_seconds,
            seconds=time.perf_counter() - self._started,
        )

    def _post(self, agent: NixlAgent, peer: str) -> bool:
        began = time.perf_counter()
        transfer = self._transfers.pop()
        self._handle = agent.prepare_write(peer, transfer.local, transfer.remote)
        done = agent.post(self._handle)
        self._posting_seconds += time.perf_counter() - began
        return done
