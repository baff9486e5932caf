"""Asks every process of a system, found from the addresses of a few, what it knows."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from pd.v1 import types_pb2

from pd_common.control.connection import Dial
from pd_common.errors import InternalError
from pd_common.inspection.views import ClusterView, ProcessView, RoomView
from pd_common.types import BootstrapRoom, Role


class Inspector:
    """Begins at `entries`: a router knows all workers, a worker its peers. Processes that do not answer are shown so."""

    def __init__(self, entries: Sequence[tuple[str, Role]], dial: Dial) -> None:
        self._entries = tuple(entries)
        self._dial = dial

    async def cluster(self) -> ClusterView:
        """Every process, asked at the same time."""
        raise InternalError("to be written")

    async def rooms(
        self, *, states: Sequence[types_pb2.TransferState] = (), limit: int = 100
    ) -> tuple[tuple[ProcessView, tuple[types_pb2.Transfer, ...]], ...]:
        """The latest rooms of each prefill and decode."""
        raise InternalError("to be written")

    async def room(self, number: BootstrapRoom) -> RoomView:
        """One room.

        Raises:
            RoomUnknown: no process that answers knows it.
        """
        raise InternalError("to be written")

    async def watch(self) -> AsyncGenerator[tuple[ProcessView, types_pb2.Transfer], None]:
        """Every change from now on, of all prefills and decodes, as it happens."""
        raise InternalError("to be written")
        yield

    async def abort(self, number: BootstrapRoom, message: str, ticket: bytes = b"") -> None:
        """Ends a room, at the router if there is one, else at each side."""
        raise InternalError("to be written")

    async def close(self) -> None:
        """Ends all connections."""
        raise InternalError("to be written")
