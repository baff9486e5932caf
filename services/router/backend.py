"""What the two fronts of the router ask of whatever is behind them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from pd_common.generation import ChatMessage, ClientRequest, ModelInfo, Output


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

    @property
    def is_ready(self) -> bool: ...

    def not_ready_reason(self) -> str: ...
