"""Model tests: random histories of the table, and of memory with slots, quarantine and writers that may be late."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pd_common.errors import PdError, RoomAborted, RoomUnknown
from pd_common.handoff.deadlines import Timeouts
from pd_common.handoff.metadata import HandoffMetadata, MetadataBuffers, Slot
from pd_common.handoff.quarantine import Quarantine, Writer
from pd_common.handoff.state import ALLOWED, Progress, Transfer, TransferState
from pd_common.handoff.table import TransferTable
from pd_common.types import BootstrapRoom, Instance, PageIndices, ProcessProof, Role
from tests.handoff.memory import make_offer, room
from tests.handoff.overdue import expire, next_deadline

rooms = st.integers(1, 4).map(room)
counts = st.integers(0, 3)
RETENTION_S = 5.0
BOOTSTRAP_S, WAITING_S = 6.0, 3.0


def due_s(transfer: Transfer) -> float:
    """The request's deadline, or what the state allows, counted from the record's own steps."""
    met = [step for step in transfer.timeline if step.state > TransferState.BOOTSTRAPPING]
    return min(transfer.deadline_s, transfer.updated_s + WAITING_S if met else transfer.timeline[0].at_s + BOOTSTRAP_S)


class TableHistory(RuleBasedStateMachine):
    """Whatever comes in whatever order: rooms go forward, end once, and are never revived (I4, I7)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = TransferTable(Role.PREFILL, RETENTION_S, 3, Timeouts(BOOTSTRAP_S, WAITING_S))
        self.table.listeners.append(self.changed)
        self.now = 0.0
        self.known: dict[BootstrapRoom, Transfer] = {}
        self.sequence = 0

    def changed(self, new: Transfer) -> None:
        self.sequence += 1
        assert new.sequence == self.sequence
        old = self.known.get(new.room)
        if old is not None:
            assert not old.state.is_final
            assert new.state is old.state or new.state in ALLOWED[old.state]
            assert new.progress == old.progress.merged(new.progress)
            assert new.deadline_s <= old.deadline_s
            assert new.timeline[: len(old.timeline)] == old.timeline
        assert (new.failure is None) is (new.state is not TransferState.FAILED)
        assert new.timeline[-1].state is new.state
        assert [step.sequence for step in new.timeline] == sorted({step.sequence for step in new.timeline})
        if new.state > TransferState.BOOTSTRAPPING:
            assert new.rid is not None
            assert new.offer is not None
            assert new.prompt_digest == new.offer.prompt_digest
        self.known[new.room] = new

    def attempt(self, action: object, *args: object, **kwargs: object) -> None:
        """Calls; what claims to have changed nothing has changed nothing."""
        before = self.sequence
        try:
            result = action(*args, **kwargs)  # type: ignore[operator]
        except PdError:
            return
        if isinstance(result, bool):
            assert result is (self.sequence > before)

    @rule(number=rooms, prompt=st.sampled_from([b"a", b"b"]), wait_s=st.integers(1, 9))
    def request(self, number: BootstrapRoom, prompt: bytes, wait_s: int) -> None:
        deadline_s = self.now + wait_s
        self.attempt(
            self.table.join_request, number, rid="r", prompt_digest=prompt, deadline_s=deadline_s, now=self.now
        )

    @rule(
        number=rooms,
        page=counts,
        epoch=st.integers(1, 2),
        prompt=st.sampled_from([b"a", b"b"]),
        wait_s=st.integers(1, 9),
    )
    def offer(self, number: BootstrapRoom, page: int, epoch: int, prompt: bytes, wait_s: int) -> None:
        offer = make_offer([page], 4, receiver=Instance("decode-0", epoch), prompt_digest=prompt)
        self.attempt(self.table.join_offer, number, offer, deadline_s=self.now + wait_s, now=self.now)

    @rule(
        number=rooms,
        to=st.sampled_from(sorted(set(TransferState) - {TransferState.FAILED})),
        progress=st.builds(Progress, counts, counts, counts),
        peer=st.none() | st.integers(1, 2).map(lambda epoch: Instance("decode-0", epoch)),
    )
    def advance(self, number: BootstrapRoom, to: TransferState, progress: Progress, peer: Instance | None) -> None:
        self.attempt(self.table.advance, number, to, self.now, progress=progress, peer=peer)

    @rule(number=rooms)
    def fail(self, number: BootstrapRoom) -> None:
        self.attempt(self.table.fail, number, RoomAborted("x"), self.now)

    @rule(number=rooms)
    def abort(self, number: BootstrapRoom) -> None:
        self.attempt(self.table.abort, number, RoomAborted("x"), self.now)
        assert self.table.get(number).state.is_final

    @rule(epoch=st.integers(1, 2))
    def lose_peer(self, epoch: int) -> None:
        peer = Instance("decode-0", epoch)
        self.table.fail_peer(peer, RoomAborted("x"), self.now)
        assert all(transfer.peer != peer for transfer in self.table.live())

    @rule(number=rooms, sequence=st.integers(1, 5))
    def hear(self, number: BootstrapRoom, sequence: int) -> None:
        try:
            fresh = self.table.heard(number, Instance("decode-0", 1), sequence)
        except PdError:
            return
        if fresh:
            assert not self.known[number].state.is_final
            assert not self.table.heard(number, Instance("decode-0", 1), sequence)

    @rule(step_s=st.integers(1, 4))
    def time_passes(self, step_s: int) -> None:
        self.now += step_s
        expire(self.table, self.now)
        assert all(due_s(transfer) > self.now for transfer in self.table.live())

    @rule()
    def sweep(self) -> None:
        finished = [transfer for transfer in self.known.values() if transfer.state.is_final]
        forgotten = self.table.sweep(self.now)
        kept = [transfer for transfer in finished if transfer.room not in forgotten]
        assert len(kept) <= 3
        assert all(transfer.updated_s + RETENTION_S > self.now for transfer in kept)
        for number in forgotten:
            old = self.known.pop(number)
            assert old.updated_s + RETENTION_S <= self.now or len(finished) > 3

    @rule(since=st.integers(0, 40))
    def resume(self, since: int) -> None:
        expected = sorted((t for t in self.known.values() if t.sequence > since), key=lambda t: t.sequence)
        assert self.table.changes_since(since) == expected

    @invariant()
    def the_table_holds_exactly_what_it_told(self) -> None:
        for number in map(room, range(1, 5)):
            assert self.table.find(number) == self.known.get(number)
            if number not in self.known:
                try:
                    self.table.get(number)
                except RoomUnknown:
                    continue
                raise AssertionError(number)
        live = [due_s(transfer) for transfer in self.known.values() if not transfer.state.is_final]
        assert next_deadline(self.table) == min(live, default=None)


