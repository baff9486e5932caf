"""`pdctl bench compare`: a prefill and a decode beside one engine alone, on the same two cores."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console
from rich.status import Status

from pd_common.cli.bench.compare import itl, optimistic, planned, prefix, table, tail, ttft
from pd_common.cli.bench.compare.bench import Bench
from pd_common.cli.bench.compare.model import write_model
from pd_common.cli.bench.compare.result import Comparison, Result
from pd_common.cli.bench.compare.setups import Cores, Starter
from pd_common.cli.bench.compare.sizes import FULL, QUICK
from pd_common.cli.bench.machine import Machine
from pd_common.cli.bench.names import Names
from pd_common.cli.bench.processes import on_cores
from pd_common.cli.bench.signals import sigterm_ends
from pd_common.errors import PdError

_SCENARIOS: dict[str, Callable[[Bench], Comparison]] = {
    "itl": itl.measure,
    "ttft": ttft.measure,
    "tail": tail.measure,
    "prefix": prefix.measure,
    "optimistic": optimistic.measure,
    "planned": planned.measure,
}
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.option(
    "--scenario",
    "scenarios",
    default="itl,ttft,tail,prefix,optimistic",
    type=Names(_SCENARIOS),
    help="itl: answers while prompts arrive; ttft: single prompts; tail: where their time goes; prefix: a beginning "
    "that both sides have; optimistic: prefill computes although decode has no memory yet; planned: what a simulation "
    "with measured speeds says of a load.",
)
@click.option("--rounds", default=5, type=click.IntRange(min=1), help="Rounds behind each median, set-ups by turns.")
@click.option(
    "--layers",
    default=4,
    type=click.IntRange(min=1),
    help="Layers of the model, which has random weights: 256 channels, 8 heads and 4 KV heads of 64, 4096 tokens.",
)
@click.option("--seed", default=0, type=click.IntRange(0, 2**31), help="Arrivals and prompts depend on this alone.")
@click.option("--quick", is_flag=True, help="A look instead of a measurement: short prompts, few requests.")
@click.option("--json", "json_path", type=_FILE, help="Also write the result to this file.")
@click.option("--plot", "plot_path", type=_FILE, help="Also draw the ITLs of the last round, as a PNG.")
def compare(
    scenarios: tuple[str, ...],
    rounds: int,
    layers: int,
    seed: int,
    quick: bool,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Compare a prefill/decode pair with one engine alone on two cores of this machine.

    Everything is started for this, in float32. Prefill and decode have one core and one thread each; one engine alone
    has both cores and two threads, or one of each. Routers and the client share the first core with prefill. Set-ups of
    one scenario run all the time, and are measured by turns. All of it takes a quarter of an hour; planned, which runs
    only when it is asked for, ten minutes.
    """
    if plot_path is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'pd-handoff[plot]'")
    machine, to = Machine.here(os.getloadavg()[0], ()), table.console()
    to.print(str(machine), highlight=False)
    found = []
    with (
        sigterm_ends(),
        tempfile.TemporaryDirectory() as directory,
        Status("starting", console=Console(stderr=True)) as status,
    ):
        try:
            cores, sizes = Cores.here(), QUICK if quick else FULL
            write_model(Path(directory), layers)
            bench = Bench(Starter(Path(directory), cores, sizes.kv_cache_tokens), sizes, rounds, seed, status.update)
            with on_cores({cores.first}):
                for name in scenarios:
                    found.append(_SCENARIOS[name](bench))
                    table.show(found[-1], to)
        except PdError as error:
            raise click.ClickException(error.message) from error
    if json_path is not None:
        Result(machine, layers, rounds, seed, tuple(found)).write_json(json_path)
    if plot_path is not None:
        from pd_common.cli.bench.compare.plot import draw  # noqa: PLC0415 - matplotlib need not be installed

        for comparison in found:
            if comparison.logs:
                draw(comparison, plot_path)
