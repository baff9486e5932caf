from __future__ import annotations

from typing import cast

import pytest

from pd_common.engine.engine import Engine
from services.decode.host_copies import HostCopies
from tests.services.fake_engine import FakeEngine


@pytest.fixture
async def engine() -> FakeEngine:
    return FakeEngine(16)


@pytest.fixture
def copies(engine: FakeEngine) -> HostCopies:
    return HostCopies(cast("Engine", engine), max_pages=5)


async def test_a_copy_goes_back_into_other_pages(engine: FakeEngine, copies: HostCopies) -> None:
    copy = await copies.save([3, 9, 4])
    assert copy is not None
    await copies.load(copy, 0, [7, 5, 6])
    assert engine.loaded == [([3, 9, 4], [7, 5, 6])]


@pytest.mark.parametrize(
    ("first_page", "pages", "loaded"),
    [
        (1, [7, 5], ([9, 4], [7, 5])),
        (1, [7, 5, 6], ([9, 4], [7, 5])),  # the last page is for tokens that are to come
        (3, [7], ([], [])),
        (4, [], ([], [])),
    ],
)
async def test_pages_that_are_there_already_are_left_out(
    engine: FakeEngine, copies: HostCopies, first_page: int, pages: list[int], loaded: tuple[list[int], list[int]]
) -> None:
    copy = await copies.save([3, 9, 4])
    assert copy is not None
    await copies.load(copy, first_page, pages)
    assert engine.loaded == [loaded]


async def test_what_does_not_fit_is_not_copied(copies: HostCopies) -> None:
    first = await copies.save([1, 2, 3])
    assert first is not None
    assert await copies.save([4, 5, 6]) is None
    second = await copies.save([4, 5])
    assert second is not None
    assert copies.pages_held == 5
    copies.drop(first)
    copies.drop(first)
    assert copies.pages_held == 2
    assert await copies.save([1, 2, 3]) is not None


async def test_a_copy_that_fails_takes_no_room(engine: FakeEngine, copies: HostCopies) -> None:
    engine.copy_failure = MemoryError()
    assert await copies.save([1, 2, 3]) is None
    engine.copy_failure = None
    assert await copies.save([1, 2, 3, 4, 5]) is not None
