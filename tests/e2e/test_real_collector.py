"""A trace arrives in a collector that is not ours: Arize Phoenix, if there is one on the machine."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.trace import get_current_span

from demo import timeline
from demo.cluster import LOOPBACK, Ports
from pd_common.telemetry.spans import ROOM, of_room
from pd_common.types import BootstrapRoom
from tests.e2e.harness import client_of, eventually, running_cluster

PHOENIX = os.environ.get("PD_TEST_PHOENIX") or shutil.which("phoenix")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PHOENIX is None, reason="no phoenix: pip install arize-phoenix elsewhere, PD_TEST_PHOENIX=..."),
    pytest.mark.timeout(400),
]
START_S = 180.0


@asynccontextmanager
async def phoenix(directory: Path) -> AsyncIterator[tuple[str, httpx.AsyncClient]]:
    """Its OTLP/gRPC endpoint, and a client of what it has stored."""
    ports = Ports.free()
    environment = {
        **os.environ,
        "PHOENIX_WORKING_DIR": str(directory),
        "PHOENIX_HOST": LOOPBACK,
        "PHOENIX_PORT": str(ports.http),
        "PHOENIX_GRPC_PORT": str(ports.grpc),
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PYTHONPATH": "",
    }
    with (directory / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(str(PHOENIX), "serve", env=environment, stdout=log, stderr=log)
    try:
        async with httpx.AsyncClient(base_url=f"http://{LOOPBACK}:{ports.http}", timeout=20) as stored:
            await eventually(partial(_not_up, stored), START_S)
            yield f"http://{LOOPBACK}:{ports.grpc}", stored
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 30)


async def _not_up(stored: httpx.AsyncClient) -> str:
    try:
        answer = await stored.get("/healthz")
    except httpx.HTTPError as error:
        return f"not up: {error!r}"
    return "" if answer.is_success else answer.text


async def test_the_trace_of_a_room_is_whole_there(tmp_path: Path) -> None:
    async with phoenix(tmp_path) as (endpoint, stored):
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
        with running_cluster(environment=environment) as running:
            async with client_of(running) as client:
                room = (await client.generate(tuple(range(1, 60)), max_new_tokens=4)).room
            found: list[dict[str, Any]] = []

            async def missing() -> str:
                answer = await stored.get("/v1/projects/default/spans", params={"limit": 1000})
                if not answer.is_success:
                    return f"{answer.status_code}: {answer.text}"
                found[:] = [span for span in answer.json()["data"] if span["attributes"].get(ROOM) == str(room)]
                left = timeline.EXPECTED - {span["name"] for span in found}
                return f"still missing: {sorted(left)}" if left else ""

            await eventually(missing, 60)
    trace_id = f"{get_current_span(of_room(BootstrapRoom(room))).get_span_context().trace_id:032x}"
    assert {span["context"]["trace_id"] for span in found} == {trace_id}
