"""KV of retracted answers in host memory, so that what they have lost need not be computed again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pd_common.engine.engine import Engine

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class HostCopy:
    """What pages of one sequence held, from its first page on; one row each."""

    rows: torch.Tensor

    @property
    def num_pages(self) -> int:
        """Pages that were copied."""
        return len(self.rows)


class HostCopies:
    """At most `max_pages` pages in all copies together. A copy is held until it is dropped."""

    def __init__(self, engine: Engine, max_pages: int) -> None:
        self._engine = engine
        self._max_pages = max_pages
        self._held: set[HostCopy] = set()

    @property
    def pages_held(self) -> int:
        """Pages of all copies."""
        return sum(copy.num_pages for copy in self._held)

    async def save(self, pages: Sequence[int]) -> HostCopy | None:
        """A copy of what these pages hold; None when there is no room for it. Called once at a time."""
        if self.pages_held + len(pages) > self._max_pages:
            return None
        try:
            copy = HostCopy(await self._engine.save_pages(pages))
        except Exception:  # noqa: BLE001  it only saves work: without a copy the answer is computed again
            _log.exception("%d pages could not be copied to host memory", len(pages))
            return None
        self._held.add(copy)
        return copy

    async def load(self, copy: HostCopy, first_page: int, pages: Sequence[int]) -> None:
        """Writes the copy from its page `first_page` on into `pages`, of which there may be more than it needs.

        Cannot be interrupted: cancelled or not, the pages are in use until this has run to its end.
        """
        rows = copy.rows[first_page:]
        await self._engine.load_pages(rows, pages[: len(rows)])

    def drop(self, copy: HostCopy) -> None:
        """Nobody needs it any more. May be repeated."""
        self._held.discard(copy)
