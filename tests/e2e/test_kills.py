"""A few places of those in which tests/chaos kills either side."""

from __future__ import annotations

import pytest

from tests.chaos.kills import FEW, Still, kill_rounds
from tests.transport.pairs import CARRIERS


@pytest.mark.parametrize("still", FEW, ids=lambda still: still.name)
async def test_a_kill_leaves_nothing_on_the_other_side(still: Still) -> None:
    await kill_rounds([still], CARRIERS["cma"])
