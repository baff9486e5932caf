"""Which prefill and which decode a request goes to: among pairs through which a real room has gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pd_common.errors import InvalidRequest, NoWorkers
from pd_common.types import BootstrapAddress
from services.router.worker import Worker

Lives = tuple[str, str]
"""Which life of a prefill and which of a decode."""


@dataclass(slots=True, eq=False)
class Pair:
    """A prefill and a decode. What a probe has shown holds for the lives that they had then, and for no later ones."""

    prefill: Worker
    decode: Worker
    _probed: Lives | None = None
    _trouble: str | None = None
    _doubted: bool = False

    @property
    def lives(self) -> Lives | None:
        """Those that both have now; None unless both are live."""
        prefill, decode = self.prefill.life, self.decode.life
        return None if prefill is None or decode is None else (prefill, decode)

    @property
    def is_proven(self) -> bool:
        """Both are live, and a real room has gone through since they came up."""
        return self.lives is not None and self._probed == self.lives and self._trouble is None

    @property
    def is_doubted(self) -> bool:
        """It was proven, a room has failed since, and the probe that is to tell has not ended."""
        return self._doubted and self.lives is not None and self._probed == self.lives

    @property
    def needs_probe(self) -> bool:
        """Both are live, and no room has gone through yet."""
        return self.lives is not None and not self.is_proven

    @property
    def why_not(self) -> str:
        """What the last probe of these lives has met."""
        return self._trouble if self._trouble is not None and self._probed == self.lives else "not proven yet"

    @property
    def open_rooms(self) -> int:
        """Rooms that both have of this router."""
        return self.prefill.open_rooms + self.decode.open_rooms

    def note_probe(self, lives: Lives, trouble: str | None) -> bool:
        """How a probe has gone that began in these lives; no trouble: a room has gone through.

        Gives whether that is news.
        """
        is_news = self._doubted or (lives, trouble) != (self._probed, self._trouble)
        self._probed, self._trouble, self._doubted = lives, trouble, False
        return is_news

    def doubt(self, lives: Lives | None, trouble: str) -> None:
        """A room that began in these lives has failed between the two: the pair is to be probed again."""
        if self.is_proven and self.lives == lives:
            self._trouble, self._doubted = trouble, True
            self.prefill.changed.set()

    def __str__(self) -> str:
        return f"{self.prefill.address.target} with {self.decode.address.target}"


class LeastRooms:
    """Of the proven pairs the one with the fewest rooms; the first in order among equals.

    Where none is proven, one that is only doubted: one failed room is no reason to refuse all others.
    """

    def __init__(self, prefills: Sequence[Worker], decodes: Sequence[Worker]) -> None:
        self.prefills = tuple(prefills)
        self.decodes = tuple(decodes)
        self.pairs = tuple(Pair(prefill, decode) for prefill in prefills for decode in decodes)

    def pick(self, bootstrap: BootstrapAddress | None) -> Pair:
        """A pair; `bootstrap` asks for a prefill by its own address or by that of its Bootstrap service.

        Raises:
            NoWorkers: no pair is proven, and none was before it came into doubt.
            InvalidRequest: the router has no such prefill.

        """
        pairs = [pair for pair in self.pairs if bootstrap in (None, pair.prefill.address, pair.prefill.bootstrap)]
        if not pairs:
            raise InvalidRequest(f"this router has no prefill {bootstrap and bootstrap.target}", field="bootstrap_host")
        usable = [pair for pair in pairs if pair.is_proven] or [pair for pair in pairs if pair.is_doubted]
        if not usable:
            raise NoWorkers(f"no usable pair: {why_none(pairs)}")
        return min(usable, key=lambda pair: pair.open_rooms)


def why_none(pairs: Sequence[Pair]) -> str:
    """For a person: what is the matter with each worker that is not live, and with each pair that is not proven."""
    workers = dict.fromkeys([pair.prefill for pair in pairs] + [pair.decode for pair in pairs])
    down = [f"{worker}: {worker.why_not}" for worker in workers if not worker.is_live]
    return "; ".join(down + [f"{pair}: {pair.why_not}" for pair in pairs if pair.needs_probe])
