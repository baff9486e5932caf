"""What lies between two modelled sides: messages and writes that arrive when, if and as often as somebody says.

The numbers of the model stand here too; seconds are those of `Network.now`.
"""

from __future__ import annotations

import asyncio
import ctypes
from dataclasses import dataclass, field
from typing import Any

from pd_common.handoff.deadlines import Timeouts
from pd_common.handoff.destination import Offer
from pd_common.transport.base import Puts
from pd_common.types import BootstrapRoom, Instance, Role

PAGE_SIZE, PAGES, SLOTS, PREFILL_SLOTS = 4, 6, 2, 8
MESSAGE_LIVES_S = 2
"""A call that is on its way for longer has been given up, and the connection it was on with it."""
RETENTION_S = 6
REQUEST_S = 12
TIMEOUTS = Timeouts(bootstrap_s=9, waiting_s=5)
HOST = "host-a"


@dataclass(frozen=True)
class Message:
    """A call, or the answer to one: `verb` is what `to` does with it when it arrives."""

    to: Role
    recipient: Instance | None
    verb: str
    room: BootstrapRoom
    args: tuple[Any, ...] = ()
    until_s: float = 0.0


@dataclass
class Network:
    """Everything on its way, oldest first."""

    now: float = 0.0
    messages: list[Message] = field(default_factory=list)

    def send(self, to: Role, recipient: Instance | None, verb: str, room: BootstrapRoom, *args: Any) -> None:
        self.messages.append(Message(to, recipient, verb, room, args, self.now + MESSAGE_LIVES_S))

    def forget_old(self) -> None:
        self.messages = [message for message in self.messages if message.until_s > self.now]


@dataclass(eq=False)
class Write:
    """Bytes on their way into one life of decode."""

    writer: Instance
    offer: Offer
    groups: tuple[Puts, ...]
    landed: asyncio.Future[None]

    def land(self) -> None:
        for group in self.groups:
            for local, remote, length in zip(group.local, group.remote, group.lengths, strict=True):
                ctypes.memmove(int(remote), int(local), int(length))
        if not self.landed.done():
            self.landed.set_result(None)
