"""README.md of the chart: how to install it, and every value in tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml  # type: ignore[import-untyped]

from deploy.helm.options import Option, options_of, options_of_engines
from deploy.helm.schema import Shape
from deploy.helm.values import Value, all_values
from pd_common.types import Role

HEAD = """\
# pd-handoff

A router in front of prefill and decode workers. Put the image, which has a small demo model in it, where the cluster
finds it, and install; nothing else is needed:

```
docker build -f deploy/docker/Dockerfile -t registry.example.com/pd-handoff:0.1.0 .
docker push registry.example.com/pd-handoff:0.1.0
helm install pd deploy/helm/pd-handoff --set image.repository=registry.example.com/pd-handoff --wait --timeout 10m
helm test pd --logs                       # one prompt, and its room as TransferStatus has it on both sides
kubectl port-forward service/pd-router 8000:8000 &
curl -s http://127.0.0.1:8000/generate -d '{"text": "ROMEO.\\n", "sampling_params": {"max_new_tokens": 40}}'
```

A laptop, GPUs and RDMA, your own model, TLS: [docs/deploy.md](../../../docs/deploy.md). What to watch, how to scale and
upgrade: [docs/operations.md](../../../docs/operations.md). Who may talk to whom:
[docs/security.md](../../../docs/security.md).

Kubernetes 1.20 or later, helm 3 or 4. A name that is not below is refused, and so is a value of another kind: helm
says which.
"""

GENERAL = "## General"
OPTIONS = """\
## Options of the processes

What may stand under `options` of a role, and what holds if nothing is said. A role's own win over `engine.options`.
Addresses, ports, certificates and log lines are no options here: the chart sets them from the values above.
"""
FROM_CHART = {
    "threads": "CPU limit of the container, without `gpu.enabled`",
    "ucx-library": "`wheel`; with `rdma.enabled` or `gpu.enabled` the image's",
    "advertise-interface": "the pod's address",
}
"""Options for which chart or image say something else than the process's own default."""


def readme() -> str:
    """All of it."""
    top = all_values().members
    general = _values([value for value in top if not value.members])
    sections = [f"## {value.name}\n\n{_intro(value)}{_values(_leaves(value))}" for value in top if value.members]
    return "\n".join([HEAD, f"{GENERAL}\n\n{general}", *sections, OPTIONS, *_all_options()])


def _intro(section: Value) -> str:
    return f"{section.description}\n\n" if section.description else ""


def _leaves(value: Value) -> list[Value]:
    return [leaf for member in value.members for leaf in _leaves(member)] or [value]


def _values(values: Iterable[Value]) -> str:
    rows = [(f"`{value.name}`", f"`{_flow(value.default)}`", value.description) for value in values]
    return _table("Value", "Default", "Description", rows=rows)


def _all_options() -> Iterable[str]:
    engines, chart = options_of_engines(), all_values().default["engine"]["options"]
    yield f"### engine.options\n\n{_options(engines, chart)}"
    for role in (Role.PREFILL, Role.DECODE):
        own = {name: option for name, option in options_of(role).items() if name not in engines}
        yield f"### {role}.options\n\nThose of `engine.options`, and:\n\n{_options(own, {})}"
    yield f"### router.options\n\n{_options(options_of(Role.ROUTER), {})}"


def _options(options: dict[str, Option], chart: dict[str, Any]) -> str:
    rows = [
        (f"`{name}`", str(chart.get(name) or FROM_CHART.get(name) or option.default), _taken(option.shape), option.help)
        for name, option in options.items()
    ]
    return _table("Option", "Default", "Takes", "Description", rows=rows)


def _taken(shape: Shape) -> str:
    if "enum" in shape:
        return ", ".join(f"`{choice}`" for choice in shape["enum"])
    bounds = {"at least": shape.get("minimum"), "at most": shape.get("maximum")}
    limits = [f"{words} {limit}" for words, limit in bounds.items() if limit is not None]
    return ", ".join([{"boolean": "`true` or `false`", "string": "text"}.get(shape["type"], shape["type"]), *limits])


def _flow(default: Any) -> str:
    """A default as one writes it in one line of YAML."""
    line: str = yaml.safe_dump(default, default_flow_style=True, sort_keys=False, width=10_000)
    return line.removesuffix("\n").removesuffix("\n...").replace("'", '"')


def _table(*head: str, rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
