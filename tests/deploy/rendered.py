"""The chart as helm renders it, and the pods that its workloads make."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.deploy.tools import helm

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "pd-handoff"
RELEASE = "pd"

_COMPONENT = "app.kubernetes.io/component"
_INDEX = "apps.kubernetes.io/pod-index"

Object = dict[str, Any]


def run_helm(*arguments: str | Path, given: str = "") -> subprocess.CompletedProcess[str]:
    """Whatever comes of it; `given` is its standard input."""
    command = [str(helm()), *map(str, arguments)]
    return subprocess.run(command, input=given, capture_output=True, text=True, check=False)


def render(values: Mapping[str, Any], *options: str) -> list[Object]:
    """All objects of a release with these values; `options` are more of helm's."""
    done = run_helm("template", RELEASE, CHART, "--values", "-", *options, given=yaml.safe_dump(dict(values)))
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each is not None]


def of_kind(objects: Sequence[Object], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


@dataclass(frozen=True, slots=True)
class Template:
    """A pod as its workload makes it, with one container."""

    workload: str
    labels: Mapping[str, str]
    spec: Object
    host_name: str | None = None
    """Of a StatefulSet's pod, which others know by its own name."""
    surges: bool = False
    """Whether its workload starts a new pod before it ends the old one."""

    @property
    def role(self) -> str:
        return self.labels[_COMPONENT]

    @property
    def container(self) -> Object:
        (container,) = self.spec["containers"]
        found: Object = container
        return found


def templates(objects: Sequence[Object], *kinds: str) -> list[Template]:
    """One for each pod of these kinds of workloads; all that run for ever if none is named."""
    return [
        template
        for workload in of_kind(objects, *(kinds or ("Deployment", "StatefulSet")))
        for template in _POD_TEMPLATES[workload["kind"]](workload)
    ]


def _of_deployment(workload: Object) -> Iterator[Template]:
    template = workload["spec"]["template"]
    surges = workload["spec"]["strategy"]["rollingUpdate"]["maxSurge"] != 0
    for _ in range(workload["spec"].get("replicas", 1)):  # an autoscaler begins with one
        yield Template(workload["metadata"]["name"], template["metadata"]["labels"], template["spec"], surges=surges)


def _of_stateful_set(workload: Object) -> Iterator[Template]:
    name, template = workload["metadata"]["name"], workload["spec"]["template"]
    for index in range(workload["spec"]["replicas"]):
        labels = {**template["metadata"]["labels"], _INDEX: str(index)}
        host_name = f"{name}-{index}.{workload['spec']['serviceName']}"
        yield Template(name, labels, template["spec"], host_name)


def _of_pod(pod: Object) -> Iterator[Template]:
    yield Template(pod["metadata"]["name"], pod["metadata"]["labels"], pod["spec"])


_POD_TEMPLATES = {"Deployment": _of_deployment, "StatefulSet": _of_stateful_set, "Pod": _of_pod}
