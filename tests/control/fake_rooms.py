"""A process of the control plane without an engine: real table and real hub, rooms that do only what a test says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from opentelemetry.context import Context

from pd_common.control.outputs import OutputHub
from pd_common.control.peers import Peer
from pd_common.control.rooms import PoolStatus, TransferReport
from pd_common.errors import InvalidRequest, PdError
from pd_common.generation import ChatMessage, GenerationRequest, Load, ModelInfo, Output
from pd_common.handoff.deadlines import Timeouts
from pd_common.handoff.quarantine import Held
from pd_common.handoff.state import Transfer, TransferState
from pd_common.handoff.table import TransferTable
from pd_common.types import BootstrapRoom, Instance, Role

POOL = PoolStatus(
    64, 40, 8, 6, 3, 1, live_rooms=2, pages_cached=5, requests_queued=7, requests_retracted=3, pages_on_host=9
)
IDLE = Load(queued=0, max_queued=8, oldest_wait_s=0.0, running=0, pages_total=64, pages_available=64)
MODEL = ModelInfo("tiny", 256, 128, 1000, 16, has_chat_template=True)


class FakeRooms:
    """A RoomService. What was asked of it waits in queues for the test to look at; `refusal` meets every request."""

    def __init__(self, hub: OutputHub) -> None:
        self.instance = Instance("decode-0", 7)
        self.transfers = TransferTable(Role.DECODE, 60.0, 100, Timeouts(300.0, 300.0))
        self.submitted: asyncio.Queue[tuple[GenerationRequest, Context]] = asyncio.Queue()
        self.aborted: asyncio.Queue[tuple[BootstrapRoom, PdError]] = asyncio.Queue()
        self.abandoned: asyncio.Queue[tuple[BootstrapRoom, PdError]] = asyncio.Queue()
        self.reports: list[TransferReport] = []
        self.refusal: PdError | None = None
        self.to_do = IDLE
        self.held: tuple[Held, ...] = ()
        self.paired: tuple[Peer, ...] = ()
        self._hub = hub

    def pool_status(self) -> PoolStatus:
        return POOL

    def load(self) -> Load:
        return self.to_do

    def quarantined(self) -> tuple[Held, ...]:
        return self.held

    def peers(self) -> tuple[Peer, ...]:
        return self.paired

    def submit(self, request: GenerationRequest, parent: Context) -> None:
        if self.refusal is not None:
            raise self.refusal
        now = time.monotonic()
        self.transfers.open(
            request.room, rid=request.rid, prompt_digest=b"", deadline_s=now + request.timeout_s, now=now
        )
        self.submitted.put_nowait((request, parent))

    async def abort(self, room: BootstrapRoom, error: PdError) -> TransferState | None:
        known = self.transfers.find(room)
        self.transfers.abort(room, error, time.monotonic())
        self._hub.publish([Output(room, error=error)])
        self.aborted.put_nowait((room, error))
        return None if known is None else self.transfers.get(room).state

    def abandon(self, room: BootstrapRoom, error: PdError) -> None:
        self.transfers.fail(room, error, time.monotonic())
        self.abandoned.put_nowait((room, error))

    async def report(self, report: TransferReport) -> Transfer:
        self.reports.append(report)
        if report.failure is not None:
            self.transfers.fail(report.room, report.failure, time.monotonic())
        else:
            self.transfers.advance(report.room, report.state, time.monotonic(), progress=report.progress)
        return self.transfers.get(report.room)


class FakeModel:
    """A TextModel whose tokens are the code points of the text."""

    model_info = MODEL

    def tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(ord(character) for character in text)

    def apply_chat_template(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        if not messages:
            raise InvalidRequest("a chat needs a message", field="messages")
        return self.tokenize("".join(f"{message.role}:{message.content};" for message in messages))
