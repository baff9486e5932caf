from __future__ import annotations

from collections.abc import Callable

import pytest

from pd_common.errors import (
    AllocationConflict,
    InternalError,
    InvalidRequest,
    PdError,
    PeerLost,
    Reason,
    RoomAborted,
    RoomUnknown,
    StaleInstance,
)
from pd_common.handoff.deadlines import Timeouts
from pd_common.handoff.state import ALLOWED, Progress, Transfer, TransferState, Transition
from pd_common.handoff.table import TransferTable
from pd_common.types import Instance, Role
from tests.handoff.memory import DECODE, PREFILL, make_offer, room
from tests.handoff.overdue import expire, next_deadline

S = TransferState
TIMEOUTS = Timeouts(bootstrap_s=200.0, waiting_s=100.0)


def decode_table() -> TransferTable:
    return TransferTable(Role.DECODE, 30.0, 100, TIMEOUTS)


def opened(table: TransferTable, number: int, now: float = 0.0, deadline_s: float = 60.0) -> Transfer:
    return table.open(room(number), rid=f"r{number}", prompt_digest=b"p", deadline_s=deadline_s, now=now)


def rooms(transfers: list[Transfer]) -> list[int]:
    return [transfer.room for transfer in transfers]


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
    table = TransferTable(Role.PREFILL, 30.0, 100, TIMEOUTS)
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
    table = TransferTable(Role.PREFILL, 30.0, 100, TIMEOUTS)
    table.join_offer(room(1), make_offer([0], 4), deadline_s=60.0, now=0.0)
    for receiver in (Instance("decode-1", 1), Instance(DECODE.instance_id, DECODE.epoch + 1)):
        with pytest.raises(AllocationConflict):
            table.join_offer(room(1), make_offer([0], 4, receiver=receiver), deadline_s=60.0, now=0.0)
    assert table.get(room(1)).peer == DECODE


@pytest.mark.parametrize(("request_s", "offer_s"), [(20.0, 15.0), (15.0, 20.0)])
@pytest.mark.parametrize("request_first", [True, False])
def test_the_earlier_deadline_of_both_legs_counts(request_s: float, offer_s: float, request_first: bool) -> None:
    table = TransferTable(Role.PREFILL, 30.0, 100, TIMEOUTS)
    legs: list[Callable[[], Transfer]] = [
        lambda: table.join_request(room(1), rid="r", prompt_digest=b"prompt", deadline_s=request_s, now=0.0),
        lambda: table.join_offer(room(1), make_offer([0], 4), deadline_s=offer_s, now=0.0),
    ]
    for join in legs if request_first else reversed(legs):
        join()
    assert table.get(room(1)).state is S.WAITING_FOR_INPUT
    assert next_deadline(table) == 15.0
    assert expire(table, 14.9) == []
    assert rooms(expire(table, 15.0)) == [1]


def test_deadlines_come_in_order_and_finished_rooms_have_none() -> None:
    table = decode_table()
    for number, deadline_s in ((1, 30.0), (2, 10.0), (3, 20.0)):
        opened(table, number, deadline_s=deadline_s)
    assert next_deadline(table) == 10.0
    table.abort(room(2), RoomAborted("x"), 1.0)
    assert next_deadline(table) == 20.0
    assert expire(table, 19.9) == []
    assert rooms(expire(table, 30.0)) == [3, 1]
    assert next_deadline(table) is None


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


# --- limits of states ---


def limits(transfers: list[Transfer]) -> list[tuple[int, str]]:
    return [(transfer.room, transfer.failure.metadata["limit"]) for transfer in transfers if transfer.failure]


@pytest.mark.parametrize(
    ("deadline_s", "ends_s", "limit"),
    [(500.0, 201.0, "bootstrap_timeout"), (150.0, 150.0, "deadline"), (201.0, 201.0, "deadline")],
)
def test_a_room_that_meets_nobody_ends_by_the_earlier_of_its_deadline_and_the_bootstrap_timeout(
    deadline_s: float, ends_s: float, limit: str
) -> None:
    table = decode_table()
    opened(table, 1, now=1.0, deadline_s=deadline_s)
    assert next_deadline(table) == ends_s
    assert expire(table, ends_s - 0.1) == []
    assert limits(expire(table, ends_s)) == [(1, limit)]


def test_the_other_leg_does_not_put_the_bootstrap_timeout_off() -> None:
    """From the first word on, whichever leg it was; what decode offers later than that finds a room that has ended."""
    table = TransferTable(Role.PREFILL, 30.0, 100, TIMEOUTS)
    table.join_offer(room(1), make_offer([0], 4), deadline_s=900.0, now=0.0)
    table.join_offer(room(1), make_offer([0], 4), deadline_s=900.0, now=150.0)
    assert limits(expire(table, 200.0)) == [(1, "bootstrap_timeout")]


