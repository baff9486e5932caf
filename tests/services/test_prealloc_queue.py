from __future__ import annotations

import asyncio
from collections.abc import Sequence as Tokens

import pytest

from pd_common.engine.request import Sequence
from services.decode.memory import Allocation
from services.decode.queues import PreallocQueue
from tests.services.decode_memory import NUM_PAGES, NUM_SLOTS, PAGE_SIZE, a_memory, a_sequence, come_to_run

ROWS = 6
FRESH = 1000
"""Prompts that begin with it share nothing with others."""


class Pool:
    """A queue over real pages and slots. Requests of so many pages never grow, unless they say so."""

    def __init__(self, num_pages: int = NUM_PAGES, rows: int = ROWS, reserved_tokens: int = 0) -> None:
        self.memory = a_memory(num_pages)
        self.queue = PreallocQueue(self.memory, rows, reserved_tokens)
        self._prompts = 0

    @property
    def free(self) -> tuple[int, int]:
        self.memory.check_integrity()
        return self.memory.pages_available, self.memory.slots_free

    def of_pages(self, num_pages: int, max_new_tokens: int = 1, priority: int = 0) -> Sequence:
        self._prompts += 1
        prompt = [FRESH + self._prompts] * (num_pages * PAGE_SIZE)
        return a_sequence(prompt, max_new_tokens, priority)

    async def hold(self, num_pages: int, max_new_tokens: int = 1, *, slot: bool = True) -> Allocation:
        """What is let in at once."""
        sequence = self.of_pages(num_pages, max_new_tokens)
        return await soon(await self.ask(sequence, slot=slot))

    async def run(self, num_pages: int, max_new_tokens: int) -> Allocation:
        """An answer that is being written: it could give its pages up."""
        allocation = await self.hold(num_pages, max_new_tokens)
        come_to_run(self.memory, allocation)
        return allocation

    async def ask(
        self, wanted: int | Sequence, *, slot: bool = True, returning: bool = False
    ) -> asyncio.Task[Allocation]:
        """A waiter that has taken its place in the queue."""
        sequence = self.of_pages(wanted) if isinstance(wanted, int) else wanted
        acquire = self.queue.acquire(sequence, len(sequence.request.prompt), slot=slot, returning=returning)
        waiter = asyncio.create_task(acquire)
        await asyncio.sleep(0)
        return waiter


@pytest.fixture
async def pool() -> Pool:
    return Pool()


async def soon(waiter: asyncio.Task[Allocation]) -> Allocation:
    return await asyncio.wait_for(waiter, 5)


async def let_in(waiters: Tokens[asyncio.Task[Allocation]]) -> list[bool]:
    """Which of them have been let in by now."""
    for _ in range(3):
        await asyncio.sleep(0)
    return [waiter.done() for waiter in waiters]


async def cancelled(waiter: asyncio.Task[Allocation]) -> None:
    waiter.cancel()
    await asyncio.wait([waiter])
    assert waiter.cancelled()


async def test_memory_is_given_at_once_when_there_is_enough(pool: Pool) -> None:
    allocation = await pool.hold(3)
    assert len(set(allocation.sequence.pages)) == 3
    assert pool.free == (NUM_PAGES - 3, NUM_SLOTS - 1)
    pool.queue.release(allocation)
    assert pool.free == (NUM_PAGES, NUM_SLOTS)


async def test_nobody_shares_a_page_or_a_slot(pool: Pool) -> None:
    allocations = [await pool.hold(2) for _ in range(NUM_SLOTS)]
    pages = [page for allocation in allocations for page in allocation.sequence.pages]
    assert len(set(pages)) == len(pages)
    assert len({allocation.slot for allocation in allocations}) == NUM_SLOTS


async def test_a_slot_is_waited_for_as_pages_are(pool: Pool) -> None:
    held = [await pool.hold(1) for _ in range(NUM_SLOTS)]
    waiter, alone = await pool.ask(1), await pool.ask(1, slot=False)
    assert await let_in([waiter, alone]) == [False, True]
    pool.queue.free_slot(held[0])
    await soon(waiter)
    assert pool.free == (NUM_PAGES - NUM_SLOTS - 2, 0)


async def test_only_so_many_hold_pages_at_once(pool: Pool) -> None:
    held = [await pool.hold(1, slot=False) for _ in range(ROWS)]
    waiter = await pool.ask(1, slot=False)
    assert await let_in([waiter]) == [False]
    pool.queue.release(held[0])
    await soon(waiter)


async def test_one_release_may_serve_several(pool: Pool) -> None:
    first = await pool.hold(NUM_PAGES)
    waiters = [await pool.ask(2), await pool.ask(3)]
    pool.queue.release(first)
    assert [len((await soon(waiter)).sequence.pages) for waiter in waiters] == [2, 3]


