"""pd.v1.Generation at the router: Generate, GetModel and Tokenize for gRPC clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
from opentelemetry import context as otel_context
from opentelemetry import propagate
from pd.v1 import generation_pb2, generation_pb2_grpc

from pd_common.control import convert, convert_generation
from pd_common.control.rooms import Call, within_call
from pd_common.errors import InvalidRequest
from pd_common.generation import ChatMessage, ClientRequest
from pd_common.telemetry import spans
from pd_common.types import BootstrapAddress
from services.router.backend import Backend
from services.router.open_requests import OpenRequests

_FOR_ROUTERS = "Submit and StreamOutputs are what a router calls on prefill and decode; call Generate here"


class RouterGenerationServicer(generation_pb2_grpc.GenerationServicer):
    """The same backend as the HTTP front's."""

    def __init__(self, backend: Backend, requests: OpenRequests) -> None:
        self._backend = backend
        self._requests = requests

    async def GetModel(self, request: generation_pb2.GetModelRequest, context: Call) -> generation_pb2.GetModelResponse:
        return convert_generation.model_to(await self._backend.model())

    async def Tokenize(self, request: generation_pb2.TokenizeRequest, context: Call) -> generation_pb2.TokenizeResponse:
        match request.WhichOneof("input"):
            case "text":
                ids = await self._backend.tokenize_text(request.text)
            case "chat":
                messages = [ChatMessage(message.role, message.content) for message in request.chat.messages]
                ids = await self._backend.tokenize_chat(messages)
            case _:
                raise InvalidRequest("give text or chat", field="input")
        return generation_pb2.TokenizeResponse(token_ids=ids)

    async def Submit(self, request: generation_pb2.SubmitRequest, context: Call) -> generation_pb2.SubmitResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, _FOR_ROUTERS)

    async def StreamOutputs(
        self, request: generation_pb2.StreamOutputsRequest, context: Call
    ) -> AsyncIterator[generation_pb2.StreamOutputsResponse]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, _FOR_ROUTERS)
        yield generation_pb2.StreamOutputsResponse()

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Call
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        # The call's own task: what is attached here ends with it.
        otel_context.attach(spans.arrived(propagate.extract(dict(context.invocation_metadata() or ()))))
        with self._requests.one():
            async with aclosing(self._backend.generate(await self._client_request(request, context))) as outputs:
                async for output in outputs:
                    yield generation_pb2.GenerateResponse(output=convert_generation.output_to(output))

    async def _client_request(self, message: generation_pb2.GenerateRequest, context: Call) -> ClientRequest:
        match message.WhichOneof("prompt"):
            case "text":
                prompt = await self._backend.tokenize_text(message.text)
            case "input_ids":
                prompt = tuple(message.input_ids.ids)
            case _:
                raise InvalidRequest("give text or input_ids", field="text")
        return ClientRequest(
            prompt=prompt,
            sampling=convert_generation.sampling_from(message.sampling_params),
            rid=message.rid or None,
            room=convert.room_from(message.bootstrap_room) if message.bootstrap_room else None,
            bootstrap=_bootstrap(message),
            return_logprob=message.return_logprob,
            top_logprobs=message.top_logprobs_num,
            timeout_s=within_call(convert_generation.timeout_from(message), context),
            cache_salt=message.cache_salt,
            priority=message.priority,
        )


def _bootstrap(message: generation_pb2.GenerateRequest) -> BootstrapAddress | None:
    if not message.bootstrap_host:
        return None
    return BootstrapAddress(message.bootstrap_host, message.bootstrap_port or convert_generation.DEFAULT_BOOTSTRAP_PORT)
