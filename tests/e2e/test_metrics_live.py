"""What three real processes answer to Prometheus is what the documentation lists and what the dashboard asks for."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from pd.v1 import bootstrap_pb2, bootstrap_pb2_grpc, transfer_status_pb2, types_pb2
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from demo.cluster import LOOPBACK, Cluster, Process
from tests.deploy.rules import DOCS, RULES, named, queries, rules
from tests.e2e.harness import Client, client_of, eventually, running_cluster

PROMPT = [7 + place % 90 for place in range(300)]
OTHER = [9 + place % 80 for place in range(130)]
NEW_TOKENS = 12
ENGINES = {"prefill", "decode"}
PLACES = {"all": ENGINES | {"router"}, "engines": ENGINES, **{name: {name} for name in ("prefill", "decode", "router")}}

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: apt-get install prometheus)"
)


@dataclass(frozen=True, slots=True)
class Scraped:
    """One process's answer."""

    families: dict[str, Metric]

    def value(self, sample: str, **labels: str) -> float:
        """The sum of all samples of this name that have these labels."""
        return sum(
            found.value
            for family in self.families.values()
            for found in family.samples
            if found.name == sample and labels.items() <= found.labels.items()
        )

    @property
    def series(self) -> set[tuple[str, ...]]:
        samples = (sample for family in self.families.values() for sample in family.samples)
        return {(sample.name, *map(str, sorted(sample.labels.items()))) for sample in samples}


def port_of(process: Process) -> int:
    found = re.search(r"metrics on \S+:(\d+)/metrics", process.log())
    assert found is not None, process.log()
    return int(found[1])


def processes(running: Cluster) -> dict[str, Process]:
    return {"prefill": running.prefill, "decode": running.decode, "router": running.router}


async def scrape(running: Cluster) -> dict[str, Scraped]:
    """What each process answers now."""
    async with httpx.AsyncClient() as client:
        answers = {
            name: await client.get(f"http://{LOOPBACK}:{port_of(process)}/metrics")
            for name, process in processes(running).items()
        }
    return {
        name: Scraped({family.name: family for family in text_string_to_metric_families(answer.text)})
        for name, answer in answers.items()
    }


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with running_cluster(environment={"PD_METRICS_PORT": "0"}) as running:
        yield running


@pytest.fixture
async def client(pair: Cluster) -> AsyncIterator[Client]:
    async with client_of(pair) as client:
        yield client


async def some_of_everything(client: Client) -> None:
    """Answers, a prefix that is found again, a failure over gRPC and one over HTTP, a room that fails."""
    for prompt in (PROMPT, PROMPT, OTHER):
        await client.generate(prompt, max_new_tokens=NEW_TOKENS)
    with pytest.raises(grpc.aio.AioRpcError):
        await client.generate([])
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"http://{LOOPBACK}:{client.cluster.ports.http}/made/up")).status_code == 404
    for name in ENGINES:
        await client.abort(name, 2**40 + 1)


async def page_bytes(client: Client) -> int:
    """Keys and values, by the layout that prefill publishes."""
    async with grpc.aio.insecure_channel(f"{LOOPBACK}:{client.cluster.ports.prefill}") as channel:
        stub = bootstrap_pb2_grpc.BootstrapStub(channel)
        topology = await stub.GetTopology(bootstrap_pb2.GetTopologyRequest())
    layout = topology.ranks[0].layout
    assert layout.dtype == "float32"
    return 2 * layout.layers * layout.kv_heads * layout.head_dim * layout.page_size * 4


async def pages_done(client: Client, name: str) -> int:
    """Pages of all rooms that went well on this side."""
    wanted = transfer_status_pb2.ListTransfersRequest(states=[types_pb2.TRANSFER_STATE_SUCCESS])
    listed = await client.transfers(name).ListTransfers(wanted)
    return sum(transfer.pages_done for transfer in listed.transfers)


async def test_the_documentation_lists_exactly_the_metrics_that_exist(pair: Cluster, client: Client) -> None:
    await some_of_everything(client)
    row = r"^\| `((?:pd|process)_\w+)` \| (\w+) \| ([^|]*?) ?\| (\w+) \| .+ \|$"
    documented = {
        (name, kind, frozenset(re.findall(r"\w+", labels)), place)
        for name, kind, labels, where in re.findall(row, DOCS.read_text(), re.MULTILINE)
        for place in PLACES[where]
    }
    assert {
        found for place, scraped in (await scrape(pair)).items() for found in existing(place, scraped)
    } == documented


def existing(place: str, scraped: Scraped) -> Iterator[tuple[str, str, frozenset[str], str]]:
    for family in scraped.families.values():
        if family.samples:
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = frozenset(label for sample in family.samples for label in sample.labels if label != "le")
            yield name, family.type, labels, place


