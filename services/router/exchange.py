"""One request and its answer, as every API has them: what was asked, and the pieces so far."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from pd_common.errors import InternalError
from pd_common.generation import ClientRequest, FinishReason, Output, TokenLogprob, Usage
from pd_common.types import BootstrapRoom
from services.router.backend import Backend

Json = dict[str, object]

_LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have; the number is OpenAI's."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What the last piece says."""

    finish: FinishReason
    matched_stop: str | int | None
    usage: Usage


@dataclass(slots=True)
class Answer:
    """The pieces of one room's answer, joined."""

    room: BootstrapRoom
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ending: Ending | None = None

    def add(self, piece: Output) -> None:
        self.token_ids += piece.token_ids
        self.text += piece.text
        self.logprobs += piece.logprobs
        if piece.finish is not None and piece.usage is not None:
            self.ending = Ending(piece.finish, piece.matched_stop, piece.usage)

    def ended(self) -> Ending:
        """Its end.

        Raises:
            InternalError: the pieces stopped without a last one; half an answer is not passed off as a whole one.

        """
        if self.ending is None:
            raise InternalError("the answer stopped without a finish reason", room=self.room)
        return self.ending


class Exchange(Protocol):
    """One request in the words of one API, and its answer in the same words. `answer` always includes `piece`."""

    @property
    def request(self) -> ClientRequest: ...

    @property
    def stream(self) -> bool: ...

    def whole(self, answer: Answer) -> Json: ...

    def opening(self) -> Iterable[Json]:
        """Events before the first piece."""
        ...

    def events(self, piece: Output, answer: Answer) -> Iterable[Json]: ...

    def closing(self, answer: Answer) -> Iterable[Json]:
        """Events after the last piece."""
        ...


ReadExchange = Callable[[bytes, Backend], Awaitable[Exchange]]
"""A request body becomes an exchange, or PdError or RequestRefused is raised."""


def finite(logprob: float) -> float:
    """A logprob that JSON can hold."""
    return max(logprob, _LOWEST_LOGPROB)
