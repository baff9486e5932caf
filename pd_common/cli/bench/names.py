"""A click type: some of a list of names, with commas between."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click


class Names(click.ParamType[tuple[str, ...]]):
    """`a,b` out of the known names; each once, in the order given."""

    name = "NAMES"

    def __init__(self, known: Iterable[str]) -> None:
        self.known = tuple(known)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(dict.fromkeys(part.strip() for part in str(value).split(",")))
        unknown = [name for name in names if name not in self.known]
        if unknown:
            self.fail(f"{', '.join(map(repr, unknown))}: known are {', '.join(self.known)}", param, ctx)
        return names
