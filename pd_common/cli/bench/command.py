"""`pdctl bench`: the commands that measure, their options and what they print."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from rich.console import Console
from rich.status import Status

from pd_common.cli.bench import table
from pd_common.cli.bench.compare.command import compare
from pd_common.cli.bench.control.command import control
from pd_common.cli.bench.ends import BACKENDS, RIVALS
from pd_common.cli.bench.names import Names
from pd_common.cli.bench.pair import Options
from pd_common.cli.bench.paths import PathName
from pd_common.cli.bench.rounds import Progress
from pd_common.cli.bench.serve.command import serve
from pd_common.cli.bench.signals import sigterm_ends
from pd_common.cli.bench.transfer import Plan, run
from pd_common.cli.bench.work import Layout, Order, Work
from pd_common.errors import CapacityExceeded

_F = TypeVar("_F", bound=Callable[..., Any])

_LAYERS, _PAGES, _PAGE_BYTES, _ROUNDS = 28, 512, 32 * 1024, 5
_QUICK = {"layers": 4, "pages": 32, "rounds": 1}


def _names(flag: str, known: tuple[str, ...], explained: str) -> Callable[[_F], _F]:
    return click.option(flag, default=",".join(known), type=Names(known), help=explained)


@click.group()
def bench() -> None:
    """Measure on this machine."""


@bench.command()
@_names(
    "--backend",
    (*BACKENDS, *RIVALS),
    "Libraries to measure: ucx, nixl, mooncake through this project's transport; and without it nixl-published "
    "(NIXL's own agent as its makers ship it), nixl-tuned (with a progress thread that sleeps) and socket (a plain "
    "Python socket, tcp only). What is not installed is skipped, with the reason.",
)
@_names(
    "--path",
    tuple(PathName),
    "Ways to measure: host (the library's own choice on one host: CMA for UCX), tcp (on loopback), netns (tcp between "
    "two network namespaces over a veth pair; needs root).",
)
@_names(
    "--layout",
    tuple(Layout),
    "Layouts of the pool: pages (all layers of a page together), layers (a buffer for K and for V of each layer).",
)
@_names(
    "--order",
    tuple(Order),
    "Orders of the pages: contiguous on both sides; shuffled, each side differently; fragmented: 30 % of the places in "
    "the page lists, drawn at random, hold pages shuffled among these places, each side differently, the rest is in "
    "order.",
)
@click.option("--layers", default=_LAYERS, type=click.IntRange(min=1), help="Layers of the model, each with K and V.")
@click.option("--pages", default=_PAGES, type=click.IntRange(min=4), help="Pages of the pool.")
@click.option(
    "--page-bytes",
    default=_PAGE_BYTES,
    type=click.IntRange(min=1024),
    help="Bytes of one page of K, or of V, of one layer; the default is 16 tokens x 8 heads x 128 x bf16.",
)
@click.option(
    "--rounds",
    default=_ROUNDS,
    type=click.IntRange(min=1),
    help="Rounds behind each median; each measures every row once. One more goes before, to warm up.",
)
@click.option(
    "--quick", is_flag=True, help="A look instead of a measurement: 4 layers, 32 pages, 1 round, unless said otherwise."
)
@click.option("--staging", is_flag=True, help="Also: does it pay to gather small pieces, put once, and scatter?")
@click.option("--beside-engine", is_flag=True, help="Also: how much longer does a step of a computing thread take?")
@click.option("--ucx-library", default="wheel", help="As for the services: wheel, system, or a path of libucp.so.")
@click.option("--ucx-binding", default="own", type=click.Choice(["own", "ucx-py"]), help="As for the services.")
@click.option("--ib-device", help="As for the services: network devices that carry pages.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the result to this file: machine, work, and flat lists of rows.",
)
@click.pass_context
def transfer(context: click.Context, /, json_path: Path | None, **options: Any) -> None:
    """Move a KV pool between two processes of this machine, and compare.

    Every row is one library on one path with one layout and order of pages: how many writes (PUTs) that makes, how
    long they take, and how this compares with a one-thread memcpy of the same ranges and with every other library in
    the same run. Rounds are interleaved, all processes but the measured pair are stopped meanwhile, and the receiver
    checks every byte of the first and of the last round. Ends with 1 when a library delivered wrong bytes or broke.

    Each process has a pool of its own, in huge pages where the kernel has them: by default 0.94 GB, and two of them for
    each backend at a time.
    """  # fmt: skip
    if options["quick"]:
        sources = {name: context.get_parameter_source(name) for name in _QUICK}
        options |= {name: value for name, value in _QUICK.items() if sources[name] is ParameterSource.DEFAULT}
    with sigterm_ends(), _progress() as progress:
        try:
            result = run(_plan(options), progress)
        except CapacityExceeded as error:
            raise click.ClickException(error.message) from error
    if json_path is not None:
        result.write_json(json_path)
    table.show(result, table.console())
    if result.has_failed:
        raise SystemExit(1)


def _plan(options: dict[str, Any]) -> Plan:
    return Plan(
        work=Work(options["layers"], options["pages"], options["page_bytes"]),
        contenders=options["backend"],
        paths=tuple(PathName(name) for name in options["path"]),
        layouts=tuple(Layout(name) for name in options["layout"]),
        orders=tuple(Order(name) for name in options["order"]),
        rounds=options["rounds"],
        options=Options(options["ucx_library"], options["ucx_binding"], options["ib_device"]),
        staging=options["staging"],
        beside_engine=options["beside_engine"],
    )


@contextmanager
def _progress() -> Iterator[Progress]:
    """One changing line on standard error; nothing where that is no terminal."""
    with Status("starting", console=Console(stderr=True)) as status:
        yield status.update


bench.add_command(compare)
bench.add_command(control)
bench.add_command(serve)
