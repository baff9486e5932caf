"""Which pages of one pool are free: hands out consecutive runs first, so that a transfer has few pieces to write.

Knows page ids only, neither tensors nor requests. Not thread-safe: the event loop owns it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from pd_common.errors import InternalError
from pd_common.types import PageIndices

_Run = tuple[int, int]


class PageAllocator:
    """Every page is either used or in exactly one free run; two free runs never touch.

    No page is reserved: attention never writes outside a request's own pages, so page 0 is as good as any other.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise InternalError(f"a pool needs at least one page, not {num_pages}", num_pages=num_pages)
        self._used = bytearray(num_pages)
        self._num_free = num_pages
        self._runs_by_length: list[_Run] = [(num_pages, 0)]
        self._length_at_start: dict[int, int] = {0: num_pages}
        self._start_at_end: dict[int, int] = {num_pages: 0}

    @property
    def num_pages(self) -> int:
        """Pages of the pool, free or not."""
        return len(self._used)

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can still hand out."""
        return self._num_free

    def alloc(self, count: int) -> PageIndices | None:
        """Takes `count` pages: the shortest free run that holds them all, else as few runs as possible.

        Returns None, and takes nothing, when fewer than `count` are free: the caller waits, that is no failure.
        """
        if count < 0:
            raise InternalError(f"cannot allocate {count} pages", count=count)
        if count > self._num_free:
            return None
        pages: list[int] = []
        while (missing := count - len(pages)) > 0:
            length, start = self._best_run(missing)
            taken = min(missing, length)
            self._remove_run(start, length)
            if taken < length:
                self._add_run(start + taken, length - taken)
            self._used[start : start + taken] = b"\x01" * taken
            pages.extend(range(start, start + taken))
        self._num_free -= count
        return tuple(pages)

    def free(self, pages: Sequence[int]) -> None:
        """Gives pages back, in any order; all of them or, when it raises, none.

        Raises:
            InternalError: a page is free already, repeated, or not of this pool.

        """
        ordered = sorted(pages)
        self._check_returnable(ordered)
        for start, length in _runs_of(ordered):
            self._used[start : start + length] = bytes(length)
            self._add_run(*self._merged(start, length))
        self._num_free += len(ordered)

    def are_used(self, pages: Iterable[int]) -> bool:
        """Whether none of these pages is free."""
        return all(self._used[page] for page in pages)

    def check_integrity(self) -> None:
        """Raises InternalError when the books do not balance: free runs must be exactly the unused pages, merged."""
        expected = [
            (start, length) for start, length in _runs_of([page for page, used in enumerate(self._used) if not used])
        ]
        books = (
            sorted(self._length_at_start.items()),
            sorted((start, end - start) for end, start in self._start_at_end.items()),
            sorted((start, length) for length, start in self._runs_by_length),
        )
        free = sum(length for _, length in expected)
        if any(book != expected for book in books) or free != self._num_free:
            raise InternalError(
                f"the page allocator lost count: {free} pages unused, {self._num_free} counted as free",
                unused=free,
                counted=self._num_free,
            )

    def _best_run(self, count: int) -> _Run:
        index = bisect_left(self._runs_by_length, (count, -1))
        return self._runs_by_length[min(index, len(self._runs_by_length) - 1)]

    def _check_returnable(self, ordered: list[int]) -> None:
        for page, following in pairwise([*ordered, None]):
            if page is None or not 0 <= page < self.num_pages:
                raise InternalError(f"page {page} is not a page of this pool", page=page, num_pages=self.num_pages)
            if not self._used[page] or page == following:
                raise InternalError(f"page {page} is freed twice", page=page)

    def _merged(self, start: int, length: int) -> _Run:
        """The run extended by its free neighbours, which are taken out of the books."""
        if (before := self._start_at_end.get(start)) is not None:
            self._remove_run(before, start - before)
            start, length = before, length + start - before
        if (after := self._length_at_start.get(start + length)) is not None:
            self._remove_run(start + length, after)
            length += after
        return start, length

    def _add_run(self, start: int, length: int) -> None:
        insort(self._runs_by_length, (length, start))
        self._length_at_start[start] = length
        self._start_at_end[start + length] = start

    def _remove_run(self, start: int, length: int) -> None:
        del self._runs_by_length[bisect_left(self._runs_by_length, (length, start))]
        del self._length_at_start[start]
        del self._start_at_end[start + length]


def _runs_of(ordered: Sequence[int]) -> Iterator[_Run]:
    """Consecutive runs of an ascending page list as (start, length)."""
    start = previous = None
    for page in ordered:
        if start is None or previous is None:
            start = page
        elif page != previous + 1:
            yield start, previous + 1 - start
            start = page
        previous = page
    if start is not None and previous is not None:
        yield start, previous + 1 - start
