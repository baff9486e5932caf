from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, StatusCode

from pd_common.errors import DeadlineExceeded
from pd_common.telemetry import spans, tracing
from pd_common.telemetry.spans import ROOM, SpanName
from pd_common.telemetry.tracing import RoomTrace, Tracing
from pd_common.types import MAX_ROOM, BootstrapRoom

LARGEST = BootstrapRoom(MAX_ROOM)


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Spans go to a provider of this test alone; the global one can be set only once in a process."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(spans, "_tracer", provider.get_tracer("pd"))
    return exporter


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    finished = exporter.get_finished_spans()
    named = {span.name: span for span in finished}
    assert len(named) == len(finished)
    return named


def span_context(context: Context) -> SpanContext:
    return trace.get_current_span(context).get_span_context()


def context_of(span: ReadableSpan) -> SpanContext:
    context = span.get_span_context()
    assert context is not None
    return context


def test_the_trace_of_a_room_follows_from_its_number_alone() -> None:
    rooms = [BootstrapRoom(1), BootstrapRoom(2), BootstrapRoom(2**53), LARGEST]
    first, second = ([span_context(spans.of_room(room)).trace_id for room in rooms] for _ in range(2))
    assert first == second
    assert len(set(first)) == len(rooms)
    assert span_context(spans.of_room(LARGEST)).is_valid
    assert span_context(spans.of_room(LARGEST)).trace_flags.sampled


# --- sampling ---

SAMPLERS = {
    "always_on": 1.0,
    "always_off": 0.0,
    "traceidratio": 0.25,
    "parentbased_always_on": 1.0,
    "parentbased_always_off": 0.0,
    "parentbased_traceidratio": 0.25,
}
MANY = [BootstrapRoom(number) for number in range(1, 401)]


class Exporting:
    """One process of those that have these variables in their environment."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self._tracer = provider.get_tracer("pd")
        self._tracing = Tracing()

    def leg(self, name: SpanName, room: BootstrapRoom, parent: Context) -> RoomTrace:
        """A whole one, with a stage."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spans, "_tracer", self._tracer)
            leg = self._tracing.begin(name, room, parent)
            leg.enter(SpanName.DISPATCH)
            leg.end()
        return leg

    @property
    def rooms(self) -> set[str]:
        """Of which something was exported."""
        finished = self.exporter.get_finished_spans()
        assert len({span.name for span in finished}) in {0, 2}, "a leg is exported with its stages or not at all"
        return {str((span.attributes or {})[ROOM]) for span in finished}


@pytest.fixture
def sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of all processes of the test."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", request.param)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    spans._sampler.cache_clear()
    yield request.param
    spans._sampler.cache_clear()


@pytest.mark.parametrize("sampler", SAMPLERS, indirect=True)
def test_a_rooms_own_trace_is_sampled_as_the_standard_variables_say_and_alike_in_every_process(sampler: str) -> None:
    router, prefill, direct = Exporting(), Exporting(), Exporting()
    for room in MANY:
        route = router.leg(SpanName.ROUTE, room, spans.of_room(room))
        prefill.leg(SpanName.PREFILL, room, spans.received(spans.carried(route.context), room))
        direct.leg(SpanName.DECODE, room, spans.received(None, room))
    assert router.rooms == prefill.rooms == direct.rooms
    assert len(router.rooms) / len(MANY) == pytest.approx(SAMPLERS[sampler], abs=0.08)


@pytest.mark.parametrize("sampler", ["parentbased_always_on", "parentbased_traceidratio"], indirect=True)
@pytest.mark.parametrize("flag", ["00", "01"])
def test_a_client_that_has_decided_for_its_trace_is_followed(sampler: str, flag: str) -> None:
    process = Exporting()
    for room in MANY:
        metadata = (("traceparent", f"00-{room:032x}-{'b' * 16}-{flag}"),)
        process.leg(SpanName.DECODE, room, spans.received(metadata, room))
    assert len(process.rooms) == (len(MANY) if flag == "01" else 0)


@pytest.mark.parametrize("sampler", ["always_off"], indirect=True)
def test_what_is_not_sampled_is_noted_all_the_same(sampler: str) -> None:
    leg = Exporting().leg(SpanName.ROUTE, LARGEST, spans.of_room(LARGEST))
    assert [stage.name for stage in leg.stages] == [SpanName.DISPATCH]
    assert leg.trace_id == f"{span_context(spans.of_room(LARGEST)).trace_id:032x}"


# --- whose trace it is ---


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param(None, id="no metadata"),
        pytest.param((("user-agent", "grpc"), ("x-bin", b"\x00")), id="no trace"),
        pytest.param((("traceparent", "00-nonsense"),), id="malformed"),
        pytest.param((("traceparent", f"00-{'0' * 32}-{'0' * 16}-01"),), id="zeros"),
    ],
)
def test_without_a_callers_trace_both_legs_meet_in_the_rooms_trace(
    metadata: tuple[tuple[str, str | bytes], ...] | None,
) -> None:
    room = BootstrapRoom(77)
    assert span_context(spans.received(metadata, room)).trace_id == span_context(spans.of_room(room)).trace_id


def test_a_callers_trace_wins_over_the_rooms() -> None:
    metadata = (("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"),)
    received = span_context(spans.received(metadata, BootstrapRoom(77)))
    assert f"{received.trace_id:032x}" == "a" * 32
    assert f"{received.span_id:016x}" == "b" * 16
    assert received.is_remote


def test_what_is_carried_is_what_is_received() -> None:
    sent = spans.of_room(BootstrapRoom(5))
    carried = spans.carried(sent)
    assert [key for key, _ in carried] == ["traceparent"]
    received = span_context(spans.received(carried, BootstrapRoom(6)))
    assert (received.trace_id, received.span_id) == (span_context(sent).trace_id, span_context(sent).span_id)


