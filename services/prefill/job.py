"""One prompt to compute: what is asked for, and what has come of it so far, for whoever sends it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pd_common.engine.request import Sequence
from pd_common.engine.sampler import SampledToken
from pd_common.errors import PdError
from pd_common.telemetry import spans


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """Tokens `[start, end)` of one prompt have KV. `sampled` is the first token, after the last chunk."""

    start: int
    end: int
    began_ns: int
    ended_ns: int
    sampled: SampledToken | None

    @property
    def was_cached(self) -> bool:
        """Nothing had to be computed for it."""
        return self.began_ns == self.ended_ns


@dataclass(slots=True, eq=False)
class Job:
    """One prompt. Its pages are those of `sequence`, from its turn until it is released.

    `promised` when it is certain where the pages go; until then all may be taken back, and nothing must be read of it.
    """

    sequence: Sequence
    arrival: int
    attempts_left: int
    """How many times it may be begun before it is promised."""
    promised: bool = False
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    """It has pages, or has had them and is released."""
    cached_tokens: int = 0
    """Tokens at the beginning that others had computed; what an earlier attempt has left does not count."""
    _begun: bool = False
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

    async def computed(self) -> None:
        """Returns when the whole prompt is; raises as `next_chunk` does."""
        while (await self.next_chunk()).sampled is None:
            pass

    def begin(self, cached_tokens: int) -> None:
        """It has pages now, and those of the first `cached_tokens` tokens are computed."""
        self.cached_tokens = min(cached_tokens, self.cached_tokens) if self._begun else cached_tokens
        self._begun = True
        self.sequence.computed = cached_tokens
        self.turn.set()
        if cached_tokens:
            now_ns = spans.now_ns()
            self.put(ChunkDone(0, cached_tokens, now_ns, now_ns, None))

    def put(self, result: ChunkDone | PdError) -> None:
        self._results.put_nowait(result)

    def reset(self) -> None:
        """As if it had never been begun, but for the attempt; its pages are given back already."""
        self.attempts_left -= 1
        self.turn.clear()
        self.sequence.computed = 0
        self.sequence.output.clear()
        self._results = asyncio.Queue()
