from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from pd_common.generation import FinishReason, SamplingParams, TokenLogprob, Usage
from pd_common.types import MAX_ROOM, BootstrapAddress
from tests.router.scripted_backend import ROOM, ScriptedBackend, ending, piece

LOGPROBS = (
    TokenLogprob(7, -0.5, (TokenLogprob(7, -0.5), TokenLogprob(9, -1.5))),
    TokenLogprob(8, float("-inf"), (TokenLogprob(9, -0.1), TokenLogprob(7, -2.0))),
)


async def test_whole_answer(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    response = await client.post("/generate", json={"input_ids": [1, 2, 3], "rid": "mine", "cache_salt": "a"})
    assert response.status_code == 200
    assert response.headers["X-Bootstrap-Room"] == str(ROOM)
    body = response.json()
    assert body["text"] == "hello"
    assert body["output_ids"] == [104, 101, 108, 108, 111]
    assert body["meta_info"].pop("e2e_latency") >= 0
    assert body["meta_info"] == {
        "id": "mine",
        "finish_reason": {"type": "stop", "matched": 0},
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "cached_tokens": 2,
        "bootstrap_room": ROOM,
    }
    assert (backend.requests[0].prompt, backend.requests[0].cache_salt) == ((1, 2, 3), b"a")


async def test_stream_is_cumulative(client: httpx.AsyncClient) -> None:
    response = await client.post("/generate", json={"text": "ab", "stream": True})
    assert response.headers["Content-Type"].startswith("text/event-stream")
    assert response.headers["X-Bootstrap-Room"] == str(ROOM)
    *events, done = _events(response)
    assert done == "[DONE]"
    answers = [json.loads(event) for event in events]
    assert [answer["text"] for answer in answers] == ["he", "he", "hello"]
    assert [answer["output_ids"] for answer in answers][-1] == [104, 101, 108, 108, 111]
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [2, 3, 3]
    assert [answer["meta_info"]["finish_reason"] for answer in answers] == [None, None, {"type": "stop", "matched": 0}]
    assert len({answer["meta_info"]["id"] for answer in answers}) == 1


async def test_length_finish(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.script = [ending("a", 97, finish=FinishReason.LENGTH, usage=Usage(2, 1))]
    body = (await client.post("/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 1}})).json()
    assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
    assert backend.requests[0].sampling.max_new_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_for_every_token(client: httpx.AsyncClient, backend: ScriptedBackend, stream: bool) -> None:
    backend.script = [piece("a", 7, logprobs=LOGPROBS[:1]), piece("b", 8, logprobs=LOGPROBS[1:]), ending()]
    asked = {"text": "x", "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": -1, "stream": stream}
    response = await client.post("/generate", json=asked)
    meta_info = (json.loads(_events(response)[-2]) if stream else response.json())["meta_info"]
    assert meta_info["output_token_logprobs"] == [[-0.5, 7, None], [-9999.0, 8, None]]
    assert meta_info["output_top_logprobs"] == [[[-0.5, 7, None], [-1.5, 9, None]], [[-0.1, 9, None], [-2.0, 7, None]]]
    assert backend.requests[0].return_logprob
    assert backend.requests[0].top_logprobs == 2


async def test_every_field_arrives(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    sampling = {
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 4,
        "sampling_seed": -1,
        "stop": "end",
        "stop_token_ids": [5, 6],
        "ignore_eos": True,
    }
    meeting = {"bootstrap_host": "::1", "bootstrap_room": MAX_ROOM}
    response = await client.post("/generate", json={"text": "ab", "sampling_params": sampling, **meeting})
    assert response.json()["meta_info"]["bootstrap_room"] == MAX_ROOM
    request = backend.requests[0]
    assert request.prompt == (0, 97, 98)
    assert request.sampling == SamplingParams(
        max_new_tokens=9,
        min_new_tokens=2,
        temperature=0,
        top_p=0.5,
        top_k=4,
        seed=2**64 - 1,
        stop=("end",),
        stop_token_ids=(5, 6),
        ignore_eos=True,
    )
    assert request.bootstrap == BootstrapAddress("::1", 8998)
    assert request.rid


async def test_defaults_and_nulls_are_the_same(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    nulls = dict.fromkeys(["rid", "stream", "return_logprob", "bootstrap_room", "lora_path", "image_data"])
    sampling = {"temperature": None, "top_k": -1, "stop": None, "n": 1, "min_p": 0.0, "skip_special_tokens": True}
    for body in ({"text": "a"}, {"text": "a", "sampling_params": sampling, **nulls}):
        assert (await client.post("/generate", json=body)).status_code == 200
    assert backend.requests[0].sampling == backend.requests[1].sampling == SamplingParams(max_new_tokens=128)
    assert backend.requests[1].room is None


@pytest.mark.parametrize("prompt", [{"text": ""}, {"input_ids": []}])
async def test_empty_prompt_is_left_to_the_backend(
    client: httpx.AsyncClient, backend: ScriptedBackend, prompt: dict[str, Any]
) -> None:
    await client.post("/generate", json=prompt)
    assert backend.requests[0].prompt == ()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ["a", "b"]}, "text"),
        ({"input_ids": [[1], [2]]}, "input_ids"),
        ({"input_ids": [1, -1]}, "input_ids.1"),
        ({"input_ids": [1, 2**32]}, "input_ids.1"),
        ({"input_ids": [True]}, "input_ids.0"),
        ({"text": "a", "colour": None}, "colour"),
        ({"text": "a", "stream": "yes"}, "stream"),
        ({"text": "a", "logprob_start_len": 0}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "cache_salt": 7}, "cache_salt"),
        ({"text": "a", "bootstrap_room": 0}, "bootstrap_room"),
        ({"text": "a", "bootstrap_room": 2**64}, "bootstrap_room"),
        ({"text": "a", "bootstrap_room": "7"}, "bootstrap_room"),
        ({"text": "a", "bootstrap_port": 8998}, "bootstrap_port"),
        ({"text": "a", "bootstrap_host": "h", "bootstrap_port": 65536}, "bootstrap_port"),
        ({"text": "a", "sampling_params": []}, "sampling_params"),
        ({"text": "a", "sampling_params": {"n": 2}}, "sampling_params.n"),
        ({"text": "a", "sampling_params": {"regex": "a*"}}, "sampling_params.regex"),
        ({"text": "a", "sampling_params": {"frequency_penalty": 0.1}}, "sampling_params.frequency_penalty"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 1.5}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
        ({"text": "a", "sampling_params": {"top_k": -2}}, "sampling_params.top_k"),
        ({"text": "a", "sampling_params": {"stop": [""]}}, "sampling_params.stop.0"),
        ({"text": "a", "sampling_params": {"seed": 1, "sampling_seed": 2}}, "sampling_params.seed"),
        ({"text": "a", "sampling_params": {"max_tokens": 5}}, "sampling_params.max_tokens"),
    ],
)
async def test_refusals_name_the_field(
    client: httpx.AsyncClient, backend: ScriptedBackend, body: dict[str, Any], field: str
) -> None:
    response = await client.post("/generate", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "INVALID_REQUEST", field)
    assert error["message"].startswith(f"{field}: ")
    assert backend.requests == []


async def test_no_line_of_an_event_is_split(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    text = "a\u2028b\u0085c\nd"
    backend.script = [ending(text, 1)]
    response = await client.post("/generate", json={"text": "x", "stream": True})
    assert json.loads(_events(response)[0])["text"] == text


def _events(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.text.splitlines() if line]
