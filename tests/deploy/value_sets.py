"""The chart with the values of tests/deploy/values: what helm makes of them, and what it says to wrong ones."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.deploy.rendered import CHART, RELEASE, Object, run_helm
from tests.deploy.rules import DASHBOARD, RULES

HERE = Path(__file__).parent
NAMES = sorted(file.stem for file in (HERE / "values").glob("*.yaml"))
KUBERNETES = dict.fromkeys(NAMES, "1.37.0") | {"old-kubernetes": "1.20.2"}
"""The cluster that each set is for."""

_KEY = re.compile(r"(?m)^  keys: (\S+)$")
_FILES = {
    DASHBOARD: re.compile(r"(?m)^  pd-handoff\.json: \|\n(?:    .*\n)+"),
    RULES: re.compile(r"(?m)^  groups:\n(?:  .*\n)+"),
}


class _Strict(yaml.CSafeLoader):  # type: ignore[misc]
    """Refuses a map that has a key twice, as Kubernetes does."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key stands twice in {keys}, line {node.start_mark.line}"
        return super().construct_mapping(node, deep)


def values_file(name: str) -> Path:
    return HERE / "values" / f"{name}.yaml"


@cache
def rendered(name: str, kubernetes: str = "") -> str:
    """What helm makes of a set."""
    version = kubernetes or KUBERNETES[name]
    return _helm("template", RELEASE, CHART, "--kube-version", version, "--values", values_file(name))


@cache
def objects(name: str, kubernetes: str = "") -> list[Object]:
    """The same, read strictly."""
    return _read(rendered(name, kubernetes))


def objects_of(release: str, name: str) -> list[Object]:
    """The objects of a release that has another name."""
    return _read(_helm("template", release, CHART, "--values", values_file(name)))


def golden(name: str) -> str:
    """The same without what is random, and without the two files that are in it as they are."""
    text = rendered(name)
    for key in _KEY.findall(text):
        assert len(base64.b64decode(key)) == 48
        text = text.replace(key, "RANDOM")
    for file, place in _FILES.items():
        text = place.sub(f"  # {file.name}\n", text)
    return text


def notes(name: str) -> str:
    """What helm says after an installation."""
    said = _helm("install", RELEASE, CHART, "--dry-run=client", "--values", values_file(name))
    return said.partition("\nNOTES:\n")[2]


def lint(name: str) -> None:
    """Fails if helm finds anything to say against the chart."""
    _helm("lint", "--strict", CHART, "--kube-version", KUBERNETES[name], "--values", values_file(name))


def refusal(values: Mapping[str, Any], kubernetes: str) -> str:
    """What helm says to wrong values."""
    wrong = yaml.safe_dump(values)
    done = run_helm("template", RELEASE, CHART, "--kube-version", kubernetes, "--values", "-", given=wrong)
    assert done.returncode != 0, f"these are taken: {wrong}"
    return done.stderr


def _read(text: str) -> list[Object]:
    return [each for each in yaml.load_all(text, _Strict) if each is not None]


def _helm(*arguments: str | Path) -> str:
    done = run_helm(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
