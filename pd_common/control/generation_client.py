"""Generation and Abort of an engine process, as the router uses them; the room's trace context goes along."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from opentelemetry.context import Context
from pd.v1 import (
    abort_pb2,
    abort_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
)

from pd_common.control import convert_generation
from pd_common.control.connection import Connection
from pd_common.generation import ChatMessage, GenerationRequest, Load, ModelInfo, Output
from pd_common.telemetry import spans
from pd_common.types import BootstrapRoom


class GenerationClient:
    """Generation and Abort of an engine process, as the router, or another engine process, uses them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stub: Any = generation_pb2_grpc.GenerationStub(connection.channel)
        self._abort: Any = abort_pb2_grpc.AbortStub(connection.channel)

    async def get_model(self) -> ModelInfo:
        return convert_generation.model_from(
            await self._connection.call(self._stub.GetModel, generation_pb2.GetModelRequest())
        )

    async def tokenize_text(self, text: str) -> tuple[int, ...]:
        return await self._tokenize(generation_pb2.TokenizeRequest(text=text))

    async def tokenize_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        chat = generation_pb2.Chat(
            messages=[generation_pb2.ChatMessage(role=message.role, content=message.content) for message in messages]
        )
        return await self._tokenize(generation_pb2.TokenizeRequest(chat=chat))

    async def submit(self, request: GenerationRequest, subscriber: str, parent: Context) -> None:
        message = generation_pb2.SubmitRequest(request=convert_generation.request_to(request), subscriber=subscriber)
        await self._connection.call(self._stub.Submit, message, metadata=spans.carried(parent))

    async def stream_outputs(
        self, subscriber: str, note_load: Callable[[Load], None] | None = None
    ) -> AsyncGenerator[tuple[Output, ...], None]:
        """Outputs step by step; the first tuple is empty: the subscription stands. So are those that are only beats.

        `note_load` is told what the process has to do, before the outputs of the same message are given.
        """
        request = generation_pb2.StreamOutputsRequest(subscriber=subscriber)
        async with aclosing(self._connection.stream(self._stub.StreamOutputs, request)) as responses:
            async for response in responses:
                if note_load is not None and response.HasField("load"):
                    note_load(convert_generation.load_from(response.load))
                yield tuple(convert_generation.output_from(output) for output in response.outputs)

    async def generate(self, request: GenerationRequest, parent: Context) -> AsyncGenerator[Output, None]:
        """The pieces of one answer; closing the generator aborts the room. A failure is raised."""
        message = convert_generation.request_to(request)
        answer = self._connection.stream(self._stub.Generate, message, metadata=spans.carried(parent))
        async with aclosing(answer) as responses:
            async for response in responses:
                yield convert_generation.output_from(response.output)

    async def abort_room(self, room: BootstrapRoom, message: str, ticket: bytes = b"") -> None:
        request = abort_pb2.AbortRoomRequest(bootstrap_room=room, message=message, ticket=ticket)
        await self._connection.call(self._abort.AbortRoom, request)

    async def _tokenize(self, request: generation_pb2.TokenizeRequest) -> tuple[int, ...]:
        response = await self._connection.call(self._stub.Tokenize, request)
        return tuple(response.token_ids)
