"""The parts of `pdctl bench compare` that start nothing but what they look at: figures, loads, cores."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pd_common.cli.bench.compare import itl, tail
from pd_common.cli.bench.compare.result import Comparison, Row
from pd_common.cli.bench.compare.shot import Shot, in_turns, prompts
from pd_common.cli.bench.compare.sizes import QUICK
from pd_common.cli.bench.compare.table import console, show
from pd_common.cli.bench.processes import on_cores
from pd_common.cli.bench.serve.exchange import Exchange, Log
from pd_common.errors import PeerLost
from pd_common.telemetry.collector import RecordedSpan


def test_a_ratio_is_of_values_of_the_same_round() -> None:
    row = Row.of("TTFT", "ms", [(10, 10, 1), (300, 100, 1), (22, 20, 1)])
    assert row.medians == (22, 20, 1)
    assert row.ratio == pytest.approx(1.1)
    assert row.ranges == ((10, 300), (10, 100), (1, 1))


@pytest.mark.parametrize("rounds", [[(3.0,)], [(3.0, 0.0)]])
def test_where_there_is_nothing_to_compare_with_there_is_no_ratio(rounds: list[tuple[float, ...]]) -> None:
    assert Row.of("x", "", rounds).ratio is None


def test_a_table_shows_medians_ranges_ratios_and_what_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    rows = (
        Row.of("TTFT", "ms", [(1.0, 2.0), (3.0, 2.0), (1500.4, 2.0)], "ratio <= 1.10"),
        Row.of("cached", "", [(5.0, 0.0)]),
    )
    show(Comparison("ttft", "one [prompt]", (), ("pair", "alone"), rows, {}), console())
    shown = capsys.readouterr().out
    for text in ("ttft: one [prompt]", "pair / alone", "TTFT, ms", "3 (1 - 1,500)", "1.500", "ratio <= 1.10"):
        assert text in shown
    assert shown.split("cached")[1].split() == ["5", "(5", "-", "5)", "0", "(0", "-", "0)", "-"]


def test_set_ups_take_turns_in_going_first() -> None:
    assert [list(in_turns("ab", number)) for number in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_prompts_have_nothing_in_common_but_their_prefix() -> None:
    cold, warm = (prompts(3, 256, 4, 224).request(number).prompt for number in range(2))
    assert (len(cold), len(warm), cold[:224] == warm[:224], cold[224] == warm[224]) == (256, 256, True, False)
    starts = {tuple(prompts(3, tokens, 4).request(n).prompt[:16]) for n, tokens in enumerate((64, 64, 1024, 4096))}
    assert len(starts) == 4


def test_every_set_up_has_the_same_load() -> None:
    load = itl.plan(QUICK, 2.0, 7, requests=3, alone_s=0.2)
    assert load == itl.plan(QUICK, 2.0, 7, requests=3, alone_s=0.2)
    assert load.prompts().request(1) != itl.plan(QUICK, 2.0, 8, requests=3, alone_s=0.2).prompts().request(1)
    assert (load.arrivals.per_s, load.arrivals.requests, load.background is not None) == (2.0, 3, True)


def _twice(alone_s: float, loaded_s: float, ttft_s: float) -> itl.Twice:
    """An answer with gaps of one length; with two prompts, from second 10 on, of another. Its gaps grow with it."""
    prompts = [Exchange(n, 10.0 + n, [10.0 + n + ttft_s], 19.0) for n in range(2)]
    alone = _answer(alone_s, 20.0)
    loaded = _answer(alone_s, 10.0) + [10 + index * loaded_s for index in range(round(10 / loaded_s))]
    return itl.Twice(
        Log(prompts, [Exchange(0, -1.0, loaded)], prompts_from_s=10.0, late_s=[0.002]),
        Log([], [Exchange(0, -1.0, alone)]),
    )


def _answer(gap_s: float, until_s: float) -> list[float]:
    return [index * gap_s for index in range(round(until_s / gap_s))]


def test_itls_without_and_with_prompts() -> None:
    found = {row.figure: row for row in itl.rows([[_twice(0.1, 0.12, 1.0), _twice(0.1, 0.5, 2.0)]])}
    assert found["ITL p99, no prompts"].medians == pytest.approx((100, 100))
    assert found["ITL p99, prompts arrive"].medians == pytest.approx((120, 500))
    assert found["ITL p99, with / without prompts"].medians == pytest.approx((1.2, 5.0))
    assert found["TTFT p50 of these prompts"].medians == pytest.approx((1000, 2000))
    assert found["p99 of what the client itself was late"].medians == pytest.approx((2, 2))


def test_only_the_same_tokens_are_compared() -> None:
    """A token later in an answer takes longer, with prompts or without."""
    growing = [0.01 * index**2 for index in range(60)]
    twice = itl.Twice(
        Log([Exchange(0, 4.0, [4.1], 9.0)], [Exchange(0, 0.0, growing[:31])], prompts_from_s=4.0),
        Log([], [Exchange(0, 0.0, growing)]),
    )
    loaded, alone = twice.gaps_s()
    assert loaded == alone
    assert len(loaded) == 11


def test_a_round_in_which_nothing_was_written_is_no_figure() -> None:
    twice = _twice(0.1, 0.1, 1.0)
    twice.loaded.background = [Exchange(0, -1.0)]
    with pytest.raises(PeerLost, match="too short"):
        itl.rows([[twice]])


def _chunk(start_ms: float, end_ms: float) -> RecordedSpan:
    start_ns, end_ns = round(start_ms * 1e6), round(end_ms * 1e6)
    return RecordedSpan("pd-prefill", "pd.chunk_compute", "", "", "", start_ns, end_ns, {}, failed=False)


def test_the_parts_of_a_ttft_add_up() -> None:
    shot = Shot(room=1, sent_ns=2_000_000, first_ns=90_000_000, cached_tokens=0)
    before, computing, after = tail.parts(4096, [(shot, [_chunk(40, 83), _chunk(5, 40)])])
    assert [row.medians for row in (before, computing, after)] == [(3,), (78,), (7,)]
    assert sum(row.medians[0] for row in (before, computing, after)) == shot.ttft_ms
    assert (computing.target, after.target) == ("", "<= 20 ms")


def test_a_child_has_the_cores_of_the_block_and_the_parent_has_its_own_again() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    with on_cores({core}):
        child = subprocess.Popen(
            [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"], stdout=subprocess.PIPE, text=True
        )
    assert child.communicate()[0].strip() == str({core})
    assert os.sched_getaffinity(0) == before
