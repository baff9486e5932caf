from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pd_common.cli.bench import beside_engine, children, command
from pd_common.cli.bench.machine import Machine
from pd_common.cli.bench.pair import Options
from pd_common.cli.bench.paths import PathName
from pd_common.cli.bench.result import Result
from pd_common.cli.bench.rounds import Progress
from pd_common.cli.bench.transfer import Plan, run
from pd_common.cli.bench.work import Layout, Order, Work
from pd_common.cli.main import main
from tests.cli.conftest import TOTAL_BYTES, Bench

DEVICES = Path("/sys/class/net")
HERE = Path(__file__).parent
ROW_FIELDS = {
    "path", "backend", "carrier", "layout", "order", "bytes", "descriptors", "rounds", "posting_ms", "total_ms",
    "gb_per_s", "x_memcpy", "x_backend", "skipped", "failed",
}  # fmt: skip


def test_a_run_measures_every_backend_on_every_path(bench: Bench) -> None:
    outcome = bench("--backend", "ucx,socket", "--path", "host,tcp", "--order", "contiguous,shuffled")
    assert outcome.exit_code == 0, outcome.output
    assert all(set(row) == ROW_FIELDS for row in outcome.written["rows"])
    host, tcp = outcome.rows("host"), outcome.rows("tcp")
    assert {backend for backend, _, _ in host} == {"memcpy", "ucx"}
    assert {backend for backend, _, _ in tcp} == {"memcpy", "ucx", "socket"}
    for row in [*host.values(), *tcp.values()]:
        assert (row["bytes"], row["rounds"]) == (TOTAL_BYTES, 2)
        assert row["gb_per_s"] == pytest.approx(TOTAL_BYTES / row["total_ms"] / 1e6)
        assert (row["x_memcpy"] or 0) > 0 or row["backend"] == "memcpy"
    assert host["ucx", "layers", "contiguous"]["descriptors"] == 4
    assert host["ucx", "pages", "contiguous"]["descriptors"] == 1
    assert tcp["socket", "layers", "shuffled"]["descriptors"] == tcp["ucx", "layers", "shuffled"]["descriptors"] > 50
    assert all(row["carrier"].startswith("tcp") or key[0] == "memcpy" for key, row in tcp.items())
    ours, theirs = tcp["ucx", "pages", "shuffled"], tcp["socket", "pages", "shuffled"]
    assert ours["x_backend"]["socket"] * theirs["x_backend"]["ucx"] == pytest.approx(1)
    memcpy = outcome.rows("tcp")["memcpy", "pages", "shuffled"]
    assert ours["x_memcpy"] == pytest.approx(ours["gb_per_s"] / memcpy["gb_per_s"])
    assert "one host, tcp on loopback" in outcome.output
    assert outcome.written["machine"]["libraries"]
    assert outcome.written["work"] == {"layers": 2, "pages": 16, "page_bytes": 4096}


def test_a_bit_that_changes_on_the_way_is_an_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "WORKER", (sys.executable, str(HERE / "flipping_worker.py")))
    outcome = bench("--backend", "ucx", "--path", "host", "--layout", "pages", "--order", "shuffled")
    assert outcome.exit_code == 1
    assert "not those that were sent" in outcome.output
    assert {backend for backend, _, _ in outcome.rows("host")} == {"memcpy"}
    (failed,) = [row for row in outcome.written["rows"] if row["failed"]]
    assert (failed["path"], failed["backend"]) == ("host", "ucx")


def test_a_rival_that_is_not_installed_is_skipped_with_the_reason(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "WORKER", (sys.executable, str(HERE / "worker_without_nixl.py")))
    outcome = bench("--backend", "nixl-published", "--path", "host", "--layout", "pages")
    assert outcome.exit_code == 0
    (skipped,) = [row for row in outcome.written["rows"] if row["skipped"]]
    assert (skipped["backend"], skipped["gb_per_s"]) == ("nixl-published", None)
    assert "nixl-cu12 cannot be imported" in skipped["skipped"]
    assert skipped["skipped"] in outcome.output


def test_a_process_that_ends_is_a_reason_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "WORKER", (sys.executable, "-c", "raise SystemExit('no such luck')"))
    outcome = bench("--backend", "ucx", "--path", "host")
    (skipped,) = [row for row in outcome.written["rows"] if row["skipped"]]
    assert "no such luck" in skipped["skipped"]


@pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="nixl-cu12 is not installed")
def test_nixl_moves_the_same_bytes_in_both_forms(bench: Bench) -> None:
    outcome = bench("--backend", "nixl-published,nixl-tuned", "--path", "tcp", "--layout", "layers")
    assert outcome.exit_code == 0, outcome.output
    assert {backend for backend, _, _ in outcome.rows("tcp")} == {"memcpy", "nixl-published", "nixl-tuned"}


