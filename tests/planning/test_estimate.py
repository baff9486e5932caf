"""What `pdctl estimate` says, beside the code that really cuts, groups and keeps pages."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_common.cli.estimate import estimate
from pd_common.engine.batch import Batch
from pd_common.engine.engine import Engine
from pd_common.engine.request import Sequence
from pd_common.engine.runner import ModelRunner
from pd_common.engine.sampler import SampledToken
from pd_common.errors import InvalidRequest
from pd_common.handoff.chunk import ChunkPlanner, group_concurrent_contiguous, plan_puts
from pd_common.planning.estimate import Copies, Cuts, Estimate, Prompt, Ranks, send_pages
from pd_common.planning.kv_shape import KvFields, KvShape, fields_of_config
from pd_common.types import BootstrapRoom
from services.prefill.__main__ import main as pd_prefill
from services.prefill.scheduler import PrefillScheduler
from tests.control.serving import make_request
from tests.services.fake_engine import PAGE_SIZE, FakeEngine
from tests.tiny_models import FAMILIES, OTHER_SEAMS, tiny_model

KIB, MIB, GIB = 2**10, 2**20, 2**30
MODEL = ("--layers", "60", "--kv-heads", "8", "--head-dim", "128", "--dtype", "bfloat16")
SHAPE = KvShape(60, 8, 128, "bfloat16")
LONG = ("--tokens", "32768", "--chunk", "8192", "--page-size", "16")
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "torch_dtype": "bfloat16",
}


def call(*options: str) -> Result:
    return CliRunner().invoke(estimate, options)


def figures(*options: str) -> dict[str, Any]:
    result = call(*options, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


# --- the figures that are worked out by hand ---


def test_32k_tokens_of_60_layers() -> None:
    found = figures(*MODEL, *LONG)
    assert (found["item_bytes"], found["page_bytes"]) == (32 * KIB, 3.75 * MIB)
    assert found["send_pages"] == [512, 512, 512, 512]
    assert 512 * found["page_bytes"] == 1.875 * GIB
    assert found["pages_bytes"] == 7.5 * GIB
    assert found["total_bytes"] == found["pages_bytes"] + found["metadata_bytes"]
    ours, usual = found["copies"]
    assert (ours["buffers"], ours["contiguous"]["count"], ours["scattered"]["count"]) == (1, 4, 2048)
    assert (usual["buffers"], usual["contiguous"]["count"], usual["scattered"]["count"]) == (120, 480, 245_760)


def test_a_hundred_contiguous_pages_are_one_copy_in_each_buffer() -> None:
    _, usual = figures(*MODEL, "--tokens", "1600")["copies"]
    assert usual["contiguous"] == {"count": 120, "largest_bytes": 3.125 * MIB}
    assert usual["scattered"] == {"count": 12_000, "largest_bytes": 32 * KIB}


def test_a_person_reads_the_same() -> None:
    printed = call(*MODEL, *LONG, "--link", "200Gb/s", "--num-pages", "4160", "--output-tokens", "512").output
    rows = [line.split() for line in printed.splitlines()]
    for row in (
        "K, or V, of one layer 8 KV heads x 128 x bfloat16 32 KiB",
        "all layers K and V x 60 layers 3.75 MiB",
        "1 to 3, each 512 1.875 GiB 80.5 ms",
        "4, the last 512 1.875 GiB 80.5 ms",
        "all pages 2,048 7.5 GiB 322 ms",
        "this project's 1 4 1.875 GiB 2,048 3.75 MiB",
        "K and V per layer 120 480 16 MiB 245,760 32 KiB",
        "4,160 2,080 2",
    ):
        assert row.split() in rows, printed


def test_time_is_that_of_all_bytes_and_of_those_that_nothing_hides() -> None:
    found = figures(*MODEL, "--tokens", "3200", "--chunk", "2048", "--link", "8Gb/s")
    assert found["link"]["total_s"] == pytest.approx(found["total_bytes"] / 1e9)
    last = found["send_pages"][-1] * found["page_bytes"] + found["metadata_bytes"]
    assert found["link"]["last_send_s"] == pytest.approx(last / 1e9)


# --- beside what prefill does ---


class _EagerEngine(FakeEngine):
    """A step ends at once."""

    async def step(self, batch: Batch) -> tuple[SampledToken, ...]:
        return tuple(SampledToken(1) for _ in batch.draws)


async def _really_sent(prompt: Prompt, cuts: Cuts) -> tuple[int, ...]:
    """Pages of each chunk that prefill makes of it, after another prompt that began in the same way."""
    engine = _EagerEngine(num_pages=64)
    scheduler = PrefillScheduler(
        cast("Engine", engine), engine.prefixes, cuts.chunk_tokens, 1, last_chunk_tokens=cuts.last_chunk_tokens
    )
    tokens = tuple(range(1, prompt.tokens + 1))
    async with asyncio.TaskGroup() as group:
        loop = group.create_task(scheduler.run())
        if prompt.prefill_hit:
            earlier = scheduler.enqueue(Sequence(make_request(1, tokens[: prompt.prefill_hit])))
            await earlier.computed()
            await scheduler.release(earlier)
        job = scheduler.enqueue(Sequence(make_request(2, tokens)))
        prefix = prompt.decode_hit // PAGE_SIZE * PAGE_SIZE
        planner = ChunkPlanner(BootstrapRoom(2), prompt.tokens, PAGE_SIZE, prefix)
        pages = []
        is_last = False
        while not is_last:
            done = await job.next_chunk()
            is_last = done.sampled is not None
            if chunk := planner.next_chunk(done.end, job.sequence.pages, is_last=is_last):
                pages.append(len(chunk.src_pages))
        loop.cancel()
    return tuple(pages)


@settings(max_examples=300)
@given(st.data())
def test_sends_are_those_that_prefill_makes(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 100), "tokens")
    hits = st.sampled_from([0, tokens]) | st.integers(0, tokens)
    prompt = Prompt(tokens, data.draw(hits, "decode_hit"), data.draw(hits, "prefill_hit"))
    last_chunk = data.draw(st.none() | st.integers(1, 40), "last_chunk_tokens")
    cuts = Cuts(PAGE_SIZE, data.draw(st.integers(1, 40), "chunk_tokens"), last_chunk)
    assert send_pages(prompt, cuts) == asyncio.run(_really_sent(prompt, cuts))


@pytest.mark.parametrize("buffers", [1, SHAPE.planes])
@pytest.mark.parametrize("contiguous", [True, False])
def test_copies_are_the_writes_that_the_handoff_plans(buffers: int, contiguous: bool) -> None:
    handoff = Estimate.of(SHAPE, Cuts(16, 256), Prompt(1000), Ranks())
    page_ids = np.arange(handoff.pages) if contiguous else np.arange(handoff.pages) * 2
    items = [handoff.page_bytes // buffers] * buffers
    bases = [1 << 40] * buffers
    lengths: list[int] = []
    start = 0
    for pages in handoff.send_pages:
        some = page_ids[start : start + pages]
        lengths += plan_puts(group_concurrent_contiguous(some, some), bases, bases, items).lengths.tolist()
        start += pages
    assert handoff.copies(buffers, contiguous=contiguous) == Copies(len(lengths), max(lengths))
    assert sum(lengths) == handoff.bytes


@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_SEAMS])
def test_a_page_is_as_large_as_in_the_engines_pool(family: str) -> None:
    found = figures("--model", str(tiny_model(family)), "--tokens", "1", "--page-size", "8")
    pool = ModelRunner(tiny_model(family), page_size=8, num_pages=2, dtype=found["model"]["dtype"], device="cpu").pool
    assert pool.kv_item_lens == (found["page_bytes"],)


def test_pages_are_cut_as_pd_prefill_cuts_them_unless_said_otherwise() -> None:
    theirs = {name: option.default for option in pd_prefill.params for name in option.opts}
    cuts = figures(*MODEL, "--tokens", "1")["cuts"]
    assert cuts["page_size"] == theirs["--page-size"]
    assert cuts["chunk_tokens"] == theirs["--chunked-prefill-size"]


# --- what decode has, ranks, memory ---


def test_what_decode_has_is_not_sent_and_nothing_is_computed_for_it() -> None:
    found = figures(*MODEL, "--tokens", "1000", "--chunk", "100", "--prefix-hit", "815")
    assert found["prompt"] == {"tokens": 1000, "decode_hit": 815, "prefill_hit": 815}
    assert (found["prompt_pages"], found["pages"]) == (63, 13)
    assert found["send_pages"] == [6, 7]


def test_a_prompt_that_decode_has_is_one_send_of_metadata_alone() -> None:
    found = figures(*MODEL, "--tokens", "64", "--prefix-hit", "64")
    assert (found["send_pages"], found["total_bytes"]) == ([0], found["metadata_bytes"])
    assert found["copies"][0]["contiguous"] == {"count": 0, "largest_bytes": 0}


@pytest.mark.parametrize(("prefill", "decode"), [(1, 4), (4, 1), (2, 8)])
def test_with_unequal_ranks_every_token_is_a_copy(prefill: int, decode: int) -> None:
    handoff = Estimate.of(SHAPE, Cuts(16, 256), Prompt(1000), Ranks(prefill, decode))
    for buffers in (1, SHAPE.planes):
        for contiguous in (True, False):
            copies = handoff.copies(buffers, contiguous=contiguous)
            assert copies.count == handoff.pages * 16 * SHAPE.planes * max(prefill, decode)
            assert copies.count * copies.largest_bytes == handoff.bytes


def test_with_equal_ranks_pages_stay_whole() -> None:
    handoff = Estimate.of(SHAPE, Cuts(16, 256), Prompt(1000), Ranks(4, 4))
    copies = handoff.copies(1, contiguous=False)
    assert (copies.count, copies.largest_bytes) == (4 * 63, 3.75 * MIB / 4)


def test_that_ranks_are_for_other_engines_is_said() -> None:
    assert "pd-prefill and pd-decode have TP 1" in call(*MODEL, *LONG, "--prefill-tp", "2").output.replace("\n", " ")
    assert "TP" not in call(*MODEL, *LONG).output


def test_requests_fit_as_long_as_all_have_pages_at_their_end() -> None:
    one_page_more = ("--tokens", "160", "--output-tokens", "2")
    assert figures(*MODEL, *one_page_more, "--num-pages", "22")["decode"]["requests"] == 2
    assert figures(*MODEL, *one_page_more, "--num-pages", "21")["decode"]["requests"] == 1
    first_token_only = figures(*MODEL, "--tokens", "160", "--output-tokens", "1", "--num-pages", "20")["decode"]
    assert first_token_only == {"num_pages": 20, "output_tokens": 1, "pages_per_request": 10, "requests": 2}


def test_memory_is_that_of_one_rank() -> None:
    asked = (*MODEL, "--tokens", "160", "--output-tokens", "1", "--decode-memory", "37.5MiB")
    assert figures(*asked)["decode"]["num_pages"] == 10
    assert figures(*asked, "--prefill-tp", "2", "--decode-tp", "2")["decode"]["num_pages"] == 20


# --- the model ---


def write(directory: Path, config: object) -> str:
    file = directory / "config.json"
    file.write_text(json.dumps(config))
    return str(file)


def test_options_win_over_what_a_config_says(tmp_path: Path) -> None:
    file = write(tmp_path, CONFIG)
    assert figures("--model", file, "--tokens", "1")["model"] == {
        "layers": 4, "kv_heads": 2, "head_dim": 32, "dtype": "bfloat16",
    }  # fmt: skip
    other = figures("--model", str(tmp_path), "--tokens", "1", "--dtype", "float8_e5m2", "--kv-heads", "1")
    assert other["page_bytes"] == 16 * 1 * 32 * 1 * 2 * 4


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (CONFIG | {"head_dim": 64}, KvFields(4, 2, 64, "bfloat16")),
        (CONFIG | {"num_key_value_heads": None}, KvFields(4, 8, 32, "bfloat16")),
        (CONFIG | {"torch_dtype": None}, KvFields(4, 2, 32, "float32")),
        (CONFIG | {"dtype": "float16", "torch_dtype": None}, KvFields(4, 2, 32, "float16")),
        ({"text_config": CONFIG, "dtype": "float16"}, KvFields(4, 2, 32, "float16")),
        (CONFIG | {"layer_types": ["full_attention", "sliding_attention"] * 2}, KvFields(4, 2, 32, "bfloat16")),
        ({"num_hidden_layers": 4}, KvFields(4, None, None, "float32")),
    ],
)
def test_a_config_is_read_as_the_engine_reads_it(config: dict[str, object], fields: KvFields) -> None:
    assert fields_of_config(config) == fields


@pytest.mark.parametrize(
    "uneven", [{"kv_lora_rank": 512}, {"multi_query": True}, {"layer_types": ["full_attention", "linear_attention"]}]
)
def test_a_model_whose_layers_keep_something_else_is_refused(uneven: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(uneven))):
        fields_of_config(CONFIG | uneven)


# --- what cannot be answered ---


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "name a model with --model, or give --layers, --kv-heads, --head-dim and --dtype"),
        (("--layers", "2", "--dtype", "float16"), "give also --kv-heads, --head-dim"),
        ((*MODEL, "--kv-heads", "0"), "'--kv-heads': 0 is not in the range"),
        ((*MODEL, "--prefix-hit", "1001"), "decode cannot have 1,001 tokens of a prompt that has 1,000"),
        ((*MODEL, "--prefill-prefix-hit", "1001"), "prefill cannot have 1,001 tokens"),
        ((*MODEL, "--dtype", "bf16"), "known are float32, bfloat16"),
        ((*MODEL, "--link", "25gb/s"), "bytes with a large B, as in 25GB/s, or bits with a small b"),
        ((*MODEL, "--link", "0GB/s"), "is not a speed"),
        ((*MODEL, "--decode-memory", "80G", "--output-tokens", "1"), "say 80GiB (of 1024 MiB) or 80GB"),
        ((*MODEL, "--num-pages", "5"), "give --output-tokens"),
        ((*MODEL, "--output-tokens", "5"), "--decode-memory or --num-pages"),
        ((*MODEL, "--output-tokens", "5", "--num-pages", "5", "--decode-memory", "1GB"), "give one of them"),
        ((*MODEL, "--decode-tp", "3"), "8 KV heads cannot be shared out among 3 decode ranks"),
        ((*MODEL, "--kv-heads", "6", "--prefill-tp", "2", "--decode-tp", "3"), "must be a multiple of the other"),
        (("--model", "no/such"), "cannot read no/such: No such file"),
    ],
)
def test_a_question_without_an_answer_is_one_message(options: tuple[str, ...], said: str) -> None:
    refused(call("--tokens", "1000", *options), said)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "give also --layers, --kv-heads, --head-dim"),
        ([], "it holds no JSON object"),
        (CONFIG | {"num_hidden_layers": "four"}, "config.json says num_hidden_layers is 'four'"),
        (CONFIG | {"dtype": "complex64"}, "complex64 is not a data type of KV"),
        (CONFIG | {"kv_lora_rank": 512}, "config.json has kv_lora_rank"),
    ],
)
def test_a_config_without_an_answer_is_one_message(tmp_path: Path, config: object, said: str) -> None:
    refused(call("--tokens", "1000", "--model", write(tmp_path, config)), said)


def test_what_is_no_config_at_all_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfeweights")
    refused(call("--tokens", "1000", "--model", str(tmp_path)), "is not JSON")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(call("--tokens", "1000", "--model", str(empty)), "name a model directory or a config.json")


def refused(result: Result, said: str) -> None:
    assert result.exit_code == 2, result.output
    (message,) = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert said in message
