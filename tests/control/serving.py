"""A real server of the control plane on a free port, and domain values that tests have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

from pd_common.control.connection import Connection
from pd_common.control.server import ControlServer, Service
from pd_common.generation import GenerationRequest, SamplingParams
from pd_common.types import BootstrapAddress, BootstrapRoom, BufferKind, BufferSpec, DataPlane, KvLayout

_T = TypeVar("_T")

LOOPBACK = "127.0.0.1"

DATA_PLANE = DataPlane("ucx", "1.21", LOOPBACK, ("cma", "tcp"))

LAYOUT = KvLayout(
    model="digest-of-a-model",
    dtype="float32",
    page_size=16,
    layers=1,
    kv_heads=2,
    head_dim=8,
    metadata_schema=1,
    software_version="0.1.0",
    buffers=(BufferSpec(BufferKind.KEY, (0,), 1024), BufferSpec(BufferKind.VALUE, (0,), 1024)),
)


@asynccontextmanager
async def serving(*services: Service) -> AsyncIterator[Connection]:
    """Serves on a port of its own; gives a connection to it."""
    control = ControlServer(services)
    port = await control.start(LOOPBACK, 0)
    connection = Connection(f"{LOOPBACK}:{port}")
    try:
        yield connection
    finally:
        await connection.close()
        await control.stop(grace_s=0.0)


async def typed(connection: Connection, call: Awaitable[_T]) -> _T:
    """Awaits a call made with a bare stub; a failure is raised as our own clients raise it."""
    with connection.typed_errors():
        return await call


def make_request(room: int = 5, prompt: tuple[int, ...] = (1, 2, 3), max_new_tokens: int = 4) -> GenerationRequest:
    return GenerationRequest(
        rid=f"r{room}",
        room=BootstrapRoom(room),
        bootstrap=BootstrapAddress(LOOPBACK, 8998),
        prompt=prompt,
        sampling=SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0),
        timeout_s=30.0,
    )
