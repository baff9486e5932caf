"""The model that the set-ups serve: random weights in a shape that has been measured elsewhere too."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from pd_common.cli.bench.random_model import write_weights

VOCAB_SIZE = 4096
CONTEXT_LENGTH = 8192
_END = "w0"


def write_model(directory: Path, layers: int) -> None:
    """Llama with 256 channels, 8 heads and 4 KV heads of 64; in float32 a layer has 2 KiB of KV for each token."""
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.12,
        tie_word_embeddings=False,
        eos_token_id=0,
    )
    write_weights(directory, config)
    _write_tokenizer(directory)


def _write_tokenizer(directory: Path) -> None:
    """A word for each id: every token has a text, so that it is sent as soon as it is there."""
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB_SIZE)}, unk_token=_END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END).save_pretrained(directory)
