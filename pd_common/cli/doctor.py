"""`pdctl doctor`: what is wrong with a running system, or with one of its rooms, and what to do about it."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from pd_common import config
from pd_common.cli.connect import ROOM, connect_options, inspect
from pd_common.inspection.diagnoses.finding import Finding, Severity
from pd_common.inspection.diagnoses.reading import PATIENCE_S
from pd_common.inspection.diagnosis import examine, look
from pd_common.inspection.views import ClusterView, RoomView
from pd_common.types import BootstrapRoom

_INDENT = 8
_LEAST = 40
"""Columns of text: a narrower window gets longer lines than it has."""
_COLOUR = {
    Severity.NOTE: "cyan",
    Severity.SLOW: "yellow",
    Severity.STUCK: "yellow",
    Severity.FAILED: "red",
    Severity.DOWN: "red",
    Severity.WRONG_DATA: "red",
}


@click.command(context_settings=config.CONTEXT)
@click.argument("room", type=ROOM, required=False)
@connect_options
@click.option(
    "--patience",
    "patience_s",
    default=PATIENCE_S,
    type=click.FloatRange(min=0),
    help="Seconds that something must last to be called stuck.",
)
@click.option("--json", "as_json", is_flag=True, help="For a program.")
def doctor(room: int | None, patience_s: float, as_json: bool, **options: Any) -> None:
    """Say what is wrong with the system, or with ROOM, and what to do about it.

    Looks at every process, at the rooms that live and at the latest that have ended. The exit code is 0 when nothing is
    wrong and 1 when something is.
    """
    number = None if room is None else BootstrapRoom(room)
    cluster, rooms = inspect(options, lambda inspector: look(inspector, number))
    findings = examine(cluster, rooms, number, patience_s)
    if as_json:
        click.echo(json.dumps({"findings": [_as_json(finding) for finding in findings]}, indent=2))
    else:
        _print(findings, cluster, rooms, number)
    sys.exit(1 if findings else 0)


def _print(
    findings: Iterable[Finding], cluster: ClusterView, rooms: tuple[RoomView, ...], room: BootstrapRoom | None
) -> None:
    console = Console(highlight=False)
    for place, finding in enumerate(findings):
        if place:
            console.print()
        console.print(Text(finding.title, style="bold"), Text(f"[{_name(finding)}]", style=_COLOUR[finding.severity]))
        for facts in _facts(finding, console.width):
            console.print(facts, soft_wrap=True)
    if not findings:
        looked_at = f"{_count(len(cluster.processes), 'process')}, {_count(len(rooms), 'room')}"
        console.print(f"Nothing is wrong with {f'room {room}' if room else f'what was looked at: {looked_at}'}.")


def _facts(finding: Finding, width: int) -> Iterator[Text]:
    """Lines of at most `width` characters, each kind of fact behind its name."""
    for label, facts in (("seen", finding.seen), ("why", (finding.why,)), ("do", finding.do)):
        for place, fact in enumerate(facts):
            name = label if not place else ""
            lines = textwrap.wrap(fact, max(width - _INDENT, _LEAST), break_long_words=False, break_on_hyphens=False)
            yield Text.assemble((f"  {name:<6}", "dim"), f"\n{' ' * _INDENT}".join(lines))


def _as_json(finding: Finding) -> dict[str, Any]:
    return {
        **asdict(finding),
        "kind": finding.kind.value,
        "severity": _name(finding),
        "rooms": list(map(str, finding.rooms)),
    }


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def _name(finding: Finding) -> str:
    return finding.severity.name.lower().replace("_", " ")
