"""What prefill says to decode about a room: numbered, so no word undoes a later one; again where it must be heard."""

from __future__ import annotations

import asyncio
import time

from pd_common.errors import DeadlineExceeded, PdError, PeerLost
from pd_common.handoff.state import Progress, TransferState
from pd_common.types import BootstrapRoom, Instance
from services.prefill.receivers import Receiver, Receivers

AGAIN_S = 0.2
_TELL_S = 5.0
"""A decode that has not answered by then may be told by its own deadline: an abort waits for this."""


class Reports:
    """Speaks for one prefill process to the decodes that have registered with it."""

    def __init__(self, instance: Instance, receivers: Receivers) -> None:
        self._instance = instance
        self._receivers = receivers

    async def say(
        self,
        room: BootstrapRoom,
        receiver: Receiver,
        sequence: int,
        state: TransferState,
        progress: Progress,
        *,
        ticket: bytes,
        failure: PdError | None = None,
    ) -> tuple[TransferState, PdError | None]:
        """Says it once; gives the state that decode holds the room in, and why it failed there.

        Raises:
            PeerLost, DeadlineExceeded: there is no answer.
            PdError: decode refuses the report.
        """
        return await receiver.client.report_transfer(
            room,
            reporter=self._instance,
            recipient=receiver.instance,
            sequence=sequence,
            state=state,
            progress=progress,
            failure=failure,
            ticket=ticket,
        )

    async def tell_failed(
        self, room: BootstrapRoom, receiver: Receiver, sequence: int, error: PdError, ticket: bytes
    ) -> None:
        """Says it again while there is no answer; a decode that never gets it has its own deadline."""
        ends_s = time.monotonic() + _TELL_S
        while self._receivers.is_current(receiver) and time.monotonic() < ends_s:
            try:
                await self.say(room, receiver, sequence, TransferState.FAILED, Progress(), ticket=ticket, failure=error)
            except (PeerLost, DeadlineExceeded):
                await asyncio.sleep(AGAIN_S)
            except PdError:
                return  # decode has forgotten the room
            else:
                return
