"""Fake rooms on prefill (see pd_common/transport/fake.py): what stands for decode's offer."""

from __future__ import annotations

from pd_common.generation import GenerationRequest
from pd_common.handoff.destination import Offer
from pd_common.handoff.digest import digest_prompt
from pd_common.handoff.metadata import Slot
from pd_common.types import Instance


def offer_of_nothing(instance: Instance, request: GenerationRequest) -> Offer:
    """No pages, offered by this process to itself: it settles the room, so that no decode can offer pages for it."""
    return Offer(
        receiver=instance,
        pages=(),
        slot=Slot(0, 0),
        decode_prefix_len=0,
        prompt_tokens=len(request.prompt),
        prompt_digest=digest_prompt(request.prompt),
    )
