"""What a retracted answer has lost is computed again by prefill, and handed over in a room of its own."""

from __future__ import annotations

import logging
import time
from contextlib import aclosing
from dataclasses import replace

from pd_common.aio import Tasks
from pd_common.control.generation_client import GenerationClient
from pd_common.control.tickets import TicketKeys
from pd_common.errors import PdError, RoomAborted
from pd_common.generation import GenerationRequest, SamplingParams
from pd_common.telemetry.logs import fields
from pd_common.telemetry.spans import SpanName
from pd_common.types import BootstrapAddress, new_room
from services.decode.handoff import Handoff
from services.decode.pairing import Prefill
from services.decode.prefills import Prefills
from services.decode.rooms import Room
from services.decode.service import DecodeService

_log = logging.getLogger(__name__)


class Refetch:
    """Asks the prefill that an answer came from. The last token, which its reader has seen, is not asked for again.

    A room is used once (I4), so this takes a new one, with pages, slot, digest, deadline and end like any other.
    """

    def __init__(self, service: DecodeService, handoff: Handoff, prefills: Prefills, keys: TicketKeys | None) -> None:
        """With `keys` the new room has a ticket."""
        self._service = service
        self._handoff = handoff
        self._prefills = prefills
        self._keys = keys
        self._legs = Tasks()

    async def again(self, room: Room) -> bool:
        """Whether the KV of all tokens but the last is in new pages of the room; if not it has none."""
        prefill, bootstrap = room.prefill, room.request.bootstrap
        if bootstrap is None or prefill is None or not self._prefills.is_current(prefill):
            return False
        room.trace.enter(SpanName.RESTORE, way="prefill")
        inner = await self._hand_over_again(room, bootstrap, prefill)
        if room.allocation is not None:
            return True
        failure = self._service.transfers.get(inner.number).failure
        _log.warning(
            "computed again here, not by prefill: %s", failure, extra=fields(room.number, rid=room.request.rid)
        )
        return False

    async def watch(self) -> None:
        """Raises InternalError when a call to prefill has died unexpectedly. Otherwise it never returns."""
        await self._legs.watch()

    async def close(self) -> None:
        await self._legs.close()

    async def _hand_over_again(self, room: Room, bootstrap: BootstrapAddress, prefill: Prefill) -> Room:
        async def receive(inner: Room) -> None:
            await self._handoff.receive(inner, bootstrap)
            room.allocation, inner.allocation = inner.allocation, None

        request = self._request_again(room)
        inner = self._service.open(request, room.sequence, SpanName.REFETCH, room.trace.context, receive)
        inner.has_turn = True  # it is as old as the answer that it is for
        inner.prefill = prefill  # which is told if it ends early
        self._legs.start(f"prefill's leg of room {inner.number}", self._ask(inner, prefill))
        try:
            await inner.ended()
        finally:  # the room may be stopped meanwhile; what it is given is given before it concludes
            self._service.abandon(inner.number, RoomAborted("the answer that it was for is over", room=inner.number))
            await inner.ended()
        return inner

    async def _ask(self, inner: Room, prefill: Prefill) -> None:
        client = GenerationClient(prefill.connection)
        try:
            async with aclosing(client.generate(inner.request, inner.trace.context)) as pieces:
                async for _ in pieces:
                    pass
        except PdError as error:
            self._service.abandon(inner.number, error)

    def _request_again(self, room: Room) -> GenerationRequest:
        sequence, number = room.sequence, new_room()
        left_s = room.deadline_s - time.monotonic()
        return replace(
            room.request,
            room=number,
            prompt=sequence.tokens(0, sequence.num_tokens - 1),
            sampling=SamplingParams(max_new_tokens=1),
            return_logprob=False,
            timeout_s=max(left_s, 0.1),
            ticket=b"" if self._keys is None else self._keys.sign(number, time.time() + left_s + 60.0),
        )
