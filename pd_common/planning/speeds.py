"""How fast a system is, in a few numbers: what a step of each engine costs, and what a handoff adds.

They are fitted to what a short probe has seen, and kept in a JSON file. Knows neither network nor queue.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np

from pd_common.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of the servers on which queues and steps depend, by their names there, with their defaults."""

    chunked_prefill_size: int = 2048
    last_chunk_tokens: int = 512
    max_running_requests: int = 32
    page_size: int = 16
    kv_cache_tokens: int = 65536
    num_reserved_decode_tokens: int = 512

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int) or value < (0 if name == "num_reserved_decode_tokens" else 1):
                raise InvalidRequest(f"{name} must be a whole number and positive, not {value!r}", field=name)

    @property
    def pages(self) -> int:
        """Of the pool of one process."""
        return -(-self.kv_cache_tokens // self.page_size)

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


@dataclass(frozen=True, slots=True)
class Chunk:
    """`tokens` of one prompt in one step, after `before` that are computed already."""

    before: int
    tokens: int

    @property
    def pairs(self) -> int:
        """Every token attends to itself and to all before it."""
        return self.tokens * self.before + self.tokens * (self.tokens + 1) // 2


def chunk_of(computed: int, prompt_tokens: int, budget: int, last_chunk_tokens: int) -> Chunk:
    """What the scheduler computes next of a prompt when the step has room for `budget` tokens.

    The last of several chunks is cut in two where it is too long.
    """
    left = prompt_tokens - computed
    if computed and last_chunk_tokens < left <= budget:
        return Chunk(computed, left - min(last_chunk_tokens, left // 2))
    return Chunk(computed, min(left, budget))


def chunks_of(prompt_tokens: int, settings: Settings) -> list[Chunk]:
    """Those of a prompt that prefill has all to itself, one a step."""
    chunks, computed = [], 0
    while computed < prompt_tokens:
        chunk = chunk_of(computed, prompt_tokens, settings.chunked_prefill_size, settings.last_chunk_tokens)
        chunks.append(chunk)
        computed += chunk.tokens
    return chunks


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """Seconds of a step, of each token that it computes, and of each pair of tokens of which one attends to the other.

    What is done for the handoff of the prompt before, on the same core, is in it.
    """

    step_s: float
    token_s: float
    pair_s: float

    def took_s(self, chunks: Iterable[Chunk]) -> float:
        """Of one step with these chunks, of as many prompts."""
        return self.step_s + sum(self.token_s * chunk.tokens + self.pair_s * chunk.pairs for chunk in chunks)


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Seconds of a step, of each answer in it, and of each token of their prompts and answers so far."""

    step_s: float
    answer_s: float
    context_token_s: float

    def took_s(self, running: int, context_tokens: int) -> float:
        """Of one step; `context_tokens` are those of all answers together."""
        return self.step_s + self.answer_s * running + self.context_token_s * context_tokens


@dataclass(frozen=True, slots=True)
class HandoffSpeed:
    """What a first token takes beside prefill's computing: for each request, and for each token of its last chunk.

    Router, client and control calls are in the first, the last write is in the second. Earlier chunks are written
    while later ones are computed.
    """

    request_s: float
    token_s: float

    def took_s(self, last_chunk_tokens: int) -> float:
        return self.request_s + self.token_s * last_chunk_tokens


@dataclass(frozen=True, slots=True)
class Speeds:
    """All that the simulation knows of one prefill, one decode, and the way between them."""

    settings: Settings
    prefill: PrefillSpeed
    handoff: HandoffSpeed
    decode: DecodeSpeed

    def ttft_s(self, prompt_tokens: int) -> float:
        """Of a prompt that waits for nobody."""
        chunks = chunks_of(prompt_tokens, self.settings)
        return sum(self.prefill.took_s((chunk,)) for chunk in chunks) + self.handoff.took_s(chunks[-1].tokens)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises InvalidRequest when the file is not one that `write` has made."""
        try:
            document = json.loads(path.read_text())
            parts = (Settings, PrefillSpeed, HandoffSpeed, DecodeSpeed)
            speeds = cls(*(part(**document[field.name]) for part, field in zip(parts, fields(cls), strict=True)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f"{path} has no speeds ({error}): `pdctl plan measure` writes such a file") from error
        for part in (speeds.prefill, speeds.handoff, speeds.decode):
            if any(
                not isinstance(value, int | float) or not 0 <= value < float("inf") for value in asdict(part).values()
            ):
                raise InvalidRequest(f"{path}: {part} has a time that is none")
        return speeds


# --- from what was seen ---


@dataclass(frozen=True, slots=True)
class Single:
    """A prompt while nothing else went on."""

    tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Burst:
    """`count` prompts of `tokens` tokens that came at once: how much later than the first the last had its token."""

    tokens: int
    count: int
    spread_s: float


@dataclass(frozen=True, slots=True)
class Gap:
    """The time between two tokens while `running` answers were written, with `context_tokens` in all."""

    running: int
    context_tokens: int
    gap_s: float


def fit(settings: Settings, singles: Sequence[Single], bursts: Sequence[Burst], gaps: Sequence[Gap]) -> Speeds:
    """The speeds that come nearest to all of it, in relative terms; none is negative.

    Bursts tell what the computing takes, and so which part of a single prompt's time is not computing.

    Raises:
        InvalidRequest: something took no time at all.

    """
    rows = [_single(each, settings) for each in singles] + [_burst(each, settings) for each in bursts]
    seen_s = [each.ttft_s for each in singles] + [each.spread_s for each in bursts]
    if min(seen_s) <= 0 or min(each.gap_s for each in gaps) <= 0:
        raise InvalidRequest("nothing can be told from prompts or tokens that take no time: are the prompts too short?")
    step, token, pair, request, last = _non_negative(rows, seen_s)
    steps = _non_negative([(1.0, each.running, each.context_tokens) for each in gaps], [each.gap_s for each in gaps])
    return Speeds(settings, PrefillSpeed(step, token, pair), HandoffSpeed(request, last), DecodeSpeed(*steps))


def burst_steps(tokens: int, count: int, settings: Settings) -> list[list[Chunk]]:
    """The steps after the first prompt is done. Its own first step is begun before the others have come."""
    computed, steps = [0] * count, list[list[Chunk]]()
    while computed[-1] < tokens:
        is_first_done = computed[0] == tokens
        budget, step = settings.chunked_prefill_size, list[Chunk]()
        for place in range(count if any(computed) else 1):
            if budget and computed[place] < tokens:
                chunk = chunk_of(computed[place], tokens, budget, settings.last_chunk_tokens)
                computed[place] += chunk.tokens
                budget -= chunk.tokens
                step.append(chunk)
        if is_first_done:
            steps.append(step)
    return steps


def _single(seen: Single, settings: Settings) -> tuple[float, ...]:
    chunks = chunks_of(seen.tokens, settings)
    return len(chunks), seen.tokens, sum(chunk.pairs for chunk in chunks), 1.0, chunks[-1].tokens


def _burst(seen: Burst, settings: Settings) -> tuple[float, ...]:
    steps = burst_steps(seen.tokens, seen.count, settings)
    chunks = [chunk for step in steps for chunk in step]
    return len(steps), sum(chunk.tokens for chunk in chunks), sum(chunk.pairs for chunk in chunks), 0.0, 0.0


def _non_negative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Least squares of relative errors without negative numbers: the best of all choices of which ones are zero."""
    matrix = np.asarray(rows, dtype=float) / np.asarray(values)[:, None]
    width = matrix.shape[1]
    best, least = np.zeros(width), np.inf
    for used in itertools.product((False, True), repeat=width):
        found = np.zeros(width)
        columns = np.flatnonzero(used)
        scale = np.maximum(np.abs(matrix[:, columns]).max(axis=0), 1e-300)
        found[columns] = np.linalg.lstsq(matrix[:, columns] / scale, np.ones(len(values)), rcond=None)[0] / scale
        error = float(np.square(matrix @ found - 1).sum())
        if found.min() >= 0 and error < least:
            best, least = found, error
    return [float(value) for value in best]
