"""What the log says of rooms: states on the way at debug, ends at info, and failures that are ours to mend as warnings.

Never a prompt, nor what is wrong with a request: that is told to its client.
"""

from __future__ import annotations

import logging

from pd_common.errors import PdError, Reason, RoomUnknown
from pd_common.handoff.state import Transfer, TransferState
from pd_common.handoff.table import TransferTable
from pd_common.telemetry.logs import Field, fields
from pd_common.telemetry.spans import SpanName
from pd_common.telemetry.tracing import RoomTrace, Tracing
from pd_common.types import BootstrapRoom

_log = logging.getLogger(__name__)

_WORDS = {
    TransferState.BOOTSTRAPPING: "room opened",
    TransferState.WAITING_FOR_INPUT: "memory set aside",
    TransferState.TRANSFERRING: "transfer begun",
    TransferState.SUCCESS: "handoff done",
    TransferState.FAILED: "room failed",
}
_OF_THE_CLIENT = frozenset(
    {
        Reason.CLIENT_CANCELLED,
        Reason.INVALID_REQUEST,
        Reason.PERMISSION_DENIED,
        Reason.PROMPT_EMPTY,
        Reason.PROMPT_MISMATCH,
        Reason.PROMPT_TOO_LONG,
        Reason.ROOM_ABORTED,
        Reason.ROOM_IN_USE,
    }
)
"""Failures that the client has wished for or caused: nobody here has to look after them. Their text may be its own."""


def follow_requests(tracing: Tracing) -> None:
    """On a router: a line when a request has ended."""
    tracing.listeners.append(lambda leg: _say_end(leg, "request"))


def follow_rooms(tracing: Tracing, transfers: TransferTable) -> None:
    """On prefill and decode: a line for each state of a room, and on decode one when its answer has ended."""
    rooms = _Rooms(tracing, transfers)
    transfers.listeners.append(rooms.note_change)
    tracing.listeners.append(rooms.note_leg)


class _Rooms:
    """Listens to one engine process. A failure is said once, by the record or by the answer."""

    def __init__(self, tracing: Tracing, transfers: TransferTable) -> None:
        self._tracing = tracing
        self._transfers = transfers

    def note_change(self, record: Transfer) -> None:
        """A line if the room has come to another state, none for mere progress."""
        level = _level(record.failure) if record.state.is_final else logging.DEBUG
        if record.timeline[-1].sequence != record.sequence or not _log.isEnabledFor(level):
            return
        known: dict[str, Field | None] = {
            "rid": record.rid,
            "state": record.state.name,
            "took_ms": _ms(record.updated_s - record.created_s),
            "peer": None if record.peer is None else record.peer.instance_id,
            "trace_id": self._trace_id(record.room),
        }
        if record.state.is_final:
            known |= {"pages": record.progress.pages_done, "bytes": record.progress.bytes_done, **_why(record.failure)}
        _log.log(level, _WORDS[record.state], extra=fields(record.room, **known))

    def note_leg(self, leg: RoomTrace) -> None:
        if leg.root.name is not SpanName.DECODE:
            return
        record = self._transfers.find(leg.room)
        if record is None or record.state is not TransferState.FAILED:
            _say_end(leg, "answer")

    def _trace_id(self, room: BootstrapRoom) -> str | None:
        """None when the room is opened, before its leg begins."""
        try:
            return self._tracing.of_room(room)[-1].trace_id
        except RoomUnknown:
            return None


def say(leg: RoomTrace, step: str) -> None:
    """A step that is no state: at debug, with what is known of the leg so far."""
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug(step, extra=fields(leg.room, **leg.root.attributes, trace_id=leg.trace_id))


def _say_end(leg: RoomTrace, what: str) -> None:
    failure, took_s = leg.root.failure, leg.root.seconds
    level = _level(failure)
    if not _log.isEnabledFor(level) or took_s is None:
        return
    known: dict[str, Field | None] = {**leg.root.attributes, **_why(failure)}
    known |= {"took_ms": _ms(took_s), "trace_id": leg.trace_id}
    _log.log(level, "%s %s", what, "done" if failure is None else "failed", extra=fields(leg.room, **known))


def _level(failure: PdError | None) -> int:
    return logging.INFO if failure is None or failure.reason in _OF_THE_CLIENT else logging.WARNING


def _why(failure: PdError | None) -> dict[str, Field | None]:
    if failure is None:
        return {}
    told = None if failure.reason in _OF_THE_CLIENT else failure.message
    return {"reason": failure.reason.value, "error": told}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
