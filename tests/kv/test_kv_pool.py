from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from pd_common.errors import InternalError
from pd_common.kv.pool import KVPool, LayerSpec
from pd_common.types import BufferKind, BufferSpec

UNEVEN = (LayerSpec(0, kv_heads=2, k_dim=8, v_dim=8), LayerSpec(3, kv_heads=1, k_dim=24, v_dim=16))
CPU = torch.device("cpu")


def parts(pool: KVPool, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
    pages = pool.layer(layer.layer_id)
    return pages.key, pages.value


def test_each_page_lies_where_its_address_says() -> None:
    """What a one-sided write relies on: base + page * item_len is exactly that page, all layers, keys before values."""
    pool = KVPool(UNEVEN, page_size=4, num_pages=5, dtype=torch.float32, device=CPU)
    [base], [length], [item_len] = pool.get_contiguous_buf_infos()
    assert length == 5 * item_len
    for page in range(5):
        source = torch.randn(item_len // 4)
        ctypes.memmove(base + page * item_len, source.data_ptr(), item_len)
        held = [part[page].flatten() for layer in UNEVEN for part in parts(pool, layer)]
        assert torch.equal(torch.cat(held), source)


def test_what_one_page_holds_of_a_layer_is_contiguous() -> None:
    pool = KVPool(UNEVEN, page_size=4, num_pages=5, dtype=torch.float32, device=CPU)
    for layer in UNEVEN:
        for part, dim in zip(parts(pool, layer), (layer.k_dim, layer.v_dim), strict=True):
            assert part.shape == (5, 4, layer.kv_heads, dim)
            assert part[2].is_contiguous()


def test_the_one_buffer_names_its_layers_and_its_item_length() -> None:
    pool = KVPool(UNEVEN, page_size=4, num_pages=5, dtype=torch.bfloat16, device=CPU)
    page_bytes = 4 * 2 * (2 * 8 + 2 * 8 + 24 + 16)
    assert pool.kv_item_lens == (page_bytes,)
    assert pool.buffers == (BufferSpec(BufferKind.KEY_VALUE, (0, 3), page_bytes),)
    assert pool.num_tokens == 20


def test_the_buffer_is_the_whole_region_and_begins_on_an_os_page() -> None:
    pool = KVPool(UNEVEN, page_size=3, num_pages=7, dtype=torch.float16, device=CPU)
    region_base, region_length = pool.region
    assert region_base % mmap.PAGESIZE == 0
    assert pool.get_contiguous_buf_infos() == ([region_base], [region_length], [region_length // 7])


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


def test_zeroed_pages_are_zeros_and_their_neighbours_are_not() -> None:
    pool = KVPool(UNEVEN, page_size=4, num_pages=5, dtype=torch.float32, device=CPU)
    views = [view for spec in UNEVEN for view in (pool.layer(spec.layer_id).key, pool.layer(spec.layer_id).value)]
    for view in views:
        view.fill_(7)
    pool.zero((1, 4))
    for view in views:
        assert [float(view[page].abs().max()) for page in range(5)] == [7, 0, 7, 7, 0]


def test_pages_are_read_as_the_bytes_that_lie_there() -> None:
    pool = KVPool(UNEVEN, page_size=4, num_pages=5, dtype=torch.bfloat16, device=CPU)
    [base], _, [item_len] = pool.get_contiguous_buf_infos()
    for layer in UNEVEN:
        for part in parts(pool, layer):
            part.copy_(torch.randn(part.shape))
    read = pool.read_pages(1, 3)
    assert (read.nbytes, read.format) == (3 * item_len, "B")
    assert bytes(read) == ctypes.string_at(base + item_len, 3 * item_len)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_pages_come_back_elsewhere_and_in_another_pool(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, in blocks of two pages; the pages beside them stay as they are."""
    source, target = (KVPool(UNEVEN, page_size=4, num_pages=9, dtype=dtype, device=CPU) for _ in range(2))
    monkeypatch.setattr("pd_common.kv.pool._BLOCK_BYTES", 2 * source.kv_item_lens[0])
    for layer in UNEVEN:
        for part in parts(source, layer):
            part.copy_(torch.randn(part.shape))
    before = bytes(source.read_pages(0, 9))

    saved, places = (5, 1, 8, 0, 3), (2, 7, 3, 4, 8)
    copy = source.save(saved)
    for layer in UNEVEN:
        for part in parts(source, layer):
            part.fill_(7)
    target.load(copy, places)

    size = source.kv_item_lens[0]
    for page in range(9):
        expected = bytes(size)
        if page in places:
            first = saved[places.index(page)] * size
            expected = before[first : first + size]
        assert bytes(target.read_pages(page, 1)) == expected


def test_no_page_at_all_can_be_saved() -> None:
    pool = KVPool(UNEVEN, page_size=4, num_pages=2, dtype=torch.float32, device=CPU)
    pool.load(pool.save(()), ())
    assert not any(pool.read_pages(0, 2))
