"""What `pdctl estimate` says before is what a pair has sent afterwards, byte for byte."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from pd.v1 import transfer_status_pb2

from demo.cluster import Cluster
from pd_common.cli.estimate import estimate
from tests.e2e.harness import Answer, Client, long_model, running_cluster
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.slow

PAGE_SIZE, CHUNK = 16, 100
SHORT_LAST = ("--last-chunk-tokens", "30")
DRAW = random.Random(11)


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with running_cluster(prefill_flags=SHORT_LAST) as running:
        yield running


def new_prompt(tokens: int) -> list[int]:
    """One that has nothing in common with any other."""
    return DRAW.choices(range(1, VOCAB_SIZE), k=tokens)


def estimated(tokens: int, *options: str) -> dict[str, Any]:
    model = ("--model", str(long_model("llama")), "--dtype", "float32")
    cuts = ("--page-size", str(PAGE_SIZE), "--chunk", str(CHUNK))
    result = CliRunner().invoke(estimate, [*model, *cuts, "--tokens", str(tokens), *options, "--json"])
    found: dict[str, Any] = json.loads(result.output)
    return found


async def assert_sent(client: Client, answer: Answer, expected: dict[str, Any]) -> None:
    """Both sides have it on record."""
    for name in ("prefill", "decode"):
        request = transfer_status_pb2.GetTransferRequest(bootstrap_room=answer.room)
        transfer = (await client.transfers(name).GetTransfer(request, timeout=10)).transfer
        sent = (transfer.chunks_done, transfer.pages_done, transfer.bytes_done)
        assert sent == (expected["sends"], expected["pages"], expected["total_bytes"]), name
        assert transfer.bytes_done == transfer.pages_done * expected["page_bytes"] + expected["metadata_bytes"]


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 100, 101, 116, 160, 200, 250, 1000, 1003])
async def test_a_new_prompt(client: Client, tokens: int) -> None:
    """Shorter than a page, whole pages, one step, several of which the last is cut short."""
    answer = await client.generate(new_prompt(tokens))
    await assert_sent(client, answer, estimated(tokens, *SHORT_LAST))


async def test_a_prompt_that_begins_as_an_earlier_one(client: Client) -> None:
    begun = new_prompt(250)
    await client.generate(begun, max_new_tokens=1)
    answer = await client.generate(begun + new_prompt(170))
    expected = estimated(420, *SHORT_LAST, "--prefix-hit", "250")
    assert expected["pages"] == 27 - 15
    await assert_sent(client, answer, expected)


async def test_a_turn_of_a_chat_begins_with_an_answer_that_only_decode_has(client: Client) -> None:
    begun = new_prompt(250)
    first = await client.generate(begun, max_new_tokens=60)
    answer = await client.generate([*begun, *first.token_ids, *new_prompt(170)])
    kept = 250 + 60 - 1  # the last token of an answer has no KV
    expected = estimated(480, *SHORT_LAST, "--prefix-hit", str(kept), "--prefill-prefix-hit", "250")
    assert expected["pages"] == 30 - 19
    await assert_sent(client, answer, expected)


@pytest.mark.parametrize("tokens", [160, 165])
async def test_a_prompt_that_was_there_before(client: Client, tokens: int) -> None:
    """All of it, or all whole pages of it: what is left goes with the metadata row."""
    prompt = new_prompt(tokens)
    await client.generate(prompt, max_new_tokens=1)
    answer = await client.generate(prompt, max_new_tokens=1)
    expected = estimated(tokens, *SHORT_LAST, "--prefix-hit", str(tokens))
    assert expected["send_pages"] == [1 if tokens % PAGE_SIZE else 0]
    await assert_sent(client, answer, expected)
