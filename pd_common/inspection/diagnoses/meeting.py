"""Rooms whose pages have not begun to move: the sides do not meet, or one waits before the first write."""

from __future__ import annotations

from collections.abc import Iterator

from pd.v1 import inspection_pb2

from pd_common.errors import Reason
from pd_common.inspection.diagnoses.finding import Finding, Kind, Severity
from pd_common.inspection.diagnoses.reading import (
    BOOTSTRAPPING,
    SUCCESS,
    WAITING_FOR_INPUT,
    Case,
    Leg,
    leg_of,
    number_of,
    seconds,
)
from pd_common.telemetry.spans import SpanName
from pd_common.types import BootstrapRoom, Role

NOT_REGISTERED = "Not every prefill rank has registered"

_TOGETHER_S = 2.0
"""Both legs of a request are sent at the same time: ages further apart than this are not those of one request."""
_HARDLY = 0.1
"""Writes that take less than this share of a wait are not what it was about."""


def one_leg(case: Case) -> Finding | None:
    """The request came to one side only; perhaps under another number to the other."""
    lone = _lone(case.prefill, case.decode)
    if lone is None or not _can_tell(case, lone) or not _overdue(case, lone):
        return None
    severity = Severity.STUCK if lone.is_live else Severity.FAILED
    partner = _partner(case, lone)
    if partner is None:
        other = Role.DECODE if lone.side.role is Role.PREFILL else Role.PREFILL
        return Finding(
            Kind.LEG_MISSING,
            severity,
            "A request came to one side only",
            (lone.in_words(), f"no {other} has a request for room {case.room}"),
            "Both sides need the same request; who sent it to one has not sent it to the other, or was refused there.",
            (
                "let pd-router send requests: it sends both legs and ends one when the other is refused",
                "a client of its own sends the same body, with the same bootstrap_room, to prefill and to decode",
                f"pdctl abort {case.room}    # else it waits for --bootstrap-timeout",
            ),
            (case.room,),
        )
    sure = partner.transfer.rid == lone.transfer.rid
    how = f"the rid {lone.transfer.rid!r} is the same" if sure else "they began at the same time"
    return Finding(
        Kind.ROOM_IDS_DIFFER,
        severity,
        "The two legs of a request have different room numbers",
        tuple(leg.in_words() for leg in sorted((lone, partner), key=lambda leg: leg.side.role is Role.DECODE)),
        f"Prefill and decode meet by the room number alone, and each waits for the other; {how}, so they "
        f"{'are' if sure else 'seem to be'} one request.",
        (
            "send the same bootstrap_room to both sides, or let pd-router choose it",
            f"pdctl abort {case.room}; pdctl abort {partner.room}    # else both wait for --bootstrap-timeout",
        ),
        (case.room,),
    )


def no_prefill_found(case: Case) -> Finding | None:
    """Decode cannot find or pair with the prefill."""
    incomplete = case.failure(Reason.TOPOLOGY_INCOMPLETE)
    if incomplete is not None:
        return not_registered((f"room {case.room}: {incomplete.message}",), (case.room,))
    decode = case.decode
    if decode is None or not decode.rests_in(SpanName.PEERING) or not _overdue(case, decode):
        return None
    return Finding(
        Kind.NOT_REGISTERED,
        Severity.STUCK if decode.is_live else Severity.FAILED,
        "Decode has not found the prefill of a room",
        case.in_words,
        "Decode asks the Bootstrap directory that the request names which rank has the room, and none has said so; or "
        "the rank is not paired again before it has proven that it is quiet for rooms that failed.",
        (
            "pdctl topology    # is every rank in the directory that bootstrap_host and bootstrap_port name?",
            "start every rank with the same --dp-size and --bootstrap HOST:PORT, and a --dp-rank of its own",
        ),
        (case.room,),
    )


def not_registered(seen: tuple[str, ...], rooms: tuple[BootstrapRoom, ...] = ()) -> Finding:
    """A directory with an empty place."""
    return Finding(
        Kind.NOT_REGISTERED,
        Severity.DOWN,
        NOT_REGISTERED,
        seen,
        "A directory names its ranks only when each place of the grid is held: until then decode finds none there.",
        (
            "start the ranks that are missing: pd-prefill --dp-rank N --dp-size SIZE --bootstrap HOST:PORT",
            "or start all with the --dp-size that there really is; the default is 1",
            "pdctl topology    # who is registered where",
        ),
        rooms,
    )


