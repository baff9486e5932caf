"""Rows of the result: medians of all rounds, with their ratios. This is also the form of the JSON file."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pd_common.cli.bench.pair import Sample
from pd_common.cli.bench.work import Case

MEMCPY = "memcpy"
_Case = tuple[str, str | None, str | None]


@dataclass(frozen=True, slots=True)
class Row:
    """One backend on one path with one case. A row with a reason in `skipped` or `failed` has no figures."""

    path: str
    """host, tcp or netns."""
    backend: str
    """ucx, nixl, mooncake through this project's transport; the rivals by their names; memcpy (in the bench itself)."""
    carrier: str | None = None
    """The transport that carried the bytes, as far as the backend tells it."""
    layout: str | None = None
    """pages: one item per page; layers: one item per page, layer and K or V."""
    order: str | None = None
    """contiguous, shuffled or fragmented (30 % of the pages, see --help)."""
    bytes: int | None = None
    descriptors: int | None = None
    """Writes that one transfer consists of (PUTs)."""
    rounds: int | None = None
    """Transfers behind the medians; the first, which warms up, is not among them."""
    posting_ms: float | None = None
    """From the call until the last descriptor was handed over."""
    total_ms: float | None = None
    """From the call until everything was visible on the other side."""
    gb_per_s: float | None = None
    """1e9 bytes per second."""
    x_memcpy: float | None = None
    """Speed as a multiple of one thread's memcpy of the same ranges."""
    x_backend: dict[str, float] = field(default_factory=dict)
    """Speed as a multiple of each other backend's on the same path with the same case."""
    skipped: str | None = None
    """Why this backend or path could not be measured."""
    failed: str | None = None
    """What went wrong while it was measured, wrong bytes included."""


def row_of(path: str, backend: str, carrier: str, case: Case, samples: Sequence[Sample]) -> Row:
    """The medians of the samples, without ratios."""
    total_s = statistics.median(sample.total_s for sample in samples)
    return Row(
        path=path,
        backend=backend,
        carrier=carrier,
        layout=case.layout.value,
        order=case.order.value,
        bytes=samples[0].bytes,
        descriptors=samples[0].descriptors,
        rounds=len(samples),
        posting_ms=statistics.median(sample.posting_s for sample in samples) * 1e3,
        total_ms=total_s * 1e3,
        gb_per_s=samples[0].bytes / total_s / 1e9,
    )


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The same rows, with the ratios between those that moved the same case on the same path."""
    speeds: dict[_Case, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.gb_per_s is not None:
            speeds[row.path, row.layout, row.order][row.backend] = row.gb_per_s
    return [_with_ratios(row, speeds[row.path, row.layout, row.order]) for row in rows]


def _with_ratios(row: Row, speeds: Mapping[str, float]) -> Row:
    if row.gb_per_s is None or row.backend == MEMCPY:
        return row
    ratios = {backend: row.gb_per_s / speed for backend, speed in speeds.items() if backend != row.backend}
    return replace(row, x_memcpy=ratios.pop(MEMCPY, None), x_backend=ratios)
