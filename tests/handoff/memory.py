"""Memory for tests: a pool of bytes with a layout, and a channel whose writes land when the test says so."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pd_common.errors import PdError
from pd_common.handoff.chunk import PoolBuffers
from pd_common.handoff.destination import Destination, Offer, RemotePool
from pd_common.handoff.digest import PageDigest, ReadPages
from pd_common.handoff.metadata import MetadataBuffers, Slot
from pd_common.transport.base import Puts, WriteReceipt
from pd_common.types import BootstrapRoom, Instance

PREFILL = Instance("prefill-0", 1)
DECODE = Instance("decode-0", 1)
FIRST_SLOT = Slot(0, 1)


class MemoryPool:
    """Buffers of `item_lens` bytes per page; random bytes from `seed`, or zeros."""

    def __init__(self, item_lens: Sequence[int], num_pages: int, page_size: int, seed: int | None = None) -> None:
        size = [(num_pages, item_len) for item_len in item_lens]
        rng = np.random.default_rng(seed)
        self.arrays: list[NDArray[np.uint8]] = [
            np.zeros(shape, dtype=np.uint8) if seed is None else rng.integers(0, 256, shape, dtype=np.uint8)
            for shape in size
        ]
        bases = tuple(array.ctypes.data for array in self.arrays)
        self.buffers = PoolBuffers(bases, tuple(item_lens), num_pages, page_size)

    def new_digest(self) -> PageDigest:
        return PageDigest(host_readers(self.buffers))

    def digest_of(self, pages: Sequence[int]) -> bytes:
        """The digest of these pages as one piece."""
        whole = self.new_digest()
        whole.update(np.array(pages, dtype=np.int64))
        return whole.digest()

    def pages(self, pages: Sequence[int]) -> bytes:
        """The bytes of these pages, buffer by buffer."""
        return b"".join(array[list(pages)].tobytes() for array in self.arrays)


class GatedChannel:
    """Copies memory once its gate is open; remembers every group it was given, in order.

    `blocked` is set while a write waits at the gate.
    """

    carrier = "memory"

    def __init__(self) -> None:
        self.writes: list[tuple[Puts, ...]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.blocked = asyncio.Event()
        self.fault: PdError | None = None

    async def write(self, *groups: Puts) -> WriteReceipt:
        self.writes.append(groups)
        if not self.gate.is_set():
            self.blocked.set()
            await self.gate.wait()
            self.blocked.clear()
        if self.fault is not None:
            raise self.fault
        for group in groups:
            for local, remote, length in zip(group.local, group.remote, group.lengths, strict=True):
                ctypes.memmove(int(remote), int(local), int(length))
        total_bytes = sum(group.total_bytes for group in groups)
        return WriteReceipt(total_bytes, sum(len(group) for group in groups), 0.0, 0.0)

    async def close(self) -> None:
        self.fault = None


def make_offer(
    pages: Sequence[int],
    prompt_tokens: int,
    *,
    slot: Slot = FIRST_SLOT,
    decode_prefix_len: int = 0,
    receiver: Instance = DECODE,
    prompt_digest: bytes = b"prompt",
) -> Offer:
    return Offer(receiver, tuple(pages), slot, decode_prefix_len, prompt_tokens, prompt_digest)


def make_destination(offer: Offer, pool: MemoryPool, rows: MetadataBuffers, channel: GatedChannel) -> Destination:
    return Destination(offer, RemotePool(pool.buffers, rows.region.base, rows.num_slots), channel)


def owned(rows: MetadataBuffers) -> Slot:
    slot = rows.alloc()
    assert slot is not None
    return slot


def room(number: int) -> BootstrapRoom:
    return BootstrapRoom(number)


def host_readers(pool: PoolBuffers) -> tuple[ReadPages, ...]:
    """Readers of a pool in this process's own memory; the pool must outlive them."""
    return tuple(
        partial(_read_host, _view(base, item_len * pool.num_pages), item_len)
        for base, item_len in zip(pool.bases, pool.item_lens, strict=True)
    )


def _read_host(view: memoryview, item_len: int, first: int, count: int) -> memoryview:
    return view[first * item_len : (first + count) * item_len]


def _view(base: int, length: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * length).from_address(base)).cast("B")
