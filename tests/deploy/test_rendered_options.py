"""Whatever the chart renders, the processes understand: every flag, every variable, every value of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.deploy.pods import Node, Pod
from tests.deploy.programs import from_environment, parsed
from tests.deploy.rendered import Object, render, templates
from tests.deploy.value_sets import NAMES, objects


def pods_of(rendered: Sequence[Object], directory: Path) -> list[Pod]:
    """All kinds of them; whatever volumes and secrets they name are there."""
    node = Node(directory, defaultdict(lambda: directory), defaultdict(dict))
    found = templates(rendered, "Deployment", "StatefulSet", "Pod")
    return [Pod(template, node, lambda: None) for template in found]


@pytest.mark.parametrize("name", NAMES)
def test_processes_understand_their_variables_and_arguments(name: str, tmp_path: Path) -> None:
    for pod in pods_of(objects(name), tmp_path):
        own = {name: text for name, text in pod.environment.items() if name.startswith("PD_")}
        program = pod.command[:2] if pod.command[0] == "pdctl" else pod.command[:1]
        understood = from_environment(parsed(program, own))
        assert len(understood) == len(own), (str(pod), understood, sorted(own))
        parsed(pod.command, own)


def test_probes_that_are_programs_are_understood(tmp_path: Path) -> None:
    for pod in pods_of(render({"probes": {"type": "exec"}}), tmp_path):
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            if probe := pod.template.container.get(kind):
                parsed(probe["exec"]["command"], pod.environment)
