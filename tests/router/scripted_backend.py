"""A backend that plays a script: pieces, failures and pauses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

from opentelemetry import trace

from pd_common.errors import PdError
from pd_common.generation import ChatMessage, ClientRequest, FinishReason, ModelInfo, Output, TokenLogprob, Usage
from pd_common.handoff.state import TransferState
from pd_common.types import BootstrapRoom

ROOM = BootstrapRoom(2**60 + 1)
MODEL = ModelInfo(
    name="tiny", context_length=100, max_request_tokens=64, vocab_size=256, page_size=16, has_chat_template=True
)
USAGE = Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=2)

Step = Output | Exception | asyncio.Event


@dataclass
class ScriptedBackend:
    """Text becomes its UTF-8 bytes. An event in the script is waited for; an exception is raised."""

    script: Sequence[Step] = ()
    ready: bool = True
    live: bool = True
    open_rooms: dict[BootstrapRoom, str] = field(default_factory=dict)
    """What can be aborted, with the rid of each."""

    def __post_init__(self) -> None:
        self.requests: list[ClientRequest] = []
        self.chats: list[list[ChatMessage]] = []
        self.trace_ids: list[int] = []
        self.aborts: list[tuple[BootstrapRoom, str]] = []
        self.started = asyncio.Event()
        self.aborted = asyncio.Event()

    async def tokenize_text(self, text: str) -> tuple[int, ...]:
        return (0, *text.encode())

    async def tokenize_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        self.chats.append(list(messages))
        return tuple("".join(message.content for message in messages).encode())

    async def model(self) -> ModelInfo:
        return MODEL

    async def generate(self, request: ClientRequest) -> AsyncGenerator[Output, None]:
        self.requests.append(request)
        self.started.set()
        room = request.room or ROOM
        try:
            with trace.get_tracer("test").start_as_current_span("generate"):
                for step in self.script:
                    self.trace_ids.append(trace.get_current_span().get_span_context().trace_id)
                    if isinstance(step, asyncio.Event):
                        await step.wait()
                    elif isinstance(step, Exception):
                        raise step
                    else:
                        yield replace(step, room=room)
        except (GeneratorExit, asyncio.CancelledError):
            await asyncio.sleep(0)  # an abort takes calls to other processes
            self.aborted.set()
            raise

    async def abort(self, room: BootstrapRoom, error: PdError) -> TransferState | None:
        self.aborts.append((room, error.message))
        return TransferState.FAILED if room in self.open_rooms else None

    async def abort_rid(self, rid: str, message: str) -> list[BootstrapRoom]:
        rooms = [room for room, its_rid in self.open_rooms.items() if its_rid == rid]
        self.aborts += [(room, message) for room in rooms]
        return rooms

    @property
    def is_ready(self) -> bool:
        return self.ready

    def not_ready_reason(self) -> str:
        return "no decode has registered"


def piece(text: str, *token_ids: int, logprobs: tuple[TokenLogprob, ...] = ()) -> Output:
    return Output(ROOM, token_ids, text, logprobs)


def ending(
    text: str = "",
    *token_ids: int,
    finish: FinishReason = FinishReason.STOP,
    matched: str | int | None = None,
    usage: Usage = USAGE,
) -> Output:
    return Output(ROOM, token_ids, text, finish=finish, matched_stop=matched, usage=usage)


HELLO: tuple[Output, ...] = (piece("he", 104, 101), piece("", 108), ending("llo", 108, 111, matched=0))
"""Text "hello" in three pieces, the second with its text held back."""
