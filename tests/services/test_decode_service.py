from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.context import Context

from pd_common.control.rooms import TransferReport
from pd_common.errors import (
    DeadlineExceeded,
    DigestMismatch,
    InternalError,
    LayoutMismatch,
    MetadataInvalid,
    PeerLost,
    ReceiverUnknown,
    RoomAborted,
    RoomInUse,
    ShuttingDown,
    StaleInstance,
    TopologyIncomplete,
)
from pd_common.handoff.state import Progress, TransferState
from pd_common.telemetry.tracing import RoomTrace
from pd_common.types import BootstrapRoom, Instance
from tests.services.byte_engine import Gate
from tests.services.lives import PrefillLife
from tests.services.pair import Pair, forget_finished, running, soon, state_reached, turns
from tests.services.tap import held

ROOM, OTHER, NEXT = 7, 8, 9
ERROR = RoomAborted("enough")
CANARY = 77


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with running(Pair()) as pair:
        yield pair


def report(pair: Pair, state: TransferState, sequence: int, reporter: Instance | None = None) -> TransferReport:
    failure = RoomAborted("prefill says so") if state is TransferState.FAILED else None
    return TransferReport(
        BootstrapRoom(ROOM), reporter or pair.prefill.instance, sequence, state, Progress(1, 1, 1), failure
    )


# --- nothing is believed, nothing is reused too early ---


@pytest.mark.parametrize("write", [1, 2])
async def test_a_byte_that_arrives_wrong_is_an_error_and_never_text(pair: Pair, write: int) -> None:
    pair.faults.flip_in_write = write
    await pair.submit(pair.request(ROOM, prompt_tokens=20))
    assert [type(output.error) for output in await pair.at_decode.client.outputs(ROOM)] == [DigestMismatch]
    assert isinstance(await pair.at_prefill.client.failure(ROOM), DigestMismatch)
    await pair.settled()
    await pair.serve(NEXT)


async def test_a_success_that_is_only_reported_is_none(pair: Pair) -> None:
    gate = pair.faults.hold = Gate()
    await pair.submit(pair.request(ROOM))
    await soon(gate.reached.wait())
    answer = await soon(pair.decode.service.report(report(pair, TransferState.SUCCESS, 99)))
    assert (answer.state, type(answer.failure)) == (TransferState.FAILED, MetadataInvalid)
    assert [type(output.error) for output in await pair.at_decode.client.outputs(ROOM)] == [MetadataInvalid]
    gate.set()


async def test_a_slow_drain_keeps_the_pages_from_the_next_room() -> None:
    async with running(Pair(decode_pages=8)) as pair:
        gate = pair.faults.hold = Gate()
        await pair.submit(pair.request(ROOM, prompt_tokens=16, new_tokens=1))
        await soon(gate.reached.wait())
        await pair.at_decode.client.abort(ROOM)
        await pair.at_prefill.client.failure(ROOM)
        (held_room,) = pair.decode.drain.quarantine.held
        pair.decode.engine.pool.fill(held_room.pages, CANARY)
        small, large = pair.request(OTHER, prompt_tokens=8, new_tokens=1), pair.request(NEXT, prompt_tokens=20)
        pair.faults.hold = None
        await pair.submit(small)
        await pair.assert_answered(small)
        await pair.submit(large)
        await state_reached(pair.prefill.transfers, NEXT, TransferState.BOOTSTRAPPING)
        await turns()
        assert pair.decode.service.pool_status().pages_quarantined == len(held_room.pages) == 4
        assert pair.decode.service._rooms[BootstrapRoom(NEXT)].allocation is None
        assert pair.decode.engine.pool.is_filled(held_room.pages, CANARY)
        gate.set()
        await pair.assert_answered(large)


async def test_a_room_in_quarantine_is_not_begun_again(pair: Pair) -> None:
    gate = pair.faults.hold = Gate()
    request = pair.request(ROOM)
    await pair.submit(request)
    await soon(gate.reached.wait())
    await pair.at_decode.client.abort(ROOM)
    await pair.at_prefill.client.failure(ROOM)
    forget_finished(pair.decode.transfers)
    with pytest.raises(RoomAborted, match="not proven quiet"):
        await pair.at_decode.client.submit(request)
    gate.set()


