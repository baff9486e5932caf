"""Tiny random models of several families as Hugging Face directories, each made once per test process.

Weights are wide (initializer_range) and embeddings untied, so that greedy answers vary and one wrong KV row
changes them.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 320
CONTEXT_LENGTH = 512
EOS = "<|endoftext|>"
EOS_ID = 0
WINDOW = 24

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant') %}{{ raise_exception('unknown role') }}{% endif %}"
    "{{ '<' + message['role'] + '>' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
_TRAINING_TEXT = (
    "the quick brown fox jumps over the lazy dog",
    "to be or not to be that is the question",
    "all the world is a stage and all the men and women merely players",
)


def _common(**overrides: Any) -> dict[str, Any]:
    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT_LENGTH,
        "initializer_range": 0.22,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": None,
    }
    return values | overrides


_FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_common()),
    "qwen2": lambda: Qwen2Config(**_common()),
    "qwen3": lambda: Qwen3Config(**_common()),
    "mistral": lambda: MistralConfig(**_common(sliding_window=WINDOW)),
    "gemma2": lambda: Gemma2Config(
        **_common(num_hidden_layers=4, sliding_window=WINDOW, query_pre_attn_scalar=16, attn_logit_softcapping=5.0)
    ),
    "gpt_oss": lambda: GptOssConfig(
        **_common(
            num_hidden_layers=2,
            sliding_window=WINDOW,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    ),
}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
"""The four that every test of tokens runs with."""

OTHER_SEAMS = ("gemma2", "gpt_oss")
"""Softcap and attention sinks."""


@cache
def tiny_model(family: str = "llama") -> Path:
    """Directory of a model with tokenizer and chat template; its name, so the served model's, is `tiny-<family>`."""
    directory = _scratch() / f"tiny-{family}"
    save_tiny_model(family, directory)
    return directory


def save_tiny_model(family: str, directory: Path, seed: int = 7) -> None:
    """Writes config.json, model.safetensors and the tokenizer's files."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_FAMILIES[family](), dtype=torch.float32)
    torch.set_rng_state(state)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "bias")):
                parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(seed))
    model.save_pretrained(directory)
    byte_level_tokenizer().save_pretrained(directory)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges: any text can be encoded, and a character outside ASCII takes several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)
    fast.chat_template = CHAT_TEMPLATE
    return fast


@cache
def _scratch() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="tiny-models-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory
