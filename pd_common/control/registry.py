"""The Bootstrap directory: ranks, epochs and leases. Pure: the clock is an argument, nothing is awaited."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from pd_common.addresses import is_wildcard, parse_address
from pd_common.errors import InvalidRequest, LayoutMismatch, StaleInstance, TopologyIncomplete
from pd_common.types import BootstrapRoom, Instance, RankInfo, RankPosition, Role, Topology

MAX_RANKS = 4096
"""Of one service; so many leases there can be at most."""
MAX_DP_ENTRIES = 250_000
"""Rooms whose data-parallel rank is remembered; above this the oldest are dropped."""
MAX_QUERY_ROOMS = 10_000
"""That one question for data-parallel ranks may name."""


@dataclass(slots=True)
class _Lease:
    rank: RankInfo
    expires_at: float


class Registry:
    """One service's ranks. Complete means that a live lease holds every position; nothing else is ever shown.

    Neither a position nor a control address is ever held twice. `epoch` is where epochs of the topology start: with
    the time in microseconds they rise across restarts of the directory too.
    """

    def __init__(self, role: Role, epoch: int, *, lease_s: float = 10.0, dp_entry_s: float = 600.0) -> None:
        self.lease_s = lease_s
        self._role = role
        self._epoch = epoch
        self._dp_entry_s = dp_entry_s
        self._leases: dict[RankPosition, _Lease] = {}
        self._dp_ranks: OrderedDict[BootstrapRoom, tuple[int, float]] = OrderedDict()  # the oldest first

    def register(self, rank: RankInfo, now: float) -> None:
        """Takes a rank in; a higher epoch replaces the earlier process at the same position or control address.

        The same rank again only renews its lease; with another address or layout it is a change.

        Raises:
            InvalidRequest: another role, a position outside its grid or held already by this process elsewhere, an
                address that nobody can connect to.
            StaleInstance: a later process holds the position or the address.
            LayoutMismatch: another rank of this service has another layout or another grid.

        """
        self._check(rank)
        self.expire(now)
        replaced = [held for lease in self._leases.values() if _collide(held := lease.rank, rank)]
        for held in replaced:
            _refuse_stale(rank, held)
        _check_alike(rank, [lease.rank for lease in self._leases.values() if lease.rank not in replaced])
        if replaced != [rank]:
            self._epoch += 1
        for held in replaced:
            del self._leases[held.position]
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
        self._drop([position for position, lease in self._leases.items() if lease.rank.instance == instance])

    def expire(self, now: float) -> None:
        """Drops leases and data-parallel entries whose time is over."""
        self._drop([position for position, lease in self._leases.items() if lease.expires_at <= now])
        while self._dp_ranks and next(iter(self._dp_ranks.values()))[1] <= now:
            self._dp_ranks.popitem(last=False)

    def next_end(self) -> float | None:
        """When the next lease ends unless it is renewed; None when there is none."""
        return min((lease.expires_at for lease in self._leases.values()), default=None)

    def topology(self, now: float) -> Topology:
        """The ranks, none of them while the grid is not complete."""
        self.expire(now)
        ranks = [lease.rank for lease in self._leases.values()]
        if len(ranks) < self._expected:
            return Topology((), self._epoch)
        ranks.sort(key=lambda rank: (rank.position.dp_rank, rank.position.tp_rank, rank.position.pp_rank))
        return Topology(tuple(ranks), self._epoch)

    def complete_topology(self, now: float) -> Topology:
        """The ranks.

        Raises:
            TopologyIncomplete: a position of the grid is not held.

        """
        topology = self.topology(now)
        if not topology.ranks:
            registered, expected = len(self._leases), self._expected
            raise TopologyIncomplete(
                f"{registered} of {expected} ranks have registered", registered=registered, expected=expected
            )
        return topology

    def register_dp_rank(self, room: BootstrapRoom, dp_rank: int, now: float) -> None:
        """Remembers for a while which data-parallel rank has the room.

        Raises:
            TopologyIncomplete: no rank has registered, so the grid is not known.
            InvalidRequest: the grid has no such rank.

        """
        self.expire(now)
        position = next(iter(self._leases), None)
        if position is None:
            raise TopologyIncomplete("no rank has registered", registered=0, expected=1)
        if dp_rank >= position.dp_size:
            raise InvalidRequest(f"dp_rank {dp_rank} is not in a grid of dp_size {position.dp_size}", field="dp_rank")
        self._dp_ranks[room] = (dp_rank, now + self._dp_entry_s)
        self._dp_ranks.move_to_end(room)
        if len(self._dp_ranks) > MAX_DP_ENTRIES:
            self._dp_ranks.popitem(last=False)

    def query_dp_ranks(self, rooms: Iterable[BootstrapRoom], now: float) -> dict[BootstrapRoom, int]:
        """The rooms that are known."""
        self.expire(now)
        return {room: self._dp_ranks[room][0] for room in rooms if room in self._dp_ranks}

    @property
    def _expected(self) -> int:
        """Ranks of the whole grid; one while nobody has said how large it is."""
        position = next(iter(self._leases), None)
        return 1 if position is None else position.ranks

    def _drop(self, positions: list[RankPosition]) -> None:
        for position in positions:
            del self._leases[position]
        if positions:
            self._epoch += 1

    def _check(self, rank: RankInfo) -> None:
        if rank.role is not self._role:
            raise InvalidRequest(
                f"this is the directory of {self._role.value}, not of {rank.role.value}", field="rank.role"
            )
        if is_wildcard(parse_address(rank.control_address, "rank.control_address").host):
            raise InvalidRequest(
                f"nobody can connect to {rank.control_address}: advertise another", field="rank.control_address"
            )
        _check_position(rank.position)


def _check_position(position: RankPosition) -> None:
    for axis in ("dp", "tp", "pp"):
        rank, size = getattr(position, f"{axis}_rank"), getattr(position, f"{axis}_size")
        if not 0 <= rank < size:
            raise InvalidRequest(f"{axis}_rank {rank} is not in a grid of {axis}_size {size}", field=f"{axis}_rank")
    if position.ranks > MAX_RANKS:
        raise InvalidRequest(f"{_grid(position)} is more than {MAX_RANKS} ranks", field="rank.position")


def _collide(held: RankInfo, rank: RankInfo) -> bool:
    """Only one of the two can be there."""
    return (
        held.position == rank.position or held.control_address == rank.control_address or held.instance == rank.instance
    )


def _refuse_stale(rank: RankInfo, held: RankInfo) -> None:
    if held.instance == rank.instance:
        if held.position != rank.position:
            raise InvalidRequest(
                f"{rank.control_address} is one rank, and has registered as another", field="rank.position"
            )
    elif held.instance.epoch >= rank.instance.epoch:
        raise StaleInstance(
            f"{rank.control_address} has been replaced: {held.control_address} is registered {_at(held.position)}; "
            "processes that run at one time need ranks and addresses of their own",
            expected=held.instance.epoch,
            got=rank.instance.epoch,
        )


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


def _at(position: RankPosition) -> str:
    return f"as dp_rank {position.dp_rank}, tp_rank {position.tp_rank}, pp_rank {position.pp_rank}"


def _grid(position: RankPosition) -> str:
    return f"dp {position.dp_size} x tp {position.tp_size} x pp {position.pp_size}"
