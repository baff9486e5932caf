"""Where the time of a room goes in this process: a leg, divided into stages.

Always noted, and kept here for the latest rooms; exported as OpenTelemetry spans where that is asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from opentelemetry.context import Context
from opentelemetry.trace import StatusCode

from pd_common.errors import PdError, RoomUnknown
from pd_common.telemetry import spans
from pd_common.telemetry.spans import ROOM, SpanName, now_ns
from pd_common.types import BootstrapRoom

Attribute = str | int | float | bool

_ENDED_KEPT = 2000
"""Legs that have ended and can still be asked for: a few kB each."""


class Message(StrEnum):
    """What one side tells the other until it is answered; the value is the attribute that says how often again."""

    OFFER = "pd.offers_repeated"
    REPORT = "pd.reports_repeated"


@dataclass(slots=True, eq=False)
class Stage:
    """One stretch of time, nanoseconds since 1970; `end_ns` is None while it lasts."""

    name: SpanName
    start_ns: int
    end_ns: int | None = None
    attributes: dict[str, Attribute] = field(default_factory=dict)
    failure: PdError | None = None

    @property
    def seconds(self) -> float | None:
        """How long it took; None while it lasts."""
        return None if self.end_ns is None else (self.end_ns - self.start_ns) / 1e9


class RoomTrace:
    """One leg of a room: `root` is all of it; of the `stages` those that were entered follow each other.

    What is recorded lies beside them, and may overlap them and each other.
    """

    def __init__(
        self,
        room: BootstrapRoom,
        root: Stage,
        parent: Context,
        ended: Callable[[RoomTrace], None],
    ) -> None:
        self.room = room
        self.root = root
        self.stages: list[Stage] = []
        self.first_token_ns: int | None = None
        self._ended = ended
        self._span = spans.start(root.name, room, parent, start_ns=root.start_ns)
        self._is_sampled = self._span.is_recording()
        self._current: Stage | None = None
        self.context = spans.inside(self._span)

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def ttft_s(self) -> float | None:
        """From the beginning of the leg; None before the first token."""
        return None if self.first_token_ns is None else (self.first_token_ns - self.root.start_ns) / 1e9

    def enter(self, name: SpanName, **attributes: Attribute) -> Stage:
        """Begins a stage, which ends the one before; attributes that become known later are put into it.

        The first begins with the leg.
        """
        now = now_ns() if self.stages else self.root.start_ns
        self._leave(now)
        self._current = Stage(name, now, attributes=attributes)
        self.stages.append(self._current)
        return self._current

    def leave(self) -> None:
        """Ends the stage; the next one, if any, begins later."""
        self._leave(now_ns())

    def record(self, name: SpanName, start_ns: int, end_ns: int, **attributes: Attribute) -> None:
        """A stretch that is over already, beside the stages."""
        self.stages.append(Stage(name, start_ns, end_ns, attributes))

    @contextmanager
    def beside(self, name: SpanName, **attributes: Attribute) -> Iterator[Stage]:
        """A stretch beside the stages for as long as the block lasts, which may be longer than the leg."""
        stage = Stage(name, now_ns(), attributes=attributes)
        self.stages.append(stage)
        try:
            yield stage
        finally:
            stage.end_ns = now_ns()
            if self.root.end_ns is not None:
                self._export(stage)

    def repeated(self, message: Message, times: int = 1) -> None:
        """Notes that the other side had to be told this again, because there was no answer."""
        if times:
            known = int(self.root.attributes.get(message.value, 0))
            self.root.attributes[message.value] = known + times

    def first_token(self) -> None:
        """Notes when the first token is there, once."""
        if self.first_token_ns is None:
            self.first_token_ns = now_ns()
            self.root.attributes["ttft_ms"] = round((self.first_token_ns - self.root.start_ns) / 1e6, 3)

    def abort(self, error: PdError) -> None:
        """The stage has failed. From now on, until `end`, others are told and what is under way comes to rest."""
        if self._current is not None:
            self._current.failure = error
        self.enter(SpanName.ABORT, **{"error.type": error.reason.value})

    def end(self, error: PdError | None = None, **attributes: Attribute) -> None:
        """Ends the stage and the leg, as failed if there is an error. A second call does nothing."""
        if self.root.end_ns is not None:
            return
        now = now_ns()
        self.root.end_ns = now
        self.root.attributes |= attributes
        self.root.failure = error
        if self._current is not None and self._current.name is not SpanName.ABORT:
            self._current.failure = error
        self._leave(now)
        for stage in self.stages:
            self._export(stage)
        self._export_root(now, error)
        self._ended(self)

    def _leave(self, now: int) -> None:
        if self._current is not None:
            self._current.end_ns = now
            self._current = None

    def _export(self, stage: Stage) -> None:
        """Not before the leg is over: then nobody waits for it."""
        if not self._is_sampled or stage.end_ns is None:
            return
        known, error = {ROOM: str(self.room), **stage.attributes}, stage.failure
        if error is not None:
            known["error.type"] = error.reason.value
        message = None if error is None else error.message
        spans.export_child(self._span, stage.name, stage.start_ns, stage.end_ns, known, message)

    def _export_root(self, now: int, error: PdError | None) -> None:
        self._span.set_attributes(self.root.attributes)
        if error is not None:
            self._span.set_status(StatusCode.ERROR, error.message)
            self._span.set_attribute("error.type", error.reason.value)
        self._span.end(now)


class Tracing:
    """The legs of one process: those that live, and the latest that have ended. `listeners` hear of each end."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[RoomTrace], None]] = []
        self._legs: dict[BootstrapRoom, list[RoomTrace]] = {}
        self._ended: deque[RoomTrace] = deque()

    def begin(
        self,
        name: SpanName,
        room: BootstrapRoom,
        parent: Context,
        *,
        start_ns: int | None = None,
        **attributes: Attribute,
    ) -> RoomTrace:
        """A leg that lasts until its `end`. `start_ns` is nanoseconds since 1970 (default: now)."""
        leg = RoomTrace(room, Stage(name, start_ns or now_ns(), attributes=attributes), parent, self._note_end)
        self._legs.setdefault(room, []).append(leg)
        return leg

    def of_room(self, room: BootstrapRoom) -> tuple[RoomTrace, ...]:
        """The room's legs here, oldest first.

        Raises:
            RoomUnknown: there has been none lately.

        """
        legs = self._legs.get(room)
        if not legs:
            raise RoomUnknown(f"nothing is noted here of room {room}", room=room)
        return tuple(legs)

    def _note_end(self, leg: RoomTrace) -> None:
        self._ended.append(leg)
        if len(self._ended) > _ENDED_KEPT:
            self._forget(self._ended.popleft())
        for listener in self.listeners:
            listener(leg)

    def _forget(self, leg: RoomTrace) -> None:
        legs = self._legs[leg.room]
        legs.remove(leg)
        if not legs:
            del self._legs[leg.room]
