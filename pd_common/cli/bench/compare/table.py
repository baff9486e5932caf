"""A comparison as a person reads it."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from pd_common.cli.bench.compare.result import Comparison, Row

_WIDTH = 160


def console() -> Console:
    """Standard output, wide enough for the tables."""
    return Console(width=max(_WIDTH, Console().width))


def show(found: Comparison, to: Console) -> None:
    """Prints what was done and a table: medians of the rounds, and in brackets the least and the most."""
    to.print(f"{found.name}: {found.about}", highlight=False, markup=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("median (least - most)", no_wrap=True)
    for column in found.columns:
        table.add_column(column, justify="right", no_wrap=True)
    has_ratio = len(found.columns) > 1
    if has_ratio:
        table.add_column(f"{found.columns[0]} / {found.columns[1]}", justify="right", no_wrap=True)
    table.add_column("wanted")
    for row in found.rows:
        ratio = [_ratio(row)] if has_ratio else []
        table.add_row(f"{row.figure}, {row.unit}" if row.unit else row.figure, *_cells(row), *ratio, row.target)
    to.print(table)


def _cells(row: Row) -> list[str]:
    return [
        f"{_shown(median)} ({_shown(least)} - {_shown(most)})"
        for median, (least, most) in zip(row.medians, row.ranges, strict=True)
    ]


def _ratio(row: Row) -> str:
    return "-" if row.ratio is None else f"{row.ratio:.3f}"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