def pages_not_offered(case: Case) -> Finding | None:
    """Both legs are there, and decode has not told prefill where to write."""
    prefill, decode = case.prefill, case.decode
    if prefill is None or decode is None or not (prefill.has_request and _overdue(case, decode)):
        return None
    if decode.rests_in(SpanName.PREALLOC_WAIT):
        return _waits_for_memory(case, decode)
    if not decode.rests_in(SpanName.ALLOCATE):
        return None
    return Finding(
        Kind.PAGES_NOT_OFFERED,
        Severity.STUCK if decode.is_live else Severity.FAILED,
        "Decode's list of pages does not reach prefill",
        case.in_words,
        "Decode has set pages aside and says so again and again, and prefill does not answer AllocatePages.",
        (
            f"from decode's host: grpcurl -plaintext {prefill.side.address} grpc.health.v1.Health/Check",
            "look for a firewall, a proxy or a wrong --advertise-host between the two",
        ),
        (case.room,),
    )


def no_copy(case: Case) -> Finding | None:
    """It took long, and hardly any of it was writing."""
    prefill = case.prefill
    if prefill is None or not (prefill.is_live or prefill.state == SUCCESS or prefill.reason is Reason.DEADLINE):
        return None
    waits = sorted(_waits(case), reverse=True)
    waited_s, writing_s = sum(wait[0] for wait in waits), prefill.took_s(prefill.stages(SpanName.CHUNK_TRANSFER))
    if waited_s < case.patience_s or writing_s > _HARDLY * waited_s:
        return None
    longest_s, where, advice = waits[0]
    severity = Severity.FAILED if prefill.reason else Severity.STUCK if prefill.is_live else Severity.SLOW
    return Finding(
        Kind.NO_COPY,
        severity,
        "A room waits long before anything is written",
        (
            f"room {case.room}: {waited_s:.1f} s of waiting, {1000 * writing_s:.1f} ms of writing",
            f"room {case.room}: {longest_s:.1f} s of it {where}",
        ),
        "The link is not what takes the time: no write can begin before that wait is over.",
        (advice, f"pdctl trace {case.room}    # where all of its time went"),
        (case.room,),
    )


def _lone(prefill: Leg | None, decode: Leg | None) -> Leg | None:
    """The only leg that has the request. A decode that serves it alone looks for no prefill."""
    here = [leg for leg in (prefill, decode) if leg is not None and leg.has_request]
    if len(here) != 1 or (here[0].side.role is Role.DECODE and not here[0].stages(SpanName.PEERING)):
        return None
    return here[0]


def _can_tell(case: Case, lone: Leg) -> bool:
    """Every process that could have the other leg has been asked."""
    others = case.cluster.of_role(Role.DECODE if lone.side.role is Role.PREFILL else Role.PREFILL)
    return bool(others) and all(view.trouble is None for view in others)


def _overdue(case: Case, leg: Leg) -> bool:
    """It has been waiting for too long for the other side, or was given up for that."""
    waits = leg.state in (BOOTSTRAPPING, WAITING_FOR_INPUT) and leg.in_state_s >= case.patience_s
    return waits or leg.reason is Reason.DEADLINE


def _partner(case: Case, lone: Leg) -> Leg | None:
    """A leg of another room that is alone on the other side: one with the same rid, else one of the same age."""
    alone = [_lone(leg_of(view, Role.PREFILL), leg_of(view, Role.DECODE)) for view in case.others]
    overdue = [leg for leg in alone if leg is not None and leg.room != case.room and _overdue(case, leg)]
    named = [leg for leg in overdue if _have_same_rid(leg, lone)]
    free = [leg for leg in overdue if not any(_have_same_rid(leg, other) for other in overdue)]
    return next(iter(named + [leg for leg in free if _began_together(leg, lone)]), None)


def _have_same_rid(one: Leg, other: Leg) -> bool:
    """Of two sides."""
    return one.side.role is not other.side.role and one.transfer.rid == other.transfer.rid


