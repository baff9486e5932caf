from __future__ import annotations

import pytest

from tests.chaos.kills import STILLS, kill_rounds
from tests.transport.pairs import CARRIERS


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("carrier", CARRIERS)
async def test_a_kill_in_any_place_leaves_nothing_on_the_other_side(carrier: str) -> None:
    await kill_rounds(STILLS, CARRIERS[carrier])
