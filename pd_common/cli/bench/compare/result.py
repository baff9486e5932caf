"""What a comparison found: values of set-ups side by side, each of several rounds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from pd_common.cli.bench.compare.setups import SetupSpec
from pd_common.cli.bench.machine import Machine
from pd_common.cli.bench.serve.exchange import Log


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of every column; `rounds` has a value of each column for each round."""

    figure: str
    unit: str
    rounds: tuple[tuple[float, ...], ...]
    target: str

    @classmethod
    def of(cls, figure: str, unit: str, rounds: Iterable[Sequence[float]], target: str = "") -> Self:
        return cls(figure, unit, tuple(tuple(round(value, 4) for value in values) for values in rounds), target)

    @property
    def medians(self) -> tuple[float, ...]:
        """Of each column."""
        return tuple(statistics.median(column) for column in zip(*self.rounds, strict=True))

    @property
    def ranges(self) -> tuple[tuple[float, float], ...]:
        """Least and most of each column."""
        return tuple((min(column), max(column)) for column in zip(*self.rounds, strict=True))

    @property
    def ratio(self) -> float | None:
        """The first column in the second's measure, the median of rounds: what slows one round slows both of it."""
        ratios = [first / second for first, second, *_ in self.rounds if second] if len(self.medians) > 1 else []
        return statistics.median(ratios) if ratios else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one scenario found."""

    name: str
    about: str
    """What was done, in words."""
    specs: tuple[SetupSpec, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    logs: Mapping[str, Log]
    """What is worth drawing: the last round of each set-up."""


@dataclass(frozen=True, slots=True)
class Result:
    """Everything."""

    machine: Machine
    layers: int
    """Of the model."""
    rounds: int
    seed: int
    comparisons: tuple[Comparison, ...]

    def write_json(self, path: Path) -> None:
        """One object; of each row the rounds, and the medians and the ratio that are shown."""
        document = {
            "machine": asdict(self.machine),
            "layers": self.layers,
            "rounds": self.rounds,
            "seed": self.seed,
            "comparisons": [_comparison(each) for each in self.comparisons],
        }
        path.write_text(json.dumps(document, indent=1, default=sorted) + "\n")  # a set of cores as a list


def _comparison(found: Comparison) -> dict[str, object]:
    return {
        "name": found.name,
        "about": found.about,
        "setups": [asdict(spec) for spec in found.specs],
        "columns": found.columns,
        "rows": [{**asdict(row), "medians": row.medians, "ratio": row.ratio} for row in found.rows],
    }