def test_network_namespaces_are_skipped_without_root(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    outcome = bench("--backend", "socket", "--path", "netns,tcp", "--layout", "pages", "--order", "contiguous")
    assert outcome.exit_code == 0
    assert [row["skipped"] for row in outcome.written["rows"] if row["path"] == "netns"] == [
        "network namespaces need root"
    ]
    assert outcome.rows("tcp")


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_bytes_cross_from_one_network_namespace_to_another(bench: Bench) -> None:
    outcome = bench("--backend", "ucx,socket", "--path", "netns", "--layout", "pages", "--order", "contiguous")
    reasons = [row["skipped"] for row in outcome.written["rows"] if row["skipped"]]
    if reasons:
        pytest.skip(reasons[0])
    rows = {backend: row for (backend, _, _), row in outcome.rows("netns").items()}
    assert set(rows) == {"memcpy", "ucx", "socket"}
    assert rows["ucx"]["carrier"].startswith("tcp")
    assert not list(DEVICES.glob(f"pdb{os.getpid()}*"))


def test_nothing_is_left_behind_by_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[Any]] = []

    class Recorded(subprocess.Popen[Any]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    def interrupted(step: str) -> None:
        if "round 1 " in step:
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    paths = (PathName.NETNS, PathName.HOST)  # the second where the first is not to be had
    plan = Plan(
        Work(2, 16, 4096), ("ucx",), paths, (Layout.PAGES,), (Order.CONTIGUOUS,), 2,
        Options("wheel", "own", None), staging=False, beside_engine=False,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        run(plan, interrupted)
    assert len(started) >= 2
    assert all(process.poll() is not None for process in started)
    assert not list(DEVICES.glob(f"pdb{os.getpid()}*"))


def test_staging_has_a_table_of_its_own(bench: Bench) -> None:
    outcome = bench("--backend", "ucx", "--path", "host", "--layout", "layers", "--order", "shuffled", "--staging")
    assert outcome.exit_code == 0, outcome.output
    staging = outcome.written["staging"]
    assert [row["piece_bytes"] for row in staging] == [1024, 2048, 4096, 8192, 16384, 32768]
    assert all(row["pieces"] * row["piece_bytes"] == TOTAL_BYTES // 4 for row in staging)
    assert all(row["gain"] == pytest.approx(row["direct_ms"] / row["staged_ms"]) for row in staging)
    assert "pieces shuffled on both sides" in outcome.output


def test_steps_of_an_engine_are_timed_beside_transfers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_engine, "_WINDOW_S", 0.05)
    outcome = bench("--backend", "ucx", "--path", "host", "--layout", "pages", "--order", "shuffled", "--beside-engine")
    assert outcome.exit_code == 0, outcome.output
    (engine,) = outcome.written["beside_engine"]
    assert engine["alone_ms"] > 0
    assert engine["sender_gb_per_s"] > 0
    assert "growth of the engine's step" in outcome.output


def test_help_explains_rivals_orders_and_paths() -> None:
    text = " ".join(CliRunner().invoke(main, ["bench", "transfer", "--help"]).output.split())
    for words in ("as its makers ship it", "30 % of the places", "two network namespaces", "one-thread memcpy"):
        assert words in text


def test_an_unknown_backend_is_refused_with_those_that_are_known() -> None:
    result = CliRunner().invoke(main, ["bench", "transfer", "--backend", "ucx,tin"])
    assert result.exit_code == 2
    assert "'tin'" in result.output
    assert "mooncake" in result.output


def test_pools_that_do_not_fit_into_memory_are_refused() -> None:
    result = CliRunner().invoke(main, ["bench", "transfer", "--pages", "100000000"])
    assert result.exit_code == 1
    assert "name fewer backends or fewer pages" in result.output


def test_quick_takes_a_small_pool_unless_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []

    def planned(plan: Plan, _: Progress) -> Result:
        plans.append(plan)
        return Result(Machine.here(0.0, ()), plan.work, [], [], [])

    monkeypatch.setattr(command, "run", planned)
    for options in ([], ["--quick"], ["--quick", "--rounds", "7"]):
        assert CliRunner().invoke(main, ["bench", "transfer", *options]).exit_code == 0
    assert [(plan.work.layers, plan.work.pages, plan.rounds) for plan in plans] == [
        (28, 512, 5),
        (4, 32, 1),
        (4, 32, 7),
    ]
