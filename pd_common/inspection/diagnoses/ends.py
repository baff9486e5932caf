"""Rooms that have failed, by what the two sides say of it."""

from __future__ import annotations

from pd_common.errors import Reason
from pd_common.inspection.diagnoses.finding import Finding, Kind, Severity
from pd_common.inspection.diagnoses.reading import Case, Leg
from pd_common.inspection.views import ClusterView

_BY_WISH = frozenset({Reason.ROOM_ABORTED, Reason.CLIENT_CANCELLED})

_MAKE_ALIKE = {
    "page_size": "start both with the same --page-size",
    "dtype": "start both with the same --dtype",
    "model": "start both with the same --model: configuration, tokenizer and weights must be the same files",
    "transfer_backend": "start both with the same --transfer-backend",
    "software_version": "run the same version of pd-handoff on both sides",
    "metadata_schema": "run the same version of pd-handoff on both sides",
    "position": "start prefill and decode with one tensor-parallel rank and one pipeline stage each",
}
"""What to do by the field that differs."""

_ADVICE = {
    Reason.PERMISSION_DENIED: "give the room's ticket (pdctl ticket ROOM), and each process a certificate of its role",
    Reason.PROMPT_MISMATCH: "send the same token ids to both sides: tokenise once, or let pd-router do it",
    Reason.ROOM_IN_USE: "take a new bootstrap_room for every request: an ended one stays taken for --room-retention",
    Reason.STALE_INSTANCE: "a process was restarted: new rooms meet the new one; if not, pdctl topology",
    Reason.SHUTTING_DOWN: "the process was told to stop; send requests elsewhere until it is back",
    Reason.INTERNAL: "a defect of this software: keep the log of that process around this time",
}


def wrong_data(case: Case) -> Finding | None:
    """What lies in decode's memory is not what prefill has sent."""
    failure = case.failure(Reason.METADATA_INVALID, Reason.DIGEST_MISMATCH)
    if failure is None:
        return None
    is_slot = failure.reason is Reason.METADATA_INVALID
    facts = ", ".join(f"{name} {value}" for name, value in failure.metadata.items())
    return Finding(
        Kind.WRONG_DATA,
        Severity.WRONG_DATA,
        "The metadata slot is not this room's" if is_slot else "Pages arrived changed",
        (*case.in_words, f"room {case.room}: {facts}"),
        "The row that carries the first token holds another room, an earlier owner's words, or not the whole prompt: a "
        "writer that should be quiet is not, or the last write became visible out of order."
        if is_slot
        else "The digest of what arrived is not that of what was sent: memory, device or link changed bytes, or "
        "something else writes into these pages.",
        (
            "nothing wrong was answered: the room ended with DATA_LOSS, and can be sent again",
            "if it comes again: take another way (--ib-device, UCX_TLS=tcp), and keep the logs of both sides",
            "keep --digest on until it is found",
        ),
        (case.room,),
    )


def layouts_differ(case: Case) -> Finding | None:
    """The pools cannot be paired."""
    failure = case.failure(Reason.LAYOUT_MISMATCH)
    if failure is None:
        return None
    facts = failure.metadata
    field = facts.get("field", "?")
    return Finding(
        Kind.LAYOUTS_DIFFER,
        Severity.DOWN,
        f"Prefill and decode do not fit together: {field}",
        (f"room {case.room}: {failure.message}", f"{field}: {facts.get('mine')} here, {facts.get('theirs')} there"),
        "Pages travel as they are. Pools that differ in page size, type, model or number of ranks are refused "
        "at the handshake; nothing is cut by heads or converted on the way.",
        (_MAKE_ALIKE.get(field, f"make {field} the same on both sides"), "pdctl topology    # the layout of each"),
        (case.room,),
    )


def aborted(case: Case) -> Finding | None:
    """Somebody wanted it to end."""
    legs = [leg for leg in (case.router, *case.legs) if leg is not None and leg.reason is not None]
    if not legs or not {leg.reason for leg in legs} <= _BY_WISH:
        return None
    first = min(legs, key=lambda leg: _ended_s(leg, case.cluster))
    gone = [leg for leg in legs if leg.reason is Reason.CLIENT_CANCELLED]
    if gone:
        who = f"the client went away: {gone[0].name} saw its call end"
    elif first is case.router:
        who = f"it was aborted at {first.name}: /abort_request, or AbortRoom by hand"
    else:
        who = f"it was aborted at {first.name}: AbortRoom by hand"
    rids = dict.fromkeys(leg.transfer.rid for leg in case.legs if leg.transfer.rid)
    return Finding(
        Kind.ABORTED,
        Severity.NOTE,
        "Rooms were aborted, not broken",
        (*case.in_words, f"room {case.room}: {who}", f"room {case.room}: rid {', '.join(rids) or 'unknown'}"),
        "Both sides ended it because somebody asked for that; whoever is told first tells the other.",
        ("look for the rid in the client's log: a timeout there, a closed tab, a stop button",),
        (case.room,),
    )


def refused(case: Case) -> Finding | None:
    """There was no place for it."""
    failure = case.failure(Reason.CAPACITY)
    if failure is None:
        return None
    return Finding(
        Kind.QUEUE,
        Severity.FAILED,
        "Requests are refused because too many wait",
        case.in_words,
        "Every process keeps at most --max-queued-requests waiting, and none longer than --queue-timeout: 429.",
        (
            "send less, or come back after Retry-After; more urgent requests may say so (priority)",
            "add a process of the kind that is full (pdctl plan says how many), or give it more --kv-cache-tokens",
        ),
        (case.room,),
    )


def otherwise_failed(case: Case) -> Finding | None:
    """For what no other diagnosis knows."""
    if not case.reasons:
        return None
    reasons = sorted(case.reasons)
    return Finding(
        Kind.FAILED,
        Severity.FAILED,
        f"Rooms failed with {', '.join(reasons)}",
        case.in_words,
        "No known pattern: what the sides say is all that there is.",
        (
            *(_ADVICE[reason].replace("ROOM", str(case.room)) for reason in reasons if reason in _ADVICE),
            f"pdctl room {case.room}; then the logs of both sides: every line of a room names it",
        ),
        (case.room,),
    )


def _ended_s(leg: Leg, cluster: ClusterView) -> float:
    """By our own clock, so that the ends on different hosts can be compared."""
    view = cluster.at(leg.side.address)
    end = leg.transfer.timeline[-1].time if leg.transfer.timeline else leg.spans.root.end
    return (end.ToNanoseconds() if view is None else view.ours_ns(end)) / 1e9
