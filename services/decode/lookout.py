"""Finds out what has been written into this decode's memory: a one-sided write tells nobody of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pd_common.handoff.metadata import MetadataBuffers
from pd_common.handoff.receiver import KVReceiver

_LOOK_AGAIN_S = 0.001
"""An event loop does not sleep for less. A look costs some microseconds, however many rooms there are."""


class Lookout:
    """Looks into the metadata slots again and again while a room waits for its pages."""

    def __init__(self, metadata: MetadataBuffers) -> None:
        self._metadata = metadata
        self._watched: dict[int, tuple[KVReceiver, asyncio.Future[None]]] = {}
        self._work = asyncio.Event()

    @contextmanager
    def watching(self, receiver: KVReceiver, written: asyncio.Future[None]) -> Iterator[None]:
        """Sets `written` when the room's seal has come. Its pages are hashed as they come."""
        index = receiver.offer.slot.index
        self._watched[index] = receiver, written
        self._work.set()
        try:
            yield
        finally:
            del self._watched[index]

    async def run(self) -> None:
        """Ends only by cancellation."""
        while True:
            await self._work.wait()
            self._look()
            if not self._watched:
                self._work.clear()
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _look(self) -> None:
        for index in self._metadata.written_slots():
            if index not in self._watched:
                continue
            receiver, written = self._watched[index]
            if not written.done() and receiver.look():
                written.set_result(None)
