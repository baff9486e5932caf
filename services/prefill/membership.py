"""This rank's entry in the Bootstrap directory: registered at start, renewed in time, registered again when lost.

Among data-parallel ranks also which rooms are here, for decode cannot know.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pd_common.control.bootstrap_client import BootstrapClient
from pd_common.control.connection import Connection
from pd_common.errors import CapacityExceeded, DeadlineExceeded, PdError, PeerLost, StaleInstance, TopologyIncomplete
from pd_common.types import BootstrapRoom, RankInfo

_log = logging.getLogger(__name__)

_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 2.0
_NOT_THERE = (PeerLost, DeadlineExceeded, CapacityExceeded, TopologyIncomplete)
"""The directory, or what is asked of it, may come; or it has too much to do at the moment."""


class Membership:
    """One rank and the directory it belongs to; any order of starting works."""

    def __init__(self, rank: RankInfo, connect: Callable[[], Connection]) -> None:
        """`connect` makes a connection to the directory, with the certificates of the day."""
        self._rank = rank
        self._connect = connect
        self._connection = connect()
        self._bootstrap = BootstrapClient(self._connection)
        self._waiting: set[BootstrapRoom] = set()

    async def join(self) -> float:
        """Registers, trying again while the directory cannot be reached; gives the lease in seconds.

        Raises:
            LayoutMismatch, InvalidRequest, StaleInstance: the directory refuses this rank for good.

        """
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                return await self._enter()
            except _NOT_THERE as error:
                _log.warning("cannot register yet, trying again in %.1f s: %s", retry_s, error.message)
                retry_s = await _wait(retry_s)
                await self._connect_again()

    async def stay(self, lease_s: float) -> None:
        """Keeps the lease; ends only by cancellation, or by a refusal for good."""
        while True:
            await asyncio.sleep(_spread(lease_s / 3))
            try:
                lease_s = await self._bootstrap.renew_lease(self._rank.instance)
            except (StaleInstance, *_NOT_THERE) as error:
                _log.warning("lease not renewed, registering again: %s", error.message)
                lease_s = await self.join()
                _log.info("registered again")

    async def leave(self) -> None:
        """Gives the entry up; a directory that is gone needs no telling."""
        try:
            await self._bootstrap.unregister_rank(self._rank.instance)
        except PdError as error:
            _log.info("not unregistered: %s", error.message)
        await self._connection.close()

    @asynccontextmanager
    async def announced(self, room: BootstrapRoom) -> AsyncIterator[None]:
        """While the block waits for decode, decode can ask the directory which data-parallel rank has the room.

        Raises:
            InvalidRequest: the directory's grid has no such rank.

        """
        if self._rank.position.dp_size == 1:
            yield
            return
        self._waiting.add(room)
        try:
            await self._announce(room)
            yield
        finally:
            self._waiting.discard(room)

    async def _connect_again(self) -> None:
        broken = self._connection
        self._connection = self._connect()
        self._bootstrap = BootstrapClient(self._connection)
        await broken.close()

    async def _enter(self) -> float:
        """A directory that has restarted knows neither this rank nor its rooms."""
        lease_s = await self._bootstrap.register_rank(self._rank)
        for room in tuple(self._waiting):
            await self._bootstrap.register_dp_rank(room, self._rank.position.dp_rank)
        return lease_s

    async def _announce(self, room: BootstrapRoom) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                return await self._bootstrap.register_dp_rank(room, self._rank.position.dp_rank)
            except _NOT_THERE:  # the lease is not renewed either, which is logged
                retry_s = await _wait(retry_s)


async def _wait(retry_s: float) -> float:
    """Gives the next wait: longer and longer, and not the same as that of other ranks."""
    await asyncio.sleep(_spread(retry_s))
    return min(2 * retry_s, _LAST_RETRY_S)


def _spread(seconds: float) -> float:
    """Between half of it and all of it, at random."""
    return seconds * (0.5 + secrets.randbelow(1000) / 2000)
