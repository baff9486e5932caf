"""SGLang's form, POST /generate: a text or token ids in; text, ids and meta_info out, cumulative in a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import BeforeValidator, Field

from pd_common.control.convert_generation import DEFAULT_MAX_NEW_TOKENS
from pd_common.errors import InvalidRequest
from pd_common.generation import (
    MAX_TOP_LOGPROBS,
    ClientRequest,
    FinishReason,
    Output,
    SamplingParams,
    TokenLogprob,
)
from services.router.backend import Backend
from services.router.exchange import Answer, Ending, Json, finite
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
    parse,
    prompt_of,
    refuse_batch,
)


class SamplingBody(Body):
    """SGLang's sampling_params. What follows the blank line is known and has no effect here."""

    max_new_tokens: Count = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: MinTokens = 0
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    sampling_seed: Seed | None = None
    seed: Seed | None = None
    stop: Stop = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    ignore_eos: bool = False

    n: Annotated[object, only(1)] = None
    min_p: Annotated[object, only(0)] = None
    frequency_penalty: Annotated[object, only(0)] = None
    presence_penalty: Annotated[object, only(0)] = None
    repetition_penalty: Annotated[object, only(1)] = None
    logit_bias: Annotated[object, only({})] = None
    stop_regex: Annotated[object, only([], "")] = None
    json_schema: Absent = None
    regex: Absent = None
    ebnf: Absent = None
    structural_tag: Absent = None
    custom_params: Annotated[object, only({})] = None
    stream_interval: Annotated[object, only(1)] = None
    skip_special_tokens: Annotated[object, only(True)] = None
    spaces_between_special_tokens: Annotated[object, only(True)] = None
    no_stop_trim: Annotated[object, only(False)] = None

    def sampling(self) -> SamplingParams:
        if self.seed is not None and self.sampling_seed not in {None, self.seed}:
            raise InvalidRequest("sampling_params.seed: sampling_seed says otherwise", field="sampling_params.seed")
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed if self.sampling_seed is None else self.sampling_seed,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_new_tokens=self.min_new_tokens,
        )


class GenerateBody(GenerationBody):
    """SGLang's GenerateReqInput for one prompt. What follows the blank line is known and has no effect here."""

    text: Annotated[str | None, BeforeValidator(refuse_batch)] = None
    input_ids: Annotated[list[TokenId] | None, BeforeValidator(refuse_batch)] = None
    sampling_params: SamplingBody = Field(default_factory=SamplingBody)
    return_logprob: bool = False
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0

    logprob_start_len: Annotated[object, only(-1)] = None
    return_text_in_logprobs: Annotated[object, only(False)] = None
    return_hidden_states: Annotated[object, only(False)] = None
    return_routed_experts: Annotated[object, only(False)] = None
    log_metrics: Annotated[object, only(True)] = None
    background: Annotated[object, only(False)] = None
    token_ids_logprob: Absent = None
    input_embeds: Absent = None
    image_data: Absent = None
    audio_data: Absent = None
    video_data: Absent = None
    modalities: Absent = None
    session_params: Absent = None
    lora_path: Absent = None
    lora_id: Absent = None
    custom_logit_processor: Absent = None
    bootstrap_pair_key: Absent = None
    routed_dp_rank: Absent = None
    data_parallel_rank: Absent = None
    extra_key: Absent = None

    def prompt(self) -> str | list[int]:
        if self.text is not None and self.input_ids is not None:
            raise InvalidRequest("text: input_ids is given too", field="text")
        prompt = self.input_ids if self.text is None else self.text
        if prompt is None:
            raise InvalidRequest("text: either text or input_ids is needed", field="text")
        return prompt


async def read_generate(raw: bytes, backend: Backend) -> GenerateExchange:
    body = parse(GenerateBody, raw)
    request = ClientRequest(
        prompt=await prompt_of(body.prompt(), backend),
        sampling=body.sampling_params.sampling(),
        rid=body.rid or uuid.uuid4().hex,
        room=body.room(),
        bootstrap=body.bootstrap(),
        return_logprob=body.return_logprob,
        top_logprobs=body.top_logprobs_num if body.return_logprob else 0,
        cache_salt=body.salt(),
        priority=body.priority,
    )
    return GenerateExchange(request, body.stream)


@dataclass(frozen=True, slots=True)
class GenerateExchange:
    """One prompt; every event of its stream is the whole answer so far."""

    request: ClientRequest
    stream: bool
    started_s: float = field(default_factory=time.monotonic)

    def whole(self, answer: Answer) -> Json:
        return {"text": answer.text, "output_ids": answer.token_ids, "meta_info": self._meta_info(answer)}

    def opening(self) -> Iterable[Json]:
        return ()

    def events(self, piece: Output, answer: Answer) -> Iterable[Json]:  # noqa: ARG002  cumulative: the piece is in the answer
        return (self.whole(answer),)

    def closing(self, answer: Answer) -> Iterable[Json]:  # noqa: ARG002  the last piece said it all
        return ()

    def _meta_info(self, answer: Answer) -> Json:
        meta_info: Json = {
            "id": self.request.rid,
            "finish_reason": None,
            "prompt_tokens": len(self.request.prompt),
            "completion_tokens": len(answer.token_ids),
            "bootstrap_room": answer.room,
        }
        if self.request.return_logprob:
            meta_info["output_token_logprobs"] = [_logprob(token) for token in answer.logprobs]
        if self.request.top_logprobs:
            meta_info["output_top_logprobs"] = [_top_logprobs(token) for token in answer.logprobs]
        if answer.ending is not None:
            meta_info |= self._ending(answer.ending)
        return meta_info

    def _ending(self, ending: Ending) -> Json:
        return {
            "finish_reason": _finish_reason(ending),
            "prompt_tokens": ending.usage.prompt_tokens,
            "completion_tokens": ending.usage.completion_tokens,
            "cached_tokens": ending.usage.cached_tokens,
            "e2e_latency": time.monotonic() - self.started_s,
        }


def _finish_reason(ending: Ending) -> Json:
    if ending.finish is FinishReason.LENGTH:
        return {"type": "length", "length": ending.usage.completion_tokens}
    return {"type": ending.finish.value, "matched": ending.matched_stop}


def _logprob(token: TokenLogprob) -> Sequence[object]:
    return finite(token.logprob), token.token_id, None


def _top_logprobs(token: TokenLogprob) -> list[Sequence[object]]:
    return [_logprob(each) for each in token.top]
