"""The model and its KV pool: loads one model directory and turns a batch into logits.

Knows no request queue, no sampling and no text. Used from one thread only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from pd_common.engine.attention import ATTENTION_NAME, LayerProbe, answered_by
from pd_common.engine.batch import Batch
from pd_common.engine.model_files import model_digest, read_config
from pd_common.engine.paged import PagedStep
from pd_common.errors import InvalidRequest
from pd_common.kv.pool import KVPool, LayerSpec
from pd_common.types import KvLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelRunner:
    """A transformers model, unchanged but for its attention function, and the pool that function reads and writes."""

    def __init__(
        self,
        directory: Path,
        page_size: int,
        num_pages: int,
        dtype: str = "auto",
        device: str = "auto",
        context_length: int | None = None,
    ) -> None:
        """`device` "auto" is CUDA where there is one, else the CPU. `dtype` "auto" is the configuration's own, but on
        a CPU without AMX bfloat16, where everything is float32 because half precision would be slower. `context_length`
        is the most tokens of prompt and answer together; None: what the model was made for.

        Raises:
            InvalidRequest: the directory, the model or an option cannot be served; the message says what to do.

        """
        config = read_config(directory)
        self.device = _device(device)
        self.dtype = _dtype(dtype, config, self.device)
        self.text_config = config.get_text_config()
        self.context_length = _context_length(self.text_config, context_length, page_size * num_pages)
        self._model: Any = _load(directory, self.dtype, self.device)
        layers = self._probe_layers()
        self._check_layers(layers)
        self.pool = KVPool(layers, page_size, num_pages, self.dtype, self.device)
        self._digest = model_digest(directory)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return int(self.text_config.vocab_size)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer: what the generation configuration says, else the model configuration."""
        generation = getattr(self._model, "generation_config", None)
        eos = getattr(generation, "eos_token_id", None)
        if eos is None:
            eos = getattr(self.text_config, "eos_token_id", None)
        if eos is None:
            return frozenset()
        return frozenset([eos] if isinstance(eos, int) else eos)

    def layout(self, metadata_schema: int, software_version: str) -> KvLayout:
        """What a peer's pool must equal before pages may travel. `kv_heads` and `head_dim` are the first layer's."""
        pool = self.pool
        return KvLayout(
            model=self._digest,
            dtype=str(self.dtype).removeprefix("torch."),
            page_size=pool.page_size,
            layers=len(pool.layers),
            kv_heads=pool.layers[0].kv_heads,
            head_dim=pool.layers[0].k_dim,
            metadata_schema=metadata_schema,
            software_version=software_version,
            buffers=pool.buffers,
        )

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Computes and stores the batch's KV; returns logits `[items that sample, vocab_size]`."""
        with answered_by(PagedStep(self.pool, batch)):
            logits: torch.Tensor = self._model(
                input_ids=self._row(batch.input_ids),
                position_ids=self._row(batch.positions),
                use_cache=False,
                logits_to_keep=torch.from_numpy(batch.logits_rows).to(self.device),
            ).logits[0]
        return logits

    def _row(self, values: Any) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)[None]

    @torch.inference_mode()
    def _probe_layers(self) -> tuple[LayerSpec, ...]:
        probe = LayerProbe()
        token = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        with answered_by(probe):
            self._model(input_ids=token, position_ids=token, use_cache=False)
        return probe.layers

    def _check_layers(self, layers: tuple[LayerSpec, ...]) -> None:
        expected = list(range(self.text_config.num_hidden_layers))
        found = [layer.layer_id for layer in layers]
        if found != expected:
            raise InvalidRequest(
                f"only {len(found)} of the model's {len(expected)} layers are attention layers; models that keep "
                "other state than keys and values are not supported",
                layers=len(expected),
                attention_layers=len(found),
            )


def _load(directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            local_files_only=True,
            use_safetensors=True,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidRequest(f"cannot load the weights in {directory}: {error}", directory=directory) from error
    if missing := sorted(report["missing_keys"]):
        # They would be random numbers.
        raise InvalidRequest(
            f"the weights in {directory} lack {missing[0]} (and {len(missing) - 1} more); fetch the whole model",
            directory=directory,
            missing=len(missing),
        )
    return model.eval().to(device)


def _context_length(config: Any, asked: int | None, pool_tokens: int) -> int:
    """What was asked for, of a model and a pool that can take it."""
    own = int(config.max_position_embeddings)
    if asked is None:
        return own
    for room, whose in (own, "the model was made for"), (pool_tokens, "--kv-cache-tokens has room for"):
        if asked > room:
            raise InvalidRequest(
                f"--context-length is {asked} tokens, but {whose} {room}", context_length=asked, limit=room
            )
    return asked


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidRequest(f"{name} is not a device; say auto, cpu or cuda", device=name) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest("this machine has no CUDA device; say auto or cpu", device=name)
    return device


def _dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    if name != "auto":
        if name not in DTYPES:
            raise InvalidRequest(f"{name} is not a data type; say auto or one of {', '.join(DTYPES)}", dtype=name)
        return DTYPES[name]
    own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    if device.type == "cpu" and not (own == torch.bfloat16 and torch.cpu.get_capabilities().get("amx_bf16", False)):
        return torch.float32
    return own
