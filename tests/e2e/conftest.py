"""One cluster for all tests of a module; after every test both pools must be as they were."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from demo.cluster import Cluster
from tests.e2e.harness import Client, client_of, running_cluster


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with running_cluster() as running:
        yield running


@pytest.fixture
async def client(pair: Cluster) -> AsyncIterator[Client]:
    async with client_of(pair) as client:
        yield client
