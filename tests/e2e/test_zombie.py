"""A few rounds of what tests/chaos plays fifty times."""

from __future__ import annotations

import pytest

from tests.chaos.zombie import zombie_rounds
from tests.transport.pairs import CARRIERS


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_a_prefill_that_wakes_up_late_writes_into_nobodys_pages(carrier: str) -> None:
    await zombie_rounds(2, carrier, seed=3)
