from __future__ import annotations

from itertools import permutations, product

import pytest

from pd_common.handoff.lockstep import common_state, gated
from pd_common.handoff.state import TransferState

S = TransferState


@pytest.mark.parametrize(
    ("landed", "intact", "expected"),
    [
        (True, True, S.SUCCESS),
        (True, False, S.FAILED),
        (False, True, S.TRANSFERRING),
        (False, False, S.TRANSFERRING),
    ],
    ids=["landed and intact", "landed and damaged", "not landed", "not landed, what is there is damaged"],
)
def test_success_is_what_a_rank_finds_in_its_own_memory(landed: bool, intact: bool, expected: S) -> None:
    assert gated(S.SUCCESS, landed=landed, intact=intact) is expected


@pytest.mark.parametrize("state", sorted(set(S) - {S.SUCCESS}), ids=lambda state: state.name)
@pytest.mark.parametrize(("landed", "intact"), [*product([True, False], repeat=2)])
def test_no_gate_makes_more_of_a_state_than_it_is_or_fails_a_room_that_is_on_its_way(
    state: S, landed: bool, intact: bool
) -> None:
    assert gated(state, landed=landed, intact=intact) is state


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_ranks_decide_alike_any_failure_fails_and_success_needs_all(ranks: int) -> None:
    for states in product(S, repeat=ranks):
        common = common_state(states)
        assert {common_state(order) for order in permutations(states)} == {common}
        assert (common is S.FAILED) is (S.FAILED in states)
        assert (common is S.SUCCESS) is (set(states) == {S.SUCCESS})
        assert common in states
        assert all(common <= state for state in states)


def test_a_rank_that_lags_holds_the_others_back_until_it_has_caught_up() -> None:
    fast = gated(S.SUCCESS, landed=True, intact=True)
    told = [
        common_state([fast, slow])
        for slow in (
            S.BOOTSTRAPPING,
            S.WAITING_FOR_INPUT,
            gated(S.SUCCESS, landed=False, intact=False),
            gated(S.SUCCESS, landed=True, intact=True),
        )
    ]
    assert told == [S.BOOTSTRAPPING, S.WAITING_FOR_INPUT, S.TRANSFERRING, S.SUCCESS]


def test_one_damaged_rank_fails_the_room_on_all() -> None:
    ranks = [gated(S.SUCCESS, landed=True, intact=rank != 2) for rank in range(4)]
    assert common_state(ranks) is S.FAILED


def test_there_is_no_agreement_of_nobody() -> None:
    with pytest.raises(ValueError, match="empty"):
        common_state([])
