"""A sender's end of one connection, run by the NIXL thread: lets writes advance, breaks, closes.

One agent per connection: a connection that fails or is closed takes its agent with it and disturbs no other.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from pd_common.errors import PdError, TransferFailed
from pd_common.transport.base import MemoryRegion
from pd_common.transport.handover import deliver, repeated
from pd_common.transport.nixl.binding import NixlAgent, NixlError, pd_error
from pd_common.transport.nixl.thread import NixlThread
from pd_common.transport.nixl.write import Write

_log = logging.getLogger(__name__)

_ACTIVE_WRITES = 4
"""Writes that share a connection; more wait their turn."""


class Outbound:
    """Invariant: the agent lives while `error` is None; a write fails only after the agent has ended."""

    def __init__(self, thread: NixlThread, agent: NixlAgent, peer: str) -> None:
        self.error: PdError | None = None
        """Why no write is accepted any more."""
        self._thread = thread
        self._agent = agent
        self._peer = peer
        self._writes: deque[Write] = deque()
        thread.add(self)

    @staticmethod
    def open(thread: NixlThread, make_agent: Callable[[], NixlAgent], metadata: bytes) -> Outbound:
        """Starts to connect; whether it succeeds shows in the first write.

        Raises:
            NixlError: NIXL cannot make sense of the metadata, or has no transport that reaches the peer.
        """
        agent = make_agent()
        try:
            return Outbound(thread, agent, agent.connect(metadata))
        except NixlError:
            agent.close()
            raise

    @property
    def waiting(self) -> bool:
        return bool(self._writes)

    def register(self, region: MemoryRegion) -> None:
        """Makes a region known as source.

        Raises:
            NixlError: NIXL refuses it.
        """
        if self.error is None:
            self._agent.register(region)

    def write(self, write: Write) -> None:
        """Takes a write; its `done` is settled once nothing of it can move any more."""
        if self.error is not None:
            deliver(write.done, repeated(self.error))
            return
        self._writes.append(write)

    def close(self) -> None:
        """Breaks off whatever is on its way and leaves nothing of the connection; harmless when that is done."""
        self.break_off(TransferFailed("the channel was closed"))

    def break_off(self, error: PdError) -> None:
        """Ends the agent; no write is accepted from now on, and those on their way fail (the first error counts)."""
        if self.error is not None:
            return
        self.error = error
        self._thread.remove(self)
        for write in self._writes:
            self._release(write)
        self._agent.close()
        for write in self._writes:
            deliver(write.done, repeated(error))
        self._writes.clear()

    def drive(self) -> bool:
        try:
            # A transfer that is done at once says nothing of a peer that has gone: that shows in progress alone.
            self._agent.progress()
            return self._advance_writes()
        except NixlError as error:
            self.break_off(pd_error(error))
            return True

    def _advance_writes(self) -> bool:
        """Raises NixlError when the connection or a transfer has failed."""
        busy = False
        for write in tuple(self._writes)[:_ACTIVE_WRITES]:
            busy |= write.advance(self._agent, self._peer)
            if write.finished:
                self._writes.remove(write)
                deliver(write.done, write.receipt())
        return busy

    def _release(self, write: Write) -> None:
        try:
            write.release(self._agent)
        except NixlError as error:
            _log.debug("while a channel is closed: %s", error)
