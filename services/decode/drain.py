"""Gets memory of failed rooms out of quarantine: asks prefill for a drain proof, or sees that it is gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from pd_common.aio import Tasks
from pd_common.control.connection import Dial
from pd_common.control.peer_client import PeerClient
from pd_common.errors import DeadlineExceeded, PdError, PeerLost, RoomAborted
from pd_common.handoff.metadata import Slot
from pd_common.handoff.process import host_id, process_is_gone
from pd_common.handoff.quarantine import Quarantine
from pd_common.telemetry.logs import fields
from pd_common.telemetry.spans import SpanName
from pd_common.telemetry.tracing import RoomTrace
from pd_common.types import BootstrapRoom, Instance, PageIndices, Role
from services.decode.pairing import Prefill

_log = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.25


class Drain:
    """Every held room has one task that seeks its proof until it has it. Time alone releases nothing (I2)."""

    def __init__(self, take_back: Callable[[Slot], None], dial: Dial) -> None:
        """`take_back` gets the pages that were detached with this slot once they are quiet."""
        self._dial = dial
        self.quarantine = Quarantine(lambda _room, _pages, slot: take_back(slot), host_id())
        self._tasks = Tasks()
        self._proof = asyncio.Event()

    def hold(
        self,
        room: BootstrapRoom,
        writer: Prefill,
        pages: PageIndices,
        slot: Slot,
        ticket: bytes,
        trace: RoomTrace,
    ) -> None:
        """Keeps a failed room's memory until `writer` is quiet for it; its trace goes on until then."""
        self.quarantine.hold(room, [writer.writer], pages, slot, time.monotonic())
        self._tasks.start(f"proof for room {room}", self._held(room, writer, len(pages), ticket, trace))

    async def proven(self, instance: Instance) -> None:
        """Returns when this process owes no proof for anything that is held."""
        while self.quarantine.owed_pages(instance):
            await self._proof.wait()

    def give_up(self, room: BootstrapRoom, prefill: Prefill, error: PdError, ticket: bytes, deadline_s: float) -> None:
        """Tells prefill of a room that failed before any memory was offered: its leg need not wait for its deadline."""
        self._tasks.start(f"word on room {room}", self._tell(room, prefill, error, ticket, deadline_s))

    async def watch(self) -> None:
        """Raises InternalError when a task has died: its memory would be held for ever. Otherwise it never returns."""
        await self._tasks.watch()

    async def close(self) -> None:
        """Stops asking; what is held stays held until the process ends."""
        await self._tasks.close()

    async def _tell(
        self, room: BootstrapRoom, prefill: Prefill, error: PdError, ticket: bytes, deadline_s: float
    ) -> None:
        heard = False
        while not heard:
            try:
                await prefill.client.abort_room(room, error, prefill.instance, ticket=ticket)
                heard = True
            except (PeerLost, DeadlineExceeded):
                if prefill.fenced.is_set() or time.monotonic() >= deadline_s:
                    return
                await asyncio.sleep(_ASK_AGAIN_S)
            except PdError as refused:
                _log.info("prefill was not told that the room is given up: %s", refused.message, extra=fields(room))
                return

    async def _held(self, room: BootstrapRoom, writer: Prefill, pages: int, ticket: bytes, trace: RoomTrace) -> None:
        with trace.beside(SpanName.QUARANTINE, pages=pages, writer=writer.instance.instance_id):
            await self._seek_proof(room, writer, ticket)

    async def _seek_proof(self, room: BootstrapRoom, writer: Prefill, ticket: bytes) -> None:
        while room in self.quarantine:
            await self._seek_once(room, writer, ticket)
            self._proof.set()
            self._proof.clear()
            if room in self.quarantine:
                await asyncio.sleep(_ASK_AGAIN_S)

    async def _seek_once(self, room: BootstrapRoom, writer: Prefill, ticket: bytes) -> None:
        if writer.fenced.is_set():
            self.quarantine.fenced(room, writer.instance)
        if process_is_gone(writer.process):
            self.quarantine.process_gone(writer.process)
        elif await self._asked(room, writer, ticket):
            self.quarantine.drained(room, writer.instance)

    async def _asked(self, room: BootstrapRoom, writer: Prefill, ticket: bytes) -> bool:
        # A connection of its own each time: that of the pairing may be closed, and certificates change meanwhile.
        connection = self._dial(writer.connection.address, Role.PREFILL)
        try:
            given_up = RoomAborted("decode gave the room up", room=room)
            await PeerClient(connection).abort_room(room, given_up, writer.instance, ticket=ticket)
        except PdError as error:
            _log.debug("no drain proof yet: %s", error.message, extra=fields(room))
            return False
        finally:
            await connection.close()
        return True
