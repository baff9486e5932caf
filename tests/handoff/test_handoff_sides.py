"""Model test of both sides: any order, loss and doubling of messages and writes, aborts, time, and restarts of either.

What must never happen is asserted by the sides, where it would happen. At the end messages flow, and everything ends.
"""

from __future__ import annotations

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pd_common.handoff.state import Progress, Transfer, TransferState
from pd_common.types import BootstrapRoom, Instance, Role
from tests.handoff.decode_side import DecodeSide
from tests.handoff.lossy import (
    MESSAGE_LIVES_S,
    PAGES,
    PREFILL_SLOTS,
    REQUEST_S,
    RETENTION_S,
    SLOTS,
    Message,
    Network,
    Write,
)
from tests.handoff.memory import room
from tests.handoff.prefill_side import PrefillSide
from tests.handoff.side import Side

S = TransferState
rooms = st.integers(1, 3).map(room)
prompts = st.integers(1, 12)
sides = st.sampled_from(Role)


class BothSides(RuleBasedStateMachine):
    """Every rule may come at any time: a message is late, lost or early only by which rule comes next."""

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.network = Network()
        self.in_flight: list[Write] = []
        self.epoch = 1
        self.crashed: list[PrefillSide] = []
        self.lives: dict[Instance, DecodeSide] = {}
        self._start_decode()
        self._start_prefill()

    def _start_decode(self) -> None:
        self.decode = DecodeSide(self.epoch, self.network, self.loop, self.in_flight)
        self.lives[self.decode.instance] = self.decode

    def _start_prefill(self) -> None:
        self.prefill = PrefillSide(
            self.epoch, self.network, self.loop, self.in_flight, self.lives, self.decode.instance
        )

    def turn(self) -> None:
        """Whatever can go on goes on."""
        for _ in range(8):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
        self.prefill.tasks = [task for task in self.prefill.tasks if not _over(task)]

    def side(self, role: Role) -> Side:
        return self.prefill if role is Role.PREFILL else self.decode

    # --- requests and messages ---

    @rule(number=rooms, prompt=prompts)
    def request(self, number: BootstrapRoom, prompt: int) -> None:
        for role in Role:
            self.network.send(role, None, "request", number, prompt, self.prefill.instance)

    @rule(number=rooms, prompt=st.integers(6, 12))
    def request_gets_under_way(self, number: BootstrapRoom, prompt: int) -> None:
        """The short way to where most can go wrong: pages are offered, and a chunk is on its way into them."""
        self.request(number, prompt)
        self._deliver_all()
        if number in self.prefill.legs:
            self.prefill.compute(number, tokens=5)
            self.turn()

    @precondition(lambda self: self.network.messages)
    @rule(data=st.data(), twice=st.booleans())
    def deliver(self, data: st.DataObject, twice: bool) -> None:
        message = data.draw(st.sampled_from(self.network.messages))
        if not twice:
            self.network.messages.remove(message)
        self._arrives(message)

    @precondition(lambda self: self.network.messages)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.network.messages.remove(data.draw(st.sampled_from(self.network.messages)))

    @rule(rounds=st.integers(1, 3))
    def all_goes_well(self, rounds: int) -> None:
        """For a while: what is on its way arrives, every room is computed a little further, what is written lands."""
        for _ in range(rounds):
            self._deliver_all()
            for number in sorted(self.prefill.legs):
                self.prefill.compute(number, tokens=5)
            self.turn()
            while self.in_flight:
                self._land(self.in_flight[0])

    def _deliver_all(self) -> None:
        while self.network.messages:
            self._arrives(self.network.messages.pop(0))

    def _arrives(self, message: Message) -> None:
        self.side(message.to).receive(message)
        self.turn()

    # --- work and writes ---

    @precondition(lambda self: self.prefill.legs)
    @rule(data=st.data(), tokens=prompts)
    def compute(self, data: st.DataObject, tokens: int) -> None:
        self.prefill.compute(data.draw(st.sampled_from(sorted(self.prefill.legs))), tokens)
        self.turn()

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        self._land(data.draw(st.sampled_from(self.in_flight)))

    def _land(self, write: Write) -> None:
        self.in_flight.remove(write)
        write.land()
        self.turn()

    # --- what goes wrong ---

    @rule(number=rooms, role=sides)
    def abort(self, number: BootstrapRoom, role: Role) -> None:
        side = self.prefill if role is Role.PREFILL else self.decode
        side.abort(number)
        assert side.table.get(number).state.is_final
        self.turn()

    @rule(step_s=st.integers(1, 4))
    def time_passes(self, step_s: int) -> None:
        for _ in range(step_s):
            self.network.now += 1
            self.network.forget_old()
            self._settle_crashed()
            self.prefill.tick()
            self.decode.tick()
            self.turn()

    @rule()
    def prefill_seems_dead(self) -> None:
        """Decode misses its beats, and cuts off what goes through its own port; on one host that is not all."""
        self.decode.lost(self.prefill.instance)
        for held in self.decode.quarantine.held:
            self.decode.quarantine.fenced(held.room, self.prefill.instance)
        self.turn()

    @rule()
    def prefill_restarts(self) -> None:
        """What the dead process had posted may land until decode has seen its end."""
        self.prefill.dead = True
        for write in self.in_flight:
            if write.writer == self.prefill.instance:
                write.landed.cancel()
        self.turn()
        self.crashed.append(self.prefill)
        self.epoch += 1
        self._start_prefill()

    @precondition(lambda self: self.crashed)
    @rule()
    def decode_sees_the_end(self) -> None:
        for prefill in self.crashed:
            self.decode.lost(prefill.instance)
        self._settle_crashed()

    def _settle_crashed(self) -> None:
        """The port is torn down and the process is gone: nothing of it lands any more, and decode may say so."""
        gone = {prefill.instance for prefill in self.crashed}
        for held in self.decode.quarantine.held:
            for writer in [writer for writer in held.missing if writer.instance in gone]:
                self.in_flight[:] = [write for write in self.in_flight if write.writer != writer.instance]
                self.decode.quarantine.fenced(held.room, writer.instance)
                self.decode.quarantine.process_gone(writer.process)

    @rule()
    def decode_restarts(self) -> None:
        self.decode.dead = True
        self.epoch += 1
        self._start_decode()

    @rule()
    def prefill_sees_the_end_of_decode(self) -> None:
        if self.prefill.receiver != self.decode.instance:
            self.prefill.lost(self.prefill.receiver)
            self.turn()

    # --- what always holds ---

    @invariant()
    def no_page_and_no_slot_is_lost_or_owned_twice(self) -> None:
        decode = self.decode
        assert sorted([*decode.free, *(page for offer in decode.set_aside for page in offer.pages)]) == list(
            range(PAGES)
        )
        assert decode.rows.free_slots == SLOTS - len(decode.set_aside)
        assert self.prefill.rows.free_slots == PREFILL_SLOTS - len(self.prefill.legs)

    @invariant()
    def prefill_believes_in_success_only_if_decode_has_it(self) -> None:
        for theirs, mine in self._pairs():
            assert mine.state is not S.SUCCESS or theirs.state is S.SUCCESS

    def _pairs(self) -> list[tuple[Transfer, Transfer]]:
        """Rooms of which both present lives hold a record, by the same offer: decode's, prefill's."""
        found = []
        for number, offer in self.decode.offers.items():
            theirs, mine = self.decode.table.find(number), self.prefill.table.find(number)
            if theirs is not None and mine is not None and mine.offer == offer:
                found.append((theirs, mine))
        return found

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            self._everything_ends()
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.turn()
            self.loop.close()

    def _everything_ends(self) -> None:
        """From now on messages and writes arrive (I7), both sides agree, and nothing is left on either (I8)."""
        for _ in range(REQUEST_S + RETENTION_S + MESSAGE_LIVES_S):
            self.all_goes_well(rounds=1)
            for theirs, mine in self._pairs():
                gave_up = mine.room in self.prefill.quarrels
                if theirs.state.is_final and mine.state.is_final:
                    assert theirs.state is mine.state or (theirs.state is S.SUCCESS and gave_up)
            self.time_passes(1)
        assert not self.decode.table.live()
        assert not self.prefill.table.live()
        assert (len(self.decode.free), self.decode.rows.free_slots) == (PAGES, SLOTS)
        assert self.prefill.rows.free_slots == PREFILL_SLOTS


