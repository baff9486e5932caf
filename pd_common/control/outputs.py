"""From engine steps to whoever submitted the rooms: one stream per subscriber, one message per step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from pd_common.control import beats
from pd_common.errors import InvalidRequest
from pd_common.generation import Output
from pd_common.telemetry.answers import AnswerClock, AnswerMetrics
from pd_common.types import BootstrapRoom


@dataclass(frozen=True, slots=True)
class _Owner:
    """Who gets the outputs of a room."""

    subscriber: str
    clock: AnswerClock


class OutputHub:
    """Who gets which room's outputs: one subscriber until the last of them; without one they go nowhere.

    `answers` counts those that somebody gets.
    """

    def __init__(self) -> None:
        self.answers = AnswerMetrics("pd_engine")
        self._queues: dict[str, asyncio.Queue[tuple[Output, ...]]] = {}
        self._owner: dict[BootstrapRoom, _Owner] = {}

    def subscribe(self, subscriber: str) -> None:
        """Opens the subscriber's queue.

        Raises:
            InvalidRequest: the name is empty or in use.

        """
        if not subscriber:
            raise InvalidRequest("subscriber must not be empty", field="subscriber")
        if subscriber in self._queues:
            raise InvalidRequest(f"subscriber {subscriber} is already streaming", field="subscriber")
        self._queues[subscriber] = asyncio.Queue()

    def unsubscribe(self, subscriber: str) -> tuple[BootstrapRoom, ...]:
        """Closes the queue; gives the rooms that have not had their last output."""
        self._queues.pop(subscriber, None)
        rooms = tuple(room for room, owner in self._owner.items() if owner.subscriber == subscriber)
        for room in rooms:
            del self._owner[room]
        return rooms

    def require(self, subscriber: str) -> None:
        """Raises InvalidRequest when there is no such subscriber."""
        if subscriber not in self._queues:
            raise InvalidRequest(f"subscriber {subscriber} has no StreamOutputs call", field="subscriber")

    def own(self, room: BootstrapRoom, subscriber: str) -> None:
        """Sends the room's outputs to the subscriber."""
        self._owner[room] = _Owner(subscriber, self.answers.begin())

    def publish(self, outputs: Iterable[Output]) -> None:
        """Hands one step's outputs over, one tuple for each subscriber."""
        by_subscriber: dict[str, list[Output]] = {}
        for output in outputs:
            owner = self._owner.get(output.room)
            if owner is None:
                continue
            owner.clock.note(output)
            by_subscriber.setdefault(owner.subscriber, []).append(output)
            if output.is_last:
                del self._owner[output.room]
        for subscriber, batch in by_subscriber.items():
            self._queues[subscriber].put_nowait(tuple(batch))

    def beat(self) -> None:
        """Every subscriber hears something now."""
        for queue in self._queues.values():
            queue.put_nowait(())

    async def stream(self, subscriber: str) -> AsyncIterator[tuple[Output, ...]]:
        """The subscriber's outputs, step by step, for ever; an empty tuple is a beat."""
        queue = self._queues[subscriber]
        while True:
            try:
                async with asyncio.timeout(beats.BEAT_S):
                    outputs = await queue.get()
            except TimeoutError:
                outputs = ()
            yield outputs
