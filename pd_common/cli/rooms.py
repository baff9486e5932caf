"""pdctl rooms: the latest rooms, each with its state on both sides."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
from pd.v1 import types_pb2
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from pd_common import config
from pd_common.cli import render
from pd_common.cli.connect import connect_options, inspect
from pd_common.control.status import from_status
from pd_common.errors import PdError
from pd_common.inspection.inspector import Inspector
from pd_common.inspection.listing import ListedRoom, Listing, Seen, list_rooms
from pd_common.inspection.process_client import RoomFilter
from pd_common.inspection.views import ClusterView, ProcessView, instance_of
from pd_common.planning.units import show_bytes
from pd_common.types import Role

_EVERY_S = 1.0


@click.command(context_settings=config.CONTEXT)
@connect_options
@click.option(
    "--state", "states", multiple=True, type=click.Choice(list(render.STATES)),
    help="Only rooms in this state on one side; may be repeated.",
)  # fmt: skip
@click.option("--peer", help="Only rooms with this process: its address or instance id.")
@click.option(
    "--older-than",
    "older_than_s",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=False,
    help="Only rooms opened at least so many seconds ago.",
)
@click.option("--limit", type=click.IntRange(1, 10_000), default=20, help="Most rooms to show.")
@click.option("--watch", is_flag=True, help="Show it again every second, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def rooms(
    *,
    states: tuple[str, ...],
    peer: str | None,
    older_than_s: float,
    limit: int,
    watch: bool,
    as_json: bool,
    **connection: Any,
) -> None:
    """List the latest rooms with their states on both sides.

    The one that was opened last is at the end. States are those of pd.v1.TransferState; waiting is
    WAITING_FOR_INPUT. Ended rooms are kept for --room-retention of prefill and decode.
    """
    console = render.console()
    if watch and (as_json or not console.is_terminal):
        raise click.UsageError("--watch draws on a terminal; `pdctl watch` prints a line for each change")
    search = _Search(tuple(render.STATES[word] for word in states), peer, older_than_s, limit)
    if watch:
        inspect(connection, lambda inspector: _watched(inspector, search, console))
    found = inspect(connection, search.of)
    if as_json:
        click.echo(json.dumps(_json(found), indent=2))
    else:
        console.print(drawn(found, limit))


@dataclass(frozen=True, slots=True)
class _Search:
    """What was asked for; `peer` as a person names it."""

    states: tuple[types_pb2.TransferState, ...]
    peer: str | None
    older_than_s: float
    limit: int

    async def of(self, inspector: Inspector) -> Listing:
        cluster = await inspector.cluster()
        cluster.require_answers()
        wanted = RoomFilter(self.states, _instance_id(cluster, self.peer), self.older_than_s)
        return await list_rooms(inspector, cluster, wanted, self.limit)


def _instance_id(cluster: ClusterView, peer: str | None) -> str:
    """An address stands for the process that is there now; an instance id may be an earlier life's."""
    view = None if peer is None else cluster.at(peer)
    return instance_of(view) if view is not None else peer or ""


async def _watched(inspector: Inspector, search: _Search, console: Console) -> None:
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(await _shown(inspector, search), refresh=True)
            await asyncio.sleep(_EVERY_S)


async def _shown(inspector: Inspector, search: _Search) -> RenderableType:
    try:
        return drawn(await search.of(inspector), search.limit)
    except PdError as error:
        return Text(error.message, "red")


def drawn(found: Listing, limit: int) -> RenderableType:
    """For a person."""
    if not found.rooms:
        return Group(Text("no rooms"), *render.silent(found.cluster))
    failures = any(side.transfer.HasField("failure") for room in found.rooms for side in room.sides)
    peers = any(len(found.cluster.of_role(role)) > 1 for role in (Role.PREFILL, Role.DECODE))
    names = ["room", "rid", "prefill", "decode", "pages", "size", "age"]
    names += ["failure"] * failures + ["at"] * peers
    table = render.table(*names, right=("room", "pages", "size", "age"), cut=("rid", "failure", "at"))
    now_ns = time.time_ns()
    for room in found.rooms:
        optional = [render.short(_failure(room), "red")] * failures + [render.short(_addresses(room))] * peers
        table.add_row(*_cells(room, found.cluster, now_ns), *optional)
    full = [Text(f"the latest {limit}; more with --limit", "dim")] * (len(found.rooms) == limit)
    return Group(table, *full, *render.silent(found.cluster))


def _cells(room: ListedRoom, cluster: ClusterView, now_ns: int) -> list[str | Text]:
    furthest = max((side.transfer for side in room.sides), key=lambda transfer: transfer.bytes_done)
    states = [_state(room.prefill, cluster.of_role(Role.PREFILL)), _state(room.decode, cluster.of_role(Role.DECODE))]
    return [
        str(room.number),
        render.short(next((side.transfer.rid for side in room.sides if side.transfer.rid), "")),
        *states,
        f"{furthest.pages_done:,}",
        show_bytes(furthest.bytes_done),
        render.age((now_ns - room.opened_ns) / 1e9),
    ]


def _state(side: Seen | None, processes: Sequence[ProcessView]) -> str | Text:
    """A question mark if one that does not answer may know the room."""
    if side is not None:
        return render.state_text(side.transfer.state)
    return "?" if any(view.trouble for view in processes) else "-"


def _failure(room: ListedRoom) -> str:
    failures = [side.transfer.failure for side in room.sides if side.transfer.HasField("failure")]
    return " / ".join(dict.fromkeys(from_status(failure).reason.value for failure in failures))


def _addresses(room: ListedRoom) -> str:
    return " > ".join(side.view.address for side in room.sides)


def _json(found: Listing) -> dict[str, Any]:
    now_ns = time.time_ns()
    return {
        "rooms": [_room_json(room, now_ns) for room in found.rooms],
        "processes": [render.process_json(view) for view in found.cluster.processes],
    }


def _room_json(room: ListedRoom, now_ns: int) -> dict[str, Any]:
    return {
        "bootstrap_room": str(room.number),
        "age_s": round((now_ns - room.opened_ns) / 1e9, 3),
        "prefill": _side_json(room.prefill),
        "decode": _side_json(room.decode),
    }


def _side_json(side: Seen | None) -> dict[str, Any] | None:
    return None if side is None else {"address": side.view.address, "transfer": render.as_json(side.transfer)}
