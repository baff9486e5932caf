"""The attention function that unmodified transformers models call, and the probe that learns what a model asks of it.

Knows no batch and no pool: each forward pass names who answers its layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from pd_common.errors import InternalError, InvalidRequest
from pd_common.kv.pool import LayerSpec

ATTENTION_NAME = "pd_paged"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asks for T flattened tokens.

    Query is `[1, q_heads, T, k_dim]`, key `[1, kv_heads, T, k_dim]`, value `[1, kv_heads, T, v_dim]`.
    Key `j` is visible to token `i` iff `i - window < j <= i`. `sinks` is one extra score per query head, `[q_heads]`.
    """

    layer_id: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


class Attends(Protocol):
    """Answers the layers of one forward pass."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The attention output `[1, T, q_heads, v_dim]`."""


_answers: ContextVar[Attends] = ContextVar("pd_paged_answers")


@contextmanager
def answered_by(attends: Attends) -> Iterator[None]:
    """Within it, every `pd_paged` call of this thread goes to `attends`."""
    token = _answers.set(attends)
    try:
        yield
    finally:
        _answers.reset(token)


def pd_paged(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """The signature that transformers calls; the mask is always None, because no mask function has this name."""
    if attention_mask is not None:
        raise InternalError("pd_paged makes its own masks, but the model passed one")
    if not getattr(module, "is_causal", True):
        raise InvalidRequest(
            "the model's attention looks ahead, so it cannot answer token by token; take a causal model"
        )
    call = AttentionCall(
        layer_id=int(module.layer_idx),  # type: ignore[arg-type]
        query=query,
        key=key,
        value=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return _answers.get().attend(call), None


AttentionInterface.register(ATTENTION_NAME, pd_paged)


class LayerProbe:
    """Answers with zeros and notes each layer's shapes: what a model passes is safer than what its config says."""

    def __init__(self) -> None:
        self._specs: dict[int, LayerSpec] = {}

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """One spec per attention layer, by layer id."""
        return tuple(spec for _, spec in sorted(self._specs.items()))

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Zeros of the right shape."""
        kv_heads, k_dim, v_dim = call.key.shape[1], call.key.shape[3], call.value.shape[3]
        self._specs[call.layer_id] = LayerSpec(call.layer_id, kv_heads, k_dim, v_dim)
        _, q_heads, tokens, _ = call.query.shape
        return call.query.new_zeros((1, tokens, q_heads, v_dim))
