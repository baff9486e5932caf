from __future__ import annotations

import pytest

from pd_common.errors import InternalError
from services.decode.memory import Allocation, DecodeMemory
from tests.services.decode_memory import NUM_PAGES, NUM_SLOTS, a_memory, a_sequence, come_to_run

PROMPT = (1, 2, 3, 4, 5)


@pytest.fixture
def memory() -> DecodeMemory:
    return a_memory()


def allocated(
    memory: DecodeMemory, prompt: tuple[int, ...] = PROMPT, *, slot: bool = True, max_new_tokens: int = 20
) -> Allocation:
    allocation = memory.allocate(a_sequence(prompt, max_new_tokens), len(prompt), slot=slot)
    assert allocation is not None
    memory.check_integrity()
    return allocation


def found(memory: DecodeMemory, tokens: tuple[int, ...]) -> tuple[int, int]:
    """Pages in the cache that hold the beginning of these tokens, and how many of them nobody uses."""
    return memory.matched_pages(a_sequence(tokens), len(tokens))


def is_whole(memory: DecodeMemory) -> bool:
    memory.check_integrity()
    return (memory.pages_available, memory.slots_free) == (NUM_PAGES, NUM_SLOTS)


def test_a_sequence_gets_pages_for_what_it_has_and_nothing_for_later(memory: DecodeMemory) -> None:
    allocation = allocated(memory)
    assert len(set(allocation.sequence.pages)) == 3
    assert (memory.pages_available, memory.slots_free) == (NUM_PAGES - 3, NUM_SLOTS - 1)
    memory.release(allocation)
    assert is_whole(memory)


def test_nothing_is_taken_when_there_are_too_few_pages_or_no_slot(memory: DecodeMemory) -> None:
    come_to_run(memory, allocated(memory))
    before = memory.pages_available
    assert memory.allocate(a_sequence((*PROMPT, *range(40))), 5, slot=True) is None
    assert (memory.pages_available, memory.slots_free) == (before, NUM_SLOTS)
    held = [allocated(memory, (9 + number,)) for number in range(NUM_SLOTS)]
    assert memory.allocate(a_sequence((1,)), 1, slot=True) is None
    assert memory.allocate(a_sequence((1,)), 1, slot=False) is not None
    assert memory.pages_available == before - len(held) - 1
    memory.check_integrity()


def test_a_shared_beginning_is_found_while_its_owner_still_runs(memory: DecodeMemory) -> None:
    first = allocated(memory)
    come_to_run(memory, first)
    second = allocated(memory, (*PROMPT, 6, 7))
    assert second.sequence.pages[:2] == first.sequence.pages[:2]
    assert second.sequence.computed == 4
    assert not {*second.own_pages} & {*first.sequence.pages}
    memory.release(first)
    assert found(memory, PROMPT) == (2, 0)
    memory.release(second)
    assert found(memory, PROMPT) == (2, 2)
    assert is_whole(memory)


def test_what_was_not_shared_is_not_found_before_its_release(memory: DecodeMemory) -> None:
    """A page that is still being written must not become the beginning of another prompt."""
    allocation = allocated(memory)
    assert found(memory, PROMPT) == (0, 0)
    allocation.sequence.computed = 3
    memory.release(allocation)
    assert found(memory, PROMPT) == (1, 1)


def test_only_the_tokens_that_are_to_be_found_are_looked_for(memory: DecodeMemory) -> None:
    come_to_run(memory, allocated(memory, (1, 2, 3, 4)))
    sequence = a_sequence((1, 2, 3, 4))
    assert [memory.matched_pages(sequence, find) for find in (0, 3, 4)] == [(0, 0), (1, 0), (2, 0)]
    allocation = memory.allocate(sequence, 3, slot=False)
    assert allocation is not None
    assert sequence.computed == 2
    assert len(allocation.own_pages) == 1


def test_an_answer_grows_until_there_is_nothing_left(memory: DecodeMemory) -> None:
    allocation, other = allocated(memory, max_new_tokens=99), allocated(memory)
    come_to_run(memory, allocation)
    assert memory.grow(allocation, 6)
    assert len(allocation.sequence.pages) == 3
    assert memory.grow(allocation, 2 * (NUM_PAGES - 3))
    assert memory.pages_available == 0
    assert not memory.grow(allocation, 2 * (NUM_PAGES - 3) + 1)
    memory.release(other)
    assert memory.grow(allocation, 2 * (NUM_PAGES - 3) + 1)
    memory.check_integrity()
    memory.release(allocation)
    assert is_whole(memory)


