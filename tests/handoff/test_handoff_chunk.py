from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_common.errors import PagesInvalid
from pd_common.handoff.chunk import (
    ChunkPlanner,
    PoolBuffers,
    TransferKVChunk,
    check_pages,
    group_concurrent_contiguous,
    pages_due,
    pages_to_transfer,
    plan_puts,
)
from tests.handoff.memory import room


def plan(prompt: int, page_size: int, chunk_tokens: int, prefix: int) -> tuple[list[TransferKVChunk], list[int]]:
    """All chunks of a prompt that is computed `chunk_tokens` at a time, and how much was computed at each."""
    table = [1000 + page for page in range(-(-prompt // page_size))]
    planner = ChunkPlanner(room(1), prompt, page_size, prefix)
    chunks, computed = [], []
    for tokens in [*range(chunk_tokens, prompt, chunk_tokens), prompt]:
        chunk = planner.next_chunk(tokens, table, is_last=tokens == prompt)
        if chunk is not None:
            chunks.append(chunk)
            computed.append(tokens)
    return chunks, computed


def edge_prompts(page_size: int) -> list[int]:
    return sorted({1, max(1, page_size - 1), page_size, page_size + 1, 3 * page_size, 5 * page_size + 3})


@pytest.mark.parametrize(
    ("page_size", "prompt", "chunk_tokens"),
    [(size, prompt, chunk) for size in (1, 16, 64) for prompt in edge_prompts(size) for chunk in (1, 3, 7, 61, 10_000)],
)
def test_every_page_goes_once_in_order_and_only_when_it_is_whole(
    page_size: int, prompt: int, chunk_tokens: int
) -> None:
    for prefix in range(0, prompt + 1, page_size):
        chunks, computed = plan(prompt, page_size, chunk_tokens, prefix)
        pages = [page for chunk in chunks for page in chunk.src_pages.tolist()]
        assert pages == [1000 + page for page in range(prefix // page_size, -(-prompt // page_size))]
        assert len(pages) == pages_to_transfer(prompt, prefix, page_size)
        assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
        assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        sent = 0
        for chunk, tokens in zip(chunks, computed, strict=True):
            assert chunk.dst_offset_pages == sent
            sent += len(chunk.src_pages)
            if not chunk.is_last:
                assert len(chunk.src_pages) > 0
                assert prefix + sent * page_size <= tokens


def test_the_last_send_happens_without_pages() -> None:
    due = pages_due(tokens_computed=32, page_size=16, pages_sent=2, prefix_pages=0, is_last=True)
    assert due is not None
    assert len(due) == 0


@pytest.mark.parametrize(("tokens", "is_last"), [(9, False), (7, True)])
def test_a_chunk_is_of_the_prompt(tokens: int, is_last: bool) -> None:
    with pytest.raises(PagesInvalid):
        ChunkPlanner(room(1), 8, 4, 0).next_chunk(tokens, [0, 1], is_last=is_last)


def test_a_page_table_must_hold_what_is_computed() -> None:
    with pytest.raises(PagesInvalid):
        ChunkPlanner(room(1), 8, 4, 0).next_chunk(8, [0], is_last=True)


@pytest.mark.parametrize("prefix", [3, -4, 12])
def test_a_prefix_is_whole_pages_of_the_prompt(prefix: int) -> None:
    with pytest.raises(PagesInvalid):
        pages_to_transfer(8, prefix, 4)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=30))
def test_runs_are_maximal_and_lose_nothing(pairs: list[tuple[int, int]]) -> None:
    src = np.array([pair[0] for pair in pairs], dtype=np.int64)
    dst = np.array([pair[1] for pair in pairs], dtype=np.int64)
    runs = group_concurrent_contiguous(src, dst)
    spelled = list(zip(runs.src_start.tolist(), runs.dst_start.tolist(), runs.count.tolist(), strict=True))
    assert [(s + i, d + i) for s, d, count in spelled for i in range(count)] == pairs
    for (s, d, count), (next_s, next_d, _) in pairwise(spelled):
        assert (s + count, d + count) != (next_s, next_d)


def test_lists_of_unequal_length_are_refused() -> None:
    with pytest.raises(PagesInvalid):
        group_concurrent_contiguous(np.arange(3), np.arange(2))


def test_puts_cover_every_buffer_of_every_page() -> None:
    runs = group_concurrent_contiguous(np.array([4, 5, 9]), np.array([0, 1, 2]))
    puts = plan_puts(runs, src_bases=(1_000, 50_000), dst_bases=(7_000, 90_000), item_lens=(10, 300))
    got = list(zip(puts.local.tolist(), puts.remote.tolist(), puts.lengths.tolist(), strict=True))
    assert got == [(1_040, 7_000, 20), (1_090, 7_020, 10), (51_200, 90_000, 600), (52_700, 90_600, 300)]
    assert puts.total_bytes == 3 * 310


@pytest.mark.parametrize("pages", [(0, 1), (0, 1, 2, 3), (0, 1, 1), (0, 1, 8), (0, 1, -1), (0, 1, 2**63)])
def test_a_bad_page_list_never_becomes_an_address(pages: Sequence[int]) -> None:
    with pytest.raises(PagesInvalid):
        check_pages(pages, num_pages=8, expected=3)


def test_a_good_page_list_keeps_its_order() -> None:
    assert check_pages((7, 0, 3), num_pages=8, expected=3).tolist() == [7, 0, 3]
    assert check_pages((), num_pages=8, expected=0).tolist() == []


@pytest.mark.parametrize(
    ("bases", "item_lens", "num_pages"),
    [((1,), (1, 1), 1), ((), (), 1), ((1,), (0,), 1), ((-1,), (1,), 1), ((1,), (1,), 0), ((2**63 - 8,), (8,), 2)],
)
def test_a_pool_stays_within_the_address_space(
    bases: tuple[int, ...], item_lens: tuple[int, ...], num_pages: int
) -> None:
    with pytest.raises(PagesInvalid):
        PoolBuffers(bases, item_lens, num_pages, page_size=16)
