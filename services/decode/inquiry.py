"""What became of rooms that prefill has not spoken of for a while: a report that was lost is repaired by a question."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from pd_common.aio import Tasks
from pd_common.errors import PdError, RoomUnknown, TransferFailed
from pd_common.types import BootstrapRoom, Instance
from services.decode.pairing import Prefill

_log = logging.getLogger(__name__)

SILENT_S = 1.0
"""A room that nothing has been heard of for so long is asked for, about as often."""

Gone = Callable[[Prefill, BootstrapRoom, PdError], None]


class Inquiry:
    """Asks a prefill for what has failed there since it was last asked: one call, however many rooms are silent.

    A record may be gone from there before it was asked for: so each time one of the silent rooms is looked up as well.
    """

    def __init__(self, own: Instance, tasks: Tasks, gone: Gone) -> None:
        self._own = own
        self._tasks = tasks
        self._gone = gone
        self._tokens: dict[Prefill, str] = {}
        self._asking: set[Prefill] = set()
        self._round = 0

    def ask(self, silent: Mapping[Prefill, Sequence[BootstrapRoom]]) -> None:
        """Begins to ask about these rooms, by the prefill they were offered to; `gone` is told of those that ended."""
        self._round += 1
        for prefill in [prefill for prefill in self._tokens if prefill.fenced.is_set()]:
            del self._tokens[prefill]
        for prefill, rooms in silent.items():
            if prefill not in self._asking:
                name = f"question to {prefill.instance.instance_id}"
                self._tasks.start(name, self._ask(prefill, rooms[self._round % len(rooms)]))

    async def _ask(self, prefill: Prefill, room: BootstrapRoom) -> None:
        self._asking.add(prefill)
        try:
            await self._ask_for_failures(prefill)
            await self._look_up(prefill, room)
        except PdError as error:
            _log.debug("no answer from prefill %s: %s", prefill.instance.instance_id, error.message)
        finally:
            self._asking.discard(prefill)

    async def _ask_for_failures(self, prefill: Prefill) -> None:
        failed, self._tokens[prefill] = await prefill.client.list_failed(self._own, self._tokens.get(prefill, ""))
        for room, error in failed.items():
            self._gone(prefill, room, error)

    async def _look_up(self, prefill: Prefill, room: BootstrapRoom) -> None:
        try:
            _, failure = await prefill.client.get_transfer(room)
        except RoomUnknown:
            failure = TransferFailed("prefill has no record of the room any more", room=room)
        if failure is not None:
            self._gone(prefill, room, failure)
