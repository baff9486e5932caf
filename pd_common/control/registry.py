"""The Bootstrap directory: ranks, epochs and leases. Pure: the clock is an argument, nothing is awaited."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pd_common.errors import InvalidRequest, LayoutMismatch, StaleInstance, TopologyIncomplete
from pd_common.types import BootstrapRoom, Instance, RankInfo, RankPosition


@dataclass(slots=True)
class _Lease:
    rank: RankInfo
    expires_at: float


class Registry:
    """One service's ranks. Complete means that a live lease holds every position; nothing else is ever shown."""

    def __init__(self, lease_s: float = 10.0, dp_entry_s: float = 120.0) -> None:
        self.lease_s = lease_s
        self._dp_entry_s = dp_entry_s
        self._leases: dict[RankPosition, _Lease] = {}
        self._dp_ranks: dict[BootstrapRoom, tuple[int, float]] = {}

    def register(self, rank: RankInfo, now: float) -> None:
        """Takes a rank in; a higher epoch replaces the earlier process at the same position.

        Raises:
            InvalidRequest: the position lies outside its grid.
            StaleInstance: a later epoch holds the position.
            LayoutMismatch: another rank of this service has another layout or another grid.

        """
        _check_position(rank.position)
        held = self._leases.get(rank.position)
        if held is not None and held.rank.instance.epoch > rank.instance.epoch:
            raise StaleInstance(
                f"{rank.control_address} has restarted since: epoch {held.rank.instance.epoch} is registered",
                expected=held.rank.instance.epoch,
                got=rank.instance.epoch,
            )
        self.expire(now)
        others = [lease.rank for position, lease in self._leases.items() if position != rank.position]
        _check_alike(rank, others)
        self._leases[rank.position] = _Lease(rank, now + self.lease_s)

    def renew(self, instance: Instance, now: float) -> None:
        """Raises StaleInstance when the lease has ended or another process holds the position."""
        self.expire(now)
        for lease in self._leases.values():
            if lease.rank.instance == instance:
                lease.expires_at = now + self.lease_s
                return
        raise StaleInstance(f"{instance.instance_id} holds no lease: register again", got=instance.epoch)

    def unregister(self, instance: Instance) -> None:
        """Forgets the rank; a process that is not there is no error."""
        gone = [position for position, lease in self._leases.items() if lease.rank.instance == instance]
        for position in gone:
            del self._leases[position]

    def expire(self, now: float) -> None:
        """Drops leases and data-parallel entries whose time is over."""
        self._leases = {p: lease for p, lease in self._leases.items() if lease.expires_at > now}
        self._dp_ranks = {room: entry for room, entry in self._dp_ranks.items() if entry[1] > now}

    def topology(self, now: float) -> tuple[RankInfo, ...]:
        """Every rank, ordered by position.

        Raises:
            TopologyIncomplete: a position of the grid is not held.

        """
        self.expire(now)
        ranks = [lease.rank for lease in self._leases.values()]
        expected = ranks[0].position.ranks if ranks else 1
        if len(ranks) < expected:
            raise TopologyIncomplete(
                f"{len(ranks)} of {expected} ranks have registered", registered=len(ranks), expected=expected
            )
        return tuple(sorted(ranks, key=lambda r: (r.position.dp_rank, r.position.tp_rank, r.position.pp_rank)))

    def complete_or_empty(self, now: float) -> tuple[RankInfo, ...]:
        """The topology, or nothing while it is not complete."""
        try:
            return self.topology(now)
        except TopologyIncomplete:
            return ()

    def register_dp_rank(self, room: BootstrapRoom, dp_rank: int, now: float) -> None:
        """Remembers for a while which data-parallel rank has the room."""
        self._dp_ranks[room] = (dp_rank, now + self._dp_entry_s)

    def query_dp_ranks(self, rooms: Iterable[BootstrapRoom], now: float) -> dict[BootstrapRoom, int]:
        """The rooms that are known."""
        self.expire(now)
        return {room: self._dp_ranks[room][0] for room in rooms if room in self._dp_ranks}


def _check_position(position: RankPosition) -> None:
    for axis in ("dp", "tp", "pp"):
        rank, size = getattr(position, f"{axis}_rank"), getattr(position, f"{axis}_size")
        if not 0 <= rank < size:
            raise InvalidRequest(f"{axis}_rank {rank} is not in a grid of {axis}_size {size}", field=f"{axis}_rank")


def _check_alike(rank: RankInfo, others: Iterable[RankInfo]) -> None:
    for other in others:
        mismatch = other.layout.first_mismatch(rank.layout)
        if mismatch is not None:
            field, theirs, mine = mismatch
            raise LayoutMismatch(
                f"this rank's {field} is {mine}, that of {other.control_address} is {theirs}",
                field=field,
                mine=mine,
                theirs=theirs,
            )
        if _grid(other.position) != _grid(rank.position):
            raise LayoutMismatch(
                f"this rank's grid is {_grid(rank.position)}, that of {other.control_address} {_grid(other.position)}",
                field="position",
                mine=_grid(rank.position),
                theirs=_grid(other.position),
            )


def _grid(position: RankPosition) -> str:
    return f"dp {position.dp_size} x tp {position.tp_size} x pp {position.pp_size}"
