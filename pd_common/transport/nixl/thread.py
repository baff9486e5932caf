"""The one thread that makes all NIXL calls of a transport: runs commands, drives writes, sleeps when there are none.

NIXL has no event to wait for on the sending side, so while a write is on its way it is looked at again and again, less
often the longer nothing happens.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from pd_common.errors import InternalError, PdError, TransferFailed
from pd_common.threads import run_into, watch_thread
from pd_common.transport.base import MemoryRegion

_log = logging.getLogger(__name__)
T = TypeVar("T")

_FIRST_PAUSE_S = 50e-6
_LAST_PAUSE_S = 250e-6
_PAUSE_GROWTH = 1.5
_IDLE_S = 1.0
"""Connections without a write are looked at this often."""


class Driven(Protocol):
    """Something that makes NIXL calls on this thread."""

    @property
    def waiting(self) -> bool:
        """Whether it has something on its way."""

    def register(self, region: MemoryRegion, /) -> None:
        """Makes a region known to it as source."""

    def drive(self) -> bool:
        """Moves on without waiting for anything; whether there was something to do."""

    def break_off(self, error: PdError, /) -> None:
        """Ends it: whoever waits gets this error."""


class NixlThread:
    """Everything handed over by `submit` runs on one thread, in that order."""

    def __init__(self, name: str) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._driven: dict[Driven, None] = {}
        self._pause_s = 0.0
        self._lock = threading.Lock()
        self._stopped: PdError | None = None
        self._stopping = False
        self.died: Future[None] = Future()
        """Done only with what ended the thread."""
        self._round_began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # --- any thread -------------------------------------------------------------------------------------------------

    def submit(self, command: Callable[[], T]) -> Future[T]:
        """Runs a command on the thread. Its future fails with what it raises, or with why the thread has ended."""
        future: Future[T] = Future()
        with self._lock:
            if self._stopped is None:
                self._commands.put(lambda: run_into(future, command))
            else:
                future.set_exception(self._stopped)
        return future

    def stop(self) -> None:
        """Ends the thread after the commands given so far; harmless when it has ended."""

        def end() -> None:
            self._stopping = True

        self.submit(end)
        self._thread.join()

    async def watch(self) -> None:
        """As `watch_thread`."""
        await watch_thread("NIXL", self.died, lambda: self._round_began)

    @property
    def closed(self) -> bool:
        """Whether it has ended as it should, with everything released."""
        return isinstance(self._stopped, TransferFailed)

    # --- this thread ------------------------------------------------------------------------------------------------

    @property
    def driven(self) -> tuple[Driven, ...]:
        return tuple(self._driven)

    def add(self, driven: Driven) -> None:
        self._driven[driven] = None

    def remove(self, driven: Driven) -> None:
        self._driven.pop(driven, None)

    def _run(self) -> None:
        error: PdError = TransferFailed("the transport is closed")
        try:
            while not self._stopping:
                self._round()
        except BaseException as defect:  # noqa: BLE001 - whatever ends this thread must reach all who wait
            _log.exception("the NIXL thread died")
            error = InternalError(f"the NIXL thread died: {type(defect).__name__}: {defect}")
            self.died.set_exception(error)
        with self._lock:
            self._stopped = error
        for driven in self.driven:
            driven.break_off(error)
        while (command := self._next(0.0)) is not None:
            command()

    def _round(self) -> None:
        self._round_began = time.monotonic()
        waiting = any(driven.waiting for driven in self.driven)
        command = self._next(self._pause_s if waiting else _IDLE_S)
        idle = command is None and not waiting
        while command is not None:
            command()
            self._pause_s = 0.0
            command = self._next(0.0)
        moved = [driven.drive() for driven in self.driven if driven.waiting or idle]
        if any(moved):
            self._pause_s = 0.0
        else:
            self._pause_s = min(max(self._pause_s * _PAUSE_GROWTH, _FIRST_PAUSE_S), _LAST_PAUSE_S)

    def _next(self, timeout_s: float) -> Callable[[], None] | None:
        try:
            return self._commands.get(timeout=timeout_s) if timeout_s else self._commands.get_nowait()
        except queue.Empty:
            return None
