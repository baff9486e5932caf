"""The attention of one step over the paged pool: writes the step's keys and values, then attends item by item.

Knows how a batch lies in the pool; what to compute is in kernels.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pd_common.engine.attention import AttentionCall
from pd_common.engine.batch import Batch, Int64s, Rows
from pd_common.engine.kernels import attend_chunk, attend_tokens, causal_mask
from pd_common.kv.pool import KVPool, LayerPages

BUCKET_SHORTEST_SHARE = 0.5
"""A sequence shorter than this share of a bucket's longest goes to the next bucket: padding is work too."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Tokens of one sequence in the pool: read in place when its pages are consecutive, else gathered by page.

    `first` counts tokens from the pool's start, or from the first gathered page on.
    """

    first: int
    length: int
    gather: torch.Tensor | None

    def read(self, pages: torch.Tensor) -> torch.Tensor:
        """`[length, kv_heads, dim]` out of `[num_pages, page_size, kv_heads, dim]`."""
        source = pages if self.gather is None else pages.index_select(0, self.gather)
        return source.flatten(0, 1)[self.first : self.first + self.length]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several tokens of one sequence. Without a span they begin the sequence, so their own keys are all there is."""

    rows: slice
    span: _Span | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Token:
    """One decode token of one sequence, attended alone."""

    row: int
    span: _Span


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Decode tokens of b sequences of similar length, pages scattered: table `[b * m]`, mask `[b, m * page_size]`."""

    rows: torch.Tensor
    table: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the step is attended by all layers that have the same window."""

    chunks: tuple[_Chunk, ...]
    tokens: tuple[_Token, ...]
    buckets: tuple[_Bucket, ...]


