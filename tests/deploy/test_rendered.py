"""The chart's pods, as they are rendered, come up, serve, are found healthy, and drain."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.control.certificates import Authority, Files
from tests.deploy.load import Answered, Question, ask
from tests.deploy.local_cluster import Cluster, installed
from tests.deploy.pods import Node, Seen
from tests.deploy.rendered import RELEASE, render

SMALL = {"engine": {"options": {"threads": 1, "kv-cache-tokens": 4096}}, "preStopSeconds": 1}
"""For two cores that do everything else too."""

SHORT = Question(tuple(range(40)), 8, streamed=False)
LONG = Question(tuple(range(40)), 400, streamed=True)


def router_url(cluster: Cluster, scheme: str = "http") -> str:
    (address,) = cluster.service(f"{RELEASE}-router")
    return f"{scheme}://{address}:8000"


def complete(answered: Answered) -> bool:
    return not answered.trouble and len(answered.token_ids) == answered.question.new_tokens


async def end_all(cluster: Cluster) -> None:
    """As when the release is uninstalled."""
    await asyncio.gather(*(pod.terminate() for pod in cluster.pods))


async def test_default_values_serve_and_end_without_cutting_an_answer(tmp_path: Path) -> None:
    async with installed(Node(tmp_path), render(SMALL)) as cluster:
        assert "success" in (await cluster.test()).lower()
        begun = asyncio.Event()
        running = asyncio.create_task(ask(router_url(cluster), LONG, begun=begun))
        await begun.wait()
        ends = asyncio.create_task(end_all(cluster))
        answered = await running
        health = {pod.template.role: pod.seen_in_drain for pod in cluster.pods}
        await ends
    assert complete(answered), answered
    assert health["router"] == health["decode"] == {Seen(alive=True, ready=False, draining=True)}


@pytest.mark.slow
async def test_tls_tickets_and_two_ranks_of_prefill(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    roles = ("router", "prefill", "decode")
    files = {role: authority.issue(f"pd-{role}", to=role) for role in roles}
    values = SMALL | {
        "tls": {"enabled": True, "existingSecrets": {role: f"{role}-papers" for role in roles}},
        "prefill": {"ranks": 2},
    }
    node = Node(tmp_path / "node", secrets={f"{role}-papers": secret(files[role]) for role in roles})
    node.directory.mkdir()
    async with installed(node, render(values)) as cluster:
        assert [pod.template.host_name for pod in cluster.of("prefill")] == [
            "pd-prefill-0-0.pd-prefill",
            "pd-prefill-0-1.pd-prefill",
        ]
        assert "success" in (await cluster.test()).lower()
        client = client_context(authority.issue(to="client"))
        assert complete(await ask(router_url(cluster, "https"), SHORT, client))
        await end_all(cluster)


@pytest.mark.slow
async def test_decode_alone_with_probes_that_are_programs(tmp_path: Path) -> None:
    values = SMALL | {"prefill": {"replicas": 0}, "probes": {"type": "exec"}}
    async with installed(Node(tmp_path), render(values)) as cluster:
        assert {pod.template.role for pod in cluster.pods} == {"router", "decode"}
        assert complete(await ask(router_url(cluster), SHORT))
        await cluster.test()
        await end_all(cluster)


def secret(files: Files) -> Mapping[str, bytes]:
    """As cert-manager makes them."""
    return {
        name: path.read_bytes() for name, path in zip(("tls.crt", "tls.key", "ca.crt"), files_of(files), strict=True)
    }


def files_of(files: Files) -> tuple[Path, Path, Path]:
    return files.cert, files.key, files.ca


def client_context(files: Files) -> ssl.SSLContext:
    """Knows the authority; addresses are not in certificates here."""
    context = ssl.create_default_context(cafile=str(files.ca))
    context.load_cert_chain(files.cert, files.key)
    return context
