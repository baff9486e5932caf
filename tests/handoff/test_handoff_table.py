from __future__ import annotations

from collections.abc import Callable

import pytest

from pd_common.errors import (
    AllocationConflict,
    InternalError,
    InvalidRequest,
    PdError,
    PeerLost,
    RoomAborted,
    RoomUnknown,
    StaleInstance,
)
from pd_common.handoff.state import ALLOWED, Progress, Transfer, TransferState, reduce_states
from pd_common.handoff.table import TransferTable
from pd_common.types import Instance, Role
from tests.handoff.memory import DECODE, PREFILL, make_offer, room

S = TransferState


def decode_table() -> TransferTable:
    return TransferTable(Role.DECODE, retention_s=30.0, max_finished=100)


def opened(table: TransferTable, number: int, now: float = 0.0, deadline_s: float = 60.0) -> Transfer:
    return table.open(room(number), rid=f"r{number}", prompt_digest=b"p", deadline_s=deadline_s, now=now)


def rooms(transfers: list[Transfer]) -> list[int]:
    return [transfer.room for transfer in transfers]


@pytest.mark.parametrize(
    ("states", "common"),
    [
        ([S.SUCCESS, S.SUCCESS], S.SUCCESS),
        ([S.SUCCESS, S.TRANSFERRING], S.TRANSFERRING),
        ([S.BOOTSTRAPPING, S.WAITING_FOR_INPUT, S.SUCCESS], S.BOOTSTRAPPING),
        ([S.SUCCESS, S.FAILED, S.BOOTSTRAPPING], S.FAILED),
    ],
)
def test_ranks_agree_on_the_least(states: list[TransferState], common: TransferState) -> None:
    assert reduce_states(states) is common


def test_every_live_state_can_fail_and_no_step_leads_back() -> None:
    for state, after in ALLOWED.items():
        assert (S.FAILED in after) is not state.is_final
        assert all(later > state for later in after - {S.FAILED})


def test_listeners_hear_every_change_and_only_changes() -> None:
    table = decode_table()
    heard: list[tuple[int, TransferState]] = []
    table.listeners.append(lambda transfer: heard.append((transfer.sequence, transfer.state)))
    opened(table, 1)
    assert table.advance(room(1), S.WAITING_FOR_INPUT, 1.0, peer=PREFILL)
    assert not table.advance(room(1), S.WAITING_FOR_INPUT, 2.0, peer=PREFILL)
    assert table.advance(room(1), S.TRANSFERRING, 3.0, progress=Progress(1, 4, 400))
    assert not table.advance(room(1), S.TRANSFERRING, 4.0, progress=Progress(1, 3, 400))
    assert table.advance(room(1), S.SUCCESS, 5.0)
    assert not table.advance(room(1), S.SUCCESS, 6.0, progress=Progress(9, 9, 9))
    assert heard == [(1, S.BOOTSTRAPPING), (2, S.WAITING_FOR_INPUT), (3, S.TRANSFERRING), (4, S.SUCCESS)]
    assert table.sequence == 4
    assert table.get(room(1)).progress == Progress(1, 4, 400)


def test_an_unknown_room_is_left_alone() -> None:
    table = decode_table()
    assert not table.advance(room(1), S.TRANSFERRING, 0.0)
    assert not table.fail(room(1), RoomAborted("x"), 0.0)
    with pytest.raises(RoomUnknown):
        table.heard(room(1), PREFILL, 1)
    with pytest.raises(RoomUnknown):
        table.get(room(1))
    assert table.changes_since(0) == []


def test_a_room_with_half_of_what_it_needs_cannot_be_moved_on() -> None:
    table = TransferTable(Role.PREFILL, 30.0, 100)
    table.join_offer(room(1), make_offer([0], 4), deadline_s=60.0, now=0.0)
    for state in (S.WAITING_FOR_INPUT, S.TRANSFERRING, S.SUCCESS):
        with pytest.raises(InvalidRequest):
            table.advance(room(1), state, 1.0)
    assert table.get(room(1)).state is S.BOOTSTRAPPING


def test_a_room_that_was_forgotten_and_comes_again_is_heard_from_the_start() -> None:
    table = decode_table()
    opened(table, 1)
    assert table.heard(room(1), PREFILL, 5)
    table.fail(room(1), RoomAborted("x"), 0.0)
    assert table.sweep(30.0) == [1]
    opened(table, 1)
    assert table.heard(room(1), PREFILL, 1)


def test_failing_needs_a_reason() -> None:
    table = decode_table()
    opened(table, 1)
    with pytest.raises(InternalError):
        table.advance(room(1), S.FAILED, 1.0)


