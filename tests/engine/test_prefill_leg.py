"""Prefill ends no answer: it draws the one token that one engine alone would draw first, whatever that token means."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from pd_common.engine.engine import Engine
from pd_common.engine.request import Sequence
from pd_common.engine.sampler import SampledToken
from pd_common.generation import GenerationRequest
from pd_common.kv.prefix import PrefixCache
from services.prefill.rooms import own_leg
from services.prefill.scheduler import PrefillScheduler
from tests.engine.conftest import LoadEngine
from tests.engine.loop import generate_alone, make_request, random_prompt
from tests.tiny_models import EOS_ID, VOCAB_SIZE

PROMPT = random_prompt(40, seed=1, vocab_size=VOCAB_SIZE)
SEED_OF_EOS = 491
"""After `PROMPT`, at temperature 50."""

Draw = Callable[[GenerationRequest], Awaitable[list[SampledToken]]]


@pytest.fixture
async def engine(load_engine: LoadEngine) -> Engine:
    return load_engine()


@pytest.fixture
async def drawn(engine: Engine) -> AsyncIterator[Draw]:
    """What prefill draws for a client's request."""
    prefixes = PrefixCache(engine.pages, engine.pool.page_size, keeps=False)
    scheduler = PrefillScheduler(engine, prefixes, chunk_tokens=17, max_running=4, audited=True)
    loop = asyncio.create_task(scheduler.run())

    async def drawn(request: GenerationRequest) -> list[SampledToken]:
        job = scheduler.enqueue(Sequence(own_leg(request)))
        tokens: list[SampledToken] = []
        while not tokens:
            chunk = await job.next_chunk()
            tokens = [] if chunk.sampled is None else [chunk.sampled]
        await scheduler.release(job)
        return tokens

    yield drawn
    loop.cancel()
    await asyncio.wait([loop])


async def alone(engine: Engine, request: GenerationRequest) -> SampledToken:
    (job,) = await generate_alone(engine, [request])
    return job.sampled[0]


async def test_a_token_that_stops_the_answer_is_drawn_and_left_to_decode(engine: Engine, drawn: Draw) -> None:
    likeliest = (await alone(engine, make_request(PROMPT))).token_id
    text = engine.new_answer(make_request(PROMPT)).accept(likeliest).text
    for request in (
        make_request(PROMPT, stop_token_ids=(likeliest,)),
        make_request(PROMPT, stop=(text or "x",)),
        make_request(PROMPT, max_new_tokens=1),
    ):
        assert [token.token_id for token in await drawn(request)] == [likeliest]


async def test_an_end_of_text_is_drawn_as_any_other_token_unless_it_would_come_too_early(
    engine: Engine, drawn: Draw
) -> None:
    request = make_request(PROMPT, temperature=50.0, seed=SEED_OF_EOS)
    assert (await alone(engine, request)).token_id == EOS_ID
    assert [token.token_id for token in await drawn(request)] == [EOS_ID]
    longer = make_request(PROMPT, temperature=50.0, seed=SEED_OF_EOS, min_new_tokens=1)
    expected = await alone(engine, longer)
    assert expected.token_id != EOS_ID
    assert await drawn(longer) == [expected]


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_tokens_that_would_stop_it_too_early_are_banned_on_prefill_too(
    engine: Engine, drawn: Draw, ignore_eos: bool
) -> None:
    likeliest = (await alone(engine, make_request(PROMPT))).token_id
    request = make_request(PROMPT, min_new_tokens=3, stop_token_ids=(likeliest,), ignore_eos=ignore_eos, top_logprobs=2)
    expected = await alone(engine, request)
    assert expected.token_id != likeliest
    (token,) = await drawn(request)
    assert token.token_id == expected.token_id
    assert token.logprob is not None
    assert expected.logprob is not None
    assert token.logprob.logprob == pytest.approx(expected.logprob.logprob, abs=1e-4)


@pytest.mark.parametrize("seed", range(8))
async def test_a_seeded_first_token_is_that_of_one_engine_alone(engine: Engine, drawn: Draw, seed: int) -> None:
    request = make_request(PROMPT, temperature=2.0, seed=seed)
    request = replace(request, sampling=replace(request.sampling, top_p=0.9, top_k=50))
    assert await drawn(request) == [await alone(engine, request)]
