"""proto <-> domain, both ways, and nothing else. What comes in is checked here for presence and range (I11)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from google.protobuf import duration_pb2, timestamp_pb2
from pd.v1 import bootstrap_pb2, generation_pb2, types_pb2

from pd_common.control.status import from_status, to_status
from pd_common.errors import InternalError, InvalidRequest
from pd_common.generation import (
    FinishReason,
    GenerationRequest,
    ModelInfo,
    Output,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from pd_common.handoff.state import Transfer, TransferState
from pd_common.types import (
    MAX_ROOM,
    BootstrapAddress,
    BootstrapRoom,
    BufferKind,
    BufferSpec,
    Instance,
    KvLayout,
    ProcessProof,
    RankInfo,
    RankPosition,
    Role,
)

DEFAULT_MAX_NEW_TOKENS = 128
DEFAULT_TIMEOUT_S = 300.0
MAX_TIMEOUT_S = 1_000_000.0
DEFAULT_BOOTSTRAP_PORT = 8998

_ROLE = {Role.PREFILL: types_pb2.ROLE_PREFILL, Role.DECODE: types_pb2.ROLE_DECODE}
_KIND = {
    BufferKind.KEY: types_pb2.BUFFER_KIND_KEY,
    BufferKind.VALUE: types_pb2.BUFFER_KIND_VALUE,
    BufferKind.KEY_VALUE: types_pb2.BUFFER_KIND_KEY_VALUE,
}
_STATE = {
    TransferState.BOOTSTRAPPING: types_pb2.TRANSFER_STATE_BOOTSTRAPPING,
    TransferState.WAITING_FOR_INPUT: types_pb2.TRANSFER_STATE_WAITING_FOR_INPUT,
    TransferState.TRANSFERRING: types_pb2.TRANSFER_STATE_TRANSFERRING,
    TransferState.SUCCESS: types_pb2.TRANSFER_STATE_SUCCESS,
    TransferState.FAILED: types_pb2.TRANSFER_STATE_FAILED,
}
_FINISH = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.HANDED_OFF: generation_pb2.FINISH_REASON_HANDED_OFF,
}
_ROLE_BACK = {value: key for key, value in _ROLE.items()}
_KIND_BACK = {value: key for key, value in _KIND.items()}
_STATE_BACK = {value: key for key, value in _STATE.items()}
_FINISH_BACK = {value: key for key, value in _FINISH.items()}


def room_from(value: int) -> BootstrapRoom:
    """A room number from the network.

    Raises:
        InvalidRequest: it is 0 (which protobuf also gives for a field that is not set).

    """
    if not 0 < value <= MAX_ROOM:
        raise InvalidRequest("bootstrap_room must be a non-zero unsigned 64-bit integer", field="bootstrap_room")
    return BootstrapRoom(value)


def instance_to(instance: Instance) -> types_pb2.Instance:
    return types_pb2.Instance(instance_id=instance.instance_id, epoch=instance.epoch)


def instance_from(message: types_pb2.Instance, field: str) -> Instance:
    if not message.instance_id or not message.epoch:
        raise InvalidRequest(f"{field} must name a process by instance_id and epoch", field=field)
    return Instance(message.instance_id, message.epoch)


def process_to(proof: ProcessProof) -> types_pb2.ProcessProof:
    return types_pb2.ProcessProof(host_id=proof.host_id, pid=proof.pid, start_ticks=proof.start_ticks)


def process_from(message: types_pb2.ProcessProof) -> ProcessProof:
    return ProcessProof(message.host_id, message.pid, message.start_ticks)


def layout_to(layout: KvLayout) -> types_pb2.KvLayout:
    return types_pb2.KvLayout(
        model=layout.model,
        dtype=layout.dtype,
        page_size=layout.page_size,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        metadata_schema=layout.metadata_schema,
        software_version=layout.software_version,
        buffers=[
            types_pb2.BufferSpec(kind=_KIND[b.kind], layer_ids=b.layer_ids, item_len_bytes=b.item_len_bytes)
            for b in layout.buffers
        ],
    )


def layout_from(message: types_pb2.KvLayout) -> KvLayout:
    return KvLayout(
        model=message.model,
        dtype=message.dtype,
        page_size=message.page_size,
        layers=message.layers,
        kv_heads=message.kv_heads,
        head_dim=message.head_dim,
        metadata_schema=message.metadata_schema,
        software_version=message.software_version,
        buffers=tuple(_buffer_from(b) for b in message.buffers),
    )


def _buffer_from(message: types_pb2.BufferSpec) -> BufferSpec:
    kind = _KIND_BACK.get(message.kind)
    if kind is None:
        raise InvalidRequest("layout.buffers holds a buffer of unknown kind", field="layout.buffers.kind")
    return BufferSpec(kind, tuple(message.layer_ids), message.item_len_bytes)


def rank_to(rank: RankInfo) -> bootstrap_pb2.RankInfo:
    position = rank.position
    return bootstrap_pb2.RankInfo(
        instance=instance_to(rank.instance),
        role=_ROLE[rank.role],
        position=bootstrap_pb2.RankPosition(
            dp_rank=position.dp_rank,
            dp_size=position.dp_size,
            tp_rank=position.tp_rank,
            tp_size=position.tp_size,
            pp_rank=position.pp_rank,
            pp_size=position.pp_size,
        ),
        control_address=rank.control_address,
        layout=layout_to(rank.layout),
    )


def rank_from(message: bootstrap_pb2.RankInfo) -> RankInfo:
    role = _ROLE_BACK.get(message.role)
    if role is None:
        raise InvalidRequest("rank.role must be ROLE_PREFILL or ROLE_DECODE", field="rank.role")
    if not message.control_address:
        raise InvalidRequest("rank.control_address must be host:port", field="rank.control_address")
    if not message.HasField("layout"):
        raise InvalidRequest("rank.layout is required", field="rank.layout")
    p = message.position
    return RankInfo(
        instance=instance_from(message.instance, "rank.instance"),
        role=role,
        position=RankPosition(p.dp_rank, p.dp_size or 1, p.tp_rank, p.tp_size or 1, p.pp_rank, p.pp_size or 1),
        control_address=message.control_address,
        layout=layout_from(message.layout),
    )


def duration_to(seconds: float) -> duration_pb2.Duration:
    message = duration_pb2.Duration()
    message.FromNanoseconds(int(max(seconds, 0.0) * 1e9))
    return message


def duration_from(message: duration_pb2.Duration) -> float:
    """Seconds."""
    return message.ToNanoseconds() / 1e9


def timestamp_to(unix_s: float) -> timestamp_pb2.Timestamp:
    message = timestamp_pb2.Timestamp()
    message.FromDatetime(datetime.fromtimestamp(unix_s, UTC))
    return message


def state_to(state: TransferState) -> types_pb2.TransferState:
    return _STATE[state]


def state_from(value: types_pb2.TransferState) -> TransferState:
    state = _STATE_BACK.get(value)
    if state is None:
        raise InvalidRequest("state must be one of the five transfer states", field="state")
    return state


def transfer_to(transfer: Transfer, clock_offset_s: float) -> types_pb2.Transfer:
    """One room for the wire; `clock_offset_s` added to the table's clock gives seconds since 1970."""
    progress = transfer.progress
    return types_pb2.Transfer(
        bootstrap_room=transfer.room,
        rid=transfer.rid or "",
        role=_ROLE[transfer.role],
        state=_STATE[transfer.state],
        sequence=transfer.sequence,
        chunks_done=progress.chunks_done,
        pages_done=progress.pages_done,
        bytes_done=progress.bytes_done,
        peer=instance_to(transfer.peer) if transfer.peer else None,
        failure=to_status(transfer.failure) if transfer.failure else None,
        timeline=[
            types_pb2.TransferTransition(state=_STATE[step.state], time=timestamp_to(step.at_s + clock_offset_s))
            for step in transfer.timeline
        ],
        deadline=timestamp_to(transfer.deadline_s + clock_offset_s),
    )


