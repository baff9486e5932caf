"""Models with random weights: what a bench needs is their shape."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM


def write_weights(directory: Path, config: LlamaConfig) -> None:
    """config.json and model.safetensors, the same ones for the same shape."""
    config.save_pretrained(directory)
    with torch.device("meta"):
        shapes = LlamaForCausalLM(config).state_dict()
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: config.initializer_range * torch.randn(tensor.shape, generator=generator)
        for name, tensor in shapes.items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
