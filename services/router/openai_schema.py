"""The bodies of OpenAI's POST /v1/completions and POST /v1/chat/completions, with this server's extensions.

Fields that are known and have no effect here are declared too: they are refused by name when they ask for something.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from pd_common.errors import InvalidRequest
from pd_common.generation import MAX_TOP_LOGPROBS, ChatMessage, SamplingParams
from services.router.http_body import (
    Absent,
    Body,
    Count,
    GenerationBody,
    MinTokens,
    Seed,
    Stop,
    Temperature,
    TokenId,
    TopK,
    TopP,
    only,
    refuse_batch,
)

DEFAULT_COMPLETION_TOKENS = 16
_TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class StreamOptions(Body):
    """How a stream ends."""

    include_usage: bool = False
    include_obfuscation: Annotated[object, only(False)] = None


class OpenAIBody(GenerationBody):
    """What both endpoints have in common."""

    model: str | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    seed: Seed | None = None
    stop: Stop = Field(default_factory=list)
    user: str | None = None

    top_k: TopK = 0
    ignore_eos: bool = False
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    min_tokens: MinTokens = 0

    n: Annotated[object, only(1)] = None
    frequency_penalty: Annotated[object, only(0)] = None
    presence_penalty: Annotated[object, only(0)] = None
    logit_bias: Annotated[object, only({})] = None
    min_p: Annotated[object, only(0)] = None
    repetition_penalty: Annotated[object, only(1)] = None

    def include_usage(self) -> bool:
        if self.stream_options is None:
            return False
        if not self.stream:
            raise InvalidRequest("stream_options: only with stream", field="stream_options")
        return self.stream_options.include_usage

    def sampling(self, max_new_tokens: int) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_new_tokens=self.min_tokens,
        )


def _one_prompt(value: object) -> object:
    """A list of one prompt is that prompt."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        return value[0]
    return refuse_batch(value)


def _prompt_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "text"
    return "ids" if isinstance(value, list) else None


_Prompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TokenId], Tag("ids")],
    Discriminator(_prompt_kind, custom_error_type="prompt", custom_error_message="must be a text or token ids"),
    BeforeValidator(_one_prompt),
]


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    prompt: _Prompt
    max_tokens: Count = DEFAULT_COMPLETION_TOKENS
    logprobs: _TopLogprobs | None = None

    best_of: Annotated[object, only(1)] = None
    echo: Annotated[object, only(False)] = None
    suffix: Annotated[object, only("")] = None

    def wanted_logprobs(self) -> int | None:
        """How many alternatives for each token; None when no logprobs are wanted."""
        return self.logprobs


def _text_parts(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class TextPart(Body):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a chat. A message that the openai client received can be sent back as it is."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_text_parts)]

    name: Absent = None
    refusal: Absent = None
    audio: Absent = None
    function_call: Absent = None
    annotations: Annotated[object, only([])] = None
    tool_calls: Annotated[object, only([])] = None

    def chat_message(self) -> ChatMessage:
        role = "system" if self.role == "developer" else self.role
        return ChatMessage(role, "".join(part.text for part in self.content))


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: _TopLogprobs = 0
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    tools: Annotated[object, only([])] = None
    tool_choice: Annotated[object, only("none", "auto")] = None
    parallel_tool_calls: Annotated[object, only(True, False)] = None
    functions: Annotated[object, only([])] = None
    function_call: Annotated[object, only("none", "auto")] = None
    response_format: Annotated[object, only({"type": "text"})] = None
    modalities: Annotated[object, only(["text"])] = None
    audio: Absent = None
    prediction: Absent = None
    reasoning_effort: Annotated[object, only("none")] = None
    verbosity: Annotated[object, only("medium")] = None
    web_search_options: Absent = None
    service_tier: Annotated[object, only("auto", "default")] = None
    store: Annotated[object, only(False)] = None
    metadata: Annotated[object, only({})] = None

    def wanted_logprobs(self) -> int | None:
        """As CompletionBody's."""
        if self.logprobs:
            return self.top_logprobs
        if self.top_logprobs:
            raise InvalidRequest("top_logprobs: only with logprobs", field="top_logprobs")
        return None
