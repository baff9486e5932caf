"""The engine's tokens equal transformers' own, however prompts are cut, mixed, placed and moved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pd_common.engine.engine import Engine
from tests.engine.conftest import LoadEngine, load_directory
from tests.engine.loop import (
    Place,
    admit,
    consecutive,
    generate_alone,
    make_request,
    move_pages,
    random_prompt,
    release,
    run,
    scattered,
    step,
)
from tests.engine.oracle import Oracle
from tests.tiny_models import FAMILIES, OTHER_SEAMS, VOCAB_SIZE, WINDOW, tiny_model

LoadOracle = Callable[[str], Oracle]
PLACES = (consecutive, scattered)


def prompts_around(page_size: int) -> list[tuple[int, ...]]:
    lengths = sorted({1, max(page_size - 1, 1), page_size, page_size + 1, 2 * page_size + 5, 150})
    return [random_prompt(length, seed=length, vocab_size=VOCAB_SIZE) for length in lengths]


def fill(engine: Engine, number: float) -> None:
    for layer in engine.pool.layers:
        engine.pool.layer(layer.layer_id).key.fill_(number)
        engine.pool.layer(layer.layer_id).value.fill_(number)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("family", FAMILIES)
async def test_mixed_batches_of_chunks_and_decode_tokens(
    family: str, page_size: int, place: Place, load_engine: LoadEngine, oracle: LoadOracle
) -> None:
    """A chunk budget that divides no prompt: the end of one, the start of the next and others' decode tokens mix."""
    engine = load_engine(family, page_size)
    fill(engine, float("nan"))
    prompts = prompts_around(page_size)

    jobs = await generate_alone(engine, [make_request(prompt) for prompt in prompts], chunk_tokens=23, place=place)

    assert [job.token_ids for job in jobs] == [oracle(family).tokens(prompt) for prompt in prompts]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", OTHER_SEAMS)
async def test_softcap_and_sinks(family: str, place: Place, load_engine: LoadEngine, oracle: LoadOracle) -> None:
    engine = load_engine(family)
    prompts = prompts_around(16)

    jobs = await generate_alone(engine, [make_request(prompt) for prompt in prompts], chunk_tokens=41, place=place)

    assert [job.token_ids for job in jobs] == [oracle(family).tokens(prompt) for prompt in prompts]


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 1000])
async def test_chunk_size_changes_nothing(chunk_tokens: int, load_engine: LoadEngine, oracle: LoadOracle) -> None:
    prompt = random_prompt(61, seed=3, vocab_size=VOCAB_SIZE)
    for family in ("llama", "mistral"):
        (job,) = await generate_alone(load_engine(family), [make_request(prompt)], chunk_tokens)

        assert job.token_ids == oracle(family).tokens(prompt)


@pytest.mark.parametrize("chunk_tokens", [1, WINDOW, 1000])
async def test_prompts_that_just_fill_a_window(chunk_tokens: int, load_engine: LoadEngine, oracle: LoadOracle) -> None:
    prompts = [random_prompt(WINDOW + more, seed=6, vocab_size=VOCAB_SIZE) for more in (-1, 0, 1, 2)]
    for prompt in prompts:
        (job,) = await generate_alone(load_engine("mistral"), [make_request(prompt, top_logprobs=0)], chunk_tokens)

        assert job.token_ids == oracle("mistral").tokens(prompt)
        truth = oracle("mistral").logprobs(prompt).amax(dim=-1).tolist()
        # One key too many or too few may leave the likeliest token in place, but not its log-probability.
        assert [token.logprob and token.logprob.logprob for token in job.sampled] == pytest.approx(truth, abs=1e-4)


async def test_scattered_sequences_of_very_different_length(load_engine: LoadEngine, oracle: LoadOracle) -> None:
    prompts = [random_prompt(length, seed=9, vocab_size=VOCAB_SIZE) for length in (3, 300, 20, 18, 170, 40)]
    for family in ("qwen2", "mistral"):
        jobs = await generate_alone(load_engine(family), [make_request(prompt) for prompt in prompts], 500, scattered)

        assert [job.token_ids for job in jobs] == [oracle(family).tokens(prompt) for prompt in prompts]


async def test_arrivals_while_others_decode(load_engine: LoadEngine, oracle: LoadOracle) -> None:
    engine = load_engine("qwen3")
    prompts = [random_prompt(length, seed=4, vocab_size=VOCAB_SIZE) for length in (30, 5, 49)]
    jobs = []
    for prompt in prompts:
        jobs.append(admit(engine, make_request(prompt)))
        for _ in range(4):
            await step(engine, jobs, chunk_tokens=19)
    await run(engine, jobs, chunk_tokens=19)
    for job in jobs:
        release(engine, job)

    assert [job.token_ids for job in jobs] == [oracle("qwen3").tokens(prompt) for prompt in prompts]


async def test_a_retracted_sequence_is_computed_again_with_its_answer(
    load_engine: LoadEngine, oracle: LoadOracle
) -> None:
    engine = load_engine()
    prompt = random_prompt(37, seed=5, vocab_size=VOCAB_SIZE)
    job = admit(engine, make_request(prompt))
    for _ in range(6):
        await step(engine, [job], chunk_tokens=37)
    pages = len(job.running.pages)
    release(engine, job)
    fill(engine, 3.0)
    job.running.computed = 0
    job.running.pages.extend(scattered(engine, pages))

    await run(engine, [job], chunk_tokens=10)
    release(engine, job)

    assert job.token_ids == oracle("llama").tokens(prompt)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_SEAMS])
