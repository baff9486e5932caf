"""The paged KV pool: one key and one value buffer per layer, all cut from one allocation that a transport can register.

Knows tensors and addresses, but not which request a page belongs to.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from pd_common.errors import InternalError
from pd_common.types import BufferKind, BufferSpec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Shape of what one attention layer keeps per token: `kv_heads` keys of `k_dim` and values of `v_dim` numbers."""

    layer_id: int
    kv_heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Views into the pool: key `[num_pages, page_size, kv_heads, k_dim]`, value the same with `v_dim`."""

    key: torch.Tensor
    value: torch.Tensor


class KVPool:
    """Page `p` of buffer `i` lies at `data_ptrs[i] + p * kv_item_lens[i]` for as long as the pool lives.

    Pages start as zeros that cost no memory until they are touched. Every number in a page that attention may read is
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
        self.buffers: tuple[BufferSpec, ...] = tuple(
            BufferSpec(kind, layer.layer_id, page_size * layer.kv_heads * dim * dtype.itemsize)
            for layer in layers
            for kind, dim in ((BufferKind.KEY, layer.k_dim), (BufferKind.VALUE, layer.v_dim))
        )
        offsets = [0, *accumulate(num_pages * buffer.item_len_bytes for buffer in self.buffers)]
        self._backing = _zeros(offsets[-1], device)
        self._offsets = offsets[:-1]
        self._pages = {layer.layer_id: self._views(index, layer) for index, layer in enumerate(layers)}

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
        """Address and length in bytes of the one allocation behind all buffers; it starts on an OS page."""
        return self._backing.data_ptr(), self._backing.numel()

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """For each buffer its address, its length in bytes and the bytes of one page."""
        item_lens = list(self.kv_item_lens)
        base, _ = self.region
        return [base + offset for offset in self._offsets], [self.num_pages * item for item in item_lens], item_lens

    def layer(self, layer_id: int) -> LayerPages:
        """Key and value pages of one layer."""
        return self._pages[layer_id]

    def _views(self, index: int, layer: LayerSpec) -> LayerPages:
        key, value = (
            self._view(2 * index + place, (self.num_pages, self.page_size, layer.kv_heads, dim))
            for place, dim in enumerate((layer.k_dim, layer.v_dim))
        )
        return LayerPages(key, value)

    def _view(self, buffer_index: int, shape: tuple[int, ...]) -> torch.Tensor:
        start = self._offsets[buffer_index]
        length = self.num_pages * self.buffers[buffer_index].item_len_bytes
        return self._backing[start : start + length].view(self.dtype).view(shape)


def _zeros(length: int, device: torch.device) -> torch.Tensor:
    """`length` zero bytes from an OS page border on. On the host they are mapped, not touched: no memory until used."""
    if device.type == "cpu":
        mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(mapping, dtype=torch.uint8)
    raw = torch.zeros(length + mmap.PAGESIZE, dtype=torch.uint8, device=device)
    return raw.narrow(0, -raw.data_ptr() % mmap.PAGESIZE, length)
