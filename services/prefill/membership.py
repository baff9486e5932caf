"""This rank's entry in the Bootstrap directory: registered at start, renewed in time, registered again when lost."""

from __future__ import annotations

import asyncio
import logging

from pd_common.control.clients import BootstrapClient
from pd_common.errors import PdError, PeerLost, StaleInstance, TopologyIncomplete
from pd_common.types import RankInfo

_log = logging.getLogger(__name__)

_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 2.0


class Membership:
    """One rank and the directory it belongs to; any order of starting works."""

    def __init__(self, rank: RankInfo, bootstrap: BootstrapClient) -> None:
        self._rank = rank
        self._bootstrap = bootstrap

    async def join(self) -> float:
        """Registers, trying again while the directory cannot be reached; gives the lease in seconds.

        Raises:
            LayoutMismatch, InvalidRequest, StaleInstance: the directory refuses this rank for good.

        """
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                return await self._bootstrap.register_rank(self._rank)
            except (PeerLost, TopologyIncomplete) as error:
                _log.warning("cannot register yet, trying again in %.1f s: %s", retry_s, error.message)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)

    async def stay(self, lease_s: float) -> None:
        """Keeps the lease; ends only by cancellation, or by a refusal for good."""
        while True:
            await asyncio.sleep(lease_s / 3)
            try:
                lease_s = await self._bootstrap.renew_lease(self._rank.instance)
            except StaleInstance:
                lease_s = await self.join()
            except PeerLost as error:
                _log.warning("lease not renewed: %s", error.message)

    async def leave(self) -> None:
        """Gives the entry up; a directory that is gone needs no telling."""
        try:
            await self._bootstrap.unregister_rank(self._rank.instance)
        except PdError as error:
            _log.info("not unregistered: %s", error.message)
