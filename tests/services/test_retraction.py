"""Whose pages are given to others when there are none left, what is kept of them, and how an answer goes on."""

from __future__ import annotations

import asyncio

from pd_common.generation import FinishReason
from services.decode.answers import Answer
from tests.services.decode_rig import DecodeRig, deciding, soon


def full(rig: DecodeRig, *rooms: int) -> list[Answer]:
    """Answers whose second step needs a third page each; a pool of two pages for each has none."""
    return [rig.join(room, tokens=6, prompt_tokens=7) for room in rooms]


async def test_the_last_in_order_gives_its_pages_to_the_others() -> None:
    async with deciding(DecodeRig(num_pages=6)) as rig:
        *_, last = full(rig, 1, 2, 3)
        pages = list(last.sequence.pages)
        await rig.steps(1)
        copy = (await rig.retracted(last)).copy
        assert copy is not None
        assert copy.rows.tolist() == pages
        assert last.sequence.output == [7, 1008]
        step = await rig.engine.next_step()
        assert step.spans == [(1, 8, 9, True), (2, 8, 9, True)]


async def test_the_lowest_priority_is_retracted_before_the_newest() -> None:
    async with deciding(DecodeRig(num_pages=4)) as rig:
        low = rig.join(1, tokens=6, prompt_tokens=7, priority=-1)
        rig.join(2, tokens=6, prompt_tokens=7)
        await rig.steps(1)
        await rig.retracted(low)
        assert (await rig.engine.next_step()).rooms == [2]


async def test_those_that_wait_for_a_place_in_the_step_are_retracted_first() -> None:
    async with deciding(DecodeRig(num_pages=6, max_running=2)) as rig:
        *_, waiting = full(rig, 1, 2, 3)
        await rig.steps(1)
        await rig.retracted(waiting)
        assert (await rig.engine.next_step()).rooms == [1, 2]


async def test_as_many_are_retracted_as_are_needed() -> None:
    """Two need a page each, and the last two have one each."""
    async with deciding(DecodeRig(num_pages=6)) as rig:
        full(rig, 1, 2)
        small = [rig.join(room, tokens=6, prompt_tokens=2) for room in (3, 4)]
        await rig.steps(1)
        for answer in reversed(small):
            await rig.retracted(answer)
        assert (await rig.engine.next_step()).rooms == [1, 2]


async def test_the_only_answer_is_retracted_when_others_hold_the_pages() -> None:
    """They belong to prompts that are on their way, say."""
    async with deciding(DecodeRig(num_pages=2)) as rig:
        (only,) = full(rig, 1)
        await rig.steps(1)
        await rig.retracted(only)
        assert await rig.engine.is_idle()
        assert rig.scheduler.running == 0


async def test_an_answer_that_needs_a_page_itself_is_retracted_when_it_is_the_last() -> None:
    async with deciding(DecodeRig(num_pages=3)) as rig:
        rig.join(1, tokens=6, prompt_tokens=3)
        (last,) = full(rig, 2)
        await rig.steps(1)
        await rig.retracted(last)
        assert (await rig.engine.next_step()).spans == [(1, 4, 5, True)]


async def test_an_answer_comes_back_in_its_old_place_and_goes_on() -> None:
    async with deciding(DecodeRig(num_pages=4, max_running=1)) as rig:
        first, second = full(rig, 1, 2)
        await rig.steps(1)
        assert (await rig.retracted(second)).copy is not None
        await rig.steps(4)
        assert await soon(first.ended) is None
        rig.memory.release(first.allocation)
        newer = rig.join(3, tokens=2)
        step = await rig.engine.next_step()
        assert step.rooms == [3]
        newest = rig.join(4, tokens=2)
        back = rig.come_back(second, computed=True)
        step.finish()
        assert await soon(newer.ended) is None
        rig.memory.release(newer.allocation)
        for end in range(8, 13):
            step = await rig.engine.next_step()
            assert step.spans == [(2, end - 1, end, True)]
            step.finish()
        assert await soon(back.ended) is None
        assert back.sequence.output == [7, 1008, 1009, 1010, 1011, 1012]
        assert (await rig.engine.next_step()).rooms == [4]
        assert not newest.ended.done()


