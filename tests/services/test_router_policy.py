"""Which route a request takes, by what the workers say of themselves; no network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_common.errors import CapacityExceeded, InvalidRequest, NoWorkers
from pd_common.generation import ClientRequest, Load, ModelInfo, SamplingParams
from pd_common.types import BootstrapAddress
from services.router.__main__ import main
from services.router.policy import LeastLoaded
from services.router.route import Route
from tests.control.fake_rooms import IDLE, MODEL

PAGE = MODEL.page_size
MIN_PROMPT = 64


@dataclass(eq=False)
class FakeWorker:
    """What the policy reads of a worker."""

    name: str
    load: Load | None = IDLE
    open_rooms: int = 0
    life: str | None = "first"
    model: ModelInfo = MODEL
    why_not: str = "it is gone"

    @property
    def address(self) -> BootstrapAddress:
        return BootstrapAddress(self.name, 1)

    bootstrap = address

    @property
    def is_stopping(self) -> bool:
        return self.load is not None and self.load.stopping

    @property
    def is_live(self) -> bool:
        return self.life is not None

    def is_full_for(self, seconds: float) -> None:
        self.load = replace(IDLE, queued=8, max_queued=8, oldest_wait_s=seconds)

    def __str__(self) -> str:
        return self.name


def policy_of(prefills: Sequence[FakeWorker], decodes: Sequence[FakeWorker], min_prompt_tokens: int = 0) -> LeastLoaded:
    """All routes are proven."""
    workers: list[Any] = [*prefills, *decodes]
    policy = LeastLoaded(
        workers[: len(prefills)], workers[len(prefills) :], min_prompt_tokens, disaggregated=bool(prefills)
    )
    for route in policy.routes:
        assert route.lives is not None
        route.note_probe(route.lives, None)
    return policy


def request(prompt_tokens: int = 3, bootstrap: BootstrapAddress | None = None, priority: int = 0) -> ClientRequest:
    sampling = SamplingParams(max_new_tokens=4)
    return ClientRequest((1,) * prompt_tokens, sampling, bootstrap=bootstrap, priority=priority)


def names(routes: Sequence[Route]) -> list[str]:
    return ["+".join(str(worker) for worker in route.workers) for route in routes]


# --- a pair, or a decode alone ---


@pytest.mark.parametrize(
    ("prefills", "asked", "expected", "reason"),
    [
        ("p", request(MIN_PROMPT), "p+d", "prompt of 64 tokens, pair with least to do"),
        (
            "p",
            request(MIN_PROMPT - 1),
            "d",
            "prompt of 63 tokens, fewer than --disaggregation-min-prompt-tokens 64",
        ),
        ("p", request(1, BootstrapAddress("p", 1)), "p+d", "the client has named the prefill"),
        ("", request(1), "d", "this router has no prefill"),
        ("", request(1000), "d", "this router has no prefill"),
    ],
    ids=["long", "short", "short with a prefill of its own", "no prefill", "no prefill, long"],
)
def test_the_kind_of_route_follows_from_the_request_and_is_explained(
    prefills: str, asked: ClientRequest, expected: str, reason: str
) -> None:
    policy = policy_of([FakeWorker(name) for name in prefills], [FakeWorker("d")], MIN_PROMPT)
    choice = policy.choose(asked)
    assert (names(choice.routes), choice.reason) == ([expected], reason)


def test_without_a_least_length_even_an_empty_prompt_goes_through_a_pair() -> None:
    policy = policy_of([FakeWorker("p")], [FakeWorker("d")])
    assert names(policy.choose(request(0)).routes) == ["p+d"]
    assert names(policy.routes) == ["p+d"]


def test_a_prefill_that_is_not_there_cannot_be_asked_for() -> None:
    for prefills in ([FakeWorker("p")], []):
        with pytest.raises(InvalidRequest, match="this router has no prefill elsewhere:1"):
            policy_of(prefills, [FakeWorker("d")]).choose(request(bootstrap=BootstrapAddress("elsewhere", 1)))


def test_a_short_prompt_takes_a_pair_as_long_as_no_decode_is_proven_alone() -> None:
    policy = policy_of([FakeWorker("p")], [FakeWorker("d")], MIN_PROMPT)
    (alone,) = (route for route in policy.routes if route.prefill is None)
    assert alone.lives is not None
    alone.note_probe(alone.lives, "the probe failed")
    choice = policy.choose(request(1))
    assert names(choice.routes) == ["p+d"]
    assert choice.reason.endswith("fewer than --disaggregation-min-prompt-tokens 64, but no decode is proven alone")
    assert policy.is_ready


def test_a_decode_that_is_proven_alone_does_not_make_a_router_with_prefills_ready() -> None:
    prefill = FakeWorker("p")
    policy = policy_of([prefill], [FakeWorker("d")], MIN_PROMPT)
    prefill.life = None
    assert not policy.is_ready
    assert policy.why_not_ready() == "p: it is gone"
    with pytest.raises(NoWorkers, match="no usable pair: p: it is gone"):
        policy.choose(request(MIN_PROMPT))
    assert names(policy.choose(request(1)).routes) == ["d"]


def test_a_router_needs_no_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    given = main.make_context("pd-router", ["--decode", "d:2"]).params
    assert (given["prefills"], given["disaggregation_min_prompt_tokens"]) == ((), 0)
    monkeypatch.setenv("PD_DISAGGREGATION_MIN_PROMPT_TOKENS", "64")
    given = main.make_context("pd-router", ["--decode", "d:2"]).params
    assert given["disaggregation_min_prompt_tokens"] == 64


# --- by capacity ---


def test_who_has_less_to_do_comes_first_counting_own_rooms_and_what_others_have_queued() -> None:
    p, d, e, f = FakeWorker("p"), FakeWorker("d"), FakeWorker("e"), FakeWorker("f")
    policy = policy_of([p], [d, e, f])
    d.open_rooms = 4
    e.load = replace(IDLE, queued=3)
    f.open_rooms, f.load = 1, replace(IDLE, queued=1)
    assert names(policy.choose(request()).routes) == ["p+f", "p+e", "p+d"]
    f.load = None  # it has not said anything yet: nobody knows of any page
    assert names(policy.choose(request()).routes)[-1] == "p+f"


def test_a_decode_that_has_pages_for_the_prompt_now_is_better_than_one_with_less_to_do() -> None:
    idle_and_small, busy = FakeWorker("d"), FakeWorker("e", open_rooms=9)
    idle_and_small.load = replace(IDLE, pages_available=2)
    policy = policy_of([FakeWorker("p")], [idle_and_small, busy])
    assert names(policy.choose(request(2 * PAGE)).routes) == ["p+d", "p+e"]
    assert names(policy.choose(request(2 * PAGE + 1)).routes) == ["p+e", "p+d"]


def test_a_full_worker_is_left_out_on_either_side() -> None:
    p, q, d, e = FakeWorker("p"), FakeWorker("q", open_rooms=5), FakeWorker("d"), FakeWorker("e", open_rooms=5)
    policy = policy_of([p, q], [d, e])
    p.is_full_for(1.0)
    d.is_full_for(1.0)
    assert names(policy.choose(request()).routes) == ["q+e"]


@pytest.mark.parametrize(
    ("waits", "expected"),
    [((30.2, 12.1), 13), ((0.0, 40.0), 1), ((300.0, 200.0), 60)],
    ids=["the shortest", "never 0", "never more than a minute"],
)
def test_where_all_are_full_the_request_is_refused_and_told_when_to_come_again(
    waits: tuple[float, float], expected: int
) -> None:
    decodes = [FakeWorker("d"), FakeWorker("e")]
    policy = policy_of([FakeWorker("p")], decodes)
    for decode, wait_s in zip(decodes, waits, strict=True):
        decode.is_full_for(wait_s)
    with pytest.raises(CapacityExceeded, match="d has 8 requests waiting; e has 8 requests waiting") as raised:
        policy.choose(request())
    assert raised.value.metadata == {"retry_after_s": str(expected)}


def test_of_a_pair_that_is_full_on_both_sides_the_longer_wait_counts() -> None:
    p, d = FakeWorker("p"), FakeWorker("d")
    policy = policy_of([p], [d])
    p.is_full_for(20.0)
    d.is_full_for(5.0)
    with pytest.raises(CapacityExceeded) as raised:
        policy.choose(request())
    assert raised.value.metadata == {"retry_after_s": "20"}


def test_a_request_more_urgent_than_one_that_waits_goes_to_a_full_worker_if_there_is_no_other() -> None:
    d, e = FakeWorker("d"), FakeWorker("e", open_rooms=9)
    policy = policy_of([FakeWorker("p")], [d, e])
    d.is_full_for(1.0)
    assert names(policy.choose(request(priority=1)).routes) == ["p+e", "p+d"]
    e.is_full_for(1.0)
    assert names(policy.choose(request(priority=1)).routes) == ["p+d", "p+e"]
    with pytest.raises(CapacityExceeded):
        policy.choose(request(priority=0))
    assert d.load is not None
    d.load = replace(d.load, least_priority=-5)
    assert names(policy.choose(request()).routes) == ["p+d"]


loads = st.none() | st.builds(
    Load,
    queued=st.integers(0, 3),
    max_queued=st.integers(0, 3),
    oldest_wait_s=st.floats(0, 100),
    running=st.just(0),
    pages_total=st.just(8),
    pages_available=st.integers(0, 8),
    least_priority=st.integers(-1, 1),
    stopping=st.booleans(),
)


@given(st.lists(loads, min_size=1, max_size=3), st.lists(loads, min_size=1, max_size=3), st.integers(1, 4 * PAGE))
def test_a_choice_holds_every_route_that_would_not_refuse_and_no_other(
    of_prefills: list[Load | None], of_decodes: list[Load | None], tokens: int
) -> None:
    prefills = [FakeWorker(f"p{number}", load) for number, load in enumerate(of_prefills)]
    decodes = [FakeWorker(f"d{number}", load) for number, load in enumerate(of_decodes)]
    policy = policy_of(prefills, decodes)
    lasting = [route for route in policy.routes if not any(load.stopping for load in loads_of(route))]
    expected = names([route for route in lasting if not any(load.refuses(0) for load in loads_of(route))])
    if not lasting:
        with pytest.raises(NoWorkers, match="it is stopping and takes no new request"):
            policy.choose(request(tokens))
        assert not policy.is_ready
    elif not expected:
        with pytest.raises(CapacityExceeded) as raised:
            policy.choose(request(tokens))
        assert 1 <= int(raised.value.metadata["retry_after_s"]) <= 60
    else:
        assert sorted(names(policy.choose(request(tokens)).routes)) == sorted(expected)


def loads_of(route: Route) -> list[Load]:
    return [worker.load for worker in route.workers if worker.load is not None]


# --- workers that come and go ---


def test_what_is_known_of_a_route_is_kept_as_long_as_its_workers_stay() -> None:
    p, d, e = FakeWorker("p"), FakeWorker("d"), FakeWorker("e")
    policy = policy_of([p], [d], MIN_PROMPT)
    workers: list[Any] = [p, d, e]
    before = policy.routes
    policy.use(workers[:1], workers[1:])
    assert [route for route in policy.routes if route.is_proven] == list(before)
    assert names(policy.routes) == ["p+d", "p+e", "d", "e"]
    policy.use(workers[:1], workers[2:])
    assert not policy.is_ready
    policy.use(workers[:1], workers[1:2])
    assert not policy.is_ready, "it was forgotten meanwhile"


@pytest.mark.parametrize(
    ("prefills", "decodes", "why"),
    [
        ("", "d", "no prefill is known; dns+p:1 stands for no address"),
        ("p", "", "no decode is known; dns+p:1 stands for no address"),
        ("", "", "no prefill is known; no decode is known; dns+p:1 stands for no address"),
    ],
)
def test_where_a_role_has_nobody_at_the_moment_a_request_has_no_workers(prefills: str, decodes: str, why: str) -> None:
    named: list[list[Any]] = [[FakeWorker(name) for name in of_role] for of_role in (prefills, decodes)]
    policy = LeastLoaded()
    policy.use(named[0], named[1], ["dns+p:1 stands for no address"])
    assert (policy.is_ready, policy.why_not_ready()) == (False, why)
    with pytest.raises(NoWorkers, match=f"no usable pair: {re.escape(why)}"):
        policy.choose(request(1000))


def test_that_prefills_are_missing_at_the_moment_sends_only_short_prompts_to_a_decode_alone() -> None:
    decodes: list[Any] = [FakeWorker("d")]
    policy = LeastLoaded([], decodes, MIN_PROMPT)
    (alone,) = policy.routes
    alone.note_probe(alone.lives or (), None)
    assert names(policy.choose(request(MIN_PROMPT - 1)).routes) == ["d"]
    assert not policy.is_ready
    with pytest.raises(NoWorkers, match="no usable pair: no prefill is known"):
        policy.choose(request(MIN_PROMPT))


def test_a_router_for_decodes_alone_does_not_miss_prefills() -> None:
    policy = LeastLoaded(disaggregated=False)
    assert policy.why_not_ready() == "no decode is known"
    with pytest.raises(NoWorkers, match="no usable decode: no decode is known"):
        policy.choose(request())
