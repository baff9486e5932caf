"""Rooms whose pages move, or should: stalled, broken off, slow, in too many pieces."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from pd.v1 import inspection_pb2, transfer_status_pb2, types_pb2

from pd_common.errors import Reason
from pd_common.inspection.diagnoses.finding import Finding, Kind, Severity
from pd_common.inspection.diagnoses.reading import TRANSFERRING, Case, Leg, leg_of, number_of, seconds
from pd_common.inspection.views import ClusterView, instance_of
from pd_common.telemetry.spans import SpanName
from pd_common.types import Role

_SLACK_S = 0.05
"""Between a state's time and the stage that goes with it: they are taken from two clocks of one process."""
_SLOWER = 5.0
"""Times as long for a page as elsewhere: the speed of a sound link differs by two or three from room to room."""
_ENOUGH_ROOMS = 3
"""To compare with: fewer may all be odd."""
_ENOUGH_S = 1.0
"""Of writing, in one room: less may be a moment in which a machine had other things to do."""
_SMALL_PIECE_BYTES = 64 * 1024
"""Pieces below this move at about half of what a link can do (docs/data-plane.md); larger ones lose little."""
_MANY_TIMES = 4.0
"""As many pieces as consecutive pages would need."""
_ENOUGH_PAGES = 16
"""In one room: below that there is little to lose."""
_ROW_PUTS = 2
"""The metadata row goes with the last chunk: its body, then its seal."""

_BROKEN = frozenset({Reason.PEER_LOST, Reason.TRANSFER_FAILED})

_LINK = (
    "pdctl topology    # carrier and canary of each pairing: does it go by the device that you expect?",
    "the link itself: ip -s link, ibstat, dmesg; --ib-device and UCX_TLS choose another way",
)


def stalled(case: Case) -> Finding | None:
    """A write was begun that does not end, or all is written and decode does not answer."""
    prefill = case.prefill
    if prefill is None or not (prefill.is_live or prefill.reason is Reason.DEADLINE):
        return None
    since_s, ended_s = unwritten_since_s(prefill), prefill.now_s if prefill.is_live else prefill.changed_s
    is_written = since_s is None and prefill.rests_in(SpanName.COMMIT)
    if is_written:
        since_s = max(seconds(write.end) for write in prefill.stages(SpanName.CHUNK_TRANSFER))
    if since_s is None or (ended_s - since_s < case.patience_s and prefill.is_live):
        return None
    what = "everything is written, and decode has not answered" if is_written else "a write has not ended"
    return Finding(
        Kind.TRANSFER_STALLED,
        Severity.STUCK if prefill.is_live else Severity.FAILED,
        "Decode does not confirm what was written" if is_written else "Pages have stopped moving",
        (*case.in_words, f"room {case.room}: {what} for {ended_s - since_s:.1f} s", *_ways(case)),
        "Decode is frozen, overloaded, or its gRPC port cannot be reached from prefill."
        if is_written
        else "A write becomes visible in milliseconds: the link, the device or the other process stands still.",
        (*_LINK, "is the other process stopped? kill -CONT PID", f"pdctl abort {case.room}    # gives its pages back"),
        (case.room,),
    )


def peer_lost(case: Case) -> Finding | None:
    """The process on the other side is gone."""
    gone = _gone(case)
    if not (gone and case.reasons & _BROKEN):
        return None
    return Finding(
        Kind.PEER_LOST,
        Severity.FAILED,
        "Rooms failed because a process went away",
        (*case.in_words, *(f"room {case.room}: {who} does not answer any more" for who in gone)),
        "A process ended or was stopped: its rooms fail at once, others go on.",
        (
            "the last line of its log says why it ended; dmesg tells of the kernel's out-of-memory killer",
            "is it stopped? ps -o pid,stat,cmd shows T: kill -CONT PID",
        ),
        (case.room,),
    )