def test_a_room_keeps_its_peer() -> None:
    table = decode_table()
    opened(table, 1)
    table.advance(room(1), S.WAITING_FOR_INPUT, 1.0, peer=PREFILL)
    with pytest.raises(StaleInstance):
        table.advance(room(1), S.TRANSFERRING, 2.0, peer=Instance(PREFILL.instance_id, PREFILL.epoch + 1))
    assert table.get(room(1)).state is S.WAITING_FOR_INPUT


def test_only_the_lost_life_of_a_peer_takes_its_rooms_along() -> None:
    table = decode_table()
    again = Instance(PREFILL.instance_id, PREFILL.epoch + 1)
    for number, peer in ((1, PREFILL), (2, again), (3, PREFILL)):
        opened(table, number)
        table.advance(room(number), S.WAITING_FOR_INPUT, 1.0, peer=peer)
    table.advance(room(3), S.SUCCESS, 1.0)
    lost = table.fail_peer(PREFILL, PeerLost("gone"), 2.0)
    assert rooms(lost) == [1]
    assert [table.get(room(number)).state for number in (1, 2, 3)] == [S.FAILED, S.WAITING_FOR_INPUT, S.SUCCESS]


def test_another_receiver_cannot_take_a_room_over() -> None:
    table = TransferTable(Role.PREFILL, 30.0, 100)
    table.join_offer(room(1), make_offer([0], 4), deadline_s=60.0, now=0.0)
    for receiver in (Instance("decode-1", 1), Instance(DECODE.instance_id, DECODE.epoch + 1)):
        with pytest.raises(AllocationConflict):
            table.join_offer(room(1), make_offer([0], 4, receiver=receiver), deadline_s=60.0, now=0.0)
    assert table.get(room(1)).peer == DECODE


@pytest.mark.parametrize(("request_s", "offer_s"), [(20.0, 15.0), (15.0, 20.0)])
@pytest.mark.parametrize("request_first", [True, False])
def test_the_earlier_deadline_of_both_legs_counts(request_s: float, offer_s: float, request_first: bool) -> None:
    table = TransferTable(Role.PREFILL, 30.0, 100)
    legs: list[Callable[[], Transfer]] = [
        lambda: table.join_request(room(1), rid="r", prompt_digest=b"prompt", deadline_s=request_s, now=0.0),
        lambda: table.join_offer(room(1), make_offer([0], 4), deadline_s=offer_s, now=0.0),
    ]
    for join in legs if request_first else reversed(legs):
        join()
    assert table.get(room(1)).state is S.WAITING_FOR_INPUT
    assert table.next_deadline() == 15.0
    assert table.expire(14.9) == []
    assert rooms(table.expire(15.0)) == [1]


def test_deadlines_come_in_order_and_finished_rooms_have_none() -> None:
    table = decode_table()
    for number, deadline_s in ((1, 30.0), (2, 10.0), (3, 20.0)):
        opened(table, number, deadline_s=deadline_s)
    assert table.next_deadline() == 10.0
    table.abort(room(2), RoomAborted("x"), 1.0)
    assert table.next_deadline() == 20.0
    assert table.expire(19.9) == []
    assert rooms(table.expire(30.0)) == [3, 1]
    assert table.next_deadline() is None


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (lambda table: table.select(), [2, 3, 1]),
        (lambda table: table.select(states=frozenset({S.FAILED, S.SUCCESS})), [1]),
        (lambda table: table.select(peer_instance_id=PREFILL.instance_id), [3]),
        (lambda table: table.select(created_until_s=1.0), [1]),
        (lambda table: table.select(after_sequence=2), [3, 1]),
        (lambda table: table.live(), [2, 3]),
    ],
)
def test_filters(select: Callable[[TransferTable], list[Transfer]], expected: list[int]) -> None:
    table = decode_table()
    for number in (1, 2, 3):
        opened(table, number, now=float(number))
    table.advance(room(3), S.WAITING_FOR_INPUT, 4.0, peer=PREFILL)
    table.abort(room(1), RoomAborted("x"), 5.0)
    assert rooms(select(table)) == expected


def test_a_snapshot_stays_what_it_was() -> None:
    table = decode_table()
    before = opened(table, 1)
    table.fail(room(1), PdError("x"), 1.0)
    assert (before.state, before.failure) == (S.BOOTSTRAPPING, None)
    assert [step.state for step in table.get(room(1)).timeline] == [S.BOOTSTRAPPING, S.FAILED]
