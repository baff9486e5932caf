"""`pdctl plan`: how many prefills and decodes a load needs, from speeds that were measured."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import click
from rich.console import Console
from rich.status import Status

from pd_common.cli.bench.serve.client import Completions, Server, model_of
from pd_common.cli.bench.serve.lengths import Lengths, LengthsType
from pd_common.cli.bench.serve.run import fields_of
from pd_common.cli.bench.serve.workload import Kind, Workload
from pd_common.cli.plan import report
from pd_common.cli.plan.load import arrivals_of
from pd_common.cli.plan.probe import Probe, ProbeSizes, Seen
from pd_common.errors import PdError
from pd_common.planning.plan import Planned, Slo
from pd_common.planning.plan import plan as planned_for
from pd_common.planning.simulation import Arrival
from pd_common.planning.speeds import Settings, Speeds, fit

_SERVERS = Settings()
_COUNT = click.IntRange(min=1)
_MS = click.FloatRange(min=0, min_open=True)
_FILE = click.Path(dir_okay=False, path_type=Path)
_SPELLINGS = "2000, 500-1500 (uniform) or lognormal:800,0.6,4000 (median, sigma, most)."
_VOCAB = 2
"""The simulation looks at no token."""
_LEAST_REQUESTS, _MOST_REQUESTS = 2000, 20000
_LIVES = 25
"""So many times as long as a request lives the load lasts: it is long in a steady state then."""
_WARM_UP = 0.2


@click.group()
def plan() -> None:
    """Plan how many prefills and decodes a load needs.

    First `measure` how fast one prefill and one decode are, once for each model and machine. Then ask for `replicas`
    as often as you like: that is a simulation, and needs nothing that runs.
    """


@plan.command()
@click.argument("url")
@click.option("--to", "path", required=True, type=_FILE, help="The file for the speeds, JSON.")
@click.option("--model", help="Its name in requests; by default the first that the server lists.")
@click.option("--longest-prompt", default=4096, type=click.IntRange(min=16), help="Prompts of up to so many tokens.")
@click.option("--answers", default=16, type=_COUNT, help="Answers side by side, at most.")
@click.option("--vocab", default=256, type=_COUNT, help="Prompts are lists of token ids, drawn below this.")
@click.option(
    "--chunked-prefill-size", default=_SERVERS.chunked_prefill_size, type=_COUNT, help="As pd-prefill has it."
)
@click.option("--last-chunk-tokens", default=_SERVERS.last_chunk_tokens, type=_COUNT, help="As pd-prefill has it.")
@click.option(
    "--max-running-requests", default=_SERVERS.max_running_requests, type=_COUNT, help="As both processes have it."
)
@click.option("--page-size", default=_SERVERS.page_size, type=_COUNT, help="As both processes have it.")
@click.option("--kv-cache-tokens", default=_SERVERS.kv_cache_tokens, type=_COUNT, help="As pd-decode has it.")
@click.option(
    "--num-reserved-decode-tokens",
    default=_SERVERS.num_reserved_decode_tokens,
    type=click.IntRange(min=0),
    help="As pd-decode has it.",
)
@click.option("--timeout", default=600.0, type=click.FloatRange(min=1), help="Seconds until a request has failed.")
@click.option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, show_default=False, help="Sent if given.")
def measure(url: str, path: Path, longest_prompt: int, answers: int, **options: Any) -> None:
    """Measure how fast the prefill and the decode behind the router at URL are.

    There must be one of each, and nothing else for them to do. Prompts are sent alone and at once, and answers are
    written side by side. With prompts that take a second the whole takes about a minute, mostly for the longest ones.
    """
    began_s = time.monotonic()
    settings = Settings(**{field.name: options[field.name] for field in fields(Settings)})
    server = Server(url, options["api_key"], options["timeout"])
    sizes = ProbeSizes.up_to(longest_prompt, answers, settings.kv_cache_tokens)
    with _errors(), Status("starting", console=Console(stderr=True)) as status:
        seen = asyncio.run(_probe(server, options["model"], options["vocab"], sizes, status.update))
        speeds = fit(settings, seen.singles, seen.bursts, seen.gaps)
        speeds.write(path)
    report.show_speeds(seen, speeds, report.console())
    click.echo(f"measured in {time.monotonic() - began_s:.0f} s, written to {path}")


@plan.command()
@click.argument("path", metavar="SPEEDS", type=_FILE)
@click.option("--rate", required=True, type=click.FloatRange(min=0, min_open=True), help="Requests a second, Poisson.")
@click.option("--prompt-tokens", "prompt", required=True, type=LengthsType(), help=f"Length of prompts: {_SPELLINGS}")
@click.option("--output-tokens", "output", required=True, type=LengthsType(), help="Length of answers, so too.")
@click.option("--slo-ttft-ms", required=True, type=_MS, help="The longest TTFT that is good.")
@click.option("--slo-itl-ms", required=True, type=_MS, help="The longest p99 of a request's own ITLs.")
@click.option(
    "--share", default=0.9, type=click.FloatRange(0, 1, min_open=True), help="Of requests that must be within both."
)
@click.option(
    "--margin", default=0.1, type=click.FloatRange(min=0), help="Plan for so much more than --rate; 0.1 is 10 %."
)
@click.option("--seed", default=0, type=click.IntRange(min=0), help="Arrivals and lengths depend on this alone.")
@click.option("--json", "json_path", type=_FILE, help="Also write the result to this file.")
def replicas(path: Path, rate: float, prompt: Lengths, output: Lengths, json_path: Path | None, **options: Any) -> None:
    """Say how many prefills and decodes keep an SLO, and what becomes of it with one less.

    SPEEDS is a file that `pdctl plan measure` has written. Ends with 1 when no number of them can keep it.
    """
    slo = Slo(options["slo_ttft_ms"] / 1e3, options["slo_itl_ms"] / 1e3, options["share"])
    margin, seed = options["margin"], options["seed"]
    with _errors():
        speeds = Speeds.read(path)
        arrivals = _arrivals(speeds, slo, Workload(seed, Kind.PROMPTS, prompt, output, 0, _VOCAB), rate * (1 + margin))
        warm_up = round(_WARM_UP * len(arrivals))
        with Status("drawing requests", console=Console(stderr=True)) as status:
            found = planned_for(speeds, slo, arrivals, warm_up, status.update)
    to = report.console()
    what = f"{rate:g} requests/s and {100 * margin:g} % more, prompts of {prompt} tokens, answers of {output}"
    to.print(f"{what}: {len(arrivals):,} requests simulated, seed {seed}", highlight=False, soft_wrap=True)
    report.show_plan(found, slo, to)
    if json_path is not None:
        json_path.write_text(json.dumps(_document(found), indent=1) + "\n")


async def _probe(
    server: Server, model: str | None, vocab: int, sizes: ProbeSizes, progress: Callable[[str], object]
) -> Seen:
    async with server.session() as session:
        fields = fields_of(await model_of(server, session, model), ignore_eos=True)
        # Prompts of an earlier probe must not be found in the prefix cache.
        return await Probe(Completions(server, session, fields), vocab, time.time_ns(), sizes, progress).run()


def _arrivals(speeds: Speeds, slo: Slo, workload: Workload, per_s: float) -> list[Arrival]:
    """Enough of them for a steady state."""
    some = arrivals_of(workload, per_s, _LEAST_REQUESTS)
    lives_s = fmean(speeds.ttft_s(each.prompt_tokens) + slo.itl_s * each.output_tokens for each in some)
    count = min(round(_LIVES * per_s * lives_s), _MOST_REQUESTS)
    return some if count <= len(some) else arrivals_of(workload, per_s, count)


def _document(planned: Planned) -> dict[str, Any]:
    """Without the single requests."""
    trials = [asdict(trial) for trial in (planned.chosen, *planned.smaller)]
    for trial in trials:
        del trial["outcome"]["served"]
    return {"bound": asdict(planned.bound), "chosen": trials[0], "smaller": trials[1:]}


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except PdError as error:
        raise click.ClickException(error.message) from error
