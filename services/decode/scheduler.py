"""Continuous batching: every running answer gets one token a step; answers join and leave between steps.

Prompts that nobody else computes are computed beside them, in chunks. When there are no pages to go on with, the last
in order lose theirs. Owned by the event loop; only the engine's work runs elsewhere. Knows nothing of transfers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from pd_common.control.outputs import OutputHub
from pd_common.engine.batch import Batch, BatchItem
from pd_common.engine.engine import Engine
from pd_common.engine.output import AnswerBuilder
from pd_common.engine.sampler import SampledToken
from pd_common.errors import InternalError
from pd_common.generation import Output
from services.decode.answers import Answer, AnswerList, Retracted
from services.decode.host_copies import HostCopies
from services.decode.memory import Allocation, DecodeMemory

_log = logging.getLogger(__name__)

_Work = list[tuple[Answer, BatchItem]]


class DecodeScheduler:
    """The loop over an `AnswerList`. Who is first there is never retracted for another, so it comes to its end."""

    def __init__(
        self,
        engine: Engine,
        memory: DecodeMemory,
        hub: OutputHub,
        copies: HostCopies,
        *,
        max_running: int,
        chunk_tokens: int,
        retract_every: int = 0,
        audit: Callable[[], None] | None = None,
    ) -> None:
        """At most `chunk_tokens` tokens of prompts in a step. What `audit` raises, after any step, ends `run`.

        With `retract_every` an answer is retracted after so many steps although there is memory: for tests.
        """
        self._engine = engine
        self._memory = memory
        self._hub = hub
        self._copies = copies
        self._retract_every = retract_every
        self._audit = audit
        self._answers = AnswerList(max_running, chunk_tokens)
        self._steps = 0
        self._in_use: tuple[Answer, ...] = ()
        self._use_over = asyncio.Event()
        self._work = asyncio.Event()

    @property
    def running(self) -> int:
        """Answers that the next step has room for."""
        return self._answers.running

    def start(self, allocation: Allocation, builder: AnswerBuilder) -> Answer:
        """An answer joins. What its sequence has no KV of yet is computed here: its last token, or its prompt as well.

        One that was retracted starts again with the same sequence and builder, in its old place.
        """
        answer = self._answers.add(allocation, builder)
        self._work.set()
        return answer

    async def leave(self, answer: Answer) -> None:
        """Takes an answer out; returns when nobody reads or writes its pages any more.

        Its `ended` is cancelled if it goes on, not if it is just being retracted: so it says who has the allocation.
        """
        if self._answers.remove(answer):
            answer.ended.cancel()
        while answer in self._in_use:
            await self._use_over.wait()

    async def run(self) -> None:
        """The engine loop; ends only by cancellation, or by what the audit raises."""
        while True:
            work = self._answers.next_work()
            if not work:
                self._work.clear()
                await self._work.wait()
                await asyncio.sleep(0)  # a first token that was just published leaves before a step takes the core
            elif self._find_pages(work):
                await self._step(work)
                await self._retract_one_of(work)
            else:
                await self._retract(self._answers.last)
            if self._audit is not None:
                self._audit()

    def _find_pages(self, work: _Work) -> bool:
        """Pages for all that is to be computed; False when there are too few for one, those before it have theirs."""
        return all(self._memory.grow(answer.allocation, item.end) for answer, item in work)

    async def _step(self, work: _Work) -> None:
        self._steps += 1
        answers = tuple(answer for answer, _ in work)
        with self._using(answers):
            try:
                sampled = await self._engine.step(Batch(item for _, item in work))
                for _, item in work:
                    item.sequence.computed = item.end
                self._publish([answer for answer, item in work if item.samples], sampled)
            except Exception as defect:  # noqa: BLE001  a failed step fails its answers, not the process
                for answer in answers:
                    answer.sequence.computed = 0  # what earlier steps wrote may be the cause: it is not kept
                self._fail(answers, defect)

    def _publish(self, answers: Iterable[Answer], sampled: Iterable[SampledToken]) -> None:
        pieces = []
        for answer, token in zip(answers, sampled, strict=True):
            piece = self._take(answer, token)
            if piece is not None:
                pieces.append(piece)
                answer.began.set()
        self._hub.publish(pieces)

    def _take(self, answer: Answer, token: SampledToken) -> Output | None:
        """The piece that the token brings; None when nobody waits for the answer any more, or it fails here."""
        sequence = answer.sequence
        if not sequence.output:
            self._memory.share(answer.allocation)  # as prompts that were computed elsewhere
        sequence.append(token.token_id)
        if answer.ended.done():
            self._answers.remove(answer)
            return None
        try:
            piece = answer.builder.accept(token.token_id, token.logprob)
        except Exception as defect:  # noqa: BLE001  one answer's text is no reason to lose its neighbours'
            self._fail((answer,), defect)
            return None
        if piece.is_last:
            self._answers.remove(answer)
            answer.ended.set_result(None)
        return piece

    def _fail(self, answers: Iterable[Answer], defect: Exception) -> None:
        _log.error("an engine step failed", exc_info=defect)
        error = InternalError(f"the engine failed: {type(defect).__name__}: {defect}")
        for answer in answers:
            self._answers.remove(answer)
            answer.began.set()
            if not answer.ended.done():
                answer.ended.set_exception(error)

    async def _retract_one_of(self, work: _Work) -> None:
        """The last that got a token, whenever it is time for that."""
        if not self._retract_every or self._steps % self._retract_every:
            return
        last = next((answer for answer, item in reversed(work) if item.samples and not answer.ended.done()), None)
        if last is not None:
            await self._retract(last)

    async def _retract(self, answer: Answer) -> None:
        """Gives the pages of an answer to others, and keeps a copy if there is an answer to go on with, and room."""
        sequence, copy = answer.sequence, None
        self._answers.remove(answer)
        if sequence.output and sequence.uncomputed == 1:
            used = -(-sequence.computed // self._memory.page_size)
            with self._using((answer,)):
                copy = await self._copies.save(sequence.pages[:used])
        if not answer.ended.cancelled():
            self._memory.release(answer.allocation)
            answer.began.set()
            answer.ended.set_result(Retracted(copy))
        elif copy is not None:
            self._copies.drop(copy)  # nobody waits for it any more, so it keeps its pages until it leaves

    @contextmanager
    def _using(self, answers: tuple[Answer, ...]) -> Iterator[None]:
        """Others must leave the pages of these answers alone meanwhile."""
        self._in_use = answers
        self._use_over.clear()
        try:
            yield
        finally:
            self._in_use = ()
            self._use_over.set()
