from __future__ import annotations

import numpy as np
import pytest

from pd_common.cli.bench.work import Case, Layout, Order, Work, page_lists, plan_pieces

WORK = Work(layers=3, pages=100, page_bytes=1024)


@pytest.mark.parametrize("order", Order)
def test_an_order_moves_every_page_once_and_is_the_same_every_time(order: Order) -> None:
    source, destination = page_lists(order, 100)
    assert sorted(source) == sorted(destination) == list(range(100))
    for first, second in zip((source, destination), page_lists(order, 100), strict=True):
        assert np.array_equal(first, second)


def test_shuffled_is_another_order_on_each_side() -> None:
    source, destination = page_lists(Order.SHUFFLED, 100)
    assert not np.array_equal(source, destination)
    assert not np.array_equal(source, np.arange(100))


def test_fragmented_leaves_seventy_percent_in_place() -> None:
    source, destination = page_lists(Order.FRAGMENTED, 1000)
    for side in (source, destination):
        moved = int(np.count_nonzero(side != np.arange(1000)))
        assert 290 <= moved <= 300  # a shuffle may leave a few of the 300 where they were
    assert not np.array_equal(source, destination)


@pytest.mark.parametrize(
    ("layout", "order", "descriptors"),
    [
        (Layout.PAGES, Order.CONTIGUOUS, 1),
        (Layout.LAYERS, Order.CONTIGUOUS, 6),
        (Layout.PAGES, Order.SHUFFLED, 100),
        (Layout.LAYERS, Order.SHUFFLED, 600),
    ],
)
def test_descriptors_follow_from_layout_and_order(layout: Layout, order: Order, descriptors: int) -> None:
    puts = WORK.plan(Case(layout, order), 0, 1 << 40)
    assert len(puts) == pytest.approx(descriptors, rel=0.03)  # a shuffle may keep a neighbour or two
    assert puts.total_bytes == WORK.total_bytes == 2 * 3 * 100 * 1024


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("layout", Layout)
def test_a_plan_reads_and_writes_the_whole_pool(layout: Layout, order: Order) -> None:
    puts = WORK.plan(Case(layout, order), 0, 1 << 40)
    for starts in (puts.local, puts.remote - (1 << 40)):
        covered = np.zeros(WORK.total_bytes, dtype=np.uint8)
        for start, length in zip(starts.tolist(), puts.lengths.tolist(), strict=True):
            covered[start : start + length] += 1
        assert covered.min() == covered.max() == 1


def test_pieces_are_put_one_by_one() -> None:
    puts = plan_pieces(1024, 50, 0, 1 << 40)
    assert len(puts) == pytest.approx(50, abs=2)
    assert puts.total_bytes == 50 * 1024
