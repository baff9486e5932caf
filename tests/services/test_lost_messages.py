"""One message of a room's life is lost, doubled, late or overtaken: the room ends all the same, on both sides alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
from pd.v1 import types_pb2

from pd_common.errors import InternalError, PeerLost, ReceiverUnknown, RoomAborted
from pd_common.handoff.metadata import HandoffMetadata
from pd_common.handoff.receiver import KVReceiver
from pd_common.handoff.state import TransferState
from pd_common.types import BootstrapRoom
from tests.services.byte_engine import Gate
from tests.services.messages import (
    ALWAYS,
    FAILURE,
    FAULTS,
    OFFER,
    PROGRESS,
    PROOF,
    SUCCESS,
    Message,
    be_impatient,
    both_ended,
)
from tests.services.pair import Pair, running, soon, turns, until
from tests.services.tap import Rule, held, lost

ROOM, NEXT = BootstrapRoom(7), 8
BOUND_S = 10.0


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_impatient(monkeypatch)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with running(Pair()) as pair:
        yield pair


faults = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())


def messages(*which: Message) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("message", which, ids=lambda message: message.name)


@faults
@messages(OFFER, PROGRESS, SUCCESS)
async def test_a_room_that_nothing_else_happens_to_is_answered(
    pair: Pair, message: Message, fault: Callable[..., Rule]
) -> None:
    struck = message.spoil(pair, fault)
    request = pair.request(ROOM, prompt_tokens=20)
    async with asyncio.timeout(BOUND_S):
        await pair.submit(request)
        await pair.assert_answered(request)
        assert await both_ended(pair, ROOM) == [TransferState.SUCCESS] * 2
    assert struck.is_set()


@messages(OFFER, SUCCESS)
async def test_what_had_to_be_said_again_is_noted(pair: Pair, message: Message) -> None:
    side, attribute = (pair.decode, "pd.offers_repeated") if message is OFFER else (pair.prefill, "pd.reports_repeated")
    message.spoil(pair, partial(lost, 2))
    await pair.serve(ROOM, prompt_tokens=20)
    await both_ended(pair, ROOM)
    await pair.settled()
    (leg,) = side.service._tracing.of_room(ROOM)
    assert leg.root.attributes[attribute] == 2


@faults
@messages(OFFER, FAILURE, PROOF)
async def test_an_engine_that_fails_ends_the_room_on_both_sides(
    pair: Pair, message: Message, fault: Callable[..., Rule]
) -> None:
    struck = message.spoil(pair, fault)
    pair.prefill.engine.failure = RuntimeError("broken")
    async with asyncio.timeout(BOUND_S):
        await pair.submit(pair.request(ROOM, prompt_tokens=20))
        assert await both_ended(pair, ROOM) == [TransferState.FAILED] * 2
        assert isinstance(await pair.at_prefill.client.failure(ROOM), InternalError)
        assert isinstance(await pair.at_decode.client.failure(ROOM), InternalError)
        await pair.settled()
    assert struck.is_set()


ABORTED_AT = [
    pytest.param(message, sides, id=f"{message.name}-{'-'.join(sides)}")
    for message in (OFFER, PROGRESS, SUCCESS, FAILURE, PROOF)
    for sides in (("prefill",), ("decode",), ("prefill", "decode"))
    if message is not FAILURE or sides == ("prefill",)  # decode is not told what it knows
]


@faults
@pytest.mark.parametrize(("message", "sides"), ABORTED_AT)
async def test_a_client_that_aborts_ends_the_room_alike_on_both_sides(
    pair: Pair, message: Message, fault: Callable[..., Rule], sides: tuple[str, ...]
) -> None:
    """As soon as the message has gone wrong, or in the middle of the last write if it comes only after the abort."""
    struck = message.spoil(pair, fault)
    gate = Gate()
    if message is not SUCCESS:
        pair.faults.hold_group = gate
    async with asyncio.timeout(BOUND_S):
        await pair.submit(pair.request(ROOM, prompt_tokens=20))
        await until(lambda: struck.is_set() or gate.reached.is_set())
        aborts = [asyncio.create_task(getattr(pair, f"at_{side}").client.abort(ROOM)) for side in sides]
        tables = [getattr(pair, side).transfers for side in sides]
        await until(lambda: all(table.get(ROOM).state.is_final for table in tables))
        gate.set()
        await asyncio.gather(*aborts)
        at_prefill, at_decode = await both_ended(pair, ROOM)
        assert at_prefill is at_decode
        await pair.settled()
    assert struck.is_set()


# --- a word that must be heard before anything was offered ---


@faults
async def test_prefill_learns_that_a_room_is_given_up_before_it_was_offered(
    pair: Pair, fault: Callable[..., Rule]
) -> None:
    struck = PROOF.spoil(pair, fault)
    give_back = pair.decode.fill()
    await pair.submit(pair.request(ROOM))
    await until(lambda: bool(pair.decode.queue.waiting))
    await pair.at_decode.client.abort(ROOM)
    assert isinstance(await pair.at_prefill.client.failure(ROOM), RoomAborted)
    assert struck.is_set()
    give_back()


async def test_a_proof_that_another_process_gives_is_none(pair: Pair) -> None:
    gate = pair.faults.hold = Gate()
    await pair.submit(pair.request(ROOM))
    await soon(gate.reached.wait())
    asked = 0

    async def of_another(request: Any, pass_on: Any) -> Any:
        nonlocal asked
        asked += 1
        answer = types_pb2.Instance(instance_id="another", epoch=1)
        return type(await pass_on())(drained=answer) if asked < 3 else await pass_on()

    pair.at_prefill.tap.rules["AbortRoom"] = of_another
    await pair.at_decode.client.abort(ROOM)
    gate.set()
    await until(lambda: asked == 2)
    assert ROOM in pair.decode.drain.quarantine
    await pair.settled()


# --- memory whose fate is not known ---


async def test_pages_of_an_offer_that_went_unanswered_are_not_free_because_a_later_one_is_refused(pair: Pair) -> None:
    """Prefill took the first one, and writes; that it refuses the second proves nothing."""
    writing, offers = Gate(), 0
    pair.faults.hold = writing

    async def taken_then_refused(request: Any, pass_on: Any) -> Any:
        nonlocal offers
        offers += 1
        if offers > 1:
            raise ReceiverUnknown("who are you?")
        await pass_on()
        raise PeerLost("the connection broke")

    pair.at_prefill.tap.rules["AllocatePages"] = taken_then_refused
    await pair.submit(pair.request(ROOM, prompt_tokens=6))
    assert isinstance(await pair.at_decode.client.failure(ROOM), PeerLost)
    await soon(writing.reached.wait())
    await until(lambda: ROOM in pair.decode.drain.quarantine)
    writing.set()


async def test_an_offer_that_arrives_when_its_pairing_has_been_replaced_is_refused(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another host the fence of the first pairing has freed its pages; it does not keep out who writes by the next.

    That prefill cannot be asked meanwhile: so nobody has told it that the room is over.
    """
    monkeypatch.setattr(pair.decode.drain.quarantine, "_host_id", "another host")
    late, answers = Gate(), pair.at_prefill.tap.rules
    answers["AbortRoom"] = lost(ALWAYS)
    answers["AllocatePages"] = held(late, applies=lambda offer: offer.bootstrap_room == ROOM)
    await pair.submit(pair.request(ROOM))
    await soon(late.reached.wait())
    (first,) = pair.decode.prefills._paired.values()
    await pair.decode.prefills.forget(first, "no beat")
    assert isinstance(await pair.at_decode.client.failure(ROOM), PeerLost)
    await until(lambda: pair.decode.service.pool_status().pages_free == pair.decode.engine.pages.num_pages)
    await pair.serve(NEXT)
    del answers["AbortRoom"]
    offers = pair.at_prefill.tap.passed.count("AllocatePages")
    late.set()
    await until(lambda: pair.at_prefill.tap.passed.count("AllocatePages") > offers)
    await turns()
    assert pair.prefill.transfers.get(ROOM).offer is None
    await pair.at_prefill.client.abort(ROOM)


async def test_a_room_that_ends_while_its_pages_are_checked_keeps_them_until_prefill_is_quiet(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = KVReceiver.commit

    async def overtaken_by_an_abort(receiver: KVReceiver) -> HandoffMetadata:
        metadata = await commit(receiver)
        pair.decode.service.abandon(ROOM, RoomAborted("enough"))
        return metadata

    monkeypatch.setattr(KVReceiver, "commit", overtaken_by_an_abort)
    await pair.submit(pair.request(ROOM))
    assert await both_ended(pair, ROOM) == [TransferState.FAILED] * 2
    await pair.settled()
    assert "AbortRoom" in pair.at_prefill.tap.passed
