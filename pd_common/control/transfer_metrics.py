"""What Prometheus reads of the handoff, of each change of the table: rooms by state, bytes handed over, failures."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pd_common.errors import Reason
from pd_common.handoff.metadata import ROW_BYTES
from pd_common.handoff.state import Transfer, TransferState
from pd_common.types import Role

_BYTES = tuple(4**power for power in range(7, 19))
"""16 KiB to 64 GiB."""
_DIRECTION = {Role.PREFILL: "sent", Role.DECODE: "received"}


class TransferMetrics(Collector):
    """Counts what a table's listeners are told; nothing is kept of a room that has ended."""

    def __init__(self) -> None:
        self._rooms = Gauge("pd_rooms", "Rooms whose handoff has not ended.", ["state"], registry=None)
        self._failed = Counter(
            "pd_rooms_failed", "Rooms whose handoff has failed, and in which state.", ["state", "reason"], registry=None
        )
        self._bytes = Histogram(
            "pd_transfer_total_bytes",
            "KV bytes of one room that was handed over, without its metadata row.",
            ["direction"],
            registry=None,
            buckets=_BYTES,
        )
        for state in TransferState:
            if not state.is_final:
                self._rooms.labels(state.name.lower())
                # There from the start: Prometheus sees no increase from nothing, and one of these is one too many.
                self._failed.labels(state.name.lower(), Reason.DIGEST_MISMATCH.value)

    def collect(self) -> Iterator[Metric]:
        for metric in (self._rooms, self._failed, self._bytes):
            yield from metric.collect()

    def note_change(self, room: Transfer) -> None:
        """A record has changed."""
        entered = room.timeline[-1]
        if entered.sequence != room.sequence:
            return  # in the state that it was in
        left = room.timeline[-2].state if len(room.timeline) > 1 else None
        if left is not None:
            self._rooms.labels(left.name.lower()).dec()
        if not room.state.is_final:
            self._rooms.labels(room.state.name.lower()).inc()
        elif room.state is TransferState.SUCCESS:
            self._note_success(room)
        else:
            # A room may be aborted before its request comes.
            state = "unknown" if left is None else left.name.lower()
            self._failed.labels(state, str(entered.reason)).inc()

    def _note_success(self, room: Transfer) -> None:
        if room.progress.bytes_done:  # nothing at all is moved by a fake room, or on a decode alone
            self._bytes.labels(_DIRECTION[room.role]).observe(room.progress.bytes_done - ROW_BYTES)
