"""One request on prefill: what is computed for it, who has offered memory for it, and what it holds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from pd_common.aio import RoomTask
from pd_common.generation import GenerationRequest
from pd_common.handoff.destination import Destination
from pd_common.telemetry.tracing import RoomTrace
from services.prefill.handover import Handover
from services.prefill.job import Job
from services.prefill.reports import Reports


@dataclass(frozen=True, slots=True)
class Offered:
    """Decode's pages for a room, and the way to speak to this decode about it; `at` is when it came, monotonic."""

    destination: Destination
    reports: Reports
    at: float


@dataclass(slots=True, eq=False)
class Room:
    """A request that is being served; `offered` is set when decode has offered pages."""

    request: GenerationRequest
    trace: RoomTrace
    offered: asyncio.Future[Offered]
    task: RoomTask | None = None
    job: Job | None = None
    handover: Handover | None = None

    @property
    def reports(self) -> Reports | None:
        """None as long as decode has not been heard of."""
        known = self._known_offer
        return None if known is None else known.reports

    @property
    def decode_decides(self) -> bool:
        """Everything is written: how the room ends is for decode to say, whatever happens here."""
        return self.reports is not None and self.reports.decode_decides

    @property
    def has_turn(self) -> bool:
        """It has pages, be it before anybody has offered any for it."""
        return self.job is not None and self.job.turn.is_set()

    @property
    def waiting_since(self) -> float | None:
        """Before decode's offer it is the other leg that it waits for. Of no meaning once it has its turn."""
        known = self._known_offer
        return None if known is None else known.at

    @property
    def _known_offer(self) -> Offered | None:
        return self.offered.result() if self.offered.done() and not self.offered.cancelled() else None


def own_leg(request: GenerationRequest) -> GenerationRequest:
    """What prefill does of a request: one token, and no rule ends the answer here.

    Whatever decides which token it is stays: `min_new_tokens` forbids those that would end the answer too early, among
    them `stop_token_ids`.
    """
    sampling = replace(request.sampling, max_new_tokens=1, ignore_eos=True, stop=())
    return replace(request, sampling=sampling)