class PagedStep:
    """Answers the layers of exactly one forward pass of one batch."""

    def __init__(self, pool: KVPool, batch: Batch) -> None:
        self._pool = pool
        self._rows = batch.rows
        self._device = pool.layer(pool.layers[0].layer_id).key.device
        self._slots = self._indices(np.concatenate([_slots(rows, pool.page_size) for rows in batch.rows]))
        self._begun_pages = self._indices(_pages_begun_not_filled(batch.rows, pool.page_size))
        self._plans: dict[int | None, _Plan] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Stores the step's keys and values, then attends; `[1, T, q_heads, v_dim]`."""
        pages = self._pool.layer(call.layer_id)
        self._store(pages, call)
        plan = self._plans.get(call.window)
        if plan is None:
            plan = self._plans[call.window] = self._plan(call.window, call.query)
        queries = call.query[0].transpose(0, 1)
        out = queries.new_empty((*queries.shape[:2], call.value.shape[3]))
        for chunk in plan.chunks:
            key, value = self._keys_and_values(chunk, pages, call)
            out[chunk.rows] = attend_chunk(call, call.query[0, :, chunk.rows], key, value, chunk.mask)
        for token in plan.tokens:
            key, value = token.span.read(pages.key)[None], token.span.read(pages.value)[None]
            out[token.row] = attend_tokens(call, queries[token.row, None], key, value, None)[0]
        for bucket in plan.buckets:
            key, value = _read_bucket(bucket, pages.key), _read_bucket(bucket, pages.value)
            out[bucket.rows] = attend_tokens(call, queries[bucket.rows], key, value, bucket.mask)
        return out[None]

    def _store(self, pages: LayerPages, call: AttentionCall) -> None:
        for stored, fresh in ((pages.key, call.key), (pages.value, call.value)):
            # The unwritten tail of a page is gathered with the rest of it: what its last owner left must not be read.
            if len(self._begun_pages):
                stored.index_fill_(0, self._begun_pages, 0)
            stored.flatten(0, 1).index_copy_(0, self._slots, fresh[0].transpose(0, 1))

    @staticmethod
    def _keys_and_values(chunk: _Chunk, pages: LayerPages, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        if chunk.span is None:
            return call.key[0, :, chunk.rows].transpose(0, 1), call.value[0, :, chunk.rows].transpose(0, 1)
        return chunk.span.read(pages.key), chunk.span.read(pages.value)

    def _plan(self, window: int | None, like: torch.Tensor) -> _Plan:
        chunks, tokens, scattered = [], [], []
        for rows in self._rows:
            if rows.end - rows.start > 1:
                chunks.append(self._chunk(rows, window, like))
            elif (span := self._span(rows, _first_visible(rows, window))).gather is None:
                tokens.append(_Token(rows.first, span))
            else:
                scattered.append(rows)
        buckets = [self._bucket(group, window, like) for group in _by_length(scattered)]
        return _Plan(tuple(chunks), tuple(tokens), tuple(buckets))

    def _chunk(self, rows: Rows, window: int | None, like: torch.Tensor) -> _Chunk:
        here = slice(rows.first, rows.first + rows.end - rows.start)
        first = _first_visible(rows, window)
        if rows.start == 0 and (window is None or rows.end <= window):
            return _Chunk(here, None, None)
        mask = causal_mask(range(rows.start, rows.end), range(first, rows.end), window, like)
        return _Chunk(here, None if rows.start == 0 else self._span(rows, first), mask)

    def _span(self, rows: Rows, first: int) -> _Span:
        size = self._pool.page_size
        pages = rows.pages[first // size : -(-rows.end // size)]
        consecutive = bool((np.diff(pages) == 1).all())
        start = int(pages[0]) * size if consecutive else 0
        return _Span(start + first % size, rows.end - first, None if consecutive else self._indices(pages))

    def _bucket(self, group: Sequence[Rows], window: int | None, like: torch.Tensor) -> _Bucket:
        """Tables are padded with a sequence's own first visible page: finite numbers, then masked."""
        size = self._pool.page_size
        firsts = [_first_visible(rows, window) for rows in group]
        tables = [rows.pages[first // size : -(-rows.end // size)] for rows, first in zip(group, firsts, strict=True)]
        longest = max(len(table) for table in tables)
        padded = np.stack([np.pad(table, (0, longest - len(table)), constant_values=table[0]) for table in tables])
        lows = np.array([[first % size] for first in firsts])
        highs = np.array([[rows.end - first // size * size] for rows, first in zip(group, firsts, strict=True)])
        at = np.arange(longest * size)[None, :]
        hidden = torch.from_numpy((at < lows) | (at >= highs)).to(self._device)
        return _Bucket(
            rows=self._indices(np.array([rows.first for rows in group])),
            table=self._indices(padded.reshape(-1)),
            mask=torch.zeros(hidden.shape, dtype=like.dtype, device=self._device).masked_fill_(hidden, float("-inf")),
        )

    def _indices(self, values: Int64s) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _first_visible(rows: Rows, window: int | None) -> int:
    """The first position that any of these tokens can see."""
    return 0 if window is None else max(rows.start - window + 1, 0)


def _slots(rows: Rows, page_size: int) -> Int64s:
    """Where tokens `[start, end)` are kept, counted in tokens from the pool's start."""
    positions = np.arange(rows.start, rows.end)
    slots: Int64s = rows.pages[positions // page_size] * page_size + positions % page_size
    return slots


def _pages_begun_not_filled(items: Sequence[Rows], page_size: int) -> Int64s:
    """Last pages that get their first token in this step and do not get their last."""
    begun = [
        rows.pages[rows.end // page_size]
        for rows in items
        if (tail := rows.end % page_size) and rows.end - tail >= rows.start
    ]
    return np.array(begun, dtype=np.int64)


def _by_length(scattered: list[Rows]) -> Iterator[list[Rows]]:
    """Groups of similar length, longest first."""
    group: list[Rows] = []
    for rows in sorted(scattered, key=lambda rows: -rows.end):
        if group and rows.end < BUCKET_SHORTEST_SHARE * group[0].end:
            yield group
            group = []
        group.append(rows)
    if group:
        yield group


def _read_bucket(bucket: _Bucket, pages: torch.Tensor) -> torch.Tensor:
    """`[b, m * page_size, kv_heads, dim]`."""
    gathered = pages.index_select(0, bucket.table)
    return gathered.view(len(bucket.rows), -1, *gathered.shape[2:])
