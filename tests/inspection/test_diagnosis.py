"""Each diagnosis by hand-made views: what it must see, and what it must not take for trouble."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from pd.v1 import inspection_pb2

from pd_common.errors import (
    CapacityExceeded,
    ClientCancelled,
    DeadlineExceeded,
    DigestMismatch,
    InternalError,
    LayoutMismatch,
    PdError,
    PeerLost,
    PermissionDenied,
    RoomAborted,
    TopologyIncomplete,
    TransferFailed,
)
from pd_common.inspection.diagnoses.finding import Finding, Kind, Severity
from pd_common.inspection.diagnosis import examine
from pd_common.inspection.views import Clock, ClusterView, RoomView
from pd_common.telemetry.spans import SpanName
from pd_common.types import BootstrapRoom, Role
from tests.inspection.hand_made import (
    DECODE,
    PREFILL,
    ROUTER,
    found,
    peer,
    pool,
    process,
    room_of,
    side,
    sound,
    span,
    topology,
    write,
)

BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS, FAILED = 1, 2, 3, 4, 5
ROOM = BootstrapRoom(7)


def the_room(cluster: ClusterView, *sides: object, others: Iterable[RoomView] = ()) -> Finding | None:
    """What is said of room 7, at most one thing."""
    view = room_of(cluster, *sides)  # type: ignore[arg-type]
    findings = examine(cluster, (view, *others), ROOM)
    assert len(findings) <= 1, findings
    return findings[0] if findings else None


def kind_of(finding: Finding | None) -> Kind | None:
    return None if finding is None else finding.kind


def served(*writes: inspection_pb2.Span, number: int = 7) -> RoomView:
    """A room that has come through; with nothing slow about it, unless its writes are."""
    states = ((BOOTSTRAPPING, 10.0), (WAITING, 10.0), (TRANSFERRING, 9.9), (SUCCESS, 8.5))
    at_prefill = side(Role.PREFILL, states, *(writes or (write(9.9, 9.89),)), room=number, peer_at=DECODE)
    return room_of(sound(), at_prefill, side(Role.DECODE, states, room=number, peer_at=PREFILL), number=number)


def test_nothing_is_wrong_with_what_is_sound() -> None:
    assert found(sound(), served()) == {}
    assert found(sound(), served(), room=7) == {}


# --- the two sides do not meet ---

ALONE_AT_PREFILL = side(Role.PREFILL, [(BOOTSTRAPPING, 8.0)], span(SpanName.BOOTSTRAP_WAIT, 8.0))
ALONE_AT_DECODE = side(
    Role.DECODE, [(WAITING, 8.0)], span(SpanName.PEERING, 8.0, 7.9), span(SpanName.TRANSFER_WAIT, 7.9), room=8
)


def test_room_numbers_that_differ_are_found_by_the_rid() -> None:
    other = room_of(sound(), ALONE_AT_DECODE, number=8)
    finding = the_room(sound(), ALONE_AT_PREFILL, others=[other])
    assert finding is not None
    assert finding.kind is Kind.ROOM_IDS_DIFFER
    assert [fact.split(",")[0] for fact in finding.seen] == ["room 7", "room 8"]
    assert "in pd.bootstrap_wait for 8.0 s" in finding.seen[0]
    assert "pdctl abort 7; pdctl abort 8" in finding.do[1]


def test_a_leg_with_a_partner_by_rid_is_no_partner_by_age() -> None:
    """Three legs of about one age, two of which have a rid in common: the third is without a partner."""
    other = room_of(sound(), ALONE_AT_DECODE, number=8)
    stranger = side(
        Role.DECODE, [(WAITING, 8.0)], span(SpanName.PEERING, 8.0, 7.9), span(SpanName.TRANSFER_WAIT, 7.9),
        room=9, rid="chat-9",
    )  # fmt: skip
    rooms = room_of(sound(), ALONE_AT_PREFILL), other, room_of(sound(), stranger, number=9)
    findings = found(sound(), *rooms)
    assert findings[Kind.ROOM_IDS_DIFFER].rooms == (7, 8)
    assert findings[Kind.LEG_MISSING].rooms == (9,)


def test_a_leg_of_another_age_is_no_partner() -> None:
    late = side(Role.DECODE, [(WAITING, 60.0)], span(SpanName.PEERING, 60.0, 59.0), room=8, rid="chat-8")
    other = room_of(sound(), late, number=8)
    assert kind_of(the_room(sound(), ALONE_AT_PREFILL, others=[other])) is Kind.LEG_MISSING


def test_no_leg_is_missing_while_a_process_that_may_have_it_cannot_be_asked() -> None:
    cluster = sound(process(Role.DECODE, trouble=PeerLost("it has not answered within 2 s")))
    assert kind_of(the_room(cluster, ALONE_AT_PREFILL)) is Kind.NO_COPY


def test_a_prompt_that_decode_serves_alone_has_no_leg_on_prefill() -> None:
    alone = side(Role.DECODE, [(BOOTSTRAPPING, 8.0)], span(SpanName.PREALLOC_WAIT, 8.0))
    assert the_room(sound(), alone) is None


def test_what_has_not_lasted_is_no_trouble() -> None:
    young = side(Role.PREFILL, [(BOOTSTRAPPING, 1.0)], span(SpanName.BOOTSTRAP_WAIT, 1.0))
    assert the_room(sound(), young) is None


# --- ranks and lists of pages ---


def test_a_directory_that_is_not_complete_is_told_with_its_numbers() -> None:
    half = TopologyIncomplete("1 of 2 ranks have registered", registered=1, expected=2)
    cluster = sound(process(Role.PREFILL, pool=pool(), topology_trouble=half))
    finding = found(cluster)[Kind.NOT_REGISTERED]
    assert finding.severity is Severity.DOWN
    assert finding.seen == (f"directory of prefill {PREFILL}: 1 of 2 ranks have registered",)


@pytest.mark.parametrize("trouble", [TopologyIncomplete("0 of 1"), PermissionDenied("not for you")])
def test_a_rank_that_another_directory_names_needs_none_of_its_own(trouble: PdError) -> None:
    second = "prefill:9998"
    cluster = sound(
        process(Role.PREFILL, pool=pool(), topology=topology(PREFILL, second)),
        process(Role.PREFILL, address=second, pool=pool(), topology_trouble=trouble),
    )
    assert found(cluster) == {}


def test_a_room_that_met_an_incomplete_directory_is_told_with_it() -> None:
    half = TopologyIncomplete("1 of 2 ranks have registered", registered=1, expected=2)
    cluster = sound(process(Role.PREFILL, pool=pool(), topology_trouble=half))
    failed = side(Role.DECODE, [(BOOTSTRAPPING, 9.0), (FAILED, 8.0)], failure=half)
    finding = found(cluster, room_of(cluster, failed))[Kind.NOT_REGISTERED]
    assert len(finding.seen) == 2
    assert finding.rooms == (7,)


WAITS_FOR_PAGES = side(Role.PREFILL, [(BOOTSTRAPPING, 8.0)], span(SpanName.BOOTSTRAP_WAIT, 8.0))


def test_what_a_room_waits_for_on_decode_is_said_if_it_is_noted() -> None:
    waits = span(SpanName.PREALLOC_WAIT, 7.9, pd__waited_for="slot")
    at_decode = side(Role.DECODE, [(BOOTSTRAPPING, 8.0)], span(SpanName.PEERING, 8.0, 7.9), waits)
    finding = the_room(sound(), WAITS_FOR_PAGES, at_decode)
    assert finding is not None
    assert "room 7: decode has not offered pages, for it waits for slot" in finding.seen


def test_a_room_that_went_through_soon_after_a_long_wait_did_not_wait_for_the_link() -> None:
    states = (BOOTSTRAPPING, 20.0), (WAITING, 10.0), (TRANSFERRING, 9.0), (SUCCESS, 8.9)
    at_prefill = side(Role.PREFILL, states, span(SpanName.BOOTSTRAP_WAIT, 20.0, 10.0), write(9.0, 8.99))
    at_decode = side(Role.DECODE, states, span(SpanName.PREALLOC_WAIT, 20.0, 10.0))
    finding = the_room(sound(), at_prefill, at_decode)
    assert finding is not None
    assert finding.kind is Kind.NO_COPY
    assert finding.seen[0] == "room 7: 10.0 s of waiting, 10.0 ms of writing"


def test_computing_is_no_waiting() -> None:
    states = (BOOTSTRAPPING, 20.0), (WAITING, 20.0), (TRANSFERRING, 9.0), (SUCCESS, 8.9)
    at_prefill = side(
        Role.PREFILL, states, span(SpanName.COMPUTE_WAIT, 20.0, 9.0), span(SpanName.CHUNK_COMPUTE, 19.9, 9.0),
        write(9.0, 8.99),
    )  # fmt: skip
    assert the_room(sound(), at_prefill, side(Role.DECODE, states)) is None


# --- on the way ---

ON_ITS_WAY = (BOOTSTRAPPING, 60.0), (WAITING, 60.0), (TRANSFERRING, 59.0)


def moving(*stages: inspection_pb2.Span) -> Finding | None:
    at_prefill = side(Role.PREFILL, ON_ITS_WAY, span(SpanName.COMPUTE_WAIT, 60.0), *stages, peer_at=DECODE)
    at_decode = side(Role.DECODE, ON_ITS_WAY, span(SpanName.TRANSFER_WAIT, 60.0), peer_at=PREFILL)
    return the_room(sound(), at_prefill, at_decode)


def computed(began_ago_s: float, ended_ago_s: float) -> inspection_pb2.Span:
    return span(SpanName.CHUNK_COMPUTE, began_ago_s, ended_ago_s)


def test_a_chunk_that_is_computed_and_not_written_is_a_stalled_write() -> None:
    finding = moving(computed(60, 40), write(40, 39), computed(39, 20))
    assert finding is not None
    assert finding.kind is Kind.TRANSFER_STALLED
    assert "room 7: a write has not ended for 20.0 s" in finding.seen
    assert any(fact.startswith("pages travel by tcp/eth0; the last canary came 1.0 s ago") for fact in finding.seen)


def test_a_chunk_that_takes_long_to_compute_is_none() -> None:
    assert moving(computed(60, 40), write(40, 39.99)) is None


def test_a_write_that_has_just_begun_is_none() -> None:
    assert moving(computed(60, 40), write(40, 39.99), computed(39, 1)) is None


def test_a_write_that_is_slow_beside_the_canary_is_noticed() -> None:
    finding = the_room(sound(), *served(write(9.9, 8.7, pages=4)).sides)
    assert finding is not None
    assert finding.kind is Kind.SLOW_WRITES
    assert "the last canary between the two: 1.00 ms for its page" in finding.seen


def test_large_pieces_are_no_trouble_however_many() -> None:
    """32 pages of 1 MiB in 32 writes are as fast as one write."""
    small = served(write(9.9, 9.89, pages=32, descriptors=34, size=32 * 1024))
    large = served(write(9.9, 9.89, pages=32, descriptors=34, size=32 * 2**20))
    finding = the_room(sound(), *small.sides)
    assert finding is not None
    assert finding.kind is Kind.FRAGMENTED
    assert finding.seen[0] == "room 7: 32 pages, 32 writes of 1.0 KiB"
    assert the_room(sound(), *large.sides) is None


def test_a_canary_that_is_overdue_shows_nothing_any_more() -> None:
    cluster = sound(process(Role.DECODE, pool=pool(), peers=(peer(canary_ago_s=45.0),)))
    assert "the last sign is 45 s old" in found(cluster)[Kind.CANARY_OLD].seen[0]
    assert found(cluster, served()) == {}, "a room that came through is a sign as well"


# --- how rooms end ---


def failed(
    at_prefill: PdError, at_decode: PdError, *, peer_at: str = DECODE, number: int = 7, prefill_first: bool = True
) -> tuple[object, ...]:
    states = ((BOOTSTRAPPING, 10.0), (TRANSFERRING, 9.0))
    first, second = (FAILED, 8.0), (FAILED, 7.9)
    return (
        side(
            Role.PREFILL,
            (*states, first if prefill_first else second),
            failure=at_prefill,
            room=number,
            peer_at=peer_at,
        ),
        side(
            Role.DECODE, (*states, second if prefill_first else first), failure=at_decode, room=number, peer_at=PREFILL
        ),
    )


@pytest.mark.parametrize(
    ("at_prefill", "at_decode", "kind"),
    [
        (DigestMismatch("changed"), DigestMismatch("changed"), Kind.WRONG_DATA),
        (TransferFailed("endpoint error"), PeerLost("the pairing ended"), Kind.TRANSFER_BROKEN),
        (RoomAborted("decode gave it up"), PeerLost("no beat"), Kind.TRANSFER_BROKEN),
        (CapacityExceeded("full"), CapacityExceeded("full"), Kind.QUEUE),
        (RoomAborted("by hand"), RoomAborted("by hand"), Kind.ABORTED),
        (DeadlineExceeded("late"), DeadlineExceeded("late"), Kind.TRANSFER_STALLED),
        (InternalError("a defect"), RoomAborted("prefill says so"), Kind.FAILED),
    ],
    ids=lambda value: value if isinstance(value, Kind) else "",
)
def test_a_failed_room_is_told_by_the_side_that_knows_most(at_prefill: PdError, at_decode: PdError, kind: Kind) -> None:
    assert kind_of(the_room(sound(), *failed(at_prefill, at_decode))) is kind


def test_a_write_that_failed_because_the_process_is_gone_is_not_the_links_fault() -> None:
    sides = failed(TransferFailed("reset"), RoomAborted("prefill says so"), peer_at="another:1")
    finding = the_room(sound(), *sides)
    assert finding is not None
    assert finding.kind is Kind.PEER_LOST
    assert "room 7: at-another:1 does not answer any more" in finding.seen


@pytest.mark.parametrize("prefill_first", [True, False])
def test_who_ended_a_room_first_has_aborted_it(prefill_first: bool) -> None:
    sides = failed(RoomAborted("by hand"), RoomAborted("by hand"), prefill_first=prefill_first)
    finding = the_room(sound(), *sides)
    assert finding is not None
    first = f"prefill {PREFILL}" if prefill_first else f"decode {DECODE}"
    assert f"room 7: it was aborted at {first}: AbortRoom by hand" in finding.seen


def test_who_was_first_is_told_by_one_clock() -> None:
    """Decode's says that it was later, and is ahead by more than that."""
    sides = failed(RoomAborted("by hand"), RoomAborted("by hand"), prefill_first=True)
    ahead = sound(process(Role.DECODE, pool=pool(), peers=(peer(),), clock=Clock(0.5, 0.01)))
    finding = the_room(ahead, *sides)
    assert finding is not None
    assert f"room 7: it was aborted at decode {DECODE}: AbortRoom by hand" in finding.seen


