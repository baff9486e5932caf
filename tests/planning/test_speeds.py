"""Speeds out of a few measurements, and the file that keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_common.errors import InvalidRequest
from pd_common.planning.speeds import (
    Burst,
    DecodeSpeed,
    Gap,
    HandoffSpeed,
    PrefillSpeed,
    Settings,
    Single,
    Speeds,
    burst_steps,
    chunks_of,
    fit,
)

SPEEDS = Speeds(Settings(), PrefillSpeed(0.005, 1e-4, 2e-8), HandoffSpeed(0.01, 5e-6), DecodeSpeed(0.006, 0.0005, 1e-7))
_PROMPTS = (256, 1024, 2048, 4096)


def _seen_with(speeds: Speeds) -> tuple[list[Single], list[Burst], list[Gap]]:
    """What a probe sees of a system that has exactly these speeds."""
    singles = [Single(tokens, speeds.ttft_s(tokens)) for tokens in _PROMPTS]
    bursts = [
        Burst(tokens, 4, sum(map(speeds.prefill.took_s, burst_steps(tokens, 4, speeds.settings))))
        for tokens in _PROMPTS
    ]
    gaps = [
        Gap(running, running * tokens, speeds.decode.took_s(running, running * tokens))
        for running in (1, 4, 16)
        for tokens in (256, 1024)
    ]
    return singles, bursts, gaps


@settings(max_examples=30)
@given(
    prefill=st.builds(PrefillSpeed, st.floats(0, 0.1), st.floats(1e-6, 1e-3), st.floats(0, 1e-7)),
    handoff=st.builds(HandoffSpeed, st.floats(0, 0.1), st.floats(0, 1e-4)),
    decode=st.builds(DecodeSpeed, st.floats(1e-3, 0.1), st.floats(0, 0.01), st.floats(0, 1e-6)),
)
def test_speeds_are_found_again(prefill: PrefillSpeed, handoff: HandoffSpeed, decode: DecodeSpeed) -> None:
    real = Speeds(Settings(), prefill, handoff, decode)
    found = fit(real.settings, *_seen_with(real))
    for tokens in (100, 700, 3000, 8000):
        assert found.ttft_s(tokens) == pytest.approx(real.ttft_s(tokens), rel=0.01)
    assert found.prefill.took_s(chunks_of(2000, real.settings)) == pytest.approx(
        prefill.took_s(chunks_of(2000, real.settings)), rel=0.02
    )
    assert found.decode.took_s(9, 7000) == pytest.approx(decode.took_s(9, 7000), rel=0.01)


def test_what_takes_no_time_is_no_measurement() -> None:
    singles, bursts, gaps = _seen_with(SPEEDS)
    with pytest.raises(InvalidRequest, match="take no time"):
        fit(SPEEDS.settings, singles, [*bursts[1:], Burst(256, 4, 0.0)], gaps)


@settings(max_examples=30)
@given(noise=st.lists(st.floats(0.7, 1.4), min_size=14, max_size=14))
def test_no_speed_is_negative_whatever_was_seen(noise: list[float]) -> None:
    singles, bursts, gaps = _seen_with(SPEEDS)
    factors = iter(noise)
    found = fit(
        SPEEDS.settings,
        [Single(each.tokens, each.ttft_s * next(factors)) for each in singles],
        [Burst(each.tokens, each.count, each.spread_s * next(factors)) for each in bursts],
        [Gap(each.running, each.context_tokens, each.gap_s * next(factors)) for each in gaps],
    )
    parts = (found.prefill, found.handoff, found.decode)
    values = [getattr(part, name) for part in parts for name in part.__slots__]
    assert min(values) >= 0
    assert found.ttft_s(1000) > 0


@given(st.integers(1, 30_000))
def test_chunks_are_the_whole_prompt_and_the_last_of_several_is_short(tokens: int) -> None:
    chunks = chunks_of(tokens, Settings())
    assert [chunk.before for chunk in chunks] == [sum(each.tokens for each in chunks[:at]) for at in range(len(chunks))]
    assert sum(chunk.tokens for chunk in chunks) == tokens
    assert all(0 < chunk.tokens <= 2048 for chunk in chunks)
    assert len(chunks) == 1 or chunks[-1].tokens <= 512
    assert sum(chunk.pairs for chunk in chunks) == tokens * (tokens + 1) // 2


def test_a_burst_is_one_prompt_and_then_steps_with_as_many_as_fit() -> None:
    steps = burst_steps(1024, 4, Settings())
    assert [[chunk.tokens for chunk in step] for step in steps] == [[1024, 1024], [1024]]


def test_a_file_keeps_the_speeds(tmp_path: Path) -> None:
    SPEEDS.write(tmp_path / "speeds.json")
    assert Speeds.read(tmp_path / "speeds.json") == SPEEDS


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"prefill": {"step_s": 1}}, id="a field is missing"),
        pytest.param({"prefill": {"step_s": -1, "token_s": 0, "pair_s": 0}}, id="negative"),
        pytest.param({"decode": {"step_s": "fast", "answer_s": 0, "context_token_s": 0}}, id="no number"),
        pytest.param({"settings": {"page_size": 0}}, id="no page"),
        pytest.param({"settings": {"page_sise": 16}}, id="unknown option"),
        pytest.param({"settings": 7}, id="no object"),
    ],
)
def test_a_file_with_other_things_in_it_is_refused_by_name(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "speeds.json"
    SPEEDS.write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InvalidRequest, match=r"speeds\.json|page_size"):
        Speeds.read(path)


@pytest.mark.parametrize("text", ["", "[]", "not JSON"])
def test_what_is_no_speeds_file_is_told_how_one_is_made(tmp_path: Path, text: str) -> None:
    path = tmp_path / "speeds.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match="pdctl plan measure"):
        Speeds.read(path)
    with pytest.raises(InvalidRequest, match="pdctl plan measure"):
        Speeds.read(tmp_path / "nowhere.json")
