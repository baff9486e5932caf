"""A collector that is dead, mute or dies costs no request, no delay at the end, and few lines in the log."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from demo import timeline
from demo.cluster import LOOPBACK, Ports
from pd_common.telemetry.collector import Collector
from tests.e2e.harness import Client, client_of, long_model, running_cluster
from tests.engine.oracle import Oracle
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.slow

PROMPT = tuple(random.Random(8).choices(range(1, VOCAB_SIZE), k=40))


@contextmanager
def mute(port: int) -> Iterator[None]:
    """Takes connections and never says a word."""
    with socket.create_server((LOOPBACK, port)):
        yield


async def assert_serves(client: Client, rooms: int = 5) -> None:
    expected = Oracle(long_model("llama")).tokens(PROMPT)
    for _ in range(rooms):
        assert (await client.generate(PROMPT)).token_ids == expected


async def test_whatever_becomes_of_the_collector_requests_are_served_and_processes_end() -> None:
    port = Ports.free().http
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{LOOPBACK}:{port}", "OTEL_BSP_SCHEDULE_DELAY": "50"}
    with running_cluster(environment=environment) as running:
        async with client_of(running) as client:
            await assert_serves(client)  # nobody listens
            with mute(port):
                await assert_serves(client)
            with Collector(port) as collector:
                room = (await client.generate(PROMPT)).room
                spans = collector.wait_for(room, timeline.EXPECTED, timeout_s=60)
                assert {span.name for span in spans} >= timeline.EXPECTED, "it is used as soon as it is there"
            await assert_serves(client)  # it has died
        with mute(port):
            stopped = [process.stop() for process in running.processes]
        assert stopped == [0, 0, 0], "a process that does not end in time is killed"
        for process in running.processes:
            spoken = [line for line in process.log().splitlines() if "opentelemetry" in line]
            assert len(spoken) <= 3, spoken