def test_a_client_that_left_is_known_from_the_router() -> None:
    left = ClientCancelled("the client went away")
    at_router = side(Role.ROUTER, failure=left)
    finding = the_room(sound(process(Role.ROUTER)), at_router, *failed(RoomAborted("it left"), RoomAborted("it left")))
    assert finding is not None
    assert f"room 7: the client went away: router {ROUTER} saw its call end" in finding.seen


def test_aborts_are_everyday_until_there_are_many() -> None:
    def aborted(count: int) -> list[RoomView]:
        errors = RoomAborted("by hand"), RoomAborted("by hand")
        return [room_of(sound(), *failed(*errors, number=number), number=number) for number in range(1, count + 1)]  # type: ignore[arg-type]

    assert found(sound(), *aborted(4)) == {}
    assert found(sound(), *aborted(5))[Kind.ABORTED].severity is Severity.NOTE


@pytest.mark.parametrize(
    ("field", "advice"),
    [("page_size", "--page-size"), ("transfer_backend", "--transfer-backend"), ("position", "tensor-parallel")],
)
def test_layouts_that_differ_are_told_with_the_flag_that_makes_them_alike(field: str, advice: str) -> None:
    refused = LayoutMismatch("they differ", field=field, mine="16", theirs="32")
    at_decode = side(Role.DECODE, [(BOOTSTRAPPING, 9.0), (FAILED, 8.9)], failure=refused)
    finding = the_room(sound(), at_decode)
    assert finding is not None
    assert finding.severity is Severity.DOWN
    assert f"{field}: 16 here, 32 there" in finding.seen
    assert advice in finding.do[0]
