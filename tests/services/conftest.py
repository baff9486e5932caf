"""A router's view of one prefill and one decode that do what a test says."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from pd_common.telemetry.tracing import Tracing
from services.router.dispatch import Dispatcher
from tests.services.engine_server import Cluster, EngineServer


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    await cluster.start()
    cluster.prove_all()
    yield cluster
    await cluster.stop()


@pytest.fixture
async def prefill(cluster: Cluster) -> EngineServer:
    return cluster.prefill_servers[0]


@pytest.fixture
async def decode(cluster: Cluster) -> EngineServer:
    return cluster.decode_servers[0]


@pytest.fixture
async def dispatcher(cluster: Cluster) -> AsyncIterator[Dispatcher]:
    dispatcher = Dispatcher(cluster.policy, Tracing())
    yield dispatcher
    await dispatcher.close()
