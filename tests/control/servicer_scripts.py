"""Servicers of a few methods that fail, or do not end, as a test wants it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from pd.v1 import generation_pb2, generation_pb2_grpc

from pd_common.control.rooms import Call


class FailingServicer(generation_pb2_grpc.GenerationServicer):
    """Fails a unary call at once, and a stream after its first message."""

    def __init__(self, failure: Exception) -> None:
        self._failure = failure

    async def GetModel(self, request: generation_pb2.GetModelRequest, context: Call) -> generation_pb2.GetModelResponse:
        raise self._failure

    async def StreamOutputs(
        self, request: generation_pb2.StreamOutputsRequest, context: Call
    ) -> AsyncIterator[generation_pb2.StreamOutputsResponse]:
        yield generation_pb2.StreamOutputsResponse()
        raise self._failure


class EndlessServicer(generation_pb2_grpc.GenerationServicer):
    """Answers a model when it may; its output stream says one empty message, then nothing until it is cancelled."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def GetModel(self, request: generation_pb2.GetModelRequest, context: Call) -> generation_pb2.GetModelResponse:
        self.asked.set()
        await self.may_answer.wait()
        return generation_pb2.GetModelResponse(name="tiny", page_size=16)

    async def StreamOutputs(
        self, request: generation_pb2.StreamOutputsRequest, context: Call
    ) -> AsyncIterator[generation_pb2.StreamOutputsResponse]:
        try:
            yield generation_pb2.StreamOutputsResponse()
            await asyncio.Event().wait()
        finally:
            self.ended.set()
