from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from pd_common.control import server
from pd_common.control.abort_servicer import AbortServicer
from pd_common.control.connection import Connection
from pd_common.control.generation_client import GenerationClient
from pd_common.control.generation_servicer import EngineGenerationServicer
from pd_common.control.outputs import OutputHub
from pd_common.control.status_servicer import TransferStatusServicer
from tests.control.fake_rooms import FakeModel, FakeRooms
from tests.control.serving import serving


@pytest.fixture
async def hub() -> OutputHub:
    return OutputHub()


@pytest.fixture
async def rooms(hub: OutputHub) -> FakeRooms:
    return FakeRooms(hub)


@pytest.fixture
async def engine(rooms: FakeRooms, hub: OutputHub) -> AsyncIterator[Connection]:
    """A connection to a process that serves what prefill and decode have in common."""
    services = (
        server.transfer_status(TransferStatusServicer(rooms)),
        server.abort(AbortServicer(rooms)),
        server.generation(EngineGenerationServicer(rooms, hub, FakeModel())),
    )
    async with serving(*services) as connection:
        yield connection


@pytest.fixture
async def client(engine: Connection) -> GenerationClient:
    return GenerationClient(engine)
