"""The truth that the engine is compared with: `model.generate` of transformers, greedy, eager, float32."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Oracle:
    """One model, with every answer remembered."""

    def __init__(self, directory: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, attn_implementation="eager", dtype=torch.float32
        ).eval()
        self._generate = cache(self._uncached)

    def tokens(self, prompt: Sequence[int], max_new_tokens: int = 16) -> list[int]:
        return self._generate(tuple(prompt), max_new_tokens)[0]

    def logprobs(self, prompt: Sequence[int], max_new_tokens: int = 16) -> torch.Tensor:
        """Natural log-probabilities `[max_new_tokens, vocab_size]` at each step of the greedy answer."""
        return self._generate(tuple(prompt), max_new_tokens)[1]

    def _uncached(self, prompt: tuple[int, ...], max_new_tokens: int) -> tuple[list[int], torch.Tensor]:
        ids = torch.tensor([prompt])
        answer = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logits = torch.cat(answer.logits)
        return answer.sequences[0, len(prompt) :].tolist(), logits.float().log_softmax(dim=-1)
