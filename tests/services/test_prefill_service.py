from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pd_common.errors import (
    DeadlineExceeded,
    InternalError,
    PeerLost,
    PromptMismatch,
    RoomAborted,
    RoomInUse,
    ShuttingDown,
    TransferFailed,
)
from pd_common.handoff.state import TransferState
from pd_common.transport.loopback import Drop
from pd_common.types import BootstrapRoom
from services.prefill.receivers import Receiver
from tests.services.byte_engine import Gate
from tests.services.pair import Pair, forget_finished, running, soon, state_reached, turns, until
from tests.services.tap import held

ROOM, OTHER, NEXT = 7, 8, 9
ERROR = RoomAborted("enough")


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with running(Pair()) as pair:
        yield pair


def receiver_of(pair: Pair) -> Receiver:
    return pair.prefill.receivers.get(pair.decode.instance)


async def assert_is_cut_off(receiver: Receiver, pair: Pair) -> None:
    """Neither plane leads there any more."""
    with pytest.raises(PeerLost, match="connection is closed"):
        await receiver.client.abort_room(BootstrapRoom(ROOM), RoomAborted(""), pair.decode.instance, ticket=b"")
    with pytest.raises((TransferFailed, PeerLost)):
        await receiver.channel.write()


# --- writes that fail ---


@pytest.mark.parametrize("write", [1, 2, 3])
async def test_a_write_that_fails_ends_both_legs_and_the_pair_is_made_anew(pair: Pair, write: int) -> None:
    pair.faults.fail_write = write
    await pair.submit(pair.request(ROOM, prompt_tokens=20))
    for client in (pair.at_prefill.client, pair.at_decode.client):
        assert isinstance(await client.failure(ROOM), PeerLost | TransferFailed)
    await pair.settled()
    await pair.serve(NEXT)


async def test_a_failed_write_ends_the_other_rooms_of_this_decode_too(pair: Pair) -> None:
    gate = pair.faults.hold = Gate()
    pair.faults.fail_write = 1
    await pair.submit(pair.request(ROOM, prompt_tokens=6))
    await soon(gate.reached.wait())
    await pair.submit(pair.request(OTHER, prompt_tokens=6))
    await state_reached(pair.prefill.transfers, OTHER, TransferState.TRANSFERRING)
    receiver = receiver_of(pair)
    gate.set()
    for room in (ROOM, OTHER):
        assert isinstance(await pair.at_prefill.client.failure(room), PeerLost | TransferFailed)
        assert isinstance(await pair.at_decode.client.failure(room), PeerLost | TransferFailed)
    await pair.settled()
    await assert_is_cut_off(receiver, pair)
    await pair.serve(NEXT)


async def test_a_failed_write_leaves_no_connection_behind(pair: Pair) -> None:
    """The room whose write fails ends the registration, and is itself ended by that."""
    await pair.serve(OTHER)
    receiver = receiver_of(pair)
    pair.faults.fail_write = pair.faults.writes + 1
    await pair.submit(pair.request(ROOM, prompt_tokens=6))
    await pair.at_decode.client.failure(ROOM)
    await pair.settled()
    await assert_is_cut_off(receiver, pair)


async def test_a_decode_that_is_cut_off_ends_its_rooms_and_may_come_back(pair: Pair) -> None:
    gate = pair.faults.hold = Gate()
    await pair.submit(pair.request(ROOM, prompt_tokens=20))
    await soon(gate.reached.wait())
    pair.faults.peer_gone.set()
    assert isinstance(await pair.at_prefill.client.failure(ROOM), PeerLost)
    assert isinstance(await pair.at_decode.client.failure(ROOM), PeerLost)
    pair.faults.peer_gone = asyncio.Event()
    pair.faults.hold = None
    await pair.settled()
    await pair.serve(NEXT)


# --- what "aborted" promises ---


async def test_an_abort_is_answered_when_the_last_write_has_ended_and_source_pages_stay_until_then(pair: Pair) -> None:
    gate = pair.faults.hold = Gate()
    await pair.submit(pair.request(ROOM, prompt_tokens=20))
    await soon(gate.reached.wait())
    first = asyncio.create_task(pair.prefill.service.abort(BootstrapRoom(ROOM), ERROR))
    await pair.at_decode.client.failure(ROOM)
    again = asyncio.create_task(pair.prefill.service.abort(BootstrapRoom(ROOM), ERROR))
    await turns()
    status = pair.prefill.service.pool_status()
    assert (first.done(), again.done()) == (False, False)
    assert (status.pages_total - status.pages_free, status.slots_total - status.slots_free) == (5, 1)
    gate.set()
    assert await soon(asyncio.gather(first, again)) == [TransferState.FAILED] * 2


async def test_a_write_that_outlives_its_rooms_record_is_still_waited_for() -> None:
    """Retention is over while a write hangs: whoever asks for the drain proof must not get it."""
    async with running(Pair()) as pair:
        gate = pair.faults.hold = Gate()
        await pair.submit(pair.request(ROOM, prompt_tokens=20))
        await soon(gate.reached.wait())
        pair.prefill.service.abandon(BootstrapRoom(ROOM), ERROR)
        await pair.at_prefill.client.failure(ROOM)
        await pair.at_decode.client.failure(ROOM)
        forget_finished(pair.prefill.transfers)
        proof = asyncio.create_task(pair.prefill.service.abort(BootstrapRoom(ROOM), ERROR))
        await turns()
        assert not proof.done()
        gate.set()
        await soon(proof)