async def test_pages_that_become_quiet_serve_those_who_wait(pool: Pool) -> None:
    _, slot = pool.queue.detach(await pool.hold(NUM_PAGES))
    waiter = await pool.ask(2)
    assert await let_in([waiter]) == [False]
    pool.queue.take_back(slot)
    await soon(waiter)


async def test_a_row_is_free_before_the_pages_of_who_had_it_are_quiet() -> None:
    pool = Pool(rows=1)
    written = await pool.hold(2)
    waiter = await pool.ask(2)
    assert await let_in([waiter]) == [False]
    pool.queue.detach(written)
    assert await let_in([waiter]) == [True]


# --- what is kept back for those inside ---


async def test_everybody_inside_can_grow_by_the_reserve() -> None:
    pool = Pool(reserved_tokens=3 * PAGE_SIZE)
    held = [await pool.run(3, 3 * PAGE_SIZE + 1), await pool.hold(3, 3 * PAGE_SIZE + 1)]
    wants_five, wants_four = await pool.ask(5), await pool.ask(4)
    assert await let_in([wants_five, wants_four]) == [False, True]
    for allocation in held:
        assert pool.memory.grow(allocation, 6 * PAGE_SIZE)
    assert pool.free[0] == 0


async def test_a_newcomer_is_let_in_only_with_a_reserve_of_its_own() -> None:
    pool = Pool(reserved_tokens=3 * PAGE_SIZE)
    await pool.hold(10)
    grows, grows_less = (pool.of_pages(pages, 3 * PAGE_SIZE + 1) for pages in (4, 3))
    waiters = [await pool.ask(sequence) for sequence in (grows, grows_less)]
    assert await let_in(waiters) == [False, True]
    pool.queue.release(waiters[1].result())
    ends_soon = pool.of_pages(5, PAGE_SIZE + 1)
    assert await let_in([await pool.ask(ends_soon)]) == [True]


async def test_one_that_is_far_from_its_end_can_go_on_while_the_pages_of_others_are_written() -> None:
    """All may grow by one page soon, the only one by four: what a newcomer takes can be had back only later."""
    pool = Pool(reserved_tokens=PAGE_SIZE)
    await pool.run(2, 20)
    written = await pool.hold(6)
    waiter = await pool.ask(5)
    assert await let_in([waiter]) == [False]
    come_to_run(pool.memory, written)
    pool.queue.grant()
    assert await let_in([waiter]) == [True]


async def test_a_request_that_fits_alone_does_not_wait_for_its_whole_answer() -> None:
    pool = Pool(reserved_tokens=100 * PAGE_SIZE)
    _, slot = pool.memory.detach(await pool.hold(8))
    allocation = await pool.hold(8, max_new_tokens=8 * PAGE_SIZE)
    assert pool.free[0] == 0
    pool.queue.take_back(slot)
    assert pool.memory.grow(allocation, NUM_PAGES * PAGE_SIZE)


# --- prefixes ---


async def test_pages_that_others_use_are_not_waited_for(pool: Pool) -> None:
    first = await pool.run(12, 2)
    longer = a_sequence([*first.sequence.request.prompt, 1, 2, 3, 4])
    assert len((await soon(await pool.ask(longer))).prefix.pages) == 12
    assert pool.free[0] == NUM_PAGES - 12 - 2


async def test_pages_that_are_idle_are_used_but_not_counted_twice(pool: Pool) -> None:
    """They are available before they are taken, and not after."""
    kept = await pool.run(6, 2)
    pool.queue.release(kept)
    held = await pool.hold(8)
    longer = a_sequence([*kept.sequence.request.prompt, *range(3 * PAGE_SIZE)])
    waiter = await pool.ask(longer)
    assert await let_in([waiter]) == [False]
    assert pool.free[0] == 8
    pool.queue.release(held)
    assert len((await soon(waiter)).prefix.pages) == 6


async def test_a_prefix_that_many_use_is_there_for_each_of_them() -> None:
    pool = Pool(rows=20)
    first = await pool.run(12, 2)
    for number in range(3):
        sharing = await soon(await pool.ask(a_sequence([*first.sequence.request.prompt, number])))
        come_to_run(pool.memory, sharing)
    assert pool.free[0] == 1  # the next token of the first needs it


async def test_what_others_begin_to_share_is_seen_by_the_one_who_waits_for_it(pool: Pool) -> None:
    first = await pool.hold(12)
    longer = await pool.ask(a_sequence([*first.sequence.request.prompt, 1, 2, 3, 4]))
    more = await pool.ask(1)
    assert await let_in([longer, more]) == [False, True]
    first.sequence.computed = first.sequence.num_tokens
    pool.queue.free_slot(first)
    assert await let_in([longer]) == [False]
    pool.queue.share(first)
    assert await let_in([longer]) == [True]


# --- order ---


