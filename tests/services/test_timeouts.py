"""A wait ends by the clock alone: nothing new arrives, and the memory that a room waits for never comes free (I7)."""

from __future__ import annotations

from pd_common.errors import DeadlineExceeded, RoomAborted
from pd_common.handoff.deadlines import Limit, Timeouts
from pd_common.handoff.state import TransferState
from tests.services.pair import Pair, running, soon, state_reached

HOLDER, WAITER = 7, 8
SOON_S, LATE_S = 2.0, 300.0


async def ended_by(pair: Pair, room: int) -> set[str]:
    """The limits that ended both legs: both sides have the same, and who comes second may have been told already."""
    failures = [await client.failure(room) for client in (pair.at_prefill.client, pair.at_decode.client)]
    assert all(isinstance(failure, DeadlineExceeded | RoomAborted) for failure in failures), failures
    return {failure.metadata["limit"] for failure in failures if isinstance(failure, DeadlineExceeded)}


async def test_a_room_that_waits_for_decodes_memory_ends_after_the_bootstrap_timeout() -> None:
    async with running(Pair(decode_slots=1, timeouts=Timeouts(SOON_S, LATE_S))) as pair:
        gate = pair.prefill.engine.shut()
        await pair.submit(pair.request(HOLDER))
        await soon(gate.reached.wait())
        await pair.submit(pair.request(WAITER))
        assert await ended_by(pair, WAITER) == {Limit.BOOTSTRAP_TIMEOUT}
        assert pair.decode.transfers.get(pair.request(HOLDER).room).state is TransferState.WAITING_FOR_INPUT
        gate.set()
        await pair.assert_answered(pair.request(HOLDER))


async def test_a_room_that_waits_for_prefills_pages_ends_after_the_waiting_timeout() -> None:
    """Without end for its neighbour, whose engine step hangs for longer."""
    async with running(Pair(prefill_pages=4, timeouts=Timeouts(LATE_S, SOON_S))) as pair:
        gate = pair.prefill.engine.shut()
        await pair.submit(pair.request(HOLDER, prompt_tokens=16))
        await soon(gate.reached.wait())
        await pair.submit(pair.request(WAITER, prompt_tokens=16))
        await state_reached(pair.prefill.transfers, WAITER, TransferState.WAITING_FOR_INPUT)
        assert await ended_by(pair, WAITER) == {Limit.WAITING_TIMEOUT}
        gate.set()
        await pair.settled()
        await pair.serve(WAITER + 1)
