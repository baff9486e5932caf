"""Requests, answers and models: proto <-> domain, both ways. What comes in is checked here (I11)."""

from __future__ import annotations

from collections.abc import Sequence

from pd.v1 import generation_pb2

from pd_common.addresses import parse_address
from pd_common.control.convert import duration_from, duration_to, room_from, time_limit_from
from pd_common.control.status import from_status, to_status
from pd_common.errors import InternalError, InvalidRequest
from pd_common.generation import (
    FinishReason,
    GenerationRequest,
    Load,
    ModelInfo,
    Output,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from pd_common.types import BootstrapAddress, BootstrapRoom

DEFAULT_MAX_NEW_TOKENS = 128
DEFAULT_TIMEOUT_S = 300.0
DEFAULT_BOOTSTRAP_PORT = 8998
MAX_RID = 256
"""Characters: a request's own name stays on record for as long as its room."""

_FINISH = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.HANDED_OFF: generation_pb2.FINISH_REASON_HANDED_OFF,
}
_FINISH_BACK = {value: key for key, value in _FINISH.items()}


def model_to(model: ModelInfo) -> generation_pb2.GetModelResponse:
    return generation_pb2.GetModelResponse(
        name=model.name,
        context_length=model.context_length,
        max_request_tokens=model.max_request_tokens,
        vocab_size=model.vocab_size,
        page_size=model.page_size,
        has_chat_template=model.has_chat_template,
        bootstrap_address=model.bootstrap.target if model.bootstrap else "",
    )


def model_from(message: generation_pb2.GetModelResponse) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        context_length=message.context_length,
        max_request_tokens=message.max_request_tokens,
        vocab_size=message.vocab_size,
        page_size=message.page_size,
        has_chat_template=message.has_chat_template,
        bootstrap=parse_address(message.bootstrap_address, "bootstrap_address") if message.bootstrap_address else None,
    )


def sampling_to(sampling: SamplingParams) -> generation_pb2.SamplingParams:
    return generation_pb2.SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        min_new_tokens=sampling.min_new_tokens,
    )


def sampling_from(message: generation_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=message.max_new_tokens if message.HasField("max_new_tokens") else DEFAULT_MAX_NEW_TOKENS,
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=message.top_k,
        seed=message.seed if message.HasField("seed") else None,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        min_new_tokens=message.min_new_tokens,
    )


def request_to(request: GenerationRequest) -> generation_pb2.GenerateRequest:
    """The request for the wire.

    Raises:
        InvalidRequest: a number or a text that the wire cannot carry, for example a token id above 2^32.
    """
    try:
        return generation_pb2.GenerateRequest(
            bootstrap_room=request.room,
            bootstrap_host=request.bootstrap.host if request.bootstrap else "",
            bootstrap_port=request.bootstrap.port if request.bootstrap else 0,
            rid=request.rid,
            input_ids=generation_pb2.TokenIds(ids=request.prompt),
            sampling_params=sampling_to(request.sampling),
            return_logprob=request.return_logprob,
            top_logprobs_num=request.top_logprobs,
            timeout=duration_to(request.timeout_s),
            ticket=request.ticket,
            cache_salt=request.cache_salt,
            priority=request.priority,
        )
    except ValueError as error:  # an encoding error is one of these too
        raise InvalidRequest(f"the request holds what cannot be sent: {error}") from error


def request_from(message: generation_pb2.GenerateRequest, prompt: Sequence[int]) -> GenerationRequest:
    """A request with a room; `prompt` is its text or its ids as token ids.

    Raises:
        InvalidRequest: a field that no engine process can take.
    """
    if message.bootstrap_port and not message.bootstrap_host:
        raise InvalidRequest("bootstrap_port needs a bootstrap_host", field="bootstrap_host")
    if len(message.rid) > MAX_RID:
        raise InvalidRequest(f"rid has {len(message.rid)} characters; at most {MAX_RID} are allowed", field="rid")
    room = room_from(message.bootstrap_room)
    return GenerationRequest(
        rid=message.rid or f"room-{room}",
        room=room,
        bootstrap=_bootstrap_from(message),
        prompt=tuple(prompt),
        sampling=sampling_from(message.sampling_params),
        return_logprob=message.return_logprob,
        top_logprobs=message.top_logprobs_num,
        timeout_s=timeout_from(message),
        ticket=message.ticket,
        cache_salt=message.cache_salt,
        priority=message.priority,
    )


