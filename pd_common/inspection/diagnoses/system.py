"""What is wrong with processes, and between them, whatever rooms there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pd.v1 import inspection_pb2

from pd_common.errors import PermissionDenied
from pd_common.inspection.diagnoses.finding import Finding, Kind, Severity
from pd_common.inspection.diagnoses.meeting import not_registered
from pd_common.inspection.diagnoses.reading import Case, seconds
from pd_common.inspection.views import ROLE_OF, ClusterView, ProcessView, instance_of
from pd_common.types import Role

_CLOCKS_S = 0.1
"""Hosts that keep time together are within some ms; by more than this a timeline of two hosts says nothing."""
_CANARY_S = 30.0
"""When no page has come for 10 s decode asks for a canary: three of them are missing by then."""


@dataclass(frozen=True, slots=True)
class System:
    """All that was found: processes, and the rooms that were looked at."""

    cluster: ClusterView
    cases: tuple[Case, ...]
    patience_s: float


def unreachable(system: System) -> Finding | None:
    """A process does not answer us, or the router."""
    silent = {view.address: view.silence for view in system.cluster.processes if view.trouble is not None}
    for router, worker in _workers(system.cluster):
        if not worker.live:
            words = f"router {router} has lost {ROLE_OF[worker.role]} {worker.control_address}: {worker.trouble}"
            silent.setdefault(worker.control_address, words)
    if not silent:
        return None
    denied = any(isinstance(view.trouble, PermissionDenied) for view in system.cluster.processes)
    return Finding(
        Kind.UNREACHABLE,
        Severity.DOWN,
        "Processes do not answer",
        tuple(silent.values()),
        "It has ended, is stopped, hangs, or cannot be reached at this address"
        + (", or our certificate is not one that may ask." if denied else "."),
        (
            "is it there? ss -ltnp on its host; the last line of its log says why it ended",
            "is it stopped? ps -o pid,stat,cmd shows T: kill -CONT PID",
            "is the address right? pd-router --prefill and --decode, --advertise-host of the process",
        ),
    )


def no_route(system: System) -> Finding | None:
    """No real room has gone through."""
    routes = [
        (view.address, route) for view in system.cluster.processes if view.process for route in view.process.routes
    ]
    down = {worker.control_address for _, worker in _workers(system.cluster) if not worker.live}
    unproven = [(router, route) for router, route in routes if not route.proven]
    none_left = len(unproven) == len(routes)
    told = [each for each in unproven if none_left or not {each[1].prefill_address, each[1].decode_address} & down]
    if not told:
        return None
    return Finding(
        Kind.NO_ROUTE,
        Severity.DOWN if none_left else Severity.STUCK,
        "No route is usable: requests are refused with 503" if none_left else "Some routes are not usable",
        tuple(f"router {router}: {_name(route)}: {route.trouble}" for router, route in told),
        "A router uses a route only after a real room has gone through it since its workers came up.",
        (
            "what the probe has met is said above, and in the router's log; it is tried again",
            "pdctl topology    # who is connected, paired and registered",
        ),
    )


def ranks_missing(system: System) -> Finding | None:
    """A prefill that no directory names, and whose own is not complete."""
    prefills = system.cluster.of_role(Role.PREFILL)
    named = {rank.instance.instance_id for view in prefills if view.topology for rank in view.topology.ranks}
    missing = [view for view in prefills if view.topology_trouble and instance_of(view) not in named]
    troubles = [view for view in missing if not isinstance(view.topology_trouble, PermissionDenied)]
    if not troubles:
        return None
    return not_registered(tuple(f"directory of prefill {view.address}: {_message(view)}" for view in troubles))


def clocks_differ(system: System) -> Finding | None:
    """Hosts whose clocks are apart; what a call takes is no difference."""
    clocks = {f"{view.role} {view.address}": view.clock for view in system.cluster.processes if view.clock is not None}
    apart = {name: clock for name, clock in clocks.items() if abs(clock.ahead_s) - clock.round_trip_s / 2 > _CLOCKS_S}
    if not apart:
        return None
    return Finding(
        Kind.CLOCKS_DIFFER,
        Severity.NOTE,
        "Clocks differ",
        tuple(
            f"{name} is {abs(clock.ahead_s):.3f} s {'ahead of' if clock.ahead_s > 0 else 'behind'} this host "
            f"(exact to {500 * clock.round_trip_s:.1f} ms)"
            for name, clock in apart.items()
        ),
        "Handing over needs no common clock, but timelines of several hosts are laid side by side by it, and "
        "tickets and certificates are valid by it.",
        ("chronyc tracking, or timedatectl, on each host: let all follow the same time server",),
    )


def canary_old(system: System) -> Finding | None:
    """A pairing through which nothing has come for long: neither a canary nor a room."""
    told = tuple(_old_canaries(system))
    if not told:
        return None
    return Finding(
        Kind.CANARY_OLD,
        Severity.STUCK,
        "Nothing shows that pages still go through",
        told,
        "When no page has come for 10 s decode has prefill write one of known content; that call is not answered.",
        (
            "from decode's host: grpcurl -plaintext PREFILL grpc.health.v1.Health/Check",
            "is prefill stopped, or busy with something that holds its event loop? its log says",
        ),
    )


def _old_canaries(system: System) -> Iterator[str]:
    for view in system.cluster.of_role(Role.DECODE):
        now_s = 0.0 if view.process is None else seconds(view.process.now)
        for peer in view.peers:
            came_s = [seconds(peer.canary_time if peer.HasField("canary_time") else peer.since)]
            came_s += [
                seconds(step.time)
                for case in system.cases
                if case.decode is not None and case.decode.transfer.peer == peer.instance
                for step in case.decode.transfer.timeline
            ]
            if now_s - max(came_s) > _CANARY_S:
                yield (
                    f"decode {view.address} from prefill {peer.control_address} by {peer.carrier}: "
                    f"the last sign is {now_s - max(came_s):.0f} s old"
                )


def _workers(cluster: ClusterView) -> Iterator[tuple[str, inspection_pb2.Worker]]:
    """What each router says of its workers."""
    for view in cluster.of_role(Role.ROUTER):
        if view.process is not None:
            for worker in view.process.workers:
                yield view.address, worker


def _name(route: inspection_pb2.Route) -> str:
    decode = f"decode {route.decode_address}"
    return f"prefill {route.prefill_address} with {decode}" if route.prefill_address else f"{decode} alone"


def _message(view: ProcessView) -> str:
    return "" if view.topology_trouble is None else view.topology_trouble.message
