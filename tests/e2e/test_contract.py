"""What a client may rely on: lengths, stop rules, refusals in the same words on every path, rooms."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import httpx
import openai
import pytest

from demo.cluster import LOOPBACK, Cluster
from pd_common.control.status import from_rpc_error
from pd_common.errors import PdError, Reason
from tests.e2e.harness import CONTEXT_LENGTH, KV_TOKENS, Client, long_model
from tests.e2e.tools import grpcurl, needs_grpcurl
from tests.engine.oracle import Oracle
from tests.tiny_models import VOCAB_SIZE

SUCCESS = 4
PAGE_SIZE = 16

PROMPT = tuple(random.Random(3).choices(range(1, VOCAB_SIZE), k=150))


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(long_model("llama"))


def url(pair: Cluster, path: str) -> str:
    return f"http://{LOOPBACK}:{pair.ports.http}{path}"


async def post(pair: Cluster, path: str, body: Any, **options: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as http:
        if isinstance(body, bytes):
            return await http.post(url(pair, path), content=body, **options)
        return await http.post(url(pair, path), json=body, **options)


async def refusal(call: Any) -> PdError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value, "peer")


@pytest.mark.parametrize("max_new_tokens", [1, 2])
async def test_short_answers_have_exactly_their_length(client: Client, oracle: Oracle, max_new_tokens: int) -> None:
    answer = await client.generate(PROMPT, max_new_tokens=max_new_tokens)
    assert answer.token_ids == oracle.tokens(PROMPT, max_new_tokens)
    assert answer.finish == "FINISH_REASON_LENGTH"
    assert (answer.last.usage.prompt_tokens, answer.last.usage.completion_tokens) == (len(PROMPT), max_new_tokens)


async def test_a_stop_token_as_first_token_ends_the_answer(client: Client, oracle: Oracle) -> None:
    first = oracle.tokens(PROMPT, 1)[0]
    answer = await client.generate(PROMPT, sampling={"stop_token_ids": [first]})
    assert (answer.token_ids, answer.text) == ([first], "")
    assert (answer.finish, answer.last.matched_token_id) == ("FINISH_REASON_STOP", first)


async def test_a_stop_text_as_first_token_ends_the_answer(client: Client) -> None:
    free = await client.generate(PROMPT, max_new_tokens=4)
    stop = free.text[0]
    answer = await client.generate(PROMPT, max_new_tokens=4, sampling={"stop": [stop]})
    assert answer.text == ""
    assert (answer.finish, answer.last.matched_text) == ("FINISH_REASON_STOP", stop)


async def test_log_probabilities_are_the_models(client: Client, oracle: Oracle) -> None:
    answer = await client.generate(PROMPT, max_new_tokens=8, return_logprob=True, top_logprobs_num=3)
    truth = oracle.logprobs(PROMPT, 8)
    assert [logprob.token_id for logprob in answer.logprobs] == answer.token_ids
    for step, logprob in enumerate(answer.logprobs):
        assert logprob.logprob == pytest.approx(truth[step, logprob.token_id].item(), abs=1e-4)
        best = truth[step].topk(3)
        assert [top.token_id for top in logprob.top] == best.indices.tolist()
        assert [top.logprob for top in logprob.top] == pytest.approx(best.values.tolist(), abs=1e-4)


async def test_a_seed_gives_the_same_answer_again(client: Client) -> None:
    answers = [
        (await client.generate(PROMPT, temperature=1.0, sampling={"seed": seed})).token_ids for seed in (11, 11, 12)
    ]
    assert answers[0] == answers[1] != answers[2]


async def test_an_empty_prompt_is_refused_by_the_router(pair: Cluster, client: Client) -> None:
    for path, body in (
        ("/generate", {"input_ids": []}),
        ("/generate", {"text": ""}),
        ("/v1/completions", {"model": "tiny-llama", "prompt": ""}),
    ):
        response = await post(pair, path, body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, Reason.PROMPT_EMPTY)
    error = await refusal(client.generate([]))
    assert error.reason is Reason.PROMPT_EMPTY


async def test_too_long_a_prompt_is_refused_in_the_same_words_on_every_path(pair: Cluster, client: Client) -> None:
    for length, new_tokens in ((CONTEXT_LENGTH + 1, 4), (CONTEXT_LENGTH - 2, 4), (KV_TOKENS + 1, 4)):
        prompt = [1] * length
        meeting = {"bootstrap_room": length, "bootstrap_host": LOOPBACK, "bootstrap_port": pair.ports.prefill}
        errors = [
            await refusal(client.generate(prompt, max_new_tokens=new_tokens)),
            await refusal(client.generate(prompt, to="prefill", max_new_tokens=new_tokens, **meeting)),
            await refusal(client.generate(prompt, to="decode", max_new_tokens=new_tokens, **meeting)),
        ]
        texts = {error.message for error in errors}
        sampling = {"max_new_tokens": new_tokens}
        for path, body in (
            ("/generate", {"input_ids": prompt, "sampling_params": sampling}),
            ("/v1/completions", {"model": "tiny-llama", "prompt": prompt, "max_tokens": new_tokens}),
        ):
            response = await post(pair, path, body)
            assert response.status_code == 400
            texts.add(response.json()["error"]["message"])
        assert {error.reason for error in errors} == {Reason.PROMPT_TOO_LONG}
        assert len(texts) == 1, texts


async def test_what_cannot_be_understood_is_a_400_that_names_the_field(pair: Cluster, client: Client) -> None:
    unknown = await post(pair, "/generate", {"text": "hi", "temprature": 1})
    assert unknown.status_code == 400
    assert "temprature" in unknown.json()["error"]["message"]
    broken = await post(pair, "/generate", b'{"text": ')
    assert broken.status_code == 400
    token = await refusal(client.generate([VOCAB_SIZE]))
    assert token.reason is Reason.INVALID_REQUEST


async def test_a_room_in_use_is_refused_and_the_owner_is_not_disturbed(
    pair: Cluster, client: Client, oracle: Oracle
) -> None:
    room = 4242
    long_answer = asyncio.create_task(client.generate(PROMPT, max_new_tokens=400, bootstrap_room=room))
    await client.reached("decode", SUCCESS, room)
    error = await refusal(client.generate(PROMPT, bootstrap_room=room))
    assert error.reason is Reason.ROOM_IN_USE
    response = await post(pair, "/generate", {"input_ids": [1, 2], "bootstrap_room": room})
    assert response.status_code == 409
    meeting = {"bootstrap_host": LOOPBACK, "bootstrap_port": pair.ports.prefill, "bootstrap_room": room}
    for side in ("prefill", "decode"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.generate(PROMPT, to=side, **meeting)
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert (await long_answer).token_ids == oracle.tokens(PROMPT, 400)


async def test_two_legs_without_a_router_meet(client: Client, oracle: Oracle) -> None:
    prefill, decode = await client.direct(PROMPT, room=99)
    assert decode.token_ids == oracle.tokens(PROMPT)
    assert (prefill.finish, prefill.token_ids) == ("FINISH_REASON_HANDED_OFF", [])
    assert prefill.room == decode.room == 99


async def test_two_legs_with_different_prompts_both_fail(client: Client) -> None:
    meeting = {"bootstrap_room": 98, "bootstrap_host": LOOPBACK, "bootstrap_port": client.cluster.ports.prefill}
    errors = await asyncio.gather(
        refusal(client.generate(PROMPT, to="prefill", **meeting)),
        refusal(client.generate(PROMPT[:-1], to="decode", **meeting)),
    )
    assert Reason.PROMPT_MISMATCH in {error.reason for error in errors}


async def test_a_decode_leg_without_its_prefill_leg_ends_at_its_deadline(client: Client) -> None:
    meeting = {"bootstrap_room": 97, "bootstrap_host": LOOPBACK, "bootstrap_port": client.cluster.ports.prefill}
    error = await refusal(client.generate(PROMPT, to="decode", timeout={"seconds": 1}, **meeting))
    assert error.reason is Reason.DEADLINE


async def test_the_openai_client_is_content(pair: Cluster, client: Client) -> None:
    async with openai.AsyncOpenAI(base_url=url(pair, "/v1"), api_key="none", max_retries=0) as ai:
        assert [model.id async for model in ai.models.list()] == ["tiny-llama"]
        whole = await ai.completions.create(model="tiny-llama", prompt="to be or", max_tokens=9, temperature=0)
        pieces = await ai.completions.create(
            model="tiny-llama", prompt="to be or", max_tokens=9, temperature=0, stream=True
        )
        assert "".join([piece.choices[0].text async for piece in pieces]) == whole.choices[0].text
        assert whole.usage is not None
        assert whole.usage.completion_tokens <= 9
        chat = await ai.chat.completions.create(
            model="tiny-llama", messages=[{"role": "user", "content": "hello"}], max_tokens=5, temperature=0
        )
        assert chat.choices[0].message.role == "assistant"


async def test_generate_in_sglangs_form(pair: Cluster, client: Client) -> None:
    body = {
        "input_ids": [*reversed(PROMPT)],  # of which prefill has nothing yet
        "sampling_params": {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "rid": "my-request",
        "bootstrap_room": 2**63 + 11,
    }
    answer = (await post(pair, "/generate", body)).json()
    meta = answer["meta_info"]
    assert (meta["id"], meta["bootstrap_room"]) == ("my-request", 2**63 + 11)
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (len(PROMPT), 5, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert len(answer["output_ids"]) == len(meta["output_token_logprobs"]) == 5
    again = (await post(pair, "/generate", {**body, "bootstrap_room": 2**63 + 12})).json()
    assert again["output_ids"] == answer["output_ids"]
    assert again["meta_info"]["cached_tokens"] == len(PROMPT) // PAGE_SIZE * PAGE_SIZE
    text = await post(pair, "/generate", {"text": "to be", "sampling_params": {"max_new_tokens": 3}, "stream": True})
    assert text.text.rstrip().endswith("data: [DONE]")


@needs_grpcurl
async def test_what_each_process_serves_is_found_by_reflection(pair: Cluster) -> None:
    expected = {
        pair.ports.prefill: {"Abort", "Bootstrap", "Generation", "Inspection", "PageAllocation", "TransferStatus"},
        pair.ports.decode: {"Abort", "Generation", "Inspection", "TransferStatus"},
        pair.ports.grpc: {"Abort", "Generation", "Inspection"},
    }
    for port, services in expected.items():
        listed = (await grpcurl(f"{LOOPBACK}:{port}", "list")).out.split()
        assert {name.removeprefix("pd.v1.") for name in listed if name.startswith("pd.v1.")} == services
        for name in ("", "liveness"):
            health = await grpcurl(f"{LOOPBACK}:{port}", "grpc.health.v1.Health/Check", data={"service": name})
            assert health.message == {"status": "SERVING"}


async def test_a_request_is_aborted_at_the_router_by_its_id(pair: Cluster, client: Client) -> None:
    room = 4243
    answer = asyncio.create_task(
        refusal(client.generate(PROMPT, max_new_tokens=4000, bootstrap_room=room, rid="long one"))
    )
    await client.reached("decode", SUCCESS, room)
    assert (await post(pair, "/abort_request", {"rid": "long"})).json() == {"aborted_rooms": []}
    assert (await post(pair, "/abort_request", {"rid": "long one"})).json() == {"aborted_rooms": [str(room)]}
    assert (await answer).reason is Reason.ROOM_ABORTED


async def test_a_room_that_is_aborted_at_the_router_before_it_comes_is_refused(client: Client) -> None:
    await client.abort("router", 4244)
    assert (await refusal(client.generate(PROMPT, bootstrap_room=4244))).reason is Reason.ROOM_ABORTED
