"""AllocatePages on the wire: the same offer is answered the same; another, or one that does not fit, is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.context import Context

from pd_common.errors import AllocationConflict, PagesInvalid, RoomAborted
from pd_common.handoff.destination import Offer
from pd_common.handoff.metadata import Slot
from pd_common.handoff.state import TransferState
from pd_common.types import BootstrapRoom
from tests.services.pair import Pair, running, soon

ROOM, OTHER = BootstrapRoom(7), 8


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """Paired, so that decode may offer pages."""
    async with running(Pair()) as pair:
        await pair.serve(OTHER)
        yield pair
        await pair.at_prefill.client.abort(ROOM)


async def offered(pair: Pair, **changes: Any) -> TransferState:
    """As decode would offer ten tokens, but for the changes."""
    offer = Offer(pair.decode.instance, (4, 5, 6), Slot(1, 9), 0, 10, b"d" * 16)
    (prefill,) = pair.decode.prefills._paired.values()
    state: TransferState = await soon(
        prefill.client.allocate_pages(
            ROOM, prefill.instance, prefill.registration, replace(offer, **changes), 30.0, Context()
        )
    )
    return state


async def test_the_same_offer_again_is_answered_the_same(pair: Pair) -> None:
    assert [await offered(pair) for _ in range(3)] == [TransferState.BOOTSTRAPPING] * 3


@pytest.mark.parametrize(
    "changes",
    [
        {"pages": (4, 5, 7)},
        {"pages": (5, 4, 6)},
        {"slot": Slot(1, 10)},
        {"slot": Slot(2, 9)},
        {"pages": (5, 6), "decode_prefix_len": 4},
        {"prompt_tokens": 11},
        {"prompt_digest": b"e" * 16},
        {"ticket": b"another"},
    ],
    ids=str,
)
async def test_another_offer_for_the_same_room_is_refused(pair: Pair, changes: dict[str, Any]) -> None:
    await offered(pair)
    with pytest.raises(AllocationConflict):
        await offered(pair, **changes)
    assert await offered(pair) is TransferState.BOOTSTRAPPING


@pytest.mark.parametrize(
    "changes",
    [
        {"pages": (4, 5)},
        {"pages": (4, 5, 6, 7)},
        {"pages": ()},
        {"pages": (4, 5, 5)},
        {"pages": (4, 5, 32)},
        {"decode_prefix_len": 3},
        {"decode_prefix_len": 12},
        {"slot": Slot(8, 9)},
        {"state_indices": ((1,),)},
        {"state_indices": ((),)},
    ],
    ids=str,
)
async def test_an_offer_that_does_not_fit_is_refused_and_leaves_nothing(pair: Pair, changes: dict[str, Any]) -> None:
    with pytest.raises(PagesInvalid):
        await offered(pair, **changes)
    assert pair.prefill.transfers.find(ROOM) is None
    assert await offered(pair) is TransferState.BOOTSTRAPPING


async def test_an_offer_for_a_room_that_has_failed_is_refused(pair: Pair) -> None:
    await offered(pair)
    await pair.at_prefill.client.abort(ROOM)
    with pytest.raises(RoomAborted):
        await offered(pair)
