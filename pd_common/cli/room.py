"""pdctl room: one room as each side has it on record."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import click
from pd.v1 import types_pb2
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pd_common import config
from pd_common.cli import render
from pd_common.cli.connect import ROOM, connect_options, inspect
from pd_common.inspection.views import FINAL, RoomView, held_by
from pd_common.planning.units import show_bytes
from pd_common.types import BootstrapRoom, Role


@click.command(context_settings=config.CONTEXT)
@click.argument("number", metavar="ROOM", type=ROOM)
@connect_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def room(*, number: int, as_json: bool, **connection: Any) -> None:
    """Show one room as both sides have it on record.

    States with their times from the first one on, what has been written, the peer, why it failed, and what it keeps
    in quarantine; from the router also why it took this way.
    """
    view = inspect(connection, lambda inspector: inspector.room(BootstrapRoom(number)))
    if as_json:
        click.echo(json.dumps(_json(view), indent=2))
    else:
        show(view, render.console())


def show(view: RoomView, console: Console) -> None:
    """Prints it for a person."""
    for line in render.heading(view):
        console.print(line)
    if any(side.transfer for side in view.sides):
        console.print()
        console.print(_states(view))
    for line in (*_notes(view), *render.silent(view.cluster)):
        console.print(line)


def _states(view: RoomView) -> Table:
    """Each side's states, one after the other."""
    numbers = ("at ms", "chunks", "pages", "size")
    table = render.table("process", "state", *numbers, right=numbers)
    sides = [(side, side.transfer) for side in view.sides if side.transfer]
    begin_ns = min(view.ours_ns(side, transfer.timeline[0].time) for side, transfer in sides)
    for side, transfer in sides:
        name: Text | str = render.process_name(side.role, side.address)
        for step in transfer.timeline:
            at_ms = (view.ours_ns(side, step.time) - begin_ns) / 1e6
            table.add_row(name, render.state_text(step.state), f"{at_ms:,.1f}", *_progress(step))
            name = ""
        if transfer.bytes_done > transfer.timeline[-1].bytes_done:
            table.add_row("", "so far", "", *_progress(transfer))
    return table


def _progress(done: types_pb2.TransferTransition | types_pb2.Transfer) -> tuple[str, str, str]:
    if not done.chunks_done:
        return "", "", ""
    return f"{done.chunks_done:,}", f"{done.pages_done:,}", show_bytes(done.bytes_done)


def _notes(view: RoomView) -> Iterator[Text]:
    """What a table has no place for, side by side."""
    for side in view.sides:
        transfer, held = side.transfer, held_by(view, side)
        name = f"{side.role:<7} {side.address}"
        if transfer is None and side.role is not Role.ROUTER:
            yield Text(f"{name} has forgotten its states, and knows only how long things took")
        if transfer is not None:
            answer = render.answering(side)
            yield Text.assemble(f"{name} {_peer(view, transfer)}{_time_left(transfer)}", "; " if answer else "", answer)
            if transfer.HasField("failure"):
                yield Text(f"{name} failed: {render.failure_words(transfer.failure)}", "red")
        if held is not None:
            yield Text(render.kept(side, held), "yellow")


def _peer(view: RoomView, transfer: types_pb2.Transfer) -> str:
    if not transfer.HasField("peer"):
        return "has not met the other side"
    process = view.cluster.of_instance(transfer.peer.instance_id)
    there = "not there any more" if process is None else f"at {process.address}"
    return f"has met {transfer.peer.instance_id}, {there}"


def _time_left(transfer: types_pb2.Transfer) -> str:
    if transfer.state in FINAL:
        return ""
    left_s = transfer.deadline.ToNanoseconds() / 1e9 - time.time()
    return f"; it is given up in {render.age(left_s)}"


def _json(view: RoomView) -> dict[str, Any]:
    return {
        "bootstrap_room": str(view.number),
        "routes": [
            {"router": side.address, **dict(leg.root.attributes)}
            for side in view.of_role(Role.ROUTER)
            for leg in side.legs
        ],
        "sides": [
            {
                "address": side.address,
                "role": side.role.value,
                "transfer": render.as_json(side.transfer),
                "quarantine": render.as_json(held_by(view, side)),
            }
            for side in view.sides
            if side.role is not Role.ROUTER
        ],
        "processes": [render.process_json(process) for process in view.cluster.processes],
    }
