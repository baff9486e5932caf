"""All that one run of the bench found, and its JSON form."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pd_common.cli.bench.beside_engine import EngineRow
from pd_common.cli.bench.machine import Machine
from pd_common.cli.bench.rows import Row
from pd_common.cli.bench.staging import StagingRow
from pd_common.cli.bench.work import Work


@dataclass(frozen=True, slots=True)
class Result:
    """Flat lists of rows; their fields are explained where the classes of the rows are."""

    machine: Machine
    work: Work
    rows: list[Row]
    staging: list[StagingRow]
    beside_engine: list[EngineRow]

    @property
    def has_failed(self) -> bool:
        """Whether a backend broke, or delivered wrong bytes."""
        return any(row.failed for row in self.rows)

    def write_json(self, path: Path) -> None:
        """One object with the fields of this class; `rows` is the table."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
