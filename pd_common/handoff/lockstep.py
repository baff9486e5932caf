"""How the ranks of a role come to one decision about a room (I5): gates on each rank's own state, then the minimum.

Pure: a rank's view goes in, the common state comes out. With one rank the minimum is that rank's own state.
"""

from __future__ import annotations

from collections.abc import Iterable

from pd_common.handoff.state import TransferState


def gated(state: TransferState, *, landed: bool, intact: bool) -> TransferState:
    """What a rank may say of itself, given what it was told and what it finds in its own memory.

    Success that was reported counts once the slot's seal has `landed`, and only if everything is `intact`: a digest
    that does not match fails the room. Whatever comes before success passes as it is.
    """
    if state is not TransferState.SUCCESS:
        return state
    if not landed:
        return TransferState.TRANSFERRING
    return TransferState.SUCCESS if intact else TransferState.FAILED


def common_state(states: Iterable[TransferState]) -> TransferState:
    """What all ranks act on, from the gated state of each (of one at least): any failure fails, success needs all."""
    return min(states)
