"""`pdctl bench compare` from its command line to its figures; no figure is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from starlette.responses import JSONResponse

from pd_common.cli.bench.compare import optimistic, ttft
from pd_common.cli.bench.compare.bench import Bench
from pd_common.cli.bench.compare.setups import Cores, Setup, Starter
from pd_common.cli.bench.compare.sizes import QUICK
from pd_common.cli.main import main
from pd_common.errors import CapacityExceeded, PeerLost
from tests.cli.scripted_openai import ScriptedOpenAI
from tests.http_server import serving

_ONE_LOOK = ("--quick", "--rounds", "1", "--layers", "1")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_processes_are_started_measured_and_compared(tmp_path: Path) -> None:
    found, picture = tmp_path / "found.json", tmp_path / "found.png"
    files = ("--json", str(found), "--plot", str(picture))
    command = [
        sys.executable,
        "-m",
        "pd_common.cli.main",
        "bench",
        "compare",
        *_ONE_LOOK,
        "--scenario",
        "itl,prefix",
        *files,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(found.read_text())
    columns = {each["name"]: each["columns"] for each in result["comparisons"]}
    assert columns == {"itl": ["pair", "alone, 2 cores", "alone, 1 core"], "prefix": ["warm", "cold"]}
    for comparison in result["comparisons"]:
        assert comparison["about"] in " ".join(done.stdout.split())
        for row in comparison["rows"]:
            assert row["figure"] in done.stdout
            assert {len(values) for values in row["rounds"]} == {len(comparison["columns"])}
    rows = {row["figure"]: row for each in result["comparisons"] for row in each["rows"]}
    (cached,) = rows["tokens that usage calls cached"]["rounds"]
    assert cached == [224, 0]
    assert 0 < rows["KV moved"]["ratio"] < 1
    assert rows["TTFT"]["medians"][0] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
async def setups() -> AsyncIterator[tuple[Setup, Setup]]:
    """Two that answer at once."""
    async with serving(ScriptedOpenAI().app()) as one, serving(ScriptedOpenAI().app()) as other:
        yield Setup("one", "tiny", one, {}), Setup("other", "tiny", other, {})


@pytest.mark.parametrize(
    ("rows", "figures", "rounds"),
    [
        pytest.param(ttft.rows, ["TTFT, 64 tokens"], 8, id="ttft"),
        pytest.param(optimistic.rows, ["TTFT, decode's memory is full", "TTFT, it is free"], 2, id="optimistic"),
    ],
)
async def test_every_round_has_a_value_of_each_set_up(
    setups: tuple[Setup, Setup], rows: Callable[..., Any], figures: list[str], rounds: int
) -> None:
    bench = Bench(Starter(Path("/nowhere"), Cores(0, 1), 4096), QUICK, rounds=2, seed=0, progress=lambda _: None)
    found = await rows(bench, setups)
    assert [row.figure for row in found] == figures
    assert all(len(row.rounds) == rounds and min(map(min, row.rounds)) > 0 for row in found)


async def test_a_request_that_fails_ends_the_comparison() -> None:
    refusing = ScriptedOpenAI(refusal=JSONResponse({"error": {"message": "full", "code": "CAPACITY"}}, 429))
    bench = Bench(Starter(Path("/nowhere"), Cores(0, 1), 4096), QUICK, rounds=1, seed=0, progress=lambda _: None)
    async with serving(refusing.app()) as url:
        with pytest.raises(PeerLost, match=r"one: a request has failed: .*full"):
            await optimistic.rows(bench, [Setup("one", "tiny", url, {})])


def test_one_core_is_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    done = CliRunner().invoke(main, ["bench", "compare", *_ONE_LOOK])
    assert (done.exit_code, "needs two cores" in done.output) == (1, True)


def test_set_ups_have_the_cores_and_threads_that_they_say() -> None:
    starter = Starter(Path("/nowhere"), Cores(2, 5), 4096)
    pair, alone = starter.pair(), starter.alone("alone", starter.cores.both)
    assert [(engine.role, engine.cores) for engine in pair.engines] == [
        ("prefill", frozenset({2})),
        ("decode", frozenset({5})),
    ]
    assert [(engine.role, engine.cores) for engine in alone.engines] == [("decode", frozenset({2, 5}))]
    flags = {engine.flags for spec in (pair, alone) for engine in spec.engines}
    assert len(flags) == 1  # the same model, pool and element type


def test_a_set_up_that_does_not_come_up_is_quoted_and_ended() -> None:
    starter = Starter(Path("/nowhere"), Cores.here(), 4096)
    with pytest.raises(PeerLost, match="no such directory"), starter.running(starter.pair()):
        pass


def test_cores_are_the_first_two_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 4, 9})
    assert Cores.here() == Cores(4, 7)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7})
    with pytest.raises(CapacityExceeded):
        Cores.here()
