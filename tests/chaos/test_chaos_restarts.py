from __future__ import annotations

import pytest

from tests.chaos.restarts import ROOMS, restart_rounds
from tests.transport.pairs import CARRIERS

ROUNDS = 100


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("carrier", CARRIERS)
async def test_either_side_may_be_killed_again_and_again(carrier: str) -> None:
    """100 rounds on each carrier."""
    lost = await restart_rounds(ROUNDS, carrier, seed=1)
    assert ROUNDS // 4 < lost < ROUNDS * ROOMS, "too few or too many were in the middle: this shows little"
    print(f"{carrier}: {ROUNDS} kills, {lost} of {ROUNDS * ROOMS} rooms lost, every other answer exact")
