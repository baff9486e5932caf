"""Continuous batching: every running answer gets one token a step; answers join and leave between steps.

Owned by the event loop; only the engine's step runs elsewhere. Knows nothing of transfers.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from pd_common.control.outputs import OutputHub
from pd_common.engine.batch import Batch, BatchItem
from pd_common.engine.engine import Engine
from pd_common.engine.output import AnswerBuilder
from pd_common.engine.request import Sequence
from pd_common.engine.sampler import SampledToken
from pd_common.errors import InternalError
from pd_common.generation import Output

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Answer:
    """One answer being written: its KV is complete but for the last token. `finished` is set with the last piece."""

    sequence: Sequence
    builder: AnswerBuilder
    finished: asyncio.Future[None]


class DecodeScheduler:
    """At most `max_running` answers in a step; the others wait in order of arrival."""

    def __init__(self, engine: Engine, hub: OutputHub, max_running: int) -> None:
        self._engine = engine
        self._hub = hub
        self._max_running = max_running
        self._answers: list[Answer] = []
        self._stepping: tuple[Answer, ...] = ()
        self._step_over = asyncio.Event()
        self._work = asyncio.Event()

    def start(self, sequence: Sequence, builder: AnswerBuilder) -> Answer:
        """A prebuilt answer joins: prompt computed elsewhere, first token known."""
        answer = Answer(sequence, builder, asyncio.get_running_loop().create_future())
        self._answers.append(answer)
        self._work.set()
        return answer

    async def leave(self, answer: Answer) -> None:
        """Takes an answer out; returns when no step reads or writes its pages any more."""
        if answer in self._answers:
            self._answers.remove(answer)
        while answer in self._stepping:
            await self._step_over.wait()

    async def run(self) -> None:
        """The engine loop; ends only by cancellation."""
        while True:
            batch = tuple(self._answers[: self._max_running])
            if not batch:
                self._work.clear()
                await self._work.wait()
                continue
            await self._step(batch)

    async def _step(self, answers: tuple[Answer, ...]) -> None:
        self._stepping = answers
        self._step_over.clear()
        items = [BatchItem(answer.sequence, *answer.sequence.next_span(1), samples=True) for answer in answers]
        try:
            sampled = await self._engine.step(Batch(items))
            pieces = (self._take(answer, token) for answer, token in zip(answers, sampled, strict=True))
            self._hub.publish([piece for piece in pieces if piece is not None])
        except Exception as defect:  # noqa: BLE001  a failed step fails its answers, not the process
            self._fail(answers, defect)
        finally:
            self._stepping = ()
            self._step_over.set()

    def _take(self, answer: Answer, token: SampledToken) -> Output | None:
        """The piece that the token brings; None when the answer has left meanwhile, or fails here."""
        answer.sequence.computed += 1
        answer.sequence.append(token.token_id)
        if answer not in self._answers:
            return None
        try:
            piece = answer.builder.accept(token.token_id, token.logprob)
        except Exception as defect:  # noqa: BLE001  one answer's text is no reason to lose its neighbours'
            self._fail((answer,), defect)
            return None
        if piece.is_last:
            self._answers.remove(answer)
            if not answer.finished.cancelled():  # its room may have been stopped in this very step
                answer.finished.set_result(None)
        return piece

    def _fail(self, answers: tuple[Answer, ...], defect: Exception) -> None:
        _log.error("an engine step failed", exc_info=defect)
        error = InternalError(f"the engine failed: {type(defect).__name__}: {defect}")
        for answer in answers:
            if answer in self._answers:
                self._answers.remove(answer)
                if not answer.finished.cancelled():
                    answer.finished.set_exception(error)