async def test_every_metric_that_dashboard_and_alerts_name_exists(pair: Cluster, client: Client) -> None:
    await some_of_everything(client)
    exist = {name for scraped in (await scrape(pair)).values() for name, *_ in scraped.series}
    expressions = [*queries().values(), *(rule["expr"] for rule in rules())]
    assert named(expressions) - exist == set()


async def test_bytes_of_rooms_are_pages_times_the_bytes_of_a_page(pair: Cluster, client: Client) -> None:
    """On both sides; the metadata row, which travels too, is not among them."""
    await client.generate(OTHER[::-1], max_new_tokens=1)
    scraped, bytes_per_page = await scrape(pair), await page_bytes(client)
    for name, direction in (("prefill", "sent"), ("decode", "received")):
        pages = await pages_done(client, name)
        assert pages > 0
        noted = scraped[name].value("pd_transfer_total_bytes_sum", direction=direction)
        assert noted == pages * bytes_per_page, name


async def test_the_router_counts_requests_as_clients_see_them(pair: Cluster, client: Client) -> None:
    before = (await scrape(pair))["router"]
    answers = [await client.generate(PROMPT, max_new_tokens=NEW_TOKENS) for _ in range(2)]
    with pytest.raises(grpc.aio.AioRpcError):
        await client.generate([])
    after = (await scrape(pair))["router"]

    def rise(sample: str, **labels: str) -> float:
        return after.value(sample, **labels) - before.value(sample, **labels)

    tokens = sum(len(answer.token_ids) for answer in answers)
    assert rise("pd_requests_total", outcome="SUCCESS") == 2
    assert rise("pd_time_to_first_token_seconds_count") == 2
    assert rise("pd_inter_token_seconds_count") == tokens - 2
    assert rise("pd_generated_tokens_total") == tokens
    assert rise("pd_prompt_tokens_total") == 2 * len(PROMPT)
    assert rise("pd_cached_tokens_total") == sum(answer.last.usage.cached_tokens for answer in answers) > 0
    assert after.value("pd_requests_open") == 0


async def test_more_rooms_are_not_more_series(pair: Cluster, client: Client) -> None:
    await some_of_everything(client)
    before = {name: scraped.series for name, scraped in (await scrape(pair)).items()}
    for place in range(12):
        await client.generate([11 + place, *OTHER], max_new_tokens=3, rid=f"request-{place}")
    assert {name: scraped.series for name, scraped in (await scrape(pair)).items()} == before


# --- with a real Prometheus ---

QUIET = {"Handoffs that fail A", "Workers and routes A", "Workers and routes B"}
"""Panels that show nothing when nothing has failed lately."""


@contextmanager
def prometheus(running: Cluster, directory: Path) -> Iterator[str]:
    """One that scrapes the three processes five times a second and has the rules; gives its address."""
    jobs = [
        {"job_name": f"pd-{name}", "static_configs": [{"targets": [f"{LOOPBACK}:{port_of(process)}"]}]}
        for name, process in processes(running).items()
    ]
    every = {  # its configuration is YAML, so JSON will do
        "scrape_interval": "200ms",
        "scrape_timeout": "200ms",
        "evaluation_interval": "1s",
    }
    config = directory / "prometheus.yaml"
    config.write_text(json.dumps({"global": every, "rule_files": [str(RULES)], "scrape_configs": jobs}))
    with socket.create_server((LOOPBACK, 0)) as free:
        address = f"{LOOPBACK}:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={directory}/data"]
    log = (directory / "log").open("wb")
    child = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        child.terminate()
        child.wait()
        log.close()


@needs_prometheus
async def test_prometheus_answers_every_query_of_the_dashboard(pair: Cluster, client: Client, tmp_path: Path) -> None:
    await some_of_everything(client)  # Prometheus sees a counter rise only if it was there before
    with prometheus(pair, tmp_path) as address:
        async with httpx.AsyncClient(base_url=f"{address}/api/v1") as http:
            await eventually(lambda: not_scraped(http))
            await some_of_everything(client)

            async def unanswered() -> str:
                asked = {panel: await ask(http, query) for panel, query in queries().items() if panel not in QUIET}
                return ", ".join(panel for panel, answer in asked.items() if not answer)

            await eventually(unanswered)
            for query in [*queries().values(), *(rule["expr"] for rule in rules())]:
                await ask(http, query)
            firing = (await http.get("/alerts")).json()["data"]["alerts"]
            assert [alert["labels"]["alertname"] for alert in firing if alert["state"] == "firing"] == []


async def ask(http: httpx.AsyncClient, query: str) -> list[object]:
    """What Prometheus says; fails when it does not understand."""
    answer = (await http.post("/query", data={"query": query})).json()
    assert answer["status"] == "success", (query, answer)
    return list(answer["data"]["result"])


async def not_scraped(http: httpx.AsyncClient) -> str:
    try:
        up = await ask(http, "up == 1")
    except (httpx.TransportError, ValueError) as starting:
        return f"not ready: {starting}"
    return "" if len(up) == 3 else f"scraped: {up}"
