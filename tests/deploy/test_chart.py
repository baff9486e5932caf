"""The chart's generated files are fresh, helm finds nothing wrong with it, and it makes what it made before."""

from __future__ import annotations

import os
import re

import pytest
import yaml  # type: ignore[import-untyped]

from deploy.helm.generate import files
from deploy.helm.values import all_values
from tests.deploy.rendered import CHART, RELEASE, of_kind
from tests.deploy.rules import DASHBOARD, RULES
from tests.deploy.value_sets import HERE, NAMES, golden, lint, notes, objects

UPDATING = "UPDATE_GOLDENS" in os.environ
"""Set by `make chart`: goldens are written, not compared."""

each_set = pytest.mark.parametrize("name", NAMES)


@pytest.mark.parametrize("name", files())
def test_schema_and_readme_are_what_make_chart_makes(name: str) -> None:
    assert (CHART / name).read_text() == files()[name]


def test_roles_have_the_same_values_but_for_what_only_one_can_have() -> None:
    named = {section.path[0]: {member.path[-1] for member in section.members} for section in all_values().members}
    assert named["decode"] == named["prefill"] - {"ranks"}
    assert named["router"] == named["decode"] | {"service", "ingress"}


@each_set
def test_helm_finds_nothing_wrong(name: str) -> None:
    lint(name)


@each_set
def test_what_is_made_is_what_was_made(name: str) -> None:
    """After a change that is meant: make chart, and look at the difference."""
    file = HERE / "goldens" / f"{name}.yaml"
    if UPDATING:
        file.write_text(golden(name))
    assert golden(name) == file.read_text()


def test_no_golden_is_left_of_a_set_that_is_gone() -> None:
    assert sorted(file.stem for file in (HERE / "goldens").glob("*.yaml")) == NAMES


def test_rules_and_dashboard_are_installed_as_they_are() -> None:
    (rule,) = of_kind(objects("observed"), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(RULES.read_text())
    (board,) = of_kind(objects("observed"), "ConfigMap")
    assert board["data"] == {"pd-handoff.json": DASHBOARD.read_text()}


@each_set
def test_notes_name_what_there_is(name: str) -> None:
    said = notes(name)
    assert said.startswith(f"{RELEASE} starts: ")
    of_pods = {f"pod/{each['metadata']['name']}-0" for each in of_kind(objects(name), "StatefulSet")}
    known = {f"{each['kind'].lower()}/{each['metadata']['name']}" for each in objects(name)} | of_pods
    named = set(re.findall(r"\b(?:deployment|service|pod)/[a-z0-9-]+", said))
    assert named
    assert named <= known


def test_notes_name_the_page_only_if_it_is_served() -> None:
    assert "/ui" in notes("default")
    assert "/ui" not in notes("tls-secrets")


def test_nothing_is_installed_twice_under_one_name() -> None:
    for name in NAMES:
        made = [(each["kind"], each["metadata"]["name"]) for each in objects(name)]
        assert len(made) == len(set(made)), name
