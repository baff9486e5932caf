"""Rooms that no prefill writes (see pd_common/transport/fake.py): what their answer goes on from."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from pd_common.aio import finished_even_if_cancelled
from pd_common.engine.engine import Engine
from pd_common.generation import GenerationRequest
from pd_common.handoff.metadata import HandoffMetadata

_SALT_BYTES = 16


async def made_up(engine: Engine, request: GenerationRequest, pages: Sequence[int]) -> HandoffMetadata:
    """Zeros stand for the prompt's KV, the last token said again for the first of the answer."""
    if request.sampling.max_new_tokens > 1:
        await finished_even_if_cancelled(engine.zero_pages(tuple(pages)))
    return HandoffMetadata(request.prompt[-1], len(request.prompt))


def unfindable(request: GenerationRequest) -> GenerationRequest:
    """The request with a salt that nobody else has: what is made up of its prompt must not be found in the cache."""
    return replace(request, cache_salt=secrets.token_bytes(_SALT_BYTES))
