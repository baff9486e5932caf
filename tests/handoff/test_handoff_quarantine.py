from __future__ import annotations

from collections.abc import Callable

import pytest

from pd_common.errors import InternalError
from pd_common.handoff.metadata import Slot
from pd_common.handoff.quarantine import Proof, Quarantine, Writer
from pd_common.types import BootstrapRoom, Instance, ProcessProof
from tests.handoff.memory import room

HERE = Writer(Instance("prefill-here", 1), "host-a:8998", ProcessProof("host-a", 10, 1))
THERE = Writer(Instance("prefill-there", 1), "host-b:8998", ProcessProof("host-b", 10, 1))
PAGES, SLOT = (4, 2), Slot(1, 3)


class Freed:
    """What came back, in order."""

    def __init__(self) -> None:
        self.rooms: list[int] = []
        self.quarantine = Quarantine(self._release, host_id="host-a")

    def _release(self, freed_room: BootstrapRoom, pages: tuple[int, ...], slot: Slot) -> None:
        assert (pages, slot) == (PAGES, SLOT)
        assert freed_room not in self.quarantine
        self.rooms.append(freed_room)


Step = Callable[[Quarantine], None]


def drained(writer: Writer) -> Step:
    return lambda quarantine: quarantine.drained(room(7), writer.instance)


def fenced(writer: Writer) -> Step:
    return lambda quarantine: quarantine.fenced(room(7), writer.instance)


def gone(writer: Writer) -> Step:
    return lambda quarantine: quarantine.process_gone(writer.process)


@pytest.mark.parametrize(
    ("writers", "steps"),
    [
        ([HERE], [drained(HERE)]),
        ([THERE], [drained(THERE)]),
        ([THERE], [fenced(THERE)]),
        ([HERE], [fenced(HERE), gone(HERE)]),
        ([HERE], [gone(HERE), fenced(HERE)]),
        ([HERE], [fenced(HERE), drained(HERE)]),
        ([HERE, THERE], [drained(HERE), drained(THERE)]),
        ([HERE, THERE], [fenced(THERE), fenced(HERE), gone(HERE)]),
    ],
)
def test_memory_comes_back_with_the_last_proof_and_once(writers: list[Writer], steps: list[Step]) -> None:
    freed = Freed()
    freed.quarantine.hold(room(7), writers, PAGES, SLOT, 0.0)
    for step in steps:
        assert freed.rooms == []
        assert (freed.quarantine.held_pages, freed.quarantine.held_slots) == (2, 1)
        step(freed.quarantine)
    for step in steps:
        step(freed.quarantine)
    assert freed.rooms == [7]
    assert (freed.quarantine.held_pages, freed.quarantine.held_slots) == (0, 0)


@pytest.mark.parametrize(
    "step",
    [
        fenced(HERE),
        gone(HERE),
        drained(THERE),
        fenced(THERE),
        gone(THERE),
        lambda quarantine: quarantine.drained(room(8), HERE.instance),
        lambda quarantine: quarantine.fenced(room(8), HERE.instance),
        lambda quarantine: quarantine.drained(room(7), Instance("prefill-here", 2)),
        lambda quarantine: quarantine.process_gone(ProcessProof("host-a", 10, 2)),
    ],
)
def test_no_other_proof_frees(step: Step) -> None:
    freed = Freed()
    freed.quarantine.hold(room(7), [HERE], PAGES, SLOT, 0.0)
    step(freed.quarantine)
    assert freed.rooms == []


def test_a_proof_that_came_before_does_not_count() -> None:
    freed = Freed()
    drained(THERE)(freed.quarantine)
    fenced(THERE)(freed.quarantine)
    freed.quarantine.hold(room(7), [THERE], PAGES, SLOT, 0.0)
    assert freed.rooms == []


def test_without_a_writer_nothing_is_held() -> None:
    freed = Freed()
    freed.quarantine.hold(room(7), [], PAGES, SLOT, 0.0)
    assert freed.rooms == [7]


def test_a_held_room_cannot_be_held_again() -> None:
    freed = Freed()
    freed.quarantine.hold(room(7), [HERE], PAGES, SLOT, 0.0)
    with pytest.raises(InternalError):
        freed.quarantine.hold(room(7), [HERE], PAGES, SLOT, 0.0)
    assert freed.quarantine.held_slots == 1


def test_it_says_what_it_waits_for() -> None:
    freed = Freed()
    freed.quarantine.hold(room(7), [HERE, THERE], PAGES, SLOT, 1.5)
    (held,) = freed.quarantine.held
    assert (held.room, held.since_s) == (7, 1.5)
    assert held.missing == {HERE: frozenset(Proof), THERE: frozenset({Proof.FENCED})}
    assert freed.quarantine.awaited_processes() == {HERE.process}
    assert [freed.quarantine.owed_pages(writer.instance) for writer in (HERE, THERE)] == [2, 2]
    assert held.in_words(4.0) == (
        "room 7 keeps 2 pages and metadata slot 1 from reuse for 2.5 s: it waits until "
        "prefill-here at host-a:8998 says that it is quiet, "
        "or our port for it is torn down and its process 10 on this host has ended; "
        "prefill-there at host-b:8998 says that it is quiet, or our port for it is torn down"
    )
    gone(HERE)(freed.quarantine)
    assert freed.quarantine.awaited_processes() == frozenset()
    drained(THERE)(freed.quarantine)
    assert [freed.quarantine.owed_pages(writer.instance) for writer in (HERE, THERE)] == [2, 0]
