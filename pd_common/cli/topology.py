"""pdctl topology: who is there, who is paired with whom, and which routes requests can take."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import click
from pd.v1 import bootstrap_pb2, transfer_status_pb2
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pd_common import config
from pd_common.cli import render
from pd_common.cli.connect import connect_options, inspect
from pd_common.control import convert
from pd_common.inspection.inspector import Inspector
from pd_common.inspection.views import ROLE_OF, ClusterView, ProcessView, instance_of
from pd_common.planning.units import show_bytes, show_seconds
from pd_common.types import Role

_WIDE = 100


@click.command(context_settings=config.CONTEXT)
@connect_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def topology(*, as_json: bool, **connection: Any) -> None:
    """Show every process, the pairings between them, and the routes.

    Processes with their queues and pages; the ranks that each Bootstrap directory knows, with what two pools must have
    in common; pairings with what carries their pages; routes of each router, proven or why not.
    """

    async def asked(inspector: Inspector) -> ClusterView:
        cluster = await inspector.cluster()
        cluster.require_answers()
        return cluster

    cluster = inspect(connection, asked)
    if as_json:
        click.echo(json.dumps([_json(view) for view in cluster.processes], indent=2))
    else:
        show(cluster, render.console())


def show(cluster: ClusterView, console: Console) -> None:
    """Prints it for a person."""
    console.print(_processes(cluster, named=console.width >= _WIDE))
    ranks = [(view, rank) for view in cluster.processes if view.topology for rank in view.topology.ranks]
    for table in (_ranks(ranks), _pairings(cluster), _routes(cluster)):
        if table.row_count:
            console.print()
            console.print(table)
    for line in (*_odd(cluster), *render.silent(cluster)):
        console.print(line)


def _processes(cluster: ClusterView, *, named: bool) -> Table:
    """Pages by what they are used for; with `named` also instance ids."""
    numbers = ("rooms", "queued", "used", "cached", "free", "quarantined")
    table = render.table("process", *numbers, *(["instance"] if named else []), right=numbers)
    for view in cluster.processes:
        cells = list(_load(view))
        cells += [""] * (len(numbers) - len(cells))
        table.add_row(render.process_name(view.role, view.address), *cells, *([instance_of(view)] if named else []))
    return table


def _load(view: ProcessView) -> Iterator[str]:
    pool = view.pool
    if pool is not None:
        used = pool.pages_total - pool.pages_free - pool.pages_cached - pool.pages_quarantined
        counts = (used, pool.pages_cached, pool.pages_free, pool.pages_quarantined)
        yield from (f"{count:,}" for count in (pool.live_rooms, pool.requests_queued, *counts))
    elif view.process is not None:
        yield f"{view.process.open_rooms:,}"


def _ranks(ranks: Iterable[tuple[ProcessView, bootstrap_pb2.RankInfo]]) -> Table:
    table = render.table("rank at", "directory", "place", "model", "page", "carried by", cut=("carried by",))
    for view, rank in ranks:
        layout, plane = rank.layout, rank.data_plane
        size = show_bytes(sum(buffer.item_len_bytes for buffer in layout.buffers))
        table.add_row(
            rank.control_address,
            "its own" if rank.control_address == view.address else view.address,
            _place(rank.position),
            layout.model[:8],
            f"{layout.page_size} x {layout.dtype}, {size}",
            render.short(f"{plane.backend} {plane.version}: {', '.join((*plane.transports, *plane.devices))}"),
        )
    return table


def _place(at: bootstrap_pb2.RankPosition) -> str:
    """In the grid of ranks, as far as it is one."""
    grid = (("dp", at.dp_rank, at.dp_size), ("tp", at.tp_rank, at.tp_size), ("pp", at.pp_rank, at.pp_size))
    return " ".join(f"{name} {rank}/{size}" for name, rank, size in grid if size > 1) or "alone"


def _pairings(cluster: ClusterView) -> Table:
    """As decode says, and as prefill does where decode does not."""
    numbers = ("since", "rooms", "last canary", "took")
    table = render.table("prefill", "decode", "carrier", *numbers, right=numbers)
    seen: set[frozenset[str]] = set()
    for view in (*cluster.of_role(Role.DECODE), *cluster.of_role(Role.PREFILL)):
        for peer in view.peers:
            pair = frozenset((instance_of(view), peer.instance.instance_id))
            if pair not in seen:
                sides = {view.role: view.address, ROLE_OF.get(peer.role): peer.control_address}
                table.add_row(
                    sides.get(Role.PREFILL, ""), sides.get(Role.DECODE, ""), peer.carrier, *_pairing(view, peer)
                )
            seen.add(pair)
    return table


def _pairing(view: ProcessView, peer: transfer_status_pb2.Peer) -> Iterator[str]:
    def ago(time_ns: int) -> str:
        return render.age((time.time_ns() - time_ns) / 1e9)

    yield ago(view.ours_ns(peer.since))
    yield f"{peer.live_rooms:,}"
    if peer.HasField("canary_time"):
        yield ago(view.ours_ns(peer.canary_time))
        yield show_seconds(convert.duration_from(peer.canary_took))


def _routes(cluster: ClusterView) -> Table:
    table = render.table("router", "prefill", "decode", "route", cut=("route",))
    for view in cluster.of_role(Role.ROUTER):
        for route in view.process.routes if view.process else ():
            why = Text("proven", "green") if route.proven else Text(route.trouble, "red")
            table.add_row(view.address, route.prefill_address or "(alone)", route.decode_address, why)
    return table


def _odd(cluster: ClusterView) -> Iterator[Text]:
    """What keeps processes from working together, as far as they say it themselves."""
    said = [(view, view.process) for view in cluster.processes if view.process is not None]
    yield from _differing("version", {_name(view): process.software_version for view, process in said})
    yield from _differing("model", {_name(view): process.model for view, process in said if process.model})
    yield from _other_layouts(cluster)
    for view in cluster.processes:
        if view.topology_trouble is not None:
            yield Text(f"directory at {view.address}: {view.topology_trouble.message}", "yellow")
    for view, process in said:
        for worker in process.workers:
            whom = f"{ROLE_OF.get(worker.role)} {worker.control_address}"
            if not worker.live:
                yield Text(f"{_name(view)} has lost {whom}: {worker.trouble}", "red")
            elif worker.stopping:
                rooms = render.count(worker.open_rooms, "room")
                yield Text(f"{whom} is stopping: {_name(view)} sends it nothing new, and waits for {rooms}", "yellow")


def _name(view: ProcessView) -> str:
    return f"{view.role} {view.address}"


def _differing(what: str, values: Mapping[str, str]) -> Iterator[Text]:
    if len(set(values.values())) > 1:
        yield Text(f"{what} differs: {', '.join(f'{name} has {value}' for name, value in values.items())}", "red")


def _other_layouts(cluster: ClusterView) -> Iterator[Text]:
    """Prefills whose pools differ from the first one's: no decode can be paired with both."""
    ranks = [rank for view in cluster.processes if view.topology for rank in view.topology.ranks]
    for rank in ranks[1:]:
        mine, theirs = convert.layout_from(ranks[0].layout), convert.layout_from(rank.layout)
        mismatch = mine.first_mismatch(theirs)
        if mismatch is not None:
            field, here, there = mismatch
            values = {f"prefill {ranks[0].control_address}": here, f"prefill {rank.control_address}": there}
            yield from _differing(field, values)


def _json(view: ProcessView) -> dict[str, Any]:
    return {
        **render.process_json(view),
        "process": render.as_json(view.process),
        "pool": render.as_json(view.pool),
        "peers": [render.as_json(peer) for peer in view.peers],
        "quarantine": [render.as_json(held) for held in view.quarantine],
        "topology": render.as_json(view.topology),
        "topology_trouble": None if view.topology_trouble is None else view.topology_trouble.message,
    }
