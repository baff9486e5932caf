from __future__ import annotations

from collections import Counter

import pytest
import torch

from pd_common.engine.batch import Draw
from pd_common.engine.sampler import Sampler, uniform
from pd_common.errors import InternalError
from pd_common.generation import SamplingParams

EOS = 3
LOGITS = torch.tensor([2.0, 1.0, 0.0, 4.0, 3.0, -1.0])


def draw(
    position: int = 0,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 1,
    generated: int = 0,
    min_new_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    top_logprobs: int | None = None,
) -> Draw:
    sampling = SamplingParams(
        max_new_tokens=10,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_new_tokens=min_new_tokens,
        stop_token_ids=stop_token_ids,
    )
    return Draw(sampling, seed, position, generated, top_logprobs)


def sample(draws: list[Draw], logits: torch.Tensor = LOGITS) -> list[int]:
    rows = logits.expand(len(draws), -1) if logits.dim() == 1 else logits
    return [token.token_id for token in Sampler(frozenset({EOS})).sample(rows, draws)]


def frequencies(count: int = 4000, **rules: float) -> Counter[int]:
    return Counter(sample([draw(position, **rules) for position in range(count)]))  # type: ignore[arg-type]


def test_temperature_zero_takes_the_likeliest() -> None:
    assert sample([draw(temperature=0.0)] * 2) == [3, 3]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_distribution(temperature: float) -> None:
    seen = frequencies(temperature=temperature)
    for token_id, share in enumerate((LOGITS / temperature).softmax(-1).tolist()):
        assert seen[token_id] / 4000 == pytest.approx(share, abs=0.03)


def test_top_k_leaves_exactly_k() -> None:
    assert set(frequencies(top_k=3)) == {3, 4, 0}


def test_top_k_leaves_exactly_k_among_equals() -> None:
    tied = [draw(position, top_k=2) for position in range(200)]
    assert len(set(sample(tied, torch.zeros(6)))) == 2


@pytest.mark.parametrize(("top_p", "kept"), [(0.6, {3}), (0.7, {3, 4}), (0.9, {3, 4, 0}), (1e-9, {3})])
def test_top_p_leaves_the_fewest_that_reach_it(top_p: float, kept: set[int]) -> None:
    """Shares in order: 0.64, 0.24, 0.09, 0.03, ..."""
    assert set(frequencies(top_p=top_p)) == kept


def test_top_p_is_taken_of_what_top_k_left() -> None:
    """Of two tokens the first has 0.73, so 0.7 is reached by it alone, while 0.64 of all tokens would not do."""
    assert set(frequencies(top_k=2, top_p=0.7)) == {3}


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    draws = [draw(position, seed=seed) for seed in (1, 2) for position in range(20)]
    together = sample(draws)
    assert together == [sample([one])[0] for one in draws]
    assert together[:20] != together[20:]
    mixed = sample([draw(temperature=0.0), draws[5], draw(9, top_k=2), draws[30]])
    assert (mixed[1], mixed[3]) == (together[5], together[30])


def test_uniform_is_below_one_and_accepts_every_allowed_seed() -> None:
    numbers = [uniform(seed, position) for seed in (-(2**63), -1, 0, 2**64 - 1) for position in range(50)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == 150  # -1 and 2^64 - 1 are the same 64 bits


@pytest.mark.parametrize("temperature", [1e-300, 1e-9])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert set(frequencies(50, temperature=temperature)) == {3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_that_end_an_answer_are_banned_until_min_new_tokens(temperature: float) -> None:
    rules = [
        draw(position, temperature=temperature, min_new_tokens=3, generated=2, stop_token_ids=(4,))
        for position in range(100)
    ]
    assert not {3, 4} & set(sample(rules))
    reached = [draw(position, temperature=temperature, min_new_tokens=3, generated=3) for position in range(100)]
    assert 3 in sample(reached)


def test_bans_do_not_touch_the_neighbours_or_the_logprobs() -> None:
    logits = LOGITS.repeat(2, 1)
    tokens = Sampler(frozenset({EOS})).sample(
        logits, [draw(temperature=0.0, min_new_tokens=1, top_logprobs=1), draw(temperature=0.0)]
    )
    assert [token.token_id for token in tokens] == [4, 3]
    truth = LOGITS.log_softmax(-1)
    assert tokens[0].logprob is not None
    assert tokens[0].logprob.logprob == pytest.approx(truth[4].item())
    (likeliest,) = tokens[0].logprob.top
    assert likeliest.token_id == 3
    assert likeliest.logprob == pytest.approx(truth[3].item())
    assert torch.equal(logits, LOGITS.repeat(2, 1))


def test_logprobs_are_of_the_model_not_of_the_rules() -> None:
    (token,) = Sampler(frozenset()).sample(LOGITS[None], [draw(temperature=0.1, top_k=1, top_logprobs=0)])
    assert token.logprob is not None
    assert token.logprob.logprob == pytest.approx(LOGITS.log_softmax(-1)[3].item())
    assert token.logprob.top == ()


def test_only_who_asks_gets_logprobs() -> None:
    tokens = Sampler(frozenset()).sample(LOGITS.repeat(3, 1), [draw(top_logprobs=1), draw(), draw(top_logprobs=20)])
    assert [None if token.logprob is None else len(token.logprob.top) for token in tokens] == [1, None, 6]


def test_numbers_that_are_not_finite_are_an_error() -> None:
    with pytest.raises(InternalError, match="finite"):
        sample([draw(temperature=0.0)], torch.tensor([0.0, float("nan")]))


def test_no_draw_no_token() -> None:
    assert Sampler(frozenset()).sample(LOGITS[None][:0], []) == ()
