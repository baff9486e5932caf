"""Gets memory of failed rooms out of quarantine: asks prefill for a drain proof, or sees that it is gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from pd_common.control.clients import Dial, PeerClient
from pd_common.errors import PdError
from pd_common.handoff.process import host_id, process_is_gone
from pd_common.handoff.quarantine import Quarantine
from pd_common.types import BootstrapRoom, Instance, Role
from services.decode.prefills import Prefill
from services.decode.queues import Allocation

_log = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.25
_PROOF_TIMEOUT_S = 30.0


class Drain:
    """Every held room has one task that seeks its proof until it has it. Time alone releases nothing (I2)."""

    def __init__(self, release: Callable[[Allocation], None], dial: Dial) -> None:
        self._dial = dial
        self.quarantine = Quarantine(lambda _, pages, slot: release(Allocation(pages, slot)), host_id())
        self._tasks: set[asyncio.Task[None]] = set()
        self._proof = asyncio.Event()

    def hold(self, room: BootstrapRoom, writer: Prefill, allocation: Allocation, ticket: bytes) -> None:
        """Keeps a failed room's memory until `writer` is quiet for it."""
        self.quarantine.hold(room, [writer.writer], allocation.pages, allocation.slot, time.monotonic())
        self._keep(self._seek_proof(room, writer, ticket))

    async def proven(self, instance: Instance) -> None:
        """Returns when this process owes no proof for anything that is held."""
        while self.quarantine.owed_pages(instance):
            await self._proof.wait()

    def give_up(self, room: BootstrapRoom, prefill: Prefill, error: PdError, ticket: bytes) -> None:
        """Tells prefill of a room that failed before any memory was offered: its leg need not wait."""
        self._keep(self._told(room, prefill, error, ticket))

    async def close(self) -> None:
        """Stops asking; what is held stays held until the process ends."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _told(self, room: BootstrapRoom, prefill: Prefill, error: PdError, ticket: bytes) -> None:
        try:
            await prefill.client.abort_room(
                room, error.message, prefill.instance, ticket=ticket, timeout_s=_PROOF_TIMEOUT_S
            )
        except PdError as unheard:
            _log.info("prefill was not told that room %s is given up: %s", room, unheard.message)

    async def _seek_proof(self, room: BootstrapRoom, writer: Prefill, ticket: bytes) -> None:
        connection = self._dial(writer.connection.address, Role.PREFILL)
        try:
            while room in self.quarantine:
                await self._seek_once(room, writer, PeerClient(connection), ticket)
                self._proof.set()
                self._proof.clear()
                if room in self.quarantine:
                    await asyncio.sleep(_ASK_AGAIN_S)
        finally:
            await connection.close()

    async def _seek_once(self, room: BootstrapRoom, writer: Prefill, client: PeerClient, ticket: bytes) -> None:
        if writer.fenced.is_set():
            self.quarantine.fenced(room, writer.instance)
        if process_is_gone(writer.process):
            self.quarantine.process_gone(writer.process)
        elif await self._asked(room, writer, client, ticket):
            self.quarantine.drained(room, writer.instance)

    async def _asked(self, room: BootstrapRoom, writer: Prefill, client: PeerClient, ticket: bytes) -> bool:
        try:
            await client.abort_room(
                room, "decode gave the room up", writer.instance, ticket=ticket, timeout_s=_PROOF_TIMEOUT_S
            )
        except PdError as error:
            _log.debug("no drain proof for room %s yet: %s", room, error.message)
            return False
        return True
