"""The workers that serve a request together: whether a real request has gone through them, and what they have to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pd_common.generation import Load
from services.router.worker import Worker

Lives = tuple[str, ...]
"""Which life of each worker of a route."""


@dataclass(slots=True, eq=False)
class Route:
    """A prefill and a decode, or a decode alone.

    What a probe has shown holds for the lives that its workers had then, and for no later ones.
    """

    prefill: Worker | None
    decode: Worker
    _probed: Lives | None = None
    _trouble: str | None = None
    _doubted: bool = False

    @property
    def workers(self) -> tuple[Worker, ...]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    # --- whether it can be used ---

    @property
    def lives(self) -> Lives | None:
        """Those that its workers have now; None unless all are live."""
        lives = tuple(worker.life for worker in self.workers if worker.life is not None)
        return lives if len(lives) == len(self.workers) else None

    @property
    def is_proven(self) -> bool:
        """All are live, and a real room has gone through since they came up."""
        return self.lives is not None and self._probed == self.lives and self._trouble is None

    @property
    def is_doubted(self) -> bool:
        """It was proven, a room has failed since, and the probe that is to tell has not ended."""
        return self._doubted and self.lives is not None and self._probed == self.lives

    @property
    def is_stopping(self) -> bool:
        """One of its workers takes no new request, a probe as little as any other."""
        return any(worker.is_stopping for worker in self.workers)

    @property
    def needs_probe(self) -> bool:
        """All are live, and no room has gone through yet."""
        return self.lives is not None and not self.is_proven and not self.is_stopping

    @property
    def why_not(self) -> str:
        """What the last probe of these lives has met."""
        return self._trouble if self._trouble is not None and self._probed == self.lives else "not proven yet"

    def note_probe(self, lives: Lives, trouble: str | None) -> bool:
        """How a probe has gone that began in these lives; no trouble: a room has gone through.

        Gives whether that is news.
        """
        is_news = self._doubted or (lives, trouble) != (self._probed, self._trouble)
        self._probed, self._trouble, self._doubted = lives, trouble, False
        return is_news

    def doubt(self, lives: Lives | None, trouble: str) -> None:
        """A room that began in these lives has failed on its way: the route is to be probed again."""
        if self.is_proven and self.lives == lives:
            self._trouble, self._doubted = trouble, True
            self.decode.changed.set()

    # --- how much there is to do, as the workers have said last ---

    @property
    def is_full(self) -> bool:
        """One of its workers takes a request only in place of another."""
        return any(worker.load is not None and worker.load.is_full for worker in self.workers)

    def refusals(self, priority: int) -> dict[Worker, Load]:
        """The workers that would refuse a request of this priority, and what they have to do."""
        loads = {worker: worker.load for worker in self.workers if worker.load is not None}
        return {worker: load for worker, load in loads.items() if load.refuses(priority)}

    def has_pages_for(self, prompt_tokens: int) -> bool:
        """Decode could set pages aside for such a prompt now."""
        load, model = self.decode.load, self.decode.model
        return load is not None and model is not None and prompt_tokens <= load.pages_available * model.page_size

    @property
    def to_do(self) -> int:
        """Rooms that its workers have of this router, and requests of anybody that wait there."""
        return sum(worker.open_rooms + (worker.load.queued if worker.load else 0) for worker in self.workers)

    def __str__(self) -> str:
        decode = self.decode.address.target
        return f"{decode} alone" if self.prefill is None else f"{self.prefill.address.target} with {decode}"


def usable(routes: Sequence[Route]) -> Sequence[Route]:
    """The proven ones; where there is none those that are only doubted: one failed room is no reason to refuse all.

    None of them has a worker that is stopping.
    """
    lasting = [route for route in routes if not route.is_stopping]
    return [route for route in lasting if route.is_proven] or [route for route in lasting if route.is_doubted]


def why_none(routes: Sequence[Route]) -> Iterator[str]:
    """For a person: what is the matter with each worker that cannot be used, and with each route that is not proven."""
    for worker in dict.fromkeys(worker for route in routes for worker in route.workers):
        if not worker.is_live:
            yield f"{worker}: {worker.why_not}"
        elif worker.is_stopping:
            yield f"{worker}: it is stopping and takes no new request"
    for route in routes:
        if route.needs_probe:
            yield f"{route}: {route.why_not}"
