"""A sender's end of one connection, run by the progress thread: lets writes advance, breaks, drains, closes.

One worker per connection: a connection that fails or is closed takes its worker with it and disturbs no other.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum, auto

from pd_common.errors import PdError, TransferFailed
from pd_common.transport.handover import repeated
from pd_common.transport.ucx.address import PortAddress
from pd_common.transport.ucx.interface import Context, Endpoint, Rkey, UCXError, Worker, carrier_in, pd_error
from pd_common.transport.ucx.progress import ProgressThread, settled
from pd_common.transport.ucx.write import Write

_log = logging.getLogger(__name__)

_ACTIVE_WRITES = 4
"""Writes that share a connection; more wait their turn."""
_DRAIN_LIMIT_S = 1.0


class _State(Enum):
    OPEN = auto()
    DRAINING = auto()
    """Nothing is posted any more; what was posted is waited for, so that a failure is reported after the last byte."""
    FLUSHING = auto()
    CLOSING = auto()
    """UCX finishes what is left; destroying the worker before that would abort the process."""
    CLOSED = auto()


class Outbound:
    """Invariant: nothing is posted unless OPEN; a write fails only when CLOSED, so after its last byte."""

    def __init__(self, thread: ProgressThread, worker: Worker, endpoint: Endpoint) -> None:
        self.worker = worker
        self.carrier: str | None = None
        self.error: PdError | None = None
        """Why no write is accepted any more."""
        self._thread = thread
        self._endpoint = endpoint
        self._rkeys: list[Rkey] = []
        self._state = _State.OPEN
        self._writes: deque[Write] = deque()
        self._drain_until_s = 0.0
        self._pending: list[int] = []
        self._closed: list[Future[None]] = []
        thread.add(self)

    @staticmethod
    def open(thread: ProgressThread, context: Context, address: PortAddress) -> Outbound:
        """Starts to connect; whether it succeeds shows in the first write.

        Raises:
            UCXError: UCX cannot make sense of the address, or has no transport that reaches it.
        """
        worker = context.create_worker()
        try:
            endpoint = worker.create_endpoint(address.worker)
        except UCXError:
            worker.destroy()
            raise
        outbound = Outbound(thread, worker, endpoint)
        try:
            outbound._rkeys += [endpoint.unpack_rkey(each.rkey) for each in (address.probe, *address.offered)]
        except UCXError as error:
            outbound.break_off(pd_error(error))
            raise
        return outbound

    @property
    def waiting(self) -> bool:
        return bool(self._writes) or self._state is not _State.OPEN

    def write(self, write: Write) -> None:
        """Takes a write; its `done` is settled once nothing of it can move any more."""
        if self.error is not None:
            self._thread.deliver(write.done, repeated(self.error))
            return
        self._writes.append(write)
        self._thread.wake(self)

    def close(self) -> Future[None]:
        """Breaks off whatever is on its way; the future is done when nothing is left of the connection."""
        if self._state is _State.CLOSED:
            return settled()
        closed: Future[None] = Future()
        self._closed.append(closed)
        self.break_off(TransferFailed("the channel was closed"))
        return closed

    def break_off(self, error: PdError) -> None:
        """No write is accepted from now on, and those on their way end with this error (the first one counts)."""
        if self.error is None:
            self.error = error
            self._state = _State.DRAINING
            self._drain_until_s = time.monotonic() + _DRAIN_LIMIT_S
        self._thread.wake(self)

    def abandon(self, error: PdError) -> None:
        self.error = self.error or error
        self._settle_all()

    def drive(self) -> bool:
        progressed = self.worker.progress()
        moved = self._advance() if self._state is _State.OPEN else self._wind_down()
        return moved or progressed

    def _advance(self) -> bool:
        try:
            return self._advance_writes()
        except UCXError as error:
            self.break_off(pd_error(self._endpoint.failure or error))
            return True

    def _advance_writes(self) -> bool:
        """Raises UCXError when the endpoint, a put or a flush has failed."""
        busy = False
        for write in tuple(self._writes)[:_ACTIVE_WRITES]:
            self._raise_failure()
            busy |= write.advance(self._endpoint, self._rkeys)
            if self.carrier is None and not write.gathered and write.first_request is not None:
                self.carrier = carrier_in(self.worker.describe(write.first_request))
            if write.finished:
                # A flush of an endpoint that failed unnoticed may count as done: the error handler speaks in progress.
                self.worker.progress()
                self._raise_failure()
                self._writes.remove(write)
                self._thread.deliver(write.done, write.receipt())
                busy = True
        return busy

    def _raise_failure(self) -> None:
        if self._endpoint.failure is not None:
            raise self._endpoint.failure

    def _wind_down(self) -> bool:
        """One step from DRAINING to CLOSED, if its time has come."""
        quiet = not [write for write in self._writes if not write.discard(self._endpoint)]
        taken = self._take_pending()
        hopeless = self._endpoint.failure is not None or time.monotonic() > self._drain_until_s
        if self._state is _State.CLOSING:
            if not (quiet and taken):
                return False
            self._release()
        elif hopeless or (self._state is _State.FLUSHING and taken):
            self._begin(_State.CLOSING, self._endpoint.close_nbx)
        elif self._state is _State.DRAINING and quiet:
            self._begin(_State.FLUSHING, self._endpoint.flush_nbx)
        else:
            return False
        return True

    def _begin(self, state: _State, start: Callable[[], int]) -> None:
        self._state = state
        try:
            self._pending.append(start())
        except UCXError as error:
            _log.debug("while a channel is closed: %s", error)

    def _take_pending(self) -> bool:
        self._pending = [request for request in self._pending if self._endpoint.take(request) is None]
        return not self._pending

    def _release(self) -> None:
        self._state = _State.CLOSED
        for rkey in self._rkeys:
            rkey.destroy()
        self._thread.remove(self)
        self.worker.destroy()
        self._settle_all()

    def _settle_all(self) -> None:
        error = self.error or TransferFailed("the channel was closed")
        for write in self._writes:
            self._thread.deliver(write.done, repeated(error))
        self._writes.clear()
        for closed in self._closed:
            if closed.set_running_or_notify_cancel():
                closed.set_result(None)
        self._closed.clear()
