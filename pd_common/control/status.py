"""Typed errors <-> google.rpc.Status: the one table, both ways."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from pd_common.errors import (
    ERROR_OF_REASON,
    CapacityExceeded,
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
MOST_OF_A_MESSAGE = 1000
"""Bytes: errors say what they were given, and stay on record for a while. gRPC, too, refuses trailers over 8 KiB."""
_MOST_OF_A_FACT, _MOST_FACTS = 250, 8
_BEFORE_WHY = re.compile(r"failed to connect to all addresses; last error: [A-Z_]+: (ipv[46]:\S+: )?")
_MOST_DIGITS = 9
"""Of seconds that somebody says; a Duration has room for more."""

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
    grpc.StatusCode.RESOURCE_EXHAUSTED: CapacityExceeded,
}


def to_status(error: PdError) -> status_pb2.Status:
    """The error as it travels: code, message for a person, ErrorInfo for a program, RetryInfo when it says when."""
    info = error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata=_cut_facts(error.metadata))
    details = [_packed(info)]
    if error.reason is Reason.CAPACITY and (seconds := retry_after_s(error.metadata)):
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=seconds))))
    code: int = CODE_OF_REASON[error.reason].value[0]
    return status_pb2.Status(code=code, message=_cut(error.message, MOST_OF_A_MESSAGE), details=details)


def retry_after_s(metadata: Mapping[str, str]) -> int | None:
    """Whole seconds, at least 1, after which a request that met CapacityExceeded may come again; None: nobody said."""
    said = metadata.get("retry_after_s", "")
    if not said.isdecimal() or len(said) > _MOST_DIGITS:
        return None
    return max(int(said), 1)


def _packed(message: Message) -> any_pb2.Any:
    detail = any_pb2.Any()
    detail.Pack(message)
    return detail


def _cut(text: str, most: int) -> str:
    return text.encode(errors="replace")[:most].decode(errors="ignore")


def _cut_facts(facts: Mapping[str, str]) -> dict[str, str]:
    first = islice(facts.items(), _MOST_FACTS)
    return {_cut(key, _MOST_OF_A_FACT): _cut(value, _MOST_OF_A_FACT) for key, value in first}


def from_status(status: status_pb2.Status) -> PdError:
    """The typed error again. A reason that this version does not know becomes InternalError with the message kept."""
    message = _cut(status.message, MOST_OF_A_MESSAGE)
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info) and info.domain == DOMAIN:
            known = info.reason in Reason.__members__
            cls = ERROR_OF_REASON[Reason(info.reason)] if known else InternalError
            return cls(message, **_cut_facts(info.metadata))
    return InternalError(message or f"status code {status.code} without details")


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> PdError:
    """What a failed call to `peer` means: the servicer's own typed error, or else what its status code says."""
    trailing = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    for key, value in trailing:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            with suppress(DecodeError):  # then the status code has to speak for itself
                return from_status(status_pb2.Status.FromString(value))
    cls = _ERROR_WITHOUT_INFO.get(error.code(), InternalError)
    hint = " (is it a process of another role?)" if error.code() is grpc.StatusCode.UNIMPLEMENTED else ""
    return cls(f"{peer}: {error.details() or error.code().name}{hint}", peer=peer)


def why_unreached(details: str) -> str:
    """For a person: what gRPC says of a call without what it says before it says why."""
    return _BEFORE_WHY.sub("", details)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: PdError) -> None:
    """Ends the call with the error; does not return."""
    status = to_status(error)
    await context.abort(CODE_OF_REASON[error.reason], status.message, ((_DETAILS_KEY, status.SerializeToString()),))
