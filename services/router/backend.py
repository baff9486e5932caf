"""What the fronts of the router ask of whatever is behind them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from pd_common.errors import PdError
from pd_common.generation import ChatMessage, ClientRequest, ModelInfo, Output
from pd_common.handoff.state import TransferState
from pd_common.types import BootstrapRoom


class Backend(Protocol):
    """Prompts in, tokens out; every method may raise PdError."""

    async def tokenize_text(self, text: str) -> tuple[int, ...]: ...

    async def tokenize_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]: ...

    async def model(self) -> ModelInfo: ...

    def generate(self, request: ClientRequest) -> AsyncGenerator[Output, None]:
        """The pieces of one answer. Closing the generator, or cancelling the task that waits for it, aborts the room.

        A failure is raised as PdError, never yielded; one before the first piece means that nothing was generated.
        """
        ...

    async def abort(self, room: BootstrapRoom, error: PdError) -> TransferState | None:
        """Ends the room: its client gets `error`. Returns when both legs have answered.

        None for a room that is not open; a request for it that comes within a minute is refused.
        """
        ...

    async def abort_rid(self, rid: str, message: str) -> Sequence[BootstrapRoom]:
        """As `abort`, for every open room whose request has exactly this id; gives them."""
        ...

    @property
    def is_ready(self) -> bool: ...

    def not_ready_reason(self) -> str: ...
