"""Rolling updates under load: pods are replaced as Deployments do it, and nobody who asks notices."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from pd.v1 import inspection_pb2, inspection_pb2_grpc, transfer_status_pb2, transfer_status_pb2_grpc

from tests.deploy.load import Answered, Question, ask, load
from tests.deploy.local_cluster import Cluster, installed
from tests.deploy.pods import Node, Pod
from tests.deploy.rendered import RELEASE, render, templates
from tests.e2e.harness import eventually, long_model
from tests.engine.oracle import Oracle
from tests.tiny_models import VOCAB_SIZE

PORTS = {"router": 8001, "prefill": 8998, "decode": 8999}
ENGINES = ("prefill", "decode")
OTHER = "qwen3"
CLIENTS = 3

IN_PLACE = {"strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}}
"""Where there is no room for one more."""


def values(family: str = "llama", page_size: int = 16, **more: Any) -> dict[str, Any]:
    options = {"threads": 1, "dtype": "float32", "page-size": page_size, "kv-cache-tokens": 12288}
    return {
        "model": {"source": "pvc", "subPath": f"tiny-{family}", "pvc": {"claimName": "models"}},
        "engine": {"options": options},
        "preStopSeconds": 1,
        "drainTimeoutSeconds": 30,
        **more,
    }


def node_with_models(directory: Path) -> Node:
    models = directory / "models"
    models.mkdir()
    for family in ("llama", OTHER):
        (models / f"tiny-{family}").symlink_to(long_model(family))
    return Node(directory, {"models": models})


def questions() -> list[Question]:
    """Answers of one to three seconds on two cores, half of them streamed."""
    rng = random.Random(11)
    return [
        Question(tuple(rng.choices(range(1, VOCAB_SIZE), k=length)), rng.randrange(150, 450), streamed=turn % 2 == 0)
        for turn, length in enumerate((5, 33, 64, 150, 300, 700))
    ]


def routers(cluster: Cluster) -> list[str]:
    return [f"http://{address}:8000" for address in cluster.service(f"{RELEASE}-router")]


def assert_right(answered: Sequence[Answered], *families: str) -> None:
    """Each is what one of these models alone would have answered."""
    oracles = [Oracle(long_model(family)) for family in families]
    for each in answered:
        wanted = [oracle.tokens(each.question.prompt, each.question.new_tokens) for oracle in oracles]
        assert (each.trouble, each.token_ids in wanted) == ("", True), each


def target(pod: Pod) -> str:
    return f"{pod.address}:{PORTS[pod.template.role]}"


async def holds(pod: Pod) -> str:
    """What is left of rooms in an engine; empty: nothing."""
    async with grpc.aio.insecure_channel(target(pod)) as channel:
        stub: Any = transfer_status_pb2_grpc.TransferStatusStub(channel)
        pool = await stub.GetPool(transfer_status_pb2.GetPoolRequest())
        quarantine = await stub.ListQuarantine(transfer_status_pb2.ListQuarantineRequest())
    pages = pool.pages_total - pool.pages_free - pool.pages_cached
    held = (pages, pool.slots_total - pool.slots_free, pool.live_rooms, len(quarantine.rooms))
    return f"{pod} holds {held} pages, slots, rooms, rooms in quarantine" if any(held) else ""


async def proven_routes(router: Pod) -> Mapping[tuple[str, str], bool]:
    """Every route of a router, by prefill and decode."""
    async with grpc.aio.insecure_channel(target(router)) as channel:
        stub: Any = inspection_pb2_grpc.InspectionStub(channel)
        process = await stub.GetProcess(inspection_pb2.GetProcessRequest())
    return {(route.prefill_address, route.decode_address): route.proven for route in process.routes}


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engines", [{}, IN_PLACE], ids=["one-more", "in-place"])
async def test_all_roles_are_replaced_and_no_request_is_lost(engines: Mapping[str, Any], tmp_path: Path) -> None:
    two = {"replicas": 2}
    objects = render(values(prefill={**two, **engines}, decode={**two, **engines}, router=two))
    async with installed(node_with_models(tmp_path), objects) as cluster:
        first = list(cluster.pods)
        async with load(CLIENTS, questions(), partial(routers, cluster)) as under_way:
            await under_way.answers(6)
            for role in (*ENGINES, "router"):
                await cluster.upgrade(objects, role)
                await under_way.answers(6)
        assert all(pod.ended.is_set() for pod in first)
        for pod in (pod for role in ENGINES for pod in cluster.of(role)):
            await eventually(partial(holds, pod))
    assert_right(under_way.answered, "llama")


@pytest.mark.chaos
@pytest.mark.timeout(900)
async def test_groups_of_ranks_are_replaced_one_after_the_other(tmp_path: Path) -> None:
    """A rank that is missing takes its whole group out, so the next one waits until all routes are proven again.

    Lost is only what asks a group's directory in the moment in which its first rank ends.
    """
    objects = render(values(prefill={"replicas": 2, "ranks": 2}))
    async with installed(node_with_models(tmp_path), objects) as cluster:
        (router,) = cluster.of("router")

        async def routes_are_missing() -> str:
            routes = await proven_routes(router)
            return "" if len(routes) == 4 and all(routes.values()) else f"{routes}"

        await eventually(routes_are_missing)
        async with load(CLIENTS, questions(), partial(routers, cluster)) as under_way:
            for rank in reversed(cluster.of("prefill")):  # as a StatefulSet does: the last first
                await rank.terminate()
                await cluster.add([rank.template])
                await under_way.answers(3)
                await eventually(routes_are_missing)
    lost = [each for each in under_way.answered if each.trouble]
    assert {json.loads(each.trouble)["code"] for each in lost} <= {"PEER_LOST"}
    assert len(lost) <= 2 * CLIENTS, lost
    assert_right([each for each in under_way.answered if not each.trouble], "llama")


@pytest.mark.slow
async def test_an_answer_longer_than_the_drain_ends_with_an_error(tmp_path: Path) -> None:
    objects = render(values(drainTimeoutSeconds=2, router={"replicas": 2}))
    async with installed(node_with_models(tmp_path), objects) as cluster:
        leaving, staying = cluster.of("router")
        for through, stopped in ((leaving, leaving), (staying, cluster.of("decode")[0])):
            url, begun = f"http://{through.address}:8000", asyncio.Event()
            too_long = [Question((1, 2, 3), 8000, streamed) for streamed in (True, False)]
            asked = [asyncio.create_task(ask(url, question, begun=begun)) for question in too_long]
            await begun.wait()
            await stopped.terminate()
            for answered in await asyncio.gather(*asked):
                assert json.loads(answered.trouble)["code"] == "SHUTTING_DOWN", answered


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("change", [{"page_size": 64}, {"family": OTHER}], ids=["page-size", "model"])
async def test_unlike_pods_are_never_paired(change: Mapping[str, Any], tmp_path: Path) -> None:
    old, new = render(values()), render(values(**change))
    async with installed(node_with_models(tmp_path), old) as cluster:
        (router,) = cluster.of("router")
        before = {role: cluster.of(role)[0] for role in ENGINES}
        async with load(2, questions(), partial(routers, cluster)) as under_way:
            await under_way.answers(2)
            added = await cluster.add([each for each in templates(new) if each.role in ENGINES])
            after = {pod.template.role: pod for pod in added}
            like = {tuple(target(pods[role]) for role in ENGINES) for pods in (before, after)}

            async def unlike_until_proven() -> str:
                routes = await proven_routes(router)
                assert len(routes) <= 4
                proven = {route for route, is_proven in routes.items() if is_proven}
                assert proven <= like
                return "" if proven == like else f"{routes}"

            await eventually(unlike_until_proven)
            await under_way.answers(6)
            assert await unlike_until_proven() == ""
            await asyncio.gather(*(pod.terminate() for pod in before.values()))
            await under_way.answers(2)

            async def old_ones_are_known() -> str:
                routes = await proven_routes(router)
                return "" if routes == {tuple(target(after[role]) for role in ENGINES): True} else f"{routes}"

            await eventually(old_ones_are_known)
            last = len(under_way.answered)
            await under_way.answers(6)
        said = re.findall(r"the probe through .* failed, trying again: .* cannot be paired", router.log)
        assert len(said) == 2, said
    family = change.get("family", "llama")
    assert_right(under_way.answered, "llama", family)
    assert_right(under_way.answered[last + 2 :], family)  # two may have been under way
