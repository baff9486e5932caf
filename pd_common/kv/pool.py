"""The paged KV pool: one buffer in which a page holds the keys and values of all layers, so that it moves as one piece.

Knows tensors and addresses, but not which request a page belongs to.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from pd_common.errors import InternalError, InvalidRequest
from pd_common.types import BufferKind, BufferSpec

_BLOCK_BYTES = 16 << 20
"""Pages on their way to or from host memory are gathered in blocks of this size: a device has no room for all twice."""

_MADV_POPULATE_WRITE = 23
"""From linux/mman.h; the mmap module has no name for it yet."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Shape of what one attention layer keeps per token: `kv_heads` keys of `k_dim` and values of `v_dim` numbers."""

    layer_id: int
    kv_heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Views into the pool: key `[num_pages, page_size, kv_heads, k_dim]`, value the same with `v_dim`.

    What one page holds of a layer is contiguous; the stride from page to page is that of the whole pool.
    """

    key: torch.Tensor
    value: torch.Tensor


class KVPool:
    """Page `p` is `kv_item_lens[0]` bytes at `data_ptrs[0] + p * kv_item_lens[0]` for as long as the pool lives.

    Within a page the layers follow each other, each with its keys and then its values, `[page_size, kv_heads, dim]`.
    Pages start as zeros, and all of them are there from the start. Every number in a page that attention may read is
    finite: it was zero, written by the model, or copied from such a page.
    """

    def __init__(
        self, layers: Sequence[LayerSpec], page_size: int, num_pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if torch.is_inference_mode_enabled():
            raise InternalError("a pool made in inference mode cannot be written outside of it")
        self.page_size = page_size
        self.num_pages = num_pages
        self.dtype = dtype
        self.layers = tuple(layers)
        sizes = [page_size * layer.kv_heads * dim for layer in layers for dim in (layer.k_dim, layer.v_dim)]
        *starts, self._page_numel = accumulate(sizes, initial=0)
        page_bytes = self._page_numel * dtype.itemsize
        layer_ids = tuple(layer.layer_id for layer in layers)
        self.buffers = (BufferSpec(BufferKind.KEY_VALUE, layer_ids, page_bytes),)
        self._backing = _zeros(num_pages * page_bytes, device)
        self._pages = {
            layer.layer_id: LayerPages(
                self._view(starts[2 * index], layer.kv_heads, layer.k_dim),
                self._view(starts[2 * index + 1], layer.kv_heads, layer.v_dim),
            )
            for index, layer in enumerate(layers)
        }

    @property
    def num_tokens(self) -> int:
        """Tokens that fit when every page is full."""
        return self.num_pages * self.page_size

    @property
    def kv_item_lens(self) -> tuple[int, ...]:
        """Bytes of one page in each buffer."""
        return tuple(buffer.item_len_bytes for buffer in self.buffers)

    @property
    def region(self) -> tuple[int, int]:
        """Address and length in bytes of the one allocation behind all pages; it starts on an OS page."""
        return self._backing.data_ptr(), self._backing.numel()

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """For each buffer its address, its length in bytes and the bytes of one page."""
        base, length = self.region
        return [base], [length], list(self.kv_item_lens)

    def layer(self, layer_id: int) -> LayerPages:
        """Key and value pages of one layer."""
        return self._pages[layer_id]

    def read_pages(self, first: int, count: int) -> memoryview:
        """The bytes of `count` pages from `first` on: in place on the host, a copy of what lies on a device."""
        pages = self._backing.view(self.num_pages, -1)[first : first + count]
        return pages.cpu().numpy().data.cast("B")

    def zero(self, pages: Sequence[int]) -> None:
        """Makes pages zeros again; returns when they are."""
        index = torch.tensor(pages, dtype=torch.int64, device=self._backing.device)
        self._backing.view(self.num_pages, -1).index_fill_(0, index, 0)
        if self._backing.is_cuda:
            torch.cuda.synchronize(self._backing.device)

    def save(self, pages: Sequence[int]) -> torch.Tensor:
        """A copy of these pages in host memory, one row each, in order."""
        stored = self._rows()
        copy = torch.empty((len(pages), self._page_numel), dtype=self.dtype)
        for rows, index in self._blocks(pages):
            copy[rows] = stored.index_select(0, index)
        return copy

    def load(self, copy: torch.Tensor, pages: Sequence[int]) -> None:
        """Writes rows that `save` gave into these pages, one each; returns when they are there."""
        stored = self._rows()
        for rows, index in self._blocks(pages):
            stored.index_copy_(0, index, copy[rows].to(stored.device))
        if stored.is_cuda:
            torch.cuda.synchronize(stored.device)

    def _rows(self) -> torch.Tensor:
        """All pages, `[num_pages, numbers of a page]`."""
        return self._backing.view(self.dtype).view(self.num_pages, self._page_numel)

    def _blocks(self, pages: Sequence[int]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Some of the pages at a time: where they stand among all of them, and their ids."""
        index = torch.tensor(pages, dtype=torch.int64, device=self._backing.device)
        count = max(_BLOCK_BYTES // self.kv_item_lens[0], 1)
        for start in range(0, len(pages), count):
            rows = slice(start, start + count)
            yield rows, index[rows]

    def _view(self, start: int, kv_heads: int, dim: int) -> torch.Tensor:
        """Pages of what begins `start` numbers into each page."""
        shape = (self.num_pages, self.page_size, kv_heads, dim)
        strides = (self._page_numel, kv_heads * dim, dim, 1)
        return self._backing.view(self.dtype).as_strided(shape, strides, start)


def _zeros(length: int, device: torch.device) -> torch.Tensor:
    """`length` zero bytes from an OS page border on.

    Raises:
        InvalidRequest: the host has less memory than that.

    """
    if device.type == "cpu":
        mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages is only slower
            # One process writes another's memory twice as fast through huge pages (CMA: 14 instead of 7 GB/s).
            mapping.madvise(mmap.MADV_HUGEPAGE)
        _populate(mapping)
        return torch.frombuffer(mapping, dtype=torch.uint8)
    raw = torch.zeros(length + mmap.PAGESIZE, dtype=torch.uint8, device=device)
    return raw.narrow(0, -raw.data_ptr() % mmap.PAGESIZE, length)


def _populate(mapping: mmap.mmap) -> None:
    """Takes the memory now: a write into pages that the kernel has still to find takes five times as long."""
    try:
        mapping.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise InvalidRequest(
                f"the KV pool needs {len(mapping) / 2**30:.1f} GiB, more than this host has; give a smaller "
                "--kv-cache-tokens",
                field="kv_cache_tokens",
            ) from error
        # A kernel that does not know how (before 5.14) gives the pages when they are first used.
