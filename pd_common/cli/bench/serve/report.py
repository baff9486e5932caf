"""The result as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table

from pd_common.cli.bench.serve.figures import Failures, Figures, Spread
from pd_common.cli.bench.serve.result import Result

_NOTABLE_LAG_MS = 5.0
_WIDTH = 100
"""Columns of the table with long times in it; a narrower terminal folds its lines."""


def console() -> Console:
    """Standard output, wide enough for the table."""
    return Console(width=max(_WIDTH, Console().width))


def show(result: Result, console: Console) -> None:
    """Prints what was sent, the table of times, and a line for each other figure."""
    for line in (f"{result.url}, model {result.model}", str(result.plan), f"client: {result.machine}"):
        _print(console, line)
    console.print(_times(result.figures))
    for line in _lines(result):
        _print(console, line)


def _print(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _times(figures: Figures) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("ms", no_wrap=True)
    for name in ("p50", "p90", "p99", "worst", "mean", "of"):
        table.add_column(name, justify="right", no_wrap=True)
    _add(table, "TTFT", figures.ttft)
    _add(table, "ITL", figures.itl)
    _add(table, "E2E", figures.e2e)
    if figures.background is not None:
        _add(table, "background ITL, alone", figures.background.alone)
        _add(table, "background ITL, under load", figures.background.under_load)
    return table


def _add(table: Table, name: str, spread: Spread | None) -> None:
    if spread is None:
        table.add_row(name, *("-" for _ in range(5)), "0")
        return
    values = (spread.p50_ms, spread.p90_ms, spread.p99_ms, spread.worst_ms, spread.mean_ms)
    table.add_row(name, *(f"{value:,.2f}" for value in values), f"{spread.count:,}")


def _lines(result: Result) -> Iterator[str]:
    figures = result.figures
    yield _answered(figures)
    if figures.cached_tokens:
        share = 100 * figures.cached_tokens / figures.prompt_tokens
        yield f"the server had {share:.1f} % of the prompt tokens in its cache"
    if figures.goodput is not None:
        good = f"{100 * figures.goodput.share:.1f} % of the requests, {figures.goodput.per_s:.2f}/s"
        yield f"goodput ({result.slo}): {good}"
    if figures.background is not None and (ratio := figures.background.p99_ratio) is not None:
        yield f"background ITL p99 under load is {ratio:.2f} x that alone"
    yield from (_failed("requests", each) for each in figures.failures)
    if figures.background is not None:
        yield from (_failed("background streams", each) for each in figures.background.failures)
    if figures.output_events < figures.output_tokens:
        events = f"{figures.output_tokens:,} tokens came in {figures.output_events:,} events"
        yield f"{events}: an ITL is the gap between events"
    if figures.lag is not None and figures.lag.worst_ms > _NOTABLE_LAG_MS:
        late = f"by up to {figures.lag.worst_ms:.1f} ms, p99 {figures.lag.p99_ms:.1f} ms"
        yield f"this client was late itself, {late}: its share of the figures is as large"


def _answered(figures: Figures) -> str:
    rates = f"{figures.requests_per_s:.2f} requests/s, {figures.output_tokens_per_s:.1f} output tokens/s"
    tokens = f"{figures.prompt_tokens:,} prompt tokens, {figures.output_tokens:,} output tokens"
    left = f", {figures.unfinished} cut off" if figures.unfinished else ""
    return f"{figures.answered} of {figures.sent} answered in {figures.seconds:.2f} s{left}: {rates}; {tokens}"


def _failed(what: str, failures: Failures) -> str:
    kind = f"{failures.status or 'no answer'} {failures.code}"
    return f"FAILED: {failures.count} {what}, {kind}, the first: {failures.message}"
