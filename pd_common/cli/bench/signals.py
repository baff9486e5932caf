"""How a bench ends early: as Ctrl-C ends it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def sigterm_ends() -> Iterator[None]:
    """Within this block SIGTERM unwinds as Ctrl-C does, so that children and namespaces go."""

    def leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - as signal handlers are called
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
