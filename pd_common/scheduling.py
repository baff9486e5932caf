"""Settings of queues and batches of the engine processes, and their options: default <- PD_* environment <- flag."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from pd_common.config import apply_options
from pd_common.errors import InvalidRequest

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class SchedulingConfig:
    """What prefill and decode have in common: how much goes into a step, and how long what does not may wait.

    Raises:
        InvalidRequest: a wait without an end.

    """

    max_running_requests: int
    chunked_prefill_size: int
    enable_prefix_cache: bool
    max_queued_requests: int
    queue_timeout_s: float
    check_integrity: bool

    def __post_init__(self) -> None:
        if not 0 < self.queue_timeout_s < math.inf:
            raise InvalidRequest("--queue-timeout must be more than 0 seconds and end some day", field="queue_timeout")


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How decode gives its memory to requests that grow."""

    max_running_requests: int
    page_size: int
    kv_cache_tokens: int
    num_reserved_decode_tokens: int
    decode_extra_slots: int | None
    host_kv_tokens: int | None
    test_retract_every: int

    @property
    def rows(self) -> int:
        """Requests that may hold pages at a time: those that run, and those whose pages are on their way."""
        extra = self.max_running_requests if self.decode_extra_slots is None else self.decode_extra_slots
        return self.max_running_requests + extra

    @property
    def host_pages(self) -> int:
        """Pages that may be kept in host memory."""
        tokens = self.kv_cache_tokens if self.host_kv_tokens is None else self.host_kv_tokens
        return -(-tokens // self.page_size)


def scheduling_options(command: _F) -> _F:
    """What prefill and decode have in common."""
    return apply_options(
        command,
        click.option(
            "--max-running-requests", default=32, type=click.IntRange(min=1), help="Most requests in one engine step.",
        ),
        click.option(
            "--chunked-prefill-size", default=2048, type=click.IntRange(min=1),
            help="Most prompt tokens in one engine step; longer prompts are computed in chunks.",
        ),
        click.option(
            "--enable-prefix-cache/--no-enable-prefix-cache", " /--disable-radix-cache", "enable_prefix_cache",
            default=True, help="Keep pages of ended requests for prompts that begin in the same way.",
        ),
        click.option(
            "--max-queued-requests", default=1024, type=click.IntRange(min=0),
            help="Requests that may wait for their turn; one more is refused with 429. 0: no limit.",
        ),
        click.option(
            "--queue-timeout", "queue_timeout_s", default=60.0, type=float, envvar="PD_QUEUE_TIMEOUT",
            help="Seconds that a request may wait for its turn; then it is refused with 429.",
        ),
        click.option(
            "--check-integrity/--no-check-integrity", default=False,
            help="For tests, slow: count all pages after every engine step, and stop at once if one is lost.",
        ),
    )  # fmt: skip


def decode_options(command: _F) -> _F:
    """How decode gives its memory to requests that grow."""
    return apply_options(
        command,
        click.option(
            "--num-reserved-decode-tokens", default=512, type=click.IntRange(min=0),
            help="Tokens of memory kept for each request to grow before another is let in; no more than it asks for.",
        ),
        click.option(
            "--decode-extra-slots", "--disaggregation-decode-extra-slots", "decode_extra_slots",
            type=click.IntRange(min=0),
            help="Requests that may hold memory beside the running ones, to be filled by prefill meanwhile.  "
            "[default: as many as --max-running-requests]",
        ),
        click.option(
            "--host-kv-tokens", type=click.IntRange(min=0),
            help="Tokens whose KV is kept in host memory when a request gives its memory up to others for a while; "
            "what does not fit is computed again.  "
            "[default: as many as the pool holds]",
        ),
        click.option("--test-retract-every", default=0, type=click.IntRange(min=0), hidden=True),
    )  # fmt: skip