# --- late, repeated and foreign words change nothing ---


async def test_reports_after_success_change_nothing(pair: Pair) -> None:
    gate = pair.decode.engine.shut()
    request = pair.request(ROOM)
    await pair.submit(request)
    await soon(gate.reached.wait())
    for state in (TransferState.FAILED, TransferState.TRANSFERRING, TransferState.SUCCESS):
        answer = await soon(pair.decode.service.report(report(pair, state, 1000 + state)))
        assert (answer.state, answer.failure) == (TransferState.SUCCESS, None)
    gate.set()
    await pair.assert_answered(request)


async def test_a_report_that_was_overtaken_changes_nothing(pair: Pair) -> None:
    gate = pair.faults.hold = Gate()
    request = pair.request(ROOM)
    await pair.submit(request)
    await soon(gate.reached.wait())
    await pair.decode.service.report(report(pair, TransferState.TRANSFERRING, 5))
    for sequence in (4, 5):
        answer = await soon(pair.decode.service.report(report(pair, TransferState.FAILED, sequence)))
        assert answer.state is TransferState.TRANSFERRING
    await soon(pair.at_decode.client.abort(ROOM))
    gate.set()
    await pair.at_prefill.client.failure(ROOM)


async def test_a_stranger_cannot_speak_for_a_room(pair: Pair) -> None:
    gate = pair.faults.hold = Gate()
    request = pair.request(ROOM)
    await pair.submit(request)
    await soon(gate.reached.wait())
    for state in (TransferState.FAILED, TransferState.SUCCESS):
        with pytest.raises(StaleInstance):
            await pair.decode.service.report(report(pair, state, 99, reporter=Instance("stranger", 1)))
    gate.set()
    await pair.assert_answered(request)


