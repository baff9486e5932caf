"""What an inspection has found: values of one moment, as the processes have said them."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.timestamp_pb2 import Timestamp
from pd.v1 import bootstrap_pb2, inspection_pb2, transfer_status_pb2, types_pb2

from pd_common.control import convert
from pd_common.control.status import why_unreached
from pd_common.errors import PdError, PeerLost
from pd_common.types import BootstrapRoom, Role

ROLE_OF = {convert.role_to(role): role for role in Role}
"""Roles as messages say them."""
FINAL = (types_pb2.TRANSFER_STATE_SUCCESS, types_pb2.TRANSFER_STATE_FAILED)
"""States that nothing follows."""


@dataclass(frozen=True, slots=True)
class Clock:
    """How far a process's clock is ahead of ours, exact to half of `round_trip_s`."""

    ahead_s: float
    round_trip_s: float

    def ours_ns(self, time: Timestamp) -> int:
        """When that was by our clock; a difference that the asking alone may have made is taken for none."""
        return time.ToNanoseconds() - (round(1e9 * self.ahead_s) if abs(self.ahead_s) > self.round_trip_s else 0)


@dataclass(frozen=True, slots=True)
class ProcessView:
    """One process. With `trouble` it could not be asked, and nothing else is known of it."""

    address: str
    role: Role
    trouble: PdError | None = None
    process: inspection_pb2.GetProcessResponse | None = None
    pool: transfer_status_pb2.GetPoolResponse | None = None
    """None on a router."""
    peers: tuple[transfer_status_pb2.Peer, ...] = ()
    quarantine: tuple[transfer_status_pb2.QuarantinedRoom, ...] = ()
    topology: bootstrap_pb2.GetTopologyResponse | None = None
    """Of the Bootstrap directory; only on prefill."""
    topology_trouble: PdError | None = None
    """Why a prefill has not said it: ranks are missing, or the directory is not for whoever asks."""
    clock: Clock | None = None

    def ours_ns(self, time: Timestamp) -> int:
        """When that was by our clock, as far as it is known, in nanoseconds since 1970."""
        return time.ToNanoseconds() if self.clock is None else self.clock.ours_ns(time)

    @property
    def why_silent(self) -> str:
        """For a person; empty if it has answered."""
        return "" if self.trouble is None else why_unreached(self.trouble.message.removeprefix(f"{self.address}: "))

    @property
    def silence(self) -> str:
        """The same with its name: for one that has not answered."""
        return f"{self.role} {self.address} does not answer: {self.why_silent}"


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All processes that could be found, routers first, then prefills, then decodes."""

    processes: tuple[ProcessView, ...]

    def of_role(self, role: Role) -> tuple[ProcessView, ...]:
        """Those that do this."""
        return tuple(process for process in self.processes if process.role is role)

    def require_answers(self) -> None:
        """Raises PeerLost when not one of them answers."""
        if all(view.trouble is not None for view in self.processes):
            silent = "\n".join(view.silence for view in self.processes)
            raise PeerLost(f"{silent}\nIs it running, and is that its gRPC address?")

    def at(self, address: str) -> ProcessView | None:
        """The one that was asked there."""
        return next((process for process in self.processes if process.address == address), None)

    def of_instance(self, instance_id: str) -> ProcessView | None:
        """The one with this name."""
        return next((each for each in self.processes if each.process and instance_of(each) == instance_id), None)


@dataclass(frozen=True, slots=True)
class RoomSide:
    """What one process knows of a room; at least one of the two is there."""

    address: str
    role: Role
    transfer: types_pb2.Transfer | None
    """None on a router, and where the record is forgotten already."""
    legs: tuple[inspection_pb2.RoomSpans, ...]


@dataclass(frozen=True, slots=True)
class RoomView:
    """One room in all processes that know it, routers first, then prefills, then decodes."""

    number: BootstrapRoom
    sides: tuple[RoomSide, ...]
    cluster: ClusterView = ClusterView(())
    """Everybody who was asked, also those that do not know the room or did not answer."""

    def of_role(self, role: Role) -> tuple[RoomSide, ...]:
        """The sides that do this."""
        return tuple(side for side in self.sides if side.role is role)

    def ours_ns(self, side: RoomSide, time: Timestamp) -> int:
        """When that was by our clock, as far as it is known, in nanoseconds since 1970."""
        process = self.cluster.at(side.address)
        return time.ToNanoseconds() if process is None else process.ours_ns(time)


def held_by(view: RoomView, side: RoomSide) -> transfer_status_pb2.QuarantinedRoom | None:
    """What the room keeps from reuse there."""
    process = view.cluster.at(side.address)
    held = () if process is None else process.quarantine
    return next((each for each in held if each.bootstrap_room == view.number), None)


def is_open(side: RoomSide) -> bool:
    """It may still do something for the room: after its handoff decode writes the answer."""
    handing_over = side.transfer is not None and side.transfer.state not in FINAL
    return handing_over or any(not leg.root.HasField("end") for leg in side.legs)


def instance_of(view: ProcessView) -> str:
    """Its instance id; empty if it did not answer."""
    return "" if view.process is None else view.process.instance.instance_id
