"""The states of a handoff, which may follow which, and the record of one room. Only values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from pd_common.errors import PdError, Reason
from pd_common.handoff.destination import Offer
from pd_common.types import BootstrapRoom, Instance, Role


class TransferState(IntEnum):
    """How far a room has come on one rank. Ordered so that the minimum over ranks is their common state."""

    # No state is 0, so none is taken for no state.
    FAILED = 1
    BOOTSTRAPPING = 2
    """The two sides are finding each other; no pages are offered yet."""
    WAITING_FOR_INPUT = 3
    """Pages are offered; nothing has been written yet."""
    TRANSFERRING = 4
    SUCCESS = 5

    @property
    def is_final(self) -> bool:
        """Nothing follows."""
        return not ALLOWED[self]


ALLOWED: Mapping[TransferState, frozenset[TransferState]] = {
    TransferState.BOOTSTRAPPING: frozenset({TransferState.WAITING_FOR_INPUT, TransferState.FAILED}),
    # A lost report of TRANSFERRING must not keep SUCCESS out.
    TransferState.WAITING_FOR_INPUT: frozenset(
        {TransferState.TRANSFERRING, TransferState.SUCCESS, TransferState.FAILED}
    ),
    TransferState.TRANSFERRING: frozenset({TransferState.SUCCESS, TransferState.FAILED}),
    TransferState.SUCCESS: frozenset(),
    TransferState.FAILED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Progress:
    """What has been written so far; each count only rises."""

    chunks_done: int = 0
    pages_done: int = 0
    bytes_done: int = 0

    def merged(self, other: Progress) -> Progress:
        """The further of both, count by count: merging twice or late changes nothing."""
        return Progress(
            max(self.chunks_done, other.chunks_done),
            max(self.pages_done, other.pages_done),
            max(self.bytes_done, other.bytes_done),
        )


@dataclass(frozen=True, slots=True)
class Transition:
    """One state that was entered: when, by which change of the table, and what was done by then.

    `reason` is there exactly in FAILED.
    """

    state: TransferState
    at_s: float
    sequence: int
    progress: Progress
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """One room as one rank sees it. Replaced, never changed, so a snapshot stays true.

    `sequence` rises with every change over all rooms of the table. `rid` is None while only the other side has spoken
    of the room; `offer` is prefill's copy of what decode published; `failure` is there exactly in FAILED.
    """

    room: BootstrapRoom
    role: Role
    state: TransferState
    sequence: int
    created_s: float
    updated_s: float
    deadline_s: float
    timeline: tuple[Transition, ...]
    rid: str | None = None
    prompt_digest: bytes | None = None
    offer: Offer | None = None
    peer: Instance | None = None
    progress: Progress = Progress()
    failure: PdError | None = None
