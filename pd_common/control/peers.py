"""The processes that this one is paired with, as the control plane shows them."""

from __future__ import annotations

from dataclasses import dataclass

from pd.v1 import transfer_status_pb2

from pd_common.control import convert
from pd_common.handoff.canary import Canary
from pd_common.types import Instance, Role


@dataclass(frozen=True, slots=True)
class Peer:
    """One pairing. `since_s` is a time of the monotonic clock, `live_rooms` counts rooms that have not ended."""

    instance: Instance
    role: Role
    control_address: str
    carrier: str
    since_s: float
    canary: Canary | None
    live_rooms: int


def peer_to(peer: Peer, wall_offset_s: float) -> transfer_status_pb2.Peer:
    """`wall_offset_s` is what must be added to the monotonic clock to get seconds since 1970."""
    canary = peer.canary
    return transfer_status_pb2.Peer(
        instance=convert.instance_to(peer.instance),
        role=convert.role_to(peer.role),
        control_address=peer.control_address,
        carrier=peer.carrier,
        since=convert.timestamp_to(peer.since_s + wall_offset_s),
        canary_time=None if canary is None else convert.timestamp_to(canary.at_s + wall_offset_s),
        canary_took=None if canary is None else convert.duration_to(canary.took_s),
        live_rooms=peer.live_rooms,
    )
