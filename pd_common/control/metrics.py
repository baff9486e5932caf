"""What Prometheus reads of a process: errors answered; of an engine also pages, metadata slots, rooms and its queue."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry, make_asgi_app
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pd_common.aio import for_ever
from pd_common.control.http_server import HttpServer
from pd_common.control.rooms import PoolStatus
from pd_common.control.tls import Tls

_log = logging.getLogger(__name__)


class PoolCollector(Collector):
    """Reads the pools at the moment of the scrape; nothing is kept."""

    def __init__(self, pool_status: Callable[[], PoolStatus]) -> None:
        self._pool_status = pool_status

    def collect(self) -> Iterator[Metric]:
        now = self._pool_status()
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
        yield GaugeMetricFamily("pd_rooms_live", "Rooms that have not ended.", value=now.live_rooms)
        yield GaugeMetricFamily("pd_requests_queued", "Requests that wait for their turn.", value=now.requests_queued)
        yield GaugeMetricFamily(
            "pd_requests_retracted",
            "Requests whose pages others have until it is their turn again.",
            value=now.requests_retracted,
        )
        yield GaugeMetricFamily(
            "pd_kv_pages_on_host", "Pages of retracted requests that are kept in host memory.", value=now.pages_on_host
        )


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
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    server = HttpServer(make_asgi_app(registry), host, port, tls=tls, option="metrics_port")
    scheme = "http" if tls is None else "https"
    _log.info("metrics on %s://%s:%d/metrics", scheme, host, await server.start())
    try:
        yield server.watch
    finally:
        await server.stop()
