"""values.yaml as data: each value with its default and with the comment that describes it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

CHART = Path(__file__).parent / "pd-handoff"
VALUES = CHART / "values.yaml"
MARK = "# -- "


@dataclass(frozen=True, slots=True)
class Value:
    """A value, or a section: a map some of whose own values are described."""

    path: tuple[str, ...]
    default: Any
    description: str
    members: tuple[Value, ...]
    """What a section holds; nothing for a value."""

    @property
    def name(self) -> str:
        """As on helm's command line."""
        return ".".join(self.path)


@cache
def all_values() -> Value:
    """The section that is the whole file."""
    text = VALUES.read_text()
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    return Value((), yaml.safe_load(text), "", _members(root, yaml.safe_load(text), (), text.splitlines()))


def _members(node: Any, default: Any, path: tuple[str, ...], lines: list[str]) -> tuple[Value, ...]:
    """The members of a section; none if the node is a value."""
    if not isinstance(node, yaml.MappingNode) or node.flow_style:
        return ()
    found = []
    for key, held in node.value:
        where, inner = (*path, key.value), default[key.value]
        found.append(Value(where, inner, _comment(lines, key.start_mark.line), _members(held, inner, where, lines)))
    return tuple(found) if any(member.description or member.members for member in found) else ()


def _comment(lines: list[str], line: int) -> str:
    """What the comment right above a line says, if it is a description."""
    first = line
    while lines[first - 1].lstrip().startswith("#"):
        first -= 1
    said = [text.strip() for text in lines[first:line]]
    if not said or not said[0].startswith(MARK):
        return ""
    return " ".join([said[0].removeprefix(MARK), *(text.removeprefix("# ") for text in said[1:])])