def _bootstrap_from(message: generation_pb2.GenerateRequest) -> BootstrapAddress | None:
    if not message.bootstrap_host:
        return None
    return BootstrapAddress(message.bootstrap_host, message.bootstrap_port or DEFAULT_BOOTSTRAP_PORT)


def timeout_from(message: generation_pb2.GenerateRequest) -> float:
    """Seconds; the default when none is given. Raises as `time_limit_from`."""
    return time_limit_from(message.timeout, "timeout") if message.HasField("timeout") else DEFAULT_TIMEOUT_S


def load_to(load: Load) -> generation_pb2.Load:
    return generation_pb2.Load(
        requests_queued=load.queued,
        max_queued_requests=load.max_queued,
        oldest_wait=duration_to(load.oldest_wait_s),
        requests_running=load.running,
        pages_total=load.pages_total,
        pages_available=load.pages_available,
        least_priority=load.least_priority,
        stopping=load.stopping,
    )


def load_from(message: generation_pb2.Load) -> Load:
    return Load(
        queued=message.requests_queued,
        max_queued=message.max_queued_requests,
        oldest_wait_s=duration_from(message.oldest_wait),
        running=message.requests_running,
        pages_total=message.pages_total,
        pages_available=message.pages_available,
        least_priority=message.least_priority,
        stopping=message.stopping,
    )


def output_to(output: Output) -> generation_pb2.Output:
    message = generation_pb2.Output(
        bootstrap_room=output.room,
        token_ids=output.token_ids,
        text=output.text,
        logprobs=[_logprob_to(logprob) for logprob in output.logprobs],
    )
    if output.finish is not None:
        message.finish_reason = _FINISH[output.finish]
    if isinstance(output.matched_stop, str):
        message.matched_text = output.matched_stop
    elif output.matched_stop is not None:
        message.matched_token_id = output.matched_stop
    if output.usage is not None:
        message.usage.prompt_tokens = output.usage.prompt_tokens
        message.usage.completion_tokens = output.usage.completion_tokens
        message.usage.cached_tokens = output.usage.cached_tokens
    if output.error is not None:
        message.error.CopyFrom(to_status(output.error))
    return message


def output_from(message: generation_pb2.Output) -> Output:
    matched = message.WhichOneof("matched")
    usage = message.usage
    error = from_status(message.error) if message.HasField("error") else None
    if message.finish_reason and message.finish_reason not in _FINISH_BACK:
        error = InternalError(f"an engine ended with finish reason {message.finish_reason}, which is not known here")
    return Output(
        room=BootstrapRoom(message.bootstrap_room),
        token_ids=tuple(message.token_ids),
        text=message.text,
        logprobs=tuple(_logprob_from(logprob) for logprob in message.logprobs),
        finish=_FINISH_BACK.get(message.finish_reason),
        matched_stop=getattr(message, matched) if matched else None,
        usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        if message.HasField("usage")
        else None,
        error=error,
    )


def _logprob_to(logprob: TokenLogprob) -> generation_pb2.TokenLogprob:
    top = [
        generation_pb2.TopLogprob(token_id=each.token_id, logprob=each.logprob, text=each.text) for each in logprob.top
    ]
    return generation_pb2.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, text=logprob.text, top=top)


def _logprob_from(message: generation_pb2.TokenLogprob) -> TokenLogprob:
    top = tuple(TokenLogprob(each.token_id, each.logprob, text=each.text) for each in message.top)
    return TokenLogprob(message.token_id, message.logprob, top, message.text)
