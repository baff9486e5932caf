"""What the bench of the control plane found, as a person reads it and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pd_common.cli.bench.machine import Machine


@dataclass(frozen=True, slots=True)
class Latency:
    """How long something took, in milliseconds."""

    p50_ms: float
    p99_ms: float
    worst_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        ordered = sorted(seconds)
        return cls(*(round(1e3 * _quantile(ordered, share), 2) for share in (0.5, 0.99, 1.0)))


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rooms back to back: how many a second, what one costs each process, and how long one takes among the others.

    A room takes from sending both legs until both sides have told their end.
    """

    rooms: int
    at_once: int
    rooms_per_s: float
    prefill_cpu_ms: float
    decode_cpu_ms: float
    client_cpu_ms: float
    latency: Latency


@dataclass(frozen=True, slots=True)
class Peers:
    """Simulated decode processes on one prefill."""

    peers: int
    join_s: float
    """Until all of them were paired."""
    lost: int
    """Pairings that did not last."""
    kib_per_peer: float
    """Growth of the prefill's resident memory."""
    beats_cpu_share: float
    """Processor time of the prefill per second while nothing happens but beats."""
    room_ms: Latency
    """Offers of all peers, sent one after the other: how long each takes until it is answered."""


@dataclass(frozen=True, slots=True)
class Result:
    """Everything."""

    machine: Machine
    first_contact_ms: float
    """The first room of a pair that has never met, less the median of the later ones."""
    throughput: Throughput
    rate_per_s: float
    handshake: Latency
    """At that rate, from sending both legs until prefill has the request and decode's pages for it."""
    whole: Latency
    """At that rate, until both sides have told their end."""
    peers: Peers

    def write_json(self, path: Path) -> None:
        """One object with the fields of this class."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def lines(self) -> list[str]:
        """For a person."""
        busy, peers = self.throughput, self.peers
        cpu_ms = (busy.prefill_cpu_ms, busy.decode_cpu_ms, busy.client_cpu_ms)
        cpu = "prefill {:.2f}, decode {:.2f}, this client {:.2f} ms".format(*cpu_ms)
        memory = f"{peers.kib_per_peer:.0f} KiB of memory each"
        beats = f"beats take {100 * peers.beats_cpu_share:.1f} % of a core"
        return [
            str(self.machine),
            "",
            "one pair, whole rooms: both legs, pages offered, success agreed, both ends told; no pages move",
            f"  {f'back to back, {busy.at_once} at once':28} {_shown(busy.latency)}   {busy.rooms_per_s:.0f} rooms/s",
            f"  {f'at {self.rate_per_s:g} rooms/s, whole room':28} {_shown(self.whole)}",
            f"  {'  of this, the handshake':28} {_shown(self.handshake)}",
            f"  processor time for a room    {cpu}",
            f"  first contact of a new pair  {self.first_contact_ms:.1f} ms",
            "",
            f"{peers.peers} simulated decodes on one prefill",
            f"  paired in {peers.join_s:.2f} s, {peers.lost} lost; {memory}; {beats}",
            f"  {'an offer is answered in':28} {_shown(peers.room_ms)}",
        ]


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def _shown(latency: Latency) -> str:
    return f"p50 {latency.p50_ms:7.2f} ms   p99 {latency.p99_ms:7.2f} ms   worst {latency.worst_ms:7.2f} ms"
