"""What stands between the network and the servicers: bytes become messages, callers are checked, errors are typed."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pd_common.control.access import Access
from pd_common.control.rooms import Call
from pd_common.control.status import abort
from pd_common.errors import InternalError, InvalidRequest, PdError, Reason

_log = logging.getLogger(__name__)


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Lets servicers raise PdError. Any other exception is a defect: logged in full, answered as INTERNAL.

    Messages are read here and not by gRPC, which would answer bytes that are none with an error of its own making.
    """

    def __init__(self, access: Access, on_error: Callable[[str, Reason], None]) -> None:
        """`on_error` is told of the method and the reason of each error that is answered."""
        self._access = access
        self._on_error = on_error

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith("/pd.v1."):
            return handler
        guarded = _Guarded(method, handler, self._access, self._on_error)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(guarded.unary, None, handler.response_serializer)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(guarded.stream, None, handler.response_serializer)
        return grpc.stream_stream_rpc_method_handler(guarded.both_streams, None, handler.response_serializer)


class _Guarded:
    """One method of a servicer. Requests arrive as bytes."""

    def __init__(self, method: str, handler: Any, access: Access, on_error: Callable[[str, Reason], None]) -> None:
        self._method = method
        self._handler = handler
        self._access = access
        self._on_error = on_error

    async def unary(self, data: bytes, context: Call) -> Any:
        try:
            return await self._handler.unary_unary(self._admit(data, context), context)
        except Exception as error:  # noqa: BLE001  the border: a defect becomes a typed answer, never a dead connection
            await self._answer(error, context)

    async def stream(self, data: bytes, context: Call) -> AsyncIterator[Any]:
        try:
            async with aclosing(self._handler.unary_stream(self._admit(data, context), context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:  # noqa: BLE001  as above
            await self._answer(error, context)

    async def both_streams(self, data: AsyncIterator[bytes], context: Call) -> AsyncIterator[Any]:
        try:
            self._access.check_caller(self._method, context)
            async with aclosing(self._handler.stream_stream(self._read_all(data), context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:  # noqa: BLE001  as above
            await self._answer(error, context)

    def _admit(self, data: bytes, context: Call) -> Any:
        """The request, if this caller may make it."""
        self._access.check_caller(self._method, context)
        request = self._read(data)
        self._access.check_room(self._method, request)
        return request

    async def _read_all(self, data: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for message in data:
            yield self._read(message)

    def _read(self, data: bytes) -> Any:
        try:
            return self._handler.request_deserializer(data)
        except DecodeError as error:
            raise InvalidRequest(f"these bytes are no request of {self._method}", field="request") from error

    async def _answer(self, error: Exception, context: Call) -> None:
        """Ends the call; does not return."""
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if not isinstance(error, PdError):
            _log.error("a servicer failed unexpectedly", exc_info=error)
            error = InternalError(f"internal error: {type(error).__name__}")
        self._on_error(self._method, error.reason)
        await abort(context, error)