def pairing_broke(case: Case) -> Finding | None:
    """A write failed, or one side heard nothing of the other for a while."""
    if not case.reasons & _BROKEN:
        return None
    return Finding(
        Kind.TRANSFER_BROKEN,
        Severity.FAILED,
        "Pairings break though both processes run",
        (*case.in_words, *_ways(case)),
        "The data plane reported an error, or no beat came for 2.5 s. The rooms of that pairing fail; others go on.",
        (*_LINK, "no beat: look for SIGSTOP, a paused machine, packet loss, a processor without a free core"),
        (case.room,),
    )


def overdue(case: Case) -> Finding | None:
    """Its time was over, and nothing else is known of it."""
    if case.failure(Reason.DEADLINE) is None:
        return None
    return Finding(
        Kind.DEADLINE,
        Severity.FAILED,
        "Rooms were given up for time",
        (*case.in_words, *_ways(case)),
        "The request's timeout, --bootstrap-timeout or --waiting-timeout was over before the room had come through.",
        (f"pdctl trace {case.room}    # what took the time", "give requests a longer timeout, if all of it was needed"),
        (case.room,),
    )


def fragmented(case: Case) -> Finding | None:
    """Its pages lie so far apart that each is written by itself."""
    prefill = case.prefill
    if prefill is None:
        return None
    writes = prefill.stages(SpanName.CHUNK_TRANSFER)
    pages = sum(number_of(write, "pages") for write in writes)
    pieces = max(sum(number_of(write, "descriptors") for write in writes) - _ROW_PUTS, 0.0)
    buffers = _buffers(case.cluster, prefill)
    needed = buffers * len([write for write in writes if number_of(write, "pages")])
    if pages < _ENOUGH_PAGES or pieces < _MANY_TIMES * needed:
        return None
    piece_bytes = sum(number_of(write, "bytes") for write in writes) / pieces
    if piece_bytes >= _SMALL_PIECE_BYTES:
        return None
    return Finding(
        Kind.FRAGMENTED,
        Severity.SLOW,
        "Pages are written in many small pieces",
        (
            f"room {case.room}: {pages:.0f} pages, {pieces:.0f} writes of {piece_bytes / 1024:.1f} KiB",
            f"room {case.room}: in {len(writes)} chunks of consecutive pages it would be {needed} writes",
            f"room {case.room}: {pages * buffers / pieces:.1f} pages in a row on the average",
        ),
        "Only pages that are consecutive on both sides are one write. Long runs get rare when the pool is nearly full "
        "and rooms of very different length come and go.",
        (
            "a larger --kv-cache-tokens on the side whose pool is fuller (pdctl topology): more of it lies together",
            "a larger --page-size on both sides: each piece is larger by as much",
            "a larger --chunked-prefill-size on prefill: fewer chunks, so fewer pieces",
        ),
        (case.room,),
    )


def slow(case: Case) -> Finding | None:
    """Its pages took much longer than those of other rooms, or than the canary between the same two."""
    prefill = case.prefill
    if prefill is None:
        return None
    writes = prefill.stages(SpanName.CHUNK_TRANSFER)
    writing_s, pages = prefill.took_s(writes), sum(number_of(write, "pages") for write in writes)
    if writing_s < _ENOUGH_S or not pages:
        return None
    page_s, seen = writing_s / pages, []
    others = sorted(_page_times_s(case))
    if len(others) >= _ENOUGH_ROOMS and page_s > _SLOWER * median(others):
        seen.append(f"{len(others)} other rooms: {1000 * median(others):.2f} ms a page")
    canary_s = min((_canary_s(peer) for peer in _peers(case)), default=0.0)
    if canary_s and page_s > _SLOWER * canary_s:
        seen.append(f"the last canary between the two: {1000 * canary_s:.2f} ms for its page")
    if not seen:
        return None
    speed = sum(number_of(write, "bytes") for write in writes) / writing_s / 1e9
    took = f"room {case.room}: {1000 * page_s:.2f} ms a page, {speed:.3f} GB/s by {_carrier(writes)}"
    return Finding(
        Kind.SLOW_WRITES,
        Severity.SLOW,
        "Pages of some rooms move slowly",
        (took, *seen),
        "The link was shared with something else, lost packets, or the machines had no time for it.",
        (*_LINK, "is the processor busy? top; pd-prefill and pd-decode need a core beside --threads"),
        (case.room,),
    )


