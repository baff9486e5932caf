"""Whether a room's pages are there: the decision of all ranks of this decode (I5), today of one."""

from __future__ import annotations

from pd_common.errors import TransferFailed
from pd_common.handoff.lockstep import common_state, gated
from pd_common.handoff.metadata import HandoffMetadata
from pd_common.handoff.receiver import KVReceiver
from pd_common.handoff.state import TransferState


async def agreed(receiver: KVReceiver) -> HandoffMetadata:
    """What came with the pages, once prefill has reported success.

    Raises:
        MetadataInvalid, DigestMismatch: it is not what was sent. Prefill speaks of success when everything is
            written: what is not there by now does not come any more.

    """
    own = await receiver.arrival()
    state = common_state([gated(TransferState.SUCCESS, landed=own.landed, intact=own.intact)])
    if state is TransferState.SUCCESS and own.metadata is not None:
        return own.metadata
    raise own.failure or TransferFailed(f"the ranks of decode hold the room in state {state.name}", room=receiver.room)
