"""Attention of a few query tokens over the keys and values of one or more sequences, in plain torch.

Knows no pages: its callers bring contiguous or strided keys and values, and the mask that belongs to them.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from pd_common.engine.attention import AttentionCall


def attend_chunk(
    call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Several tokens of one sequence: query `[q_heads, n, k_dim]`, key and value `[L, kv_heads, dim]`.

    The mask `[n, L]` is added to the scores. Without a mask the n tokens are the sequence from its start on, so it is
    causal. Returns `[n, q_heads, v_dim]`.
    """
    queries, keys, values = query[None], _heads_first(key), _heads_first(value)
    if call.softcap is None and call.sinks is None:
        out = scaled_dot_product_attention(
            queries, keys, values, mask, is_causal=mask is None, scale=call.scaling, enable_gqa=True
        )
    else:
        group = query.shape[0] // key.shape[1]
        if mask is None:
            mask = causal_mask(range(query.shape[1]), range(key.shape[0]), None, query)
        sinks = None if call.sinks is None else call.sinks[:, None, None]
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        out = _explicit(call, queries, keys, values, mask, sinks=sinks)
    return out[0].transpose(0, 1)


def attend_tokens(
    call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """One token each of b sequences: query `[b, q_heads, k_dim]`, key and value `[b, L, kv_heads, dim]`.

    The mask `[b, L]` is added to the scores. The query heads that share a kv head are packed into the query
    length: faster than repeating keys. Returns `[b, q_heads, v_dim]`.
    """
    batch, q_heads, k_dim = query.shape
    kv_heads = key.shape[2]
    queries = query.reshape(batch, kv_heads, q_heads // kv_heads, k_dim)
    keys, values = key.transpose(1, 2), value.transpose(1, 2)
    if mask is not None:
        mask = mask[:, None, None, :]
    if call.softcap is None and call.sinks is None:
        out = scaled_dot_product_attention(queries, keys, values, mask, scale=call.scaling)
    else:
        sinks = None if call.sinks is None else call.sinks.view(kv_heads, -1, 1)
        out = _explicit(call, queries, keys, values, mask, sinks=sinks)
    return out.reshape(batch, q_heads, -1)


def causal_mask(queries: range, keys: range, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """Mask `[n, L]` to be added: 0 where query `i` sees key `j`, `i - window < j <= i`, else -inf; of `like`'s type."""
    i = torch.arange(queries.start, queries.stop, device=like.device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=like.device)[None, :]
    hidden = j > i if window is None else (j > i) | (j <= i - window)
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))


def _heads_first(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.transpose(0, 1)[None]


def _explicit(
    call: AttentionCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """What the fused kernel cannot do: scores capped by tanh, and sinks that take their share of the softmax.

    `sinks` is shaped to be laid beside the scores `[b, heads, n, L]` as one more key.
    """
    scores = torch.matmul(query, key.transpose(2, 3)).float() * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        shares = scores.softmax(dim=-1)
    else:
        column = sinks.float().expand(*scores.shape[:3], 1)
        shares = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    return torch.matmul(shares.to(value.dtype), value)
