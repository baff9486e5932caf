"""Whether staging pays: many small pieces put one by one, beside gather, one put and scatter."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from pd_common.cli.bench.pair import Pair
from pd_common.cli.bench.rounds import Progress

PIECE_BYTES = tuple(1024 << power for power in range(6))


@dataclass(frozen=True, slots=True)
class StagingRow:
    """Medians for one size of piece, pieces in different random orders on both sides. Times in milliseconds."""

    path: str
    backend: str
    piece_bytes: int
    pieces: int
    direct_ms: float
    """One put per piece."""
    gather_ms: float
    put_ms: float
    scatter_ms: float
    staged_ms: float
    """Gather, put and scatter, one after the other."""
    gain: float
    """direct_ms / staged_ms: staging pays above 1."""


def staging_rows(pair: Pair, total_bytes: int, rounds: int, progress: Progress) -> list[StagingRow]:
    """One row for each size of piece; `total_bytes` are moved each time."""
    sizes = [size for size in PIECE_BYTES if size <= total_bytes]
    samples: dict[int, list[tuple[float, float, float, float]]] = {size: [] for size in sizes}
    with pair.running():
        for number in range(rounds + 1):
            for size in sizes:
                progress(f"{pair.path.name}: staging, round {number} of {rounds}, pieces of {size} bytes")
                sample = _sample(pair, size, total_bytes // size)
                if number:
                    samples[size].append(sample)
    return [_row(pair, size, total_bytes // size, samples[size]) for size in sizes]


def _sample(pair: Pair, piece_bytes: int, pieces: int) -> tuple[float, float, float, float]:
    named = {"piece_bytes": piece_bytes, "pieces": pieces}
    direct = pair.sender.ask("pieces", **named)
    staged = pair.sender.ask("staged", **named)
    scattered = pair.receiver.ask("scatter", **named)
    return direct["total_s"], staged["gather_s"], staged["total_s"], scattered["scatter_s"]


def _row(pair: Pair, size: int, pieces: int, samples: list[tuple[float, float, float, float]]) -> StagingRow:
    direct, gather, put, scatter = (statistics.median(each) * 1e3 for each in zip(*samples, strict=True))
    staged = statistics.median(sum(rest) for _, *rest in samples) * 1e3
    return StagingRow(
        pair.path.name.value, pair.contender, size, pieces, direct, gather, put, scatter, staged, direct / staged
    )
