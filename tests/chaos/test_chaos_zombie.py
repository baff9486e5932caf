from __future__ import annotations

import pytest

from tests.chaos.zombie import zombie_rounds
from tests.transport.pairs import CARRIERS

ROUNDS = 50


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("carrier", CARRIERS)
async def test_a_prefill_that_wakes_up_late_writes_into_nobodys_pages(carrier: str) -> None:
    caught = await zombie_rounds(ROUNDS, carrier, seed=1)
    print(f"{carrier}: {caught} of {ROUNDS} rooms caught in the middle")
    assert caught > ROUNDS // 2, "most rooms must have been caught in the middle, or this shows nothing"
