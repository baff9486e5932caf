"""Rooms that no prefill writes (see pd_common/transport/fake.py): what their answer goes on from."""

from __future__ import annotations

from pd_common.aio import finished_even_if_cancelled
from pd_common.engine.engine import Engine
from pd_common.generation import GenerationRequest
from pd_common.handoff.metadata import HandoffMetadata
from pd_common.types import PageIndices


async def made_up(engine: Engine, request: GenerationRequest, pages: PageIndices) -> HandoffMetadata:
    """Zeros stand for the prompt's KV, the last token said again for the first of the answer."""
    if request.sampling.max_new_tokens > 1:
        await finished_even_if_cancelled(engine.zero_pages(pages))
    return HandoffMetadata(request.prompt[-1], len(request.prompt))
