"""Asks every process of a system, found from the addresses of a few, what it knows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace

from pd.v1 import types_pb2

from pd_common.control.connection import Dial
from pd_common.errors import InvalidRequest, PdError, RoomUnknown
from pd_common.inspection.merge import merged
from pd_common.inspection.process_client import ProcessClient, RoomFilter
from pd_common.inspection.views import ROLE_OF, ClusterView, ProcessView, RoomSide, RoomView, instance_of, is_open
from pd_common.types import BootstrapRoom, Role

_AGAIN_S = 1.0
"""Until a process that was lost is asked again."""
_END_S, _LOOK_S = 2.0, 0.1
_ORDER = (Role.ROUTER, Role.PREFILL, Role.DECODE)


class Inspector:
    """Begins at `entries`: a router knows all workers, a worker its peers. One that does not answer is shown so."""

    def __init__(self, entries: Sequence[tuple[str, Role]], dial: Dial) -> None:
        self._entries = tuple(entries)
        self._dial = dial
        self._clients: dict[tuple[str, Role], ProcessClient] = {}

    async def cluster(self) -> ClusterView:
        """Every process, asked at the same time."""
        found: dict[str, ProcessView] = {}
        named = dict(self._entries)
        while named:
            views = await asyncio.gather(*(self._look(address, role) for address, role in named.items()))
            found |= {view.address: view for view in views}
            named = {address: role for view in views for address, role in _named_by(view) if address not in found}
        return ClusterView(tuple(sorted(_each_once(found.values()), key=lambda view: _ORDER.index(view.role))))

    async def rooms(
        self,
        *,
        states: Sequence[types_pb2.TransferState] = (),
        peer_instance_id: str = "",
        older_than_s: float = 0.0,
        limit: int = 100,
    ) -> tuple[tuple[ProcessView, tuple[types_pb2.Transfer, ...]], ...]:
        """The latest rooms of each prefill and decode, oldest change first."""
        wanted = RoomFilter(tuple(states), peer_instance_id, older_than_s)
        cluster = await self.cluster()
        engines = (view for view in cluster.processes if view.role is not Role.ROUTER)
        return tuple(await asyncio.gather(*(self.rooms_of(view, wanted, limit) for view in engines)))

    async def rooms_of(
        self, view: ProcessView, wanted: RoomFilter, limit: int
    ) -> tuple[ProcessView, tuple[types_pb2.Transfer, ...]]:
        """The latest rooms on record there, none at a router; the view has `trouble` if it does not answer."""
        if view.trouble is not None or view.role is Role.ROUTER:
            return view, ()
        try:
            return view, await self._client(view.address, view.role).latest(wanted, limit)
        except PdError as error:
            return replace(view, trouble=error), ()

    async def transfer(self, view: ProcessView, number: BootstrapRoom) -> types_pb2.Transfer | None:
        """One room as this prefill or decode has it on record; None if it has not."""
        return await self._client(view.address, view.role).transfer(number)

    async def room(self, number: BootstrapRoom) -> RoomView:
        """One room.

        Raises:
            RoomUnknown: no process that answers knows it.
            PeerLost: nobody answers.
        """
        cluster = await self.cluster()
        cluster.require_answers()
        asked = await asyncio.gather(*(self._side_of(view, number) for view in cluster.processes))
        processes = tuple(view for view, _ in asked)
        sides = tuple(side for _, side in asked if side is not None)
        if not sides:
            raise RoomUnknown(
                f"room {number} is not on record at {_where(processes)}. Rooms that have ended are kept for "
                "--room-retention, 300 s unless set otherwise",
                room=number,
            )
        return RoomView(number, sides, ClusterView(processes))

    async def watch(self) -> AsyncGenerator[tuple[ProcessView, types_pb2.Transfer | None], None]:
        """Every change from now on, of all prefills and decodes, as it happens.

        Without a change it says that a process is watched from now on or, with `trouble`, not any more; then it is
        tried again.
        """
        cluster = await self.cluster()
        streams = [self._changes_of(view) for view in cluster.processes if view.role is not Role.ROUTER]
        async with aclosing(merged(streams)) as changes:
            async for change in changes:
                yield change

    async def abort(self, number: BootstrapRoom, message: str, ticket: bytes = b"") -> RoomView:
        """Ends a room, at the router that has it open, else at each side; gives it as it is when they have answered.

        Raises:
            RoomUnknown: as `room`.
            PermissionDenied: a side wants a ticket.
            PeerLost: nobody answers, or one is not quiet yet.
        """
        view = await self.room(number)
        at_routers = [side for side in view.of_role(Role.ROUTER) if is_open(side)]
        sides = at_routers or [side for side in view.sides if is_open(side)]
        await asyncio.gather(*(self._client(side.address, side.role).abort(number, message, ticket) for side in sides))
        return await self.ended(number)

    async def ended(self, number: BootstrapRoom) -> RoomView:
        """As it is when all sides have ended it, or the time for that is over: an answer ends with its engine step."""
        give_up_s = time.monotonic() + _END_S
        while True:
            view = await self.room(number)
            if time.monotonic() > give_up_s or not any(is_open(side) for side in view.sides):
                return view
            await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        """Ends all connections."""
        clients, self._clients = self._clients, {}
        await asyncio.gather(*(client.close() for client in clients.values()))

    def _client(self, address: str, role: Role) -> ProcessClient:
        client = self._clients.get((address, role))
        if client is None:
            client = self._clients[address, role] = ProcessClient(self._dial(address, role))
        return client

    async def _look(self, address: str, role: Role) -> ProcessView:
        """One that does not answer is dialled anew next time, with the certificates of that day."""
        client = self._client(address, role)
        view = await client.look(role)
        if view.trouble is not None and self._clients.get((address, role)) is client:
            del self._clients[address, role]
            await client.close()
        return view

    async def _side_of(self, view: ProcessView, number: BootstrapRoom) -> tuple[ProcessView, RoomSide | None]:
        if view.trouble is not None:
            return view, None
        client = self._client(view.address, view.role)
        try:
            legs = await client.legs(number)
            transfer = None if view.role is Role.ROUTER else await client.transfer(number)
        except PdError as error:
            return replace(view, trouble=error), None
        known = transfer is not None or legs
        return view, RoomSide(view.address, view.role, transfer, legs) if known else None

    async def _changes_of(
        self, view: ProcessView
    ) -> AsyncGenerator[tuple[ProcessView, types_pb2.Transfer | None], None]:
        while True:
            if view.trouble is None:
                try:
                    client = self._client(view.address, view.role)
                    newest = await client.sequence()
                    yield view, None
                    async with aclosing(client.changes(newest)) as changes:
                        async for transfer in changes:
                            yield view, transfer
                except InvalidRequest:
                    continue  # it changed faster than we read: from now on, again
                except PdError as error:
                    view = replace(view, trouble=error)
            yield view, None
            view = await self._back(view)

    async def _back(self, view: ProcessView) -> ProcessView:
        """As it is when it answers again."""
        while True:
            await asyncio.sleep(_AGAIN_S)
            now = await self._look(view.address, view.role)
            if now.trouble is None:
                return now


def _named_by(view: ProcessView) -> Iterator[tuple[str, Role]]:
    """Other processes that it knows of."""
    workers = () if view.process is None else view.process.workers
    ranks = () if view.topology is None else view.topology.ranks
    for named in (*workers, *ranks, *view.peers):
        if named.role in ROLE_OF:
            yield named.control_address, ROLE_OF[named.role]


def _each_once(views: Iterable[ProcessView]) -> Iterator[ProcessView]:
    """A process may have been found by several addresses: then by the first."""
    seen: set[str] = set()
    for view in views:
        name = instance_of(view) or view.address
        if name not in seen:
            yield view
        seen.add(name)


def _where(processes: Sequence[ProcessView]) -> str:
    """Who was asked."""
    asked = [f"{view.role} {view.address}" for view in processes if view.trouble is None]
    silent = [f"{view.role} {view.address}" for view in processes if view.trouble is not None]
    return (", ".join(asked) or "no process") + (f"; {', '.join(silent)} did not answer" if silent else "")