def test_the_other_process_continues_the_trace_below_the_callers_span(exported: InMemorySpanExporter) -> None:
    room = BootstrapRoom(9)
    here = Tracing().begin(SpanName.ROUTE, room, spans.of_room(room))
    there = Tracing().begin(SpanName.PREFILL, room, spans.received(spans.carried(here.context), room))
    there.end()
    here.end()
    named = by_name(exported)
    parent = named["pd.prefill"].parent
    assert parent is not None
    assert parent.span_id == context_of(named["pd.route"]).span_id
    assert {context_of(span).trace_id for span in named.values()} == {span_context(spans.of_room(room)).trace_id}


def test_stages_follow_each_other_without_a_gap_and_fill_the_room(exported: InMemorySpanExporter) -> None:
    room = LARGEST
    stages = [SpanName.PEERING, SpanName.PREALLOC_WAIT, SpanName.ALLOCATE, SpanName.TRANSFER_WAIT]
    trace_of_room = Tracing().begin(SpanName.DECODE, room, spans.of_room(room), rid="mine")
    for stage in stages:
        trace_of_room.enter(stage, pages=3)
    trace_of_room.end()
    named = by_name(exported)
    root = named[SpanName.DECODE]
    for earlier, later in pairwise(named[stage] for stage in stages):
        assert earlier.end_time == later.start_time
    assert root.attributes is not None
    assert root.attributes["rid"] == "mine"
    for span in named.values():
        assert span.attributes is not None
        assert span.attributes[ROOM] == str(MAX_ROOM)
        assert span.status.status_code is StatusCode.UNSET
        assert span.start_time is not None
        assert span.end_time is not None
        assert root.start_time is not None
        assert root.start_time <= span.start_time <= span.end_time
    for stage in stages:
        parent = named[stage].parent
        assert parent is not None
        assert parent.span_id == context_of(root).span_id


def test_a_failure_marks_the_room_and_the_stage_that_it_ended_but_no_earlier_one(
    exported: InMemorySpanExporter,
) -> None:
    room = BootstrapRoom(4)
    trace_of_room = Tracing().begin(SpanName.DECODE, room, spans.of_room(room))
    trace_of_room.enter(SpanName.PEERING)
    trace_of_room.enter(SpanName.TRANSFER_WAIT)
    trace_of_room.end(DeadlineExceeded("too late", room=room), tokens=2)
    named = by_name(exported)
    for name in (SpanName.DECODE, SpanName.TRANSFER_WAIT):
        status, attributes = named[name].status, named[name].attributes
        assert (status.status_code, status.description) == (StatusCode.ERROR, "too late")
        assert attributes is not None
        assert attributes["error.type"] == "DEADLINE"
    assert named[SpanName.PEERING].status.status_code is StatusCode.UNSET
    attributes = named[SpanName.DECODE].attributes
    assert attributes is not None
    assert attributes["tokens"] == 2


def test_a_room_that_ended_is_not_ended_again(exported: InMemorySpanExporter, caplog: pytest.LogCaptureFixture) -> None:
    room = BootstrapRoom(4)
    trace_of_room = Tracing().begin(SpanName.DECODE, room, spans.of_room(room))
    trace_of_room.enter(SpanName.PEERING)
    trace_of_room.end()
    trace_of_room.end(DeadlineExceeded("too late"), tokens=2)
    assert sorted(by_name(exported)) == [SpanName.DECODE, SpanName.PEERING]
    assert {span.status.status_code for span in exported.get_finished_spans()} == {StatusCode.UNSET}
    assert [record for record in caplog.records if record.name.startswith("opentelemetry")] == []


def test_a_child_that_is_over_is_recorded_beside_the_stages(exported: InMemorySpanExporter) -> None:
    room = BootstrapRoom(4)
    trace_of_room = Tracing().begin(SpanName.PREFILL, room, spans.of_room(room))
    trace_of_room.enter(SpanName.COMPUTE_WAIT)
    trace_of_room.record(SpanName.CHUNK_COMPUTE, 1000, 2500, tokens=64)
    trace_of_room.end()
    named = by_name(exported)
    chunk = named[SpanName.CHUNK_COMPUTE]
    assert (chunk.start_time, chunk.end_time) == (1000, 2500)
    assert chunk.attributes == {ROOM: "4", "tokens": 64}
    assert chunk.parent is not None
    assert chunk.parent.span_id == context_of(named[SpanName.PREFILL]).span_id


def test_the_time_to_first_token_is_noted_once(exported: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10_000_000, 35_500_000, 999_000_000])
    monkeypatch.setattr(tracing, "now_ns", lambda: next(clock))
    room = BootstrapRoom(4)
    trace_of_room = Tracing().begin(SpanName.ROUTE, room, spans.of_room(room))
    trace_of_room.first_token()
    trace_of_room.first_token()
    trace_of_room.end()
    attributes = by_name(exported)[SpanName.ROUTE].attributes
    assert attributes is not None
    assert attributes["ttft_ms"] == 25.5


def test_without_an_endpoint_nothing_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(variable, raising=False)
    assert spans.configure("pd-router", "router-0") is None


def test_a_room_without_a_tracer_costs_nothing_and_still_carries_its_trace() -> None:
    room = BootstrapRoom(8)
    trace_of_room = Tracing().begin(SpanName.ROUTE, room, spans.of_room(room))
    trace_of_room.enter(SpanName.DISPATCH)
    carried = spans.carried(trace_of_room.context)
    trace_of_room.end()
    assert span_context(spans.received(carried, room)).trace_id == span_context(spans.of_room(room)).trace_id
