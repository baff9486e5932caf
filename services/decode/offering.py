"""Pages are offered until prefill has answered: an offer may be made again, which repairs a call or an answer lost."""

from __future__ import annotations

import asyncio
import time

from pd_common.errors import DeadlineExceeded, PeerLost, ReceiverUnknown, StaleInstance, TransferFailed
from pd_common.handoff.destination import Offer
from pd_common.handoff.state import TransferState
from pd_common.telemetry.tracing import Message, RoomTrace
from pd_common.types import BootstrapRoom
from services.decode.pairing import Prefill
from services.decode.prefills import Prefills

_AGAIN_S = 0.2


async def publish(
    prefills: Prefills, prefill: Prefill, room: BootstrapRoom, offer: Offer, deadline_s: float, trace: RoomTrace
) -> None:
    """Returns when prefill has taken the offer in. `deadline_s` is a time of the monotonic clock.

    Raises:
        StaleInstance, ReceiverUnknown: refused before anything could be written; these pages are known to nobody.
        PeerLost: the pairing is lost, or was for a while; prefill may have known the pages.
        DeadlineExceeded: there was no answer in time.
        PdError: prefill has given the room up.

    """
    unheard = False
    while (time_left_s := deadline_s - time.monotonic()) > 0:
        try:
            state = await prefill.client.allocate_pages(
                room, prefill.instance, prefill.registration, offer, time_left_s, trace.context
            )
        except (PeerLost, DeadlineExceeded) as error:
            unheard = True
            if not prefills.is_current(prefill):
                raise PeerLost(f"prefill {prefill.address.target} is gone", peer=prefill.address.target) from error
            await asyncio.sleep(_AGAIN_S)
            trace.repeated(Message.OFFER)
        except (StaleInstance, ReceiverUnknown) as refused:
            if not unheard:
                raise
            raise PeerLost(f"prefill {prefill.address.target} has lost an offer: {refused.message}") from refused
        else:
            if state is TransferState.FAILED:
                raise TransferFailed("prefill has given the room up", room=room)
            return
    raise DeadlineExceeded("The deadline passed before prefill had taken the pages", room=room)
