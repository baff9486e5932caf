"""Dashboard and alert rules as data: which expressions they have, and which metrics those name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/helm/pd-handoff/files/alerts.yaml"
RULE_TESTS = Path(__file__).parent / "pd-handoff.test.yaml"
DASHBOARD = ROOT / "deploy/helm/pd-handoff/files/dashboard.json"
DOCS = ROOT / "docs/metrics.md"

_VARIABLES = {"$__rate_interval": "30s", "$job": ".*", "$instance": ".*"}
_NAME = re.compile(r"\b(?:pd|process)_[a-z0-9_]+\b")
_QUOTED = re.compile(r'"[^"]*"')


def rules() -> list[dict[str, Any]]:
    """All rules, alerts and recordings."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def panels() -> list[dict[str, Any]]:
    """Those that show something; rows do not."""
    board = json.loads(DASHBOARD.read_text())
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries() -> dict[str, str]:
    """Every query of the dashboard by its panel, with each variable at what "All" stands for."""
    found = {}
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"]
            for variable, value in _VARIABLES.items():
                expression = expression.replace(variable, value)
            found[f"{panel['title']} {target['refId']}"] = expression
    return found


def named(expressions: list[str]) -> set[str]:
    """The metrics that they name; what is in quotes is none."""
    return {name for expression in expressions for name in _NAME.findall(_QUOTED.sub('""', expression))}
