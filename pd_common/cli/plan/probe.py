"""A short probe of a running system: known prompts through its router, alone and at once, and answers side by side."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from pd_common.cli.bench.serve.client import Completions
from pd_common.cli.bench.serve.exchange import Exchange
from pd_common.cli.bench.serve.lengths import Uniform
from pd_common.cli.bench.serve.workload import Kind, Workload
from pd_common.errors import PeerLost
from pd_common.planning.speeds import Burst, Gap, Single

_FEWEST_TOKENS, _MOST_TOKENS = 16, 1024


@dataclass(frozen=True, slots=True)
class ProbeSizes:
    """What is sent. Answers of single prompts have one token; those side by side are cut off when enough is seen."""

    prompts: tuple[int, ...]
    rounds: int
    """Of single prompts; half as many of those at once."""
    burst: int
    """Prompts at once."""
    burst_tokens: int
    """Of each of their answers: what router and client do for them slows prefill down if they share its cores."""
    answers: tuple[int, ...]
    """So many side by side, each time after the two shortest prompts."""
    seconds: float
    """That they are looked at."""
    answer_tokens: int
    """Of these answers at most: the first must go on until the last has begun and enough is seen."""

    @classmethod
    def up_to(cls, longest: int, answers: int, kv_cache_tokens: int) -> ProbeSizes:
        """Prompts of up to `longest` tokens; up to so many answers, none longer than that, all within the pool."""
        prompts = tuple(max(1, longest // part) for part in (16, 4, 2, 1))
        side_by_side = tuple(sorted({1, max(1, answers // 4), answers}))
        room = min(longest, kv_cache_tokens // answers) - prompts[1]
        answer_tokens = max(_FEWEST_TOKENS, min(_MOST_TOKENS, room))
        return cls(prompts, 4, 4, burst_tokens=16, answers=side_by_side, seconds=1.5, answer_tokens=answer_tokens)


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of it: medians of the rounds, and means of gaps."""

    singles: tuple[Single, ...]
    bursts: tuple[Burst, ...]
    gaps: tuple[Gap, ...]


class Probe:
    """Sends prompts, no two of which begin in the same way, to one system that is otherwise idle."""

    def __init__(
        self, completions: Completions, vocab: int, seed: int, sizes: ProbeSizes, progress: Callable[[str], object]
    ) -> None:
        self._completions = completions
        self._vocab = vocab
        self._seed = seed
        self._sizes = sizes
        self._progress = progress
        self._numbers = itertools.count()

    async def run(self) -> Seen:
        """Raises PeerLost when a request fails."""
        sizes = self._sizes
        for tokens in sizes.prompts:
            self._progress(f"warming up, {tokens:,} tokens")
            await self._at_once(tokens, sizes.burst, sizes.burst_tokens)
        singles, bursts = [], []
        for tokens in sizes.prompts:
            self._progress(f"single prompts of {tokens:,} tokens")
            alone = [(await self._at_once(tokens, 1, 1))[0] for _ in range(sizes.rounds)]
            singles.append(Single(tokens, statistics.median(alone)))
            self._progress(f"{sizes.burst} prompts of {tokens:,} tokens at once")
            together = [
                await self._at_once(tokens, sizes.burst, sizes.burst_tokens) for _ in range(max(1, sizes.rounds // 2))
            ]
            bursts.append(Burst(tokens, sizes.burst, statistics.median(max(each) - min(each) for each in together)))
        gaps = []
        for running, tokens in itertools.product(sizes.answers, (sizes.prompts[0], sizes.prompts[1])):
            self._progress(f"{running} answers side by side, after prompts of {tokens:,} tokens")
            gaps.append(await self._side_by_side(running, tokens))
        return Seen(tuple(singles), tuple(bursts), tuple(gaps))

    async def _at_once(self, tokens: int, count: int, output_tokens: int) -> list[float]:
        """The TTFT of each, in seconds."""
        exchanges = [Exchange(place) for place in range(count)]
        await asyncio.gather(*(self._send(exchange, tokens, output_tokens) for exchange in exchanges))
        return [exchange.ttft_s for exchange in exchanges]

    async def _side_by_side(self, running: int, tokens: int) -> Gap:
        """While all of them run."""
        begun = [asyncio.Event() for _ in range(running)]
        exchanges = [Exchange(place, on_first=event.set) for place, event in enumerate(begun)]
        tasks = [asyncio.create_task(self._send(each, tokens, self._sizes.answer_tokens)) for each in exchanges]
        for task, event in zip(tasks, begun, strict=True):
            task.add_done_callback(partial(_set, event))  # one that has failed never begins
        try:
            for event in begun:
                await event.wait()
            await asyncio.wait(tasks, timeout=self._sizes.seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for failure in ended:
            if isinstance(failure, PeerLost):
                raise failure
        return _gap(exchanges, tokens)

    async def _send(self, exchange: Exchange, tokens: int, output_tokens: int) -> None:
        lengths = Uniform(tokens, tokens), Uniform(output_tokens, output_tokens)
        workload = Workload(self._seed, Kind.PROMPTS, *lengths, prefix_tokens=0, vocab=self._vocab)
        await self._completions.complete(workload.request(next(self._numbers)), exchange)
        if not exchange.is_answered:
            raise PeerLost(f"a request of the probe has failed: {exchange.failure}")


def _set(event: asyncio.Event, _: object) -> None:
    event.set()


def _gap(exchanges: Sequence[Exchange], tokens: int) -> Gap:
    """Means of all gaps while all ran: several tokens may come in one piece, and have no gaps then."""
    from_s = max(exchange.arrived_s[0] for exchange in exchanges)
    until_s = min(exchange.arrived_s[-1] for exchange in exchanges)
    gaps_s, contexts = [], []
    for exchange in exchanges:
        for written, (before_s, after_s) in enumerate(pairwise(exchange.arrived_s), start=1):
            if from_s <= before_s and after_s <= until_s:
                gaps_s.append(after_s - before_s)
                contexts.append(tokens + written)
    if not sum(gaps_s):
        raise PeerLost("an answer of the probe had ended before the last had begun: fewer side by side, with --answers")
    return Gap(len(exchanges), round(len(exchanges) * statistics.mean(contexts)), statistics.mean(gaps_s))
