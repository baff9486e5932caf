"""Real processes with certificates and tickets, all set by the environment; one certificate speaks for all roles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pd.v1 import abort_pb2, abort_pb2_grpc, generation_pb2_grpc

from demo.cluster import LOOPBACK, Cluster
from pd_common.control.connection import Connection, dial_with
from pd_common.errors import PeerLost, PermissionDenied
from pd_common.types import Role
from tests.control.certificates import Authority, Files
from tests.control.serving import typed
from tests.e2e.harness import PATIENCE_S, make_request, started_cluster


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Authority(tmp_path_factory.mktemp("tls")).issue("pd-prefill", "pd-decode", "pd-router", to="process")


@pytest.fixture(scope="module")
def closed(files: Files) -> Iterator[Cluster]:
    keys: Path = files.ca.with_name("keys")
    keys.write_text("k" * 40)
    environment = {
        "PD_TLS_CERT": str(files.cert),
        "PD_TLS_KEY": str(files.key),
        "PD_TLS_CA": str(files.ca),
        "PD_TICKET_KEY_FILE": str(keys),
    }
    with started_cluster(environment=environment) as running:
        yield running


async def test_a_request_goes_through_and_nobody_without_papers_does(files: Files, closed: Cluster) -> None:
    dial = dial_with(files.tls())
    router = dial(f"{LOOPBACK}:{closed.ports.grpc}", Role.PREFILL)
    health: Any = health_pb2_grpc.HealthStub(router.channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=60, wait_for_ready=True)
    async for answer in watch:
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            break
    watch.cancel()
    generation: Any = generation_pb2_grpc.GenerationStub(router.channel)
    outputs = [
        r.output async for r in generation.Generate(make_request([1, 2, 3], max_new_tokens=4), timeout=PATIENCE_S)
    ]
    assert len([token for output in outputs for token in output.token_ids]) == 4

    prefill = dial(f"{LOOPBACK}:{closed.ports.prefill}", Role.PREFILL)
    abort: Any = abort_pb2_grpc.AbortStub(prefill.channel)
    with pytest.raises(PermissionDenied, match="needs a ticket"):
        await typed(prefill, abort.AbortRoom(abort_pb2.AbortRoomRequest(bootstrap_room=7), timeout=PATIENCE_S))

    nobody = Connection(f"{LOOPBACK}:{closed.ports.decode}")
    abort = abort_pb2_grpc.AbortStub(nobody.channel)
    with pytest.raises(PeerLost):
        await typed(nobody, abort.AbortRoom(abort_pb2.AbortRoomRequest(bootstrap_room=7), timeout=PATIENCE_S))
    for connection in (router, prefill, nobody):
        await connection.close()
