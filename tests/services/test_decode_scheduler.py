"""Who is in a step, what of it is computed, and how answers end."""

from __future__ import annotations

import asyncio

import pytest

from pd_common.engine.output import AnswerBuilder
from pd_common.errors import InternalError
from pd_common.generation import FinishReason, Output, TokenLogprob
from tests.services.decode_rig import DecodeRig, deciding, soon


class BrokenBuilder(AnswerBuilder):
    """Cannot put a token into words."""

    def accept(self, token_id: int, logprob: TokenLogprob | None = None) -> Output:
        raise UnicodeError(f"token {token_id} with {logprob}")


async def test_every_answer_gets_a_token_a_step_in_one_message() -> None:
    async with deciding(DecodeRig()) as rig:
        short, long = rig.join(1, tokens=2), rig.join(2, tokens=3)
        step = await rig.engine.next_step()
        assert step.spans == [(1, 3, 4, True), (2, 3, 4, True)]
        step.finish()
        assert await rig.next_outputs() == [(1, (1004,), FinishReason.LENGTH), (2, (1004,), None)]
        assert await soon(short.ended) is None
        assert not long.ended.done()
        step = await rig.engine.next_step()
        assert step.spans == [(2, 4, 5, True)]
        step.finish()
        assert await rig.next_outputs() == [(2, (1005,), FinishReason.LENGTH)]
        assert await soon(long.ended) is None
        assert long.sequence.output == [7, 1004, 1005]
        assert await rig.engine.is_idle()


async def test_an_answer_that_comes_during_a_step_joins_the_next() -> None:
    async with deciding(DecodeRig()) as rig:
        rig.join(1, tokens=4)
        step = await rig.engine.next_step()
        rig.join(2, tokens=4)
        step.finish()
        assert (await rig.engine.next_step()).rooms == [1, 2]


async def test_answers_beyond_the_limit_wait_in_order() -> None:
    async with deciding(DecodeRig(max_running=2)) as rig:
        for room, tokens in ((1, 3), (2, 2), (3, 2), (4, 2)):
            rig.join(room, tokens)
        assert rig.scheduler.running == 2
        for rooms in ([1, 2], [1, 3], [4]):
            step = await rig.engine.next_step()
            assert step.rooms == rooms
            step.finish()
        assert await rig.engine.is_idle()
        assert rig.scheduler.running == 0


async def test_higher_priorities_come_first_and_among_equals_who_was_there_first() -> None:
    async with deciding(DecodeRig(max_running=3)) as rig:
        for room, priority in ((1, 0), (2, 1), (3, -1), (4, 1), (5, 0)):
            rig.join(room, tokens=2, priority=priority)
        for rooms in ([2, 4, 1], [5, 3]):
            step = await rig.engine.next_step()
            assert step.rooms == rooms
            step.finish()


async def test_an_answer_takes_pages_as_it_grows() -> None:
    async with deciding(DecodeRig()) as rig:
        answer = rig.join(1, tokens=7)
        used = [rig.pages_used]
        for _ in range(6):
            step = await rig.engine.next_step()
            used.append(rig.pages_used)
            step.finish()
        await soon(answer.ended)
        assert used == [1, 1, 2, 2, 2, 2, 3]  # before the first step, then while those that write tokens 3 to 8 run


async def test_who_leaves_between_steps_is_not_computed_further() -> None:
    async with deciding(DecodeRig(max_running=1)) as rig:
        running, waiting = rig.join(1, tokens=2), rig.join(2, tokens=2)
        step = await rig.engine.next_step()
        await soon(rig.scheduler.leave(waiting))
        step.finish()
        await soon(running.ended)
        assert await rig.engine.is_idle()
        assert waiting.ended.cancelled()


async def test_leaving_waits_for_the_step_that_uses_the_pages() -> None:
    async with deciding(DecodeRig()) as rig:
        leaver, stayer = rig.join(1, tokens=4), rig.join(2, tokens=2)
        step = await rig.engine.next_step()
        leaving = asyncio.create_task(rig.scheduler.leave(leaver))
        assert await rig.engine.is_idle()
        assert not leaving.done()
        step.finish()
        await soon(leaving)
        assert await rig.next_outputs() == [(2, (1004,), FinishReason.LENGTH)]
        await soon(stayer.ended)
        assert await rig.engine.is_idle()
        await soon(rig.scheduler.leave(leaver))
        assert leaver.allocation in rig.memory.held


async def test_leaving_waits_for_a_step_that_fails_too() -> None:
    async with deciding(DecodeRig()) as rig:
        leaver = rig.join(1, tokens=4)
        step = await rig.engine.next_step()
        leaving = asyncio.create_task(rig.scheduler.leave(leaver))
        await asyncio.sleep(0)
        step.fail(RuntimeError("broken"))
        await soon(leaving)
        assert leaver.ended.cancelled()


async def test_a_failed_step_fails_its_answers_and_no_other() -> None:
    async with deciding(DecodeRig(max_running=2)) as rig:
        failing = [rig.join(room, tokens=3) for room in (1, 2)]
        waiting = rig.join(3, tokens=2)
        (await rig.engine.next_step()).fail(RuntimeError("out of memory"))
        for answer in failing:
            with pytest.raises(InternalError, match="RuntimeError: out of memory"):
                await soon(answer.ended)
        step = await rig.engine.next_step()
        assert step.rooms == [3]
        step.finish()
        assert await rig.next_outputs() == [(3, (1004,), FinishReason.LENGTH)]
        await soon(waiting.ended)


