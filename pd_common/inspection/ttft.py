"""Where the time to first token of one room went: an account that adds up, from what its processes have noted.

Clocks of hosts differ: what differs by more than asking took is taken out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pd.v1 import inspection_pb2

from pd_common.inspection.views import RoomSide, RoomView
from pd_common.telemetry.spans import SpanName
from pd_common.types import Role

_EXPLAINING = (
    SpanName.RECEIVE,
    SpanName.DISPATCH,
    SpanName.FIRST_TOKEN_WAIT,
    SpanName.BOOTSTRAP_WAIT,
    SpanName.TRANSFER_WAIT,
    SpanName.PEERING,
    SpanName.PREALLOC_WAIT,
    SpanName.ALLOCATE,
    SpanName.COMPUTE_WAIT,
    SpanName.COMMIT,
    SpanName.CHUNK_TRANSFER,
    SpanName.PROMPT_COMPUTE,
    SpanName.CHUNK_COMPUTE,
    SpanName.GATE,
    SpanName.FIRST_TOKEN,
)
"""The least specific first: of spans that overlap, one that waits for the other stands before it. Computing hides a
transfer beside it, so what is left of transfers is what the first token has waited for.
"""

_STILL_LASTS = 2**63
"""The end of what has not ended."""


@dataclass(frozen=True, slots=True)
class Share:
    """One stretch of the time to first token, in nanoseconds from its beginning.

    `span` and `role` are None, and `address` is empty, where nothing explains it.
    """

    span: SpanName | None
    role: Role | None
    address: str
    start_ns: int
    end_ns: int

    @property
    def name(self) -> str:
        """For a person: the span's name, or "unaccounted"."""
        return "unaccounted" if self.span is None else self.span.value

    @property
    def start_ms(self) -> float:
        """From the beginning of the account."""
        return self.start_ns / 1e6

    @property
    def took_ms(self) -> float:
        """How long it lasted."""
        return (self.end_ns - self.start_ns) / 1e6


@dataclass(frozen=True, slots=True)
class _Leg:
    """What a process has noted, in nanoseconds since 1970 by the clock of whoever looks."""

    role: Role
    start_ns: int
    first_token_ns: int | None
    spans: tuple[Share, ...]
    """Those that can explain something."""


def account(view: RoomView) -> tuple[Share, ...]:
    """Cuts the time from the room's beginning to its first token into stretches without gaps, in order.

    The beginning is that of the router's leg, or of the first leg where no router knows the room; the first token is
    taken where that leg is, or else at decode. Empty as long as there is no first token.
    """
    legs = [_leg(view, side, noted) for side in view.sides for noted in side.legs]
    at_router, at_decode = (_to_first_token(legs, role) for role in (Role.ROUTER, Role.DECODE))
    if at_router is None and at_decode is None:
        return ()
    given_ns = at_decode[1] if at_decode is not None else _STILL_LASTS
    begin_ns, end_ns = at_router or (min(leg.start_ns for leg in legs), given_ns)
    return _cut(_explaining(legs, given_ns), begin_ns, end_ns)


def _cut(spans: Iterable[Share], begin_ns: int, end_ns: int) -> tuple[Share, ...]:
    within = [
        replace(span, start_ns=max(span.start_ns, begin_ns) - begin_ns, end_ns=min(span.end_ns, end_ns) - begin_ns)
        for span in spans
        if span.start_ns < end_ns and span.end_ns > begin_ns
    ]
    bounds = {0, end_ns - begin_ns} | {ns for span in within for ns in (span.start_ns, span.end_ns)}
    return tuple(_joined(_explained(within, start, end) for start, end in pairwise(sorted(bounds))))


def _leg(view: RoomView, side: RoomSide, noted: inspection_pb2.RoomSpans) -> _Leg:
    ahead_ns = _ahead_ns(view, side)
    start_ns, ttft_ms = noted.root.start.ToNanoseconds() - ahead_ns, noted.root.attributes.get("ttft_ms")
    spans = (
        Share(
            SpanName(span.name),
            side.role,
            side.address,
            span.start.ToNanoseconds() - ahead_ns,
            span.end.ToNanoseconds() - ahead_ns if span.HasField("end") else _STILL_LASTS,
        )
        for span in noted.stages
        if span.name in _EXPLAINING
    )
    first_token_ns = None if ttft_ms is None else start_ns + round(1e6 * float(ttft_ms))
    return _Leg(side.role, start_ns, first_token_ns, tuple(spans))


def _to_first_token(legs: Iterable[_Leg], role: Role) -> tuple[int, int] | None:
    """Beginning and first token of the latest leg that has had one."""
    found = [(leg.start_ns, leg.first_token_ns) for leg in legs if leg.role is role and leg.first_token_ns is not None]
    return found[-1] if found else None


def _explaining(legs: Iterable[_Leg], given_ns: int) -> Iterator[Share]:
    """When decode has given the first token away, at `given_ns`, only the router has still to do with it."""
    for leg in legs:
        for span in leg.spans:
            yield span if leg.role is Role.ROUTER else replace(span, end_ns=min(span.end_ns, given_ns))


def _explained(spans: Sequence[Share], start_ns: int, end_ns: int) -> Share:
    """By the most specific span that is open; between the two times none begins or ends."""
    found = [(_EXPLAINING.index(span.span), span) for span in spans if span.span and _covers(span, start_ns, end_ns)]
    if not found:
        return Share(None, None, "", start_ns, end_ns)
    _, best = max(found, key=lambda each: each[0])
    return replace(best, start_ns=start_ns, end_ns=end_ns)


def _covers(span: Share, start_ns: int, end_ns: int) -> bool:
    return span.start_ns <= start_ns and end_ns <= span.end_ns


def _joined(shares: Iterable[Share]) -> Iterator[Share]:
    """Neighbours with the same explanation are one."""
    last: Share | None = None
    for share in shares:
        if last is not None and (last.span, last.address) == (share.span, share.address):
            last = replace(last, end_ns=share.end_ns)
            continue
        if last is not None:
            yield last
        last = share
    if last is not None:
        yield last


def _ahead_ns(view: RoomView, side: RoomSide) -> int:
    """How far the clock of this side is ahead of that of whoever looks, as far as that is certain."""
    process = view.cluster.at(side.address)
    clock = None if process is None else process.clock
    return 0 if clock is None or abs(clock.ahead_s) < clock.round_trip_s else round(1e9 * clock.ahead_s)
