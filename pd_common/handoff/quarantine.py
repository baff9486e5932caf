"""Destination memory of failed rooms, kept from reuse until every possible writer is proven quiet (I2).

Time alone proves nothing here: there is no clock but for the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from pd_common.errors import InternalError
from pd_common.handoff.metadata import Slot
from pd_common.types import BootstrapRoom, Instance, PageIndices, ProcessProof


class Proof(Enum):
    """What is still to be shown about one writer that has not drained."""

    FENCED = "fenced"
    """Our end of its data plane is torn down. That holds when it is paired again: an offer names its registration, and
    one that is still on its way is refused under a later one.
    """
    PROCESS_GONE = "process_gone"
    """Its process has ended: on one host a process may write into another's memory without its help."""


@dataclass(frozen=True, slots=True)
class Writer:
    """A process that may still write, where it is asked, and how its end could be seen."""

    instance: Instance
    address: str
    process: ProcessProof


@dataclass(frozen=True, slots=True)
class Held:
    """What one failed room keeps, since when, and what each writer still has to prove."""

    room: BootstrapRoom
    pages: PageIndices
    slot: Slot
    since_s: float
    missing: Mapping[Writer, frozenset[Proof]]

    def in_words(self, now: float) -> str:
        """For a person: what is kept, for how long by now, and what would end it."""
        waits = "; ".join(_in_words(writer, missing) for writer, missing in self.missing.items())
        kept = f"{len(self.pages)} pages and metadata slot {self.slot.index}"
        return f"room {self.room} keeps {kept} from reuse for {now - self.since_s:.1f} s: it waits until {waits}"


Release = Callable[[BootstrapRoom, PageIndices, Slot], None]


class Quarantine:
    """Held memory by room. `release` gets it back exactly once, when no writer is left to wait for.

    A writer is quiet when it has drained the room, or when it is fenced off and, if it runs on this host, its process
    is gone. A proof counts for what is held when it comes. Proofs may be repeated.

    It is bounded without a timer: only memory that was offered can come here, a process that is lost gets no offer
    until it is paired again, and it is paired again only when it has given every proof that it owes here (`owed_pages`
    is 0). So no process keeps more than it had been offered when it was lost, however often it comes and goes.
    """

    def __init__(self, release: Release, host_id: str) -> None:
        self._release = release
        self._host_id = host_id
        self._held: dict[BootstrapRoom, Held] = {}

    def __contains__(self, room: BootstrapRoom) -> bool:
        return room in self._held

    def hold(self, room: BootstrapRoom, writers: Iterable[Writer], pages: PageIndices, slot: Slot, now: float) -> None:
        """Takes pages and slot of a failed room until every writer is quiet; without writers it releases them at once.

        Raises:
            InternalError: this room is held already; it must not be opened again as long as it is.

        """
        if room in self._held:
            raise InternalError(f"Room {room} is in quarantine already", room=room)
        self._settle(Held(room, pages, slot, now, {writer: self._needed(writer) for writer in writers}))

    def drained(self, room: BootstrapRoom, instance: Instance) -> None:
        """The writer says that it will not write for this room any more."""
        held = self._held.get(room)
        if held is not None:
            self._prove(held, frozenset(Proof), lambda writer: writer.instance == instance)

    def fenced(self, room: BootstrapRoom, instance: Instance) -> None:
        """The port through which the writer was to write this room is torn down: `InboundPort.fence` has returned."""
        held = self._held.get(room)
        if held is not None:
            self._prove(held, frozenset({Proof.FENCED}), lambda writer: writer.instance == instance)

    def process_gone(self, process: ProcessProof) -> None:
        """The process has ended, see `process_is_gone`."""
        for held in self.held:
            self._prove(held, frozenset({Proof.PROCESS_GONE}), lambda writer: writer.process == process)

    def awaited_processes(self) -> frozenset[ProcessProof]:
        """Processes whose end would be a missing proof."""
        waiting = (item for held in self._held.values() for item in held.missing.items())
        return frozenset(writer.process for writer, missing in waiting if Proof.PROCESS_GONE in missing)

    def owed_pages(self, instance: Instance) -> int:
        """Pages out of use because this process has still to prove something."""
        return sum(
            len(held.pages)
            for held in self._held.values()
            if any(writer.instance == instance for writer in held.missing)
        )

    @property
    def held(self) -> tuple[Held, ...]:
        """Everything held, oldest first."""
        return tuple(self._held.values())

    @property
    def held_pages(self) -> int:
        """Pages out of use."""
        return sum(len(held.pages) for held in self._held.values())

    @property
    def held_slots(self) -> int:
        """Metadata slots out of use."""
        return len(self._held)

    def _needed(self, writer: Writer) -> frozenset[Proof]:
        here = writer.process.host_id == self._host_id
        return frozenset(Proof) if here else frozenset({Proof.FENCED})

    def _prove(self, held: Held, proofs: frozenset[Proof], concerns: Callable[[Writer], bool]) -> None:
        missing = {writer: left - proofs if concerns(writer) else left for writer, left in held.missing.items()}
        self._settle(replace(held, missing={writer: left for writer, left in missing.items() if left}))

    def _settle(self, held: Held) -> None:
        if held.missing:
            self._held[held.room] = held
            return
        self._held.pop(held.room, None)
        self._release(held.room, held.pages, held.slot)


def _in_words(writer: Writer, missing: frozenset[Proof]) -> str:
    steps = {
        Proof.FENCED: "our port for it is torn down",
        Proof.PROCESS_GONE: f"its process {writer.process.pid} on this host has ended",
    }
    otherwise = " and ".join(words for proof, words in steps.items() if proof in missing)
    return f"{writer.instance.instance_id} at {writer.address} says that it is quiet, or {otherwise}"
