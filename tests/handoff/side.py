"""What both modelled sides have in common: the table, a loop for their tasks, and calls that can be lost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from pd_common.handoff.state import ALLOWED, Transfer, TransferState
from pd_common.handoff.table import TransferTable
from pd_common.types import BootstrapRoom, Instance, Role
from tests.handoff.lossy import (
    RETENTION_S,
    TIMEOUTS,
    Message,
    Network,
)

S = TransferState
_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


class Side:
    """One life of one process: its table, and the loop that its tasks run in."""

    role: Role

    def __init__(self, epoch: int, network: Network, loop: asyncio.AbstractEventLoop) -> None:
        self.instance = Instance(self.role.value, epoch)
        self.network = network
        self.loop = loop
        self.table = TransferTable(self.role, RETENTION_S, 100, TIMEOUTS)
        self.table.listeners.append(self._watch)
        self.seen: dict[BootstrapRoom, Transfer] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.dead = False
        self.quarrels: set[BootstrapRoom] = set()
        """Rooms that this side ended on its own account, not because the other side said so."""

    def _watch(self, new: Transfer) -> None:
        """Forward only, and an end is an end (I4)."""
        old = self.seen.get(new.room)
        if old is not None:
            assert not old.state.is_final
            assert new.state is old.state or new.state in ALLOWED[old.state]
        else:
            self.quarrels.discard(new.room)
        self.seen[new.room] = new

    def sweep(self) -> None:
        for room in self.table.sweep(self.now):
            assert self.seen.pop(room).updated_s + RETENTION_S <= self.now, "a tombstone that is gone too soon (I4)"

    def receive(self, message: Message) -> None:
        """What arrives for an earlier life is refused; a refusal travels back as any answer does."""
        if message.recipient in (None, self.instance):
            getattr(self, f"on_{message.verb}")(message.room, *message.args)

    def send(self, recipient: Instance, verb: str, room: BootstrapRoom, *args: Any) -> None:
        if not self.dead:
            self.network.send(_OTHER[self.role], recipient, verb, room, *args)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(self.loop.create_task(work))

    @property
    def now(self) -> float:
        return self.network.now
