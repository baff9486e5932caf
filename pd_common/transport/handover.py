"""What goes between an event loop and a transport's own thread: work in one direction, outcomes in the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from pd_common.errors import PdError

T = TypeVar("T")


def run_into(future: Future[T], command: Callable[[], T]) -> None:
    """Runs a command, on the thread, for whoever waits for the future; not if nobody does any more."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = command()
    except Exception as error:  # noqa: BLE001 - handed to whoever waits for the future
        future.set_exception(error)
    else:
        future.set_result(result)


def settle(future: asyncio.Future[T], outcome: T | PdError) -> None:
    """Gives an outcome to whoever still waits, in the future's own loop."""
    if future.done():
        return
    if isinstance(outcome, PdError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def deliver(future: asyncio.Future[T], outcome: T | PdError) -> None:
    """Settles a future from another thread, in its own loop."""
    with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits there any more
        future.get_loop().call_soon_threadsafe(settle, future, outcome)


def repeated(error: PdError) -> PdError:
    """The same error for one more who waits: an exception that is raised twice mixes up its tracebacks."""
    return type(error)(error.message, **error.metadata)
