"""What the processes can be told, from their command lines: this may stand under `options` in the chart's values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import click

from pd_common.types import Role
from services.decode.__main__ import main as decode
from services.prefill.__main__ import main as prefill
from services.router.__main__ import main as router

_PORTS = {"host", "port", "http-port", "grpc-port", "metrics-port", "health-port"}
_PEERS = {"prefill", "decode", "advertise-host", "bootstrap", "dp-rank", "dp-size"}
_SECURITY = {"tls-cert", "tls-key", "tls-ca", "tls-verify-clients", "ticket-key-file"}
_CHART_SETS = _PORTS | _PEERS | _SECURITY | {"model", "drain-timeout", "log-level", "log-format", "help"}
"""Options that the templates work out from other values."""

COMMANDS = {Role.PREFILL: prefill, Role.DECODE: decode, Role.ROUTER: router}
_TYPES = {"Bool": "boolean", "IntRange": "integer", "Int": "integer", "Float": "number"}


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a process. What it takes is said as a JSON schema."""

    name: str
    """The long one, without its dashes."""
    shape: dict[str, Any]
    help: str
    default: str
    """As people read it."""


@cache
def options_of(role: Role) -> dict[str, Option]:
    """What a user may set for a role, by name, in the order of `--help`."""
    found = [_option(parameter) for parameter in _parameters(role) if not parameter["hidden"]]
    return {option.name: option for option in found if option.name not in _CHART_SETS}


@cache
def options_of_engines() -> dict[str, Option]:
    """What a user may set for both kinds of engine at once."""
    both = options_of(Role.DECODE)
    return {name: option for name, option in options_of(Role.PREFILL).items() if both.get(name) == option}


def variables_of(role: Role) -> set[str]:
    """The environment variables that a process of this role reads."""
    names = {f"PD_{parameter['name']}".upper() for parameter in _parameters(role)}
    for parameter in _parameters(role):
        own = parameter["envvar"] or []
        names.update([own] if isinstance(own, str) else own)
    return names


def _parameters(role: Role) -> list[dict[str, Any]]:
    command = COMMANDS[role]
    described: list[dict[str, Any]] = command.to_info_dict(click.Context(command))["params"]
    return described


def _option(parameter: dict[str, Any]) -> Option:
    name = next(spelling for spelling in parameter["opts"] if spelling.startswith("--")).removeprefix("--")
    text, _, default = (parameter["help"] or "").partition("  [default: ")
    if parameter["default"] is not None:
        default = _shown(parameter["default"])
    return Option(name, _shape(parameter["type"]), text, default.removesuffix("]"))


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def _shape(taken: dict[str, Any]) -> dict[str, Any]:
    if taken["param_type"] == "Choice":
        return {"enum": list(taken["choices"])}
    bounds = {"minimum": taken.get("min"), "maximum": taken.get("max")}
    known = {bound: limit for bound, limit in bounds.items() if limit is not None}
    return {"type": _TYPES.get(taken["param_type"], "string"), **known}
