"""Which answers there are, in which order, and what each of them computes in the next step. Knows no engine."""

from __future__ import annotations

import asyncio
import itertools
from bisect import insort
from dataclasses import dataclass, field

from pd_common.engine.batch import BatchItem
from pd_common.engine.output import AnswerBuilder
from pd_common.engine.request import Sequence
from services.decode.host_copies import HostCopy
from services.decode.memory import Allocation


@dataclass(frozen=True, slots=True)
class Retracted:
    """An answer's pages were given to others. The copy has the KV of all its tokens but the last."""

    copy: HostCopy | None


@dataclass(slots=True, eq=False)
class Answer:
    """One answer from its start until it is complete, retracted, or has left.

    `ended` gives None with the last piece. Or it gives what the answer was retracted with: then the allocation is gone,
    and the copy is for whoever started the answer to drop. `began` is set with the first piece since the start, or when
    the answer has ended without one. `place` is lower for those that come first.
    """

    allocation: Allocation
    builder: AnswerBuilder
    place: tuple[int, int]
    began: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Future[Retracted | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def sequence(self) -> Sequence:
        """Prompt and answer so far."""
        return self.allocation.sequence


class AnswerList:
    """Answers in order of priority, then of their first start: the first `max_running` of them run."""

    def __init__(self, max_running: int, chunk_tokens: int) -> None:
        """`chunk_tokens` is how many tokens of prompts a step may have, beside one of each answer."""
        self._max_running = max_running
        self._chunk_tokens = chunk_tokens
        self._answers: list[Answer] = []
        self._turns = itertools.count()

    @property
    def running(self) -> int:
        """Answers that are in the next step, or wait only for the chunks of others."""
        return min(len(self._answers), self._max_running)

    @property
    def last(self) -> Answer:
        """Who loses its pages first."""
        return self._answers[-1]

    def add(self, allocation: Allocation, builder: AnswerBuilder) -> Answer:
        """Whoever was here before, with the same sequence, takes its old place."""
        sequence = allocation.sequence
        if sequence.turn is None:
            sequence.turn = next(self._turns)
        answer = Answer(allocation, builder, (-sequence.request.priority, sequence.turn))
        insort(self._answers, answer, key=lambda other: other.place)
        return answer

    def remove(self, answer: Answer) -> bool:
        """False when it is gone already."""
        is_here = answer in self._answers
        if is_here:
            self._answers.remove(answer)
        return is_here

    def next_work(self) -> list[tuple[Answer, BatchItem]]:
        """One token of each whose KV is complete but for that; then of the others as much as the step may have."""
        budget = self._chunk_tokens
        work = []
        for answer in self._answers[: self._max_running]:
            sequence = answer.sequence
            uncomputed = sequence.uncomputed
            tokens = 1
            if uncomputed > 1:
                tokens = min(uncomputed, budget)
                budget -= tokens
            if tokens:
                start = sequence.computed
                work.append((answer, BatchItem(sequence, start, start + tokens, samples=tokens == uncomputed)))
        return work
