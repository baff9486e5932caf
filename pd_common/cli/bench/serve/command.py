"""`pdctl bench serve`: its options, and the run from first to last."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import click

from pd_common.cli.bench.machine import Machine
from pd_common.cli.bench.serve import report
from pd_common.cli.bench.serve.client import Server, model_of
from pd_common.cli.bench.serve.exchange import Log
from pd_common.cli.bench.serve.figures import Figures, Slo
from pd_common.cli.bench.serve.lengths import Lengths, LengthsType
from pd_common.cli.bench.serve.plan import Arrivals, Background, Plan
from pd_common.cli.bench.serve.result import Result
from pd_common.cli.bench.serve.run import fields_of, send_to
from pd_common.errors import PdError

_COUNT = click.IntRange(min=1)
_REQUESTS = 100
_INTERRUPTED = 130


def _in_a_directory(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """A name that cannot be written is found out before the run, not after it."""
    if path is not None and not path.parent.is_dir():
        raise click.BadParameter(f"there is no directory {path.parent}")
    return path


def _with_scheme(_: click.Context, __: click.Parameter, url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise click.BadParameter(f"{url!r} does not begin with http:// or https://")
    return url


def _json_object(_: click.Context, __: click.Parameter, text: str) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise click.BadParameter("not a JSON object")
    return document


_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("url", callback=_with_scheme)
@click.option("--model", help="Its name in requests; by default the first that the server lists.")
@click.option(
    "--rate",
    default=math.inf,
    type=click.FloatRange(min=0, min_open=True),
    help="Requests a second on average, at random moments (Poisson), whatever becomes of earlier ones; inf: without "
    "pause, --concurrency at a time.",
)
@click.option("--concurrency", type=_COUNT, help="With --rate inf: requests under way at any time.  [default: 1]")
@click.option("--requests", type=_COUNT, help=f"How many are measured.  [default: {_REQUESTS}, unless --seconds]")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="Instead of --requests: how long new ones are sent; all of them are waited for.",
)
@click.option("--warm-up", default=4, type=click.IntRange(min=0), help="Requests before those; they are in no figure.")
@click.option(
    "--prompt-tokens",
    "prompt",
    default="1000",
    type=LengthsType(),
    help="Length of prompts: 2000, 500-1500 (uniform) or lognormal:800,0.6,4000 (median, sigma, most).",
)
@click.option("--output-tokens", "output", default="64", type=LengthsType(), help="Length of answers, in the same way.")
@click.option(
    "--prefix-tokens",
    default=0,
    type=click.IntRange(min=0),
    help="All prompts begin with the same so many tokens, which count in their length; each has one more at least.",
)
@click.option("--vocab", default=256, type=_COUNT, help="Prompts are lists of token ids, drawn below this.")
@click.option("--text", is_flag=True, help="Prompts are text instead, a common English word for each token.")
@click.option(
    "--seed",
    default=0,
    type=click.IntRange(min=0),
    help="Arrivals, lengths and prompts depend on this alone. A server that caches prompts remembers those of an "
    "earlier run with the same seed.",
)
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    help="Send ignore_eos, so that answers have the length asked for; for servers that refuse the field: no.",
)
@click.option(
    "--extra-body",
    default="{}",
    callback=_json_object,
    help='A JSON object: more fields of every request, as {"logprobs": 0}, which some servers need to send each token '
    "in an event of its own.",
)
@click.option("--background-streams", default=0, type=click.IntRange(min=0), help="Long answers kept running beneath.")
@click.option("--background-output", default=512, type=_COUNT, help="Tokens of each of these answers.")
@click.option(
    "--background-alone",
    default=2.0,
    type=click.FloatRange(min=0),
    help="Seconds that they run before the first prompt, to compare with.",
)
@click.option("--slo-ttft-ms", type=click.FloatRange(min=0), help="For the goodput: the longest TTFT that is good.")
@click.option("--slo-itl-ms", type=click.FloatRange(min=0), help="And the longest p99 of a request's own ITLs.")
@click.option("--timeout", default=600.0, type=click.FloatRange(min=1), help="Seconds until a request has failed.")
@click.option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, show_default=False, help="Sent if given.")
@click.option("--json", "json_path", type=_FILE, callback=_in_a_directory, help="Also write the result to this file.")
@click.option("--plot", "plot_path", type=_FILE, callback=_in_a_directory, help="Also draw it, as a PNG.")
def serve(json_path: Path | None, plot_path: Path | None, **options: Any) -> None:
    """Send requests to any OpenAI-compatible server at URL, and say how fast it answers.

    Every request is a completion as a stream. TTFT is the time until the first part of its answer, ITL the gap between
    one part and the next (all gaps of all requests together, not the mean of each), E2E the time until [DONE].

    With --background-streams, long answers run all the time; how much prompts that arrive disturb them is told apart.

    Ctrl-C ends the run and shows what there is so far. Ends with 1 when no request was answered.
    """
    if plot_path is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'pd-handoff[plot]'")
    plan, slo = _plan(options), _slo(options["slo_ttft_ms"], options["slo_itl_ms"])
    server = Server(options["url"], options["api_key"], options["timeout"])
    load = os.getloadavg()[0]
    try:
        model = asyncio.run(_model(server, options["model"]))
    except PdError as error:
        raise click.ClickException(error.message) from error
    click.echo(f"sending to {server.url}, model {model}: {plan}", err=True)
    log = Log()
    fields = {**fields_of(model, ignore_eos=options["ignore_eos"]), **options["extra_body"]}
    interrupted = _is_interrupted(send_to(server, fields, plan, log))
    result = Result(Machine.here(load, ()), server.url, model, plan, slo, Figures.of(log, slo))
    report.show(result, report.console())
    if json_path is not None:
        result.write_json(json_path, log)
    if plot_path is not None and log.prompts:
        from pd_common.cli.bench.serve.plot import draw  # noqa: PLC0415 - matplotlib need not be installed

        draw(result, log, plot_path)
    if interrupted or not result.figures.answered:
        raise SystemExit(_INTERRUPTED if interrupted else 1)


def _plan(options: Mapping[str, Any]) -> Plan:
    per_s = None if math.isinf(options["rate"]) else options["rate"]
    if per_s is not None and options["concurrency"] is not None:
        raise click.UsageError("--concurrency goes with --rate inf: requests at a rate come whatever is under way")
    if options["requests"] is not None and options["seconds"] is not None:
        raise click.UsageError("either --requests or --seconds")
    requests = options["requests"] or (_REQUESTS if options["seconds"] is None else None)
    prompt: Lengths = options["prompt"]
    if options["prefix_tokens"] >= prompt.most:
        raise click.UsageError(f"--prefix-tokens must be below the length of prompts, which is {prompt.most} at most")
    streams = options["background_streams"]
    return Plan(
        seed=options["seed"],
        arrivals=Arrivals(per_s, options["concurrency"] or 1, options["warm_up"], requests, options["seconds"]),
        prompt=prompt,
        output=options["output"],
        prefix_tokens=options["prefix_tokens"],
        vocab=None if options["text"] else options["vocab"],
        background=Background(streams, options["background_output"], options["background_alone"]) if streams else None,
    )


def _slo(ttft_ms: float | None, itl_ms: float | None) -> Slo | None:
    return None if ttft_ms is None and itl_ms is None else Slo(ttft_ms, itl_ms)


async def _model(server: Server, wanted: str | None) -> str:
    async with server.session() as session:
        return await model_of(server, session, wanted)


def _is_interrupted(work: Coroutine[None, None, None]) -> bool:
    """Does the work, until Ctrl-C at most."""
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        return True
    return False
