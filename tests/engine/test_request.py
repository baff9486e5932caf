from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pd_common.engine.request import Limits, Sequence, validate_request
from pd_common.errors import InvalidRequest, PromptEmpty, PromptTooLong
from pd_common.generation import GenerationRequest
from pd_common.types import BootstrapRoom
from tests.engine.loop import make_request

LIMITS = Limits(context_length=64, pool_tokens=48, vocab_size=100)
VALID = make_request([1, 2, 3], max_new_tokens=8)


def with_sampling(**changes: Any) -> GenerationRequest:
    return replace(VALID, sampling=replace(VALID.sampling, **changes))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (replace(VALID, room=BootstrapRoom(0)), "bootstrap_room"),
        (replace(VALID, room=BootstrapRoom(2**64)), "bootstrap_room"),
        (replace(VALID, timeout_s=0), "timeout_s"),
        (replace(VALID, timeout_s=float("inf")), "timeout_s"),
        (replace(VALID, top_logprobs=21), "top_logprobs"),
        (replace(VALID, top_logprobs=-1), "top_logprobs"),
        (replace(VALID, prompt=(1, 100)), "prompt"),
        (replace(VALID, prompt=(-1,)), "prompt"),
        (with_sampling(max_new_tokens=0), "max_new_tokens"),
        (with_sampling(temperature=-0.1), "temperature"),
        (with_sampling(temperature=float("nan")), "temperature"),
        (with_sampling(temperature=float("inf")), "temperature"),
        (with_sampling(top_p=0.0), "top_p"),
        (with_sampling(top_p=1.1), "top_p"),
        (with_sampling(top_p=float("nan")), "top_p"),
        (with_sampling(top_k=-1), "top_k"),
        (with_sampling(min_new_tokens=-1), "min_new_tokens"),
        (with_sampling(min_new_tokens=9), "min_new_tokens"),
        (with_sampling(seed=2**64), "seed"),
        (with_sampling(stop=("x",) * 17), "stop"),
        (with_sampling(stop=("",)), "stop"),
        (with_sampling(stop_token_ids=(100,)), "stop_token_ids"),
        (with_sampling(stop_token_ids=(1,) * 129), "stop_token_ids"),
    ],
)
def test_a_field_out_of_range_is_named(request_: GenerationRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate_request(request_, LIMITS)
    assert caught.value.metadata["field"] == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    "request_",
    [
        VALID,
        replace(VALID, room=BootstrapRoom(2**64 - 1), top_logprobs=20),
        with_sampling(temperature=0.0, top_p=1.0, top_k=0),
        with_sampling(min_new_tokens=8, seed=-(2**63), stop=("x",) * 16, stop_token_ids=(99,)),
        make_request([1] * 40, max_new_tokens=8),
    ],
)
def test_the_last_allowed_values_are_allowed(request_: GenerationRequest) -> None:
    validate_request(request_, LIMITS)


def test_an_empty_prompt() -> None:
    with pytest.raises(PromptEmpty):
        validate_request(replace(VALID, prompt=()), LIMITS)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_new_tokens", "limits", "text"),
    [
        (65, 1, LIMITS, "the prompt has 65 tokens, the model's context 64"),
        (60, 5, LIMITS, "60 \\+ 5 tokens, the model's context has room for 64"),
        (41, 8, LIMITS, "41 \\+ 8 tokens, the KV pool has room for 48"),
    ],
)
def test_too_long(prompt_tokens: int, max_new_tokens: int, limits: Limits, text: str) -> None:
    with pytest.raises(PromptTooLong, match=text) as caught:
        validate_request(make_request([1] * prompt_tokens, max_new_tokens), limits)
    assert caught.value.metadata["prompt_tokens"] == str(prompt_tokens)


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(InvalidRequest, match="tokenizer"):
        validate_request(with_sampling(stop=("x",)), replace(LIMITS, has_tokenizer=False))


def test_spans_walk_through_prompt_and_answer() -> None:
    sequence = Sequence(make_request([10, 11, 12, 13, 14]))
    assert sequence.next_span(3) == (0, 3)
    sequence.computed = 3
    assert sequence.next_span(3) == (3, 5)
    sequence.computed = 5
    sequence.append(15)
    assert sequence.next_span(3) == (5, 6)
    assert sequence.uncomputed == 1


@pytest.mark.parametrize("start", range(5))
@pytest.mark.parametrize("end", range(5, 8))
def test_tokens_across_the_border_of_prompt_and_answer(start: int, end: int) -> None:
    sequence = Sequence(make_request([0, 1, 2, 3]))
    for token_id in (4, 5, 6):
        sequence.append(token_id)
    assert sequence.tokens(start, end) == tuple(range(start, end))
    assert sequence.tokens(0, 3) == (0, 1, 2)


def test_pages_short_counts_whole_pages() -> None:
    sequence = Sequence(make_request([1] * 20))
    assert [sequence.pages_short(end, 16) for end in (1, 16, 17, 33)] == [1, 1, 2, 3]
    sequence.pages.extend([7, 8])
    assert [sequence.pages_short(end, 16) for end in (32, 33)] == [0, 1]


def test_a_request_without_seed_gets_one_of_its_own() -> None:
    assert Sequence(VALID).seed != Sequence(VALID).seed
    assert Sequence(with_sampling(seed=5)).seed == 5
