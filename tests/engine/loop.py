"""What a scheduler does, in its simplest form: continuous batching over one engine, for tests of the engine alone."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pd_common.engine.batch import Batch, BatchItem
from pd_common.engine.engine import Engine
from pd_common.engine.request import Sequence as Running
from pd_common.engine.sampler import SampledToken
from pd_common.generation import GenerationRequest, SamplingParams
from pd_common.types import BootstrapAddress, BootstrapRoom, PageIndices

Place = Callable[[Engine, int], PageIndices]


def make_request(
    prompt: Sequence[int],
    max_new_tokens: int = 16,
    *,
    temperature: float = 0.0,
    seed: int | None = None,
    top_logprobs: int | None = None,
    min_new_tokens: int = 0,
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
) -> GenerationRequest:
    return GenerationRequest(
        rid="test",
        room=BootstrapRoom(1),
        bootstrap=BootstrapAddress("localhost", 8998),
        prompt=tuple(prompt),
        sampling=SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            min_new_tokens=min_new_tokens,
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
        ),
        return_logprob=top_logprobs is not None,
        top_logprobs=top_logprobs or 0,
    )


def random_prompt(length: int, seed: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(random.Random(f"{length}/{seed}").choices(range(1, vocab_size), k=length))


def consecutive(engine: Engine, count: int) -> PageIndices:
    pages = engine.pages.alloc(count)
    assert pages is not None
    return pages


def scattered(engine: Engine, count: int) -> PageIndices:
    """Free pages in an order that leaves no two of them consecutive."""
    everything = engine.pages.alloc(engine.pages.num_free)
    assert everything is not None
    shuffled = random.Random(count).sample(everything, len(everything))
    chosen: list[int] = []
    while len(chosen) < count:
        chosen.append(next(page for page in shuffled if page not in chosen and (not chosen or page != chosen[-1] + 1)))
    engine.pages.free([page for page in everything if page not in chosen])
    return tuple(chosen)


@dataclass(eq=False)
class Job:
    """One request on its way: its sequence and the tokens sampled so far."""

    running: Running
    max_new_tokens: int
    sampled: list[SampledToken] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.sampled]

    @property
    def is_done(self) -> bool:
        return len(self.sampled) >= self.max_new_tokens


def admit(engine: Engine, request: GenerationRequest, place: Place = consecutive) -> Job:
    """Room for prompt and answer is set aside at once."""
    engine.validate(request)
    running = Running(request)
    max_new_tokens = request.sampling.max_new_tokens
    tokens = len(request.prompt) + max_new_tokens
    running.pages.extend(place(engine, running.pages_short(tokens, engine.pool.page_size)))
    return Job(running, max_new_tokens)


def release(engine: Engine, job: Job) -> None:
    engine.pages.free(job.running.pages)
    job.running.pages.clear()


async def step(engine: Engine, jobs: Sequence[Job], chunk_tokens: int) -> None:
    """Every decode token, and prefill chunks of `chunk_tokens` in all, first come first served."""
    items, budget = [], chunk_tokens
    for job in jobs:
        if job.running.uncomputed == 1 and job.sampled:
            start, end = job.running.next_span(1)
        elif budget:
            start, end = job.running.next_span(budget)
            budget -= end - start
        else:
            continue
        items.append((job, BatchItem(job.running, start, end, samples=end == job.running.num_tokens)))
    results = iter(await engine.step(Batch(item for _, item in items)))
    for job, item in items:
        job.running.computed = item.end
        if item.samples:
            token = next(results)
            job.running.append(token.token_id)
            job.sampled.append(token)
    assert next(results, None) is None


async def run(engine: Engine, jobs: Sequence[Job], chunk_tokens: int) -> None:
    """Until every job has all its tokens."""
    while unfinished := [job for job in jobs if not job.is_done]:
        await step(engine, unfinished, chunk_tokens)


async def generate_alone(
    engine: Engine, requests: Sequence[GenerationRequest], chunk_tokens: int = 64, place: Place = consecutive
) -> list[Job]:
    """Serves all requests at once and gives their pages back."""
    jobs = [admit(engine, request, place) for request in requests]
    await run(engine, jobs, chunk_tokens)
    for job in jobs:
        release(engine, job)
    assert engine.pages.num_free == engine.pages.num_pages
    return jobs


def move_pages(source: Engine, source_pages: Sequence[int], target: Engine, target_pages: Sequence[int]) -> None:
    """What the data plane does: whole pages, addressed by base and item length alone."""
    from_bases, _, item_lens = source.pool.get_contiguous_buf_infos()
    to_bases, _, to_item_lens = target.pool.get_contiguous_buf_infos()
    assert item_lens == to_item_lens
    for from_base, to_base, item_len in zip(from_bases, to_bases, item_lens, strict=True):
        for source_page, target_page in zip(source_pages, target_pages, strict=True):
            ctypes.memmove(to_base + target_page * item_len, from_base + source_page * item_len, item_len)
