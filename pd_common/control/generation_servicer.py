"""Generation on prefill and decode: requests in, and each subscriber's outputs step by step."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Protocol

from pd.v1 import generation_pb2, generation_pb2_grpc

from pd_common.control import beats, convert_generation
from pd_common.control.outputs import OutputHub
from pd_common.control.rooms import Call, RoomService, within_call
from pd_common.errors import ClientCancelled, InvalidRequest
from pd_common.generation import ChatMessage, GenerationRequest, ModelInfo, Output
from pd_common.telemetry import logs, spans
from pd_common.types import BootstrapAddress


class TextModel(Protocol):
    """What Generation needs of the engine."""

    @property
    def model_info(self) -> ModelInfo: ...

    def tokenize(self, text: str) -> tuple[int, ...]: ...

    def apply_chat_template(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]: ...


class EngineGenerationServicer(generation_pb2_grpc.GenerationServicer):
    """Generation on prefill and decode. `Generate` is `Submit` and `StreamOutputs` of a subscriber of its own."""

    def __init__(
        self, service: RoomService, hub: OutputHub, model: TextModel, bootstrap: BootstrapAddress | None = None
    ) -> None:
        """`bootstrap` is the directory in which decode finds this prefill, when it is not its own."""
        self._service = service
        self._hub = hub
        self._model = model
        self._bootstrap = bootstrap

    async def GetModel(self, request: generation_pb2.GetModelRequest, context: Call) -> generation_pb2.GetModelResponse:
        return convert_generation.model_to(replace(self._model.model_info, bootstrap=self._bootstrap))

    async def Tokenize(self, request: generation_pb2.TokenizeRequest, context: Call) -> generation_pb2.TokenizeResponse:
        match request.WhichOneof("input"):
            case "text":
                ids = await asyncio.to_thread(self._model.tokenize, request.text)
            case "chat":
                messages = [ChatMessage(message.role, message.content) for message in request.chat.messages]
                ids = await asyncio.to_thread(self._model.apply_chat_template, messages)
            case _:
                raise InvalidRequest("give text or chat", field="input")
        return generation_pb2.TokenizeResponse(token_ids=ids)

    async def Submit(self, request: generation_pb2.SubmitRequest, context: Call) -> generation_pb2.SubmitResponse:
        self._submit(await self._request_from(request.request), request.subscriber, context)
        return generation_pb2.SubmitResponse()

    async def StreamOutputs(
        self, request: generation_pb2.StreamOutputsRequest, context: Call
    ) -> AsyncIterator[generation_pb2.StreamOutputsResponse]:
        self._hub.subscribe(request.subscriber)
        try:
            yield self._step((), with_load=True)
            load_said_s = time.monotonic()
            async for outputs in self._hub.stream(request.subscriber):
                is_due = not outputs or time.monotonic() - load_said_s >= beats.BEAT_S
                if is_due:
                    load_said_s = time.monotonic()
                yield self._step(outputs, with_load=is_due)
        finally:
            self._abandon(request.subscriber)

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Call
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        subscriber = f"generate-{uuid.uuid4()}"
        self._hub.subscribe(subscriber)
        try:
            leg = await self._request_from(request)
            self._submit(replace(leg, timeout_s=within_call(leg.timeout_s, context)), subscriber, context)
            async for outputs in self._hub.stream(subscriber):
                for output in outputs:
                    if output.error is not None:
                        raise output.error
                    yield generation_pb2.GenerateResponse(output=convert_generation.output_to(output))
                if outputs and outputs[-1].is_last:
                    return
        finally:
            self._abandon(subscriber)

    async def _request_from(self, message: generation_pb2.GenerateRequest) -> GenerationRequest:
        request = convert_generation.request_from(message, await self._prompt_of(message))
        logs.note_prompt(request.room, request.rid, request.prompt, message.text or None)
        return request

    def _submit(self, request: GenerationRequest, subscriber: str, context: Call) -> None:
        self._hub.require(subscriber)
        self._service.submit(request, spans.received(context.invocation_metadata(), request.room))
        self._hub.own(request.room, subscriber)

    async def _prompt_of(self, message: generation_pb2.GenerateRequest) -> Sequence[int]:
        match message.WhichOneof("prompt"):
            case "text":
                return await asyncio.to_thread(self._model.tokenize, message.text)
            case "input_ids":
                return message.input_ids.ids
            case _:
                raise InvalidRequest("give text or input_ids", field="text")

    def _step(self, outputs: Sequence[Output], *, with_load: bool) -> generation_pb2.StreamOutputsResponse:
        return generation_pb2.StreamOutputsResponse(
            outputs=[convert_generation.output_to(output) for output in outputs],
            load=convert_generation.load_to(self._service.load()) if with_load else None,
        )

    def _abandon(self, subscriber: str) -> None:
        for room in self._hub.unsubscribe(subscriber):
            self._service.abandon(room, ClientCancelled("the client went away", room=room))
