"""The attention of one step over the paged pool: writes the step's keys and values, then attends item by item.

Knows how a batch lies in the pool; what to compute is in kernels.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pd_common.engine.attention import AttentionCall
from pd_common.engine.batch import Batch, Int64s, Rows
from pd_common.engine.kernels import attend_chunk, attend_tokens, causal_mask
from pd_common.kv.pool import KVPool, LayerPages

BUCKET_SHORTEST_SHARE = 0.5
"""A sequence shorter than this share of a bucket's longest goes to the next bucket: padding is work too."""
_HOST_BUCKET_BYTES = 2 << 20
"""Keys that one bucket may gather on a CPU (one sequence always may): beyond its cache, each alone is several times
faster."""
_DEVICE_BUCKET_BYTES = 256 << 20
"""The same elsewhere, where each call costs more than the padding."""


@dataclass(frozen=True, slots=True)
class _Span:
    """What b sequences see of the pool: of the m pages that each has in `table`, `[b * m]`, the tokens `tokens`."""

    table: torch.Tensor
    tokens: slice

    def read(self, stored: torch.Tensor, sequences: int) -> torch.Tensor:
        """`[sequences, tokens, kv_heads, dim]` out of `[num_pages, page_size, kv_heads, dim]`."""
        gathered = stored.index_select(0, self.table)
        return gathered.view(sequences, -1, *gathered.shape[2:])[:, self.tokens]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several tokens of one sequence. Without a span they begin the sequence, so their own keys are all there is."""

    rows: slice
    span: _Span | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Bucket:
    """One token each of b sequences of similar length: mask `[b, tokens of the span]`, or none if all see all of it."""

    rows: torch.Tensor
    span: _Span
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the step is attended by all layers that have the same window."""

    chunks: tuple[_Chunk, ...]
    buckets: tuple[_Bucket, ...]


class PagedStep:
    """Answers the layers of exactly one forward pass of one batch."""

    def __init__(self, pool: KVPool, batch: Batch) -> None:
        self._pool = pool
        self._rows = batch.rows
        self._device = pool.layer(pool.layers[0].layer_id).key.device
        pages, places = zip(*(_pages_and_places(rows, pool.page_size) for rows in batch.rows), strict=True)
        self._slots = self._indices(np.concatenate(pages)), self._indices(np.concatenate(places))
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
        for bucket in plan.buckets:
            key, value = (bucket.span.read(stored, len(bucket.rows)) for stored in (pages.key, pages.value))
            out[bucket.rows] = attend_tokens(call, queries[bucket.rows], key, value, bucket.mask)
        return out[None]

    def _store(self, pages: LayerPages, call: AttentionCall) -> None:
        for stored, fresh in ((pages.key, call.key), (pages.value, call.value)):
            # The unwritten tail of a page is gathered with the rest of it: what its last owner left must not be read.
            if len(self._begun_pages):
                stored.index_fill_(0, self._begun_pages, 0)
            stored.index_put_(self._slots, fresh[0].transpose(0, 1))

    @staticmethod
    def _keys_and_values(chunk: _Chunk, pages: LayerPages, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        if chunk.span is None:
            return call.key[0, :, chunk.rows].transpose(0, 1), call.value[0, :, chunk.rows].transpose(0, 1)
        return chunk.span.read(pages.key, 1)[0], chunk.span.read(pages.value, 1)[0]

    def _plan(self, window: int | None, like: torch.Tensor) -> _Plan:
        chunks = [self._chunk(rows, window, like) for rows in self._rows if rows.end - rows.start > 1]
        tokens = [rows for rows in self._rows if rows.end - rows.start == 1]
        buckets = [self._bucket(group, window, like) for group in self._grouped(tokens)]
        return _Plan(tuple(chunks), tuple(buckets))

    def _chunk(self, rows: Rows, window: int | None, like: torch.Tensor) -> _Chunk:
        here = slice(rows.first, rows.first + rows.end - rows.start)
        first = _first_visible(rows, window)
        if rows.start == 0 and (window is None or rows.end <= window):
            return _Chunk(here, None, None)
        mask = causal_mask(range(rows.start, rows.end), range(first, rows.end), window, like)
        if rows.start == 0:
            return _Chunk(here, None, mask)
        table, low, high = _visible(rows, first, self._pool.page_size)
        return _Chunk(here, _Span(self._indices(table), slice(low, high)), mask)

    def _bucket(self, group: Sequence[Rows], window: int | None, like: torch.Tensor) -> _Bucket:
        """Tables are padded with a sequence's own first visible page: finite numbers, then masked."""
        visible = [_visible(rows, _first_visible(rows, window), self._pool.page_size) for rows in group]
        longest = max(len(table) for table, _, _ in visible)
        padded = [np.pad(table, (0, longest - len(table)), constant_values=table[0]) for table, _, _ in visible]
        lows, highs = np.array([low for _, low, _ in visible]), np.array([high for _, _, high in visible])
        tokens = slice(int(lows.min()), int(highs.max()))
        at = np.arange(tokens.start, tokens.stop)[None, :]
        hidden = (at < lows[:, None]) | (at >= highs[:, None])
        return _Bucket(
            rows=self._indices(np.array([rows.first for rows in group])),
            span=_Span(self._indices(np.concatenate(padded)), tokens),
            mask=self._mask(hidden, like) if hidden.any() else None,
        )

    def _grouped(self, tokens: list[Rows]) -> Iterator[list[Rows]]:
        """Groups of similar length that are worth gathering together, longest first."""
        first = self._pool.layers[0]
        token_bytes = first.kv_heads * first.k_dim * self._pool.dtype.itemsize
        limit = _HOST_BUCKET_BYTES if self._device.type == "cpu" else _DEVICE_BUCKET_BYTES
        group: list[Rows] = []
        for rows in sorted(tokens, key=lambda rows: -rows.end):
            too_short = bool(group) and rows.end < BUCKET_SHORTEST_SHARE * group[0].end
            if too_short or (group and (len(group) + 1) * group[0].end * token_bytes > limit):
                yield group
                group = []
            group.append(rows)
        if group:
            yield group

    def _mask(self, hidden: NDArray[np.bool_], like: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=like.dtype, device=self._device)
        return mask.masked_fill_(torch.from_numpy(hidden).to(self._device), float("-inf"))

    def _indices(self, values: Int64s) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _first_visible(rows: Rows, window: int | None) -> int:
    """The first position that any of these tokens can see."""
    return 0 if window is None else max(rows.start - window + 1, 0)


def _pages_and_places(rows: Rows, page_size: int) -> tuple[Int64s, Int64s]:
    """Where tokens `[start, end)` are kept: their pages, and their places in them."""
    positions = np.arange(rows.start, rows.end)
    return rows.pages[positions // page_size], positions % page_size


def _visible(rows: Rows, first: int, page_size: int) -> tuple[Int64s, int, int]:
    """Pages that hold positions from `first` on, and where these begin and end, counted in tokens of those pages."""
    skipped = first // page_size
    return rows.pages[skipped : -(-rows.end // page_size)], first % page_size, rows.end - skipped * page_size


def _pages_begun_not_filled(items: Sequence[Rows], page_size: int) -> Int64s:
    """Last pages that get their first token in this step and do not get their last."""
    begun = [
        rows.pages[rows.end // page_size]
        for rows in items
        if (tail := rows.end % page_size) and rows.end - tail >= rows.start
    ]
    return np.array(begun, dtype=np.int64)
