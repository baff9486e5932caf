"""One request on decode: what it is, how far it has come, and what it holds."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass

from pd_common.aio import RoomTask
from pd_common.engine.output import AnswerBuilder
from pd_common.engine.request import Sequence
from pd_common.generation import GenerationRequest
from pd_common.handoff.receiver import KVReceiver
from pd_common.telemetry.spans import SpanName
from pd_common.telemetry.tracing import RoomTrace, Stage
from pd_common.types import BootstrapRoom
from services.decode.answers import Answer
from services.decode.host_copies import HostCopy
from services.decode.memory import Allocation
from services.decode.pairing import Prefill
from services.decode.queues import PreallocQueue, WaitsFor


@dataclass(slots=True, eq=False)
class Room:
    """A request that is being served, and what it holds.

    `sequence` begins with the request's prompt. `offered_to` is set as soon as a prefill may know the pages; from then
    on only the drain gives them back, or the commit makes them this room's alone; `receiver` goes with it. `concluded`
    tells the prefill's report how the commit went. `has_turn` once it has had memory; one that has lost it again waits
    before all others, and `waiting_since` is for those that have never had any. `written`: all is there, as has
    been found in memory, or as prefill has said.
    """

    request: GenerationRequest
    sequence: Sequence
    prompt_digest: bytes
    deadline_s: float
    trace: RoomTrace
    written: asyncio.Future[None]
    concluded: asyncio.Event
    has_turn: bool = False
    waiting_since: float | None = None
    task: RoomTask | None = None
    prefill: Prefill | None = None
    allocation: Allocation | None = None
    offered_to: Prefill | None = None
    receiver: KVReceiver | None = None
    builder: AnswerBuilder | None = None
    answer: Answer | None = None
    copy: HostCopy | None = None

    @property
    def number(self) -> BootstrapRoom:
        return self.request.room

    async def ended(self) -> None:
        """Returns when it has concluded."""
        if self.task is not None:
            await self.task.ended()


class _Wait:
    """Says on a stage what it waits for last, as soon as that is known, and how long it has waited for each thing."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._waited_ms: dict[WaitsFor, float] = defaultdict(float)
        self._now: WaitsFor | None = None
        self._since_s = 0.0

    def goes_on(self, what: WaitsFor) -> None:
        """From now on it waits for this."""
        self.note()
        self._now, self._since_s = what, time.monotonic()
        self._stage.attributes["pd.waited_for"] = what.value

    def note(self) -> None:
        """What it has waited for until now; at the end, or before something else."""
        if self._now is not None:
            self._waited_ms[self._now] += 1e3 * (time.monotonic() - self._since_s)
            self._stage.attributes[f"pd.waited_for_{self._now}_ms"] = round(self._waited_ms[self._now], 3)


async def set_memory_aside(room: Room, queue: PreallocQueue, find: int, *, slot: bool) -> Allocation:
    """Waits for its turn and for pages; `find` tokens are looked for in the prefix cache, see `DecodeMemory`."""
    wait = _Wait(room.trace.enter(SpanName.PREALLOC_WAIT))
    room.waiting_since = None if room.has_turn else time.monotonic()
    try:
        allocation = await queue.acquire(room.sequence, find, slot=slot, returning=room.has_turn, told=wait.goes_on)
    finally:
        wait.note()
        room.waiting_since = None
    room.allocation, room.has_turn = allocation, True
    room.trace.enter(SpanName.ALLOCATE, pages=len(room.sequence.pages), cached_pages=len(allocation.prefix.pages))
    return allocation
