"""Which prefill rank has a room: the topology that its Bootstrap service tells, and the room's data-parallel rank.

Where there are several ranks, the one that has a room is asked for and never computed: whoever sent the request chose
it.
"""

from __future__ import annotations

import asyncio
import time

from pd_common.control.bootstrap_client import BootstrapClient
from pd_common.control.connection import Dial
from pd_common.control.registry import MAX_QUERY_ROOMS
from pd_common.errors import DeadlineExceeded, LayoutMismatch, PeerLost, TopologyIncomplete
from pd_common.types import BootstrapAddress, BootstrapRoom, Instance, RankInfo, Role, Topology

_FIRST_WAIT_S, _LAST_WAIT_S = 0.005, 0.1
"""Between two questions for rooms that no rank has announced yet: most are announced while they are asked for."""
_PATIENCE_S = 10.0
"""A Bootstrap service that does not answer for so long does not come back soon; ranks renew their leases within it."""


class Directory:
    """Asks Bootstrap services. A topology is remembered until one of its ranks is forgotten."""

    def __init__(self, backend: str, dial: Dial) -> None:
        self._backend = backend
        self._dial = dial
        self._topologies: dict[BootstrapAddress, asyncio.Task[Topology]] = {}
        self._rooms: dict[BootstrapAddress, _Rooms] = {}

    async def find(self, address: BootstrapAddress, room: BootstrapRoom) -> RankInfo:
        """The rank that has the room; waits until it has announced the room, if there are several.

        Raises:
            PeerLost, TopologyIncomplete: the service, or one of its ranks, is not there (yet).
            LayoutMismatch: this decode cannot be paired with its ranks.

        """
        ranks = (await self._topology(address)).ranks
        for rank in ranks:
            self._check(rank, address)
        if len(ranks) == 1:
            return ranks[0]
        if address not in self._rooms:
            self._rooms[address] = _Rooms(address, self._dial)
        dp_rank = await self._rooms[address].dp_rank_of(room)
        for rank in ranks:
            if rank.position.dp_rank == dp_rank:
                return rank
        raise TopologyIncomplete(f"prefill {address.target} has no data-parallel rank {dp_rank} now")

    def forget(self, instance: Instance) -> None:
        """This rank is gone: the topology that names it is asked for anew."""
        for address, asking in tuple(self._topologies.items()):
            if _names(asking, instance):
                del self._topologies[address]

    async def close(self) -> None:
        """Ends what is being asked."""
        for asking in tuple(self._topologies.values()):
            asking.cancel()
        await asyncio.gather(*self._topologies.values(), return_exceptions=True)
        for rooms in self._rooms.values():
            await rooms.close()

    async def _topology(self, address: BootstrapAddress) -> Topology:
        """Rooms that come at once ask together."""
        asking = self._topologies.get(address)
        if asking is None:
            asking = self._topologies[address] = asyncio.create_task(self._ask(address))
            asking.add_done_callback(lambda asked: self._drop_failed(address, asked))
        return await asyncio.shield(asking)

    async def _ask(self, address: BootstrapAddress) -> Topology:
        """Again when there is no answer in time: the question or its answer may have been lost."""
        connection = self._dial(address.target, Role.PREFILL)
        client, ends_s = BootstrapClient(connection), time.monotonic() + _PATIENCE_S
        try:
            while True:
                try:
                    return await client.get_topology()
                except DeadlineExceeded:
                    if time.monotonic() > ends_s:
                        raise
        finally:
            await connection.close()

    def _drop_failed(self, address: BootstrapAddress, asked: asyncio.Task[Topology]) -> None:
        """A failure is the answer of those who waited, and of nobody who comes later."""
        if (asked.cancelled() or asked.exception() is not None) and self._topologies.get(address) is asked:
            del self._topologies[address]

    def _check(self, rank: RankInfo, address: BootstrapAddress) -> None:
        position = rank.position
        if position.tp_size * position.pp_size != 1:
            theirs = f"tp {position.tp_size} x pp {position.pp_size}"
            raise LayoutMismatch(
                f"prefill {address.target} is {theirs} ranks, this decode is one",
                field="position",
                mine="tp 1 x pp 1",
                theirs=theirs,
            )
        backend = rank.data_plane.backend
        if backend != self._backend:
            raise LayoutMismatch(
                f"prefill {rank.control_address} writes pages with {backend}, this decode expects {self._backend}: "
                "give both the same --transfer-backend",
                field="transfer_backend",
                mine=self._backend,
                theirs=backend,
            )


class _Rooms:
    """The rooms that wait to be announced to one Bootstrap service, all asked for at once, again and again."""

    def __init__(self, address: BootstrapAddress, dial: Dial) -> None:
        self._address = address
        self._dial = dial
        self._waiting: dict[BootstrapRoom, asyncio.Future[int]] = {}
        self._asking: asyncio.Task[None] | None = None

    async def dp_rank_of(self, room: BootstrapRoom) -> int:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[room] = answer
        self._ask_if_any()
        try:
            return await answer
        finally:
            if self._waiting.get(room) is answer:
                del self._waiting[room]

    async def close(self) -> None:
        self._waiting.clear()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    def _ask_if_any(self) -> None:
        if self._waiting and self._asking is None:
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(self._asked)

    def _asked(self, asking: asyncio.Task[None]) -> None:
        """A room may have come while the connection was being closed."""
        self._asking = None
        if not asking.cancelled() and (error := asking.exception()) is not None:
            self._fail(error)
        self._ask_if_any()

    async def _ask(self) -> None:
        connection = self._dial(self._address.target, Role.PREFILL)
        client, heard_s = BootstrapClient(connection), time.monotonic()
        wait_s = _FIRST_WAIT_S
        try:
            while rooms := tuple(self._waiting):
                try:
                    await self._ask_once(client, rooms)
                    heard_s = time.monotonic()
                except (PeerLost, DeadlineExceeded):
                    if time.monotonic() - heard_s > _PATIENCE_S:
                        raise
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LAST_WAIT_S) if tuple(self._waiting) == rooms else _FIRST_WAIT_S
        finally:
            await connection.close()

    async def _ask_once(self, client: BootstrapClient, rooms: tuple[BootstrapRoom, ...]) -> None:
        for first in range(0, len(rooms), MAX_QUERY_ROOMS):
            for room, dp_rank in (await client.query_dp_ranks(rooms[first : first + MAX_QUERY_ROOMS])).items():
                answer = self._waiting.pop(room, None)
                if answer is not None and not answer.done():
                    answer.set_result(dp_rank)

    def _fail(self, error: BaseException) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)
        self._waiting.clear()


def _names(asking: asyncio.Task[Topology], instance: Instance) -> bool:
    """A topology that is still being asked for is as new as it can be."""
    if not asking.done() or asking.cancelled() or asking.exception() is not None:
        return False
    return any(rank.instance == instance for rank in asking.result().ranks)
