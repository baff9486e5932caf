from __future__ import annotations

import pytest

from pd_common.cli.bench.pair import Sample
from pd_common.cli.bench.rows import MEMCPY, Row, row_of, with_ratios
from pd_common.cli.bench.work import Case, Layout, Order

CASE = Case(Layout.PAGES, Order.SHUFFLED)
OTHER = Case(Layout.LAYERS, Order.SHUFFLED)


def row(path: str, backend: str, case: Case, *seconds: float) -> Row:
    return row_of(path, backend, "tcp", case, [Sample(10**9, 7, each / 4, each) for each in seconds])


def test_a_row_holds_medians_with_units() -> None:
    found = row("tcp", "ucx", CASE, 0.4, 0.2, 9.0)
    assert found.total_ms == pytest.approx(400)
    assert found.posting_ms == pytest.approx(100)
    assert found.gb_per_s == pytest.approx(2.5)
    assert (found.rounds, found.bytes, found.descriptors) == (3, 10**9, 7)


def test_ratios_compare_the_same_case_on_the_same_path() -> None:
    rows = [
        row("tcp", MEMCPY, CASE, 0.1),
        row("tcp", "ucx", CASE, 0.2),
        row("tcp", "nixl", CASE, 0.5),
        row("tcp", "nixl", OTHER, 0.01),
        row("host", "nixl", CASE, 0.01),
    ]
    ucx = with_ratios(rows)[1]
    assert ucx.x_memcpy == pytest.approx(0.5)
    assert ucx.x_backend == {"nixl": pytest.approx(2.5)}


def test_a_row_without_figures_stays_as_it_is() -> None:
    missing = Row("tcp", "nixl", skipped="not installed")
    assert with_ratios([row("tcp", "ucx", CASE, 0.2), missing])[1] == missing
