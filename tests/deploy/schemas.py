"""What an object of Kubernetes may look like: its own published schemas, and short ones of what operators add."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from referencing import Registry, Resource

from tests.deploy.rendered import Object

VERSIONS = [f"1.{minor}" for minor in range(28, 38)]

_PUBLISHED = resources.files("kubernetes_validate") / "kubernetes-json-schema"
_OPERATORS = Path(__file__).parent / "operators.yaml"
_SUCCESSORS = {"policy/v1beta1": "policy/v1", "autoscaling/v2beta2": "autoscaling/v2"}
"""Of versions that are gone, with the same fields."""


def complaints(each: Object, version: str) -> list[str]:
    """What this version of Kubernetes would find wrong with an object; a field that it does not know is wrong."""
    each = {**each, "apiVersion": _SUCCESSORS.get(each["apiVersion"], each["apiVersion"])}
    kind = f"{each['apiVersion']} {each['kind']}"
    if kind in _operators():
        return _errors(Draft202012Validator({**_operators(), "$ref": f"#/{kind.replace('/', '~1')}"}), each["spec"])
    return _errors(_validator(each["apiVersion"], each["kind"], version), each)


def _errors(validator: Any, instance: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(instance)]


@cache
def _operators() -> dict[str, Any]:
    schemas: dict[str, Any] = yaml.safe_load(_OPERATORS.read_text())
    return schemas


@cache
def _validator(api: str, kind: str, version: str) -> Any:
    group, _, number = api.rpartition("/")
    parts = [kind.lower(), *group.split(".")[:1], number]
    file = f"{'-'.join(filter(None, parts))}.json"
    return Draft202012Validator(_read(file, version), registry=_definitions(version))


@cache
def _definitions(version: str) -> Any:
    return Resource.from_contents(_read("_definitions.json", version)) @ Registry()


def _read(name: str, version: str) -> Any:
    return json.loads((_PUBLISHED / f"v{version}.0-local-strict" / name).read_text())
