"""The result as a person reads it."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from pd_common.cli.bench.paths import TITLES
from pd_common.cli.bench.result import Result
from pd_common.cli.bench.rows import MEMCPY, Row

_WIDTH = 170
"""Columns of the widest table; a narrower terminal folds its lines."""
_NONE = "-"


def show(result: Result, console: Console) -> None:
    """Prints the machine, a table for each path, what is missing and why, and the tables that were asked for."""
    console.print(str(result.machine), highlight=False)
    console.print(f"{result.work.total_bytes / 1e6:.0f} MB a transfer, medians", highlight=False)
    for path, title in TITLES.items():
        rows = [row for row in result.rows if row.path == path and row.gb_per_s is not None]
        if rows:
            console.print(_path_table(title, rows))
    for row in result.rows:
        if row.skipped or row.failed:
            what = f"skipped: {row.skipped}" if row.skipped else f"FAILED: {row.failed}"
            console.print(f"{row.path}, {row.backend}: {what}", highlight=False, markup=False)
    if result.staging:
        console.print(_staging_table(result))
    if result.beside_engine:
        console.print(_engine_table(result))


def console() -> Console:
    """Standard output, wide enough for the tables."""
    return Console(width=max(_WIDTH, Console().width))


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _path_table(title: str, rows: list[Row]) -> Table:
    backends = list(dict.fromkeys(row.backend for row in rows))
    others = [backend for backend in backends if backend != MEMCPY]
    numbers = (
        "MB",
        "PUTs",
        "post ms",
        "total ms",
        "GB/s",
        "x memcpy",
        *(f"x {each}".replace("-", "\n") for each in others),
    )
    table = _table(title, ("layout", "order", "backend", "carrier"), numbers)
    cases = list(dict.fromkeys((row.layout, row.order) for row in rows))
    for row in sorted(rows, key=lambda row: (cases.index((row.layout, row.order)), backends.index(row.backend))):
        ratios = (_of(row.x_backend.get(each), 1, 2) for each in others)
        table.add_row(
            row.layout, row.order, row.backend, row.carrier, _of(row.bytes, 1e-6, 0), _count(row),
            _of(row.posting_ms, 1, 1), _of(row.total_ms, 1, 1), _of(row.gb_per_s, 1, 2), _of(row.x_memcpy, 1, 2),
            *ratios, end_section=row.backend == backends[-1],
        )  # fmt: skip
    return table


def _staging_table(result: Result) -> Table:
    numbers = ("piece B", "pieces", "direct ms", "gather ms", "put ms", "scatter ms", "staged ms", "direct/staged")
    table = _table("staging: pieces shuffled on both sides", ("path", "backend"), numbers)
    for row in result.staging:
        times = (row.direct_ms, row.gather_ms, row.put_ms, row.scatter_ms, row.staged_ms)
        cells = (f"{time:.1f}" for time in times)
        table.add_row(row.path, row.backend, f"{row.piece_bytes:,}", f"{row.pieces:,}", *cells, f"{row.gain:.2f}")
    return table


def _engine_table(result: Result) -> Table:
    numbers = ("alone ms", "idle %", "sender %", "at GB/s", "receiver %", "at GB/s")
    case = f"{result.beside_engine[0].layout}, {result.beside_engine[0].order}"
    title = f"growth of the engine's step in the same process, transfers back to back ({case})"
    table = _table(title, ("path", "backend", "carrier"), numbers)
    for row in result.beside_engine:
        table.add_row(
            row.path, row.backend, row.carrier, f"{row.alone_ms:.2f}", f"{row.idle_growth:+.0f}",
            f"{row.sender_growth:+.0f}", f"{row.sender_gb_per_s:.2f}", f"{row.receiver_growth:+.0f}",
            f"{row.receiver_gb_per_s:.2f}",
        )  # fmt: skip
    return table


def _count(row: Row) -> str:
    return _NONE if row.descriptors is None else f"{row.descriptors:,}"


def _of(value: float | None, factor: float, digits: int) -> str:
    return _NONE if value is None else f"{value * factor:,.{digits}f}"