def model_to(model: ModelInfo) -> generation_pb2.GetModelResponse:
    return generation_pb2.GetModelResponse(
        name=model.name,
        context_length=model.context_length,
        max_request_tokens=model.max_request_tokens,
        vocab_size=model.vocab_size,
        page_size=model.page_size,
        has_chat_template=model.has_chat_template,
    )


def model_from(message: generation_pb2.GetModelResponse) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        context_length=message.context_length,
        max_request_tokens=message.max_request_tokens,
        vocab_size=message.vocab_size,
        page_size=message.page_size,
        has_chat_template=message.has_chat_template,
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
            bootstrap_host=request.bootstrap.host,
            bootstrap_port=request.bootstrap.port,
            rid=request.rid,
            input_ids=generation_pb2.TokenIds(ids=request.prompt),
            sampling_params=sampling_to(request.sampling),
            return_logprob=request.return_logprob,
            top_logprobs_num=request.top_logprobs,
            timeout=duration_to(request.timeout_s),
        )
    except ValueError as error:  # an encoding error is one of these too
        raise InvalidRequest(f"the request holds what cannot be sent: {error}") from error


def request_from(message: generation_pb2.GenerateRequest, prompt: Sequence[int]) -> GenerationRequest:
    """A request that names its meeting place; `prompt` is its text or its ids as token ids."""
    if not message.bootstrap_host:
        raise InvalidRequest(
            "bootstrap_host is required here: the host of the prefill's Bootstrap service (a router fills it in)",
            field="bootstrap_host",
        )
    room = room_from(message.bootstrap_room)
    return GenerationRequest(
        rid=message.rid or f"room-{room}",
        room=room,
        bootstrap=BootstrapAddress(message.bootstrap_host, message.bootstrap_port or DEFAULT_BOOTSTRAP_PORT),
        prompt=tuple(prompt),
        sampling=sampling_from(message.sampling_params),
        return_logprob=message.return_logprob,
        top_logprobs=message.top_logprobs_num,
        timeout_s=timeout_from(message),
    )


def timeout_from(message: generation_pb2.GenerateRequest) -> float:
    """Seconds; the default when none is given. Raises as `time_limit_from`."""
    return time_limit_from(message.timeout, "timeout") if message.HasField("timeout") else DEFAULT_TIMEOUT_S


def time_limit_from(message: duration_pb2.Duration, field: str) -> float:
    """Seconds that something may take.

    Raises:
        InvalidRequest: not positive, or longer than any request can mean.
    """
    seconds = duration_from(message)
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise InvalidRequest(f"{field} must be positive and at most {MAX_TIMEOUT_S:.0f} s", field=field)
    return seconds


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
