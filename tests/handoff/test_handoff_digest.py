from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_common.handoff.digest import digest_prompt
from tests.handoff.memory import MemoryPool

ITEM_LENS = (64, 192, 40)
PAGES = 12


@given(st.permutations(range(PAGES)), st.permutations(range(PAGES)), st.lists(st.integers(0, PAGES), max_size=5))
def test_neither_placement_nor_chunks_matter(here: list[int], there: list[int], cuts: list[int]) -> None:
    source, target = MemoryPool(ITEM_LENS, PAGES, 4, seed=3), MemoryPool(ITEM_LENS, PAGES, 4)
    for mine, theirs in zip(source.arrays, target.arrays, strict=True):
        theirs[there] = mine[here]
    bounds = [0, *sorted(cuts), PAGES]
    running = source.new_digest()
    for start, stop in pairwise(bounds):
        running.update(np.array(here[start:stop], dtype=np.int64))
    assert running.digest() == target.digest_of(there)


@pytest.mark.parametrize("buffer", range(len(ITEM_LENS)))
def test_one_byte_of_one_buffer_matters(buffer: int) -> None:
    pool = MemoryPool(ITEM_LENS, PAGES, 4, seed=3)
    pages = [2, 3, 9]
    before = pool.digest_of(pages)
    pool.arrays[buffer][9, -1] ^= 1
    assert pool.digest_of(pages) != before


@pytest.mark.parametrize("other", [[3, 2, 9], [2, 3], [2, 3, 9, 10], []])
def test_order_and_number_of_pages_matter(other: list[int]) -> None:
    pool = MemoryPool(ITEM_LENS, PAGES, 4, seed=3)
    assert pool.digest_of(other) != pool.digest_of([2, 3, 9])


def test_a_page_outside_is_not_hashed() -> None:
    pool = MemoryPool(ITEM_LENS, PAGES, 4, seed=3)
    assert pool.digest_of([PAGES - 1, PAGES + 5]) == pool.digest_of([PAGES - 1])


def test_prompts_have_different_names() -> None:
    prompts = [(), (0,), (0, 0), (1, 2), (2, 1), (12,)]
    assert len({digest_prompt(prompt) for prompt in prompts}) == len(prompts)
    assert digest_prompt([1, 2]) == digest_prompt((1, 2))
