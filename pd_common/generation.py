"""What a client asks for and what it gets: one request, its sampling rules, and pieces of its answer.

Plain values for the router, both engines and the control plane; token ids are the only currency between processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pd_common.errors import PdError
from pd_common.types import BootstrapAddress, BootstrapRoom

MAX_TOP_LOGPROBS = 20
"""Most alternatives per token that can be asked for; the handoff row has room for as many."""


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    HANDED_OFF = "handed_off"
    """Prefill's leg only: the KV pages and the first token are with decode."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. `temperature` 0 is greedy; `top_k` 0 means no limit."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt for one pair, or for one decode alone: then `bootstrap` is None.

    `rid` is the client's own name for it, `ticket` the right to the room. Only prompts of the same `cache_salt` share
    what is cached of them. Of those that wait the ones of the highest `priority` come first.
    """

    rid: str
    room: BootstrapRoom
    bootstrap: BootstrapAddress | None
    prompt: tuple[int, ...]
    sampling: SamplingParams
    return_logprob: bool = False
    top_logprobs: int = 0
    timeout_s: float = 300.0
    ticket: bytes = b""
    cache_salt: bytes = b""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a token under the unmodified model; `top` are the most likely ones in its place.

    `text` is the token by itself, filled in where the answer's text is made; a part of a character shows as U+FFFD.
    """

    token_id: int
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    """One piece of one room's answer. The last piece has `finish` or `error`, never both.

    `text` is the newly finished text only: a character or a possible stop string that is still incomplete is held back.
    `matched_stop` is the stop string or stop token that ended it.
    """

    room: BootstrapRoom
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    matched_stop: str | int | None = None
    usage: Usage | None = None
    error: PdError | None = field(default=None, compare=False)

    @property
    def is_last(self) -> bool:
        """No piece of this room follows."""
        return self.finish is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a client or a router must know of the model that an engine serves."""

    name: str
    context_length: int
    max_request_tokens: int
    vocab_size: int
    page_size: int
    has_chat_template: bool
    bootstrap: BootstrapAddress | None = None
    """The directory in which decode finds this prefill; None for its own."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request as a client of the router states it: the meeting place is optional, the router fills it in."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    rid: str | None = None
    room: BootstrapRoom | None = None
    bootstrap: BootstrapAddress | None = None
    return_logprob: bool = False
    top_logprobs: int = 0
    timeout_s: float = 300.0
    cache_salt: bytes = b""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """How much a process has to do, and room for more.

    `queued` requests wait for memory or to be computed, the first of them for `oldest_wait_s`; one more than
    `max_queued` (0: no limit) is refused, unless it is more urgent than the least urgent of them, whose priority is
    `least_priority`. `pages_available` are those that a new request could have. One that is `stopping` takes no new
    request at all.
    """

    queued: int
    max_queued: int
    oldest_wait_s: float
    running: int
    pages_total: int
    pages_available: int
    least_priority: int = 0
    stopping: bool = False

    @property
    def is_full(self) -> bool:
        """One more request can wait only in place of another."""
        return 0 < self.max_queued <= self.queued

    def refuses(self, priority: int) -> bool:
        """One more request of this priority would be refused."""
        return self.is_full and priority <= self.least_priority


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat; `role` is "system", "user" or "assistant"."""

    role: str
    content: str
