"""`pdctl bench control`, from its command line to its figures: a few rooms, and no figure is judged."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from pd_common.cli.bench.control.result import Latency
from pd_common.cli.bench.processes import running
from pd_common.errors import PeerLost

_QUICK = ("--rooms", "100", "--at-once", "8", "--rate", "50", "--seconds", "1", "--peers", "3")


@pytest.mark.slow
def test_it_says_what_a_room_costs(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = [sys.executable, "-m", "pd_common.cli.main", "bench", "control", *_QUICK, "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(found.read_text())
    assert result["throughput"]["rooms"] == 100
    assert result["throughput"]["rooms_per_s"] > 0
    assert 0 < result["handshake"]["p50_ms"] < result["whole"]["p50_ms"] <= result["whole"]["worst_ms"]
    assert (result["peers"]["peers"], result["peers"]["lost"]) == (3, 0)
    assert result["peers"]["room_ms"]["p50_ms"] > 0
    assert math.isfinite(result["first_contact_ms"])
    for line in ("back to back, 8 at once", "at 50 rooms/s, whole room", "3 simulated decodes on one prefill"):
        assert line in done.stdout


def test_a_process_that_does_not_come_up_is_quoted() -> None:
    with running(("--model", "/nowhere")) as (prefill, _), pytest.raises(PeerLost, match="no such directory"):
        prefill.wait_until_it_serves()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        pytest.param([0.001], (1.0, 1.0, 1.0), id="one"),
        pytest.param([i / 1000 for i in range(100, 0, -1)], (50.0, 99.0, 100.0), id="hundred"),
        pytest.param([0.001, 0.002], (1.0, 2.0, 2.0), id="two"),
    ],
)
def test_quantiles_are_values_that_were_measured(seconds: list[float], expected: tuple[float, float, float]) -> None:
    latency = Latency.of(seconds)
    assert (latency.p50_ms, latency.p99_ms, latency.worst_ms) == expected
