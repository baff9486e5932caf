"""Answers that lose their pages, as often as can be, are those of `model.generate` all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from pd_common.control.outputs import OutputHub
from pd_common.engine.engine import Engine
from pd_common.engine.output import AnswerBuilder
from pd_common.engine.request import Sequence as Tokens
from pd_common.generation import GenerationRequest
from pd_common.handoff.metadata import MetadataBuffers
from pd_common.kv.prefix import PrefixCache
from services.decode.host_copies import HostCopies, HostCopy
from services.decode.memory import Allocation, DecodeMemory
from services.decode.scheduler import DecodeScheduler
from tests.engine.conftest import LoadEngine, load_directory
from tests.engine.loop import admit, make_request, move_pages, random_prompt, release, run
from tests.engine.oracle import Oracle
from tests.tiny_models import FAMILIES, VOCAB_SIZE, tiny_model

LoadOracle = Callable[[str], Oracle]
LENGTHS = (1, 15, 16, 17, 40, 70)


class Decode:
    """Answers requests, half of them with the KV of a prefill; whatever is retracted comes back as soon as it fits."""

    def __init__(
        self, engine: Engine, prefill: Engine, host_pages: int, retract_every: int = 0, *, keeps: bool = True
    ) -> None:
        self._engine = engine
        self._prefill = prefill
        prefixes = PrefixCache(engine.pages, engine.pool.page_size, keeps=keeps)
        self.memory = DecodeMemory(prefixes, MetadataBuffers(1), engine.pool.page_size)
        self.copies = HostCopies(engine, host_pages)
        self.scheduler = DecodeScheduler(
            engine,
            self.memory,
            OutputHub(),
            self.copies,
            max_running=4,
            chunk_tokens=23,
            retract_every=retract_every,
            audit=self.memory.check_integrity,
        )
        self._freed = asyncio.Event()
        self.with_copy = self.without_copy = 0

    async def answers(self, requests: Sequence[GenerationRequest]) -> list[list[int]]:
        """All at once."""
        rooms = [self._answer(request, alone=bool(number % 2)) for number, request in enumerate(requests)]
        return await asyncio.wait_for(asyncio.gather(*rooms), 60)

    async def _answer(self, request: GenerationRequest, *, alone: bool) -> list[int]:
        sequence, builder = Tokens(request), self._engine.new_answer(request)
        begin = self._begin_alone if alone else self._receive
        allocation = await begin(sequence, builder)
        while (retracted := await self.scheduler.start(allocation, builder).ended) is not None:
            self._freed.set()
            allocation = await self._acquire(sequence, sequence.num_tokens - 1)
            if retracted.copy is None:
                self.without_copy += 1
                continue
            self.with_copy += 1
            await self.copies.load(retracted.copy, len(allocation.prefix.pages), allocation.own_pages)
            self.copies.drop(retracted.copy)
            sequence.computed = sequence.num_tokens - 1
        self.memory.release(allocation)
        self._freed.set()
        return sequence.output

    async def _begin_alone(self, sequence: Tokens, _: AnswerBuilder) -> Allocation:
        return await self._acquire(sequence, len(sequence.request.prompt) - 1)

    async def _receive(self, sequence: Tokens, builder: AnswerBuilder) -> Allocation:
        prompt = sequence.request.prompt
        leg = admit(self._prefill, sequence.request)
        leg.max_new_tokens = 1
        await run(self._prefill, [leg], chunk_tokens=64)
        allocation = await self._acquire(sequence, len(prompt))
        there, end = len(allocation.prefix.pages), len(sequence.pages)
        move_pages(self._prefill, leg.running.pages[there:end], self._engine, sequence.pages[there:])
        release(self._prefill, leg)
        sequence.computed = len(prompt)
        self.memory.share(allocation)
        sequence.append(leg.token_ids[0])
        builder.accept(leg.token_ids[0])
        return allocation

    async def _acquire(self, sequence: Tokens, find: int) -> Allocation:
        while (allocation := self.memory.allocate(sequence, find, slot=False)) is None:
            self._freed.clear()
            await self._freed.wait()
        return allocation


@asynccontextmanager
async def decoding(
    prefill: Engine, family: str, num_pages: int, host_pages: int, retract_every: int = 0, *, keeps: bool = True
) -> AsyncIterator[Decode]:
    """Over a pool of its own, with the prefill's pages. Asserts in the end that nothing is held any more."""
    engine = load_directory(tiny_model(family), prefill.pool.page_size, num_pages)
    decode = Decode(engine, prefill, host_pages, retract_every, keeps=keeps)
    loop = asyncio.create_task(decode.scheduler.run())
    try:
        yield decode
        decode.memory.check_integrity()
        assert not loop.done()
        assert (list(decode.memory.held), decode.copies.pages_held) == ([], 0)
    finally:
        loop.cancel()
        await asyncio.wait([loop])
        await engine.close()


