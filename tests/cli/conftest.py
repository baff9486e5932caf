"""pdctl as a person calls it, with a pool so small that a run takes a second or two."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pd_common.cli.main import main

SMALL = ("--layers", "2", "--pages", "16", "--page-bytes", "4096", "--rounds", "2")
TOTAL_BYTES = 2 * 2 * 16 * 4096


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run printed, wrote and ended with."""

    exit_code: int
    output: str
    written: dict[str, Any]

    def rows(self, path: str) -> dict[tuple[str, str, str], dict[str, Any]]:
        """Rows with figures of one path, by backend, layout and order."""
        found = [row for row in self.written["rows"] if row["path"] == path and row["gb_per_s"] is not None]
        return {(row["backend"], row["layout"], row["order"]): row for row in found}


Bench = Callable[..., Outcome]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    def call(*options: str) -> Outcome:
        target = tmp_path / "result.json"
        result = CliRunner().invoke(main, ["bench", "transfer", *SMALL, "--json", str(target), *options])
        assert target.exists(), (result.output, result.exception)
        return Outcome(result.exit_code, result.output, json.loads(target.read_text()))

    return call
