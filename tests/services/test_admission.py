from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.decode.admission import Budget, Demand, Held, budget_of, demand_of
from tests.services.decode_memory import NUM_PAGES, PAGE_SIZE, a_memory, a_sequence, come_to_run

ROOMY = Budget(available=1000, retractable=0, promised=0, single=0)


def demand(prompt_tokens: int, max_new_tokens: int, reserved_tokens: int, page_size: int = 16) -> Demand:
    sequence = a_sequence(range(prompt_tokens), max_new_tokens)
    return demand_of(sequence, -(-prompt_tokens // page_size), page_size, reserved_tokens)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_new_tokens", "reserved_tokens", "expected"),
    [
        (16, 1, 512, Demand(1, 0, 1)),  # the KV of an answer's last token is never needed
        (16, 2, 512, Demand(1, 1, 2)),
        (17, 16, 512, Demand(2, 0, 2)),
        (16, 1000, 16, Demand(1, 1, 5)),
        (16, 1000, 17, Demand(1, 2, 6)),  # a reserve that ends within a page takes the whole page
        (16, 1000, 0, Demand(1, 0, 1)),
        (16, 40, 16, Demand(1, 1, 4)),  # never more than it may still produce
    ],
)
def test_a_request_is_counted_in_whole_pages(
    prompt_tokens: int, max_new_tokens: int, reserved_tokens: int, expected: Demand
) -> None:
    assert demand(prompt_tokens, max_new_tokens, reserved_tokens) == expected


def test_what_a_request_has_already_of_its_reserve_is_not_promised_again() -> None:
    sequence = a_sequence(range(16), 100)
    assert demand_of(sequence, 4, 16, 32).growth == 0
    sequence.output.extend(range(20))
    assert demand_of(sequence, 3, 16, 32).growth == 2


@pytest.mark.parametrize(("available", "admitted"), [(12, True), (11, False)])
def test_a_newcomer_needs_its_pages_its_reserve_and_what_others_are_promised(available: int, admitted: bool) -> None:
    budget = Budget(available, retractable=0, promised=5, single=0)
    assert budget.admits(Demand(pages=4, growth=3, alone=7), locked=0) == admitted


def test_pages_that_others_use_are_shared_and_not_taken() -> None:
    budget = Budget(available=8, retractable=20, promised=5, single=0)
    newcomer = Demand(pages=4, growth=1, alone=5)
    assert [budget.admits(newcomer, locked) for locked in (0, 1, 2, 4)] == [False, False, True, True]


@pytest.mark.parametrize(("single", "admitted"), [(6, True), (7, False)])
def test_the_largest_of_those_inside_can_go_on_when_the_others_give_way(single: int, admitted: bool) -> None:
    """A newcomer's pages are written for a while: they cannot be had back."""
    budget = Budget(available=10, retractable=0, promised=0, single=single)
    assert budget.admits(Demand(pages=4, growth=0, alone=4), locked=0) == admitted


@pytest.mark.parametrize(("retractable", "admitted"), [(10, True), (9, False)])
def test_a_newcomer_that_can_go_on_only_with_pages_that_are_written_waits(retractable: int, admitted: bool) -> None:
    budget = Budget(available=10, retractable=retractable, promised=0, single=0)
    assert budget.admits(Demand(pages=4, growth=1, alone=20), locked=0) == admitted


def test_only_those_whose_pages_are_not_written_can_give_way() -> None:
    running, written = Demand(pages=6, growth=1, alone=14), Demand(pages=4, growth=2, alone=8)
    held = [Held(running, retractable=True), Held(written, retractable=False)]
    assert Budget.of(held, available=10, used=10) == Budget(available=10, retractable=6, promised=3, single=8)
    both_run = [Held(running, retractable=True), Held(written, retractable=True)]
    assert Budget.of(both_run, available=10, used=10) == Budget(available=10, retractable=10, promised=3, single=4)


def test_a_written_one_has_its_own_pages_and_all_that_others_give_up() -> None:
    held = [Held(Demand(5, 0, 5), retractable=True), Held(Demand(4, 0, 20), retractable=False)]
    assert Budget.of(held, available=11, used=9).single == 20 - 4 - 5


def test_a_prefix_that_many_share_does_not_come_free_many_times() -> None:
    held = [Held(Demand(10, 0, 10), retractable=True)] * 3
    assert Budget.of(held, available=0, used=12).retractable == 12


def test_what_a_running_one_shares_with_a_written_one_is_its_own_all_the_same() -> None:
    held = [Held(Demand(10, 0, 12), retractable=True), *[Held(Demand(10, 0, 10), retractable=False)] * 3]
    assert Budget.of(held, available=5, used=13) == Budget(available=5, retractable=0, promised=0, single=2)


def test_nobody_inside_asks_for_nothing() -> None:
    assert Budget.of([], available=16, used=0) == Budget(16, 0, 0, 0)


@given(st.integers(0, 12), st.integers(0, 6), st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
def test_the_more_of_a_request_is_shared_the_sooner_it_is_let_in(
    pages: int, growth: int, available: int, retractable: int, alone: int
) -> None:
    """So who is not let in with all that the cache could have of it need not be looked for there."""
    budget = Budget(available, retractable, promised=1, single=2)
    newcomer = Demand(pages, growth, max(alone, pages))
    let_in = [budget.admits(newcomer, locked) for locked in range(pages + 1)]
    assert let_in == sorted(let_in)


def test_the_budget_of_a_pool_as_it_stands() -> None:
    memory = a_memory()
    running, written, gone = (a_sequence([start, *range(3)], 9) for start in (10, 20, 30))
    allocations = [memory.allocate(sequence, 4, slot=True) for sequence in (running, written, gone)]
    assert allocations[0] is not None
    assert allocations[2] is not None
    come_to_run(memory, allocations[0])
    memory.detach(allocations[2])
    assert memory.pages_available == NUM_PAGES - 6
    assert budget_of(memory, reserved_tokens=4) == Budget(
        available=NUM_PAGES - 6,
        retractable=2,
        promised=3 + 2,  # its next token needs a page, and the reserve follows it
        single=12 // PAGE_SIZE - 2,
    )


def test_an_empty_pool_takes_whatever_fits() -> None:
    assert ROOMY.admits(Demand(600, 400, 1000), locked=0)
    assert not ROOMY.admits(Demand(600, 401, 1000), locked=0)
