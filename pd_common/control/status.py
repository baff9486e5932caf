"""Typed errors <-> google.rpc.Status: the one table, both ways, and the interceptor that applies it to servicers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, cast

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from pd_common.errors import (
    ERROR_OF_REASON,
    ClientCancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PdError,
    PeerLost,
    Reason,
)

DOMAIN = "pd"
_DETAILS_KEY = "grpc-status-details-bin"
_log = logging.getLogger(__name__)

CODE_OF_REASON: dict[Reason, grpc.StatusCode] = {
    Reason.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.PROMPT_EMPTY: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.PROMPT_TOO_LONG: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.ROOM_IN_USE: grpc.StatusCode.ALREADY_EXISTS,
    Reason.ROOM_ABORTED: grpc.StatusCode.ABORTED,
    Reason.ROOM_UNKNOWN: grpc.StatusCode.NOT_FOUND,
    Reason.PROMPT_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.LAYOUT_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.STALE_INSTANCE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.RECEIVER_UNKNOWN: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.ALLOCATION_CONFLICT: grpc.StatusCode.ALREADY_EXISTS,
    Reason.PAGES_INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.TOPOLOGY_INCOMPLETE: grpc.StatusCode.UNAVAILABLE,
    Reason.PEER_LOST: grpc.StatusCode.UNAVAILABLE,
    Reason.TRANSFER_FAILED: grpc.StatusCode.UNAVAILABLE,
    Reason.METADATA_INVALID: grpc.StatusCode.DATA_LOSS,
    Reason.DIGEST_MISMATCH: grpc.StatusCode.DATA_LOSS,
    Reason.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.CAPACITY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.NO_WORKERS: grpc.StatusCode.UNAVAILABLE,
    Reason.CLIENT_CANCELLED: grpc.StatusCode.CANCELLED,
    Reason.SHUTTING_DOWN: grpc.StatusCode.UNAVAILABLE,
    Reason.TRANSPORT_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Reason.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}

_ERROR_WITHOUT_INFO: dict[grpc.StatusCode, type[PdError]] = {
    grpc.StatusCode.UNAVAILABLE: PeerLost,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: ClientCancelled,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
}


def to_status(error: PdError) -> status_pb2.Status:
    """The error as it travels: code, message for a person, ErrorInfo for a program."""
    info = error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata=error.metadata)
    detail = any_pb2.Any()
    detail.Pack(info)
    code: int = CODE_OF_REASON[error.reason].value[0]
    return status_pb2.Status(code=code, message=error.message, details=[detail])


def from_status(status: status_pb2.Status) -> PdError:
    """The typed error again. A reason that this version does not know becomes InternalError with the message kept."""
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info) and info.domain == DOMAIN:
            known = info.reason in Reason.__members__
            cls = ERROR_OF_REASON[Reason(info.reason)] if known else InternalError
            return cls(status.message, **dict(info.metadata))
    return InternalError(status.message or f"status code {status.code} without details")


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> PdError:
    """What a failed call to `peer` means: the servicer's own typed error, or else what its status code says."""
    trailing = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    for key, value in trailing:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            with suppress(DecodeError):  # then the status code has to speak for itself
                return from_status(status_pb2.Status.FromString(value))
    cls = _ERROR_WITHOUT_INFO.get(error.code(), InternalError)
    return cls(f"{peer}: {error.details() or error.code().name}", peer=peer)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: PdError) -> None:
    """Ends the call with the error; does not return."""
    status = to_status(error)
    await context.abort(CODE_OF_REASON[error.reason], error.message, ((_DETAILS_KEY, status.SerializeToString()),))


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Lets servicers raise PdError. Any other exception is a defect: logged in full, answered as INTERNAL."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        if handler is None or not _is_ours(handler_call_details.method):
            return handler
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _guard_unary(handler.unary_unary), handler.request_deserializer, handler.response_serializer
            )
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                _guard_stream(handler.stream_stream), handler.request_deserializer, handler.response_serializer
            )
        return grpc.unary_stream_rpc_method_handler(
            _guard_stream(handler.unary_stream), handler.request_deserializer, handler.response_serializer
        )


def _is_ours(method: str) -> bool:
    return method.startswith("/pd.v1.")


def _guard_unary(behaviour: Any) -> Any:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behaviour(request, context)
        except PdError as error:
            await abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001  the border: a defect becomes a typed answer, never a dead connection
            await abort(context, _defect(error))

    return guarded


def _guard_stream(behaviour: Any) -> Any:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for response in behaviour(request, context):
                yield response
        except PdError as error:
            await abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001  as above
            await abort(context, _defect(error))

    return guarded


def _defect(error: Exception) -> InternalError:
    _log.error("a servicer failed unexpectedly", exc_info=error)
    return InternalError(f"internal error: {type(error).__name__}")
