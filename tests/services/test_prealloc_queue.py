from __future__ import annotations

import asyncio

import pytest

from pd_common.handoff.metadata import MetadataBuffers
from pd_common.kv.pages import PageAllocator
from services.decode.queues import Allocation, PreallocQueue

NUM_PAGES = 8
NUM_SLOTS = 3


class Pool:
    """A queue over real pages and slots."""

    def __init__(self) -> None:
        self.pages = PageAllocator(NUM_PAGES)
        self.metadata = MetadataBuffers(NUM_SLOTS)
        self.queue = PreallocQueue(self.pages, self.metadata)

    @property
    def free(self) -> tuple[int, int]:
        self.pages.check_integrity()
        return self.pages.num_free, self.metadata.free_slots

    async def ask(self, num_pages: int) -> asyncio.Task[Allocation]:
        """A waiter that has taken its place in the queue."""
        waiter = asyncio.create_task(self.queue.acquire(num_pages))
        await asyncio.sleep(0)
        return waiter


@pytest.fixture
async def pool() -> Pool:
    return Pool()


async def soon(waiter: asyncio.Task[Allocation]) -> Allocation:
    return await asyncio.wait_for(waiter, 5)


async def cancelled(waiter: asyncio.Task[Allocation]) -> None:
    waiter.cancel()
    await asyncio.wait([waiter])
    assert waiter.cancelled()


async def test_memory_is_given_at_once_when_there_is_enough(pool: Pool) -> None:
    allocation = await pool.queue.acquire(3)
    assert len(set(allocation.pages)) == 3
    assert pool.free == (NUM_PAGES - 3, NUM_SLOTS - 1)
    pool.queue.release(allocation)
    assert pool.free == (NUM_PAGES, NUM_SLOTS)


async def test_nobody_shares_a_page_or_a_slot(pool: Pool) -> None:
    allocations = [await pool.queue.acquire(2) for _ in range(NUM_SLOTS)]
    pages = [page for allocation in allocations for page in allocation.pages]
    assert len(set(pages)) == len(pages)
    assert len({allocation.slot.index for allocation in allocations}) == NUM_SLOTS


async def test_a_small_request_does_not_overtake_a_large_one(pool: Pool) -> None:
    first = await pool.queue.acquire(6)
    large, small = await pool.ask(5), await pool.ask(1)
    assert not small.done()
    pool.queue.release(first)
    assert len((await soon(large)).pages) == 5
    assert len((await soon(small)).pages) == 1
    assert pool.free == (NUM_PAGES - 6, NUM_SLOTS - 2)


async def test_a_slot_is_waited_for_as_pages_are(pool: Pool) -> None:
    held = [await pool.queue.acquire(1) for _ in range(NUM_SLOTS)]
    waiter = await pool.ask(1)
    assert not waiter.done()
    assert pool.free == (NUM_PAGES - NUM_SLOTS, 0)
    pool.queue.release(held[0])
    await soon(waiter)
    assert pool.free == (NUM_PAGES - NUM_SLOTS, 0)


async def test_one_release_may_serve_several(pool: Pool) -> None:
    first = await pool.queue.acquire(NUM_PAGES)
    waiters = [await pool.ask(2), await pool.ask(3)]
    pool.queue.release(first)
    assert [len((await soon(waiter)).pages) for waiter in waiters] == [2, 3]


async def test_a_waiter_that_gives_up_leaves_nothing_behind(pool: Pool) -> None:
    first = await pool.queue.acquire(NUM_PAGES)
    gone, next_one = await pool.ask(4), await pool.ask(4)
    await cancelled(gone)
    pool.queue.release(first)
    pool.queue.release(await soon(next_one))
    assert pool.free == (NUM_PAGES, NUM_SLOTS)


async def test_those_behind_a_large_waiter_that_gives_up_are_served(pool: Pool) -> None:
    await pool.queue.acquire(6)
    large, small = await pool.ask(5), await pool.ask(2)
    assert not small.done()
    await cancelled(large)
    assert len((await soon(small)).pages) == 2
    assert pool.free == (0, NUM_SLOTS - 2)


async def test_a_grant_that_comes_with_the_cancellation_is_given_back(pool: Pool) -> None:
    first = await pool.queue.acquire(NUM_PAGES)
    waiter = await pool.ask(4)
    pool.queue.release(first)
    assert pool.free == (NUM_PAGES - 4, NUM_SLOTS - 1)
    await cancelled(waiter)
    assert pool.free == (NUM_PAGES, NUM_SLOTS)


async def test_a_grant_that_is_given_back_goes_to_the_next(pool: Pool) -> None:
    first = await pool.queue.acquire(NUM_PAGES)
    waiter, next_one = await pool.ask(NUM_PAGES), await pool.ask(NUM_PAGES)
    pool.queue.release(first)
    await cancelled(waiter)
    assert len((await soon(next_one)).pages) == NUM_PAGES


async def test_memory_that_comes_free_after_a_cancellation_is_not_lost(pool: Pool) -> None:
    """Both in one turn of the event loop: the waiter has not noticed yet that it was cancelled."""
    first = await pool.queue.acquire(NUM_PAGES)
    gone, next_one = await pool.ask(4), await pool.ask(4)
    gone.cancel()
    pool.queue.release(first)
    await asyncio.wait([gone])
    assert gone.cancelled()
    pool.queue.release(await soon(next_one))
    assert pool.free == (NUM_PAGES, NUM_SLOTS)


async def test_a_released_allocation_is_not_released_again(pool: Pool) -> None:
    allocation = await pool.queue.acquire(2)
    pool.queue.release(allocation)
    with pytest.raises(Exception, match="owner"):
        pool.queue.release(allocation)
    assert pool.free == (NUM_PAGES, NUM_SLOTS)