def test_what_an_answer_had_is_found_when_it_comes_back(memory: DecodeMemory) -> None:
    allocation = allocated(memory)
    come_to_run(memory, allocation)
    sequence = allocation.sequence
    sequence.computed = sequence.num_tokens
    sequence.append(8)
    had = sequence.pages[:3]
    memory.release(allocation)
    assert (sequence.pages, sequence.computed) == ([], 0)
    again = memory.allocate(sequence, sequence.num_tokens - 1, slot=False)
    assert again is not None
    assert sequence.pages[:3] == had
    assert sequence.computed == 6
    memory.check_integrity()


def test_two_that_compute_the_same_keep_their_own_pages_and_one_copy_stays(memory: DecodeMemory) -> None:
    first, second = allocated(memory), allocated(memory)
    pages = tuple(second.sequence.pages)
    come_to_run(memory, first)
    come_to_run(memory, second)
    assert second.own_pages == pages
    memory.check_integrity()
    memory.release(second)
    memory.release(first)
    assert found(memory, PROMPT) == (2, 2)
    assert is_whole(memory)


def test_what_a_failed_step_may_have_spoiled_is_not_kept_but_what_was_shared_before_is(memory: DecodeMemory) -> None:
    allocation = allocated(memory)
    come_to_run(memory, allocation)
    allocation.sequence.computed = 0
    memory.release(allocation)
    assert found(memory, (1, 2, 3, 4, 5, 7)) == (2, 2)
    assert is_whole(memory)


def test_own_pages_that_may_be_written_stay_away_until_they_are_taken_back(memory: DecodeMemory) -> None:
    first = allocated(memory)
    come_to_run(memory, first)
    memory.release(first)
    failed = allocated(memory, (*PROMPT, 6, 7))
    own = failed.own_pages
    pages, slot = memory.detach(failed)
    assert pages == own
    assert (memory.pages_written, memory.slots_free) == (2, NUM_SLOTS - 1)
    assert memory.pages_available == NUM_PAGES - 2
    assert found(memory, PROMPT) == (2, 2)
    everything = memory.allocate(a_sequence(range(100, 100 + 2 * (NUM_PAGES - 2))), 0, slot=False)
    assert everything is not None
    assert not {*everything.sequence.pages} & {*pages}
    memory.check_integrity()
    memory.release(everything)
    memory.take_back(slot)
    assert is_whole(memory)


def test_a_slot_may_be_written_even_if_all_pages_were_cached(memory: DecodeMemory) -> None:
    first = allocated(memory, (1, 2, 3, 4))
    come_to_run(memory, first)
    second = allocated(memory, (1, 2, 3, 4))
    pages, slot = memory.detach(second)
    assert pages == ()
    assert memory.slots_free == NUM_SLOTS - 1
    memory.take_back(slot)
    memory.release(first)
    assert is_whole(memory)


def test_nothing_is_given_back_twice(memory: DecodeMemory) -> None:
    released, detached = allocated(memory), allocated(memory, (7, 8, 9))
    memory.release(released)
    _, slot = memory.detach(detached)
    for twice in (released, detached):
        with pytest.raises(InternalError, match="does not hold"):
            memory.release(twice)
    with pytest.raises(InternalError):
        memory.detach(detached)
    memory.free_slot(detached)
    assert memory.slots_free == NUM_SLOTS - 1
    memory.take_back(slot)
    with pytest.raises(InternalError, match="owner"):
        memory.take_back(slot)
    assert is_whole(memory)


def test_what_has_no_slot_is_not_written_and_cannot_be_detached(memory: DecodeMemory) -> None:
    allocation = allocated(memory, slot=False)
    with pytest.raises(InternalError, match="slot"):
        memory.detach(allocation)
    memory.release(allocation)
    assert is_whole(memory)


@pytest.mark.parametrize("damage", ["page", "lock", "slot"])
def test_the_audit_finds_what_nobody_has(damage: str, memory: DecodeMemory) -> None:
    first = allocated(memory)
    come_to_run(memory, first)
    if damage == "page":
        allocated(memory, (8, 9)).sequence.pages = []
    elif damage == "lock":
        memory._prefixes.lock(PROMPT, b"")
    else:
        allocated(memory, (8, 9)).slot = None
    with pytest.raises(InternalError):
        memory.check_integrity()
