"""One step's work: prefill chunks and decode tokens of many sequences, flattened into one row of tokens.

A batch is a snapshot: the engine thread reads nothing but what is frozen here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from pd_common.engine.request import Sequence
from pd_common.errors import InternalError
from pd_common.generation import SamplingParams

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchItem:
    """Tokens `[start, end)` of one sequence; `samples` asks for the token that follows the last of them."""

    sequence: Sequence
    start: int
    end: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Rows:
    """One item in the flattened row: rows `[first, first + end - start)` are tokens `[start, end)` kept in `pages`."""

    first: int
    start: int
    end: int
    pages: Int64s


@dataclass(frozen=True, slots=True)
class Draw:
    """How one token is to be chosen.

    `position` is its place in the whole sequence, `generated` the answer's length before it. `top_logprobs` is None
    when no log-probability is wanted.
    """

    sampling: SamplingParams
    seed: int
    position: int
    generated: int
    top_logprobs: int | None


class Batch:
    """Items in order, their T tokens flattened: `input_ids[T]`, `positions[T]`, one logits row per sampling item."""

    def __init__(self, items: Iterable[BatchItem]) -> None:
        self.items = tuple(items)
        if not self.items:
            raise InternalError("a batch needs at least one item")
        for item in self.items:
            _check(item)
        sizes = [item.end - item.start for item in self.items]
        firsts = list(accumulate(sizes, initial=0))
        self.rows: tuple[Rows, ...] = tuple(
            Rows(first, item.start, item.end, np.array(item.sequence.pages, dtype=np.int64))
            for item, first in zip(self.items, firsts, strict=False)
        )
        self.num_tokens: int = firsts[-1]
        self.input_ids: Int64s = np.fromiter(
            (token for item in self.items for token in item.sequence.tokens(item.start, item.end)),
            dtype=np.int64,
            count=self.num_tokens,
        )
        shifts = [item.start - first for item, first in zip(self.items, firsts, strict=False)]
        self.positions: Int64s = np.repeat(np.array(shifts, dtype=np.int64), sizes) + np.arange(self.num_tokens)
        sampling = [index for index, item in enumerate(self.items) if item.samples]
        self.logits_rows: Int64s = np.array([firsts[index + 1] - 1 for index in sampling], dtype=np.int64)
        self.draws: tuple[Draw, ...] = tuple(_draw(self.items[index]) for index in sampling)


def _draw(item: BatchItem) -> Draw:
    sequence, request = item.sequence, item.sequence.request
    return Draw(
        sampling=request.sampling,
        seed=sequence.seed,
        position=item.end,
        generated=len(sequence.output),
        top_logprobs=request.top_logprobs if request.return_logprob else None,
    )


def _check(item: BatchItem) -> None:
    sequence = item.sequence
    if not sequence.computed == item.start < item.end <= sequence.num_tokens:
        raise InternalError(
            f"tokens {item.start} to {item.end} do not follow the {sequence.computed} that are computed",
            rid=sequence.request.rid,
        )
    if item.samples and item.end != sequence.num_tokens:
        raise InternalError("only the last token of a sequence can be followed by a new one", rid=sequence.request.rid)
