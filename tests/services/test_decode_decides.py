"""How a room ends is for decode to say once everything is written; and whatever an abort comes before, it ends it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pd_common.errors import DeadlineExceeded, PeerLost, RoomAborted
from pd_common.handoff.state import TransferState
from pd_common.types import BootstrapRoom
from tests.services import stages
from tests.services.byte_engine import Gate
from tests.services.messages import (
    ALWAYS,
    SUCCESS,
    be_impatient,
    both_ended,
)
from tests.services.pair import Pair, running, soon, state_reached, turns, until
from tests.services.tap import answer_held, held, lost

ROOM, NEXT = BootstrapRoom(7), 8


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_impatient(monkeypatch)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with running(Pair()) as pair:
        yield pair


async def committed_unheard(pair: Pair, gate: Gate) -> None:
    """Decode has committed the room; its answer to prefill is late."""
    pair.at_decode.tap.rules["ReportTransfer"] = answer_held(gate, applies=SUCCESS.applies)
    await pair.submit(pair.request(ROOM))
    await soon(gate.reached.wait())
    await state_reached(pair.decode.transfers, ROOM, TransferState.SUCCESS)


async def test_a_deadline_on_prefill_after_the_commit_changes_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    await committed_unheard(pair, gate)
    monkeypatch.setattr(pair.prefill.transfers, "overdue", lambda _: {ROOM: DeadlineExceeded("too late")})
    await pair.assert_answered(pair.request(ROOM))
    assert await both_ended(pair, ROOM) == [TransferState.SUCCESS] * 2
    gate.set()


async def test_an_abort_on_prefill_after_the_commit_is_answered_with_success(pair: Pair) -> None:
    gate = Gate()
    await committed_unheard(pair, gate)
    state = await soon(pair.prefill.service.abort(ROOM, RoomAborted("enough")))
    assert state is TransferState.SUCCESS
    await pair.assert_answered(pair.request(ROOM))
    gate.set()


async def test_an_abort_on_prefill_before_the_commit_is_failure_on_both_sides(pair: Pair) -> None:
    """Everything is written, but decode has not seen nor heard so: it decides by what it hears first."""
    gate = Gate()
    stages.blind(pair)
    pair.at_decode.tap.rules["ReportTransfer"] = held(gate, applies=SUCCESS.applies)
    await pair.submit(pair.request(ROOM))
    await soon(gate.reached.wait())
    assert await soon(pair.prefill.service.abort(ROOM, RoomAborted("enough"))) is TransferState.FAILED
    assert await both_ended(pair, ROOM) == [TransferState.FAILED] * 2
    gate.set()


async def test_what_decode_finds_in_its_memory_needs_no_word_of_prefill(pair: Pair) -> None:
    pair.at_decode.tap.rules["ReportTransfer"] = lost(ALWAYS)
    request = pair.request(ROOM, prompt_tokens=20)
    await pair.submit(request)
    await state_reached(pair.decode.transfers, ROOM, TransferState.SUCCESS)
    del pair.at_decode.tap.rules["ReportTransfer"]
    await pair.assert_answered(request)
    assert await both_ended(pair, ROOM) == [TransferState.SUCCESS] * 2
    assert pair.decode.transfers.get(ROOM).progress == pair.prefill.transfers.get(ROOM).progress


async def test_an_abort_on_prefill_while_decode_commits_is_answered_as_decode_decides(pair: Pair) -> None:
    """The last write has ended for decode, and not yet for prefill."""
    gate = pair.faults.hold_end[2] = Gate()
    request = pair.request(ROOM, prompt_tokens=6)
    await pair.submit(request)
    await soon(gate.reached.wait())
    await state_reached(pair.decode.transfers, ROOM, TransferState.SUCCESS)
    aborting = asyncio.create_task(pair.prefill.service.abort(ROOM, RoomAborted("enough")))
    await turns()
    gate.set()
    assert await soon(aborting) is TransferState.SUCCESS
    await pair.assert_answered(request)
    assert await both_ended(pair, ROOM) == [TransferState.SUCCESS] * 2


async def test_prefill_decides_alone_only_when_decode_is_lost(pair: Pair) -> None:
    stages.blind(pair)
    pair.at_decode.tap.rules["ReportTransfer"] = lost(ALWAYS)
    await pair.submit(pair.request(ROOM, prompt_tokens=6))
    await until(lambda: pair.prefill.service._rooms[ROOM].decode_decides)
    aborting = asyncio.create_task(pair.prefill.service.abort(ROOM, RoomAborted("enough")))
    await turns()
    assert pair.prefill.transfers.get(ROOM).state is TransferState.TRANSFERRING
    await pair.prefill.receivers.drop(pair.prefill.receivers.get(pair.decode.instance), "it is silent")
    assert await soon(aborting) is TransferState.FAILED
    assert isinstance(await pair.at_decode.client.failure(ROOM), PeerLost | RoomAborted)


# --- abort, request and offer in every order ---


async def accepted(submitting: Any) -> bool:
    """Whether the request was taken in."""
    try:
        await submitting
    except RoomAborted:
        return False
    return True


@pytest.mark.parametrize("order", [*itertools.permutations(["abort", "request", "offer"])], ids=" ".join)
async def test_an_abort_ends_the_room_whatever_it_comes_before(pair: Pair, order: tuple[str, ...]) -> None:
    gate = pair.prefill.engine.shut()
    for step in order:
        if step == "abort":
            await soon(pair.at_prefill.client.abort(ROOM))
        elif step == "request":
            was_aborted = order.index("abort") < order.index("request")
            assert await accepted(pair.at_prefill.client.submit(pair.request(ROOM))) is not was_aborted
        elif await accepted(pair.at_decode.client.submit(pair.request(ROOM))):
            await until(lambda: "AllocatePages" in pair.at_prefill.tap.passed)
        gate.set()
    assert await both_ended(pair, ROOM) == [TransferState.FAILED] * 2
    await pair.settled()
    await pair.serve(NEXT)


async def test_an_abort_that_is_repeated_is_answered_the_same(pair: Pair) -> None:
    gate = pair.prefill.engine.shut()
    await pair.submit(pair.request(ROOM))
    await soon(gate.reached.wait())

    async def abort() -> TransferState | None:
        return await pair.prefill.service.abort(ROOM, RoomAborted("enough"))

    first, second = asyncio.create_task(abort()), asyncio.create_task(abort())
    gate.set()
    assert await soon(asyncio.gather(first, second)) == [TransferState.FAILED] * 2
    assert await soon(abort()) is TransferState.FAILED
    assert isinstance(await pair.at_decode.client.failure(ROOM), RoomAborted)
