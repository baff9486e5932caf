"""How much of everything: lengths in tokens, and how many requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the scenarios send. An answer that nobody measures has `short` tokens."""

    short: int
    kv_cache_tokens: int
    """Of every pool, but where one is to be full."""
    streams: int
    stream_tokens: int
    alone_s: float
    """How long streams run before the first prompt arrives."""
    load_prompt: int
    load_requests: int
    ttft_prompts: tuple[int, ...]
    prefix: int
    prefix_prompt: int
    fillers: int
    filler_prompt: int
    filler_tokens: int
    waiting_prompt: int


FULL = Sizes(
    short=8,
    kv_cache_tokens=32768,
    streams=8,
    stream_tokens=2048,
    alone_s=3.0,
    load_prompt=2048,
    load_requests=24,
    ttft_prompts=(1024, 4096),
    prefix=3584,
    prefix_prompt=4096,
    fillers=4,
    filler_prompt=1024,
    filler_tokens=192,
    waiting_prompt=2048,
)
QUICK = Sizes(
    short=4,
    kv_cache_tokens=1024,
    streams=2,
    stream_tokens=64,
    alone_s=0.2,
    load_prompt=128,
    load_requests=3,
    ttft_prompts=(64,),
    prefix=224,
    prefix_prompt=256,
    fillers=2,
    filler_prompt=64,
    filler_tokens=32,
    waiting_prompt=128,
)
