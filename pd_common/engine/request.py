"""One request inside one engine: what is known of it so far, and whether it may come in at all.

Knows no tensor, no scheduler and no peer.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from pd_common.errors import InvalidRequest, PromptEmpty, PromptTooLong
from pd_common.generation import MAX_TOP_LOGPROBS, GenerationRequest, SamplingParams
from pd_common.types import MAX_ROOM

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 128


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can take: tokens of the model's context, tokens of the KV pool, and the size of the vocabulary."""

    context_length: int
    pool_tokens: int
    vocab_size: int
    has_tokenizer: bool = True

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of prompt and answer together."""
        return min(self.context_length, self.pool_tokens)


class Sequence:
    """The prompt and the answer so far; the KV of tokens `[0, computed)` is in `pages`, in order.

    `pages` may be longer than what is computed needs. `turn` is its place among others, which it keeps when it loses
    its pages; None before it has one. Owned by the event loop; a running step holds copies.
    """

    def __init__(self, request: GenerationRequest) -> None:
        sampling = request.sampling
        self.request = request
        self.seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self.output: list[int] = []
        self.pages: list[int] = []
        self.computed = 0
        self.turn: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.request.prompt) + len(self.output)

    @property
    def uncomputed(self) -> int:
        """Tokens whose KV is not in the pool yet; 1 while decoding."""
        return self.num_tokens - self.computed

    def next_span(self, budget_tokens: int) -> tuple[int, int]:
        """Start and end of the next tokens to compute, at most `budget_tokens` of them."""
        return self.computed, self.computed + min(self.uncomputed, budget_tokens)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Token ids of positions `[start, end)`."""
        prompt = self.request.prompt
        if end <= len(prompt):
            return prompt[start:end]
        split = len(prompt)
        return (*prompt[start:], *self.output[max(start - split, 0) : end - split])

    def append(self, token_id: int) -> None:
        """Adds a sampled token; its KV is computed by the next step."""
        self.output.append(token_id)

    def pages_short(self, end: int, page_size: int) -> int:
        """Pages that are missing before the KV of tokens `[0, end)` has room."""
        return max(-(-end // page_size) - len(self.pages), 0)


def validate_request(request: GenerationRequest, limits: Limits, *, holds_answer: bool = True) -> None:
    """Raises when this engine could not serve the request correctly; the texts are the same on every path.

    `holds_answer` is False for an engine whose pool takes the prompt only.

    Raises:
        PromptEmpty: no token in the prompt.
        PromptTooLong: prompt and answer exceed the context or the KV pool.
        InvalidRequest: a field is out of range.

    """
    if not request.prompt:
        raise PromptEmpty("the prompt has no token")
    _check_identity(request)
    _check_sampling(request.sampling, limits)
    _check_length(len(request.prompt), request.sampling.max_new_tokens, limits, holds_answer)
    _check_token_ids("prompt", request.prompt, limits.vocab_size)
    _check_token_ids("stop_token_ids", request.sampling.stop_token_ids, limits.vocab_size)
    _check_range("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)


def _check_identity(request: GenerationRequest) -> None:
    _check_range("bootstrap_room", request.room, 1, MAX_ROOM)
    if not (math.isfinite(request.timeout_s) and request.timeout_s > 0):
        raise _out_of_range("timeout_s", request.timeout_s, "a positive number of seconds")


def _check_sampling(sampling: SamplingParams, limits: Limits) -> None:
    if sampling.max_new_tokens < 1:
        raise _out_of_range("max_new_tokens", sampling.max_new_tokens, "at least 1")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise _out_of_range("temperature", sampling.temperature, "a finite number, at least 0")
    if not 0 < sampling.top_p <= 1:
        raise _out_of_range("top_p", sampling.top_p, "above 0 and at most 1")
    if sampling.top_k < 0:
        raise _out_of_range("top_k", sampling.top_k, "at least 0 (0: no limit)")
    _check_range("min_new_tokens", sampling.min_new_tokens, 0, sampling.max_new_tokens)
    if sampling.seed is not None:
        _check_range("seed", sampling.seed, -(2**63), 2**64 - 1)
    _check_stop(sampling.stop, limits)
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise _out_of_range("stop_token_ids", len(sampling.stop_token_ids), f"at most {MAX_STOP_TOKEN_IDS} token ids")


def _check_stop(stop: tuple[str, ...], limits: Limits) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise _out_of_range("stop", len(stop), f"at most {MAX_STOP_STRINGS} strings")
    if "" in stop:
        raise _out_of_range("stop", "an empty string", "strings of at least one character")
    if stop and not limits.has_tokenizer:
        raise InvalidRequest("stop strings need a tokenizer and this model has none; use stop_token_ids", field="stop")


def _check_length(prompt_tokens: int, max_new_tokens: int, limits: Limits, holds_answer: bool) -> None:
    if prompt_tokens > limits.context_length:
        raise PromptTooLong(
            f"the prompt has {prompt_tokens} tokens, the model's context {limits.context_length}",
            prompt_tokens=prompt_tokens,
            context_length=limits.context_length,
        )
    answer_held = max_new_tokens if holds_answer else 0
    for name, room, tokens in (
        ("model's context", limits.context_length, prompt_tokens + max_new_tokens),
        ("KV pool", limits.pool_tokens, prompt_tokens + answer_held),
    ):
        if tokens > room:
            raise PromptTooLong(
                f"prompt and answer may take {prompt_tokens} + {max_new_tokens} tokens, the {name} has room for {room}",
                prompt_tokens=prompt_tokens,
                max_new_tokens=max_new_tokens,
                limit=room,
            )


def _check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{field} has token id {token_id}, the vocabulary ends at {vocab_size - 1}",
                field=field,
                token_id=token_id,
                vocab_size=vocab_size,
            )


def _check_range(field: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise _out_of_range(field, value, f"from {lowest} to {highest}")


def _out_of_range(field: str, value: object, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{field} is {value}, it must be {allowed}", field=field, value=value, allowed=allowed)
