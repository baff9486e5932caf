"""A thread that runs calls one after the other, and what tells that a thread has died or hangs. Knows no engine."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from pd_common.errors import InternalError

_log = logging.getLogger(__name__)
T = TypeVar("T")

HANGS_AFTER_S = 600.0
"""One call takes milliseconds to minutes: an engine step, a kernel compiled at first use, a large pool registered."""
_LOOK_S = 5.0


class CallThread:
    """Calls run in the order in which they are given. When the thread dies, all that wait for it are told why."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._given = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._ended: InternalError | None = None
        self._stopping = False
        self._busy_since: float | None = None
        self._died: Future[None] = Future()
        # Daemon: the end of the process does not wait for a call that hangs.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Its future fails with what the call raises, or with InternalError when the thread has ended."""
        future: Future[T] = Future()
        with self._lock:
            if self._ended is not None:
                future.set_exception(self._ended)
                return future
            self._calls.append((future, call))
        self._given.release()
        return future

    async def run(self, call: Callable[[], T]) -> T:
        """As `submit`. A call that has begun goes on when its caller is cancelled."""
        return await asyncio.wrap_future(self.submit(call))

    async def watch(self) -> None:
        """As `watch_thread`."""
        await watch_thread(self._name, self._died, lambda: self._busy_since)

    def end(self) -> None:
        """Ends the thread after the calls given so far; does not wait."""

        def end() -> None:
            self._stopping = True

        self.submit(end)

    def stop(self) -> None:
        """As `end`; returns when it has ended."""
        self.end()
        self._thread.join()

    def _run(self) -> None:
        ended = InternalError(f"the {self._name} thread is closed")
        try:
            while not self._stopping:
                self._given.acquire()
                self._run_next()
        except BaseException as defect:  # noqa: BLE001  whatever ends this thread must reach all who wait
            _log.exception("the %s thread died", self._name)
            ended = InternalError(f"the {self._name} thread died: {type(defect).__name__}: {defect}")
            self._died.set_exception(ended)
        with self._lock:
            self._ended = ended
        for future, _ in self._calls:
            if not future.done():
                future.set_exception(ended)

    def _run_next(self) -> None:
        """A call leaves the queue when it has run, so that none is lost with the thread."""
        self._busy_since = time.monotonic()
        run_into(*self._calls[0])
        self._busy_since = None
        self._calls.popleft()


def run_into(future: Future[T], call: Callable[[], T]) -> None:
    """Runs a call, on the thread, for whoever waits for the future; not if nobody does any more."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except Exception as error:  # noqa: BLE001  handed to whoever waits for the future
        future.set_exception(error)
    except BaseException:
        future.set_exception(InternalError("the thread was ended in the middle of this"))
        raise
    else:
        future.set_result(result)


async def watch_thread(name: str, died: Future[None], busy_since: Callable[[], float | None]) -> None:
    """Raises what the thread died of, or that it hangs; otherwise it never returns.

    `busy_since` is when the call that runs now has begun, on the monotonic clock.

    Raises:
        InternalError: it has died, or one call has taken HANGS_AFTER_S seconds.

    """
    death = asyncio.wrap_future(died)
    while not death.done():
        await asyncio.wait((death,), timeout=_LOOK_S)
        since = busy_since()
        if since is not None and time.monotonic() - since > HANGS_AFTER_S:
            raise InternalError(f"the {name} thread hangs: one call has taken more than {HANGS_AFTER_S:.0f} s")
    death.result()