async def test_nothing_of_a_failed_step_is_kept_for_others() -> None:
    """Neither of the answer that fails, nor of one that leaves meanwhile."""
    async with deciding(DecodeRig()) as rig:
        failing, leaver = (rig.join(room, tokens=3, prompt_tokens=9) for room in (1, 2))
        step = await rig.engine.next_step()
        leaving = asyncio.create_task(rig.scheduler.leave(leaver))
        await asyncio.sleep(0)
        step.fail(RuntimeError("broken"))
        with pytest.raises(InternalError):
            await soon(failing.ended)
        await soon(leaving)
        for answer in (failing, leaver):
            rig.memory.release(answer.allocation)
        assert rig.engine.pages.num_free == rig.engine.pages.num_pages


async def test_a_room_that_stops_waiting_as_its_last_step_ends_harms_no_other() -> None:
    """Both in one turn of the event loop: the room has not left yet, but nobody waits for it any more."""
    async with deciding(DecodeRig()) as rig:
        stopped, other = rig.join(1, tokens=2), rig.join(2, tokens=3)
        step = await rig.engine.next_step()
        stopped.ended.cancel()
        step.finish()
        assert (2, (1004,), None) in await rig.next_outputs()
        await soon(rig.scheduler.leave(stopped))
        (await rig.engine.next_step()).finish()
        await soon(other.ended)


async def test_a_room_that_stops_waiting_as_the_engine_fails_harms_no_other() -> None:
    async with deciding(DecodeRig()) as rig:
        stopped, other = rig.join(1, tokens=2), rig.join(2, tokens=3)
        step = await rig.engine.next_step()
        stopped.ended.cancel()
        step.fail(RuntimeError("broken"))
        with pytest.raises(InternalError):
            await soon(other.ended)
        await soon(rig.scheduler.leave(stopped))
        later = rig.join(3, tokens=2)
        (await rig.engine.next_step()).finish()
        await soon(later.ended)


async def test_an_answer_that_is_finished_has_been_sent_whatever_becomes_of_its_neighbour() -> None:
    async with deciding(DecodeRig()) as rig:
        good = rig.join(1, tokens=2)
        bad = rig.join(2, tokens=3, builder=BrokenBuilder)
        (await rig.engine.next_step()).finish()
        with pytest.raises(InternalError):
            await soon(bad.ended)
        await soon(good.ended)
        assert await rig.next_outputs() == [(1, (1004,), FinishReason.LENGTH)]


async def test_prompts_are_computed_in_chunks_beside_the_answers() -> None:
    """Both prompts of 5 tokens share the step's 4, in order; only the chunk that ends a prompt draws a token."""
    async with deciding(DecodeRig(chunk_tokens=4)) as rig:
        rig.join(1, tokens=9)
        for room in (2, 3):
            rig.join(room, tokens=2, prompt_tokens=5, alone=True)
        for spans in (
            [(1, 3, 4, True), (2, 0, 4, False)],
            [(1, 4, 5, True), (2, 4, 5, True), (3, 0, 4, False)],
            [(1, 5, 6, True), (2, 5, 6, True), (3, 4, 5, True)],
            [(1, 6, 7, True), (3, 5, 6, True)],
        ):
            step = await rig.engine.next_step()
            assert step.spans == spans
            step.finish()


async def test_an_answer_has_begun_with_the_first_token_after_its_prompt() -> None:
    async with deciding(DecodeRig(chunk_tokens=4)) as rig:
        answer = rig.join(1, tokens=2, prompt_tokens=6, alone=True)
        await rig.steps(1)
        step = await rig.engine.next_step()
        assert not answer.began.is_set()
        step.finish()
        await soon(answer.began.wait())
        assert await rig.next_outputs() == [(1, (1006,), None)]


async def test_whoever_waits_for_the_beginning_of_an_answer_that_fails_is_told() -> None:
    async with deciding(DecodeRig()) as rig:
        answer = rig.join(1, tokens=2, alone=True)
        (await rig.engine.next_step()).fail(RuntimeError("broken"))
        await soon(answer.began.wait())
        with pytest.raises(InternalError):
            await soon(answer.ended)


async def test_a_prompt_that_is_computed_here_is_found_by_others_at_once() -> None:
    async with deciding(DecodeRig(chunk_tokens=9)) as rig:
        answer = rig.join(1, tokens=9, prompt_tokens=9, alone=True)
        step = await rig.engine.next_step()
        assert rig.memory.matched_pages(answer.sequence, find=9) == (0, 0)
        step.finish()
        await soon(answer.began.wait())
        assert rig.memory.matched_pages(answer.sequence, find=9) == (2, 0)


async def test_the_audit_sees_every_step() -> None:
    audited: list[int] = []
    rig = DecodeRig(audit=lambda: audited.append(rig.memory.pages_available))
    async with deciding(rig):
        answer = rig.join(1, tokens=4)
        await rig.steps(3)
        await soon(answer.ended)
        assert await rig.engine.is_idle()
        assert len(audited) == 3


async def test_what_the_audit_finds_ends_the_loop() -> None:
    def audit() -> None:
        raise InternalError("a page is lost")

    rig = DecodeRig(audit=audit)
    loop = asyncio.create_task(rig.scheduler.run())
    rig.join(1, tokens=4)
    await rig.steps(1)
    with pytest.raises(InternalError, match="a page is lost"):
        await soon(loop)
