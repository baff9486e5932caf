"""The result as a picture: TTFT and ITL over the time of the run, and as distributions. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from pd_common.cli.bench.serve.exchange import Exchange, Log
from pd_common.cli.bench.serve.result import Result

_BINS = 40
_PER_BIN = 10
"""Points that a quantile wants at least."""
_MANY = 2000
"""Points that are still seen as single ones."""
_LEAST_MS = 0.1
"""Parts of an answer closer than this came together; their exact distance would only stretch the axis."""
_DECADES = 30
"""An axis that spans less than this has room for a number at each of its lines."""

_Gap = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """Values in ms at moments in seconds."""

    name: str
    colour: str
    at_s: Sequence[float]
    values_ms: Sequence[float]


def draw(result: Result, log: Log, path: Path) -> None:
    """Writes a PNG: TTFT above, ITL below; over time on the left, the share that is no longer on the right."""
    rows = {"TTFT, ms": [_ttft(log)], "ITL, ms": itls(log)}
    draw_rows(f"{result.model} at {result.url}\n{result.plan}", rows, path, sharey="row")


def draw_rows(title: str, rows: Mapping[str, Sequence[Series]], path: Path, *, sharey: Literal["row", "all"]) -> None:
    """Series by the label of their row: over time on the left, as distributions on the right."""
    figure = Figure(figsize=(13, 4 * len(rows)), layout="constrained")
    figure.suptitle(title, fontsize=9)
    grid = figure.subplots(len(rows), 2, sharex="col", sharey=sharey, width_ratios=(2, 1), squeeze=False)
    for (over_time, shares), (label, series) in zip(grid, rows.items(), strict=True):
        for each in series:
            if each.at_s:
                _draw_over_time(over_time, each)
                _draw_shares(shares, each)
                shares.legend(fontsize=8, loc="upper left")
        over_time.set_ylabel(label)
        _dress(over_time)
        _dress(shares)
    grid[0, 0].set_title("solid: p50, dotted: p99", fontsize=9)
    grid[-1, 0].set_xlabel("seconds since the start")
    grid[-1, 1].set_xlabel("% that are no longer than this")
    figure.savefig(path, dpi=110, format="png")


def _began_s(log: Log) -> float:
    return min(exchange.sent_s for exchange in (*log.background, *log.prompts))


def _ttft(log: Log) -> Series:
    began_s = _began_s(log)
    answered = [exchange for exchange in log.prompts if exchange.is_answered]
    at_s = [exchange.sent_s - began_s for exchange in answered]
    return Series("prompts", "tab:blue", at_s, [1e3 * exchange.ttft_s for exchange in answered])


def itls(log: Log) -> list[Series]:
    """Later ones are drawn over earlier ones."""
    began_s, gaps = _began_s(log), _gaps(log.background)
    loaded_from_s = math.inf if log.prompts_from_s is None else log.prompts_from_s
    return [
        _itl("background, alone", "tab:green", [gap for gap in gaps if gap[1] <= loaded_from_s], began_s),
        _itl("background, under load", "tab:orange", [gap for gap in gaps if gap[1] > loaded_from_s], began_s),
        _itl("prompts", "tab:blue", _gaps(exchange for exchange in log.prompts if exchange.is_answered), began_s),
    ]


def _itl(name: str, colour: str, gaps: Sequence[_Gap], began_s: float) -> Series:
    at_s = [end_s - began_s for _, end_s in gaps]
    return Series(name, colour, at_s, [max(_LEAST_MS, 1e3 * (end_s - begin_s)) for begin_s, end_s in gaps])


def _gaps(exchanges: Iterable[Exchange]) -> list[_Gap]:
    return [gap for exchange in exchanges for gap in pairwise(exchange.arrived_s)]


def _draw_over_time(axes: Axes, series: Series) -> None:
    many = len(series.at_s) > _MANY
    axes.scatter(
        series.at_s,
        series.values_ms,
        s=4 if many else 12,
        alpha=0.15 if many else 0.6,
        color=series.colour,
        linewidths=0,
    )
    at_s, values = np.asarray(series.at_s), np.asarray(series.values_ms)
    bins = max(1, min(_BINS, len(at_s) // _PER_BIN))
    edges = np.linspace(at_s.min(), at_s.max(), bins + 1)
    place = np.clip(np.digitize(at_s, edges) - 1, 0, bins - 1)
    filled = np.unique(place)
    middles = (edges[filled] + edges[filled + 1]) / 2
    for share, style in ((0.5, "-"), (0.99, ":")):
        line = [np.quantile(values[place == each], share) for each in filled]
        axes.plot(middles, line, style, color=series.colour)


def _draw_shares(axes: Axes, series: Series) -> None:
    ordered = np.sort(series.values_ms)
    axes.step(100 * np.arange(1, len(ordered) + 1) / len(ordered), ordered, color=series.colour, label=series.name)


def _dress(axes: Axes) -> None:
    axes.set_yscale("log")
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(plain if np.divide(*axes.get_ylim()[::-1]) < _DECADES else NullFormatter())
    axes.grid(visible=True, which="both", alpha=0.25)
