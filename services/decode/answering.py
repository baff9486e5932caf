"""The answer of a room, from its first token to its last, however often its pages are given to others meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pd_common.aio import finished_even_if_cancelled
from pd_common.control.outputs import OutputHub
from pd_common.engine.engine import Engine
from pd_common.errors import InternalError
from pd_common.generation import GenerationRequest
from pd_common.handoff.metadata import HandoffMetadata
from pd_common.telemetry.spans import SpanName
from services.decode.host_copies import HostCopies
from services.decode.memory import Allocation, DecodeMemory
from services.decode.queues import PreallocQueue
from services.decode.rooms import Room, set_memory_aside
from services.decode.scheduler import DecodeScheduler


class Answering:
    """Writes answers with the scheduler, and brings those back that it has retracted."""

    def __init__(
        self,
        engine: Engine,
        scheduler: DecodeScheduler,
        memory: DecodeMemory,
        queue: PreallocQueue,
        copies: HostCopies,
        hub: OutputHub,
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._memory = memory
        self._queue = queue
        self._copies = copies
        self._hub = hub

    def use(self, fetch_again: Callable[[Room], Awaitable[bool]]) -> None:
        """Has prefill compute what a room has lost, into new pages; False when that is not to be had."""
        self._fetch_again = fetch_again

    async def alone(self, room: Room) -> None:
        """Computes the prompt here and writes the whole answer; the room has pages, perhaps with a cached prefix."""
        room.builder = self._engine.new_answer(room.request, room.sequence.computed)
        await self._write(room)

    async def go_on(self, room: Room, metadata: HandoffMetadata) -> None:
        """Writes the answer whose first token came with the prompt's KV. Stop rules see that token here first."""
        allocation, request = _held(room), room.request
        room.trace.enter(SpanName.FIRST_TOKEN)
        room.builder = self._engine.new_answer(request, self._cached_tokens(request, metadata, allocation))
        self._queue.share(allocation)  # from here on the prefix is more than what was found
        room.sequence.append(metadata.first_token)
        piece = room.builder.accept(metadata.first_token, metadata.logprob)
        self._hub.publish([piece])
        room.trace.first_token()
        if not piece.is_last:
            await self._write(room)

    async def leave(self, room: Room) -> None:
        """Takes the room out of every step; then what it still holds is nobody else's concern."""
        if room.answer is not None:
            await self._scheduler.leave(room.answer)
            _settle(room)
        if room.builder is not None and room.allocation is None:
            self._queue.grant()  # its pages were given up for others, and it will not come back for new ones
        if room.copy is not None:
            self._copies.drop(room.copy)
            room.copy = None

    async def _write(self, room: Room) -> None:
        while await self._is_retracted(room):
            await self._come_back(room)

    async def _is_retracted(self, room: Room) -> bool:
        """Writes on; False when the answer is complete."""
        if room.builder is None:
            raise InternalError("an answer is written without its builder", room=room.number)
        answer = room.answer = self._scheduler.start(_held(room), room.builder)
        if not room.sequence.output:
            room.trace.enter(SpanName.PROMPT_COMPUTE, cached_tokens=room.sequence.computed)
            await answer.began.wait()
            if room.sequence.output:
                room.trace.first_token()
            self._queue.grant()  # others may begin with this prompt now
        stage = room.trace.enter(SpanName.DECODE_STEPS)
        before = len(room.sequence.output)
        await asyncio.shield(answer.ended)
        stage.attributes["tokens"] = len(room.sequence.output) - before
        return _settle(room)

    async def _come_back(self, room: Room) -> None:
        """Pages again, with all KV but that of the last token, which its reader has seen and which stays as it is."""
        sequence = room.sequence
        if room.copy is not None:
            allocation = await set_memory_aside(room, self._queue, sequence.num_tokens - 1, slot=False)
            room.trace.enter(SpanName.RESTORE, way="host copy")
            cached = len(allocation.prefix.pages)
            await finished_even_if_cancelled(self._copies.load(room.copy, cached, allocation.own_pages))
            sequence.computed = sequence.num_tokens - 1
            self._copies.drop(room.copy)
            room.copy = None
        elif not (sequence.output and await self._fetch_again(room)):
            await set_memory_aside(room, self._queue, sequence.num_tokens - 1, slot=False)

    def _cached_tokens(self, request: GenerationRequest, metadata: HandoffMetadata, allocation: Allocation) -> int:
        """What one engine alone would have found in its cache: the better of both, and never the whole prompt."""
        page_size = self._memory.page_size
        most = (len(request.prompt) - 1) // page_size * page_size
        return max(metadata.cached_tokens.total, min(len(allocation.prefix.pages) * page_size, most))


def _held(room: Room) -> Allocation:
    if room.allocation is None:
        raise InternalError("an answer is written without pages", room=room.number)
    return room.allocation


def _settle(room: Room) -> bool:
    """Notes what the scheduler has done with the room's pages: True when it has given them to others."""
    answer, room.answer = room.answer, None
    if answer is None or not answer.ended.done() or answer.ended.cancelled() or answer.ended.exception() is not None:
        return False
    retracted = answer.ended.result()
    if retracted is None:
        return False
    room.allocation, room.copy = None, retracted.copy
    return True