def _began_together(one: Leg, other: Leg) -> bool:
    """On two sides, by their ages: those need no common clock."""
    ages_s = [leg.now_s - leg.began_s for leg in (one, other)]
    return one.side.role is not other.side.role and abs(ages_s[0] - ages_s[1]) <= _TOGETHER_S


def _waits_for_memory(case: Case, decode: Leg) -> Finding:
    pool = getattr(case.cluster.at(decode.side.address), "pool", None)
    seen = (*case.in_words, f"room {case.room}: decode has not offered pages, for it waits for {_waited_for(decode)}")
    if pool is not None:
        pages = pool.pages_free + pool.pages_cached
        seen += (
            f"{decode.name}: {pages} of {pool.pages_total} pages are to be had, {pool.pages_quarantined} in quarantine",
            f"{decode.name}: {pool.slots_free} of {pool.slots_total} metadata slots are to be had",
            f"{decode.name}: {pool.requests_queued} requests wait, {pool.requests_retracted} have lost their pages",
        )
    return Finding(
        Kind.PAGES_NOT_OFFERED,
        Severity.STUCK if decode.is_live else Severity.FAILED,
        "Decode has not set pages aside yet",
        seen,
        "Prefill may write only where decode has set pages aside, and decode lets a room in when pages for its prompt, "
        "some to grow, a metadata slot and one of its places are free.",
        (
            "send less, or add a decode: pd-router --decode HOST:PORT ... (pdctl plan says how many)",
            "pages: a larger --kv-cache-tokens, or a smaller --num-reserved-decode-tokens, on decode",
            "places and slots: a larger --max-running-requests or --decode-extra-slots on decode",
        ),
        (case.room,),
    )


def _waited_for(decode: Leg) -> str:
    """What its stage has noted."""
    stage = decode.resting or inspection_pb2.Span()
    gate = stage.attributes.get("pd.waited_for", "")
    return gate or "memory, a slot or its turn"


def _waits(case: Case) -> Iterator[tuple[float, str, str]]:
    """Seconds of each wait before the pages have come, where that is, and what helps."""
    prefill, decode = case.prefill, case.decode
    if prefill is None:
        return
    yield _queued_s(case, prefill), f"in the queue of {prefill.name}", "send less, or add a prefill (see pdctl plan)"
    if decode is None:
        waited_s = prefill.took_s(prefill.stages(SpanName.BOOTSTRAP_WAIT))
        yield waited_s, "for decode's pages", "pdctl topology    # does its decode answer?"
        return
    ended_s = decode.entered_s(SUCCESS) or decode.now_s
    for name, where, advice in (
        (SpanName.PEERING, f"until {decode.name} had found and paired with prefill", "pdctl topology"),
        (SpanName.PREALLOC_WAIT, f"until {decode.name} had memory", "add a decode, or give it more --kv-cache-tokens"),
        (SpanName.ALLOCATE, f"until prefill had taken the pages of {decode.name}", "look at the network between them"),
    ):
        stages = [stage for stage in decode.stages(name) if seconds(stage.start) < ended_s]
        yield decode.took_s(stages), where, advice


def _queued_s(case: Case, prefill: Leg) -> float:
    """In prefill's queue. A chunk is noted when it is computed: one that may be under way is no waiting."""
    waits, chunks = prefill.stages(SpanName.COMPUTE_WAIT), prefill.stages(SpanName.CHUNK_COMPUTE)
    if not waits:
        return 0.0
    if waits[-1].HasField("end"):
        ended_s = seconds(waits[-1].end)
    elif chunks:
        ended_s = seconds(chunks[-1].end)
    else:
        view = case.cluster.at(prefill.side.address)
        is_queue = view is not None and view.pool is not None and view.pool.requests_queued > 0
        ended_s = prefill.now_s if is_queue else seconds(waits[0].start)
    return max(ended_s - seconds(waits[0].start) - prefill.took_s(chunks), 0.0)


def prompt_pages(leg: Leg, page_size: int) -> int:
    """Pages of its prompt."""
    return -(-int(number_of(leg.spans.root, "prompt_tokens")) // page_size)
