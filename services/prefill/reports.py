"""What prefill says to decode about one room: numbered, so no word undoes a later one; again where it must be heard.

Decode decides. As soon as it may find that everything is written, the room's end is what decode answers, on both sides,
whatever happens here meanwhile.
"""

from __future__ import annotations

import asyncio
import time

from pd_common.errors import DeadlineExceeded, PdError, PeerLost, TransferFailed
from pd_common.handoff.lockstep import common_state
from pd_common.handoff.state import Progress, TransferState
from pd_common.types import BootstrapRoom, Instance
from services.prefill.receivers import Receiver, Receivers

_AGAIN_S = 0.2
_TELL_S = 5.0
"""A decode that has not heard of a failure by then asks for it: what ends here waits for this."""
_ASK_S = 30.0
"""A decode that cannot be asked for its decision for so long, though it is not lost, is not waited for any more."""


class Reports:
    """One room's reports to the decode that has offered memory for it."""

    def __init__(
        self, room: BootstrapRoom, instance: Instance, receivers: Receivers, receiver: Receiver, ticket: bytes
    ) -> None:
        self.receiver = receiver
        self.decode_knows = False
        """That the room has failed; or there is nobody left to tell."""
        self.repeated = 0
        """How often it had to be said again, for want of an answer."""
        self._room = room
        self._instance = instance
        self._receivers = receivers
        self._ticket = ticket
        self._sequence = 0
        self._left_to_decode = False

    @property
    def decode_decides(self) -> bool:
        """Decode may have committed the room, and has not said yet that it has not."""
        return self._left_to_decode and not self.decode_knows

    def leave_to_decode(self) -> None:
        """The last chunk is about to be written: decode may see that it is there before this is known here."""
        self._left_to_decode = True

    async def progress(self, progress: Progress) -> None:
        """Said once: a word that is lost harms nothing, for the last report is repeated until it is answered.

        Raises:
            PdError: decode has given the room up, and why.

        """
        try:
            state, failure = await self._say(TransferState.TRANSFERRING, progress)
        except (PeerLost, DeadlineExceeded):
            return
        if state is TransferState.FAILED:
            raise self._given_up(state, failure)

    async def success(self, progress: Progress) -> None:
        """Everything is written. Success is what decode says after its gate; asked until there is an answer.

        Raises:
            PdError: decode has refused it, and why.

        """
        self.leave_to_decode()
        while True:
            try:
                state, failure = await self._say(TransferState.SUCCESS, progress)
            except (PeerLost, DeadlineExceeded):
                await self._before_again()
                continue
            if common_state([state]) is TransferState.SUCCESS:
                return
            raise self._given_up(state, failure)

    async def failure(self, error: PdError) -> PdError | None:
        """Tells decode why the room has failed, again while there is no answer.

        Gives how the room has ended: with this error, with the one that decode had before, or, if decode had committed
        it, with none.
        """
        ends_s = time.monotonic() + (_ASK_S if self.decode_decides else _TELL_S)
        while not self.decode_knows and self._receivers.is_current(self.receiver) and time.monotonic() < ends_s:
            try:
                state, failure = await self._say(TransferState.FAILED, Progress(), error)
            except (PeerLost, DeadlineExceeded):
                await self._before_again()
            except PdError:
                return error  # decode has forgotten the room
            else:
                return None if state is TransferState.SUCCESS else failure or error
        return error

    async def tell(self, error: PdError) -> None:
        """Like `failure`, for a room that has never been written."""
        await self.failure(error)

    async def _before_again(self) -> None:
        self.repeated += 1
        await asyncio.sleep(_AGAIN_S)

    async def _say(
        self, state: TransferState, progress: Progress, failure: PdError | None = None
    ) -> tuple[TransferState, PdError | None]:
        """Says it once; gives the state that decode holds the room in, and why it failed there.

        Raises:
            PeerLost, DeadlineExceeded: there is no answer.
            PdError: decode refuses the report.

        """
        self._sequence += 1
        return await self.receiver.client.report_transfer(
            self._room,
            reporter=self._instance,
            recipient=self.receiver.instance,
            sequence=self._sequence,
            state=state,
            progress=progress,
            failure=failure,
            ticket=self._ticket,
        )

    def _given_up(self, state: TransferState, failure: PdError | None) -> PdError:
        self.decode_knows = True
        return failure or TransferFailed(f"decode holds the room in state {state.name}", room=self._room)
