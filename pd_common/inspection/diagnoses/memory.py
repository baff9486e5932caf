"""Memory that does not come back, and queues that are too long."""

from __future__ import annotations

from collections.abc import Iterator

from pd.v1 import inspection_pb2, transfer_status_pb2

from pd_common.inspection.diagnoses.finding import Finding, Kind, Severity
from pd_common.inspection.diagnoses.meeting import prompt_pages
from pd_common.inspection.diagnoses.moving import unwritten_since_s
from pd_common.inspection.diagnoses.reading import FAILED, Leg, seconds
from pd_common.inspection.diagnoses.system import System
from pd_common.inspection.views import ROLE_OF, ProcessView
from pd_common.telemetry.spans import SpanName
from pd_common.types import BootstrapRoom, Role

_PROOF = {
    transfer_status_pb2.QUIET_PROOF_FENCED: "is decode's port for it torn down",
    transfer_status_pb2.QUIET_PROOF_PROCESS_GONE: "has its process ended",
}
"""What is still to be shown, in words."""
_LARGE_SHARE = 0.25
"""Of prefill's pages: what stalled rooms hold below that hurts nobody yet."""


def prefill_memory(system: System) -> Finding | None:
    """Pages of rooms whose transfers do not end, and which therefore do not come back."""
    told: list[str] = []
    rooms: list[BootstrapRoom] = []
    for view in system.cluster.of_role(Role.PREFILL):
        held = [(leg, for_s) for leg, for_s in _held(system, view) if for_s >= system.patience_s]
        pages = sum(prompt_pages(leg, _page_size(system, view)) for leg, _ in held)
        if view.pool is None or not held or pages < _LARGE_SHARE * view.pool.pages_total:
            continue
        used = view.pool.pages_total - view.pool.pages_free - view.pool.pages_cached
        told.append(
            f"prefill {view.address}: {used} of {view.pool.pages_total} pages in use, about {pages} of them by rooms "
            f"that do not end; requests that wait: {view.pool.requests_queued}"
        )
        told += [f"room {leg.room}: {leg.state_in_words} for {for_s:.1f} s" for leg, for_s in held]
        rooms += [leg.room for leg, _ in held]
    if not told:
        return None
    return Finding(
        Kind.PREFILL_MEMORY,
        Severity.STUCK,
        "Prefill's memory does not come back",
        tuple(told),
        "Prefill keeps a room's pages until decode has confirmed them, or its last write has ended: no earlier, for "
        "they are still being read.",
        (
            "why these rooms do not end is said by their own findings",
            *(f"pdctl abort {room}" for room in rooms[:3]),
            "a shorter --waiting-timeout ends such rooms earlier by themselves",
        ),
        tuple(rooms),
    )


def quarantine(system: System) -> Finding | None:
    """Pages that a writer may still write into."""
    told: list[str] = []
    rooms: list[BootstrapRoom] = []
    for view in system.cluster.of_role(Role.DECODE):
        now_s = 0.0 if view.process is None else seconds(view.process.now)
        for held in view.quarantine:
            if now_s - seconds(held.since) >= system.patience_s:
                told += _kept(view.address, held, now_s)
                rooms.append(BootstrapRoom(held.bootstrap_room))
    if not told:
        return None
    return Finding(
        Kind.QUARANTINE,
        Severity.STUCK,
        "Pages in quarantine are not proven quiet",
        tuple(told),
        "Pages of a failed room are used again only when nobody can write into them any more; no time proves that.",
        (
            "the writer is stopped? kill -CONT PID: it says that it is quiet, and all of it is free at once",
            "the writer hangs? end its process; on decode's host that is the proof, together with the torn-down port",
            "the writer cannot be reached? let its gRPC port be reached from decode, or restart that decode",
        ),
        tuple(rooms),
    )


def long_queue(system: System) -> Finding | None:
    """Requests that wait, as the routers see it."""
    workers = {
        worker.control_address: worker
        for view in system.cluster.of_role(Role.ROUTER)
        if view.process is not None
        for worker in view.process.workers
    }
    told = [_waits(worker) for worker in workers.values() if _is_long(worker, system.patience_s)]
    if not told:
        return None
    full = any(_is_full(worker) for worker in workers.values())
    return Finding(
        Kind.QUEUE,
        Severity.FAILED if full else Severity.SLOW,
        "A queue is full" if full else "Requests wait long for their turn",
        tuple(told),
        "More comes than can be served: "
        + ("one more is refused with 429." if full else "a queue grows before it is full."),
        (
            "send less, or add a process of the kind that is named (pdctl plan says how many)",
            "memory: a larger --kv-cache-tokens; places: a larger --max-running-requests",
            "prompts that are short: pd-router --disaggregation-min-prompt-tokens lets decode serve them alone",
        ),
    )


def _held(system: System, view: ProcessView) -> Iterator[tuple[Leg, float]]:
    """Rooms there whose pages wait for a write or for decode's word, and for how long."""
    for case in system.cases:
        leg = case.prefill
        if leg is None or leg.side.address != view.address or not leg.has_request:
            continue
        outlives = leg.state == FAILED and bool(leg.side.legs) and not leg.spans.root.HasField("end")
        if outlives:
            yield leg, leg.in_state_s
        elif leg.is_live:
            since_s = unwritten_since_s(leg)
            commit = leg.resting if leg.rests_in(SpanName.COMMIT) else None
            if since_s is not None or commit is not None:
                yield leg, leg.now_s - (since_s or seconds((commit or inspection_pb2.Span()).start))


def _page_size(system: System, view: ProcessView) -> int:
    ranks = (rank for each in system.cluster.processes if each.topology for rank in each.topology.ranks)
    return next((rank.layout.page_size for rank in ranks if rank.control_address == view.address), 16)


def _kept(address: str, held: transfer_status_pb2.QuarantinedRoom, now_s: float) -> Iterator[str]:
    age_s = now_s - seconds(held.since)
    yield f"decode {address}: room {held.bootstrap_room} keeps {len(held.page_ids)} pages for {age_s:.1f} s"
    for writer in held.writers:
        missing = " and ".join(_PROOF[proof] for proof in writer.missing)
        writer_name = f"{writer.instance.instance_id} at {writer.address}"
        yield f"room {held.bootstrap_room}: {writer_name} has not said that it is quiet, nor {missing}"


def _is_full(worker: inspection_pb2.Worker) -> bool:
    return 0 < worker.max_queued <= worker.queued


def _is_long(worker: inspection_pb2.Worker, patience_s: float) -> bool:
    return _is_full(worker) or _wait_s(worker) >= patience_s


def _wait_s(worker: inspection_pb2.Worker) -> float:
    """How long the first in its queue has waited."""
    return worker.oldest_wait.ToNanoseconds() / 1e9


def _waits(worker: inspection_pb2.Worker) -> str:
    most = f" of at most {worker.max_queued}" if worker.max_queued else ""
    return (
        f"{ROLE_OF[worker.role]} {worker.control_address}: {worker.queued}{most} requests wait, the first for "
        f"{_wait_s(worker):.1f} s; {worker.pages_available} of {worker.pages_total} pages to be had"
    )
