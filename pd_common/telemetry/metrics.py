"""What Prometheus reads of the rooms of one process: how they went, and how long each stage of them took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pd_common.telemetry.spans import SpanName
from pd_common.telemetry.tracing import Message, RoomTrace, Stage

SUCCESS = "SUCCESS"
"""The outcome that is not a reason of `pd_common.errors`."""

_STAGE_S = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_GB_PER_S = (0.1, 0.25, 0.5, 1, 2, 4, 8, 12, 16, 25, 50, 100, 200, 400)
_DESCRIPTORS = tuple(4**power for power in range(9))


class RoomMetrics(Collector):
    """Counts legs when they end, by what the trace has noted of them: both tell the same."""

    def __init__(self) -> None:
        self._legs = Counter("pd_legs", "Legs of rooms that have ended here.", ["leg", "outcome"], registry=None)
        self._repeated = Counter(
            "pd_messages_repeated",
            "Messages that were said again to the other side, for want of an answer.",
            ["message"],
            registry=None,
        )
        for message in Message:
            self._repeated.labels(message.name.lower())
        self._stages = Histogram(
            "pd_stage_seconds", "Time in one stage of a room.", ["stage"], registry=None, buckets=_STAGE_S
        )
        self._writing = Histogram(
            "pd_transfer_seconds",
            "Time in which KV of one room was on its way to decode.",
            ["carrier"],
            registry=None,
            buckets=_STAGE_S,
        )
        self._speed = Histogram(
            "pd_transfer_gigabytes_per_second",
            "Speed of one chunk's write, 10^9 bytes a second.",
            ["carrier"],
            registry=None,
            buckets=_GB_PER_S,
        )
        self._descriptors = Histogram(
            "pd_transfer_descriptors",
            "One-sided writes that one room took.",
            ["carrier"],
            registry=None,
            buckets=_DESCRIPTORS,
        )

    def collect(self) -> Iterator[Metric]:
        for metric in (self._legs, self._repeated, self._stages, self._writing, self._speed, self._descriptors):
            yield from metric.collect()

    def note_leg(self, leg: RoomTrace) -> None:
        """A leg has ended."""
        failure = leg.root.failure
        self._legs.labels(_short(leg.root.name), SUCCESS if failure is None else failure.reason.value).inc()
        for message in Message:
            self._repeated.labels(message.name.lower()).inc(int(leg.root.attributes.get(message.value, 0)))
        for stage in leg.stages:
            if stage.seconds is not None:
                self._stages.labels(_short(stage.name)).observe(stage.seconds)
        writes = [stage for stage in leg.stages if stage.name is SpanName.CHUNK_TRANSFER]
        if writes:
            self._note_writes(writes)

    def _note_writes(self, writes: Sequence[Stage]) -> None:
        carrier = str(writes[0].attributes["carrier"])  # a room has one channel
        self._writing.labels(carrier).observe(_covered_s(writes))
        self._descriptors.labels(carrier).observe(sum(int(write.attributes["descriptors"]) for write in writes))
        for write in writes:
            self._speed.labels(carrier).observe(float(write.attributes["gb_per_s"]))


def _short(name: SpanName) -> str:
    return name.value.removeprefix("pd.")


def _covered_s(stages: Sequence[Stage]) -> float:
    """Seconds in which at least one of them lasted; all have ended."""
    covered_ns, until_ns = 0, 0
    for start_ns, end_ns in sorted((stage.start_ns, stage.end_ns or stage.start_ns) for stage in stages):
        covered_ns += max(end_ns - max(start_ns, until_ns), 0)
        until_ns = max(until_ns, end_ns)
    return covered_ns / 1e9
