"""Engines and oracles over the tiny models, each loaded once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pd_common.engine.engine import Engine
from tests.engine.oracle import Oracle
from tests.tiny_models import tiny_model

LoadEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def load_engine() -> Iterator[LoadEngine]:
    """`load_engine(family, page_size, number)`: different numbers are different engines."""
    engines: dict[tuple[str, int, int], Engine] = {}

    def load(family: str = "llama", page_size: int = 16, number: int = 0) -> Engine:
        key = family, page_size, number
        if key not in engines:
            engines[key] = load_directory(tiny_model(family), page_size, 1280 // page_size)
        return engines[key]

    yield load
    for engine in engines.values():
        asyncio.run(engine.close())


@pytest.fixture(scope="session")
def oracle() -> Callable[[str], Oracle]:
    """`oracle(family)`: the same weights in transformers' own eager attention and cache."""
    oracles: dict[str, Oracle] = {}

    def load(family: str = "llama") -> Oracle:
        if family not in oracles:
            oracles[family] = Oracle(tiny_model(family))
        return oracles[family]

    return load


def load_directory(
    directory: Path,
    page_size: int = 16,
    num_pages: int = 80,
    dtype: str = "float32",
    context_length: int | None = None,
) -> Engine:
    return Engine.load(
        directory,
        page_size=page_size,
        num_pages=num_pages,
        metadata_schema=1,
        software_version="test",
        dtype=dtype,
        device="cpu",
        threads=1,
        context_length=context_length,
    )
