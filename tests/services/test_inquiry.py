"""Decode asks for what it never heard of: no report of a failure arrives, and the room ends all the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from pd_common.control import peer_client
from pd_common.errors import InternalError, TransferFailed
from pd_common.types import BootstrapRoom
from services.prefill import reports
from tests.services.byte_engine import Gate
from tests.services.messages import (
    ALWAYS,
    FAILURE,
    be_impatient,
)
from tests.services.pair import Pair, forget_finished, running, soon, until
from tests.services.tap import held, lost, silence

ROOM = BootstrapRoom(7)


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_impatient(monkeypatch)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with running(Pair()) as pair:
        yield pair


async def failed_unheard(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The room fails on prefill, and no report of it ever reaches decode."""
    monkeypatch.setattr(reports, "_TELL_S", 0.0)
    pair.at_decode.tap.rules["ReportTransfer"] = lost(ALWAYS, applies=FAILURE.applies)
    pair.prefill.engine.failure = RuntimeError("broken")
    await pair.submit(pair.request(ROOM))
    await pair.at_prefill.client.failure(ROOM)


async def test_decode_asks_for_a_failure_that_it_never_hears_of(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    await failed_unheard(pair, monkeypatch)
    error = await pair.at_decode.client.failure(ROOM)
    assert (type(error), "broken" in error.message) == (InternalError, True)


async def test_a_question_may_be_lost_too(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.at_prefill.tap.rules["ListTransfers"] = silence(2)
    await failed_unheard(pair, monkeypatch)
    assert isinstance(await pair.at_decode.client.failure(ROOM), InternalError)


async def test_a_room_that_prefill_has_forgotten_ends(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    pair.at_prefill.tap.rules["ListTransfers"] = held(gate)
    await failed_unheard(pair, monkeypatch)
    forget_finished(pair.prefill.transfers)
    gate.set()
    error = await pair.at_decode.client.failure(ROOM)
    assert (type(error), "no record" in error.message) == (TransferFailed, True)


async def test_one_question_is_enough_for_all_rooms_of_a_prefill(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """They fail while the question is on its way; its answer, one message, ends them all."""
    monkeypatch.setattr(reports, "_TELL_S", 0.0)
    pair.at_decode.tap.rules["ReportTransfer"] = lost(ALWAYS, applies=FAILURE.applies)
    question = Gate()
    pair.at_prefill.tap.rules["ListTransfers"] = held(question)
    monkeypatch.setattr(peer_client, "ATTEMPT_S", 5.0)
    engine = pair.prefill.engine.shut()
    rooms = [20, 21, 22, 23]
    for room in rooms:
        await pair.submit(pair.request(room))
    await soon(question.reached.wait())
    for room in rooms:
        pair.prefill.service.abandon(BootstrapRoom(room), InternalError("broken"))
        await pair.at_prefill.client.failure(room)
    engine.set()
    question.set()
    for room in rooms:
        assert isinstance(await pair.at_decode.client.failure(room), InternalError)
    assert pair.at_prefill.tap.passed.count("ListTransfers") == 1


async def test_a_room_that_goes_on_is_left_alone_by_questions(pair: Pair) -> None:
    """Each question but the first is only for what is new."""
    tokens: list[str] = []

    async def noted(request: Any, pass_on: Any) -> Any:
        tokens.append(request.page_token)
        return await pass_on()

    pair.at_prefill.tap.rules["ListTransfers"] = noted
    gate = pair.faults.hold = Gate()
    request = pair.request(ROOM)
    await pair.submit(request)
    await soon(gate.reached.wait())
    await until(lambda: pair.at_prefill.tap.passed.count("GetTransfer") > 2)
    gate.set()
    await pair.assert_answered(request)
    first, *later = tokens
    assert (first, "" in later, later == sorted(later, key=int)) == ("", False, True)
