"""As test_diagnosis.py, for what concerns processes, memory and queues rather than single rooms."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from pd.v1 import inspection_pb2, transfer_status_pb2

from pd_common.control import convert
from pd_common.errors import PeerLost
from pd_common.inspection.diagnoses.finding import Finding, Kind, Severity, grouped
from pd_common.inspection.views import Clock, ClusterView
from pd_common.telemetry.spans import SpanName
from pd_common.types import BootstrapRoom, Role
from tests.inspection.hand_made import (
    DECODE,
    PREFILL,
    before,
    found,
    instance,
    lasting,
    peer,
    pool,
    process,
    room_of,
    side,
    sound,
    span,
    topology,
)

TRANSFERRING, FAILED, BOOTSTRAPPING, WAITING = 3, 5, 1, 2
ON_ITS_WAY = (BOOTSTRAPPING, 60.0), (WAITING, 60.0), (TRANSFERRING, 59.0)


def worker(
    address: str, *, live: bool = True, queued: int = 0, most: int = 8, wait_s: float = 0.0
) -> inspection_pb2.Worker:
    role = convert.role_to(Role.PREFILL if address == PREFILL else Role.DECODE)
    trouble = "" if live else "no beat for 2.5 s"
    return inspection_pb2.Worker(
        role=role, control_address=address, live=live, trouble=trouble,
        queued=queued, max_queued=most, oldest_wait=lasting(wait_s),
    )  # fmt: skip


def route(*, proven: bool = True, prefill: str = PREFILL) -> inspection_pb2.Route:
    trouble = "" if proven else "the probe failed: no page comes"
    return inspection_pb2.Route(prefill_address=prefill, decode_address=DECODE, proven=proven, trouble=trouble)


def behind_a_router(*workers: inspection_pb2.Worker, routes: Iterable[inspection_pb2.Route] = ()) -> ClusterView:
    return sound(process(Role.ROUTER, workers=workers, routes=routes))


def test_a_worker_that_is_lost_is_told_once_whoever_says_so() -> None:
    silent = process(Role.PREFILL, trouble=PeerLost("prefill:8998: nothing came within 2 s"))
    cluster = sound(process(Role.ROUTER, workers=[worker(PREFILL, live=False)]), silent)
    assert found(cluster)[Kind.UNREACHABLE].seen == (f"prefill {PREFILL} does not answer: nothing came within 2 s",)


def test_no_route_at_all_is_worse_than_one_that_is_not_proven() -> None:
    one = behind_a_router(routes=[route(proven=False)])
    some = behind_a_router(routes=[route(), route(proven=False, prefill="prefill:9998")])
    assert found(one)[Kind.NO_ROUTE].severity is Severity.DOWN
    assert "the probe failed: no page comes" in found(one)[Kind.NO_ROUTE].seen[0]
    assert found(some)[Kind.NO_ROUTE].severity is Severity.STUCK


def test_probes_that_failed_before_a_route_was_proven_are_history() -> None:
    lost = PeerLost("not there yet")
    at_decode = side(Role.DECODE, [(BOOTSTRAPPING, 9.0), (FAILED, 8.9)], failure=lost, rid="probe")
    for proven in (True, False):
        cluster = behind_a_router(routes=[route(proven=proven)])
        assert (Kind.TRANSFER_BROKEN in found(cluster, room_of(cluster, at_decode))) is not proven


def test_a_queue_is_full_or_long_or_neither() -> None:
    assert found(behind_a_router(worker(DECODE, queued=3, wait_s=1.0))) == {}
    long = found(behind_a_router(worker(DECODE, queued=3, wait_s=9.0)))[Kind.QUEUE]
    full = found(behind_a_router(worker(DECODE, queued=8, wait_s=1.0)))[Kind.QUEUE]
    assert (long.severity, full.severity) == (Severity.SLOW, Severity.FAILED)
    assert long.seen[0].startswith(f"decode {DECODE}: 3 of at most 8 requests wait, the first for 9.0 s")


def test_memory_that_stalled_rooms_keep_is_told_when_it_is_much() -> None:
    stages = span(SpanName.CHUNK_COMPUTE, 60, 40), span(SpanName.COMPUTE_WAIT, 60.0)
    for prompt_tokens, is_much in ((16 * 30, True), (16 * 3, False)):
        at_prefill = side(Role.PREFILL, ON_ITS_WAY, *stages, prompt_tokens=prompt_tokens, peer_at=DECODE)
        cluster = sound(process(Role.PREFILL, pool=pool(100, 60, requests_queued=4), topology=topology(PREFILL)))
        findings = found(cluster, room_of(cluster, at_prefill, side(Role.DECODE, ON_ITS_WAY, peer_at=PREFILL)))
        assert (Kind.PREFILL_MEMORY in findings) is is_much
    at_prefill = side(Role.PREFILL, ON_ITS_WAY, *stages, prompt_tokens=16 * 30, peer_at=DECODE)
    finding = found(cluster, room_of(cluster, at_prefill))[Kind.PREFILL_MEMORY]
    assert "40 of 100 pages in use, about 30 of them" in finding.seen[0]


def test_what_is_missing_for_pages_in_quarantine_is_said_in_words() -> None:
    writer = transfer_status_pb2.QuarantineWriter(
        instance=instance(PREFILL), address=PREFILL, missing=[transfer_status_pb2.QUIET_PROOF_PROCESS_GONE]
    )
    for ago_s, is_old in ((20.0, True), (1.0, False)):
        held = transfer_status_pb2.QuarantinedRoom(
            bootstrap_room=7, page_ids=range(9), since=before(ago_s), writers=[writer]
        )
        findings = found(sound(process(Role.DECODE, pool=pool(), quarantine=(held,), peers=(peer(),))))
        assert (Kind.QUARANTINE in findings) is is_old
        if is_old:
            assert f"decode {DECODE}: room 7 keeps 9 pages for 20.0 s" in findings[Kind.QUARANTINE].seen


@pytest.mark.parametrize(
    ("clock", "apart"),
    [(Clock(0.5, 0.01), True), (Clock(-0.5, 0.01), True), (Clock(0.05, 0.01), False), (Clock(0.5, 2.0), False)],
)
def test_a_clock_is_only_said_to_be_apart_by_more_than_asking_took(clock: Clock, apart: bool) -> None:
    cluster = sound(process(Role.DECODE, pool=pool(), peers=(peer(),), clock=clock))
    assert (Kind.CLOCKS_DIFFER in found(cluster)) is apart


def test_the_worst_comes_first_and_the_same_is_said_once() -> None:
    def finding(kind: Kind, severity: Severity, room: int) -> Finding:
        return Finding(kind, severity, kind.value, (f"room {room}",), "why", ("do",), (BootstrapRoom(room),))

    many = [finding(Kind.SLOW_WRITES, Severity.SLOW, room) for room in range(1, 9)]
    worst, slow = grouped([*many, finding(Kind.WRONG_DATA, Severity.WRONG_DATA, 9)])
    assert (worst.kind, slow.kind) == (Kind.WRONG_DATA, Kind.SLOW_WRITES)
    assert slow.rooms == tuple(range(1, 9))
    assert re.fullmatch(r"the same of 3 more rooms: 6, 7, 8", slow.seen[-1])