async def test_decode_goes_on_in_another_pool(
    family: str, page_size: int, load_engine: LoadEngine, oracle: LoadOracle
) -> None:
    """The handoff: chunked prefill in one pool, pages moved to other ids of a second pool, the first then destroyed."""
    prefill, decode = load_engine(family, page_size, 0), load_engine(family, page_size, 1)
    fill(decode, float("nan"))
    prompts = [random_prompt(length, seed=6, vocab_size=VOCAB_SIZE) for length in (1, 16, 37, 70)]
    legs = [admit(prefill, make_request(prompt, max_new_tokens=1), scattered) for prompt in prompts]
    await run(prefill, legs, chunk_tokens=29)

    jobs = []
    for prompt, leg in zip(prompts, legs, strict=True):
        job = admit(decode, make_request(prompt), scattered)
        used = -(-len(prompt) // page_size)
        move_pages(prefill, leg.running.pages[:used], decode, job.running.pages[:used])
        job.running.computed = len(prompt)
        job.running.append(leg.token_ids[0])
        job.sampled.append(leg.sampled[0])
        jobs.append(job)
        release(prefill, leg)
    fill(prefill, float("nan"))
    await run(decode, jobs, chunk_tokens=1)
    for job in jobs:
        release(decode, job)

    assert [job.token_ids for job in jobs] == [oracle(family).tokens(prompt) for prompt in prompts]


@pytest.mark.parametrize("family", FAMILIES)
async def test_one_wrong_row_changes_the_answer(family: str, load_engine: LoadEngine, oracle: LoadOracle) -> None:
    """Proof that the comparisons above would notice one token's keys and values missing or in the wrong place."""
    engine = load_engine(family)
    prompt = random_prompt(40, seed=8, vocab_size=VOCAB_SIZE)
    right = oracle(family).tokens(prompt)
    for position in (20, 30, 39):
        job = admit(engine, make_request(prompt))
        await step(engine, [job], chunk_tokens=40)
        page, offset = job.running.pages[position // 16], position % 16
        for layer in engine.pool.layers:
            for row in (engine.pool.layer(layer.layer_id).key, engine.pool.layer(layer.layer_id).value):
                row[page, offset] = row[page, offset].flip(-1)
        await run(engine, [job], chunk_tokens=1)
        release(engine, job)

        assert job.token_ids[0] == right[0]
        assert job.token_ids != right


@pytest.mark.parametrize("family", FAMILIES)
async def test_logprobs(family: str, load_engine: LoadEngine, oracle: LoadOracle) -> None:
    prompt = random_prompt(45, seed=2, vocab_size=VOCAB_SIZE)
    (job,) = await generate_alone(load_engine(family), [make_request(prompt, top_logprobs=5)], chunk_tokens=17)

    for token, truth in zip(job.sampled, oracle(family).logprobs(prompt), strict=True):
        assert token.logprob is not None
        assert token.logprob.token_id == token.token_id
        assert token.logprob.logprob == pytest.approx(truth[token.token_id].item(), abs=1e-4)
        likeliest, token_ids = truth.topk(5)
        assert [top.token_id for top in token.logprob.top] == token_ids.tolist()
        assert [top.logprob for top in token.logprob.top] == pytest.approx(likeliest.tolist(), abs=1e-4)


async def test_a_seeded_answer_is_the_same_alone_in_a_batch_and_after_a_handoff(load_engine: LoadEngine) -> None:
    first, second = load_engine("llama", 16, 0), load_engine("llama", 16, 1)
    prompt = random_prompt(33, seed=1, vocab_size=VOCAB_SIZE)
    request = make_request(prompt, temperature=1.0, seed=42)
    (alone,) = await generate_alone(first, [request])
    others = [make_request(random_prompt(length, 1, VOCAB_SIZE), temperature=0.7, seed=length) for length in (50, 3)]
    batched = (await generate_alone(first, [others[0], request, others[1]], chunk_tokens=11, place=scattered))[1]

    leg = admit(first, request)
    await step(first, [leg], chunk_tokens=33)
    moved = admit(second, request, scattered)
    move_pages(first, leg.running.pages, second, moved.running.pages)
    moved.running.computed = 33
    moved.running.append(leg.token_ids[0])
    moved.sampled.append(leg.sampled[0])
    await run(second, [moved], chunk_tokens=1)
    release(first, leg)
    release(second, moved)
    (another_seed,) = await generate_alone(first, [make_request(prompt, temperature=1.0, seed=43)])

    assert alone.token_ids == batched.token_ids == moved.token_ids
    assert alone.token_ids != another_seed.token_ids


async def test_a_pair_equals_one_engine_in_bfloat16() -> None:
    """Other kernels may round bfloat16 differently; a pair with the same chunks may not differ from one engine."""
    one, two = (load_directory(tiny_model("qwen3"), dtype="bfloat16") for _ in range(2))
    assert one.pool.dtype == torch.bfloat16
    prompt = random_prompt(50, seed=7, vocab_size=VOCAB_SIZE)
    (alone,) = await generate_alone(one, [make_request(prompt)], chunk_tokens=16)
    leg = admit(one, make_request(prompt))
    while not leg.sampled:
        await step(one, [leg], chunk_tokens=16)
    moved = admit(two, make_request(prompt))
    move_pages(one, leg.running.pages, two, moved.running.pages)
    moved.running.computed = 50
    moved.running.append(leg.token_ids[0])
    moved.sampled.append(leg.sampled[0])
    await run(two, [moved], chunk_tokens=1)
    await one.close()
    await two.close()

    assert moved.token_ids == alone.token_ids
