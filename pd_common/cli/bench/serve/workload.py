"""What is asked and when: prompts, lengths and arrivals that depend on the seed alone, never on the server's pace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from pd_common.cli.bench.serve.lengths import Lengths

# Short and common: most tokenizers have each of them, with the space before it, as one token.
_TEXT = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who its now find long down day did get come made may part"
)
_WORDS = np.array(_TEXT.split())


class Kind(IntEnum):
    """What random numbers are for; each kind has a sequence of its own under one seed."""

    ARRIVALS = 0
    PREFIX = 1
    PROMPTS = 2
    BACKGROUND = 3


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, as token ids or as text, and how many tokens its answer has."""

    prompt: list[int] | str
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Request number n is the same in every run with the same fields."""

    seed: int
    kind: Kind
    prompt: Lengths
    output: Lengths
    prefix_tokens: int
    vocab: int | None
    """Prompts are ids below this; None: they are text, a word for a token."""

    def request(self, number: int) -> Request:
        rng = _rng(self.seed, self.kind, number)
        own = max(self.prompt.draw(rng) - self.prefix_tokens, 1)
        output_tokens = self.output.draw(rng)
        drawn = [*self._drawn(_rng(self.seed, Kind.PREFIX), self.prefix_tokens), *self._drawn(rng, own)]
        return Request(drawn if self.vocab is not None else " ".join(map(str, drawn)), output_tokens)

    def _drawn(self, rng: np.random.Generator, count: int) -> list[int]:
        if self.vocab is None:
            words: list[int] = rng.choice(_WORDS, count).tolist()
            return words
        ids: list[int] = rng.integers(self.vocab, size=count).tolist()
        return ids


def poisson_arrivals(per_s: float, seed: int) -> Iterator[float]:
    """Seconds from the start to each arrival, without end; the first comes at once."""
    rng = _rng(seed, Kind.ARRIVALS)
    at_s = 0.0
    while True:
        yield at_s
        at_s += rng.exponential(1 / per_s)


def _rng(seed: int, kind: Kind, number: int = 0) -> np.random.Generator:
    return np.random.default_rng((seed, kind, number))
