"""How long prompts and answers are: a distribution as the command line spells it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import click
from numpy.random import Generator


class Lengths(Protocol):
    """A distribution of lengths in tokens, none below 1."""

    @property
    def most(self) -> int:
        """The longest that can come."""
        ...

    def draw(self, rng: Generator) -> int: ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every length from `least` to `most` is as likely as the others; both the same is a fixed length."""

    least: int
    most: int

    def draw(self, rng: Generator) -> int:
        return int(rng.integers(self.least, self.most + 1))

    def __str__(self) -> str:
        return f"{self.most}" if self.least == self.most else f"{self.least}-{self.most}"


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Most are near the median, a few are much longer, none longer than `most`, as people's prompts are."""

    median: int
    sigma: float
    most: int

    def draw(self, rng: Generator) -> int:
        return max(1, min(self.most, round(rng.lognormal(math.log(self.median), self.sigma))))

    def __str__(self) -> str:
        return f"lognormal:{self.median},{self.sigma:g},{self.most}"


class LengthsType(click.ParamType[Lengths]):
    """`2000`, `500-1500` or `lognormal:800,0.6,4000`."""

    name = "LENGTHS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        try:
            return parse(str(value))
        except ValueError:
            spellings = "2000, 500-1500 (uniform), lognormal:800,0.6,4000 (median, sigma, most)"
            self.fail(f"{value!r} is no distribution of lengths; these are: {spellings}", param, ctx)


def parse(text: str) -> Lengths:
    """The distribution that is written so.

    Raises:
        ValueError: it is not written as one, or a length is below 1.

    """
    lengths: Lengths
    if text.startswith("lognormal:"):
        median, sigma, most = text.removeprefix("lognormal:").split(",")
        lengths = LogNormal(int(median), float(sigma), int(most))
        in_order = 1 <= lengths.median <= lengths.most and 0 <= lengths.sigma < math.inf
    else:
        least, _, largest = text.partition("-")
        lengths = Uniform(int(least), int(largest or least))
        in_order = 1 <= lengths.least <= lengths.most
    if not in_order:
        raise ValueError(text)
    return lengths
