"""The parts of `pdctl bench serve` that know no network: events, lengths, prompts, figures."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_common.cli.bench.serve.events import EventParser
from pd_common.cli.bench.serve.exchange import Exchange, Failure, Log, Usage, failure_of
from pd_common.cli.bench.serve.figures import Figures, Slo, Spread
from pd_common.cli.bench.serve.lengths import Uniform, parse
from pd_common.cli.bench.serve.workload import Kind, Workload, poisson_arrivals

_STREAM = b': a comment\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:two\ndata: lines\n\n\n\ndata: [DONE]\n\ndata: not whole'
_EVENTS = [b'{"a": 1}', b"two\nlines", b"[DONE]"]


@given(st.sets(st.integers(1, len(_STREAM) - 1)))
def test_events_do_not_depend_on_where_the_stream_is_cut(cuts: set[int]) -> None:
    parser = EventParser()
    edges = [0, *sorted(cuts), len(_STREAM)]
    pieces = [_STREAM[begin:end] for begin, end in itertools.pairwise(edges)]
    assert [event for piece in pieces for event in parser.feed(piece)] == _EVENTS


@pytest.mark.parametrize("text", ["2000", "500-1500", "lognormal:800,0.6,4000"])
def test_lengths_stay_within_what_is_written(text: str) -> None:
    lengths = parse(text)
    assert str(lengths) == text
    drawn = [lengths.draw(np.random.default_rng(seed)) for seed in range(300)]
    least, most = {"2000": (2000, 2000), "500-1500": (500, 1500)}.get(text, (1, 4000))
    assert least <= min(drawn) <= max(drawn) <= most
    assert abs(np.median(drawn) - {"2000": 2000, "500-1500": 1000}.get(text, 800)) < 100
    assert len(set(drawn)) > 100 or text == "2000"


@pytest.mark.parametrize("text", ["", "0", "5-2", "-3", "x", "lognormal:800", "lognormal:9,1,4", "lognormal:9,-1,40"])
def test_what_is_no_distribution_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - what click makes of it is tested with the command
        parse(text)


def _workload(seed: int = 0, kind: Kind = Kind.PROMPTS, **fields: Any) -> Workload:
    given: dict[str, Any] = {"prompt": Uniform(20, 40), "output": Uniform(1, 9), "prefix_tokens": 16, "vocab": 256}
    return Workload(seed, kind, **(given | fields))


def test_a_request_depends_on_seed_and_number_alone() -> None:
    assert _workload().request(7) == _workload().request(7)
    others = [_workload().request(8), _workload(seed=1).request(7), _workload(kind=Kind.BACKGROUND).request(7)]
    assert _workload().request(7).prompt not in [each.prompt for each in others]


def test_prompts_share_the_prefix_and_nothing_else() -> None:
    prompts = [_workload().request(number).prompt for number in range(50)]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 1
    assert len({tuple(prompt[16:20]) for prompt in prompts}) == 50
    assert {len(prompt) for prompt in prompts} <= set(range(20, 41))
    assert all(0 <= token < 256 for prompt in prompts for token in prompt)  # type: ignore[operator]


def test_a_prompt_is_never_the_prefix_alone() -> None:
    assert len(_workload(prompt=Uniform(5, 20)).request(0).prompt) >= 17


def test_text_has_a_word_for_each_token() -> None:
    prompts = [str(_workload(vocab=None, prompt=Uniform(30, 30)).request(number).prompt) for number in (0, 1)]
    assert [len(prompt.split(" ")) for prompt in prompts] == [30, 30]
    assert prompts[0].split(" ")[:16] == prompts[1].split(" ")[:16]
    assert prompts[0] != prompts[1]


def test_arrivals_are_poisson() -> None:
    arrivals = np.array(list(itertools.islice(poisson_arrivals(50, 3), 20001)))
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0
    assert abs(gaps.mean() * 50 - 1) < 0.05
    assert abs(gaps.std() / gaps.mean() - 1) < 0.05
    assert list(itertools.islice(poisson_arrivals(50, 3), 5)) == list(arrivals[:5])


def test_quantiles_are_values_that_were_measured() -> None:
    spread = Spread.of([i / 1000 for i in range(100, 0, -1)])
    assert spread == Spread(100, p50_ms=50.0, p90_ms=90.0, p99_ms=99.0, worst_ms=100.0, mean_ms=50.5)
    assert Spread.of([]) is None


def _exchange(sent_s: float, arrived_s: list[float], done_s: float | None, **fields: Any) -> Exchange:
    return Exchange(0, sent_s, arrived_s, done_s, **fields)


def test_events_become_times_and_counts() -> None:
    first: list[str] = []
    exchange = Exchange(0, sent_s=1.0, on_first=lambda: first.append("first"))
    for now_s, document in (
        (1.5, {"choices": [{"text": "", "finish_reason": None}]}),  # a token that is a part of a character
        (1.7, {"choices": [{"text": "ab", "finish_reason": None}]}),
        (2.0, {"choices": [{"text": "c", "finish_reason": "length"}]}),
        (2.1, {"choices": [{"text": "", "finish_reason": "length"}]}),  # no token
        (2.2, {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": None}}),
    ):
        exchange.take(json.dumps(document).encode(), now_s)
    exchange.take(b"[DONE]", 2.3)
    exchange.end()
    assert (exchange.is_answered, exchange.done_s, exchange.usage) == (True, 2.3, Usage(9, 4, 0))
    assert [exchange.ttft_s, *exchange.gaps_s] == pytest.approx([0.5, 0.2, 0.3])
    assert first == ["first"]


def test_an_answer_of_one_token_without_text_is_one() -> None:
    exchange = Exchange(0, sent_s=1.0)
    exchange.take(b'{"choices": [{"text": "", "finish_reason": "length"}]}', 1.5)
    exchange.take(b"[DONE]", 1.6)
    assert (exchange.is_answered, exchange.ttft_s) == (True, 0.5)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"error": {"message": "full", "code": "CAPACITY", "type": "x"}}, Failure(429, "CAPACITY", "full")),
        (
            {"error": {"message": "full", "code": None, "type": "BadRequestError"}},
            Failure(429, "BadRequestError", "full"),
        ),
        ({"object": "error", "message": "full", "code": 7}, Failure(429, "7", "full")),
        ({"detail": "Not Found"}, Failure(429, "unknown", "Not Found")),
        ({"error": "full"}, Failure(429, "unknown", "full")),
        (["full"], Failure(429, "unknown", "['full']")),
    ],
)
def test_errors_are_read_in_every_shape(document: Any, expected: Failure) -> None:
    assert failure_of(429, document) == expected


def test_figures_are_of_whole_answers() -> None:
    log = Log(
        prompts=[
            _exchange(10.0, [10.1, 10.2, 10.4], 10.5, usage=Usage(100, 4, 50)),
            _exchange(11.0, [11.3, 11.4], 12.0),
            _exchange(11.0, [11.3], None, failure=Failure(200, "PEER_LOST", "first")),
            _exchange(11.5, [], None, failure=Failure(429, "CAPACITY", "second")),
            _exchange(11.6, [], None, failure=Failure(429, "CAPACITY", "third")),
            _exchange(11.7, [11.8], None),
        ]
    )
    figures = Figures.of(log, None)
    assert (figures.sent, figures.answered, figures.unfinished, figures.seconds) == (6, 2, 1, 2.0)
    assert (figures.requests_per_s, figures.output_tokens_per_s) == (1.0, 3.0)
    assert (figures.prompt_tokens, figures.cached_tokens) == (100, 50)
    assert (figures.output_tokens, figures.output_events) == (6, 5)
    assert figures.ttft == Spread.of([0.1, 0.3])
    assert figures.itl == Spread.of([0.1, 0.2, 0.1])
    assert figures.e2e == Spread.of([0.5, 1.0])
    found = [(each.status, each.code, each.count, each.message) for each in figures.failures]
    assert found == [(429, "CAPACITY", 2, "second"), (200, "PEER_LOST", 1, "first")]


@pytest.mark.parametrize(
    ("slo", "share"),
    [(Slo(150, None), 0.5), (Slo(None, 150), 0.25), (Slo(150, 250), 0.5), (Slo(350, 150), 0.25), (Slo(1, 1), 0.0)],
)
def test_goodput_is_the_share_of_all_that_were_sent(slo: Slo, share: float) -> None:
    failed = _exchange(0.0, [0.01], None, failure=Failure(200, "PEER_LOST", ""))
    log = Log(
        [_exchange(0.0, [0.1, 0.3], 2.0), _exchange(0.0, [0.1, 0.3], 2.0), _exchange(0.0, [0.3, 0.4], 1.0), failed]
    )
    goodput = Figures.of(log, slo).goodput
    assert goodput is not None
    assert (goodput.share, goodput.per_s) == (share, share * 4 / 2.0)


def test_background_streams_alone_and_under_load() -> None:
    """A gap around the moment of the first prompt is load; one that begins before all streams run is neither."""
    stream = _exchange(0.0, [0.5, 1.5, 1.6, 1.7, 2.2, 2.4, 3.6, 3.7], None)
    log = Log([_exchange(2.0, [3.0], 3.5)], [stream], alone_from_s=1.0, prompts_from_s=2.0)
    background = Figures.of(log, None).background
    assert background is not None
    assert background.alone == Spread.of([0.1, 0.1])
    assert background.under_load == Spread.of([0.5, 0.2, 1.2])
    assert background.p99_ratio == pytest.approx(12)
