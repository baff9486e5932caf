from __future__ import annotations

from itertools import pairwise

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st
from pd.v1 import inspection_pb2

from pd_common.inspection.ttft import Share, account
from pd_common.inspection.views import Clock, ClusterView, ProcessView, RoomSide, RoomView
from pd_common.telemetry.spans import SpanName
from pd_common.types import BootstrapRoom, Role

NOW_NS = 1_800_000_000_000_000_000
Times = tuple[SpanName, float, float | None]


def at(ms: float) -> Timestamp:
    time = Timestamp()
    time.FromNanoseconds(NOW_NS + round(ms * 1e6))
    return time


def span(name: SpanName, start_ms: float, end_ms: float | None) -> inspection_pb2.Span:
    return inspection_pb2.Span(name=name.value, start=at(start_ms), end=None if end_ms is None else at(end_ms))


def side(role: Role, root: Times, *stages: Times, ttft_ms: float | None = None, ahead_ms: float = 0.0) -> RoomSide:
    """`ahead_ms`: by so much its clock is wrong."""

    def shifted(times: Times) -> inspection_pb2.Span:
        name, start_ms, end_ms = times
        return span(name, start_ms + ahead_ms, None if end_ms is None else end_ms + ahead_ms)

    leg = inspection_pb2.RoomSpans(root=shifted(root), stages=[shifted(times) for times in stages])
    if ttft_ms is not None:
        leg.root.attributes["ttft_ms"] = str(ttft_ms)
    return RoomSide(role.value, role, None, (leg,))


def view(*sides: RoomSide, asked: tuple[ProcessView, ...] = ()) -> RoomView:
    return RoomView(BootstrapRoom(7), sides, ClusterView(asked))


def told(shares: tuple[Share, ...]) -> list[tuple[str, str, float]]:
    return [(share.address, share.name, share.took_ms) for share in shares]


ROUTER = side(
    Role.ROUTER,
    (SpanName.ROUTE, 0, 200),
    (SpanName.RECEIVE, 0, 1),
    (SpanName.DISPATCH, 1, 5),
    (SpanName.FIRST_TOKEN_WAIT, 5, 101),
    (SpanName.STREAM, 101, 200),
    ttft_ms=101.0,
)
PREFILL = side(
    Role.PREFILL,
    (SpanName.PREFILL, 3, 95),
    (SpanName.BOOTSTRAP_WAIT, 3, 12),
    (SpanName.COMPUTE_WAIT, 12, 80),
    (SpanName.CHUNK_COMPUTE, 20, 50),
    (SpanName.CHUNK_TRANSFER, 50, 60),
    (SpanName.CHUNK_COMPUTE, 50, 80),
    (SpanName.COMMIT, 80, 95),
    (SpanName.CHUNK_TRANSFER, 80, 88),
)
DECODE_STAGES = (
    (SpanName.PEERING, 2, 4),
    (SpanName.PREALLOC_WAIT, 4, 10),
    (SpanName.ALLOCATE, 10, 13),
    (SpanName.TRANSFER_WAIT, 13, 90),
    (SpanName.GATE, 90, 96),
    (SpanName.FIRST_TOKEN, 96, 97),
    (SpanName.DECODE_STEPS, 97, 199),
)
DECODE = side(Role.DECODE, (SpanName.DECODE, 2, 199), *DECODE_STAGES, ttft_ms=95.0)
WHOLE = [
    ("router", "pd.receive", 1),
    ("router", "pd.dispatch", 1),
    ("decode", "pd.peering", 2),
    ("decode", "pd.prealloc_wait", 6),
    ("decode", "pd.allocate", 2),
    ("prefill", "pd.compute_wait", 8),
    ("prefill", "pd.chunk_compute", 60),
    ("prefill", "pd.chunk_transfer", 8),
    ("prefill", "pd.commit", 2),
    ("decode", "pd.gate", 6),
    ("decode", "pd.first_token", 1),
    ("router", "pd.first_token_wait", 4),
]


