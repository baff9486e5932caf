"""Which prompts are computed when: a first-come queue, chunks of several prompts in one step, pages for each.

What a prompt has in common with an earlier one is not computed again.

Owned by the event loop; only the engine's step runs elsewhere. Knows nothing of transfers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field

from pd_common.engine.batch import Batch, BatchItem
from pd_common.engine.engine import Engine
from pd_common.engine.request import Sequence
from pd_common.engine.sampler import SampledToken
from pd_common.errors import InternalError, PdError
from pd_common.kv.prefix import Prefix, PrefixCache
from pd_common.telemetry import spans

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """Tokens `[start, end)` of one prompt have KV. `sampled` is the first token, after the last chunk."""

    start: int
    end: int
    began_ns: int
    ended_ns: int
    sampled: SampledToken | None


@dataclass(slots=True)
class Job:
    """One prompt to compute. Its pages are those of `sequence`, from the first chunk until `release`.

    The first of them are those of `prefix`, once it has its turn: others may be reading them as well.
    """

    sequence: Sequence
    prefix: Prefix | None = None
    cached_tokens: int = 0
    """Tokens of the prefix: they need not be computed."""
    _results: asyncio.Queue[ChunkDone | PdError] = field(default_factory=asyncio.Queue)

    async def next_chunk(self) -> ChunkDone:
        """The next chunk, in order. What was in the cache is the first, at once, if anything was.

        Raises:
            InternalError: the engine failed.

        """
        result = await self._results.get()
        if isinstance(result, PdError):
            raise result
        return result

    def put(self, result: ChunkDone | PdError) -> None:
        self._results.put_nowait(result)


class PrefillScheduler:
    """At most `chunk_tokens` tokens a step and `max_running` prompts with pages at a time, first come first served.

    Pages come into the prefix cache when their prompt is released: no prompt meets pages that are not computed yet.
    """

    def __init__(self, engine: Engine, prefixes: PrefixCache, chunk_tokens: int, max_running: int) -> None:
        """`prefixes` is over the engine's pages."""
        self._engine = engine
        self._prefixes = prefixes
        self._chunk_tokens = chunk_tokens
        self._max_running = max_running
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._stepping: tuple[Job, ...] = ()
        self._step_over = asyncio.Event()
        self._work = asyncio.Event()

    def enqueue(self, sequence: Sequence) -> Job:
        """Takes a prompt in; it waits for its turn and for pages."""
        job = Job(sequence)
        self._waiting.append(job)
        self._work.set()
        return job

    async def compute_only(self, sequence: Sequence) -> None:
        """Computes a prompt whose pages nobody wants, and gives them back; raises as `Job.next_chunk` does."""
        job = self.enqueue(sequence)
        try:
            while (await job.next_chunk()).sampled is None:
                pass
        finally:
            await self.release(job)

    @property
    def pages_cached(self) -> int:
        """Pages that no prompt uses, and that hold what later ones may begin with."""
        return self._prefixes.num_idle

    async def release(self, job: Job) -> None:
        """Takes the job out and gives its pages back; returns when no step reads or writes them any more."""
        if job in self._waiting:
            self._waiting.remove(job)
        if job in self._running:
            self._running.remove(job)
        while job in self._stepping:
            await self._step_over.wait()
        if job.prefix is not None:
            self._give_back(job.prefix, job.sequence)
            job.prefix = None
        self._work.set()

    def _give_back(self, prefix: Prefix, sequence: Sequence) -> None:
        own = sequence.pages[len(prefix.pages) :]
        self._prefixes.release(prefix, sequence.tokens(0, sequence.computed), own)
        sequence.pages = []

    async def run(self) -> None:
        """The engine loop; ends only by cancellation."""
        while True:
            items = self._next_items()
            if not items:
                self._work.clear()
                await self._work.wait()
                continue
            await self._step(items)

    def _next_items(self) -> list[tuple[Job, BatchItem]]:
        self._admit()
        budget = self._chunk_tokens
        items = []
        for job in self._running:
            sequence = job.sequence
            if budget == 0 or not sequence.uncomputed or sequence.output:
                continue
            start, end = sequence.next_span(budget)
            items.append((job, BatchItem(sequence, start, end, samples=end == sequence.num_tokens)))
            budget -= end - start
        return items

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running and self._find_pages(self._waiting[0]):
            self._running.append(self._waiting.popleft())

    def _find_pages(self, job: Job) -> bool:
        """Those of the longest cached prefix, and new ones for the rest; False if too few are left, then it has none.

        The last token is computed in any case: the first token of the answer follows from it.
        """
        sequence, page_size = job.sequence, self._engine.pool.page_size
        prefix = self._prefixes.lock(sequence.request.prompt[:-1], sequence.request.cache_salt)
        sequence.pages = list(prefix.pages)
        pages = self._prefixes.alloc(sequence.pages_short(sequence.num_tokens, page_size))
        if pages is None:
            self._give_back(prefix, sequence)
            return False
        sequence.pages.extend(pages)
        job.prefix = prefix
        sequence.computed = job.cached_tokens = len(prefix.pages) * page_size
        if job.cached_tokens:
            now_ns = spans.now_ns()
            job.put(ChunkDone(0, job.cached_tokens, now_ns, now_ns, None))
        return True

    async def _step(self, items: list[tuple[Job, BatchItem]]) -> None:
        self._stepping = tuple(job for job, _ in items)
        self._step_over.clear()
        began_ns = spans.now_ns()
        try:
            sampled = iter(await self._engine.step(Batch(item for _, item in items)))
            for job, item in items:
                job.sequence.computed = item.end
                token = next(sampled) if item.samples else None
                if token is not None:
                    job.sequence.append(token.token_id)
                job.put(ChunkDone(item.start, item.end, began_ns, spans.now_ns(), token))
        except Exception as defect:  # noqa: BLE001  a failed step fails its prompts, not the process
            _log.exception("an engine step failed")
            self._fail(defect)
        finally:
            self._stepping = ()
            self._step_over.set()

    def _fail(self, defect: Exception) -> None:
        for job in self._stepping:
            if job in self._running:
                self._running.remove(job)
            job.sequence.computed = 0  # what earlier steps wrote may be the cause: it is not kept
            job.put(InternalError(f"the engine failed: {type(defect).__name__}: {defect}"))
