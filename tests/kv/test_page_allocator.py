from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pd_common.errors import InternalError
from pd_common.kv.pages import PageAllocator


def runs(pages: tuple[int, ...]) -> int:
    return 1 + sum(following != page + 1 for page, following in pairwise(pages)) if pages else 0


def fewest_runs(free: set[int], count: int) -> int:
    """Runs that are needed when the longest are taken first."""
    lengths = [0]
    for page in range(40):
        lengths = [*lengths[:-1], lengths[-1] + 1] if page in free else [*lengths, 0]
    taken = 0
    for number, length in enumerate(sorted(lengths, reverse=True)):
        if taken >= count:
            return number
        taken += length
    return len(lengths)


class AllocatorMachine(RuleBasedStateMachine):
    """Against the plainest model there is: the set of free pages."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(40)
        self.free = set(range(40))
        self.held: list[int] = []

    @rule(count=st.integers(0, 45))
    def alloc(self, count: int) -> None:
        pages = self.allocator.alloc(count)
        if count > len(self.free):
            assert pages is None
            return
        assert pages is not None
        assert len(pages) == len(set(pages)) == count
        assert set(pages) <= self.free
        assert runs(pages) <= fewest_runs(self.free, count)
        self.free -= set(pages)
        self.held.extend(pages)

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.held:
            pages = data.draw(st.lists(st.sampled_from(self.held), unique=True))
            self.allocator.free(pages)
            self.free |= set(pages)
            self.held = [page for page in self.held if page not in pages]

    @rule(data=st.data())
    def give_back_wrongly(self, data: st.DataObject) -> None:
        """One wrong page among right ones: nothing at all is freed."""
        wrong = data.draw(st.sampled_from([-1, 40, *self.free]))
        with pytest.raises(InternalError):
            self.allocator.free([*self.held, wrong])

    @invariant()
    def books_balance(self) -> None:
        self.allocator.check_integrity()
        assert self.allocator.num_free == len(self.free)


TestAllocatorMachine = AllocatorMachine.TestCase


@given(st.permutations(range(24)))
def test_freeing_in_any_order_returns_to_the_start(order: list[int]) -> None:
    allocator = PageAllocator(24)
    allocator.alloc(24)
    for page in order:
        allocator.free([page])
    assert allocator.alloc(24) == tuple(range(24))


def test_the_shortest_run_that_fits_is_taken() -> None:
    allocator = PageAllocator(20)
    allocator.alloc(20)
    allocator.free(range(10))
    allocator.free([12, 13, 14])
    assert allocator.alloc(3) == (12, 13, 14)


def test_as_few_runs_as_possible_when_none_is_long_enough() -> None:
    allocator = PageAllocator(20)
    allocator.alloc(20)
    allocator.free([0, 3, 4, 8, 9, 10, 11, 15, 16])
    pages = allocator.alloc(6)
    assert pages is not None
    assert runs(pages) == 2


def test_running_out_is_not_an_error_and_takes_nothing() -> None:
    allocator = PageAllocator(4)
    assert allocator.alloc(5) is None
    assert allocator.num_free == allocator.num_pages == 4


def test_a_page_repeated_in_one_call_is_refused() -> None:
    allocator = PageAllocator(4)
    pages = allocator.alloc(2)
    assert pages is not None
    with pytest.raises(InternalError, match="twice"):
        allocator.free([*pages, pages[0]])
    allocator.free(pages)


@pytest.mark.parametrize("damage", ["num_free", "used"])
def test_integrity_check_finds_lost_pages(damage: str) -> None:
    allocator = PageAllocator(4)
    allocator.alloc(2)
    if damage == "num_free":
        allocator._num_free = 3
    else:
        allocator._used[3] = 1
    with pytest.raises(InternalError, match="lost count"):
        allocator.check_integrity()
