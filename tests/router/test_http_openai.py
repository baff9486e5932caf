from __future__ import annotations

import asyncio
from typing import Any, cast

import httpx
import pytest
from openai import APIError, APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError, RateLimitError
from openai.types.chat import ChatCompletionMessageParam

from pd_common.errors import CapacityExceeded, DeadlineExceeded, PdError, PeerLost, PromptEmpty, RoomInUse
from pd_common.generation import ChatMessage, FinishReason, SamplingParams, TokenLogprob, Usage
from tests.router.scripted_backend import HELLO, MODEL, ScriptedBackend, ending, piece

LOGPROBS = (
    TokenLogprob(7, -0.5, (TokenLogprob(9, -0.25, text="nine"), TokenLogprob(7, -0.5, text="sevén")), "sevén"),
    TokenLogprob(8, -1.0, (TokenLogprob(8, -1.0), TokenLogprob(7, -2.0, text="�"))),
)
WITH_LOGPROBS = (piece("a", 7, logprobs=LOGPROBS[:1]), piece("", 8, logprobs=LOGPROBS[1:]), ending("b"))
EXTENSIONS = {
    "top_k": 3,
    "ignore_eos": True,
    "stop_token_ids": [4],
    "min_tokens": 1,
    "rid": "mine",
    "bootstrap_room": 5,
    "cache_salt": "tenant é",
}


async def test_completion(openai: AsyncOpenAI, backend: ScriptedBackend) -> None:
    answer = await openai.completions.create(
        model="tiny", prompt="ab", temperature=0.5, top_p=0.9, seed=6, stop=["x", "y"], user="me", extra_body=EXTENSIONS
    )
    assert answer.id == "mine"
    assert (answer.object, answer.model, answer.choices[0].text) == ("text_completion", "tiny", "hello")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 3, 6)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    request = backend.requests[0]
    assert (request.rid, request.room, request.prompt) == ("mine", 5, (0, 97, 98))
    assert request.cache_salt == "tenant é".encode()
    assert request.sampling == SamplingParams(16, 0.5, 0.9, 3, 6, ("x", "y"), (4,), ignore_eos=True, min_new_tokens=1)


async def test_completion_stream(openai: AsyncOpenAI) -> None:
    stream = await openai.completions.create(
        model="tiny", prompt=[1], stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = [chunk async for chunk in stream]
    assert [(chunk.choices[0].text, chunk.choices[0].finish_reason) for chunk in chunks] == [
        ("he", None),
        ("llo", "stop"),
    ]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == 6
    assert len({chunk.id for chunk in (*chunks, last)}) == 1


async def test_chat(openai: AsyncOpenAI, backend: ScriptedBackend) -> None:
    answer = await openai.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "be"},
            {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "?"}]},
        ],
        max_completion_tokens=4,
    )
    choice = answer.choices[0]
    assert (answer.object, choice.message.role, choice.message.content) == ("chat.completion", "assistant", "hello")
    assert backend.chats == [[ChatMessage("system", "be"), ChatMessage("user", "q?")]]
    assert backend.requests[0].prompt == tuple(b"beq?")
    assert backend.requests[0].sampling.max_new_tokens == 4
    again = await openai.chat.completions.create(
        model="tiny",
        messages=[cast("ChatCompletionMessageParam", choice.message.to_dict()), {"role": "user", "content": "more"}],
        max_tokens=4,
    )
    assert again.choices[0].message.content == "hello"


async def test_chat_stream(openai: AsyncOpenAI, backend: ScriptedBackend) -> None:
    backend.script = [*HELLO[:2], ending("p", finish=FinishReason.LENGTH, usage=Usage(1, 4))]
    stream = await openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "q"}], stream=True, stream_options={"include_usage": True}
    )
    first, *middle, last = [chunk async for chunk in stream]
    assert first.object == "chat.completion.chunk"
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert [chunk.choices[0].delta.content for chunk in middle] == ["he", "p"]
    assert [chunk.choices[0].finish_reason for chunk in (first, *middle)] == [None, None, "length"]
    assert last.usage is not None
    assert last.usage.completion_tokens == 4


