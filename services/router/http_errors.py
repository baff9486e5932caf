"""What a failure looks like over HTTP: the one table from reason to status, and OpenAI's error body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ExceptionHandler

from pd_common.control.status import retry_after_s
from pd_common.errors import ClientCancelled, InternalError, PdError, Reason

CLIENT_CLOSED_REQUEST = 499
"""Not in any RFC, but what proxies log and what google.rpc.Code maps CANCELLED to."""

# As google.rpc.Code maps the gRPC status of the same reason, except where proxies and clients need to know more:
# 502 says that the request failed between router, prefill and decode, 503 that no pair could take it now.
STATUS_OF_REASON: dict[Reason, int] = {
    Reason.INVALID_REQUEST: HTTPStatus.BAD_REQUEST,
    Reason.PROMPT_EMPTY: HTTPStatus.BAD_REQUEST,
    Reason.PROMPT_TOO_LONG: HTTPStatus.BAD_REQUEST,
    Reason.PAGES_INVALID: HTTPStatus.BAD_REQUEST,
    Reason.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    Reason.ROOM_UNKNOWN: HTTPStatus.NOT_FOUND,
    Reason.ROOM_IN_USE: HTTPStatus.CONFLICT,
    Reason.ROOM_ABORTED: HTTPStatus.CONFLICT,
    Reason.PROMPT_MISMATCH: HTTPStatus.CONFLICT,
    Reason.ALLOCATION_CONFLICT: HTTPStatus.CONFLICT,
    Reason.CAPACITY: HTTPStatus.TOO_MANY_REQUESTS,
    Reason.CLIENT_CANCELLED: CLIENT_CLOSED_REQUEST,
    Reason.INTERNAL: HTTPStatus.INTERNAL_SERVER_ERROR,
    Reason.LAYOUT_MISMATCH: HTTPStatus.BAD_GATEWAY,
    Reason.PEER_LOST: HTTPStatus.BAD_GATEWAY,
    Reason.TRANSFER_FAILED: HTTPStatus.BAD_GATEWAY,
    Reason.METADATA_INVALID: HTTPStatus.BAD_GATEWAY,
    Reason.DIGEST_MISMATCH: HTTPStatus.BAD_GATEWAY,
    Reason.STALE_INSTANCE: HTTPStatus.SERVICE_UNAVAILABLE,
    Reason.RECEIVER_UNKNOWN: HTTPStatus.SERVICE_UNAVAILABLE,
    Reason.TOPOLOGY_INCOMPLETE: HTTPStatus.SERVICE_UNAVAILABLE,
    Reason.NO_WORKERS: HTTPStatus.SERVICE_UNAVAILABLE,
    Reason.SHUTTING_DOWN: HTTPStatus.SERVICE_UNAVAILABLE,
    Reason.TRANSPORT_UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    Reason.DEADLINE: HTTPStatus.GATEWAY_TIMEOUT,
}

_RETRY_LATER = {"Retry-After": "1"}
# The openai client repeats a 409 and every 5xx by itself; but a conflict stays one, and one deadline was long enough.
_DO_NOT_RETRY = {"X-Should-Retry": "false"}
_HEADERS_OF_STATUS: dict[int, Mapping[str, str]] = {
    HTTPStatus.CONFLICT: _DO_NOT_RETRY,
    HTTPStatus.TOO_MANY_REQUESTS: _RETRY_LATER,
    HTTPStatus.SERVICE_UNAVAILABLE: _RETRY_LATER,
    HTTPStatus.GATEWAY_TIMEOUT: _DO_NOT_RETRY,
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A failure as a client sees it. `code` is a Reason, or a lower-case name of a cause that only HTTP has."""

    status: int
    code: str
    message: str
    param: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: PdError) -> Problem:
        return cls(
            status=STATUS_OF_REASON[error.reason],
            code=error.reason.value,
            message=error.message,
            param=error.metadata.get("field"),
            metadata=error.metadata,
        )

    def body(self) -> dict[str, object]:
        """OpenAI's shape; also sent as an event of a stream that has begun, which its client raises as APIError."""
        error = {
            "message": self.message,
            "type": self._type(),
            "code": self.code,
            "param": self.param,
            "metadata": self.metadata,
        }
        return {"error": error}

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        own = dict(_HEADERS_OF_STATUS.get(self.status, {}))
        if self.code == Reason.CAPACITY and (seconds := retry_after_s(self.metadata)):
            own["Retry-After"] = str(seconds)
        return JSONResponse(self.body(), self.status, {**own, **(headers or {})})

    def _type(self) -> str:
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"


class RequestRefused(Exception):
    """A request is refused for a cause that only HTTP has: it carries the whole problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def problem_of(error: Exception) -> Problem:
    """How any failure is told. The text of one that nobody expected may hold anything: it stays in the log."""
    match error:
        case PdError():
            return Problem.of(error)
        case RequestRefused():
            return error.problem
        case ClientDisconnect():
            return Problem.of(ClientCancelled("the client went away before its request was complete"))
        case _:
            return Problem.of(InternalError(f"internal error: {type(error).__name__}"))


async def _on_failure(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # Starlette's own: no such path, or not with this method
        phrase = HTTPStatus(error.status_code).phrase
        problem = Problem(
            error.status_code, phrase.lower().replace(" ", "_"), f"{request.method} {request.url.path}: {phrase}"
        )
        return problem.response(error.headers)
    return problem_of(error).response()


HANDLERS: dict[type[Exception], ExceptionHandler] = dict.fromkeys(
    (PdError, RequestRefused, ClientDisconnect, HTTPException, Exception), _on_failure
)
"""For Starlette: every failure before the first byte of an answer."""