async def test_a_room_is_not_begun_again_while_its_last_write_goes_on() -> None:
    async with running(Pair()) as pair:
        gate = pair.faults.hold = Gate()
        await pair.submit(pair.request(ROOM, prompt_tokens=20))
        await soon(gate.reached.wait())
        await pair.at_decode.client.abort(ROOM)
        await pair.at_prefill.client.failure(ROOM)
        forget_finished(pair.prefill.transfers)
        with pytest.raises(RoomInUse):
            await pair.at_prefill.client.submit(pair.request(ROOM, prompt_tokens=20))
        gate.set()
        await pair.settled()
        forget_finished(pair.prefill.transfers)
        forget_finished(pair.decode.transfers)
        await pair.serve(ROOM)


async def test_a_room_concludes_though_the_connection_is_closed_while_decode_is_told(pair: Pair) -> None:
    told, gate = Gate(), Gate()
    pair.at_decode.tap.rules["ReportTransfer"] = held(told)
    pair.faults.hold = gate
    await pair.submit(pair.request(ROOM, prompt_tokens=6))
    await soon(gate.reached.wait())
    proof = asyncio.create_task(pair.prefill.service.abort(BootstrapRoom(ROOM), ERROR))
    await soon(told.reached.wait())
    await soon(pair.prefill.receivers.drop(receiver_of(pair), "its connection ended"))
    assert await soon(proof) is TransferState.FAILED
    pair.prefill.assert_untouched()
    told.set()
    await pair.at_decode.client.failure(ROOM)


async def test_abort_after_success_leaves_the_room_as_it_is(pair: Pair) -> None:
    await pair.serve(ROOM)
    await pair.settled()
    assert await pair.prefill.service.abort(BootstrapRoom(ROOM), ERROR) is TransferState.SUCCESS
    with pytest.raises(RoomInUse):
        await pair.at_prefill.client.submit(pair.request(ROOM))


async def test_a_room_that_was_aborted_before_it_came_is_refused_on_both_sides(pair: Pair) -> None:
    await pair.at_prefill.client.abort(ROOM)
    with pytest.raises(RoomAborted):
        await pair.at_prefill.client.submit(pair.request(ROOM))
    await pair.at_decode.client.submit(pair.request(ROOM))
    assert isinstance(await pair.at_decode.client.failure(ROOM), RoomAborted)


async def test_decode_is_told_when_a_room_is_aborted_before_its_request_came(pair: Pair) -> None:
    await pair.at_decode.client.submit(pair.request(ROOM))
    await state_reached(pair.prefill.transfers, ROOM, TransferState.BOOTSTRAPPING)
    await pair.at_prefill.client.abort(ROOM)
    assert isinstance(await pair.at_decode.client.failure(ROOM), RoomAborted)


# --- what never comes, and what does not fit ---


async def test_an_offer_that_never_comes_is_waited_for_until_the_deadline(pair: Pair) -> None:
    await pair.at_prefill.client.submit(pair.request(ROOM, timeout_s=0.1))
    assert isinstance(await pair.at_prefill.client.failure(ROOM), DeadlineExceeded)


async def test_a_request_that_never_comes_is_waited_for_until_the_deadline(pair: Pair) -> None:
    await pair.at_decode.client.submit(pair.request(ROOM, timeout_s=0.3))
    assert isinstance(await pair.at_decode.client.failure(ROOM), DeadlineExceeded)
    await pair.settled()
    with pytest.raises(RoomAborted):
        await pair.at_prefill.client.submit(pair.request(ROOM))


@pytest.mark.parametrize("short", ["prefill", "decode"])
async def test_a_deadline_on_either_side_ends_both_though_a_write_is_stuck(pair: Pair, short: str) -> None:
    gate = pair.faults.hold = Gate()
    await pair.at_prefill.client.submit(pair.request(ROOM, timeout_s=0.3 if short == "prefill" else 30.0))
    await pair.at_decode.client.submit(pair.request(ROOM, timeout_s=0.3 if short == "decode" else 30.0))
    await soon(gate.reached.wait())
    assert isinstance(await pair.at_decode.client.failure(ROOM), DeadlineExceeded)
    assert isinstance(await pair.at_prefill.client.failure(ROOM), DeadlineExceeded | RoomAborted)
    assert pair.decode.service.pool_status().pages_quarantined > 0
    gate.set()