async def test_stream_is_sent_as_it_is_made(openai: AsyncOpenAI, backend: ScriptedBackend) -> None:
    go_on = asyncio.Event()
    backend.script = [HELLO[0], go_on, ending("!")]
    stream = await openai.completions.create(model="tiny", prompt="a", stream=True)
    chunks = aiter(stream)
    assert (await anext(chunks)).choices[0].text == "he"
    go_on.set()
    assert [chunk.choices[0].text async for chunk in chunks] == ["!"]


async def test_completion_logprobs(openai: AsyncOpenAI, backend: ScriptedBackend) -> None:
    backend.script = WITH_LOGPROBS
    answer = await openai.completions.create(model="tiny", prompt="a", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["sevén", "token_id:8"]
    assert logprobs.token_logprobs == [-0.5, -1.0]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"nine": -0.25, "sevén": -0.5}


async def test_chat_logprobs_of_a_stream(openai: AsyncOpenAI, backend: ScriptedBackend) -> None:
    backend.script = WITH_LOGPROBS
    stream = await openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "q"}], stream=True, logprobs=True, top_logprobs=2
    )
    tokens = [
        token
        async for chunk in stream
        if chunk.choices[0].logprobs is not None
        for token in chunk.choices[0].logprobs.content or ()
    ]
    assert [(token.token, token.logprob) for token in tokens] == [("sevén", -0.5), ("token_id:8", -1.0)]
    assert [top.token for top in tokens[0].top_logprobs] == ["nine", "sevén"]
    assert [token.bytes for token in tokens] == [list("sevén".encode()), None]
    assert tokens[1].top_logprobs[1].bytes is None, "half a character has no bytes of its own"


async def test_logprobs_only_when_asked_for(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.script = WITH_LOGPROBS
    body = (await client.post("/v1/completions", json={"prompt": "a"})).json()
    assert body["choices"][0]["logprobs"] is None
    assert not backend.requests[0].return_logprob


async def test_models(openai: AsyncOpenAI) -> None:
    assert [model.id async for model in openai.models.list()] == ["tiny"]


@pytest.mark.parametrize(("prompt_tokens", "max_tokens"), [(10, MODEL.max_request_tokens - 10), (64, 1), (200, 1)])
async def test_chat_may_fill_the_context(
    client: httpx.AsyncClient, backend: ScriptedBackend, prompt_tokens: int, max_tokens: int
) -> None:
    messages = [{"role": "user", "content": "x" * prompt_tokens}]
    await client.post("/v1/chat/completions", json={"messages": messages})
    assert backend.requests[0].sampling.max_new_tokens == max_tokens


@pytest.mark.parametrize("prompt", ["ab", ["ab"]])
async def test_one_text(client: httpx.AsyncClient, backend: ScriptedBackend, prompt: object) -> None:
    assert (await client.post("/v1/completions", json={"prompt": prompt})).status_code == 200
    assert backend.requests[0].prompt == (0, 97, 98)


@pytest.mark.parametrize("prompt", [[1, 2], [[1, 2]]])
async def test_one_list_of_ids(client: httpx.AsyncClient, backend: ScriptedBackend, prompt: object) -> None:
    assert (await client.post("/v1/completions", json={"prompt": prompt})).status_code == 200
    assert backend.requests[0].prompt == (1, 2)


@pytest.mark.parametrize(
    "neutral",
    [
        {"frequency_penalty": 0, "presence_penalty": 0.0, "n": 1, "best_of": 1, "logit_bias": {}, "echo": False},
        {"suffix": None, "logprobs": None, "stream_options": None, "max_tokens": None, "min_p": 0, "top_k": -1},
    ],
)
async def test_neutral_fields_of_completions(client: httpx.AsyncClient, neutral: dict[str, Any]) -> None:
    assert (await client.post("/v1/completions", json={"prompt": "a", **neutral})).status_code == 200


@pytest.mark.parametrize(
    "neutral",
    [
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}},
        {"modalities": ["text"], "store": False, "metadata": None, "logprobs": False, "top_logprobs": 0},
    ],
)
async def test_neutral_fields_of_chat(client: httpx.AsyncClient, neutral: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "q"}]
    assert (await client.post("/v1/chat/completions", json={"messages": messages, **neutral})).status_code == 200


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"seed": 2**64}, "seed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"colour": 1}}, "stream_options.colour"),
        ({"messages": []}, "messages"),
    ],
)
async def test_refused_completions(
    client: httpx.AsyncClient, backend: ScriptedBackend, extra: dict[str, Any], field: str
) -> None:
    response = await client.post("/v1/completions", json={"prompt": "a", **extra})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    assert backend.requests == []


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "q"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, "messages.0.tool_calls"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"prompt": "a"}, "prompt"),
    ],
)
async def test_refused_chats(
    client: httpx.AsyncClient, backend: ScriptedBackend, extra: dict[str, Any], field: str
) -> None:
    body = {"messages": [{"role": "user", "content": "q"}], **extra}
    response = await client.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    assert backend.requests == []


