"""What Prometheus reads of the rooms of one process: how they went, and how long each stage of them took."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pd_common.telemetry.tracing import RoomTrace


class RoomMetrics(Collector):
    """Counts legs when they end, by what the trace has noted of them: both tell the same."""

    def __init__(self) -> None:
        self._stages = Histogram("pd_stage_seconds", "Time in one stage of a room.", ["stage"], registry=None)

    def collect(self) -> Iterator[Metric]:
        yield from self._stages.collect()

    def note_leg(self, leg: RoomTrace) -> None:
        """A leg has ended."""
        for stage in leg.stages:
            if stage.seconds is not None:
                self._stages.labels(stage.name.value).observe(stage.seconds)
