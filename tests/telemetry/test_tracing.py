from __future__ import annotations

import logging
import time

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from pd_common.errors import PeerLost, RoomUnknown
from pd_common.telemetry import export, spans, tracing
from pd_common.telemetry.spans import SpanName
from pd_common.telemetry.tracing import RoomTrace, Tracing
from pd_common.types import BootstrapRoom

ROOM = BootstrapRoom(4)
LOST = PeerLost("prefill is gone", room=ROOM)


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(spans, "_tracer", provider.get_tracer("pd"))
    return exporter


def a_leg(name: SpanName = SpanName.DECODE, **settings: int) -> RoomTrace:
    return Tracing().begin(name, ROOM, spans.of_room(ROOM), **settings)


def of_name(exporter: InMemorySpanExporter, name: SpanName) -> ReadableSpan:
    [span] = [span for span in exporter.get_finished_spans() if span.name == name]
    return span


def test_what_lies_beside_the_stages_ends_none_of_them(exported: InMemorySpanExporter) -> None:
    leg = a_leg()
    leg.enter(SpanName.DECODE_STEPS)
    with leg.beside(SpanName.QUARANTINE, pages=3):
        pass
    leg.end()
    steps, held = of_name(exported, SpanName.DECODE_STEPS), of_name(exported, SpanName.QUARANTINE)
    assert steps.end_time is not None
    assert held.end_time is not None
    assert steps.end_time >= held.end_time


def test_what_outlasts_the_leg_is_exported_when_it_is_over_in_the_same_trace(exported: InMemorySpanExporter) -> None:
    leg = a_leg()
    with leg.beside(SpanName.QUARANTINE, pages=3) as held:
        leg.end(LOST)
        assert [span.name for span in exported.get_finished_spans()] == [SpanName.DECODE]
        held.attributes["proof"] = "drained"
    late, root = of_name(exported, SpanName.QUARANTINE), of_name(exported, SpanName.DECODE)
    assert late.parent == root.get_span_context()
    assert late.attributes is not None
    assert (late.attributes["pages"], late.attributes["proof"]) == (3, "drained")
    assert late.end_time is not None
    assert root.end_time is not None
    assert late.end_time > root.end_time


def test_an_aborted_leg_says_what_failed_and_how_long_it_took_to_come_to_rest(exported: InMemorySpanExporter) -> None:
    leg = a_leg()
    leg.enter(SpanName.TRANSFER_WAIT)
    leg.abort(LOST)
    leg.end(LOST)
    waiting, abort = of_name(exported, SpanName.TRANSFER_WAIT), of_name(exported, SpanName.ABORT)
    assert waiting.status.status_code is StatusCode.ERROR
    assert abort.status.status_code is StatusCode.UNSET
    assert abort.start_time == waiting.end_time
    assert abort.end_time == of_name(exported, SpanName.DECODE).end_time
    assert abort.attributes is not None
    assert abort.attributes["error.type"] == "PEER_LOST"


def test_a_leg_may_have_begun_before_its_room_was_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "now_ns", lambda: 50_000_000)
    leg = a_leg(SpanName.ROUTE, start_ns=20_000_000)
    leg.first_token()
    assert leg.ttft_s == 0.03


def test_a_leg_that_has_ended_can_be_asked_for_until_many_later_ones_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_ENDED_KEPT", 2)
    rooms = [BootstrapRoom(number) for number in (1, 2, 3)]
    kept = Tracing()
    legs = [kept.begin(SpanName.DECODE, room, spans.of_room(room)) for room in rooms]
    for leg in legs[:2]:
        leg.end()
    assert kept.of_room(rooms[0]) == (legs[0],)
    legs[2].end()
    with pytest.raises(RoomUnknown):
        kept.of_room(rooms[0])
    assert kept.of_room(rooms[2]) == (legs[2],)


def test_a_dead_collector_is_spoken_of_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 101.0, 159.0, 161.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    quiet = export._NowAndThen()

    def is_said(message: str, level: int = logging.ERROR) -> bool:
        return quiet.filter(logging.LogRecord("otel", level, "", 0, message, (), None))

    assert not is_said("Transient error %s, retrying", logging.WARNING)
    assert [is_said("Failed to export") for _ in range(3)] == [True, False, True]