async def test_another_model_is_not_found(openai: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError) as caught:
        await openai.completions.create(model="other", prompt="a")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("stream", [False, True])
async def test_failure_before_the_first_piece_has_its_status(
    openai: AsyncOpenAI, backend: ScriptedBackend, stream: bool
) -> None:
    backend.script = [PromptEmpty("the prompt has no token")]
    with pytest.raises(BadRequestError, match="the prompt has no token") as caught:
        await openai.completions.create(model="tiny", prompt="", stream=stream)
    assert caught.value.code == "PROMPT_EMPTY"
    backend.script = [CapacityExceeded("4 requests wait already", waiting=4, retry_after_s=9)]
    with pytest.raises(RateLimitError) as limited:
        await openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "q"}], stream=stream)
    assert limited.value.response.headers["Retry-After"] == "9"
    assert isinstance(limited.value.body, dict)
    assert limited.value.body["metadata"] == {"waiting": "4", "retry_after_s": "9"}


@pytest.mark.parametrize("failure", [RoomInUse("room 5 is live"), DeadlineExceeded("5 s have passed")])
async def test_client_does_not_repeat_what_cannot_succeed(
    openai: AsyncOpenAI, backend: ScriptedBackend, failure: PdError
) -> None:
    backend.script = [failure]
    with pytest.raises(APIStatusError, match=failure.message):
        await openai.with_options(max_retries=1).completions.create(model="tiny", prompt="a")
    assert len(backend.requests) == 1


async def test_failure_of_a_whole_answer_has_its_status(openai: AsyncOpenAI, backend: ScriptedBackend) -> None:
    backend.script = [HELLO[0], PeerLost("decode-0 is gone", peer="decode-0")]
    with pytest.raises(APIStatusError, match="decode-0 is gone") as caught:
        await openai.completions.create(model="tiny", prompt="a")
    assert (caught.value.status_code, caught.value.code) == (502, "PEER_LOST")


@pytest.mark.parametrize(
    ("failure", "code"),
    [([PeerLost("decode-0 is gone")], "PEER_LOST"), ([RuntimeError("secret")], "INTERNAL"), ([], "INTERNAL")],
)
async def test_failure_in_a_stream_is_raised_by_the_client(
    openai: AsyncOpenAI, backend: ScriptedBackend, failure: list[Exception], code: str
) -> None:
    backend.script = [HELLO[0], *failure]
    stream = await openai.completions.create(model="tiny", prompt="a", stream=True)
    chunks = aiter(stream)
    assert (await anext(chunks)).choices[0].text == "he"
    with pytest.raises(APIError) as caught:
        await anext(chunks)
    assert caught.value.code == code
    assert "secret" not in str(caught.value.body)
