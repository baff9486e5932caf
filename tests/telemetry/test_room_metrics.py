from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.context import Context
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.registry import Collector

from pd_common.errors import TransferFailed
from pd_common.generation import FinishReason, Output, Usage
from pd_common.telemetry import answers
from pd_common.telemetry.answers import AnswerMetrics, Distribution
from pd_common.telemetry.metrics import RoomMetrics
from pd_common.telemetry.spans import SpanName
from pd_common.telemetry.tracing import Message, RoomTrace, Tracing
from pd_common.types import BootstrapRoom

ROOM = BootstrapRoom(7)
MS = 10**6
CMA = {"carrier": "cma"}


def registry_of(collector: Collector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


@pytest.fixture
def tracing() -> Tracing:
    return Tracing()


@pytest.fixture
def read(tracing: Tracing) -> CollectorRegistry:
    legs = RoomMetrics()
    tracing.listeners.append(legs.note_leg)
    return registry_of(legs)


def write(leg: RoomTrace, start_ms: int, end_ms: int, *, descriptors: int = 1, gb_per_s: float = 1.0) -> None:
    leg.record(
        SpanName.CHUNK_TRANSFER,
        start_ms * MS,
        end_ms * MS,
        bytes=100,
        descriptors=descriptors,
        gb_per_s=gb_per_s,
        carrier="cma",
    )


def test_messages_that_had_to_be_said_again_are_counted(tracing: Tracing, read: CollectorRegistry) -> None:
    name = "pd_messages_repeated_total"
    assert read.get_sample_value(name, {"message": "offer"}) == 0
    leg = tracing.begin(SpanName.DECODE, ROOM, Context())
    leg.repeated(Message.OFFER)
    leg.repeated(Message.OFFER)
    leg.repeated(Message.REPORT, 0)
    leg.end()
    assert leg.root.attributes == {"pd.offers_repeated": 2}
    assert read.get_sample_value(name, {"message": "offer"}) == 2
    assert read.get_sample_value(name, {"message": "report"}) == 0


def test_a_leg_is_counted_when_it_ends_by_what_became_of_it(tracing: Tracing, read: CollectorRegistry) -> None:
    legs = [tracing.begin(SpanName.PREFILL, ROOM, Context()) for _ in range(3)]
    legs[0].end()
    legs[1].end(TransferFailed("broken"))
    legs[1].end()
    counted = {
        outcome: read.get_sample_value("pd_legs_total", {"leg": "prefill", "outcome": outcome})
        for outcome in ("SUCCESS", "TRANSFER_FAILED")
    }
    assert counted == {"SUCCESS": 1, "TRANSFER_FAILED": 1}


def test_the_stages_of_a_leg_are_what_its_trace_says(tracing: Tracing, read: CollectorRegistry) -> None:
    leg = tracing.begin(SpanName.DECODE, ROOM, Context())
    for entered in (SpanName.PREALLOC_WAIT, SpanName.RESTORE, SpanName.PREALLOC_WAIT):
        leg.enter(entered)
    leg.end()
    for name, times in (("prealloc_wait", 2), ("restore", 1)):
        of = {"stage": name}
        noted_s = sum(stage.seconds or 0.0 for stage in leg.stages if stage.name.value == f"pd.{name}")
        assert read.get_sample_value("pd_stage_seconds_count", of) == times
        assert read.get_sample_value("pd_stage_seconds_sum", of) == pytest.approx(noted_s)


def test_time_on_the_way_counts_once_where_chunks_overlap(tracing: Tracing, read: CollectorRegistry) -> None:
    leg = tracing.begin(SpanName.PREFILL, ROOM, Context())
    for start_ms, end_ms in ((100, 200), (150, 250), (160, 170), (400, 500)):
        write(leg, start_ms, end_ms)
    leg.end()
    assert read.get_sample_value("pd_transfer_seconds_sum", CMA) == pytest.approx(0.25)
    assert read.get_sample_value("pd_transfer_seconds_count", CMA) == 1


def test_writes_are_counted_by_room_and_their_speed_by_chunk(tracing: Tracing, read: CollectorRegistry) -> None:
    leg = tracing.begin(SpanName.PREFILL, ROOM, Context())
    write(leg, 1, 2, descriptors=3, gb_per_s=0.3)
    write(leg, 2, 3, descriptors=14, gb_per_s=11.0)
    leg.end()
    assert read.get_sample_value("pd_transfer_descriptors_sum", CMA) == 17
    assert read.get_sample_value("pd_transfer_descriptors_bucket", {**CMA, "le": "16.0"}) == 0
    speed = "pd_transfer_gigabytes_per_second_bucket"
    assert [read.get_sample_value(speed, {**CMA, "le": le}) for le in ("0.5", "8.0", "12.0")] == [1, 1, 2]


def test_a_leg_that_has_written_nothing_is_no_transfer(tracing: Tracing, read: CollectorRegistry) -> None:
    tracing.begin(SpanName.DECODE, ROOM, Context()).end()
    assert not any(sample for metric in read.collect() for sample in metric.samples if "transfer" in sample.name)


def test_more_rooms_are_not_more_series(tracing: Tracing, read: CollectorRegistry) -> None:
    def series() -> set[tuple[str, ...]]:
        found = (sample for metric in read.collect() for sample in metric.samples)
        return {(sample.name, *map(str, sorted(sample.labels.items()))) for sample in found}

    def room(number: int) -> None:
        leg = tracing.begin(SpanName.PREFILL, BootstrapRoom(number), Context(), rid=f"r{number}")
        leg.enter(SpanName.COMMIT)
        write(leg, number, number + 1)
        leg.end()

    room(1)
    after_one = series()
    for number in range(2, 50):
        room(number)
    assert series() == after_one


# --- answers ---


def pieces(*tokens: int) -> list[Output]:
    return [Output(ROOM, token_ids=tuple(range(count))) for count in tokens]


def answer(metrics: AnswerMetrics, outputs: Iterable[Output]) -> None:
    clock = metrics.begin()
    for output in outputs:
        clock.note(output)


def test_of_each_answer_one_token_is_the_first_and_each_later_one_has_a_gap() -> None:
    metrics = AnswerMetrics("pd")
    answer(metrics, pieces(1, 1, 1, 3))
    answer(metrics, pieces(1))
    answer(metrics, [*pieces(0), Output(ROOM, error=TransferFailed("broken"))])
    read = registry_of(metrics)
    assert read.get_sample_value("pd_time_to_first_token_seconds_count") == 2
    assert read.get_sample_value("pd_inter_token_seconds_count") == 5
    assert read.get_sample_value("pd_generated_tokens_total") == 7


def test_the_gaps_of_an_answer_add_up_to_the_time_after_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.25, 11.0, 11.5])
    monkeypatch.setattr(answers, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    metrics = AnswerMetrics("pd")
    answer(metrics, pieces(1, 3, 1))
    read = registry_of(metrics)
    assert read.get_sample_value("pd_time_to_first_token_seconds_sum") == pytest.approx(0.25)
    assert read.get_sample_value("pd_inter_token_seconds_sum") == pytest.approx(1.25)
    assert read.get_sample_value("pd_inter_token_seconds_bucket", {"le": "0.2"}) == 0
    assert read.get_sample_value("pd_inter_token_seconds_bucket", {"le": "0.5"}) == 4


def test_prompt_and_cached_tokens_count_when_the_answer_ends() -> None:
    metrics = AnswerMetrics("pd_engine")
    read = registry_of(metrics)
    last = Output(ROOM, finish=FinishReason.LENGTH, usage=Usage(100, 2, cached_tokens=64))
    answer(metrics, pieces(1, 1))
    assert read.get_sample_value("pd_engine_prompt_tokens_total") == 0
    answer(metrics, [last])
    assert read.get_sample_value("pd_engine_prompt_tokens_total") == 100
    assert read.get_sample_value("pd_engine_cached_tokens_total") == 64


BOUNDS = (0.001, 0.5, 1.0, 2.0)


@given(st.lists(st.floats(0, 4) | st.sampled_from(BOUNDS)))
def test_a_distribution_is_what_the_librarys_histogram_is(values: list[float]) -> None:
    ours, theirs = Distribution("d", "what", BOUNDS), Histogram("d", "what", registry=None, buckets=BOUNDS)
    for value in values:
        ours.add(value)
        theirs.observe(value)
    assert samples(ours) == pytest.approx(samples(theirs))


def samples(histogram: Distribution | Histogram) -> dict[tuple[str, str], float]:
    found = (sample for metric in histogram.collect() for sample in metric.samples if sample.name != "d_created")
    return {(sample.name, sample.labels.get("le", "")): sample.value for sample in found}
