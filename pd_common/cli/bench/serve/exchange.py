"""Requests and what came back: when each piece arrived, and how it ended. Knows no network."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no whole answer. Without a status there was no answer at all, or it broke off."""

    status: int | None
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Usage:
    """The server's own count."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Exchange:
    """Grows while the answer comes in. Times are of one steady clock, in seconds."""

    number: int
    sent_s: float = 0.0
    arrived_s: list[float] = field(default_factory=list)
    """When each event with a part of the answer arrived."""
    done_s: float | None = None
    """When the answer was whole."""
    usage: Usage | None = None
    failure: Failure | None = None
    on_first: Callable[[], None] | None = None
    """Called when the first part has arrived."""

    def take(self, event: bytes, now_s: float) -> None:
        """One event of the stream."""
        if event == _DONE:
            self.done_s = now_s
            return
        try:
            document = json.loads(event)
        except ValueError:
            self.failure = Failure(200, "not_json", f"an event is not JSON: {event[:200].decode(errors='replace')}")
            return
        if "error" in document or document.get("object") == "error":
            self.failure = failure_of(200, document)
            return
        if _has_part(document, is_first=not self.arrived_s):
            self._part(now_s)
        if document.get("usage"):
            self.usage = _usage(document["usage"])

    def _part(self, now_s: float) -> None:
        self.arrived_s.append(now_s)
        if len(self.arrived_s) == 1 and self.on_first is not None:
            self.on_first()

    def end(self) -> None:
        """The stream has ended."""
        if self.failure is None and self.done_s is None:
            self.failure = Failure(200, "cut_short", "the stream ended without [DONE]")

    @property
    def is_answered(self) -> bool:
        return self.done_s is not None and self.failure is None and bool(self.arrived_s)

    @property
    def ttft_s(self) -> float:
        """Until the first part of the answer, which there must be."""
        return self.arrived_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """From each part of the answer to the next."""
        return [later - earlier for earlier, later in pairwise(self.arrived_s)]

    @property
    def last_s(self) -> float:
        """The latest moment that is known of it."""
        return max(self.sent_s, self.done_s or 0.0, *self.arrived_s[-1:])

    @property
    def output_tokens(self) -> int:
        """As the server counts; the parts that arrived where it does not."""
        return len(self.arrived_s) if self.usage is None else self.usage.output_tokens


@dataclass(slots=True)
class Log:
    """All that a run has seen so far; whole enough at any moment for figures of it."""

    prompts: list[Exchange] = field(default_factory=list)
    """Without those that warm up."""
    background: list[Exchange] = field(default_factory=list)
    alone_from_s: float = 0.0
    """When all background streams had begun."""
    prompts_from_s: float | None = None
    """When the first prompt of all was due; None: not yet."""
    late_s: list[float] = field(default_factory=list)
    """How late the client itself was, each time that it looked."""


def failure_of(status: int, document: Any) -> Failure:
    """What an error says of itself, in OpenAI's shape or in those that servers make of it."""
    error = document.get("error", document) if isinstance(document, Mapping) else document
    if not isinstance(error, Mapping):
        return Failure(status, "unknown", str(error))
    code = error.get("code") or error.get("type") or "unknown"
    return Failure(status, str(code), str(error.get("message") or error.get("detail") or error))


def _has_part(document: Mapping[str, Any], *, is_first: bool) -> bool:
    """Whether the event carries tokens: one without text does too (a character may take more), but not the last."""
    choices = document.get("choices")
    if not choices:
        return False
    return bool(choices[0].get("text")) or choices[0].get("finish_reason") is None or is_first


def _usage(usage: Mapping[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    return Usage(usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens") or 0)