PAGES, SLOTS = 6, 3
WRITERS = (
    Writer(Instance("here", 1), "host-a:1", ProcessProof("host-a", 1, 1)),
    Writer(Instance("there", 1), "host-b:1", ProcessProof("host-b", 2, 1)),
)
peers = st.sampled_from(WRITERS)


@dataclass
class Owned:
    """One room's memory on decode and what its writer has posted but not finished."""

    writer: Writer
    pages: PageIndices
    slot: Slot
    posted: int = 0
    stopped: bool = False


@dataclass
class Memory:
    """The free list of pages and what was handed back."""

    free: list[int] = field(default_factory=lambda: list(range(PAGES)))
    released: list[BootstrapRoom] = field(default_factory=list)


class MemoryHistory(RuleBasedStateMachine):
    """No page or slot has a new owner while a write of the old one may land (I2); each slot has one owner (I6)."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = MetadataBuffers(SLOTS)
        self.memory = Memory()
        self.quarantine = Quarantine(self.release, host_id="host-a")
        self.running: dict[BootstrapRoom, Owned] = {}
        self.failed: dict[BootstrapRoom, Owned] = {}
        self.next_room = 1
        self.generations: set[Slot] = set()

    def release(self, number: BootstrapRoom, pages: PageIndices, slot: Slot) -> None:
        owned = self.failed.pop(number)
        assert owned.posted == 0, "memory came back under a write"
        assert (owned.pages, owned.slot) == (pages, slot)
        self.memory.free.extend(pages)
        self.rows.free(slot)

    @rule(writer=peers, count=st.integers(0, 3))
    def open(self, writer: Writer, count: int) -> None:
        if len(self.memory.free) < count:
            return
        slot = self.rows.alloc()
        if slot is None:
            assert len(self.running) + len(self.failed) == SLOTS
            return
        assert slot not in self.generations
        self.generations.add(slot)
        assert self.rows.get_seal(slot).room == 0
        pages = tuple(self.memory.free.pop() for _ in range(count))
        self.running[room(self.next_room)] = Owned(writer, pages, slot)
        self.next_room += 1

    @precondition(lambda self: self.running or self.failed)
    @rule(data=st.data())
    def post(self, data: st.DataObject) -> None:
        """Writers do not know of a failure before they are told."""
        owned = data.draw(st.sampled_from([*self.running.values(), *self.failed.values()]))
        if not owned.stopped:
            owned.posted += 1

    @precondition(lambda self: self.running or self.failed)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted([*self.running, *self.failed])))
        owned = self.running.get(number) or self.failed[number]
        if owned.posted:
            owned.posted -= 1
            self.rows.set_buf(owned.slot, number, owned.slot.generation, HandoffMetadata(1, 1))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        owned = self.failed[number] = self.running.pop(number)
        self.quarantine.hold(number, [owned.writer], owned.pages, owned.slot, 0.0)
        assert number in self.failed

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        owned = self.running[number]
        if owned.posted == 0:
            del self.running[number]
            self.memory.free.extend(owned.pages)
            self.rows.free(owned.slot)

    @precondition(lambda self: self.failed)
    @rule(data=st.data(), by=peers)
    def drained(self, data: st.DataObject, by: Writer) -> None:
        """A writer answers an abort when it is quiet; any other writer's word changes nothing."""
        number = data.draw(st.sampled_from(sorted(self.failed)))
        owned = self.failed[number]
        if by == owned.writer:
            owned.stopped = True
            if owned.posted:
                return
        self.quarantine.drained(number, by.instance)
        assert (number in self.failed) is (by != owned.writer)

    @rule(writer=peers)
    def fence(self, writer: Writer) -> None:
        """Cuts off what needs our end; a process on this host can still write, and all its rooms are held first."""
        for number in [number for number, owned in self.running.items() if owned.writer == writer]:
            owned = self.failed[number] = self.running.pop(number)
            self.quarantine.hold(number, [writer], owned.pages, owned.slot, 0.0)
        for owned in self.failed.values():
            if owned.writer == writer and writer.process.host_id != "host-a":
                owned.posted, owned.stopped = 0, True
        for number in [number for number, owned in self.failed.items() if owned.writer == writer]:
            self.quarantine.fenced(number, writer.instance)

    @rule(writer=peers)
    def killed(self, writer: Writer) -> None:
        """What a dead process on this host had posted through memory is over; what lies in our end's buffers is not."""
        if writer.process.host_id != "host-a":
            self.quarantine.process_gone(writer.process)
            return
        self.fence(writer)
        for owned in self.failed.values():
            if owned.writer == writer:
                owned.posted, owned.stopped = 0, True
        self.quarantine.process_gone(writer.process)
        assert all(owned.writer != writer for owned in self.failed.values())

    @invariant()
    def nothing_is_lost_or_owned_twice(self) -> None:
        owners = [*self.running.values(), *self.failed.values()]
        pages = [*self.memory.free, *(page for owned in owners for page in owned.pages)]
        assert sorted(pages) == list(range(PAGES))
        assert len({owned.slot.index for owned in owners}) == len(owners)
        assert self.rows.free_slots == SLOTS - len(owners)
        assert self.quarantine.held_slots == len(self.failed)
        assert self.quarantine.held_pages == sum(len(owned.pages) for owned in self.failed.values())


TestTableHistory = TableHistory.TestCase
TestTableHistory.settings = settings(max_examples=100, stateful_step_count=40)
TestMemoryHistory = MemoryHistory.TestCase
TestMemoryHistory.settings = settings(max_examples=100, stateful_step_count=40)
