"""What a diagnosis says: what is wrong, what was seen, why that is so, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum

from pd_common.types import BootstrapRoom

_SHOWN = 5
"""Of what was seen: what is said of some rooms with the same trouble says enough."""


class Severity(IntEnum):
    """How bad it is; the larger the worse."""

    NOTE = 1
    """Nothing fails of it, but whoever looks should know."""
    SLOW = 2
    """Requests are answered later than they could be."""
    STUCK = 3
    """Something waits that would not wait in a sound system, and may fail."""
    FAILED = 4
    """Requests have failed."""
    DOWN = 5
    """Requests of some kind cannot be served at all."""
    WRONG_DATA = 6
    """What arrived is not what was sent."""


class Kind(StrEnum):
    """Which trouble."""

    ROOM_IDS_DIFFER = "room-ids-differ"
    LEG_MISSING = "leg-missing"
    NOT_REGISTERED = "not-registered"
    PAGES_NOT_OFFERED = "pages-not-offered"
    NO_COPY = "no-copy"
    TRANSFER_STALLED = "transfer-stalled"
    TRANSFER_BROKEN = "transfer-broken"
    PEER_LOST = "peer-lost"
    DEADLINE = "deadline"
    CANARY_OLD = "canary-old"
    SLOW_WRITES = "slow-writes"
    WRONG_DATA = "wrong-data"
    PREFILL_MEMORY = "prefill-memory"
    ABORTED = "aborted"
    FRAGMENTED = "fragmented"
    LAYOUTS_DIFFER = "layouts-differ"
    QUARANTINE = "quarantine"
    QUEUE = "queue"
    UNREACHABLE = "unreachable"
    NO_ROUTE = "no-route"
    CLOCKS_DIFFER = "clocks-differ"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One trouble. `seen` are facts with numbers, `do` are steps in the order in which to try them."""

    kind: Kind
    severity: Severity
    title: str
    seen: tuple[str, ...]
    why: str
    do: tuple[str, ...]
    rooms: tuple[BootstrapRoom, ...] = ()


def grouped(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Those of the same kind and title as one, the most severe first."""
    groups: dict[tuple[Kind, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.kind, finding.title), []).append(finding)
    as_one = [_as_one(alike) for alike in groups.values()]
    return tuple(sorted(as_one, key=lambda finding: -finding.severity))


def _as_one(alike: list[Finding]) -> Finding:
    """The first stands for all."""
    rooms = tuple(dict.fromkeys(room for finding in alike for room in finding.rooms))
    seen = tuple(dict.fromkeys(fact for finding in alike[:_SHOWN] for fact in finding.seen))
    untold = [str(room) for finding in alike[_SHOWN:] for room in finding.rooms]
    if untold:
        seen += (
            f"the same of {len(untold)} more rooms: {', '.join(untold[:_SHOWN])}{' ...' * (len(untold) > _SHOWN)}",
        )
    severity = max(finding.severity for finding in alike)
    return replace(alike[0], severity=severity, seen=seen, rooms=rooms)
