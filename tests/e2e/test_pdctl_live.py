"""pdctl on real processes with certificates and tickets, as a person with papers uses it."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pd.v1 import generation_pb2_grpc

from demo.cluster import LOOPBACK, READY_TIMEOUT_S, Cluster
from pd_common.control.connection import dial_with
from pd_common.types import Role
from tests.cli.pdctl_runs import Ended, run_pdctl
from tests.control.certificates import Authority, Files
from tests.e2e.harness import PATIENCE_S, make_request, started_cluster

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Closed:
    """A cluster, and the papers of a person."""

    cluster: Cluster
    person: Files
    keys: Path

    @property
    def prefill(self) -> str:
        return f"{LOOPBACK}:{self.cluster.ports.prefill}"

    @property
    def decode(self) -> str:
        return f"{LOOPBACK}:{self.cluster.ports.decode}"

    async def pdctl(self, *words: str, router: bool = True) -> Ended:
        """As the person types it, who has told the environment of the papers and, mostly, of the router."""
        papers = {"PD_TLS_CERT": self.person.cert, "PD_TLS_KEY": self.person.key, "PD_TLS_CA": self.person.ca}
        environment = {"COLUMNS": "120", **{name: str(path) for name, path in papers.items()}}
        if router:
            environment["PD_ROUTER"] = f"{LOOPBACK}:{self.cluster.ports.grpc}"
        return await run_pdctl(environment, *words)


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Closed]:
    directory = tmp_path_factory.mktemp("tls")
    authority = Authority(directory)
    prefill, decode, router = (authority.issue(name, to=name) for name in ("pd-prefill", "pd-decode", "pd-router"))
    keys = directory / "keys"
    keys.write_text("k" * 40)
    environment = {
        "PD_TLS_CERT": str(router.cert),
        "PD_TLS_KEY": str(router.key),
        "PD_TLS_CA": str(router.ca),
        "PD_TICKET_KEY_FILE": str(keys),
    }
    with started_cluster(
        prefill_flags=("--tls-cert", str(prefill.cert), "--tls-key", str(prefill.key)),
        decode_flags=("--tls-cert", str(decode.cert), "--tls-key", str(decode.key)),
        environment=environment,
    ) as running:
        yield Closed(running, authority.issue("alice.example", to="alice"), keys)


@pytest.fixture
async def generation(closed: Closed) -> AsyncIterator[Any]:
    """The router's, when a pair is proven."""
    router = dial_with(closed.person.tls())(f"{LOOPBACK}:{closed.cluster.ports.grpc}", Role.ROUTER)
    health: Any = health_pb2_grpc.HealthStub(router.channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=READY_TIMEOUT_S, wait_for_ready=True)
    async for answer in watch:
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            break
    watch.cancel()
    yield generation_pb2_grpc.GenerationStub(router.channel)
    await router.close()


async def until_over(answer: AsyncIterator[Any]) -> None:
    async for _ in answer:
        pass


async def test_a_served_room_is_listed_shown_and_traced(closed: Closed, generation: Any) -> None:
    request = make_request(list(range(1, 300)), max_new_tokens=4, rid="chat-7")
    outputs = [response.output async for response in generation.Generate(request, timeout=PATIENCE_S)]
    room = str(outputs[-1].bootstrap_room)
    rooms, shown, trace = await asyncio.gather(
        closed.pdctl("rooms"), closed.pdctl("room", room), closed.pdctl("trace", room)
    )
    assert [ended.code for ended in (rooms, shown, trace)] == [0, 0, 0], (rooms.err, shown.err, trace.err)
    (line,) = [line for line in rooms.out.splitlines() if "chat-7" in line]
    assert line.split()[:5] == [room, "chat-7", "success", "success", "19"]
    assert f"sent it to {closed.prefill} > {closed.decode}, because " in shown.out
    entered = re.findall("bootstrapping|waiting|transferring|success", shown.out)
    assert entered[:4] == ["bootstrapping", "waiting", "transferring", "success"]
    assert (entered[4], entered[-1]) == ("bootstrapping", "success")
    for stage in ("dispatch", "chunk compute", "chunk transfer", "gate", "decode steps", "time to first token"):
        assert stage in trace.out


async def test_a_prompt_is_tried_and_every_process_is_ready(closed: Closed, generation: Any) -> None:
    router = f"{LOOPBACK}:{closed.cluster.ports.grpc}"
    tried = await closed.pdctl("try", "1 2 3 4 5 6 7 8 9", "--max-new-tokens", "4")
    assert tried.code == 0, tried.err
    for name, address in ("prefill", closed.prefill), ("decode ", closed.decode):
        assert re.search(rf"^{name} {address}  success  [1-9]\d* pages?, ", tried.out, re.MULTILINE), tried.out
    asked = await asyncio.gather(*(closed.pdctl("health", each) for each in (router, closed.prefill, closed.decode)))
    assert asked == [Ended("SERVING\n", "", 0)] * 3


async def test_a_person_sees_the_topology_and_what_is_not_for_persons(closed: Closed, generation: Any) -> None:
    ended = await closed.pdctl("topology")
    assert ended.code == 0, ended.err
    assert re.search(rf"{closed.prefill} +{closed.decode} +(cma|tcp)", ended.out)
    assert "proven" in ended.out
    assert f"directory at {closed.prefill}: /pd.v1.Bootstrap/GetTopology is for pd-decode or pd-router" in ended.out


async def test_an_answer_that_is_being_written_is_ended_at_the_router(closed: Closed, generation: Any) -> None:
    answer = aiter(generation.Generate(make_request([1, 2, 3], max_new_tokens=8000), timeout=60))
    room = str((await anext(answer)).output.bootstrap_room)
    ended = await closed.pdctl("abort", room, "--message", "enough")
    assert (ended.code, ended.err) == (0, ""), ended.out
    assert ended.out.endswith(f"room {room} is quiet: nothing of it is written any more\n")
    with pytest.raises(grpc.aio.AioRpcError, match="enough"):
        await until_over(answer)


async def test_without_a_router_a_side_wants_a_ticket(closed: Closed, generation: Any) -> None:
    answer = aiter(generation.Generate(make_request([1, 2, 3], max_new_tokens=8000), timeout=60))
    room = str((await anext(answer)).output.bootstrap_room)
    begin = ("abort", room, "--process", closed.decode)
    bare = await closed.pdctl(*begin, router=False)
    assert (bare.code, bare.err) == (1, f"Error: room {room} needs a ticket; give --ticket-key-file or --ticket\n")
    signed = await closed.pdctl(*begin, "--ticket-key-file", str(closed.keys), router=False)
    assert signed.code == 0, signed
    with pytest.raises(grpc.aio.AioRpcError, match="aborted by hand"):
        await until_over(answer)


async def test_a_process_that_has_stopped_is_shown_beside_the_others(closed: Closed, generation: Any) -> None:
    closed.cluster.decode.send(signal.SIGSTOP)
    try:
        ended = await closed.pdctl("topology")
    finally:
        closed.cluster.decode.send(signal.SIGCONT)
    assert ended.code == 0, ended.err
    assert f"decode {closed.decode} does not answer: " in ended.out
    assert any(line.startswith(f"prefill {closed.prefill}") for line in ended.out.splitlines())
