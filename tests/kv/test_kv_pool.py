from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from pd_common.errors import InternalError
from pd_common.kv.pool import KVPool, LayerSpec
from pd_common.types import BufferKind

UNEVEN = (LayerSpec(0, kv_heads=2, k_dim=8, v_dim=8), LayerSpec(3, kv_heads=1, k_dim=24, v_dim=16))
CPU = torch.device("cpu")


def test_each_page_lies_where_its_address_says() -> None:
    """What a one-sided write relies on: base + page * item_len is exactly that page of that layer's keys or values."""
    pool = KVPool(UNEVEN, page_size=4, num_pages=5, dtype=torch.float32, device=CPU)
    bases, lengths, item_lens = pool.get_contiguous_buf_infos()
    tensors = [
        tensor for layer in UNEVEN for tensor in (pool.layer(layer.layer_id).key, pool.layer(layer.layer_id).value)
    ]
    for base, length, item_len, tensor in zip(bases, lengths, item_lens, tensors, strict=True):
        assert length == 5 * item_len == tensor.numel() * 4
        for page in range(5):
            source = torch.randn(tensor.shape[1:])
            ctypes.memmove(base + page * item_len, source.data_ptr(), item_len)
            assert torch.equal(tensor[page], source)


def test_item_lens_and_buffers_follow_the_layers() -> None:
    pool = KVPool(UNEVEN, page_size=4, num_pages=5, dtype=torch.bfloat16, device=CPU)
    assert pool.kv_item_lens == (4 * 2 * 8 * 2, 4 * 2 * 8 * 2, 4 * 24 * 2, 4 * 16 * 2)
    assert [(buffer.kind, buffer.layer_id) for buffer in pool.buffers] == [
        (BufferKind.KEY, 0),
        (BufferKind.VALUE, 0),
        (BufferKind.KEY, 3),
        (BufferKind.VALUE, 3),
    ]
    assert pool.num_tokens == 20


def test_one_page_aligned_region_holds_all_buffers_without_overlap() -> None:
    pool = KVPool(UNEVEN, page_size=3, num_pages=7, dtype=torch.float16, device=CPU)
    region_base, region_length = pool.region
    bases, lengths, _ = pool.get_contiguous_buf_infos()
    ends = [base + length for base, length in zip(bases, lengths, strict=True)]
    assert region_base % mmap.PAGESIZE == 0
    assert bases[0] == region_base
    assert ends[-1] == region_base + region_length
    assert ends[:-1] == bases[1:]


def test_pages_start_as_zeros() -> None:
    pool = KVPool(UNEVEN, page_size=4, num_pages=5, dtype=torch.float32, device=CPU)
    for layer in UNEVEN:
        assert not pool.layer(layer.layer_id).key.any()
        assert not pool.layer(layer.layer_id).value.any()


def test_a_pool_can_be_written_in_inference_mode_and_outside() -> None:
    pool = KVPool(UNEVEN, page_size=4, num_pages=5, dtype=torch.float32, device=CPU)
    with torch.inference_mode():
        pool.layer(0).key.fill_(1)
    pool.layer(0).key.fill_(2)
    assert pool.layer(0).key.eq(2).all()
    with torch.inference_mode(), pytest.raises(InternalError, match="inference mode"):
        KVPool(UNEVEN, page_size=4, num_pages=5, dtype=torch.float32, device=CPU)


def test_pools_do_not_share_memory() -> None:
    first, second = (KVPool(UNEVEN, page_size=4, num_pages=5, dtype=torch.float32, device=CPU) for _ in range(2))
    first.layer(3).value.fill_(1)
    assert not second.layer(3).value.any()
