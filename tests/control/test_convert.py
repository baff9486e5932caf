from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from google.protobuf import duration_pb2
from hypothesis import given
from hypothesis import strategies as st
from pd.v1 import bootstrap_pb2, generation_pb2, types_pb2

from pd_common.control import convert, convert_generation
from pd_common.errors import ERROR_OF_REASON, InvalidRequest, PdError, Reason
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
from pd_common.handoff.state import Progress, Transfer, TransferState, Transition
from pd_common.types import (
    MAX_ROOM,
    BootstrapAddress,
    BootstrapRoom,
    BufferKind,
    BufferSpec,
    DataPlane,
    Instance,
    KvLayout,
    ProcessProof,
    RankInfo,
    RankPosition,
    Role,
    StateKind,
)
from tests.control.serving import DATA_PLANE, LAYOUT, make_request

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
name = text.filter(bool)
double = st.floats(allow_nan=False)
rooms = st.integers(1, MAX_ROOM).map(BootstrapRoom)


def tuples(of: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(of, max_size=4).map(tuple)


instances = st.builds(Instance, name, st.integers(1, 2**64 - 1))
layouts = st.builds(
    KvLayout,
    model=text,
    dtype=text,
    page_size=uint32,
    layers=uint32,
    kv_heads=uint32,
    head_dim=uint32,
    metadata_schema=uint32,
    software_version=text,
    buffers=tuples(st.builds(BufferSpec, st.sampled_from(BufferKind), tuples(uint32), uint64)),
    state_kinds=tuples(st.sampled_from(StateKind)),
)
axis = st.integers(1, 2**32 - 1)
positions = st.builds(RankPosition, uint32, axis, uint32, axis, uint32, axis)
data_planes = st.builds(DataPlane, name, text, text, tuples(text), tuples(text))
ranks = st.builds(RankInfo, instances, st.sampled_from(Role), positions, name, layouts, data_planes)
samplings = st.builds(
    SamplingParams,
    max_new_tokens=uint32,
    temperature=double,
    top_p=double,
    top_k=uint32,
    seed=st.none() | uint64,
    stop=tuples(text),
    stop_token_ids=tuples(uint32),
    ignore_eos=st.booleans(),
    min_new_tokens=uint32,
)
requests = st.builds(
    GenerationRequest,
    rid=name,
    room=rooms,
    bootstrap=st.none() | st.builds(BootstrapAddress, name, st.integers(1, 65535)),
    prompt=tuples(uint32),
    sampling=samplings,
    return_logprob=st.booleans(),
    top_logprobs=uint32,
    timeout_s=st.floats(1e-6, 1e6),
    ticket=st.binary(max_size=8),
    cache_salt=st.binary(max_size=8),
    priority=st.integers(-(2**31), 2**31 - 1),
)
loads = st.builds(
    Load,
    queued=uint32,
    max_queued=uint32,
    oldest_wait_s=st.integers(0, 10**9).map(lambda quarters: quarters / 4),
    running=uint32,
    pages_total=uint32,
    pages_available=uint32,
    least_priority=st.integers(-(2**31), 2**31 - 1),
    stopping=st.booleans(),
)
alternatives = st.builds(TokenLogprob, uint32, double, text=text)
logprobs = st.builds(TokenLogprob, uint32, double, tuples(alternatives), text)
pieces = st.builds(
    Output,
    room=rooms,
    token_ids=tuples(uint32),
    text=text,
    logprobs=tuples(logprobs),
    finish=st.none() | st.sampled_from(FinishReason),
    matched_stop=st.none() | text | uint32,
    usage=st.none() | st.builds(Usage, uint32, uint32, uint32),
)
directories = st.sampled_from([None, BootstrapAddress("prefill-0.svc", 8998), BootstrapAddress("fd00::7", 1)])
models = st.builds(ModelInfo, text, uint32, uint32, uint32, uint32, st.booleans(), directories)


@given(layouts)
def test_a_layout_survives_the_wire(layout: KvLayout) -> None:
    wire = convert.layout_to(layout).SerializeToString()
    assert convert.layout_from(types_pb2.KvLayout.FromString(wire)) == layout


@given(ranks)
def test_a_rank_survives_the_wire(rank: RankInfo) -> None:
    wire = convert.rank_to(rank).SerializeToString()
    assert convert.rank_from(bootstrap_pb2.RankInfo.FromString(wire)) == rank


@given(samplings)
def test_sampling_rules_survive_the_wire(sampling: SamplingParams) -> None:
    wire = convert_generation.sampling_to(sampling).SerializeToString()
    assert convert_generation.sampling_from(generation_pb2.SamplingParams.FromString(wire)) == sampling


@given(requests)
def test_a_request_survives_the_wire(request: GenerationRequest) -> None:
    wire = convert_generation.request_to(request).SerializeToString()
    message = generation_pb2.GenerateRequest.FromString(wire)
    got = convert_generation.request_from(message, message.input_ids.ids)
    assert got.timeout_s == pytest.approx(request.timeout_s, rel=1e-12, abs=2e-9)
    assert replace(got, timeout_s=request.timeout_s) == request


@given(pieces)
def test_a_piece_of_an_answer_survives_the_wire(output: Output) -> None:
    wire = convert_generation.output_to(output).SerializeToString()
    got = convert_generation.output_from(generation_pb2.Output.FromString(wire))
    assert got == output
    assert got.is_last == output.is_last


@pytest.mark.parametrize("cls", ERROR_OF_REASON.values(), ids=lambda cls: cls.__name__)
def test_a_failed_piece_carries_its_error(cls: type[PdError]) -> None:
    sent = Output(BootstrapRoom(5), error=cls("what happened", room=5))
    got = convert_generation.output_from(convert_generation.output_to(sent))
    assert type(got.error) is cls
    assert (got.error.message, got.error.metadata) == ("what happened", {"room": "5"})
    assert got.is_last
    assert got.finish is None


@given(loads)
def test_how_much_a_process_has_to_do_survives_the_wire(load: Load) -> None:
    wire = convert_generation.load_to(load).SerializeToString()
    assert convert_generation.load_from(generation_pb2.Load.FromString(wire)) == load


@given(models)
def test_what_is_known_of_a_model_survives_the_wire(model: ModelInfo) -> None:
    wire = convert_generation.model_to(model).SerializeToString()
    assert convert_generation.model_from(generation_pb2.GetModelResponse.FromString(wire)) == model


@given(instances, st.builds(ProcessProof, text, uint32, uint64))
def test_a_process_survives_the_wire(instance: Instance, proof: ProcessProof) -> None:
    assert convert.instance_from(convert.instance_to(instance), "instance") == instance
    assert convert.process_from(convert.process_to(proof)) == proof


@pytest.mark.parametrize("state", TransferState)
def test_a_state_survives_the_wire(state: TransferState) -> None:
    assert convert.state_from(convert.state_to(state)) is state


def test_fields_that_a_client_leaves_out_take_the_documented_defaults() -> None:
    message = generation_pb2.GenerateRequest(bootstrap_room=5, bootstrap_host="h")
    got = convert_generation.request_from(message, [7])
    assert got == GenerationRequest(
        rid="room-5",
        room=BootstrapRoom(5),
        bootstrap=BootstrapAddress("h", 8998),
        prompt=(7,),
        sampling=SamplingParams(max_new_tokens=128),
        timeout_s=300.0,
    )


def test_a_request_that_names_no_prefill_is_one_for_a_decode_alone() -> None:
    message = generation_pb2.GenerateRequest(bootstrap_room=5)
    assert convert_generation.request_from(message, [7]).bootstrap is None


def test_a_zero_that_a_client_states_is_not_taken_for_a_field_left_out() -> None:
    message = generation_pb2.SamplingParams(max_new_tokens=0, temperature=0.0, top_p=0.0, seed=0)
    got = convert_generation.sampling_from(message)
    assert (got.max_new_tokens, got.temperature, got.top_p, got.seed) == (0, 0.0, 0.0, 0)


def test_a_transfer_is_shown_on_the_wall_clock() -> None:
    transfer = Transfer(
        room=BootstrapRoom(MAX_ROOM),
        role=Role.DECODE,
        state=TransferState.FAILED,
        sequence=9,
        created_s=100.0,
        updated_s=101.0,
        deadline_s=130.0,
        timeline=(
            Transition(TransferState.BOOTSTRAPPING, 100.0, 8, Progress()),
            Transition(TransferState.FAILED, 101.5, 9, Progress(1, 2, 3), Reason.TRANSFER_FAILED),
        ),
        rid="mine",
        peer=Instance("prefill-0", 3),
        progress=Progress(1, 2, 3),
        failure=InvalidRequest("no", field="f"),
    )
    message = convert.transfer_to(transfer, clock_offset_s=1000.0)
    assert (message.bootstrap_room, message.rid, message.role) == (MAX_ROOM, "mine", types_pb2.ROLE_DECODE)
    assert (message.chunks_done, message.pages_done, message.bytes_done) == (1, 2, 3)
    assert convert.instance_from(message.peer, "peer") == transfer.peer
    assert [(convert.state_from(step.state), step.time.ToNanoseconds()) for step in message.timeline] == [
        (TransferState.BOOTSTRAPPING, 1_100_000_000_000),
        (TransferState.FAILED, 1_101_500_000_000),
    ]
    assert message.deadline.ToNanoseconds() == 1_130_000_000_000
    assert message.HasField("failure")


def test_what_a_transfer_does_not_have_is_not_set_on_the_wire() -> None:
    record = Transfer(BootstrapRoom(1), Role.PREFILL, TransferState.BOOTSTRAPPING, 1, 0.0, 0.0, 1.0, ())
    message = convert.transfer_to(record, clock_offset_s=0.0)
    assert not message.HasField("peer")
    assert not message.HasField("failure")
    assert message.rid == ""


REQUEST = convert_generation.request_to(make_request())
RANK = convert.rank_to(RankInfo(Instance("p", 1), Role.PREFILL, RankPosition(), "h:1", LAYOUT, DATA_PLANE))


def changed_request(**changes: Any) -> generation_pb2.GenerateRequest:
    message = generation_pb2.GenerateRequest()
    message.CopyFrom(REQUEST)
    for field in changes:
        message.ClearField(field)
    message.MergeFrom(generation_pb2.GenerateRequest(**changes))
    return message


def changed_rank(**changes: Any) -> bootstrap_pb2.RankInfo:
    message = bootstrap_pb2.RankInfo()
    message.CopyFrom(RANK)
    for field in changes:
        message.ClearField(field)
    message.MergeFrom(bootstrap_pb2.RankInfo(**changes))
    return message


YEARS_10K_S = 315_576_000_000


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (changed_request(bootstrap_room=0), "bootstrap_room"),
        (changed_request(bootstrap_host=""), "bootstrap_host"),
        (changed_request(rid="r" * 257), "rid"),
        (changed_request(timeout=duration_pb2.Duration(seconds=-1)), "timeout"),
        (changed_request(timeout=duration_pb2.Duration()), "timeout"),
        (changed_request(timeout=duration_pb2.Duration(nanos=-1)), "timeout"),
        (changed_request(timeout=duration_pb2.Duration(seconds=YEARS_10K_S)), "timeout"),
        (changed_request(timeout=duration_pb2.Duration(seconds=2**62)), "timeout"),
    ],
    ids=[
        "room 0",
        "no host",
        "long rid",
        "timeout -1 s",
        "timeout 0",
        "timeout -1 ns",
        "timeout 10000 years",
        "timeout 2**62 s",
    ],
)
def test_a_request_that_cannot_be_meant_is_refused_by_its_field(
    message: generation_pb2.GenerateRequest, field: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        convert_generation.request_from(message, [1])
    assert raised.value.metadata["field"] == field


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (changed_rank(instance=types_pb2.Instance()), "rank.instance"),
        (changed_rank(instance=types_pb2.Instance(instance_id="p")), "rank.instance"),
        (changed_rank(instance=types_pb2.Instance(epoch=1)), "rank.instance"),
        (changed_rank(role=types_pb2.ROLE_UNSPECIFIED), "rank.role"),
        (changed_rank(role=77), "rank.role"),
        (changed_rank(control_address=""), "rank.control_address"),
        (changed_rank(layout=None), "rank.layout"),
        (
            changed_rank(layout=types_pb2.KvLayout(buffers=[types_pb2.BufferSpec(layer_ids=[1])])),
            "layout.buffers.kind",
        ),
    ],
    ids=[
        "no instance",
        "no epoch",
        "no id",
        "no role",
        "unknown role",
        "no address",
        "no layout",
        "unknown buffer kind",
    ],
)
def test_a_rank_that_cannot_be_meant_is_refused_by_its_field(message: bootstrap_pb2.RankInfo, field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        convert.rank_from(message)
    assert raised.value.metadata["field"] == field


@pytest.mark.parametrize("value", [0, 6, 99])
def test_an_unknown_state_is_refused(value: types_pb2.TransferState) -> None:
    with pytest.raises(InvalidRequest) as raised:
        convert.state_from(value)
    assert raised.value.metadata["field"] == "state"


@pytest.mark.parametrize("value", [-1, 0, 2**64])
def test_a_number_that_is_no_room_is_refused(value: int) -> None:
    with pytest.raises(InvalidRequest) as raised:
        convert.room_from(value)
    assert raised.value.metadata["field"] == "bootstrap_room"


def test_an_unknown_finish_reason_does_not_make_an_answer_endless() -> None:
    got = convert_generation.output_from(generation_pb2.Output(bootstrap_room=5, finish_reason=77))  # type: ignore[arg-type]
    assert got.is_last


@given(st.floats(0.0, 1e8))
def test_a_duration_keeps_its_nanoseconds(seconds: float) -> None:
    assert convert.duration_from(convert.duration_to(seconds)) == pytest.approx(seconds, rel=1e-12, abs=2e-9)


def test_time_that_is_over_is_sent_as_none_left() -> None:
    assert convert.duration_from(convert.duration_to(-3.0)) == 0.0


def _another(value: Any) -> Any:
    if isinstance(value, tuple | str):
        return value[:1] if value else (StateKind.RECURRENT,)
    return value + 1


def test_a_layout_mismatch_names_the_first_field_that_differs() -> None:
    """Every field of a layout counts (I10), also after the wire."""
    for field in fields(KvLayout):
        value: Any = getattr(LAYOUT, field.name)
        changed: dict[str, Any] = {field.name: _another(value)}
        other = replace(LAYOUT, **changed)
        mismatch = LAYOUT.first_mismatch(convert.layout_from(convert.layout_to(other)))
        assert mismatch is not None
        assert mismatch[0] == field.name