async def test_a_failure_that_comes_with_the_answer_to_the_offer_is_why_the_room_ended(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both arrive in one turn of the event loop, so that the room goes on for a moment after it has failed."""
    await pair.serve(OTHER)
    (prefill,) = pair.decode.prefills._paired.values()
    client, ends = prefill.client, []
    allocate_pages = client.allocate_pages

    async def overtaken(*args: Any) -> TransferState:
        state: TransferState = await allocate_pages(*args)
        pair.decode.service.abandon(BootstrapRoom(ROOM), ERROR)
        return state

    monkeypatch.setattr(client, "allocate_pages", overtaken)
    monkeypatch.setattr(RoomTrace, "end", lambda _, error: ends.append(error))
    await pair.submit(pair.request(ROOM))
    assert (await pair.at_decode.client.failure(ROOM)).message == ERROR.message
    await pair.settled()
    assert ends[0] is ERROR


# --- answers that take long ---


async def test_a_long_answer_can_be_aborted_though_its_record_is_gone(pair: Pair) -> None:
    gate = pair.decode.engine.shut()
    await pair.submit(pair.request(ROOM))
    await soon(gate.reached.wait())
    forget_finished(pair.decode.transfers)
    await soon(pair.at_decode.client.abort(ROOM))
    assert isinstance(await pair.at_decode.client.failure(ROOM), RoomAborted)
    gate.set()


async def test_a_long_answers_room_is_taken_though_its_record_is_gone(pair: Pair) -> None:
    gate = pair.decode.engine.shut()
    request = pair.request(ROOM)
    await pair.submit(request)
    await soon(gate.reached.wait())
    await state_reached(pair.prefill.transfers, BootstrapRoom(ROOM), TransferState.SUCCESS)
    forget_finished(pair.decode.transfers)
    with pytest.raises(RoomInUse):
        await pair.at_decode.client.submit(request)
    gate.set()
    await pair.assert_answered(request)


async def test_the_deadline_holds_for_the_whole_answer(pair: Pair) -> None:
    gate = pair.decode.engine.shut()
    await pair.submit(pair.request(ROOM, timeout_s=0.5))
    await soon(gate.reached.wait())
    assert isinstance(await pair.at_decode.client.failure(ROOM), DeadlineExceeded)
    gate.set()


async def test_a_room_that_is_late_before_the_reaper_sees_it_fails_for_being_late(pair: Pair) -> None:
    await pair.serve(OTHER)
    pair.decode.service.submit(pair.request(ROOM, timeout_s=1e-6), Context())
    failed = await state_reached(pair.decode.transfers, ROOM, TransferState.FAILED)
    assert isinstance(failed.failure, DeadlineExceeded)


async def test_an_engine_that_fails_fails_its_answers_alone(pair: Pair) -> None:
    gate = pair.decode.engine.shut()
    await pair.submit(pair.request(ROOM))
    await soon(gate.reached.wait())
    pair.decode.engine.failure = RuntimeError("out of memory")
    later = pair.request(OTHER)
    await pair.submit(later)
    await pair.at_prefill.client.outputs(OTHER)
    gate.set()
    assert isinstance(await pair.at_decode.client.failure(ROOM), InternalError)
    await pair.assert_answered(later)


# --- pairing ---


async def restarted(pair: Pair) -> PrefillLife:
    """Another prefill process answers at the same address; gives the one before. Decode is not told."""
    before = await pair.at_prefill.replace(PrefillLife(pair.network, 32, 8, 8, 60.0))
    assert isinstance(before, PrefillLife)
    assert isinstance(pair.at_prefill.life, PrefillLife)
    pair.prefill = pair.at_prefill.life
    await pair.at_prefill.renew_client()
    return before


async def test_a_prefill_that_restarts_between_pairing_and_offer_is_paired_anew(pair: Pair) -> None:
    """Replaced behind the same address, with every connection alive: several rooms find out at once, all succeed."""
    await pair.serve(OTHER)
    await pair.settled()
    before = await restarted(pair)
    requests = [pair.request(room) for room in (20, 21, 22)]
    for request in requests:
        await pair.submit(request)
    for request in requests:
        await pair.assert_answered(request)
    await before.close()


async def test_a_prefill_that_restarts_again_and_again_is_an_error_in_the_end(pair: Pair) -> None:
    async def stale(request: Any, pass_on: Any) -> Any:
        raise StaleInstance("meant for another life")

    pair.at_prefill.tap.rules["AllocatePages"] = stale
    await pair.at_decode.client.submit(pair.request(ROOM))
    assert isinstance(await pair.at_decode.client.failure(ROOM), StaleInstance)
    await pair.settled()
    assert pair.at_prefill.tap.passed.count("RegisterReceiver") == 2
    pair.at_prefill.tap.rules.clear()
    await pair.serve(NEXT)


async def test_a_prefill_that_has_forgotten_decode_is_paired_anew(pair: Pair) -> None:
    async def forgetful(request: Any, pass_on: Any) -> Any:
        del pair.at_prefill.tap.rules["AllocatePages"]
        raise ReceiverUnknown("who are you?")

    await pair.serve(OTHER)
    pair.at_prefill.tap.rules["AllocatePages"] = forgetful
    await pair.serve(ROOM)
    assert pair.at_prefill.tap.passed.count("RegisterReceiver") == 2


async def test_rooms_that_have_not_been_offered_outlive_the_pairing() -> None:
    async with running(Pair(decode_slots=1)) as pair:
        gate = pair.faults.hold = Gate()
        await pair.submit(pair.request(ROOM))
        await soon(gate.reached.wait())
        waiting = pair.request(OTHER)
        await pair.submit(waiting)
        await pair.prefill.receivers.drop(pair.prefill.receivers.get(pair.decode.instance), "it is silent")
        assert isinstance(await pair.at_decode.client.failure(ROOM), PeerLost)
        gate.set()
        await pair.assert_answered(waiting)


async def test_a_room_that_stops_while_the_port_is_torn_down_does_not_keep_it_up(pair: Pair) -> None:
    """The room that found the pairing stale tears it down; what others wait for must not depend on its fate."""
    await pair.serve(OTHER)
    await pair.settled()
    (prefill,) = pair.decode.prefills._paired.values()
    gate = Gate()
    fence = prefill.port.fence

    async def slow_fence() -> None:
        await gate.wait()
        await fence()

    prefill.port.fence = slow_fence  # type: ignore[method-assign]
    before = await restarted(pair)
    await pair.at_decode.client.submit(pair.request(ROOM))
    await soon(gate.reached.wait())
    await pair.at_decode.client.abort(ROOM)
    await pair.at_decode.client.failure(ROOM)
    await turns()
    gate.set()
    await soon(prefill.fenced.wait())
    await before.close()


async def test_losing_prefill_while_the_offer_is_on_its_way_ends_both_legs(pair: Pair) -> None:
    await pair.serve(OTHER)
    gate = Gate()
    pair.at_prefill.tap.rules["AllocatePages"] = held(gate)
    await pair.submit(pair.request(ROOM))
    await soon(gate.reached.wait())
    (prefill,) = pair.decode.prefills._paired.values()
    await pair.decode.prefills.forget(prefill, "no beat")
    await prefill.connection.close()
    assert isinstance(await pair.at_decode.client.failure(ROOM), PeerLost)
    gate.set()
    assert isinstance(await pair.at_prefill.client.failure(ROOM), RoomAborted | PeerLost)


async def test_rooms_that_come_at_once_share_one_pairing(pair: Pair) -> None:
    gate = Gate()
    pair.at_prefill.tap.rules["RegisterReceiver"] = held(gate)
    requests = [pair.request(room) for room in (ROOM, OTHER, NEXT)]
    for request in requests:
        await pair.submit(request)
    await soon(gate.reached.wait())
    await soon(pair.at_decode.client.abort(ROOM))
    await soon(pair.at_prefill.client.abort(ROOM))
    gate.set()
    for request in requests[1:]:
        await pair.assert_answered(request)
    assert pair.at_prefill.tap.passed.count("RegisterReceiver") == 1


async def test_a_prefill_that_cannot_be_paired_is_a_typed_error_and_may_be_paired_later(pair: Pair) -> None:
    for error in (LayoutMismatch, TopologyIncomplete, PeerLost):

        async def refuse(request: Any, pass_on: Any, error: Any = error) -> Any:
            raise error("not now")

        pair.at_prefill.tap.rules["RegisterReceiver"] = refuse
        room = 30 + len(error.__name__)
        await pair.at_decode.client.submit(pair.request(room))
        assert isinstance(await pair.at_decode.client.failure(room), error)
    pair.at_prefill.tap.rules.clear()
    assert pair.network.ports == {}
    await pair.serve(NEXT)


async def test_memory_stays_away_until_a_writer_of_this_host_is_gone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port is torn down, but who answers now is not who wrote: on one host that is no proof."""
    gate = pair.faults.hold = Gate()
    await pair.submit(pair.request(ROOM))
    await soon(gate.reached.wait())
    before = await restarted(pair)
    await pair.at_decode.client.abort(ROOM)
    (prefill,) = pair.decode.prefills._paired.values()
    await pair.decode.prefills.forget(prefill, "it has restarted")
    pages = pair.decode.service.pool_status().pages_quarantined
    await pair.serve(NEXT)
    status = pair.decode.service.pool_status()
    assert (status.pages_quarantined, status.slots_quarantined) == (pages, 1)
    gate.set()
    await before.service.close(0.0)
    await before.close()
    monkeypatch.setattr("services.decode.drain.process_is_gone", lambda _: True)
    await pair.settled()


# --- the end ---


async def test_closing_ends_every_room_and_tells_prefill(pair: Pair) -> None:
    gate = pair.faults.hold = Gate()
    await pair.submit(pair.request(ROOM))
    await soon(gate.reached.wait())
    await soon(pair.decode.service.close(0.0))
    assert isinstance(await pair.at_decode.client.failure(ROOM), ShuttingDown)
    with pytest.raises(ShuttingDown):
        await pair.at_decode.client.submit(pair.request(NEXT))
    assert isinstance(await pair.at_prefill.client.failure(ROOM), RoomAborted)
    gate.set()


async def test_a_restarted_decode_is_served_though_its_earlier_life_left_rooms_behind(pair: Pair) -> None:
    gate = pair.faults.hold = Gate()
    await pair.submit(pair.request(ROOM))
    await soon(gate.reached.wait())
    await soon(pair.decode.prefills.close())
    pair.faults.hold = None
    gate.set()
    assert isinstance(await pair.at_prefill.client.failure(ROOM), PeerLost)
    await pair.settled()
    await pair.serve(NEXT)
