"""A sender's end of one connection: an engine and a thread of its own, on which every call of Mooncake blocks."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from functools import partial

from pd_common.errors import InternalError, PdError, TransferFailed
from pd_common.threads import CallThread
from pd_common.transport.handover import deliver, repeated
from pd_common.transport.mooncake.engine import Engine, MooncakeError, Settings, pd_error
from pd_common.transport.mooncake.write import Write

_log = logging.getLogger(__name__)


class Outbound:
    """Invariant: a write ends only when nothing of it can move any more. The first failure ends the connection.

    `write` and `close` belong to the event loop. Writes take turns, batch by batch.
    """

    def __init__(self, settings: Settings, target: str) -> None:
        self.error: PdError | None = None
        """Why no write is accepted any more."""
        self._settings = settings
        self._target = target
        self._engine: Engine | None = None
        self._thread = CallThread("mooncake")
        self._closing: Future[None] | None = None

    def write(self, write: Write) -> None:
        """Takes a write; its `done` is settled once nothing of it can move any more."""
        if self.error is not None:
            raise repeated(self.error)
        self._take(write)

    def close(self) -> Future[None]:
        """Writes on their way end after the batch that is posted; done when nothing is left of the connection."""
        self.error = self.error or TransferFailed("the channel was closed")
        if self._closing is None:
            self._closing = self._thread.submit(self._release)
            self._thread.end()
        return self._closing

    def _take(self, write: Write) -> None:
        self._thread.submit(partial(self._step, write)).add_done_callback(partial(self._not_taken, write))

    def _not_taken(self, write: Write, step: Future[None]) -> None:
        """A step fails only with the thread, and that is the end of this connection; others have theirs."""
        death = step.exception()
        if death is not None:
            error = TransferFailed(f"the connection has lost its thread: {death}")
            self._break_off(error)
            deliver(write.done, repeated(error))

    # --- the thread of this connection ---

    def _step(self, write: Write) -> None:
        finished = False
        try:
            finished = self.error is None and self._advance(write)
        except MooncakeError as failed:
            self._break_off(pd_error(failed, self._target))
        except Exception as defect:  # noqa: BLE001 - a defect on this thread must reach who waits
            _log.exception("a write through Mooncake failed unexpectedly")
            self._break_off(InternalError(f"a write through Mooncake failed: {defect}"))
        if self.error is not None and not finished:
            deliver(write.done, repeated(self.error))
        elif finished:
            deliver(write.done, write.receipt())
        else:
            self._take(write)

    def _advance(self, write: Write) -> bool:
        """Writes one batch; whether there is none left."""
        batch = write.next_batch()
        if batch is None:
            return True
        if self._engine is None:
            self._engine = Engine(self._settings, ())
        self._engine.register(write.sources)
        self._engine.write(self._target, batch.local, batch.remote, batch.lengths)
        return False

    def _break_off(self, error: PdError) -> None:
        self._close_engine()  # before anybody is told: the batch that failed may have parts on their way
        self.error = self.error or error

    def _release(self) -> None:
        self._close_engine()

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
