"""Which prompts are computed when: their order, chunks of several prompts in one step, pages for each.

What a prompt has in common with an earlier one is not computed again.

Owned by the event loop; only the engine's step runs elsewhere. Knows nothing of transfers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from bisect import insort

from pd_common.engine.batch import Batch, BatchItem
from pd_common.engine.engine import Engine
from pd_common.engine.request import Sequence
from pd_common.errors import InternalError
from pd_common.kv.prefix import Prefix, PrefixCache
from pd_common.telemetry import spans
from services.prefill.job import ChunkDone, Job

_log = logging.getLogger(__name__)


class PrefillScheduler:
    """At most `chunk_tokens` tokens a step and `max_running` prompts with pages at a time.

    Promised prompts come first, then those of higher priority, then earlier ones; of those that wait none overtakes
    another. A prompt that is not promised is computed only in steps that no promised one could use, and gives its place
    and its pages up at the end of any step when a promised one waits for them.

    Pages can be found by others once their prompt is computed or released: no prompt meets pages that are not computed
    yet. A prompt is compared with the cache when it has its turn; it does not wait for one that begins in the same way
    and is being computed just then.
    """

    def __init__(
        self,
        engine: Engine,
        prefixes: PrefixCache,
        chunk_tokens: int,
        max_running: int,
        *,
        last_chunk_tokens: int | None = None,
        audited: bool = False,
    ) -> None:
        """`prefixes` is over the engine's pages. `audited`: the loop dies of a page that is lost, after any step.

        The last of several chunks has at most `last_chunk_tokens` tokens: nothing is computed while it is sent.
        """
        self._engine = engine
        self._prefixes = prefixes
        self._chunk_tokens = chunk_tokens
        self._max_running = max_running
        self._last_chunk_tokens = last_chunk_tokens or chunk_tokens
        self._audited = audited
        self._arrivals = itertools.count()
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._prefix_of: dict[Job, Prefix] = {}
        """Of each job that holds pages: the first of them, which others may be reading as well."""
        self._blocked: Job | None = None
        """It is first in line, did not fit, and nothing has happened since that could make it fit."""
        self._stepping: tuple[Job, ...] = ()
        self._step_over = asyncio.Event()
        self._work = asyncio.Event()

    def enqueue(self, sequence: Sequence) -> Job:
        """Takes a promised prompt in; it waits for its turn and for pages."""
        job = self.expect(sequence, 0)
        self.promise(job)
        return job

    def expect(self, sequence: Sequence, attempts: int) -> Job:
        """Takes in a prompt that is not promised yet; at most so many times it is begun before it is."""
        job = Job(sequence, next(self._arrivals), attempts)
        self._wait(job)
        return job

    def promise(self, job: Job) -> None:
        """From now on it is certain that somebody wants what the job gives: what it has is not given up any more."""
        queue = self._running if job in self._running else self._waiting
        if job in queue:
            queue.remove(job)
        job.promised = True
        insort(queue, job, key=_order)
        self._blocked = None
        self._work.set()

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
        if job in self._prefix_of:
            self._give_back(job)
        self._work.set()

    async def run(self) -> None:
        """The engine loop; ends by cancellation, or with InternalError when an audit finds a page lost."""
        while True:
            items = self._next_items()
            if not items:
                self._work.clear()
                await self._work.wait()
                continue
            await self._step(items)
            if self._audited:
                self.check_integrity()

    def check_integrity(self) -> None:
        """Raises InternalError when a page has no owner, or two."""
        own = (page for job, prefix in self._prefix_of.items() for page in job.sequence.pages[len(prefix.pages) :])
        self._prefixes.check_integrity(own)

    # --- which prompts are in the next step ---

    def _next_items(self) -> list[tuple[Job, BatchItem]]:
        self._admit()
        budget = self._chunk_tokens
        items = []
        for job in self._candidates():
            if budget == 0:
                break
            start, end = job.sequence.next_span(self._chunk_of(job, budget))
            items.append((job, BatchItem(job.sequence, start, end, samples=end == job.sequence.num_tokens)))
            budget -= end - start
        return items

    def _chunk_of(self, job: Job, budget: int) -> int:
        """Tokens of its next chunk. What would be its last is cut in two where it is too long for that.

        Not if it is the whole prompt: attention is cheapest where nothing goes before, so that would cost more.
        """
        left = job.sequence.uncomputed
        if job.sequence.computed and self._last_chunk_tokens < left <= budget:
            return left - min(self._last_chunk_tokens, left // 2)
        return budget

    def _candidates(self) -> list[Job]:
        """In order. One that is not promised waits, with its pages, while promised ones are computed."""
        unfinished = [job for job in self._running if not job.sequence.output and job.sequence.uncomputed]
        return [job for job in unfinished if job.promised] or unfinished

    def _admit(self) -> None:
        while self._waiting and self._may_begin(self._waiting[0]):
            job = self._waiting[0]
            if not self._find_room(job):
                self._blocked = job
                return
            self._waiting.pop(0)
            insort(self._running, job, key=_order)
            job.begin(len(self._prefix_of[job].pages) * self._engine.pool.page_size)

    def _may_begin(self, job: Job) -> bool:
        """One that is not promised takes no pages before it can be computed."""
        return job is not self._blocked and (job.promised or not any(other.promised for other in self._candidates()))

    def _find_room(self, job: Job) -> bool:
        """A place and pages for the first in line. For a promised one all others give theirs up, if need be."""
        while len(self._running) >= self._max_running or not self._find_pages(job):
            if not job.promised or not self._running or self._running[-1].promised:
                return False
            self._roll_back(self._running[-1])
        return True

    def _roll_back(self, job: Job) -> None:
        """It waits as if it had never been computed. The cache keeps its whole pages as long as nobody needs them."""
        self._running.remove(job)
        self._give_back(job)
        job.reset()
        self._wait(job)

    def _wait(self, job: Job) -> None:
        """One that may not be begun any more before it is promised stands in no line."""
        if job.attempts_left > 0:
            insort(self._waiting, job, key=_order)
            self._work.set()

    # --- pages ---

    def _find_pages(self, job: Job) -> bool:
        """Those of the longest cached prefix, and new ones for the rest; False if too few are left, then it has none.

        The last token is computed in any case: the first token of the answer follows from it.
        """
        sequence = job.sequence
        prefix = self._prefixes.lock(sequence.request.prompt[:-1], sequence.request.cache_salt)
        sequence.pages = list(prefix.pages)
        pages = self._prefixes.alloc(sequence.pages_short(sequence.num_tokens, self._engine.pool.page_size))
        self._prefix_of[job] = prefix
        if pages is None:
            self._give_back(job)
            return False
        sequence.pages.extend(pages)
        return True

    def _share(self, job: Job) -> None:
        """Its prompt is computed: others may begin with it from now on."""
        prefix, sequence = self._prefix_of[job], job.sequence
        own = sequence.pages[len(prefix.pages) :]
        self._prefix_of[job] = self._prefixes.share(prefix, sequence.request.prompt, own)
        self._blocked = None

    def _give_back(self, job: Job) -> None:
        """Takes all pages of the job; what is computed stays in the cache."""
        prefix, sequence = self._prefix_of.pop(job), job.sequence
        own = sequence.pages[len(prefix.pages) :]
        self._prefixes.release(prefix, sequence.tokens(0, sequence.computed), own)
        sequence.pages = []
        self._blocked = None

    # --- steps ---

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
                    self._share(job)
                job.put(ChunkDone(item.start, item.end, began_ns, spans.now_ns(), token))
        except Exception as defect:  # noqa: BLE001  a failed step fails its prompts, not the process
            _log.exception("an engine step failed")
            self._fail(defect)
        finally:
            self._stepping = ()
            self._step_over.set()

    def _fail(self, defect: Exception) -> None:
        for job in self._stepping:
            job.sequence.computed = 0  # what earlier steps wrote may be the cause: it is not kept
            if job in self._running and not job.promised:
                job.attempts_left = 1  # nobody waits for it yet: it is computed again when somebody does, not before
                self._roll_back(job)
                continue
            if job in self._running:
                self._running.remove(job)
                self._blocked = None
            job.put(InternalError(f"the engine failed: {type(defect).__name__}: {defect}"))


def _order(job: Job) -> tuple[bool, int, int]:
    return not job.promised, -job.sequence.request.priority, job.arrival
