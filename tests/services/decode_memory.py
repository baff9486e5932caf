"""Decode's memory at its smallest, and requests for it: for tests of what hands it out."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from pd_common.engine.request import Sequence
from pd_common.generation import GenerationRequest, SamplingParams
from pd_common.handoff.metadata import MetadataBuffers
from pd_common.kv.pages import PageAllocator
from pd_common.kv.prefix import PrefixCache
from pd_common.types import BootstrapRoom
from services.decode.memory import Allocation, DecodeMemory

PAGE_SIZE = 2
NUM_PAGES = 16
NUM_SLOTS = 4


def a_memory(num_pages: int = NUM_PAGES, num_slots: int = NUM_SLOTS, page_size: int = PAGE_SIZE) -> DecodeMemory:
    prefixes = PrefixCache(PageAllocator(num_pages), page_size)
    return DecodeMemory(prefixes, MetadataBuffers(num_slots), page_size)


def a_sequence(prompt: Tokens[int], max_new_tokens: int = 1, priority: int = 0, salt: bytes = b"") -> Sequence:
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    room = BootstrapRoom(1)
    return Sequence(GenerationRequest("test", room, None, tuple(prompt), sampling, cache_salt=salt, priority=priority))


def come_to_run(memory: DecodeMemory, allocation: Allocation) -> None:
    """As when the prompt's KV has arrived and its first token is known."""
    sequence = allocation.sequence
    sequence.computed = len(sequence.request.prompt)
    memory.free_slot(allocation)
    memory.share(allocation)
    sequence.append(7)
