"""What Prometheus reads of a process: its identity, and of an engine pages, metadata slots, queue and quarantine.

All of it is read at the moment of the scrape; nothing is kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from pd.v1 import inspection_pb2, types_pb2
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, make_asgi_app
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pd_common.aio import for_ever
from pd_common.control.http_server import HttpServer
from pd_common.control.rooms import RoomService
from pd_common.control.tls import Tls

_log = logging.getLogger(__name__)


class EngineCollector(Collector):
    """What an engine process has to do, and what its memory does."""

    def __init__(self, service: RoomService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        yield from self._memory()
        yield from self._queue()

    def _memory(self) -> Iterator[Metric]:
        now, held = self._service.pool_status(), self._service.quarantined()
        yield _by_state(
            "pd_kv_pages",
            "Pages of the KV pool. Cached: kept for prompts that begin in the same way.",
            now.pages_total,
            free=now.pages_free,
            quarantined=now.pages_quarantined,
            cached=now.pages_cached,
        )
        yield _by_state(
            "pd_metadata_slots",
            "Metadata slots.",
            now.slots_total,
            free=now.slots_free,
            quarantined=now.slots_quarantined,
        )
        yield GaugeMetricFamily(
            "pd_kv_pages_on_host", "Pages of retracted requests that are kept in host memory.", value=now.pages_on_host
        )
        yield GaugeMetricFamily(
            "pd_quarantine_oldest_seconds",
            "How long the room that has been in quarantine for longest is there; 0 when none is.",
            value=time.monotonic() - held[0].since_s if held else 0.0,
        )

    def _queue(self) -> Iterator[Metric]:
        now, load = self._service.pool_status(), self._service.load()
        for name, what, value in (
            ("pd_rooms_live", "Rooms that have not ended.", now.live_rooms),
            ("pd_requests_running", "Requests that have had their turn.", load.running),
            ("pd_requests_queued", "Requests that wait for their turn.", now.requests_queued),
            ("pd_requests_queued_limit", "How many may wait; 0: no limit.", load.max_queued),
            ("pd_requests_retracted", "Requests whose pages others have for now.", now.requests_retracted),
            ("pd_queue_oldest_wait_seconds", "How long the first in line has waited.", load.oldest_wait_s),
        ):
            yield GaugeMetricFamily(name, what, value=value)


class IdentityCollector(Collector):
    """Who answers at this address. `describe` is what Inspection answers with."""

    def __init__(self, describe: Callable[[], inspection_pb2.GetProcessResponse]) -> None:
        self._describe = describe

    def collect(self) -> Iterator[Metric]:
        now = self._describe()
        labels = {
            "instance_id": now.instance.instance_id,
            "role": types_pb2.Role.Name(now.role).removeprefix("ROLE_").lower(),
            "version": now.software_version,
            "model": now.model,
        }
        family = GaugeMetricFamily("pd_process_info", "1: this life of the process.", labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        yield family


def _by_state(name: str, what: str, total: int, **unused: int) -> Metric:
    """Whatever is not unused for one of the given reasons is used."""
    gauge = GaugeMetricFamily(name, f"{what} Quarantined: kept until no writer is left.", labels=["state"])
    for state, count in unused.items():
        gauge.add_metric([state], count)
    gauge.add_metric(["used"], total - sum(unused.values()))
    return gauge


@asynccontextmanager
async def served(
    collectors: Iterable[Collector], host: str, port: int | None, tls: Tls | None = None
) -> AsyncIterator[Callable[[], Coroutine[Any, Any, None]]]:
    """Answers GET /metrics meanwhile; without a port nothing is served. Gives the server's `watch`.

    Raises:
        InvalidRequest: the port cannot be bound.
    """
    if port is None:
        yield for_ever
        return
    disable_created_metrics()  # type: ignore[no-untyped-call]  # half of all series, and nobody reads them
    registry = CollectorRegistry()
    registry.register(ProcessCollector(registry=None))
    for collector in collectors:
        registry.register(collector)
    server = HttpServer(make_asgi_app(registry), host, port, tls=tls, option="metrics_port")
    scheme = "http" if tls is None else "https"
    _log.info("metrics on %s://%s:%d/metrics", scheme, host, await server.start())
    try:
        yield server.watch
    finally:
        await server.stop()
