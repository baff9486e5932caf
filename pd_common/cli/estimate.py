"""`pdctl estimate`: what one handoff sends, from a model's config.json or from numbers, before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pd_common.cli.estimate_report import Memory, Report
from pd_common.errors import InvalidRequest
from pd_common.planning.estimate import Cuts, Estimate, Prompt, Ranks
from pd_common.planning.kv_shape import KvFields, KvShape, fields_of_config
from pd_common.planning.units import parse_bytes, parse_bytes_per_s

_MOST_TOKENS = 10_000_000
_COUNT = click.IntRange(min=1)


class _Amount(click.ParamType[float]):
    """A number with its unit."""

    def __init__(self, name: str, parse: Callable[[str], float]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return self._parse(str(value))
        except InvalidRequest as error:
            self.fail(error.message, param, ctx)


@click.command()
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="Hugging Face model directory, as pd-prefill takes it, or its config.json. The next four say what it does "
    "not, or what shall be otherwise.",
)
@click.option("--layers", type=_COUNT, help="Layers that keep keys and values.")
@click.option("--kv-heads", type=_COUNT, help="KV heads of a layer, over all tensor-parallel ranks.")
@click.option("--head-dim", type=_COUNT, help="Numbers of one key, or of one value, of one head.")
@click.option(
    "--dtype",
    help="Type of the KV, as in bfloat16.  [default: the model's own; pd-prefill --dtype auto takes float32 on a CPU "
    "without AMX]",
)
@click.option("--page-size", default=16, type=click.IntRange(1, 65536), help="Tokens in one page.")
@click.option("--tokens", required=True, type=click.IntRange(1, _MOST_TOKENS), help="Tokens of the prompt.")
@click.option("--chunk", default=2048, type=_COUNT, help="Most tokens in one step: --chunked-prefill-size of prefill.")
@click.option(
    "--last-chunk-tokens",
    type=_COUNT,
    help="Most tokens in the last of several steps, as pd-prefill has it (512 there).  [default: what is left]",
)
@click.option(
    "--prefix-hit",
    default=0,
    type=click.IntRange(min=0),
    help="Tokens that decode has of the prompt; whole pages of them are not sent.",
)
@click.option(
    "--prefill-prefix-hit",
    type=click.IntRange(min=0),
    help="Tokens that prefill has of it; they are not computed.  [default: as many as decode]",
)
@click.option("--prefill-tp", default=1, type=_COUNT, help="Tensor-parallel ranks of prefill, for other engines.")
@click.option("--decode-tp", default=1, type=_COUNT, help="Tensor-parallel ranks of decode, for other engines.")
@click.option(
    "--link",
    type=_Amount("SPEED", parse_bytes_per_s),
    help="Speed of the link: bytes, as in 25GB/s, or bits, as in 200Gb/s.",
)
@click.option(
    "--decode-memory",
    type=_Amount("SIZE", parse_bytes),
    help="Memory of the KV pool on each rank of decode, as in 80GiB: how many such requests fit?",
)
@click.option("--num-pages", type=_COUNT, help="The same in pages.")
@click.option("--output-tokens", type=_COUNT, help="Tokens of the answer, to say how many requests fit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def estimate(as_json: bool, **options: Any) -> None:
    """Work out what one handoff sends: sends, pages, bytes, copies and time.

    The model is named with --model, or by --layers, --kv-heads, --head-dim and --dtype. Sizes are in 1024s (GiB);
    bytes are those of whole pages, which is what travels. Nothing is started and no weights are read.

    \b
    pdctl estimate --model DIR --tokens 32768 --link 200Gb/s
    pdctl estimate --layers 60 --kv-heads 8 --head-dim 128 --dtype bfloat16 --tokens 32768 --chunk 8192
    """  # noqa: D301  click's mark for lines that stay as they are
    try:
        report = _report(options)
    except InvalidRequest as error:
        raise click.UsageError(error.message) from error
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=2))
    else:
        report.show(Console(highlight=False))


def _report(options: dict[str, Any]) -> Report:
    decode_hit, prefill_hit = options["prefix_hit"], options["prefill_prefix_hit"]
    prompt = Prompt(options["tokens"], decode_hit, decode_hit if prefill_hit is None else prefill_hit)
    cuts = Cuts(options["page_size"], options["chunk"], options["last_chunk_tokens"])
    ranks = Ranks(options["prefill_tp"], options["decode_tp"])
    handoff = Estimate.of(_shape(options), cuts, prompt, ranks)
    return Report(handoff, options["link"], _memory(handoff, options))


def _shape(options: dict[str, Any]) -> KvShape:
    given = KvFields(options["layers"], options["kv_heads"], options["head_dim"], options["dtype"])
    if options["model"] is None:
        if given == KvFields():
            raise InvalidRequest("name a model with --model, or give --layers, --kv-heads, --head-dim and --dtype")
        return given.complete()
    return given.or_else(fields_of_config(_read_config(options["model"]))).complete()


def _memory(handoff: Estimate, options: dict[str, Any]) -> Memory | None:
    size, pages, output = options["decode_memory"], options["num_pages"], options["output_tokens"]
    if size is not None and pages is not None:
        raise InvalidRequest("--decode-memory and --num-pages say the same: give one of them")
    if (size is None and pages is None) != (output is None):
        raise InvalidRequest(
            "how many requests fit depends on both: give --output-tokens, and --decode-memory or --num-pages"
        )
    if output is None:
        return None
    return Memory(pages if size is None else handoff.pages_in(int(size)), output)


def _read_config(model: Path) -> dict[str, object]:
    file = model / "config.json" if model.is_dir() else model
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise InvalidRequest(
            f"cannot read {file}: {error.strerror}; name a model directory or a config.json"
        ) from error
    except ValueError as error:
        raise InvalidRequest(f"{file} is not JSON; name a model directory or its config.json: {error}") from error
    if not isinstance(config, dict):
        raise InvalidRequest(f"{file} is not a config.json: it holds no JSON object")
    return config
