"""OpenAI's /v1/completions and /v1/chat/completions: requests to the router's terms, answers to OpenAI's."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from pd_common.generation import ClientRequest, ModelInfo, Output, TokenLogprob, Usage
from services.router.backend import Backend
from services.router.exchange import Answer, Json, finite
from services.router.http_body import parse, prompt_of
from services.router.http_errors import Problem, RequestRefused
from services.router.openai_schema import ChatBody, CompletionBody, OpenAIBody


async def read_completion(raw: bytes, backend: Backend) -> OpenAIExchange:
    body = parse(CompletionBody, raw)
    model = await _served_model(body, backend)
    prompt = await prompt_of(body.prompt, backend)
    return _exchange(body, model, prompt, body.max_tokens, TextStyle())


async def read_chat(raw: bytes, backend: Backend) -> OpenAIExchange:
    body = parse(ChatBody, raw)
    model = await _served_model(body, backend)
    prompt = await backend.tokenize_chat([message.chat_message() for message in body.messages])
    max_tokens = body.max_completion_tokens or body.max_tokens or _room_left(model, len(prompt))
    return _exchange(body, model, prompt, max_tokens, ChatStyle())


async def _served_model(body: OpenAIBody, backend: Backend) -> ModelInfo:
    model = await backend.model()
    if body.model not in {None, model.name}:
        message = f"the model {body.model!r} does not exist; this is {model.name!r}"
        raise RequestRefused(Problem(HTTPStatus.NOT_FOUND, "model_not_found", message, param="model"))
    return model


def _room_left(model: ModelInfo, prompt_tokens: int) -> int:
    """Tokens that can follow the prompt; at least 1, so that one that fills the context is refused as too long."""
    return max(min(model.context_length, model.max_request_tokens) - prompt_tokens, 1)


def _exchange(
    body: CompletionBody | ChatBody, model: ModelInfo, prompt: tuple[int, ...], max_tokens: int, style: Style
) -> OpenAIExchange:
    logprobs = body.wanted_logprobs()
    rid = body.rid or f"{style.id_prefix}-{uuid.uuid4().hex}"
    request = ClientRequest(
        prompt=prompt,
        sampling=body.sampling(max_tokens),
        rid=rid,
        room=body.room(),
        bootstrap=body.bootstrap(),
        return_logprob=logprobs is not None,
        top_logprobs=logprobs or 0,
        cache_salt=body.salt(),
        priority=body.priority,
    )
    origin: Json = {"id": rid, "created": int(time.time()), "model": model.name}
    return OpenAIExchange(request, body.stream, body.include_usage(), origin, style)


class Style(Protocol):
    """What the two endpoints name differently."""

    @property
    def id_prefix(self) -> str: ...

    @property
    def kind(self) -> str:
        """`object` of a whole answer."""
        ...

    @property
    def chunk_kind(self) -> str:
        """`object` of a stream's chunk."""
        ...

    def opening(self) -> Iterable[Json]:
        """Content of the chunks before the first text."""
        ...

    def whole(self, text: str) -> Json:
        """Content of the one choice."""
        ...

    def delta(self, text: str) -> Json:
        """Content of a chunk's one choice."""
        ...

    def logprobs(self, tokens: Sequence[TokenLogprob]) -> Json: ...


_PART_OF_A_CHARACTER = "\ufffd"


@dataclass(frozen=True, slots=True)
class TextStyle:
    """/v1/completions."""

    id_prefix: str = "cmpl"
    kind: str = "text_completion"
    chunk_kind: str = "text_completion"

    def opening(self) -> Iterable[Json]:
        return ()

    def whole(self, text: str) -> Json:
        return {"text": text}

    def delta(self, text: str) -> Json:
        return {"text": text}

    def logprobs(self, tokens: Sequence[TokenLogprob]) -> Json:
        """Without text_offset: characters that several tokens make together have no place of their own."""
        return {
            "tokens": [_token(token) for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [_top_logprobs(token) for token in tokens],
        }


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """/v1/chat/completions."""

    id_prefix: str = "chatcmpl"
    kind: str = "chat.completion"
    chunk_kind: str = "chat.completion.chunk"

    def opening(self) -> Iterable[Json]:
        return ({"delta": {"role": "assistant", "content": ""}},)

    def whole(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> Json:
        return {"delta": {"content": text}}

    def logprobs(self, tokens: Sequence[TokenLogprob]) -> Json:
        return {"content": [_chat_token(token) for token in tokens], "refusal": None}


def _top_logprobs(token: TokenLogprob) -> Json:
    """The most likely tokens, and always the one that was taken."""
    return {_token(each): finite(each.logprob) for each in (*token.top, token)}


def _chat_token(token: TokenLogprob) -> Json:
    return _chat_logprob(token) | {"top_logprobs": [_chat_logprob(each) for each in token.top]}


def _chat_logprob(token: TokenLogprob) -> Json:
    whole = token.text and _PART_OF_A_CHARACTER not in token.text
    return {
        "token": _token(token),
        "logprob": finite(token.logprob),
        "bytes": list(token.text.encode()) if whole else None,
    }


def _token(token: TokenLogprob) -> str:
    """The token's text; a token without one is named by its id."""
    return token.text or f"token_id:{token.token_id}"


@dataclass(frozen=True, slots=True)
class OpenAIExchange:
    """One prompt, one choice. `origin` is what every object of the answer begins with."""

    request: ClientRequest
    stream: bool
    include_usage: bool
    origin: Json
    style: Style

    def whole(self, answer: Answer) -> Json:
        ending = answer.ended()
        choice = self._choice(self.style.whole(answer.text), answer.logprobs, ending.finish.value)
        return {**self.origin, "object": self.style.kind, "choices": [choice], "usage": _usage(ending.usage)}

    def opening(self) -> Iterable[Json]:
        return [self._chunk([self._choice(content, (), None)]) for content in self.style.opening()]

    def events(self, piece: Output, answer: Answer) -> Iterable[Json]:  # noqa: ARG002  every chunk has the new part only
        if not (piece.text or piece.logprobs or piece.is_last):
            return ()
        finish = None if piece.finish is None else piece.finish.value
        return (self._chunk([self._choice(self.style.delta(piece.text), piece.logprobs, finish)]),)

    def closing(self, answer: Answer) -> Iterable[Json]:
        if not self.include_usage:
            return ()
        return (self._chunk([]) | {"usage": _usage(answer.ended().usage)},)

    def _chunk(self, choices: list[Json]) -> Json:
        usage: Json = {"usage": None} if self.include_usage else {}
        return {**self.origin, "object": self.style.chunk_kind, "choices": choices, **usage}

    def _choice(self, content: Json, tokens: Sequence[TokenLogprob], finish: str | None) -> Json:
        logprobs = self.style.logprobs(tokens) if self.request.return_logprob and tokens else None
        return {"index": 0, **content, "logprobs": logprobs, "finish_reason": finish}


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
