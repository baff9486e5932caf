"""An engine without a model: every token leaves its mark in the pool, and no step reads a token whose mark is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pd_common.engine.batch import Batch, BatchItem
from pd_common.engine.output import AnswerBuilder
from pd_common.engine.request import Limits, validate_request
from pd_common.engine.sampler import SampledToken
from pd_common.generation import GenerationRequest
from pd_common.handoff.chunk import PoolBuffers
from pd_common.handoff.digest import PageDigest
from pd_common.kv.pages import PageAllocator
from pd_common.kv.prefix import PrefixCache
from pd_common.transport.base import MemoryRegion
from pd_common.transport.fake import is_fake
from pd_common.types import BufferKind, BufferSpec, KvLayout, PageIndices
from tests.handoff.memory import host_readers

PAGE_SIZE = 4
TOKEN_BYTES = 8


def layout(width: int) -> KvLayout:
    """Of a pool with `width` marks per token and buffer."""
    item_len = PAGE_SIZE * TOKEN_BYTES * width
    return KvLayout(
        model="digest-of-a-model",
        dtype="int64",
        page_size=PAGE_SIZE,
        layers=1,
        kv_heads=1,
        head_dim=width,
        metadata_schema=1,
        software_version="0.1.0",
        buffers=tuple(BufferSpec(kind, (0,), item_len) for kind in (BufferKind.KEY, BufferKind.VALUE)),
    )


def answer_tokens(prompt_tokens: int, new_tokens: int) -> tuple[int, ...]:
    """What a pair says to any prompt of this length: 1000 and the position of each token."""
    return tuple(1000 + position for position in range(prompt_tokens, prompt_tokens + new_tokens))


class Gate(asyncio.Event):
    """Shut until it is set. `reached` is set when somebody waits at it for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = asyncio.Event()

    async def wait(self) -> bool:  # type: ignore[override]
        self.reached.set()
        return await super().wait()


class BytePool:
    """Two buffers of 64-bit marks, `width` equal ones per token: its id, its position, and which buffer it is."""

    def __init__(self, num_pages: int, width: int = 1) -> None:
        self.page_size = PAGE_SIZE
        self.num_pages = num_pages
        shape = (num_pages, PAGE_SIZE, width)
        buffers = layout(width).buffers
        self.arrays: list[NDArray[np.int64]] = [np.zeros(shape, dtype=np.int64) for _ in buffers]
        self.regions = tuple(MemoryRegion(array.ctypes.data, array.nbytes) for array in self.arrays)
        item_lens = tuple(buffer.item_len_bytes for buffer in buffers)
        self.buffers = PoolBuffers(tuple(region.base for region in self.regions), item_lens, num_pages, PAGE_SIZE)

    def new_digest(self) -> PageDigest:
        return PageDigest(host_readers(self.buffers))

    def write(self, pages: NDArray[np.int64], start: int, tokens: tuple[int, ...]) -> None:
        at = np.arange(start, start + len(tokens))
        for index, array in enumerate(self.arrays):
            array[pages[at // PAGE_SIZE], at % PAGE_SIZE] = _marks(index, at, tokens)[:, None]

    def save(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(np.stack([array[list(pages)] for array in self.arrays], axis=1))

    def load(self, copy: torch.Tensor, pages: Sequence[int]) -> None:
        for index, array in enumerate(self.arrays):
            array[list(pages)] = copy[:, index].numpy()

    def holds(self, pages: NDArray[np.int64], tokens: tuple[int, ...], zeros: int = 0) -> bool:
        """Whether `pages` are these tokens', from position 0 on; the first `zeros` of them have zeros for marks."""
        at = np.arange(len(tokens))
        found = [array[pages[at // PAGE_SIZE], at % PAGE_SIZE] for array in self.arrays]
        expected = [np.where(at < zeros, 0, _marks(index, at, tokens)) for index in range(len(found))]
        return all(bool((mine == right[:, None]).all()) for mine, right in zip(found, expected, strict=True))

    def fill(self, pages: Iterable[int], mark: int) -> None:
        """A canary."""
        for array in self.arrays:
            array[list(pages)] = mark

    def is_filled(self, pages: Iterable[int], mark: int) -> bool:
        return all(bool((array[list(pages)] == mark).all()) for array in self.arrays)


class ByteEngine:
    """What services use of an engine. A step waits at `gate`, then writes; `failure` ends the next step."""

    def __init__(self, num_pages: int, width: int = 1) -> None:
        self.pages = PageAllocator(num_pages)
        self.prefixes = PrefixCache(self.pages, PAGE_SIZE)
        self.pool = BytePool(num_pages, width)
        self.layout = layout(width)
        self.limits = Limits(context_length=4096, pool_tokens=num_pages * PAGE_SIZE, vocab_size=100_000)
        self.gate = Gate()
        self.gate.set()
        self.failure: Exception | None = None
        self.steps = 0

    def shut(self) -> Gate:
        """Steps wait here from now on."""
        self.gate = Gate()
        return self.gate

    async def zero_pages(self, pages: PageIndices) -> None:
        await self.gate.wait()
        self.pool.fill(pages, 0)

    async def save_pages(self, pages: Sequence[int]) -> torch.Tensor:
        await self.gate.wait()
        return self.pool.save(pages)

    async def load_pages(self, copy: torch.Tensor, pages: Sequence[int]) -> None:
        await self.gate.wait()
        self.pool.load(copy, pages)

    def validate(self, request: GenerationRequest) -> None:
        validate_request(request, self.limits)

    def new_answer(self, request: GenerationRequest, cached_tokens: int = 0) -> AnswerBuilder:
        return AnswerBuilder(request, frozenset(), None, cached_tokens)

    async def step(self, batch: Batch) -> tuple[SampledToken, ...]:
        self.steps += 1
        await self.gate.wait()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        for item, rows in zip(batch.items, batch.rows, strict=True):
            self._compute(item, rows.pages)
        return tuple(SampledToken(1000 + draw.position) for draw in batch.draws)

    def _compute(self, item: BatchItem, pages: NDArray[np.int64]) -> None:
        request = item.sequence.request
        made_up = len(request.prompt) if is_fake(request.bootstrap) and item.sequence.output else 0
        if not self.pool.holds(pages, item.sequence.tokens(0, item.start), made_up):
            raise AssertionError(f"room {request.room}: these pages hold something else")
        self.pool.write(pages, item.start, item.sequence.tokens(item.start, item.end))


def _marks(buffer: int, positions: NDArray[np.int64], tokens: tuple[int, ...]) -> NDArray[np.int64]:
    return (np.array(tokens, dtype=np.int64) << 24) + (positions << 2) + buffer + 1
