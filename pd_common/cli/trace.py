"""pdctl trace: the waterfall of one room over its processes, and what the first token has waited for."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import click
from pd.v1 import inspection_pb2
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pd_common import config
from pd_common.cli import render
from pd_common.cli.connect import ROOM, connect_options, inspect
from pd_common.inspection.ttft import Share, account
from pd_common.inspection.views import RoomSide, RoomView
from pd_common.planning.units import show_bytes
from pd_common.telemetry.spans import ROOM as ROOM_ATTRIBUTE
from pd_common.telemetry.spans import SpanName
from pd_common.types import BootstrapRoom, Role

_LEAST_BAR, _MOST_BAR = 12, 60
_NUMBERS = ("at ms", "took ms")
_BESIDE_BAR = 24
"""Columns that numbers and gaps take."""


@click.command(context_settings=config.CONTEXT)
@click.argument("number", metavar="ROOM", type=ROOM)
@connect_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def trace(*, number: int, as_json: bool, **connection: Any) -> None:
    """Show where the time of one room went.

    A line for each stage, by process, as a bar over time; below, what the first token has waited for, which adds up
    to the time to first token. Every process keeps the stages of its latest 2000 rooms: no collector is needed.
    """
    view = inspect(connection, lambda inspector: inspector.room(BootstrapRoom(number)))
    if as_json:
        click.echo(json.dumps(_json(view), indent=2))
    else:
        show(view, render.console())


def show(view: RoomView, console: Console) -> None:
    """Prints it for a person."""
    lines = list(_lines(view))
    if not lines:
        console.print(f"room {view.number} is on record, but its stages are forgotten: `pdctl room` shows its states")
        return
    for line in render.heading(view):
        console.print(line)
    console.print(f"trace {next(leg.trace_id for side in view.sides for leg in side.legs)}\n")
    console.print(_waterfall(lines, console.width))
    shares = account(view)
    if shares:
        console.print()
        console.print(_account(shares, console.width))
    for line in render.silent(view.cluster):
        console.print(line)


@dataclass(frozen=True, slots=True)
class _Line:
    """One stage, or a whole leg; nanoseconds since 1970 by our clock. `ended` is False while it lasts."""

    name: Text
    colour: str
    start_ns: int
    end_ns: int
    ended: bool
    details: str
    failure: str


def _lines(view: RoomView) -> Iterator[_Line]:
    """Process by process, each leg before its stages."""
    for side in view.sides:
        for leg in side.legs:
            yield _line(view, side, leg.root, render.process_name(side.role, side.address))
            for stage in leg.stages:
                yield _line(view, side, stage, Text(f"  {words(stage.name)}"))


def _line(view: RoomView, side: RoomSide, span: inspection_pb2.Span, name: Text) -> _Line:
    ended = span.HasField("end")
    end_ns = view.ours_ns(side, span.end) if ended else time.time_ns()
    colour = "red" if span.failure else render.COLOURS[side.role]
    return _Line(name, colour, view.ours_ns(side, span.start), end_ns, ended, _details(span), span.failure)


def words(span_name: str) -> str:
    """The name of a span for a person."""
    return span_name.removeprefix("pd.").replace("_", " ")


def _waterfall(lines: list[_Line], width: int) -> Table:
    begin_ns, end_ns = min(line.start_ns for line in lines), max(line.end_ns for line in lines)
    name_width = max(line.name.cell_len for line in lines)
    details_width = max(len(_said(line)) for line in lines)
    left = width - name_width - _BESIDE_BAR
    bar_width = min(max(left - details_width, 2 * left // 5, _LEAST_BAR), _MOST_BAR)
    table = render.table("stage", *_NUMBERS, "bars", "details", right=_NUMBERS, cut=("details",))
    table.columns[3].header = _scale(begin_ns, end_ns, bar_width)
    table.columns[4].header = ""
    for line in lines:
        took = f"{(line.end_ns - line.start_ns) / 1e6:,.1f}"
        table.add_row(
            line.name,
            f"{(line.start_ns - begin_ns) / 1e6:,.1f}",
            took if line.ended else f"{took}+",
            Text(_bar(line.start_ns - begin_ns, line.end_ns - begin_ns, end_ns - begin_ns, bar_width), line.colour),
            render.short(_said(line), "red" if line.failure else ""),
        )
    return table


def _scale(begin_ns: int, end_ns: int, width: int) -> str:
    return f"0{f'{(end_ns - begin_ns) / 1e6:,.1f} ms':>{width - 1}}"


def _bar(start: float, end: float, of: float, width: int) -> str:
    """At least one character, and never out of the frame."""
    per_unit = width / max(of, 1)
    first = min(int(start * per_unit), width - 1)
    length = min(max(round((end - start) * per_unit), 1), width - first)
    return " " * first + "━" * length


def _said(line: _Line) -> str:
    return ", ".join(part for part in (line.failure, line.details) if part)


# --- what a stage says of itself ---

_SAID_ELSEWHERE = {
    *(ROOM_ATTRIBUTE, "rid", "error.type", "pd.disaggregated", "pd.route_reason"),
    *(Role.PREFILL.value, Role.DECODE.value),
}


def _details(span: inspection_pb2.Span) -> str:
    said = span.attributes
    match span.name:
        case SpanName.CHUNK_TRANSFER:
            return _transfer(said)
        case SpanName.CHUNK_COMPUTE:
            return f"{render.count(int(said['tokens']), 'token')}, to {said['end']}"
        case SpanName.ALLOCATE:
            return f"{render.count(int(said['pages']), 'page')}, {said['cached_pages']} of them there already"
        case _:
            return ", ".join(_plain(name, said[name]) for name in sorted(said) if name not in _SAID_ELSEWHERE)


def _transfer(said: Mapping[str, str]) -> str:
    pages, puts = render.count(int(said["pages"]), "page"), render.count(int(said["descriptors"]), "PUT")
    speed = f"{float(said['gb_per_s']):.2f} GB/s"
    return f"{speed}, {pages}, {show_bytes(float(said['bytes']))}, {puts}, {said['carrier']}"


def _plain(name: str, value: str) -> str:
    what = words(name)
    return f"{what.removesuffix(' ms')} {float(value):,.1f} ms" if what.endswith(" ms") else f"{what} {value}"


# --- the account of the first token ---

_BESIDE_SHARE = 68
"""Columns that all but the bar takes."""


def _account(shares: tuple[Share, ...], width: int) -> Table:
    """What has the same name in the same process is one line."""
    took: dict[tuple[str, Role | None, str], float] = {}
    for share in shares:
        key = share.name, share.role, share.address
        took[key] = took.get(key, 0.0) + share.took_ms
    whole_ms = sum(took.values())
    bar_width = min(max(width - _BESIDE_SHARE, _LEAST_BAR), _MOST_BAR)
    table = render.table("first token waits for", "in", "ms", "share", "", right=("ms", "share"))
    for (name, role, address), took_ms in took.items():
        place = "" if role is None else render.process_name(role, address)
        bar = _bar(0, took_ms, whole_ms, bar_width)
        table.add_row(words(name), place, f"{took_ms:,.1f}", f"{100 * took_ms / whole_ms:.1f} %", bar)
    table.add_row(Text("time to first token", "bold"), "", f"{whole_ms:,.1f}", "", "")
    return table


def _json(view: RoomView) -> dict[str, Any]:
    return {
        "bootstrap_room": str(view.number),
        "sides": [
            {"address": side.address, "role": side.role.value, "legs": [render.as_json(leg) for leg in side.legs]}
            for side in view.sides
        ],
        "first_token": [
            {
                "span": share.name,
                "address": share.address,
                "start_ms": round(share.start_ms, 3),
                "took_ms": round(share.took_ms, 3),
            }
            for share in account(view)
        ],
        "processes": [render.process_json(process) for process in view.cluster.processes],
    }
