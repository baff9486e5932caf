"""Whatever the chart renders, the processes understand: every flag, every variable, every value of it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

import click
import pytest
from click.core import ParameterSource

import services.decode.__main__ as decode
import services.prefill.__main__ as prefill
import services.router.__main__ as router
from pd_common.cli.main import main as pdctl
from tests.deploy.pods import Node, Pod
from tests.deploy.rendered import Object, render, templates
from tests.deploy.value_sets import NAMES, objects

PROGRAMS: Mapping[str, click.Command] = {
    "pd-router": router.main,
    "pd-prefill": prefill.main,
    "pd-decode": decode.main,
}


def parsed(command: Sequence[str], environment: Mapping[str, str]) -> click.Context:
    """Raises click's UsageError as the program would print it."""
    program, *words = command
    with patch.dict(os.environ, environment, clear=True):
        if program != "pdctl":
            return PROGRAMS[program].make_context(program, words)
        name, *words = words
        subcommand = pdctl.get_command(click.Context(pdctl), name)
        assert subcommand is not None, name
        return subcommand.make_context(name, words)


def from_environment(context: click.Context) -> set[str]:
    """Parameters whose value was a variable's."""
    return {name for name in context.params if context.get_parameter_source(name) is ParameterSource.ENVIRONMENT}


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
