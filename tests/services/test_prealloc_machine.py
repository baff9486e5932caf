from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pd_common.engine.request import Sequence
from pd_common.handoff.metadata import Slot
from services.decode.memory import Allocation
from services.decode.queues import PreallocQueue
from tests.services.decode_memory import PAGE_SIZE, a_memory, a_sequence, come_to_run

NUM_PAGES = 12
NUM_SLOTS = 3
ROWS = 5
RESERVED_TOKENS = 3
MOST_PASSES = 16


@dataclass(eq=False)
class Asker:
    """A request in line, and how many of those behind it have gone before it."""

    sequence: Sequence
    waiter: asyncio.Task[Allocation]
    returning: bool
    arrival: int
    passed: int = 0

    @property
    def place(self) -> tuple[bool, int, int]:
        return not self.returning, -self.sequence.request.priority, self.arrival


class PreallocMachine(RuleBasedStateMachine):
    """Any order of arrivals, growth, retractions, failures and cancellations."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.memory = a_memory(NUM_PAGES, NUM_SLOTS)
        self.queue = PreallocQueue(self.memory, ROWS, RESERVED_TOKENS)
        self.line: list[Asker] = []
        self.held: list[Allocation] = []
        self.written: list[Slot] = []
        self.arrivals: dict[Sequence, int] = {}

    # --- what happens to requests ---

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=16).map(tuple),
        max_new_tokens=st.integers(1, 9),
        priority=st.sampled_from([0, 0, 0, 1]),
        slot=st.booleans(),
    )
    def arrive(self, prompt: tuple[int, ...], max_new_tokens: int, priority: int, slot: bool) -> None:
        sequence = a_sequence(prompt, min(max_new_tokens, NUM_PAGES * PAGE_SIZE - len(prompt) + 1), priority)
        self.arrivals[sequence] = len(self.arrivals)
        self.ask(sequence, slot=slot, returning=False)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def pages_have_come(self, data: st.DataObject) -> None:
        allocation = data.draw(st.sampled_from(self.held))
        if not allocation.sequence.output:
            come_to_run(self.memory, allocation)
        self.queue.free_slot(allocation)
        self.settle()

    @precondition(lambda self: self.running())
    @rule(data=st.data(), tokens=st.integers(1, 4))
    def grow(self, data: st.DataObject, tokens: int) -> None:
        """Without pages the answer loses what it has, as does one that is retracted for another."""
        allocation = data.draw(st.sampled_from(self.running()))
        sequence = allocation.sequence
        for _ in range(min(tokens, sequence.request.sampling.max_new_tokens - len(sequence.output))):
            if not self.memory.grow(allocation, sequence.num_tokens):
                self.retract(allocation)
                return
            sequence.computed = sequence.num_tokens
            sequence.append(1)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.retract(data.draw(st.sampled_from(self.running())))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        allocation = data.draw(st.sampled_from(self.held))
        self.held.remove(allocation)
        self.queue.release(allocation)
        self.settle()

    @precondition(lambda self: self.being_written())
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        allocation = data.draw(st.sampled_from(self.being_written()))
        self.held.remove(allocation)
        _, slot = self.queue.detach(allocation)
        self.written.append(slot)
        self.settle()

    @precondition(lambda self: self.written)
    @rule()
    def become_quiet(self) -> None:
        self.queue.take_back(self.written.pop(0))
        self.settle()

    @precondition(lambda self: self.line)
    @rule(data=st.data(), as_it_is_let_in=st.booleans())
    def cancel(self, data: st.DataObject, as_it_is_let_in: bool) -> None:
        asker = data.draw(st.sampled_from(self.line))
        if as_it_is_let_in and self.held:
            self.queue.release(self.held.pop(0))  # perhaps for this one, which does not know yet
        asker.waiter.cancel()
        self.loop.run_until_complete(asyncio.wait([asker.waiter]))
        self.line.remove(asker)
        self.settle()

    # --- what has to hold ---

    def ask(self, sequence: Sequence, *, slot: bool, returning: bool) -> None:
        acquire = self.queue.acquire(sequence, sequence.num_tokens - 1, slot=slot, returning=returning)
        asker = Asker(sequence, self.loop.create_task(acquire), returning, self.arrivals[sequence])
        self.line.append(asker)
        self.settle()

    def retract(self, allocation: Allocation) -> None:
        self.held.remove(allocation)
        self.memory.release(allocation)
        self.ask(allocation.sequence, slot=False, returning=True)

    def running(self) -> list[Allocation]:
        return [each for each in self.held if each.sequence.output and each.slot is None]

    def being_written(self) -> list[Allocation]:
        return [each for each in self.held if each.slot is not None]

    def settle(self) -> None:
        """Takes note of who has been let in, in the order in which that has happened."""
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.run_until_complete(asyncio.sleep(0))
        entered = [asker for asker in self.line if asker.waiter.done()]
        for asker in entered:
            self.held.append(asker.waiter.result())
            self.line.remove(asker)
        for asker in self.line:
            behind = [other for other in entered if other.place > asker.place]
            asker.passed += len(behind)
            assert asker.passed <= MOST_PASSES
            assert asker.returning <= all(other.returning for other in behind)
        if entered and len(self.held) > 1:
            assert sum(map(self.growth, self.held)) <= self.memory.pages_available

    def growth(self, allocation: Allocation) -> int:
        """Pages that it lacks for its reserve, or for its end if that is nearer."""
        sequence = allocation.sequence
        longest = len(sequence.request.prompt) + sequence.request.sampling.max_new_tokens - 1
        return sequence.pages_short(min(sequence.num_tokens + RESERVED_TOKENS, longest), PAGE_SIZE)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.memory.check_integrity()
        assert {*self.memory.held} == {*self.held}
        assert len(self.held) <= ROWS
        assert (self.queue.waiting, self.queue.returning) == (len(self.line), sum(each.returning for each in self.line))

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        """Whoever fits is in: nothing has come free without a word."""
        waiting = self.queue.waiting
        self.queue.grant()
        assert self.queue.waiting == waiting

    @invariant()
    def somebody_can_go_on(self) -> None:
        """Everybody fits alone: so who waits, waits for one who is inside, or for a writer."""
        assert not self.line or self.held or self.written

    def teardown(self) -> None:
        while self.held or self.written:
            if self.written:
                self.become_quiet()
            for allocation in tuple(self.held):
                self.held.remove(allocation)
                self.queue.release(allocation)
            self.settle()
        assert not self.line
        assert (self.memory.pages_available, self.memory.slots_free) == (NUM_PAGES, NUM_SLOTS)
        self.loop.close()


TestPreallocMachine = PreallocMachine.TestCase
