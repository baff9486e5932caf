"""Real processes with tickets, and each with a certificate of its own role and no other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pd.v1 import (
    abort_pb2,
    abort_pb2_grpc,
    generation_pb2_grpc,
    transfer_status_pb2,
    transfer_status_pb2_grpc,
    types_pb2,
)

from demo.cluster import LOOPBACK, Cluster
from pd_common.control.connection import Connection, dial_with
from pd_common.errors import PeerLost, PermissionDenied
from pd_common.types import Role
from tests.control.certificates import Authority, Files
from tests.control.serving import typed
from tests.e2e.harness import PATIENCE_S, make_request, started_cluster
from tests.e2e.tools import grpcurl, needs_grpcurl

RETRACTED_TO_PREFILL = ("--test-retract-every", "3", "--host-kv-tokens", "0")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def person(authority: Authority) -> Files:
    """Of somebody who is no process of the system."""
    return authority.issue("alice.example", to="alice")


@pytest.fixture(scope="module")
def closed(authority: Authority) -> Iterator[Cluster]:
    prefill, decode, router = (authority.issue(name, to=name) for name in ("pd-prefill", "pd-decode", "pd-router"))
    keys: Path = router.ca.with_name("keys")
    keys.write_text("k" * 40)
    environment = {
        "PD_TLS_CERT": str(router.cert),
        "PD_TLS_KEY": str(router.key),
        "PD_TLS_CA": str(router.ca),
        "PD_TICKET_KEY_FILE": str(keys),
    }
    with started_cluster(
        prefill_flags=("--tls-cert", str(prefill.cert), "--tls-key", str(prefill.key)),
        decode_flags=("--tls-cert", str(decode.cert), "--tls-key", str(decode.key), *RETRACTED_TO_PREFILL),
        environment=environment,
    ) as running:
        yield running


@pytest.fixture
async def router(person: Files, closed: Cluster) -> AsyncIterator[Connection]:
    """As that person reaches it, once a room has gone through."""
    address, options = f"{LOOPBACK}:{closed.ports.grpc}", [("grpc.ssl_target_name_override", "pd-router")]
    router = Connection(address, grpc.aio.secure_channel(address, person.tls().channel_credentials(), options))
    health: Any = health_pb2_grpc.HealthStub(router.channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=60, wait_for_ready=True)
    async for answer in watch:
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            break
    watch.cancel()
    yield router
    await router.close()


async def test_a_request_goes_through_and_nobody_without_papers_does(
    person: Files, closed: Cluster, router: Connection
) -> None:
    generation: Any = generation_pb2_grpc.GenerationStub(router.channel)
    outputs = [
        r.output async for r in generation.Generate(make_request([1, 2, 3], max_new_tokens=4), timeout=PATIENCE_S)
    ]
    assert len([token for output in outputs for token in output.token_ids]) == 4

    prefill = dial_with(person.tls())(f"{LOOPBACK}:{closed.ports.prefill}", Role.PREFILL)
    abort: Any = abort_pb2_grpc.AbortStub(prefill.channel)
    with pytest.raises(PermissionDenied, match="needs a ticket"):
        await typed(prefill, abort.AbortRoom(abort_pb2.AbortRoomRequest(bootstrap_room=7), timeout=PATIENCE_S))

    nobody = Connection(f"{LOOPBACK}:{closed.ports.decode}")
    abort = abort_pb2_grpc.AbortStub(nobody.channel)
    with pytest.raises(PeerLost):
        await typed(nobody, abort.AbortRoom(abort_pb2.AbortRoomRequest(bootstrap_room=7), timeout=PATIENCE_S))
    for connection in (prefill, nobody):
        await connection.close()


async def test_what_a_retracted_answer_has_lost_comes_from_prefill_with_a_ticket_of_its_own(
    person: Files, closed: Cluster, router: Connection
) -> None:
    generation: Any = generation_pb2_grpc.GenerationStub(router.channel)
    request = make_request(list(range(1, 40)), max_new_tokens=12, rid="retracted")
    outputs = [response.output async for response in generation.Generate(request, timeout=PATIENCE_S)]
    assert sum(len(output.token_ids) for output in outputs) == 12

    decode = dial_with(person.tls())(f"{LOOPBACK}:{closed.ports.decode}", Role.DECODE)
    transfers: Any = transfer_status_pb2_grpc.TransferStatusStub(decode.channel)
    listed = await typed(decode, transfers.ListTransfers(transfer_status_pb2.ListTransfersRequest()))
    await decode.close()
    states = [transfer.state for transfer in listed.transfers if transfer.rid == "retracted"]
    assert len(states) > 2
    assert set(states) == {types_pb2.TRANSFER_STATE_SUCCESS}


@needs_grpcurl
@pytest.mark.usefixtures("router")
async def test_a_person_with_a_certificate_looks_into_each_process(person: Files, closed: Cluster) -> None:
    own = ("-cacert", str(person.ca), "-cert", str(person.cert), "-key", str(person.key))
    ports = closed.ports
    for role, port in (("prefill", ports.prefill), ("decode", ports.decode), ("router", ports.grpc)):
        papers = (*own, "-servername", f"pd-{role}")
        address = f"{LOOPBACK}:{port}"
        assert "pd.v1.Generation" in (await grpcurl(address, "list", papers=papers)).out
        refused = await grpcurl(address, "pd.v1.Generation/Submit", data={}, papers=papers)
        assert "is for pd-router; the caller says alice.example" in refused.err
        assert (await grpcurl(address, "list", papers=own[:2], max_time_s=2)).code != 0