def requests_of(prompts: Sequence[Sequence[int]], new_tokens: int = 16) -> list[GenerationRequest]:
    return [make_request(prompt, new_tokens, ignore_eos=True) for prompt in prompts]


@pytest.mark.parametrize(("host_pages", "keeps"), [(2000, False), (0, True)])
@pytest.mark.parametrize("retract_every", [1, 3])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("family", FAMILIES)
async def test_forced_retraction_changes_no_token(
    family: str,
    page_size: int,
    retract_every: int,
    host_pages: int,
    keeps: bool,
    load_engine: LoadEngine,
    oracle: LoadOracle,
) -> None:
    """Prompts in chunks beside answers, two of which begin in the same way."""
    prompts = [random_prompt(length, seed=21, vocab_size=VOCAB_SIZE) for length in LENGTHS]
    prompts += [prompts[-1][:50] + prompts[2], prompts[-1]]
    prefill = load_engine(family, page_size)
    async with decoding(prefill, family, 1280 // page_size, host_pages, retract_every, keeps=keeps) as decode:
        assert await decode.answers(requests_of(prompts)) == [oracle(family).tokens(prompt) for prompt in prompts]
        assert (decode.with_copy > 0, decode.without_copy > 0) == (host_pages > 0, host_pages == 0)


@pytest.mark.parametrize(("host_pages", "keeps"), [(2000, True), (2000, False), (0, True), (0, False)])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("family", ["llama", "mistral"])
async def test_answers_that_push_each_other_out(
    family: str, page_size: int, host_pages: int, keeps: bool, load_engine: LoadEngine, oracle: LoadOracle
) -> None:
    """Each of them fits, all of their prompts do, but not what is to become of them."""
    prompts = [random_prompt(20 + number, seed=22, vocab_size=VOCAB_SIZE) for number in range(5)]
    expected = [oracle(family).tokens(prompt, 60) for prompt in prompts]
    prefill = load_engine(family, page_size)
    async with decoding(prefill, family, 192 // page_size, host_pages, keeps=keeps) as decode:
        assert await decode.answers(requests_of(prompts, 60)) == expected
        assert decode.with_copy + decode.without_copy > 2
        assert (decode.with_copy > 0) == (host_pages > 0)


async def test_drawn_tokens_are_the_same_after_retraction(load_engine: LoadEngine) -> None:
    prompts = [random_prompt(20, seed=23 + number, vocab_size=VOCAB_SIZE) for number in range(4)]
    requests = [
        make_request(prompt, 16, temperature=1.0, seed=seed, ignore_eos=True) for seed, prompt in enumerate(prompts)
    ]
    async with decoding(load_engine(), "llama", 80, host_pages=80) as decode:
        undisturbed = await decode.answers(requests)
        assert decode.with_copy + decode.without_copy == 0
    async with decoding(load_engine(), "llama", 80, host_pages=80, retract_every=1) as decode:
        assert await decode.answers(requests) == undisturbed
        assert decode.with_copy > 4


async def test_a_copy_that_comes_back_wrong_changes_the_answer(load_engine: LoadEngine, oracle: LoadOracle) -> None:
    """Proof that the comparisons above would notice what is lost on the way through host memory."""
    prompt = random_prompt(40, seed=24, vocab_size=VOCAB_SIZE)
    async with decoding(load_engine(), "llama", 80, host_pages=80, retract_every=3, keeps=False) as decode:
        load = decode.copies.load

        async def load_turned(copy: HostCopy, first_page: int, pages: Sequence[int]) -> None:
            copy.rows[1] = copy.rows[1].flip(-1)
            await load(copy, first_page, pages)

        decode.copies.load = load_turned  # type: ignore[method-assign]
        assert await decode.answers(requests_of([prompt])) != [oracle("llama").tokens(prompt)]
