"""Chooses tokens from logits, as a pure function of the logits, the rules, the seed and the token's position.

So a seeded answer is the same from one engine or from a pair, alone or in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pd_common.engine.batch import Draw
from pd_common.errors import InternalError
from pd_common.generation import TokenLogprob

LOWEST_TEMPERATURE = 1e-6
"""Below it a distribution is one token anyway, and float32 would divide by zero."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token that one item's draw chose, with its log-probability if that was wanted."""

    token_id: int
    logprob: TokenLogprob | None = None


class Sampler:
    """Knows which tokens end an answer, because `min_new_tokens` bans them."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> tuple[SampledToken, ...]:
        """One token for each row of `[n, vocab_size]`.

        Raises:
            InternalError: a row has no finite maximum, so the model is broken.

        """
        if not draws:
            return ()
        allowed = self._with_bans(logits, draws)
        token_ids = allowed.argmax(dim=-1, keepdim=True)
        if not bool(allowed.gather(-1, token_ids).isfinite().all()):
            raise InternalError("the model's logits are not finite")
        chosen: list[int] = token_ids[:, 0].tolist()
        random = [index for index, draw in enumerate(draws) if draw.sampling.temperature > 0]
        if random:
            for index, token_id in zip(
                random, _draw_tokens(allowed[random], [draws[index] for index in random]), strict=True
            ):
                chosen[index] = token_id
        logprobs = _logprobs(logits, draws, chosen)
        return tuple(SampledToken(token_id, logprobs.get(index)) for index, token_id in enumerate(chosen))

    def _with_bans(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """The logits, or a copy in which tokens that would end an answer too early are impossible."""
        banned = {
            index: sorted(self._eos_token_ids | set(draw.sampling.stop_token_ids))
            for index, draw in enumerate(draws)
            if draw.generated < draw.sampling.min_new_tokens
        }
        if not any(banned.values()):
            return logits
        allowed = logits.clone()
        for index, token_ids in banned.items():
            allowed[index, token_ids] = float("-inf")
        return allowed


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing else; at most 1 - 2^-52, so that its product with x is below x."""
    key = np.array([seed % 2**64, position], dtype=np.uint64)
    return (int(np.random.Philox(key=key).random_raw()) >> 12) * 2.0**-52


def _draw_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Inverts each row's cumulative distribution; in vocabulary order, so rounding cannot swap near-equal tokens."""
    temperatures = _column([max(draw.sampling.temperature, LOWEST_TEMPERATURE) for draw in draws], logits)
    scaled = (logits.float() - logits.float().amax(dim=-1, keepdim=True)) / temperatures
    if any(draw.sampling.top_k or draw.sampling.top_p < 1 for draw in draws):
        scaled = scaled.masked_fill(~_kept(scaled, draws), float("-inf"))
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    targets = torch.tensor([uniform(draw.seed, draw.position) for draw in draws], dtype=torch.float64)
    targets = targets.to(logits.device) * cumulative[:, -1]
    token_ids: list[int] = torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0].tolist()
    return token_ids


def _kept(scaled: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """True for the `top_k` likeliest tokens, and of these for the fewest whose shares reach `top_p`."""
    vocab_size = scaled.shape[-1]
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    top_k = _column([draw.sampling.top_k or vocab_size for draw in draws], scaled)
    top_p = _column([draw.sampling.top_p for draw in draws], scaled)
    within_k = torch.arange(vocab_size, device=scaled.device) < top_k
    shares = ordered.masked_fill(~within_k, float("-inf")).softmax(dim=-1)
    # The share before a token decides, so the likeliest token always stays; top_p 1 keeps even what rounding calls 0.
    before = shares.cumsum(dim=-1) - shares
    within_p = (before < top_p) | (top_p >= 1)
    return torch.zeros_like(within_p).scatter_(-1, order, within_k & within_p)


def _logprobs(logits: torch.Tensor, draws: Sequence[Draw], chosen: Sequence[int]) -> dict[int, TokenLogprob]:
    """By row, for the rows that want one: natural logarithms under the model's own distribution, before any rule."""
    wanted = {index: draw.top_logprobs for index, draw in enumerate(draws) if draw.top_logprobs is not None}
    if not wanted:
        return {}
    logprobs = logits[list(wanted)].float().log_softmax(dim=-1)
    values, token_ids = logprobs.topk(min(max(wanted.values()), logprobs.shape[-1]), dim=-1)
    own = logprobs.gather(-1, torch.tensor([[chosen[index]] for index in wanted], device=logits.device))
    return {
        index: TokenLogprob(chosen[index], float(mine[0]), tuple(map(TokenLogprob, ids[:count], alternatives[:count])))
        for (index, count), mine, ids, alternatives in zip(
            wanted.items(), own.tolist(), token_ids.tolist(), values.tolist(), strict=True
        )
    }


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, device=like.device, dtype=torch.float32)[:, None]
