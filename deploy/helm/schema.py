"""values.schema.json, by which helm refuses a wrong value before anything is made: all names, types and bounds."""

from __future__ import annotations

from typing import Any

from deploy.helm.options import Option, options_of, options_of_engines
from deploy.helm.values import Value, all_values
from pd_common.types import Role

Shape = dict[str, Any]


def _map(values: Shape | bool = True, **more: Any) -> Shape:
    return {"type": "object", "additionalProperties": values, **more}


def _record(properties: dict[str, Shape], **more: Any) -> Shape:
    return _map(False, properties=properties, **more)


def _list(items: Shape) -> Shape:
    return {"type": "array", "items": items}


def _number(minimum: int, maximum: int | None = None) -> Shape:
    return {"type": "integer", "minimum": minimum} | ({} if maximum is None else {"maximum": maximum})


def _text(pattern: str) -> Shape:
    return {"type": "string", "pattern": pattern}


def _shared(name: str) -> Shape:
    return {"$ref": f"#/definitions/{name}"}


TEXT: Shape = {"type": "string"}
DEFINITIONS: dict[str, Shape] = {
    "quantity": {"type": ["string", "number"], "pattern": r"^[0-9]+(\.[0-9]+)?([mkMGTPE]|[KMGTPE]i)?$", "minimum": 0},
    "duration": _text(r"^([0-9]+(h|m|s|ms))+$"),
    "texts": _list(TEXT),
    "labels": _map(TEXT, patternProperties={r"^(app\.kubernetes\.io|helm\.sh|pd-handoff)/": False}),
    "annotations": _map(TEXT),
    "objects": _list(_map()),
    "resources": _record({"requests": _map(_shared("quantity")), "limits": _map(_shared("quantity"))}),
    "variables": _list(_record({"name": _text("."), "value": TEXT, "valueFrom": _map()}, required=["name"])),
    "strategy": _record({"type": {"enum": ["RollingUpdate", "Recreate"]}, "rollingUpdate": _map()}),
    "peers": _list(_record({"podSelector": _map(), "namespaceSelector": _map(), "ipBlock": _map()})),
    "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "secretNames": _list(_record({"name": TEXT}, required=["name"])),
}
"""Shapes that several values have. The draft is what helm 3 and 4 read; in it only words count beside a $ref."""

SHAPES: dict[str, Shape] = {
    "fullnameOverride": _text("^([a-z]([-a-z0-9]*[a-z0-9])?)?$"),
    "commonLabels": _shared("labels"),
    "image.digest": _text("^(sha256:[0-9a-f]{64})?$"),
    "pullPolicy": _shared("pullPolicy"),
    "pullSecrets": _shared("secretNames"),
    "model.source": {"enum": ["demo", "pvc", "image", "init"]},
    "model.subPath": _text("^([^/].*)?$"),
    "command": _shared("texts"),
    "args": _shared("texts"),
    "env": _shared("variables"),
    "sizeLimit": _shared("quantity"),
    "shmSize": _shared("quantity"),
    "drainTimeoutSeconds": _number(0),
    "startupSeconds": _number(10),
    "preStopSeconds": _number(0),
    "replicas": _number(0),
    "ranks": _number(1),
    "resources": _shared("resources"),
    "nodeSelector": _map(TEXT),
    "tolerations": _shared("objects"),
    "affinity": _map(),
    "topologySpreadConstraints": _shared("objects"),
    "extraArgs": _shared("texts"),
    "podAnnotations": _shared("annotations"),
    "podLabels": _shared("labels"),
    "strategy": _shared("strategy"),
    "minReplicas": _number(1),
    "maxReplicas": _number(1),
    "queuedPerReplica": _number(1),
    "pagesUsedPercent": _number(0, 100),
    "cpuPercent": _number(1, 100),
    "router.service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "annotations": _shared("annotations"),
    "labels": _shared("labels"),
    "count": _number(1),
    "ucx": _map(False, patternProperties={"^UCX_[A-Z0-9_]+$": {"type": ["string", "number", "boolean"]}}),
    "issuerRef": _record({"name": TEXT, "kind": TEXT, "group": TEXT}),
    "duration": _shared("duration"),
    "renewBefore": _shared("duration"),
    "interval": _shared("duration"),
    "routerDnsNames": _shared("texts"),
    "clients": _shared("peers"),
    "metricsFrom": _shared("peers"),
    "first": _number(1, 65535),
    "last": _number(1, 65535),
    "maxUnavailable": {"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]+%$"},
    "probes.type": {"enum": ["auto", "grpc", "exec"]},
    "logs.level": {"enum": ["debug", "info", "warning", "error"]},
    "logs.format": {"enum": ["text", "json"]},
    "autoscaling.provider": {"enum": ["hpa", "keda"]},
}
"""What a default does not say, by a value's whole name or by its last part."""

_TYPES = {str: "string", bool: "boolean", int: "integer"}


def schema() -> Shape:
    """All of it."""
    values = _shape(all_values())
    values["properties"]["global"] = {"description": "Helm's own, for charts that this one is a part of.", **_map()}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **values, "definitions": DEFINITIONS}


def _shape(value: Value) -> Shape:
    said = {"description": value.description} if value.description else {}
    if value.members:
        return said | _record({member.path[-1]: _shape(member) for member in value.members})
    return said | (_options(value) or SHAPES.get(value.name) or _by_default(value.path[-1], value.default))


def _by_default(key: str, default: Any) -> Shape:
    """The shape of a value by its last name, or by its default; a KeyError if neither says it."""
    if key in SHAPES:
        return SHAPES[key]
    if isinstance(default, dict) and default:
        return _record({name: _by_default(name, inner) for name, inner in default.items()})
    return {"type": _TYPES[type(default)]}


def _options(value: Value) -> Shape | None:
    """What may stand under a value that holds options of processes."""
    match value.path:
        case ("engine", "options"):
            return _record(_by_name(options_of_engines()))
        case ("prefill" | "decode" | "router" as role, "options"):
            return _record(_by_name(options_of(Role(role))))
        case _:
            return None


def _by_name(options: dict[str, Option]) -> dict[str, Shape]:
    return {name: {"description": option.help, **option.shape} for name, option in options.items()}