class Lies(BothSides):
    """Against what must not happen there is a second line: proofs that are false, successes that are only claimed.

    Memory has new owners while old writes still land; all the same no room takes another life's row for its own (I6).
    """

    @initialize()
    def begin(self) -> None:
        super().begin()
        self.decode.lied_to = True

    @rule()
    def decode_restarts(self) -> None:
        super().decode_restarts()
        self.decode.lied_to = True

    @rule()
    def memory_comes_back_too_soon(self) -> None:
        for held in self.decode.quarantine.held:
            for writer in held.missing:
                self.decode.quarantine.drained(held.room, writer.instance)

    @precondition(lambda self: self.decode.rooms)
    @rule(data=st.data())
    def success_is_claimed(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.decode.rooms)))
        offer = self.decode.rooms[number].offer
        self.decode.on_report(number, offer, self.prefill.instance, 99, S.SUCCESS, Progress())

    @rule(number=rooms, lands=st.booleans())
    def a_last_write_outlives_its_room(self, number: BootstrapRoom, lands: bool) -> None:
        """The short way to where a room of the same number has begun anew, perhaps under the row of the old one."""
        self.request(number, prompt=4)
        self._deliver_all()
        if number in self.prefill.legs and number in self.decode.rooms:
            self.prefill.compute(number, tokens=4)
            self.turn()
        if self.in_flight:
            self._land(self.in_flight[-1])
        for _ in range(SLOTS):
            self._begin_anew(number)
        if lands and self.in_flight:
            self._land(self.in_flight[-1])

    def _begin_anew(self, number: BootstrapRoom) -> None:
        self.decode.abort(number)
        self.memory_comes_back_too_soon()
        self.time_passes(RETENTION_S + MESSAGE_LIVES_S)
        self.network.messages.clear()
        self.memory_comes_back_too_soon()
        self.decode.on_request(number, 4, self.prefill.instance)


def _over(task: asyncio.Task[None]) -> bool:
    """Raises what was asserted in it."""
    if task.done() and not task.cancelled():
        task.result()
    return task.done()


TestBothSides = BothSides.TestCase
TestBothSides.settings = settings(max_examples=150, stateful_step_count=40)
TestLies = Lies.TestCase
TestLies.settings = settings(max_examples=80, stateful_step_count=30)