def test_once_pages_are_offered_only_standing_still_counts() -> None:
    table = decode_table()
    opened(table, 1, deadline_s=5000.0)
    table.advance(room(1), S.WAITING_FOR_INPUT, 199.0, peer=PREFILL)
    assert expire(table, 298.9) == []
    table.advance(room(1), S.TRANSFERRING, 298.9)
    for done in range(1, 20):
        assert expire(table, 298.9 + 99.0 * done) == []
        table.advance(room(1), S.TRANSFERRING, 298.9 + 99.0 * done, progress=Progress(done, done, done))
    last = 298.9 + 99.0 * 19
    assert not table.advance(room(1), S.TRANSFERRING, last + 50.0, progress=Progress(19, 19, 19))
    assert next_deadline(table) == last + 100.0
    (expired,) = expire(table, last + 100.0)
    assert limits([expired]) == [(1, "waiting_timeout")]
    assert expired.progress == Progress(19, 19, 19)


def test_overdue_rooms_are_named_once_and_left_to_be_ended() -> None:
    table = decode_table()
    opened(table, 1, deadline_s=10.0)
    opened(table, 2, deadline_s=20.0)
    ((number, error),) = table.overdue(10.0).items()
    assert (number, error.reason) == (1, Reason.DEADLINE)
    assert table.get(room(1)).state is S.BOOTSTRAPPING
    assert list(table.overdue(30.0)) == [2]


def test_progress_does_not_put_the_requests_deadline_off() -> None:
    table = decode_table()
    opened(table, 1, deadline_s=150.0)
    table.advance(room(1), S.WAITING_FOR_INPUT, 90.0, peer=PREFILL)
    table.advance(room(1), S.TRANSFERRING, 140.0, progress=Progress(1, 1, 1))
    assert limits(expire(table, 150.0)) == [(1, "deadline")]


def test_rooms_end_in_the_order_of_their_ends_whatever_was_put_off() -> None:
    table = decode_table()
    for number in (1, 2, 3):
        opened(table, number, now=0.0, deadline_s=5000.0)
    table.advance(room(1), S.WAITING_FOR_INPUT, 10.0, peer=PREFILL)
    table.advance(room(2), S.WAITING_FOR_INPUT, 20.0, peer=PREFILL)
    table.advance(room(1), S.TRANSFERRING, 109.0)
    assert next_deadline(table) == 120.0
    assert limits(expire(table, 1000.0)) == [(2, "waiting_timeout"), (3, "bootstrap_timeout"), (1, "waiting_timeout")]
    assert next_deadline(table) is None


def test_a_watcher_can_resume_from_what_is_still_on_record_and_from_nothing_else() -> None:
    table = TransferTable(Role.DECODE, 30.0, 100, TIMEOUTS, sequence=1000)
    for after in (0, 1000):
        table.require_resumable(after)
    for number in (1, 2):
        opened(table, number)
        table.fail(room(number), RoomAborted("x"), 10.0 * number)
    assert table.sequence == 1004
    for after in (0, 1000, 1001, 1004):
        table.require_resumable(after)
    assert table.sweep(40.0) == [1]
    for after in (0, 1002, 1003, 1004):
        table.require_resumable(after)
    for after in (1, 999, 1000, 1001, 1005):
        with pytest.raises(InvalidRequest, match="start again with 0"):
            table.require_resumable(after)


def test_the_timeline_tells_each_step_with_what_was_done_by_then() -> None:
    table = decode_table()
    opened(table, 1)
    opened(table, 2)
    table.advance(room(1), S.WAITING_FOR_INPUT, 1.0, peer=PREFILL)
    table.advance(room(1), S.TRANSFERRING, 2.0, progress=Progress(1, 4, 400))
    table.advance(room(1), S.TRANSFERRING, 3.0, progress=Progress(2, 8, 800))
    table.fail(room(1), PeerLost("gone"), 4.0)
    assert table.get(room(1)).timeline == (
        Transition(S.BOOTSTRAPPING, 0.0, 1, Progress()),
        Transition(S.WAITING_FOR_INPUT, 1.0, 3, Progress()),
        Transition(S.TRANSFERRING, 2.0, 4, Progress(1, 4, 400)),
        Transition(S.FAILED, 4.0, 6, Progress(2, 8, 800), Reason.PEER_LOST),
    )
