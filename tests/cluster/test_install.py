"""The chart on a real Kubernetes: pods of the image that answer, through install, upgrade, rollback and uninstall."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.image import image_archive
from tests.cluster.kube import ROOT, Kube, eventually, running_kube
from tests.deploy.tools import Unavailable, kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

CHART = str(ROOT / "deploy/helm/pd-handoff")
VALUES = str(Path(__file__).parent / "values.yaml")
GRPCURL = str(Path(sys.executable).parent / "grpcurl")
RELEASE = "pd"
PATIENCE_S = 240.0
HELM_TIMEOUT = "10m"
PROMPT = "ROMEO.\n"


@pytest.fixture(scope="module")
def kube() -> Iterator[Kube]:
    try:
        with running_kube([image_archive()]) as running:
            yield running
    except Unavailable as why:
        pytest.skip(str(why))


@pytest.fixture(scope="module")
def release(kube: Kube) -> Iterator[Kube]:
    """The chart is installed, and ready as helm sees it."""
    kube.helm("install", RELEASE, CHART, f"--values={VALUES}", "--wait", f"--timeout={HELM_TIMEOUT}")
    yield kube
    kube.helm("uninstall", RELEASE, "--ignore-not-found", "--wait")


def upgrade(kube: Kube, *settings: str) -> None:
    kube.helm("upgrade", RELEASE, CHART, f"--values={VALUES}", *settings, "--wait", f"--timeout={HELM_TIMEOUT}")


def test_a_request_is_answered_and_both_sides_tell_its_room(release: Kube) -> None:
    """From outside the cluster, with kubectl and grpcurl."""
    with forwarded(release, f"service/{RELEASE}-router", 8000) as address:
        answer = generate(release, address)
    room = answer["meta_info"]["bootstrap_room"]
    assert answer["meta_info"]["completion_tokens"] == 8
    for role, port in (("prefill", 8998), ("decode", 8999)):
        [pod] = pods(release, role)
        transfer = transfer_of(release, pod, port, room)
        assert transfer["state"] == "TRANSFER_STATE_SUCCESS", transfer
        assert int(transfer["pages_done"]) > 0


def test_the_charts_own_test_passes(release: Kube) -> None:
    said = release.helm("test", RELEASE, "--logs", "--timeout=3m")
    assert "Succeeded" in said


def test_pages_go_from_pod_to_pod_over_tcp(release: Kube) -> None:
    """Pods have neither processes nor memory in common, and no RDMA device here."""
    peers = [peer for process in topology(release) for peer in process["peers"]]
    assert {peer["carrier"] for peer in peers} == {"tcp/eth0"}


def test_pods_run_as_nobody_in_particular_and_cannot_write_to_their_image(release: Kube) -> None:
    for role in ("router", "prefill", "decode"):
        [pod] = pods(release, role)
        assert release.kubectl("exec", pod, "--", "id", "-u").strip() == "10001"
        assert release.get("pod", pod)["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"]


def test_policies_and_budgets_are_there_for_each_role(release: Kube) -> None:
    """That they are there is all that can be seen: the pod network of this cluster enforces no policies."""
    for kind in ("networkpolicy", "poddisruptionbudget"):
        assert names(release, kind) == {f"{RELEASE}-{role}" for role in ("router", "prefill", "decode")}


def test_an_upgrade_keeps_the_ticket_key_and_its_second_decode_gets_requests_until_it_is_rolled_back(
    release: Kube,
) -> None:
    key = release.get("secret", f"{RELEASE}-tickets")["data"]
    upgrade(release, "--set=decode.replicas=2")
    assert release.get("secret", f"{RELEASE}-tickets")["data"] == key
    eventually(lambda: "" if len(proven(release)) == 2 else f"routes are {proven(release)}", PATIENCE_S)
    release.helm("rollback", RELEASE, "--wait", f"--timeout={HELM_TIMEOUT}")
    assert release.get("secret", f"{RELEASE}-tickets")["data"] == key
    eventually(lambda: "" if len(proven(release)) == 1 else f"routes are {proven(release)}", PATIENCE_S)
    assert generate(release)["meta_info"]["completion_tokens"] == 8


def test_a_rolling_upgrade_under_load_loses_no_request(release: Kube) -> None:
    before = {role: pods(release, role) for role in ("router", "prefill", "decode")}
    with load(release) as tally:
        upgrade(release, *(f"--set={role}.podAnnotations.upgraded=once" for role in before))
        eventually(lambda: rolled(release, before), PATIENCE_S)
    assert not tally["lost"]
    assert tally["whole"] > 10


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_a_pod_that_is_lost_is_replaced_and_requests_are_answered_again(release: Kube, role: str) -> None:
    [lost] = pods(release, role)
    release.kubectl("delete", "pod", lost, "--grace-period=0", "--force")
    release.kubectl("rollout", "status", f"deployment/{RELEASE}-{role}", "--timeout=180s")
    eventually(lambda: unanswered(release), PATIENCE_S)
    assert lost not in pods(release, role)


def test_uninstall_leaves_the_ticket_key_and_nothing_else(release: Kube) -> None:
    release.helm("uninstall", RELEASE, "--wait", "--timeout=3m")
    eventually(lambda: left_of(release), PATIENCE_S)
    assert f"{RELEASE}-tickets" in names(release, "secret")


def generate(kube: Kube, address: str = "") -> Any:
    """One answer, through the Service of the router unless another address is given."""
    body = json.dumps({"text": PROMPT, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}})
    url = f"http://{address or f'{router_address(kube)}:8000'}/generate"
    return json.loads(kube.run("curl", "--silent", "--show-error", "--fail-with-body", "--data", body, url))


def unanswered(kube: Kube) -> str:
    try:
        generate(kube)
    except AssertionError as failed:
        return str(failed)
    return ""


def router_address(kube: Kube) -> str:
    return str(kube.get("service", f"{RELEASE}-router")["spec"]["clusterIP"])


def pods(kube: Kube, role: str) -> list[str]:
    """Those that are not on their way out."""
    selector = f"--selector=app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component={role}"
    found = kube.get("pods", selector)["items"]
    return [pod["metadata"]["name"] for pod in found if "deletionTimestamp" not in pod["metadata"]]


def names(kube: Kube, kind: str) -> set[str]:
    return {item["metadata"]["name"] for item in kube.get(kind)["items"]}


def rolled(kube: Kube, before: dict[str, list[str]]) -> str:
    """Which pods from before are still there, even if they are going."""
    left = names(kube, "pods") & {pod for old in before.values() for pod in old}
    return f"still there: {sorted(left)}" if left else ""


def left_of(kube: Kube) -> str:
    """What is there of the release, but for the key."""
    kinds = "all,secret,configmap,serviceaccount,networkpolicy,poddisruptionbudget,ingress,role,rolebinding"
    items = kube.get(kinds, "--selector=app.kubernetes.io/part-of=pd-handoff")["items"]
    found = {f"{item['kind']}/{item['metadata']['name']}" for item in items}
    return " ".join(sorted(found - {f"Secret/{RELEASE}-tickets"}))


def topology(kube: Kube) -> Any:
    return json.loads(kube.kubectl("exec", f"deployment/{RELEASE}-router", "--", "pdctl", "topology", "--json"))


def proven(kube: Kube) -> list[str]:
    """Routes through which a request has gone, as the router has them."""
    [router] = [process for process in topology(kube) if process["role"] == "router"]
    routes = router["process"]["routes"]
    return [f"{route['prefill_address']} > {route['decode_address']}" for route in routes if route.get("proven")]


def transfer_of(kube: Kube, pod: str, port: int, room: int) -> Any:
    with forwarded(kube, f"pod/{pod}", port) as address:
        request = json.dumps({"bootstrap_room": str(room)})
        told = kube.run(GRPCURL, "-plaintext", "-d", request, address, "pd.v1.TransferStatus/GetTransfer")
        return json.loads(told)["transfer"]


@contextmanager
def forwarded(kube: Kube, target: str, port: int) -> Iterator[str]:
    """Where kubectl has it on this side."""
    forward = kube.start(str(kubectl()), "port-forward", target, f":{port}")
    assert forward.stdout is not None
    try:
        line = forward.stdout.readline()
        found = re.match(r"Forwarding from (127\.0\.0\.1:\d+) ", line)
        assert found, line
        yield found[1]
    finally:
        forward.terminate()
        forward.communicate()


@contextmanager
def load(kube: Kube) -> Iterator[dict[str, Any]]:
    """Requests all the time; what became of them is in the dictionary afterwards."""
    client = kube.start(sys.executable, "-m", "tests.cluster.load", router_address(kube), "8000")
    tally: dict[str, Any] = {}
    try:
        yield tally
    finally:
        said, _ = client.communicate()
        tally |= json.loads(said)