def unwritten_since_s(prefill: Leg) -> float | None:
    """When the write began that has not ended, or was last due; None if nothing is to be written now.

    A write is noted when it has ended. It is due when a chunk is computed, and when the commit begins.
    """
    if prefill.state != TRANSFERRING and prefill.entered_s(TRANSFERRING) is None:
        return None
    begun_s = [seconds(write.start) for write in prefill.stages(SpanName.CHUNK_TRANSFER)]
    due_s = [seconds(chunk.end) for chunk in prefill.stages(SpanName.CHUNK_COMPUTE)]
    due_s += [seconds(commit.start) for commit in prefill.stages(SpanName.COMMIT)]
    first_s = prefill.entered_s(TRANSFERRING)
    due_s += [] if first_s is None else [first_s - _SLACK_S]
    last_s = max(begun_s, default=0.0)
    return min((due for due in due_s if due > last_s), default=None)


def _gone(case: Case) -> list[str]:
    """The room's other processes that do not answer; where it has named none, all that do not."""
    named = [leg for leg in case.legs if leg.transfer.peer.instance_id]
    if named:
        return [leg.transfer.peer.instance_id for leg in named if _is_nobody(case.cluster, leg)]
    return [f"{view.role} {view.address}" for view in case.cluster.processes if view.trouble is not None]


def _is_nobody(cluster: ClusterView, leg: Leg) -> bool:
    others = cluster.of_role(Role.DECODE if leg.side.role is Role.PREFILL else Role.PREFILL)
    return bool(others) and all(instance_of(view) != leg.transfer.peer.instance_id for view in others)


def _ways(case: Case) -> Iterator[str]:
    """Carrier and canary of the pairing, as decode says."""
    decode = case.decode
    for peer in _peers(case):
        if decode is not None and peer.HasField("canary_time"):
            age_s = decode.now_s - seconds(peer.canary_time)
            took_ms = 1000 * _canary_s(peer)
            yield f"pages travel by {peer.carrier}; the last canary came {age_s:.1f} s ago and took {took_ms:.2f} ms"


def _peers(case: Case) -> list[transfer_status_pb2.Peer]:
    """The room's pairing as decode has it."""
    view = None if case.decode is None else case.cluster.at(case.decode.side.address)
    if view is None or case.decode is None:
        return []
    return [peer for peer in view.peers if peer.instance == case.decode.transfer.peer]


def _canary_s(peer: transfer_status_pb2.Peer) -> float:
    return peer.canary_took.ToNanoseconds() / 1e9


def _page_times_s(case: Case) -> Iterator[float]:
    """Seconds a page of other rooms of the same two processes."""
    if case.prefill is None:
        return
    for view in case.others:
        leg = leg_of(view, Role.PREFILL)
        if leg is None or view.number == case.room or not _same_way(leg.transfer, case.prefill.transfer):
            continue
        writes = leg.stages(SpanName.CHUNK_TRANSFER)
        pages = sum(number_of(write, "pages") for write in writes)
        if pages:
            yield leg.took_s(writes) / pages


def _same_way(one: types_pb2.Transfer, other: types_pb2.Transfer) -> bool:
    return one.role == other.role and one.peer == other.peer


def _carrier(writes: list[inspection_pb2.Span]) -> str:
    return next((write.attributes["carrier"] for write in writes if "carrier" in write.attributes), "?")


def _buffers(cluster: ClusterView, prefill: Leg) -> int:
    """Of the pool: a run of pages takes a write for each."""
    ranks = (rank for view in cluster.processes if view.topology for rank in view.topology.ranks)
    sizes = (len(rank.layout.buffers) for rank in ranks if rank.control_address == prefill.side.address)
    return max(next(sizes, 1), 1)
