"""The one thread that makes all UCX calls of a transport: runs commands, drives workers, sleeps until they have work.

Knows no endpoint and no write; what it drives says itself what moving on means.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from pd_common.errors import InternalError, PdError, TransferFailed
from pd_common.threads import run_into, watch_thread
from pd_common.transport.handover import settle
from pd_common.transport.ucx.interface import Worker

_log = logging.getLogger(__name__)
T = TypeVar("T")

_SPIN_S = 20e-6
"""How long a worker is polled after its last progress before it is armed: the gap between two bursts of a stream."""
_WAITING_TIMEOUT_S = 0.02
_IDLE_TIMEOUT_S = 1.0
"""Not every event of every transport raises the event descriptor, so all workers are looked at this often."""


class Driven(Protocol):
    """Something that owns a worker and moves on when that worker does."""

    @property
    def worker(self) -> Worker:
        """The worker whose events wake it."""

    @property
    def waiting(self) -> bool:
        """Whether it waits for a completion."""

    def drive(self) -> bool:
        """Moves on without waiting for anything; whether there was something to do."""

    def close(self) -> Future[None]:
        """Lets go of the worker; the future is done when it is destroyed. Harmless when that is so already."""

    def abandon(self, error: PdError) -> None:
        """The thread has died: whoever waits gets this error."""


class ProgressThread:
    """Everything handed over by `submit` runs on one thread, in that order; results of writes go back in batches."""

    def __init__(self, name: str) -> None:
        self._commands: deque[Callable[[], None]] = deque()
        self._driven: dict[int, Driven] = {}
        self._hot: dict[int, float] = {}
        self._loops: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        self._lock = threading.Lock()
        self._stopped: PdError | None = None
        self._stopping = False
        self.died: Future[None] = Future()
        """Done only with what ended the thread."""
        self._round_began = time.monotonic()
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # --- any thread -------------------------------------------------------------------------------------------------

    def submit(self, command: Callable[[], T]) -> Future[T]:
        """Runs a command on the thread. Its future fails with what it raises, or with why the thread has ended."""
        future: Future[T] = Future()
        with self._lock:
            if self._stopped is not None:
                future.set_exception(self._stopped)
                return future
            self._commands.append(lambda: run_into(future, command))
            os.eventfd_write(self._wake_fd, 1)
        return future

    def stop(self) -> None:
        """Ends the thread after the commands given so far; harmless when it has ended."""

        def end() -> None:
            self._stopping = True

        self.submit(end)
        self._thread.join()

    async def watch(self) -> None:
        """As `watch_thread`."""
        await watch_thread("UCX progress", self.died, lambda: self._round_began)

    @property
    def closed(self) -> bool:
        """Whether it has ended as it should, with everything released."""
        return isinstance(self._stopped, TransferFailed)

    # --- this thread ------------------------------------------------------------------------------------------------

    @property
    def driven(self) -> tuple[Driven, ...]:
        return tuple(self._driven.values())

    def add(self, driven: Driven) -> None:
        self._driven[driven.worker.event_fd] = driven
        self._epoll.register(driven.worker.event_fd, select.EPOLLIN)
        self.wake(driven)

    def remove(self, driven: Driven) -> None:
        """Must come before the worker is destroyed: its event descriptor goes with it."""
        self._epoll.unregister(driven.worker.event_fd)
        del self._driven[driven.worker.event_fd]
        self._hot.pop(driven.worker.event_fd, None)

    def wake(self, driven: Driven) -> None:
        """Something was given to it: it is driven until it is idle again."""
        self._hot[driven.worker.event_fd] = time.monotonic()

    def deliver(self, future: asyncio.Future[T], outcome: T | PdError) -> None:
        """Settles a future in its own loop, after this round, together with the round's others."""
        self._loops.setdefault(future.get_loop(), []).append(lambda: settle(future, outcome))

    def _run(self) -> None:
        error: PdError = TransferFailed("the transport is closed")
        try:
            while not self._stopping:
                self._round()
        except BaseException as defect:  # noqa: BLE001 - whatever ends this thread must reach all who wait
            _log.exception("the UCX progress thread died")
            error = InternalError(f"the UCX progress thread died: {type(defect).__name__}: {defect}")
            self.died.set_exception(error)
        with self._lock:
            self._stopped = error
        for driven in self.driven:
            driven.abandon(error)
        while self._commands:
            self._commands.popleft()()
        self._hand_back()
        self._epoll.close()
        os.close(self._wake_fd)

    def _round(self) -> None:
        self._round_began = time.monotonic()
        while self._commands:
            self._commands.popleft()()
        for fd, last in tuple(self._hot.items()):
            driven = self._driven.get(fd)
            if driven is not None:
                self._drive(driven, fd, last)
        self._hand_back()
        self._listen()

    def _drive(self, driven: Driven, fd: int, last: float) -> None:
        now = time.monotonic()
        if driven.drive():
            if fd in self._driven:
                self._hot[fd] = now
        elif now - last > _SPIN_S and driven.worker.arm():
            del self._hot[fd]

    def _hand_back(self) -> None:
        for loop, settles in self._loops.items():
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(_run_all, settles)
        self._loops = {}

    def _listen(self) -> None:
        if self._hot or self._commands or self._stopping:
            timeout = 0.0
        elif any(driven.waiting for driven in self._driven.values()):
            timeout = _WAITING_TIMEOUT_S
        else:
            timeout = _IDLE_TIMEOUT_S
        events = self._epoll.poll(timeout)
        now = time.monotonic()
        if not events and timeout:
            self._hot = dict.fromkeys(self._driven, now)
        for fd, _ in events:
            if fd == self._wake_fd:
                os.eventfd_read(fd)
            else:
                self._hot.setdefault(fd, now)


def settled() -> Future[None]:
    """A future with nothing to wait for."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _run_all(settles: list[Callable[[], None]]) -> None:
    for each in settles:
        each()
