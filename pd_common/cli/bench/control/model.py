"""The smallest model that an engine loads: the bench of the control plane computes nothing with it."""

from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig

from pd_common.cli.bench.random_model import write_weights

VOCAB_SIZE = 64
CONTEXT_LENGTH = 512


def write_model(directory: Path) -> None:
    """One layer with random weights, without a tokenizer."""
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT_LENGTH,
    )
    write_weights(directory, config)