async def test_the_more_urgent_come_first_and_then_who_came_first(pool: Pool) -> None:
    first = await pool.hold(NUM_PAGES)
    sequences = [pool.of_pages(6, priority=priority) for priority in (0, 5, 0, 5)]
    waiters = [await pool.ask(sequence) for sequence in sequences]
    pool.queue.release(first)
    assert await let_in(waiters) == [False, True, False, True]
    pool.queue.release(waiters[1].result())
    assert await let_in(waiters) == [True, True, False, True]


async def test_who_has_lost_its_pages_comes_before_everybody_new(pool: Pool) -> None:
    first = await pool.run(6, 2)
    await pool.hold(9)
    urgent = [await pool.ask(pool.of_pages(pages, priority=9)) for pages in (12, 7)]
    pool.memory.release(first)  # as the scheduler does when it retracts it
    back = await pool.ask(first.sequence, slot=False, returning=True)
    assert await let_in([*urgent, back]) == [False, False, True]
    assert back.result().sequence.computed == 6 * PAGE_SIZE


async def test_nobody_new_is_let_in_while_one_waits_to_come_back(pool: Pool) -> None:
    held = await pool.hold(12)
    returning, small = await pool.ask(6, returning=True), await pool.ask(1)
    assert await let_in([returning, small]) == [False, False]
    assert (pool.queue.waiting, pool.queue.returning) == (2, 1)
    pool.queue.release(held)
    assert await let_in([returning, small]) == [True, True]


async def test_those_who_come_back_keep_their_places_among_themselves() -> None:
    pool = Pool(num_pages=19)
    await pool.hold(2)
    older, newer = await pool.run(8, 4), await pool.run(8, 4)
    for each in (newer, older):
        pool.memory.release(each)
    block = await pool.hold(16)
    again = [await pool.ask(each.sequence, slot=False, returning=True) for each in (newer, older)]
    assert await let_in(again) == [False, False]
    pool.queue.release(block)
    assert await let_in(again) == [False, True]


async def test_a_small_request_goes_before_a_large_one_that_does_not_fit(pool: Pool) -> None:
    first = await pool.hold(12)
    large, small = await pool.ask(5), await pool.ask(1)
    assert await let_in([large, small]) == [False, True]
    pool.queue.release(first)
    await soon(large)


async def test_a_large_request_does_not_starve_behind_small_ones(pool: Pool) -> None:
    held = await pool.hold(4)
    large = await pool.ask(13)
    passed = 0
    while (await let_in([small := await pool.ask(1)]))[0]:
        pool.queue.release(small.result())
        passed += 1
        assert passed < 100
    assert passed == 16
    more = await pool.ask(1)
    assert await let_in([small, more, large]) == [False, False, False]
    pool.queue.release(held)
    assert await let_in([large, small, more]) == [True, True, True]


# --- whoever gives up ---


async def test_a_waiter_that_gives_up_leaves_nothing_behind(pool: Pool) -> None:
    first = await pool.hold(NUM_PAGES)
    gone, next_one = await pool.ask(9), await pool.ask(9)
    await cancelled(gone)
    assert pool.queue.waiting == 1
    pool.queue.release(first)
    pool.queue.release(await soon(next_one))
    assert pool.free == (NUM_PAGES, NUM_SLOTS)


async def test_those_behind_a_returning_one_that_gives_up_are_served(pool: Pool) -> None:
    await pool.hold(12)
    returning, small = await pool.ask(6, returning=True), await pool.ask(2)
    assert await let_in([small]) == [False]
    await cancelled(returning)
    assert len((await soon(small)).sequence.pages) == 2
    assert pool.free == (2, NUM_SLOTS - 2)


async def test_a_grant_that_comes_with_the_cancellation_is_given_back(pool: Pool) -> None:
    first = await pool.hold(NUM_PAGES)
    waiter = await pool.ask(4)
    pool.queue.release(first)
    assert pool.free == (NUM_PAGES - 4, NUM_SLOTS - 1)
    await cancelled(waiter)
    assert pool.free == (NUM_PAGES, NUM_SLOTS)


async def test_a_grant_that_is_given_back_goes_to_the_next(pool: Pool) -> None:
    first = await pool.hold(NUM_PAGES)
    waiter, next_one = await pool.ask(NUM_PAGES), await pool.ask(NUM_PAGES)
    pool.queue.release(first)
    await cancelled(waiter)
    assert len((await soon(next_one)).sequence.pages) == NUM_PAGES


async def test_memory_that_comes_free_after_a_cancellation_is_not_lost(pool: Pool) -> None:
    """Both in one turn of the event loop: the waiter has not noticed yet that it was cancelled."""
    first = await pool.hold(NUM_PAGES)
    gone, next_one = await pool.ask(9), await pool.ask(9)
    gone.cancel()
    pool.queue.release(first)
    await asyncio.wait([gone])
    assert gone.cancelled()
    pool.queue.release(await soon(next_one))
    assert pool.free == (NUM_PAGES, NUM_SLOTS)
