"""What an inspection has found: values of one moment, as the processes have said them."""

from __future__ import annotations

from dataclasses import dataclass

from pd.v1 import bootstrap_pb2, inspection_pb2, transfer_status_pb2, types_pb2

from pd_common.errors import PdError
from pd_common.types import BootstrapRoom, Role


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


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All processes that could be found, routers first, then prefills, then decodes."""

    processes: tuple[ProcessView, ...]

    def of_role(self, role: Role) -> tuple[ProcessView, ...]:
        """Those that do this."""
        return tuple(process for process in self.processes if process.role is role)


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

    def of_role(self, role: Role) -> tuple[RoomSide, ...]:
        """The sides that do this."""
        return tuple(side for side in self.sides if side.role is role)