async def test_deadlines_hold_while_a_registration_that_nobody_holds_is_being_closed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.serve(OTHER)
    receiver, closing, may_close = receiver_of(pair), asyncio.Event(), Gate()
    close = receiver.channel.close

    async def slow() -> None:
        closing.set()
        await may_close.wait()
        await close()

    monkeypatch.setattr(receiver.channel, "close", slow)
    receiver.held, receiver.registered_at = False, 0.0
    await soon(closing.wait())
    try:
        await pair.at_prefill.client.submit(pair.request(ROOM, timeout_s=0.1))
        assert isinstance(await soon(pair.at_prefill.client.failure(ROOM)), DeadlineExceeded)
    finally:
        may_close.set()


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_two_legs_with_different_prompts_end_at_once(pair: Pair, first: str) -> None:
    at_prefill, at_decode = pair.request(ROOM, prompt_tokens=9), pair.request(ROOM, prompt_tokens=10)
    if first == "prefill":
        await pair.at_prefill.client.submit(at_prefill)
        await pair.at_decode.client.submit(at_decode)
        assert isinstance(await pair.at_prefill.client.failure(ROOM), PromptMismatch)
    else:
        await pair.at_decode.client.submit(at_decode)
        await state_reached(pair.prefill.transfers, ROOM, TransferState.BOOTSTRAPPING)
        with pytest.raises(PromptMismatch):
            await pair.at_prefill.client.submit(at_prefill)
    assert isinstance(await pair.at_decode.client.failure(ROOM), PromptMismatch)


async def test_a_second_request_for_a_room_is_refused_and_does_not_touch_the_first(pair: Pair) -> None:
    gate = pair.prefill.engine.shut()
    request = pair.request(ROOM)
    await pair.submit(request)
    await soon(gate.reached.wait())
    for client in (pair.at_prefill.client, pair.at_decode.client):
        with pytest.raises(RoomInUse):
            await client.submit(request)
    gate.set()
    await pair.assert_answered(request)


async def test_a_room_number_may_be_used_again_when_its_record_is_gone(pair: Pair) -> None:
    await pair.serve(ROOM)
    await pair.settled()
    forget_finished(pair.prefill.transfers)
    forget_finished(pair.decode.transfers)
    await pair.serve(ROOM, prompt_tokens=13)


# --- the engine, the registration, the end ---


async def test_an_engine_that_fails_fails_the_rooms_of_that_step_on_both_sides(pair: Pair) -> None:
    await pair.serve(OTHER)
    pair.prefill.engine.failure = RuntimeError("out of memory")
    await pair.submit(pair.request(ROOM, prompt_tokens=20))
    for client in (pair.at_prefill.client, pair.at_decode.client):
        error = await client.failure(ROOM)
        assert isinstance(error, InternalError)
        assert "out of memory" in error.message
    await pair.settled()
    await pair.serve(NEXT)


async def test_when_decode_lets_go_its_rooms_end_and_its_connection_is_closed(pair: Pair) -> None:
    gate = pair.prefill.engine.shut()
    await pair.submit(pair.request(ROOM))
    await soon(gate.reached.wait())
    receiver = receiver_of(pair)
    await until(lambda: receiver.held)
    await pair.decode.prefills.close()
    gate.set()
    # The end of the connection and the question for a proof come at once; either may be first.
    assert isinstance(await pair.at_prefill.client.failure(ROOM), PeerLost | RoomAborted)
    assert isinstance(await pair.at_decode.client.failure(ROOM), PeerLost)
    await pair.settled()
    await assert_is_cut_off(receiver, pair)


async def test_a_registration_is_closed_though_whoever_ends_it_is_cancelled(pair: Pair) -> None:
    await pair.serve(OTHER)
    receiver = receiver_of(pair)
    gate = pair.faults.hold = Gate()
    await pair.submit(pair.request(ROOM))
    await soon(gate.reached.wait())
    pair.faults.drop = Drop.HANG
    dropping = asyncio.create_task(pair.prefill.receivers.drop(receiver, "it is silent"))
    await turns(1)
    dropping.cancel()
    await asyncio.gather(dropping, return_exceptions=True)
    await pair.at_decode.client.failure(ROOM)
    await pair.settled()
    await assert_is_cut_off(receiver, pair)
    pair.faults.drop = pair.faults.hold = None


async def test_closing_ends_every_room_and_waits_for_what_is_being_written(pair: Pair) -> None:
    gate = pair.faults.hold = Gate()
    await pair.submit(pair.request(ROOM, prompt_tokens=6))
    await soon(gate.reached.wait())
    await pair.at_prefill.client.submit(pair.request(OTHER))
    closing = asyncio.create_task(pair.prefill.service.close(0.0))
    for room in (ROOM, OTHER):
        assert isinstance(await pair.at_prefill.client.failure(room), ShuttingDown)
    assert isinstance(await pair.at_decode.client.failure(ROOM), ShuttingDown)
    with pytest.raises(ShuttingDown):
        await pair.at_prefill.client.submit(pair.request(NEXT))
    assert not closing.done()
    gate.set()
    await soon(closing)


async def test_closing_lets_rooms_end_that_can(pair: Pair) -> None:
    gate = pair.faults.hold = Gate()
    request = pair.request(ROOM)
    await pair.submit(request)
    await soon(gate.reached.wait())
    closing = asyncio.create_task(pair.prefill.service.close(10.0))
    await turns()
    gate.set()
    await soon(closing)
    await pair.assert_answered(request)
