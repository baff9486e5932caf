from __future__ import annotations

import asyncio
import ctypes
from contextlib import AsyncExitStack

import pytest

from pd_common.errors import PagesInvalid
from pd_common.handoff.canary import CanaryMemory, RemoteCanary

SEED, OTHER = bytes(range(16)), bytes(range(1, 17))


@pytest.mark.parametrize("page_bytes", [8, 20, 4096 + 4], ids=str)
async def test_what_was_written_on_one_side_is_recognised_on_the_other_by_the_seed_alone(page_bytes: int) -> None:
    mine, theirs = CanaryMemory(page_bytes), CanaryMemory(page_bytes)
    mine.fill(1, SEED)
    (remote,) = [theirs.region.base + 2 * page_bytes]
    puts = mine.puts(1, remote)
    assert not theirs.holds(2, SEED)
    ctypes.memmove(int(puts.remote[0]), int(puts.local[0]), int(puts.lengths[0]))
    assert theirs.holds(2, SEED)
    assert not theirs.holds(2, OTHER)
    assert not theirs.holds(1, SEED)


async def test_one_byte_that_is_wrong_missing_or_elsewhere_is_seen() -> None:
    memory = CanaryMemory(4096)
    for place in (0, 2047, 4095):
        memory.fill(0, SEED)
        byte = ctypes.c_ubyte.from_address(memory.region.base + place)
        byte.value ^= 1
        assert not memory.holds(0, SEED)
    memory.fill(0, SEED)
    ctypes.memmove(memory.region.base, memory.region.base + 2048, 1024)
    assert not memory.holds(0, SEED)


async def test_canaries_at_once_have_pages_of_their_own_and_more_of_them_take_turns() -> None:
    memory = CanaryMemory(64)
    async with AsyncExitStack() as stack:
        pages = [await stack.enter_async_context(memory.page()) for _ in range(memory.num_pages)]
        assert sorted(pages) == list(range(memory.num_pages))
        waiting = asyncio.ensure_future(memory.page().__aenter__())
        await asyncio.sleep(0)
        assert not waiting.done()
    assert await asyncio.wait_for(waiting, 5) in pages


def test_a_canary_page_of_another_process_has_an_address_only_if_it_was_offered() -> None:
    remote = RemoteCanary(4096, 2, 64)
    assert [remote.address_of(page) for page in (0, 1)] == [4096, 4160]
    for page in (-1, 2, 2**32 - 1):
        with pytest.raises(PagesInvalid):
            remote.address_of(page)


@pytest.mark.parametrize(("base", "pages"), [(-1, 1), (4096, 0), (2**63 - 64, 2), (2**64 - 1, 1)])
def test_memory_that_is_none_is_refused(base: int, pages: int) -> None:
    with pytest.raises(PagesInvalid):
        RemoteCanary(base, pages, 64)
