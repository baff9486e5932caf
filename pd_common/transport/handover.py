"""What goes from a transport's own thread to an event loop: outcomes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TypeVar

from pd_common.errors import PdError

T = TypeVar("T")


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