def test_each_stretch_has_the_span_that_others_waited_for() -> None:
    assert told(account(view(ROUTER, PREFILL, DECODE))) == WHOLE


def test_a_process_that_does_not_answer_leaves_its_time_to_those_who_waited_for_it() -> None:
    assert told(account(view(ROUTER, DECODE)))[4:7] == [
        ("decode", "pd.allocate", 3),
        ("decode", "pd.transfer_wait", 77),
        ("decode", "pd.gate", 6),
    ]


def test_what_no_span_explains_is_unaccounted() -> None:
    router = side(Role.ROUTER, (SpanName.ROUTE, 0, 50), (SpanName.DISPATCH, 1, 5), ttft_ms=30.0)
    assert told(account(view(router))) == [
        ("", "unaccounted", 1),
        ("router", "pd.dispatch", 4),
        ("", "unaccounted", 25),
    ]


def test_without_a_router_it_goes_from_the_first_leg_to_decodes_first_token() -> None:
    prefill = side(Role.PREFILL, (SpanName.PREFILL, -10, 95), (SpanName.BOOTSTRAP_WAIT, -10, 12))
    decode = side(Role.DECODE, (SpanName.DECODE, 2, 199), *DECODE_STAGES, ttft_ms=95.0)
    shares = account(view(prefill, decode))
    assert told(shares)[0] == ("prefill", "pd.bootstrap_wait", 12)
    assert shares[-1].name == "pd.first_token"
    assert sum(share.took_ms for share in shares) == pytest.approx(10 + 97)


def test_a_span_that_still_lasts_explains_up_to_the_end() -> None:
    router = side(Role.ROUTER, (SpanName.ROUTE, 0, None), (SpanName.FIRST_TOKEN_WAIT, 0, None), ttft_ms=30.0)
    assert told(account(view(router))) == [("router", "pd.first_token_wait", 30)]


def test_there_is_no_account_before_the_first_token() -> None:
    assert account(view(side(Role.ROUTER, (SpanName.ROUTE, 0, None), (SpanName.DISPATCH, 0, None)))) == ()


def test_a_clock_that_is_known_to_be_ahead_is_put_right() -> None:
    decode = side(Role.DECODE, (SpanName.DECODE, 2, 199), *DECODE_STAGES, ttft_ms=95.0, ahead_ms=5000)
    ahead = ProcessView("decode", Role.DECODE, clock=Clock(ahead_s=5.0, round_trip_s=0.002))
    assert told(account(view(ROUTER, PREFILL, decode, asked=(ahead,)))) == WHOLE


def test_a_difference_that_may_be_the_way_there_and_back_is_none() -> None:
    unsure = ProcessView("decode", Role.DECODE, clock=Clock(ahead_s=0.003, round_trip_s=0.01))
    assert told(account(view(ROUTER, PREFILL, DECODE, asked=(unsure,)))) == WHOLE


stretches = st.tuples(st.sampled_from(SpanName), st.integers(-50, 150), st.integers(0, 100)).map(
    lambda drawn: (drawn[0], float(drawn[1]), float(drawn[1] + drawn[2]))
)


@given(st.lists(stretches, max_size=8), st.lists(stretches, max_size=8), st.integers(1, 100))
def test_whatever_the_spans_the_shares_follow_each_other_and_add_up(
    on_router: list[Times], on_decode: list[Times], ttft_ms: int
) -> None:
    router = side(Role.ROUTER, (SpanName.ROUTE, 0, 200), *on_router, ttft_ms=float(ttft_ms))
    shares = account(view(router, side(Role.DECODE, (SpanName.DECODE, 0, 200), *on_decode)))
    assert shares[0].start_ns == 0
    assert shares[-1].end_ns == ttft_ms * 1_000_000
    for before, after in pairwise(shares):
        assert before.end_ns == after.start_ns
        assert (before.span, before.address) != (after.span, after.address)
