"""The Dockerfile against the repository: what it copies is there and sent to it, versions are those used here."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import PurePath
from typing import Any

import pytest

from tests.cluster.image import CONTEXT, DOCKERFILE, PYTHON_IMAGE, ROOT

TEXT = DOCKERFILE.read_text().replace("\\\n", " ")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)


def copied() -> Iterator[PurePath]:
    """What comes from the repository, and not from another stage."""
    for words in re.findall(r"^COPY (?!--from)(.+)$", TEXT, re.MULTILINE):
        yield from map(PurePath, words.split()[:-1])


def sent(path: PurePath) -> bool:
    """Whether .dockerignore lets it into the context: the last line that fits it, or a folder above it, decides."""
    decision = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        above = [part for part in (path, *path.parents) if part != PurePath()]
        if line and not line.startswith("#") and any(fits(part, pattern) for part in above):
            decision = line.startswith("!")
    return decision


def fits(path: PurePath, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return fnmatch(path.name, pattern.removeprefix("**/"))
    return len(path.parts) == len(PurePath(pattern).parts) and fnmatch(str(path), pattern)


def only(pattern: str) -> str:
    [found] = re.findall(pattern, TEXT, re.MULTILINE)
    return str(found)


def test_whatever_is_copied_is_there_and_in_the_context() -> None:
    for path in copied():
        assert (ROOT / path).exists(), path
        assert sent(path), path


@pytest.mark.parametrize("path", [".git", ".venv/bin/python", "tests/conftest.py", "demo/run.py", "build/pd.binpb"])
def test_the_context_holds_nothing_else(path: str) -> None:
    assert not sent(PurePath(path))
    assert not sent(PurePath("services/router/__pycache__/probe.cpython-311.pyc"))


def test_all_that_the_wheel_is_made_of_is_copied() -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    for needed in (*wheel, PROJECT["project"]["readme"]):
        assert any(PurePath(needed).is_relative_to(path) for path in copied()), needed


def test_a_change_of_any_copied_file_makes_the_test_image_anew() -> None:
    assert {*map(str, copied())} == {*CONTEXT}


def test_versions_are_those_of_the_project() -> None:
    assert only(r'image\.version="([^"]+)"') == PROJECT["project"]["version"]
    assert only(r"^ARG UCX_TAG=v(.+)$") == CONSTRAINTS["libucx-cu12"]


def test_python_is_the_one_that_the_tests_run_on() -> None:
    """And the stand-in of the cluster's tests is for this image."""
    assert only(r"^ARG PYTHON_IMAGE=(.+)$") == PYTHON_IMAGE
    assert f"python:{sys.version_info.major}.{sys.version_info.minor}-" in PYTHON_IMAGE


def test_nobody_in_particular_runs_it_and_a_signal_reaches_the_process() -> None:
    """The forms in brackets: a shell would keep SIGTERM to itself."""
    assert re.search(r"^USER 10001:10001$", TEXT, re.MULTILINE)
    assert only(r"^ENTRYPOINT (.+)$") == "[]"
    assert only(r"^CMD (.)") == "["
    assert only(r"^STOPSIGNAL (.+)$") == "SIGTERM"


def test_the_demo_model_is_where_the_chart_expects_it() -> None:
    assert only(r"^COPY demo/shakespeare (\S+)$") == "/project/opt/pd/demo-model"
    assert (ROOT / "demo/shakespeare/config.json").exists()
