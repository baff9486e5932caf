"""The ITLs of set-ups as a picture, on one scale. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from pd_common.cli.bench.compare.result import Comparison
from pd_common.cli.bench.serve.plot import draw_rows, itls


def draw(found: Comparison, path: Path) -> None:
    """Writes a PNG: a row for each set-up."""
    rows = {f"ITL, ms: {name}": itls(log) for name, log in found.logs.items()}
    draw_rows(found.about, rows, path, sharey="all")
