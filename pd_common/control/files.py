"""Secrets that are mounted as files: read at the start, and again when somebody has put others in their place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from pd_common.errors import InvalidRequest

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Mounted(Generic[_T]):
    """What `load` makes of some files. Files that cannot be used change nothing once there were good ones."""

    def __init__(self, paths: Sequence[Path], load: Callable[[], _T]) -> None:
        """Reads the files.

        Raises:
            InvalidRequest: as `load` does.

        """
        self._paths = paths
        self._load = load
        self._seen = self._stamp()
        self._value = load()

    def current(self) -> _T:
        """From the files as they are now. Cheap while they stay the same; may be called in any thread."""
        stamp = self._stamp()
        if stamp != self._seen:
            self._seen = stamp  # taken before the files are read: what comes meanwhile is seen the next time
            try:
                self._value = self._load()
            except InvalidRequest as error:
                _log.error("keeping what was read before: %s", error.message)
            else:
                _log.info("read again: %s", ", ".join(map(str, self._paths)))
        return self._value

    def _stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp_of(path) for path in self._paths)


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None  # gone for the moment: reading it says so
    return status.st_ino, status.st_mtime_ns, status.st_size
