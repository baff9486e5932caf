from __future__ import annotations

import asyncio
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pd_common.engine.output import AnswerBuilder
from pd_common.engine.request import Sequence
from pd_common.kv.pages import PageAllocator
from pd_common.kv.prefix import PrefixCache
from services.decode.answers import Answer, AnswerList
from services.decode.memory import Allocation
from tests.control.serving import make_request

PROMPT = tuple(range(6))


def started(answers: AnswerList, sequence: Sequence) -> Answer:
    no_prefix = PrefixCache(PageAllocator(1), 4).lock((), b"")
    return answers.add(Allocation(sequence, no_prefix, None), AnswerBuilder(sequence.request, frozenset(), None))


def new_sequence(room: int, priority: int, computed: int, output: int) -> Sequence:
    sequence = Sequence(replace(make_request(room, PROMPT), priority=priority))
    sequence.output = list(range(output))
    sequence.computed = computed
    return sequence


def rooms(answers: AnswerList) -> list[int]:
    return [answer.sequence.request.room for answer, _ in answers.next_work()]


@given(
    progress=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=8),
    max_running=st.integers(1, 5),
    chunk_tokens=st.integers(1, 12),
)
def test_a_step_has_a_token_of_each_answer_and_no_more_of_prompts_than_it_may(
    progress: list[tuple[int, int]], max_running: int, chunk_tokens: int
) -> None:
    async def check() -> None:
        answers = AnswerList(max_running, chunk_tokens)
        for room, (computed, output) in enumerate(progress, start=1):
            started(answers, new_sequence(room, 0, computed, output))
        work = answers.next_work()
        tokens = {answer.sequence.request.room: item.end - item.start for answer, item in work}
        assert list(tokens) == sorted(tokens)
        spare, expected = chunk_tokens, {}
        for room, (computed, output) in list(enumerate(progress, start=1))[:max_running]:
            uncomputed = len(PROMPT) + output - computed
            expected[room] = 1 if uncomputed == 1 else min(uncomputed, spare)
            spare -= 0 if uncomputed == 1 else expected[room]
        assert tokens == {room: count for room, count in expected.items() if count}
        for _, item in work:
            assert item.start == item.sequence.computed
            assert item.samples == (item.end == item.sequence.num_tokens)

    asyncio.run(check())

    asyncio.run(check())


@given(
    priorities=st.lists(st.integers(-1, 1), min_size=1, max_size=8),
    comes_back=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_whoever_comes_back_has_its_old_place(priorities: list[int], comes_back: list[bool]) -> None:
    async def check() -> None:
        answers = AnswerList(max_running=9, chunk_tokens=8)
        all_of_them = [
            started(answers, new_sequence(room, priority, len(PROMPT), 1)) for room, priority in enumerate(priorities)
        ]
        before = rooms(answers)
        assert before == sorted(before, key=lambda room: (-priorities[room], room))
        away = [answer for answer, goes in zip(all_of_them, comes_back, strict=False) if goes]
        for answer in away:
            assert answers.remove(answer)
            assert not answers.remove(answer)
        newest = started(answers, new_sequence(100, 0, len(PROMPT), 1))
        for answer in reversed(away):
            started(answers, answer.sequence)
        assert [room for room in rooms(answers) if room != 100] == before
        assert answers.remove(newest)
        assert rooms(answers) == before

    asyncio.run(check())