async def test_an_answer_without_a_copy_is_computed_again() -> None:
    """All of it, in chunks, and the next token follows from the last chunk."""
    async with deciding(DecodeRig(num_pages=4, host_pages=1, chunk_tokens=4)) as rig:
        first, last = full(rig, 1, 2)
        await rig.steps(1)
        assert (await rig.retracted(last)).copy is None
        assert rig.copies.pages_held == 0
        await rig.steps(4)
        await soon(first.ended)
        rig.memory.release(first.allocation)
        back = rig.come_back(last, computed=False)
        for span in ((2, 0, 4, False), (2, 4, 8, False), (2, 8, 9, True)):
            step = await rig.engine.next_step()
            assert step.spans == [span]
            assert not back.began.is_set()
            step.finish()
        await rig.steps(3)
        assert await soon(back.ended) is None
        assert back.sequence.output == [7, 1008, 1009, 1010, 1011, 1012]
        outputs = [await rig.next_outputs() for _ in range(9)]
        mine = [output for step in outputs for output in step if output[0] == 2]
        assert mine[-1] == (2, (1012,), FinishReason.LENGTH)
        assert [token for _, tokens, _ in mine for token in tokens] == back.sequence.output[1:]


async def test_a_prompt_that_is_not_computed_yet_is_not_copied() -> None:
    async with deciding(DecodeRig(num_pages=5, chunk_tokens=4)) as rig:
        full(rig, 1)
        prompt = rig.join(2, tokens=2, prompt_tokens=9, alone=True)
        await rig.steps(1)
        assert (await rig.retracted(prompt)).copy is None
        assert prompt.began.is_set()


async def test_when_the_copy_fails_the_others_go_on() -> None:
    async with deciding(DecodeRig(num_pages=4)) as rig:
        rig.engine.copy_failure = RuntimeError("no host memory")
        _, last = full(rig, 1, 2)
        await rig.steps(1)
        assert (await rig.retracted(last)).copy is None
        assert (await rig.engine.next_step()).rooms == [1]
        assert rig.copies.pages_held == 0


async def test_leaving_waits_for_the_copy_and_for_the_pages_to_be_given_away() -> None:
    async with deciding(DecodeRig(num_pages=4)) as rig:
        rig.engine.may_copy.clear()
        _, last = full(rig, 1, 2)
        await rig.steps(1)
        assert await rig.engine.is_idle()  # the copy is being made
        leaving = asyncio.create_task(rig.scheduler.leave(last))
        assert await rig.engine.is_idle()
        assert not leaving.done()
        rig.engine.may_copy.set()
        await soon(leaving)
        copy = (await rig.retracted(last)).copy
        assert copy is not None
        rig.copies.drop(copy)
        assert (await rig.engine.next_step()).rooms == [1]


async def test_an_answer_that_nobody_waits_for_keeps_its_pages_until_it_leaves() -> None:
    async with deciding(DecodeRig(num_pages=6)) as rig:
        _, other, last = full(rig, 1, 2, 3)
        rig.engine.may_copy.clear()
        await rig.steps(1)
        assert await rig.engine.is_idle()
        last.ended.cancel()
        rig.engine.may_copy.set()
        await soon(rig.scheduler.leave(last))
        assert last.allocation in rig.memory.held
        rig.memory.release(last.allocation)
        copy = (await rig.retracted(other)).copy
        assert copy is not None
        assert rig.copies.pages_held == copy.num_pages


async def test_an_answer_that_joins_during_a_copy_is_in_the_next_step() -> None:
    async with deciding(DecodeRig(retract_every=1)) as rig:
        first = rig.join(1, tokens=6)
        rig.engine.may_copy.clear()
        await rig.steps(1)
        assert await rig.engine.is_idle()
        rig.join(2, tokens=6)
        rig.engine.may_copy.set()
        assert (await rig.engine.next_step()).rooms == [2]
        await rig.retracted(first)


async def test_retraction_can_be_forced() -> None:
    """Every second step the last of those that got a token in it, which the one that waits did not."""
    async with deciding(DecodeRig(max_running=2, retract_every=2)) as rig:
        first, second = (rig.join(room, tokens=4) for room in (1, 2))
        rig.join(3, tokens=4)
        await rig.steps(2)
        await rig.retracted(second)
        for rooms in ([1, 3], [3]):
            step = await rig.engine.next_step()
            assert step.rooms == rooms
            step.finish()
        assert await soon(first.ended) is None
