"""Prompts computed after pages that earlier ones left are answered as `model.generate` answers them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from pd_common.engine.engine import Engine
from pd_common.engine.request import Sequence as Running
from pd_common.kv.prefix import PrefixCache
from services.prefill.job import Job as Prefilled
from services.prefill.scheduler import PrefillScheduler
from tests.engine.conftest import LoadEngine
from tests.engine.loop import admit, make_request, move_pages, random_prompt, release, run
from tests.engine.oracle import Oracle
from tests.tiny_models import FAMILIES, OTHER_SEAMS, VOCAB_SIZE, WINDOW

LoadOracle = Callable[[str], Oracle]
PAGE_SIZES = (1, 16)
CHUNK = 23
COMMON = 70
"""Tokens that the prompts begin with: several windows, and no whole number of pages of 16."""


class Pair:
    """A prefill whose cache is that of one test, and a decode engine that the pages are moved to."""

    def __init__(self, prefill: Engine, decode: Engine, max_running: int = 8) -> None:
        self.prefill, self.decode = prefill, decode
        self.prefixes = PrefixCache(prefill.pages, prefill.pool.page_size)
        self.scheduler = PrefillScheduler(prefill, self.prefixes, CHUNK, max_running, audited=True)
        self.cached: list[int] = []
        """Of each prompt, in the order in which they were answered."""

    async def answers(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """All at once."""
        jobs = [self.scheduler.enqueue(Running(make_request(prompt))) for prompt in prompts]
        return [await self.answer(job) for job in jobs]

    async def answer(self, job: Prefilled) -> list[int]:
        while (chunk := await job.next_chunk()).sampled is None:
            pass
        self.cached.append(job.cached_tokens)
        moved = admit(self.decode, job.sequence.request)
        move_pages(self.prefill, job.sequence.pages, self.decode, moved.running.pages[: len(job.sequence.pages)])
        await self.scheduler.release(job)
        moved.running.computed = chunk.end
        moved.running.append(chunk.sampled.token_id)
        moved.sampled.append(chunk.sampled)
        await run(self.decode, [moved], chunk_tokens=1)
        release(self.decode, moved)
        return moved.token_ids


@asynccontextmanager
async def running(pair: Pair) -> AsyncIterator[Pair]:
    """Asserts in the end that no page is lost, and empties the cache for the next test."""
    loop = asyncio.create_task(pair.scheduler.run())
    try:
        yield pair
        pair.prefixes.check_integrity()
        everything = pair.prefixes.alloc(pair.prefill.pages.num_pages)
        assert everything is not None
        pair.prefill.pages.free(everything)
        assert not loop.done()
    finally:
        loop.cancel()
        await asyncio.wait([loop])


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_SEAMS])
async def test_warm_answers_equal_generate(
    family: str, page_size: int, load_engine: LoadEngine, oracle: LoadOracle
) -> None:
    """One token left, a whole page, a window, several chunks; and prompts that share less than the whole prefix."""
    common = random_prompt(COMMON, seed=11, vocab_size=VOCAB_SIZE)
    more = random_prompt(60, seed=12, vocab_size=VOCAB_SIZE)
    prompts = [
        common,
        *(common + more[:length] for length in (1, 2, WINDOW, 60)),
        *(common[:length] + more[:9] for length in (16, 33, WINDOW - 1, WINDOW + 1)),
        common[:64],
        common[:65],
    ]
    expected = [oracle(family).tokens(prompt) for prompt in prompts]
    engines = load_engine(family, page_size, 0), load_engine(family, page_size, 1)
    async with running(Pair(*engines)) as pair:
        assert await pair.answers(prompts[:1]) == expected[:1]
        assert await pair.answers(prompts[1:]) == expected[1:]
        assert pair.cached == [0, *(_shared(common, prompt, page_size) for prompt in prompts[1:])]
        assert await pair.answers(prompts) == expected  # now each has been there itself
        assert pair.cached[len(prompts) :] == [_whole_pages(len(prompt) - 1, page_size) for prompt in prompts]


def _whole_pages(tokens: int, page_size: int) -> int:
    return tokens // page_size * page_size


def _shared(common: Sequence[int], prompt: Sequence[int], page_size: int) -> int:
    same = [mine == other for mine, other in zip(common, prompt[:-1], strict=False)]
    return _whole_pages(same.index(False) if False in same else len(same), page_size)


@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_SEAMS])
async def test_one_wrong_cached_row_changes_the_answer(
    family: str, load_engine: LoadEngine, oracle: LoadOracle
) -> None:
    """Proof that the comparison above would notice a page of another prompt, or one that is not computed."""
    common = random_prompt(COMMON, seed=11, vocab_size=VOCAB_SIZE)
    prompt = (*common, *random_prompt(9, seed=12, vocab_size=VOCAB_SIZE))
    engines = load_engine(family, 16, 0), load_engine(family, 16, 1)
    async with running(Pair(*engines)) as pair:
        await pair.answers([common])
        prefix = pair.prefixes.lock(prompt, b"")
        pages = pair.prefill.pool
        for layer in pages.layers:  # position 60, which a window from position 70 on still sees
            for rows in (pages.layer(layer.layer_id).key, pages.layer(layer.layer_id).value):
                rows[prefix.pages[3], 12] = rows[prefix.pages[3], 12].flip(-1)
        pair.prefixes.release(prefix, (), ())
        assert await pair.answers([prompt]) != [oracle(family).tokens(prompt)]


async def test_prompts_that_push_each_other_out_are_answered_alike(load_engine: LoadEngine, oracle: LoadOracle) -> None:
    """Twice as many different prompts as the pool holds, some of them again and again."""
    prompts = [random_prompt(150 + number, seed=number, vocab_size=VOCAB_SIZE) for number in range(16)]
    order = [prompts[number * 5 % 16] for number in range(16)] + [prompts[number % 3] for number in range(9)]
    async with running(Pair(load_engine("mistral", 16, 0), load_engine("mistral", 16, 1))) as pair:
        for start in range(0, len(order), 5):
            batch = order[start : start + 5]
            assert await pair.answers(batch) == [oracle("mistral").tokens(prompt) for prompt in batch]
        assert max(pair.cached) > 0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_SEAMS])
async def test_a_prompt_that_is_rolled_back_at_every_chunk_is_answered_alike(
    family: str, page_size: int, load_engine: LoadEngine, oracle: LoadOracle
) -> None:
    """Computed before anybody wants it, one chunk at a time: a promised prompt takes its only place after each."""
    prompt = random_prompt(120, seed=13, vocab_size=VOCAB_SIZE)
    engines = load_engine(family, page_size, 0), load_engine(family, page_size, 1)
    async with running(Pair(*engines, max_running=1)) as pair:
        rollbacks = -(-len(prompt) // CHUNK) + 1
        job = pair.scheduler.expect(Running(make_request(prompt)), rollbacks + 1)
        for number in range(rollbacks):
            await job.turn.wait()
            other = random_prompt(5 + number, seed=14, vocab_size=VOCAB_SIZE)
            assert await pair.answers([other]) == [oracle(family).tokens(other)]
        assert job.attempts_left == 1
        pair.scheduler.promise(job)
        assert await pair.answer(job) == oracle(family).tokens(prompt)
