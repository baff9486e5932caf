"""What Prometheus reads of the router at the moment of the scrape: whether it is ready, its workers and routes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.router.dispatch import Dispatcher
from services.router.policy import LeastLoaded


class RouterCollector(Collector):
    """What the router knows at the moment of the scrape."""

    def __init__(self, dispatcher: Dispatcher, policy: LeastLoaded) -> None:
        self._dispatcher = dispatcher
        self._policy = policy

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("pd_requests_open", "Requests that have not ended.", value=self._dispatcher.open_rooms)
        yield GaugeMetricFamily("pd_ready", "1: a request would find a proven route.", value=self._dispatcher.is_ready)
        yield self._workers()
        yield self._routes()

    def _workers(self) -> Metric:
        family = GaugeMetricFamily("pd_worker_live", "1: connected, and its beats come.", labels=["role", "worker"])
        for worker in (*self._policy.prefills, *self._policy.decodes):
            family.add_metric([worker.role.value, worker.address.target], worker.is_live)
        return family

    def _routes(self) -> Metric:
        proven = Counter(route.is_proven for route in self._policy.routes)
        family = GaugeMetricFamily("pd_routes", "Proven: a real room has gone through it.", labels=["state"])
        family.add_metric(["proven"], proven[True])
        family.add_metric(["unproven"], proven[False])
        return family
