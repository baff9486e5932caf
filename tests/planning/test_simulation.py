"""Requests through a simulated fleet: exact where it can be worked out, laws of queues where it cannot."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_common.errors import CapacityExceeded
from pd_common.planning.simulation import Arrival, Fleet, Outcome, simulate
from pd_common.planning.speeds import DecodeSpeed, HandoffSpeed, PrefillSpeed, Settings, Speeds

SPEEDS = Speeds(Settings(), PrefillSpeed(0.005, 1e-4, 2e-8), HandoffSpeed(0.01, 5e-6), DecodeSpeed(0.006, 0.0005, 1e-7))


def _poisson(per_s: float, count: int, prompt_tokens: int, output_tokens: int, seed: int = 0) -> list[Arrival]:
    gaps_s = np.random.default_rng(seed).exponential(1 / per_s, count).tolist()
    return [Arrival(at_s, prompt_tokens, output_tokens) for at_s in accumulate(gaps_s)]


def _ttft_s(outcome: Outcome) -> float:
    return fmean(each.ttft_s for each in outcome.served)


@given(
    prompt_tokens=st.integers(1, 9000),
    output_tokens=st.integers(1, 300),
    fleet=st.builds(Fleet, st.integers(1, 3), st.integers(1, 3)),
)
def test_a_single_request_takes_the_sum_of_its_parts(prompt_tokens: int, output_tokens: int, fleet: Fleet) -> None:
    (served,) = simulate(SPEEDS, fleet, [Arrival(3.0, prompt_tokens, output_tokens)]).served
    steps_s = [SPEEDS.decode.took_s(1, prompt_tokens + written) for written in range(output_tokens - 1)]
    assert served.ttft_s == pytest.approx(SPEEDS.ttft_s(prompt_tokens))
    assert served.e2e_s == pytest.approx(served.ttft_s + sum(steps_s))
    assert served.memory_s == served.queue_s == 0
    if steps_s:
        assert served.itl_s == pytest.approx(fmean(steps_s))
        assert served.itl_p99_s == pytest.approx(steps_s[math.ceil(0.99 * len(steps_s)) - 1])
    else:
        assert served.itl_s is served.itl_p99_s is None


def test_the_same_arrivals_give_the_same_outcome() -> None:
    arrivals = _poisson(6, 200, 900, 40)
    assert simulate(SPEEDS, Fleet(2, 2), arrivals) == simulate(SPEEDS, Fleet(2, 2), arrivals)


def test_prompts_are_computed_several_at_a_time_in_the_order_of_arrival() -> None:
    """The first has a step to itself; the other three come meanwhile, and two of them fill the next one."""
    arrivals = [Arrival(0.001 * number, 1024, 1) for number in range(4)]
    first, second, third, fourth = (each.ttft_s for each in simulate(SPEEDS, Fleet(1, 1), arrivals).served)
    one_s, token_s, handoff_s = SPEEDS.ttft_s(1024), 1e-4 * 1024 + 2e-8 * 1024 * 1025 / 2, SPEEDS.handoff.took_s(1024)
    two_s = one_s - handoff_s + token_s
    assert first == pytest.approx(one_s)
    assert (second, third) == pytest.approx((one_s + two_s - 0.001, one_s + two_s - 0.002))
    assert fourth == pytest.approx(one_s + two_s + one_s - handoff_s - 0.003)


def test_waiting_is_that_of_a_queue_with_one_server_and_constant_service() -> None:
    """M/D/1: the mean wait is rho / (2 (1 - rho)) services. Prompts fill a step, so none shares one."""
    service_s, rho = 0.1, 0.7
    speeds = replace(
        SPEEDS,
        prefill=PrefillSpeed(service_s, 0, 0),
        handoff=HandoffSpeed(0, 0),
        settings=Settings(kv_cache_tokens=10**7, max_running_requests=10**4),
    )
    outcome = simulate(speeds, Fleet(1, 1), _poisson(rho / service_s, 30_000, 2048, 1))
    assert fmean(each.queue_s for each in outcome.served) == pytest.approx(service_s * rho / (2 * (1 - rho)), rel=0.05)
    assert outcome.prefill_busy == pytest.approx(rho, rel=0.02)


def test_as_many_requests_are_there_as_littles_law_says() -> None:
    """Answers in decode = their rate x the time that one is there, counted in quite different ways."""
    arrivals = _poisson(5.0, 3000, 700, 81)
    outcome = simulate(SPEEDS, Fleet(2, 1), arrivals)
    there_s = fmean(each.e2e_s - each.ttft_s for each in outcome.served)
    rate_per_s = len(arrivals) / (arrivals[-1].at_s - arrivals[0].at_s)
    assert outcome.decode_answers * outcome.decode_busy == pytest.approx(rate_per_s * there_s, rel=0.02)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 1000),
    per_s=st.floats(1, 12),
    prompt_tokens=st.integers(100, 3000),
    output_tokens=st.integers(1, 80),
    fleet=st.builds(Fleet, st.integers(1, 3), st.integers(1, 3)),
)
def test_one_replica_more_does_not_make_first_tokens_later(
    seed: int, per_s: float, prompt_tokens: int, output_tokens: int, fleet: Fleet
) -> None:
    """Materially: prompts that no longer share a step pay for one each."""
    arrivals = _poisson(per_s, 150, prompt_tokens, output_tokens, seed)
    now_s = _ttft_s(simulate(SPEEDS, fleet, arrivals))
    for larger in (Fleet(fleet.prefills + 1, fleet.decodes), Fleet(fleet.prefills, fleet.decodes + 1)):
        assert _ttft_s(simulate(SPEEDS, larger, arrivals)) <= now_s * 1.02 + SPEEDS.prefill.step_s


def test_a_request_waits_for_pages_until_an_answer_ends() -> None:
    """Two do not fit: each may grow by its whole answer."""
    small = replace(SPEEDS, settings=Settings(kv_cache_tokens=2048))
    first, second = simulate(small, Fleet(1, 1), [Arrival(0.0, 1000, 100), Arrival(0.0, 1000, 100)]).served
    assert first.memory_s == 0
    assert second.memory_s == pytest.approx(first.e2e_s)
    assert simulate(small, Fleet(1, 2), [Arrival(0.0, 1000, 100)] * 2).served[1].memory_s == 0


@settings(max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 150), st.sampled_from((1, 2, 17, 100, 200))), min_size=1, max_size=40),
    reserve=st.integers(0, 64),
    running=st.integers(1, 8),
)
def test_with_too_little_memory_answers_give_pages_up_and_all_come_to_their_end(
    lengths: list[tuple[int, int]], reserve: int, running: int
) -> None:
    few = Settings(kv_cache_tokens=352, num_reserved_decode_tokens=reserve, max_running_requests=running)
    arrivals = [Arrival(0.01 * number, *each) for number, each in enumerate(lengths)]
    outcome = simulate(replace(SPEEDS, settings=few), Fleet(1, 1), arrivals)
    assert outcome.pages_most <= 1
    tokens = sum(output - 1 for _, output in lengths)
    made = sum(round((each.e2e_s - each.ttft_s) / each.itl_s) for each in outcome.served if each.itl_s)
    assert made == tokens


def test_who_has_given_its_pages_up_comes_back_only_if_it_can_go_on() -> None:
    """While a prompt that is being computed holds the rest of the memory it could not, however often it came back."""
    few = Settings(kv_cache_tokens=352, num_reserved_decode_tokens=0, max_running_requests=2)
    lengths = [(31, 17), (150, 17), (150, 100), (31, 1)]
    arrivals = [Arrival(0.01 * number, *each) for number, each in enumerate(lengths)]
    outcome = simulate(replace(SPEEDS, settings=few), Fleet(1, 1), arrivals)
    assert outcome.retractions < len(arrivals)


def test_answers_are_retracted_only_when_pages_run_out() -> None:
    arrivals = [Arrival(0.0, 100, 200)] * 6
    tight = replace(SPEEDS, settings=Settings(kv_cache_tokens=1024, num_reserved_decode_tokens=16))
    assert simulate(tight, Fleet(1, 1), arrivals).retractions > 0
    assert simulate(replace(tight, settings=Settings(kv_cache_tokens=2048)), Fleet(1, 1), arrivals).retractions == 0


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(CapacityExceeded, match="--kv-cache-tokens"):
        simulate(SPEEDS, Fleet(1, 1), [Arrival(0.0, 65_000, 600)])
